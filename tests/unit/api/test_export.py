"""Rollouts that leave a run as a data set: what is in the rows, what comes back from them, and what is left out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rftstream.api.run import Run
from rftstream.config import loader
from rftstream.contracts import codec
from rftstream.contracts.arrays import Array
from rftstream.contracts.assistant import ToolCall
from rftstream.contracts.records import NewRecord, Record
from rftstream.contracts.rollouts import Rollout, RolloutStatus, Segment, Turn, VersionSpan
from rftstream.contracts.tasks import ChatMessage, Problem, RolloutIds, Sampling
from rftstream.contracts.verdicts import PEOPLE, Verdict, VerifiedRollout
from rftstream.contracts.versions import StepRecord
from rftstream.data.demonstrations.rows import DemonstrationColumns
from rftstream.errors import ConfigError
from rftstream.launch.start import create
from rftstream.queries.audits.audit import audit
from rftstream.queries.datasets import writing
from rftstream.queries.datasets.choosing import export_again
from rftstream.queries.datasets.forms import FORMS, pair_of
from rftstream.queries.datasets.writing import Chosen
from rftstream.queries.traces.lineage import parse_target
from rftstream.queries.traces.trace import trace
from rftstream.runs.folder import OpenRun, RunFolder, create_log
from rftstream.runs.making.create import write_config
from rftstream.runs.notes import RunNotes
from rftstream.runs.writes.requests import say
from rftstream.service.control_view import read_control
from rftstream.service.role import Log
from rftstream.testing import Simulation
from rftstream.transport.embedded.transport import EmbeddedTransport
from tests.commands import call, called

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def verified(*turns: Turn, reward: float | None = 1.0, sibling: int = 0) -> VerifiedRollout:
    """A rollout with these turns, each of whose sampled tokens are 1, 2, ... with a logprob of -0.5."""
    sampled = sum(turn.num_tokens for turn in turns)
    ids = RolloutIds.of("t/0/0/0", taskset="t", sibling=sibling, group_size=2)
    segment = Segment(
        token_ids=Array.of(range(sampled + 1), "int32"),
        behavior_logprobs=Array.of([-0.5] * (sampled + 1), "float32"),
        loss_mask=Array.of([0] + [1] * sampled, "uint8"),
        versions=(VersionSpan(start=1, count=sampled, trainer_epoch=1, version=3),),
    )
    problem = Problem(
        messages=(ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Look!")),
        tools=(TOOL,),
    )
    rollout = Rollout(
        ids=ids,
        status=RolloutStatus.completed,
        problem=problem,
        turns=turns,
        segments=(segment,),
        num_tokens=sampled,
        sampling=Sampling(),
    )
    verdict = None if reward is None else Verdict(reward=reward, scorer="exact", scorer_version="2", parts={"a": 1.0})
    reason: Any = "timeout" if verdict is None else None
    return VerifiedRollout(ids=ids, rollout=rollout, verdict=verdict, reason=reason)


@pytest.fixture
def agent() -> VerifiedRollout:
    call = ToolCall(id="c1", name="look", arguments={"at": "é"}, text=CALL)
    first = f"<think>\nhm\n</think>\n\nI look.{CALL}"
    return verified(
        Turn(role="assistant", content=first, reasoning="hm", tool_calls=(call,), num_tokens=3),
        Turn(role="tool", content="a tree"),
        Turn(role="assistant", content="A tree.", num_tokens=2),
    )


def row_of(form: str, of: VerifiedRollout) -> dict[str, Any]:
    assert of.rollout is not None
    found: dict[str, Any] = json.loads(json.dumps(FORMS[form](of, of.rollout)))
    return found


def test_a_chat_names_its_calls_and_comes_back_as_a_demonstration(agent: VerifiedRollout) -> None:
    row = row_of("sft", agent)
    arguments = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}
    assert row["messages"][2:] == [
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nI look.", "tool_calls": [arguments]},
        {"role": "tool", "content": "a tree", "tool_call_id": "c1"},
        {"role": "assistant", "content": "A tree."},
    ]
    assert (row["rollout_id"], row["versions"], row["reward"], row["scorer"]) == ("t/0/0/0/0", [3], 1.0, "exact 2")
    read = DemonstrationColumns({}, system=None, source="x").demonstration(row, "row 1")
    assert [message.role for message in read.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert read.messages[2].tool_calls == (arguments,)
    assert read.info["rollout_id"] == "t/0/0/0/0"


def test_openai_gets_arguments_as_texts_and_no_reasoning(agent: VerifiedRollout) -> None:
    said = row_of("openai", agent)["messages"][2]
    assert said["content"] == "I look."
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"at": "é"}


def test_a_trajectory_has_every_sampled_token_once_and_comes_back(agent: VerifiedRollout) -> None:
    row = row_of("atif", agent)
    steps = row["steps"]
    assert [step["source"] for step in steps] == ["system", "user", "agent", "agent"]
    assert [step["step_id"] for step in steps] == [1, 2, 3, 4]
    assert steps[2]["reasoning_content"] == "hm"
    assert steps[2]["observation"]["results"] == [{"source_call_id": "c1", "content": "a tree"}]
    tokens = [token for step in steps[2:] for token in step["metrics"]["completion_token_ids"]]
    assert tokens == [1, 2, 3, 4, 5]
    assert row["agent"]["tool_definitions"] == [TOOL]
    read = DemonstrationColumns({}, system=None, source="x").demonstration(row, "row 1")
    again = DemonstrationColumns({}, system=None, source="x").demonstration(row_of("sft", agent), "row 1")
    assert read.messages == again.messages


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"schema_version": "ATIF-v1.7", "steps": "none"}, "steps are a text"),
        ({"schema_version": "ATIF-v1.7", "steps": [{"source": "user", "message": "x"}]}, "a turn of the assistant"),
    ],
)
def test_what_is_no_trajectory(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DemonstrationColumns({}, system=None, source="x").demonstration(row, "row 1")


def test_a_pair_is_two_different_answers() -> None:
    good = verified(Turn(role="assistant", content="yes", num_tokens=1), reward=1.0)
    bad = verified(Turn(role="assistant", content="no", num_tokens=1), reward=0.0, sibling=1)
    row = pair_of(good, bad)
    assert row is not None
    assert (row["chosen"], row["rejected"]) == (
        [{"role": "assistant", "content": "yes"}],
        [{"role": "assistant", "content": "no"}],
    )
    assert (row["chosen_reward"], row["rejected_rollout_id"]) == (1.0, "t/0/0/0/1")
    assert pair_of(good, good) is None
    assert pair_of(good, replace(bad, rollout=None)) is None


def test_the_best_and_the_extremes_of_groups() -> None:
    nan = float("nan")
    chosen = Chosen(
        sequences_N=np.asarray([7, 7, 7, 8, 8, 9]),
        offsets_N=np.asarray([0, 1, 2, 3, 4, 5]),
        rewards_N=np.asarray([0.5, nan, 1.0, 0.2, 0.1, 1.0]),
    )
    assert chosen.best(1).offsets_N.tolist() == [2, 3, 5]
    assert chosen.best(2).offsets_N.tolist() == [2, 0, 3, 4, 5]
    assert chosen.extremes(0.0).offsets_N.tolist() == [2, 0, 3, 4]
    assert chosen.extremes(0.3).offsets_N.tolist() == [2, 0]


# --------------------------------------------------------------------------------------------- a whole run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    config = loader.from_dict(
        {
            "run": {"name": "demo", "steps": 4},
            "model": {"path": "fake"},
            "feeder": {"groups_per_batch": 4, "group_size": 4, "max_staleness": 1},
            "explorer": {"policy": "fake"},
            "trainer": {"backend": "fake"},
            "policies": {"fake": {"fail_share": 0.1}},
            "transport": {"partitions": 4},
            "tasksets": {"sums": {"source": "arithmetic"}},
        }
    )
    simulation = Simulation(config, folder=tmp_path_factory.mktemp("export"), seed=5)
    write_config(simulation.config, simulation.folder)  # its index lies there, not in a cache that other tests share
    simulation.run()
    with Run(OpenRun(simulation.folder, simulation.config, simulation.transport("api"))) as opened:
        yield opened


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.glob("data/*.jsonl")) for line in file.read_text().splitlines()]


def test_every_good_rollout_is_there_once_and_the_same_again(run: Run, tmp_path: Path) -> None:
    table = run.rollouts(reward_from=0.5)
    first, again = (table.export(tmp_path / name, "atif") for name in ("a", "b"))
    assert first.digest == again.digest
    rows = rows_in(tmp_path / "a")
    scored = {one.rollout_id for one in table}
    assert {row["trajectory_id"] for row in rows} <= scored
    assert len(rows) + first.num_unreadable == len(scored)
    assert all(row["extra"]["reward"] >= 0.5 for row in rows)


def test_what_was_exported_is_on_the_log_and_can_be_found_and_taken_again(run: Run, tmp_path: Path) -> None:
    opened = run._index.run
    exported = run.rollouts(reward_from=0.5).head(20).export(tmp_path / "a", "atif", best=2)
    recorded = read_control(opened.transport).exports[-1]
    assert (recorded.digest, recorded.form, recorded.folder) == (exported.digest, "atif", str(tmp_path / "a"))
    assert recorded.filters == {"reward_from": 0.5, "best": 2, "limit": 20}
    (tmp_path / "a").rename(tmp_path / "moved")
    for name in (exported.digest, exported.digest[:20], str(tmp_path / "a"), str(tmp_path / "moved")):
        assert trace(opened, name).to_json()["facts"]["folder"] == str(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"got .*moved', expected a rollout"):
        parse_target(str(tmp_path / "moved"))  # which pages ask, too, with any text of a browser
    again = export_again(run._index, exported.digest, tmp_path / "again")
    assert (again.digest, again.num_rows) == (exported.digest, exported.num_rows)
    assert audit(opened.transport).balanced
    with pytest.raises(ConfigError, match=r"no data set of this digest or folder left the run demo"):
        trace(opened, "sha256:000000")
    changed = replace(recorded, export_id="x", digest="sha256:" + "0" * 64)
    say(opened, [changed])
    with pytest.raises(ConfigError, match=r"the same conditions give .* expected .* have changed since"):
        export_again(run._index, changed.digest, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_later_rollouts_do_not_change_what_is_taken_again(run: Run, tmp_path: Path) -> None:
    whole = run.rollouts().export(tmp_path / "a", "atif")
    first = read_control(run._index.run.transport).exports[-1]
    half = replace(first, export_id="half", through=tuple(end // 2 for end in first.through), digest="sha256:1")
    say(run._index.run, [half])
    with pytest.raises(ConfigError) as refused:
        export_again(run._index, "sha256:1", tmp_path / "b")
    assert 0 < int(str(refused.value).split("give ")[1].split(" rows")[0].replace(",", "")) < whole.num_rows


def test_a_full_disk_names_the_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")

    monkeypatch.setattr(writing._RowWriter, "add", full)
    with pytest.raises(OSError, match="No space left") as refused:
        run.rollouts().export(tmp_path / "full")
    assert refused.value.filename == str(tmp_path / "full")
    assert not list(tmp_path.iterdir())


def test_what_teaches_the_same_is_written_once(run: Run, tmp_path: Path) -> None:
    export = run.rollouts().export(tmp_path / "chats")
    taught = [json.dumps(row["messages"]) for row in rows_in(tmp_path / "chats")]
    assert len(set(taught)) == len(taught) == export.num_rows
    assert export.num_rows + export.num_alike + export.num_unreadable == run.rollouts().count()


def test_a_pair_is_of_one_group_and_the_better_is_chosen(run: Run, tmp_path: Path) -> None:
    run.rollouts().export(tmp_path / "pairs", "pairs")
    rows = rows_in(tmp_path / "pairs")
    assert rows
    for row in rows:
        assert row["chosen_reward"] > row["rejected_reward"]
        assert row["chosen_rollout_id"].rpartition("/")[0] == row["rejected_rollout_id"].rpartition("/")[0]


def test_parquet_has_the_tokens_of_the_log(run: Run, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    run.rollouts(status="completed").export(tmp_path / "all", "parquet")
    rows = pq.read_table(tmp_path / "all" / "data" / "train-00000.parquet").to_pylist()
    for row in rows[:5]:
        assert row["token_ids"][0] == [one.token_id for one in run.rollout(row["rollout_id"]).tokens()]


def test_only_what_has_a_tag(run: Run, tmp_path: Path) -> None:
    one = next(one for one in run.rollouts(status="completed") if one.reward is not None)
    run._index.run.folder.config_file.touch()
    RunNotes(run._index.run.folder).add(one.rollout_id, "", ["keep"], by="ann")
    run.rollouts().export(tmp_path / "kept", "atif", tag="keep")
    assert [row["trajectory_id"] for row in rows_in(tmp_path / "kept")] == [one.rollout_id]


@pytest.mark.parametrize(
    ("filters", "options", "said"),
    [
        ({"reward_from": 9.0}, {}, "no rollout meets these conditions"),
        ({"taskset": "smus"}, {}, "unknown 'smus'; .*did you mean 'sums'"),
        ({}, {"form": "csv"}, "got 'csv'; known: atif"),
        ({}, {"best": 0}, "rollouts.best: got 0"),
        ({}, {"form": "pairs", "margin": 5.0}, "no rollout meets these conditions"),
        ({}, {"tag": "nobody"}, "no rollout meets these conditions"),
    ],
)
def test_what_cannot_be_written_says_why_and_leaves_nothing(
    run: Run, tmp_path: Path, filters: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        run.rollouts(**filters).export(tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_not_written_over(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        run.rollouts().export(tmp_path / "mine")


# --------------------------------------------------------------------------------------------- a run in a folder


def scored_anew(record: Record, since: float, judged: float) -> bytes:
    """The record's body; verdicts and steps from a time on have another version of the reward, or people's verdicts."""
    if record.topic == "verified" and record.timestamp_s >= judged:
        since = judged
    match codec.from_record(record) if record.topic in ("verified", "steps") and record.timestamp_s >= since else None:
        case VerifiedRollout(verdict=Verdict() as verdict) as message:
            by = {"scorer": PEOPLE} if record.timestamp_s >= judged else {"scorer_version": "mended"}
            return codec.encode(replace(message, verdict=replace(verdict, **by)))  # type: ignore[arg-type]
        case StepRecord() as step:
            return codec.encode(replace(step, scorers={name: f"{one} mended" for name, one in step.scorers.items()}))
    return record.value


def on_disk(run: Run, folder: Path, since: float = float("inf"), judged: float = float("inf")) -> Path:
    """The run's log in a run folder. `since`: the time at which its reward was changed; `judged`: from which on people
    alone gave the verdicts."""
    opened, made = run._index.run, RunFolder(folder)
    made.path.mkdir(parents=True)
    transport = EmbeddedTransport(made.log)
    create_log(transport, opened.config)
    producer = transport.producer("copy")
    producer.start()
    for topic in set(opened.transport.admin.topics()) - {"summaries"}:
        records = list(Log(opened.transport).read(topic))
        records = [one for one in records if one.header("contract") != b"dataset_exported"]
        producer.commit(
            [
                NewRecord(one.topic, one.partition, one.key, scored_anew(one, since, judged), one.headers)
                for one in records
            ]
        )
    producer.close()
    transport.close()
    made.config_file.write_text(loader.to_toml(opened.config))
    return made.path


def test_rewards_of_two_versions_are_told_apart(run: Run, tmp_path: Path) -> None:
    times = sorted(one.verified_at for one in run.rollouts() if one.verified_at is not None)
    changed = on_disk(run, tmp_path / "changed", since=times[len(times) // 2])
    both = called("export", changed, tmp_path / "both", "--as", "atif")
    assert both["is_mixed"] and len(both["scored_by"]) == 2
    assert [Path(one).name for one in both["files"]] == ["train-00000.jsonl"]
    old = next(name for name in both["scored_by"] if not name.endswith(" mended"))
    for wanted, kept in {"newest": "mended", "mend": "mended", old.split()[1][:3]: old.split()[1]}.items():
        said = call("export", changed, tmp_path / wanted, "--as", "atif", "--scorer", wanted).stdout
        scorers = [row["extra"]["scorer"] for row in rows_in(tmp_path / wanted)]
        assert {name.split()[1] for name in scorers} == {kept}, said
        assert f"scored: {len(scorers):,} by " in said and "changed" not in said.split("scored:")[1]
    judged = on_disk(run, tmp_path / "judged", since=times[len(times) // 2], judged=times[-3])
    call("export", judged, tmp_path / "kept", "--as", "atif", "--scorer", "newest")
    assert {row["extra"]["scorer"].split()[0] for row in rows_in(tmp_path / "kept")} == {old.split()[0], PEOPLE}
    alone = called("export", on_disk(run, tmp_path / "alone", judged=times[-3]), tmp_path / "one", "--as", "atif")
    assert (len(alone["scored_by"]), alone["is_mixed"]) == (2, False), "people are no version of the reward"
    assert "do not compare" in (tmp_path / "both" / "README.md").read_text()
    (line,) = called("status", changed)["reward_changes"]
    assert re.match(rf"sums: {re.escape(old)} -> .* mended since version [1-3];", line)
    assert called("status", on_disk(run, tmp_path / "same"))["reward_changes"] == []
    refused = call("export", changed, tmp_path / "none", "--scorer", "zz")
    assert (refused.exit_code, "expected newest or the beginning of one of:" in refused.stderr) == (2, True)


SECOND = """
[run]
name = "second"
[model]
path = "fake"
[experts]
source = "run:demo"
options = { reward_from = 0.5, best = 1 }
[trainer]
algorithm = "sft"
backend = "fake"
"""


@pytest.mark.slow
def test_the_rollouts_of_a_run_are_demonstrations_of_the_next(run: Run, tmp_path: Path) -> None:
    first = on_disk(run, tmp_path / "runs" / "demo")
    file = tmp_path / "second.toml"
    file.write_text(SECOND)
    checked = called("check", file)
    assert not called("status", first)["exports"], "a check takes nothing"
    made, _ = create(loader.load([file], env={}))
    (taken,) = called("status", first)["exports"]
    assert taken["filters"] == {"reward_from": 0.5, "best": 1}
    assert Path(taken["folder"]).parent == made.demonstrations
    assert taken["num_rows"] == checked["experts"]["new"]
    there = call("inspect", made.path, "experts", "--json").stdout.splitlines()
    assert len(there) == taken["num_rows"]
    assert taken["digest"] in call("trace", first, taken["folder"]).stdout
    again = called("export", first, tmp_path / "again", "--again", taken["digest"][:20])
    assert again["digest"] == taken["digest"]
    assert "exported" in call("status", first).stdout
    before = called("status", first)["exports"]
    load = ("experts", "load", made.path, "--from", f"run:{first}")
    called(*load, "--dry-run")
    assert called("status", first)["exports"] == before
    called(*load)
    assert len(called("status", first)["exports"]) == len(before) + 1, "a dry run keeps nothing, so these are taken now"
    refused = call("export", first, tmp_path / "other", "--again", taken["digest"], "--best", "2")
    assert (refused.exit_code, "got --again and conditions (best)" in refused.stderr) == (2, True)
    bad = {
        "source=run:nowhere": "run:nowhere: no such run",
        "options.form=parquet": "got 'parquet'",
        "options.best=0": "experts.options.best: got 0",
        "options.reward_from=9": "no rollout meets",
    }
    for given, said in bad.items():
        wrong = call("check", file, "--set", f"experts.{given}")
        assert (wrong.exit_code, said in wrong.output) == (2, True), wrong.output
