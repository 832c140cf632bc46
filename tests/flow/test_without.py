"""Recorded batches, trained again without some of their rollouts: batches before are as they were, and all balances."""

from __future__ import annotations

from pathlib import Path

import pytest

from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.records import NewRecord
from rftstream.errors import ConfigError
from rftstream.replay.branch import BatchImport, measure
from rftstream.replay.recorded import read_recorded
from rftstream.replay.without import LeftOut, find_left_out
from rftstream.runs.making import imported
from rftstream.service.role import Log
from rftstream.testing import MemoryRun, Simulation
from rftstream.testing.faults import Kill
from rftstream.weights.checkpoints import CheckpointStore
from tests.flow.disturbed import FaultAt
from tests.flow.test_branch import digests, make_config, manifest, second, train

pytestmark = pytest.mark.law("conservation")

STEPS = 6


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    config = make_config(feeder__group_size=3, buffer__min_siblings=2)
    simulation = Simulation(config, folder=tmp_path_factory.mktemp("first"))
    simulation.run()
    return simulation


def in_batch(run: MemoryRun, number: int) -> dict[str, list[str]]:
    """Group -> rollouts."""
    found: dict[str, list[str]] = {}
    for one in run.messages("batches"):
        if isinstance(one, Experience) and one.batch_sequence == number:
            found.setdefault(one.ids.group_id, []).append(one.ids.rollout_id)
    return found


def copy(source: MemoryRun, target: MemoryRun, left_out: LeftOut) -> None:
    BatchImport(
        source.transport(), target.transport("import"), "second", lambda text: None,
        extent=measure(source.transport(), 0, STEPS), recorded=read_recorded(Log(source.transport())),
        checkpoints=CheckpointStore(target.store), fill=lambda folder: None, rewards_kept=10, left_out=left_out,
    ).run(lambda: manifest(target))  # fmt: skip


def left_out_of(first: Simulation, *names: str) -> LeftOut:
    return find_left_out(Log(first.transport()), names, last=STEPS, min_siblings=2)


@pytest.mark.slow
def test_a_rollout_and_a_group_are_left_out(first: Simulation, tmp_path: Path) -> None:
    third, fifth = in_batch(first, 2), in_batch(first, 4)
    (some, rollouts), (other, others) = list(third.items())[:2]
    whole = next(iter(fifth))
    left_out = left_out_of(first, rollouts[1], *others[:2], whole)
    assert left_out.groups == {other, whole}, "of the other group one rollout would be left"
    assert left_out.rollouts == {rollouts[1]}
    assert {batch: dict(lost) for batch, lost in left_out.batches.items()} == {
        2: {"rollouts": 3, "groups": 1}, 4: {"rollouts": 3, "groups": 1},
    }  # fmt: skip
    target = second(tmp_path, first)
    copy(first, target, left_out)
    assert in_batch(target, 2) == {
        group: [one for one in members if one != rollouts[1]] for group, members in third.items() if group != other
    }
    assert in_batch(target, 3) == in_batch(first, 3)
    finished = train(target)
    assert (finished.reason, finished.name.version) == ("steps", STEPS)
    mine, theirs = digests(target), digests(first)
    assert [mine[version] == theirs[version] for version in range(1, STEPS + 1)] == [True, True] + [False] * 4
    report = target.audit()
    assert report.fine, report.to_text()
    assert (report.groups.trained, report.groups.filtered) == (4 * STEPS - 2, 2)
    assert (report.rollouts.trained, report.rollouts.filtered) == (12 * STEPS - 7, 7)
    totals = {one.batch_sequence: one.total_groups for one in target.messages("batches")
              if isinstance(one, BatchManifest)}  # fmt: skip
    assert [totals[number] for number in range(STEPS)] == [4, 8, 11, 15, 18, 22]
    del some


@pytest.mark.slow
@pytest.mark.law("lost", "twice")
@pytest.mark.parametrize("every", [1, 3])
def test_killed_at_any_commit_it_goes_on(
    first: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    monkeypatch.setattr(imported, "MAX_RECORDS", 7)
    rollouts = next(iter(in_batch(first, 2).values()))
    left_out = left_out_of(first, rollouts[0])
    whole, killed = second(tmp_path / "whole", first), second(tmp_path / "killed", first)
    copy(first, whole, left_out)
    killed.log.fault = FaultAt("after_commit", Kill, "import", every=every + 1)
    for _ in range(1000):
        try:
            copy(first, killed, left_out)
        except Kill:
            continue
        break
    killed.log.fault = None
    for topic in ("outcomes", "batches"):
        assert [(one.key, one.value) for one in killed.records(topic)] == [
            (one.key, one.value) for one in whole.records(topic)
        ]


def test_what_cannot_be_left_out(first: Simulation) -> None:
    with pytest.raises(ConfigError, match="sums/9/9/0/1: in none of the batches below version 6"):
        left_out_of(first, "sums/9/9/0/1")
    of_problem = left_out_of(first, "sums/1")
    assert of_problem.rollouts | of_problem.groups
    assert {name.split("/")[2] for name in of_problem.groups} == {"1"}
    with pytest.raises(ConfigError, match=r"nothing would be left of batch 1, .* or make the batches anew"):
        left_out_of(first, *in_batch(first, 1))
    mine, elsewhere = next(iter(in_batch(first, 1).values()))[0], "sums/9/9/0/1"
    log = Log(first.transport())
    assert find_left_out(log, [], last=STEPS, min_siblings=2, also={mine, elsewhere}).rollouts == {mine}
    parts = [{one for some in in_batch(first, batch).values() for one in some} for batch in (0, 1)]
    early = parts[0] | parts[1]
    with pytest.raises(ConfigError, match="nothing would be left of batch 0 and 1 more, up to 1, "):
        find_left_out(log, [], last=STEPS, min_siblings=2, also=early)
    assert [*find_left_out(log, [], last=STEPS, min_siblings=2, also={mine, *parts[0]}, first=1).batches] == [1]
    for also, begin in (({elsewhere}, 0), (early, 2)):
        with pytest.raises(ConfigError, match="hold nothing that is to be left out"):
            find_left_out(log, [], last=STEPS, min_siblings=2, also=also, first=begin)


def test_headers_of_somebody_else_stop_nobody(tmp_path: Path) -> None:
    run = MemoryRun(make_config(), folder=tmp_path)
    for number in (b"\xffone", b"-1", b"", b"9" * 30):
        headers = (("batch_sequence", number), ("group_id", b"\xff"), ("rollout_id", b"\xff"), ("writer_epoch", b"?"))
        run.put_raw(NewRecord("batches", 0, b"?", b"?", headers))
    with pytest.raises(ConfigError, match="mine"):
        find_left_out(Log(run.transport()), ["mine"], last=STEPS, min_siblings=2)
