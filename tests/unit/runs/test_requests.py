"""What a user asks of a run by its log."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from rftstream.commands import cli
from rftstream.config.loader import from_dict, to_toml
from rftstream.contracts.control import DesiredState, Request, RunFinished
from rftstream.contracts.dead import DeadDropped
from rftstream.contracts.versions import VersionName
from rftstream.runs.folder import RunFolder, create_log, open_run, open_transport
from rftstream.runs.observer import Observer
from rftstream.runs.writes.requests import NAMES_A_RECORD, ask_retries, drop_dead
from rftstream.service.control_view import read_control
from rftstream.service.role import Log
from rftstream.testing.played import played_records

CONFIG = {
    "run": {"name": "asked", "steps": 1},
    "model": {"path": "fake"},
    "tasksets": {"sums": {"source": "arithmetic"}},
    "transport": {"partitions": 2},
}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "asked")
    folder.path.mkdir()
    config = from_dict(CONFIG)
    folder.config_file.write_text(to_toml(config))
    transport = open_transport(config, folder, create=True)
    create_log(transport, config)
    transport.close()
    return folder


def ask(folder: RunFolder, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, [arguments[0], str(folder.path), *arguments[1:]])
    return result.exit_code, result.output


def state_of(folder: RunFolder) -> DesiredState | None:
    run = open_run(folder.path)
    try:
        state = read_control(run.transport).state
        return state.state if state else None
    finally:
        run.transport.close()


def test_pause_and_unpause(folder: RunFolder) -> None:
    assert ask(folder, "pause", "--reason", "maintenance")[0] == 0
    assert state_of(folder) is DesiredState.paused
    assert "it was so already" in ask(folder, "pause")[1]
    assert ask(folder, "unpause") == (0, "asked: running again\n")
    assert state_of(folder) is DesiredState.running


def test_a_drain_is_not_taken_back(folder: RunFolder) -> None:
    assert ask(folder, "drain")[0] == 0
    code, said = ask(folder, "unpause")
    assert code == 2
    assert "is draining" in said
    assert state_of(folder) is DesiredState.draining


@pytest.mark.law("bounded")
@pytest.mark.parametrize("count", [1, NAMES_A_RECORD - 1, NAMES_A_RECORD, NAMES_A_RECORD + 1, 3 * NAMES_A_RECORD])
def test_any_number_of_groups_is_put_back_or_dropped_at_once(folder: RunFolder, count: int) -> None:
    """No record grows with their number, and all of them are asked for in one transaction."""
    groups = [f"sums/0/{number}/0" for number in range(count)]
    run = open_run(folder.path)
    try:
        ask_retries(run, {group: [None, "rollouts[0]@1"] for group in groups}, within_s=60.0)
        drop_dead(run, groups, groups[: count // 2], reason="old")
        messages = [received.message for received in Log(run.transport).messages("control")]
    finally:
        run.transport.close()
    asked = [one for one in messages if isinstance(one, Request)]
    dropped = [one for one in messages if isinstance(one, DeadDropped)]
    assert [one.request_id for one in asked] == [f"retry/{group}" for group in groups]
    assert [name for one in dropped for name in one.letters] == groups
    assert [name for one in dropped for name in one.groups] == groups[: count // 2]
    assert len(dropped) == -(-count // NAMES_A_RECORD)


def test_what_cannot_be_decoded_takes_nothing_back(folder: RunFolder) -> None:
    """As little as for the roles, which pass it over."""
    run = open_run(folder.path)
    finished = RunFinished(reason="steps", name=VersionName(trainer_epoch=1, version=1), finished_at=0.0)
    producer = run.transport.producer("trainer")
    producer.start()
    records = played_records(run.transport, "asked", [("control", 0, finished)])
    producer.commit(records)
    producer.commit([msgspec.structs.replace(records[-1], value=b"\xc1")])
    observer = Observer(run.transport)
    observer.catch_up()
    assert observer.control.finished == read_control(run.transport).finished == finished
    producer.commit([msgspec.structs.replace(records[-1], value=None)])
    observer.catch_up()
    assert observer.control.finished is read_control(run.transport).finished is None
    observer.close()
    run.transport.close()


def test_nothing_is_asked_of_a_finished_run(folder: RunFolder) -> None:
    run = open_run(folder.path)
    finished = RunFinished(reason="steps", name=VersionName(trainer_epoch=1, version=1), finished_at=0.0)
    producer = run.transport.producer("trainer")
    producer.start()
    producer.commit(played_records(run.transport, run.run_id, [("control", 0, finished)]))
    run.transport.close()
    code, said = ask(folder, "pause")
    assert code == 2
    assert "is finished (steps)" in said
