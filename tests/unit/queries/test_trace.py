"""`rftstream trace`: the chain of each kind of thing, twins, letters, and names that are wrong."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from rftstream.config import loader
from rftstream.contracts.assistant import ToolCall
from rftstream.contracts.batches import LossKind
from rftstream.contracts.demonstrations import Demonstration
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.records import NewRecord, Record, TopicPartition
from rftstream.contracts.rollouts import AgentCall, Posted, Turn
from rftstream.contracts.tasks import ChatMessage, RolloutIds
from rftstream.contracts.versions import EvalResult, VersionName, WeightsAnnounced, WeightsKind
from rftstream.queries.traces.lineage import Headers, Node
from rftstream.queries.traces.trace import trace
from rftstream.runs.folder import OpenRun, RunFolder, create_log
from rftstream.service.dead_letters import dead_letter
from rftstream.service.role import Log
from rftstream.transport.embedded.transport import EmbeddedTransport
from rftstream.weights.stores.store import ObjectStore
from tests import commands
from tests.unit.synthetic import SyntheticLog, experience, piece, rollout, segment

CONFIG = {
    "run": {"name": "demo", "steps": 4},
    "model": {"path": "fake"},
    "tasksets": {"sums": {"source": "arithmetic"}},
    "transport": {"partitions": 2},
}
DIGEST = "sha256:" + "0" * 64


class Scene(SyntheticLog):
    """Batch 0 of groups 0 and 1 is trained, batch 1 of group 2 is not, group 3 is on its way, group 4 is dead."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        config = loader.from_dict(CONFIG)
        path.mkdir()
        transport = EmbeddedTransport(self.folder.log)
        create_log(transport, config)
        super().__init__(transport)
        self.run = OpenRun(self.folder, config, transport)
        self.announce(0)
        self.step(0, resumed=True)
        self.flow(0, 1, 2, 4)
        self.admit(3)
        self.batch(0, [0, 1])
        self.step(1, metrics={"reward": 0.5}, staleness=((412, 96), (3, 1)))
        self.announce(1)
        self.put("evals", EvalResult(
            evaluation="held", name=VersionName(trainer_epoch=1, version=1), num_tasks=1, num_samples=1,
            num_unscored=0, metrics={"mean": 0.75, "seconds": 1.0}, generations=None,
        ))  # fmt: skip
        self.batch(1, [2])
        self.decide(4, GroupResult.dead)
        self.folder.config_file.write_text(loader.to_toml(config))

    def announce(self, version: int, epoch: int = 1) -> None:
        name = VersionName(trainer_epoch=epoch, version=version)
        self.put("weights", WeightsAnnounced(
            model="fake", name=name, kind=WeightsKind.full, parent=None, num_bytes=354, digest=DIGEST,
            object=f"versions/{epoch:06d}-{version:08d}.safetensors", weights_digest=DIGEST, dtype="float32",
        ))  # fmt: skip

    def trace(self, text: str) -> Node:
        return trace(self.run, text)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "demo")
    yield scene
    scene.transport.close()


def call(*arguments: object) -> Result:
    return commands.call("trace", *arguments)


def all_of(node: Node, kind: str) -> list[Node]:
    return [*([node] if node.kind == kind else []), *(one for child in node.children for one in all_of(child, kind))]


def places(node: Node) -> list[str]:
    return [str(one.record) for one in nodes(node) if one.record is not None]


def nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from nodes(child)


@pytest.mark.law("lineage")
def test_a_rollout_from_its_task_to_the_evaluation(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[str] = Counter()
    read = Headers.record_at

    def counted(headers: Headers, place: TopicPartition, offset: int) -> Record | None:
        reads[f"{place}@{offset}"] += 1
        return read(headers, place, offset)

    monkeypatch.setattr(Headers, "record_at", counted)
    found = scene.trace("sums/0/1/0/1")
    assert reads["rollouts[1]@1"] == 1, "its body is read once, whatever is said of it"
    assert places(found) == [
        "tasks[1]@1", "rollouts[1]@1", "weights[0]@0", "verified[1]@1", "outcomes[0]@1", "batches[0]@3", "steps[0]@1",
        "weights[0]@1", "evals[0]@0",
    ]  # fmt: skip
    (verified,) = all_of(found, "verified")
    assert (verified.facts["reward"], verified.facts["why"]) == (1.0, "as it should be")
    (stamp,) = all_of(found, "by version")
    assert (stamp.name, stamp.facts["tokens"]) == ("1/0", 2)
    (experience,) = all_of(found, "experience")
    assert (experience.name, experience.facts["position"]) == ("sums/0/1/0/1", 3)
    assert all_of(found, "evaluation")[0].facts == {"mean": 0.75}
    assert all_of(found, "weights")[-1].facts["is"] == "deleted from the store"
    assert not any(one.twin for one in nodes(found))


@pytest.mark.law("lineage")
def test_who_sampled_what_of_it_before_it_was_finished(scene: Scene) -> None:
    one, other = scene.siblings(3)
    saved = [("a", 5), ("a", 7), ("b", 11), ("a", 2)]
    for number, (explorer, count) in enumerate(saved):
        scene.put("partials", piece(one, number, explorer=explorer, num_tokens=count), partition=1)
        scene.put("partials", piece(other, number), partition=1)
    scene.put_raw(NewRecord("partials", 1, b"sums/0/3/0/1#0", None))
    found = scene.trace("sums/0/3/0/0")
    assert [(node.name, node.facts, str(node.record)) for node in all_of(found, "saved")] == [
        ("a", {"pieces": "0 to 1", "tokens": 12}, "partials[1]@2"),
        ("b", {"pieces": 2, "tokens": 11}, "partials[1]@4"),
        ("a", {"pieces": 3, "tokens": 2}, "partials[1]@6"),
    ]
    assert [one.kind for one in found.children][:4] == ["task", "saved", "saved", "saved"]
    assert scene.trace("partials[1]@4").name == "sums/0/3/0/0"
    shown = call(scene.folder.path, "sums/0/3/0/0")
    assert "pieces 0 to 1" in shown.output


def test_only_one_partition_of_each_topic_is_looked_at(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Headers] = []
    init = Headers.__init__
    monkeypatch.setattr(Headers, "__init__", lambda self, *given: (init(self, *given), made.append(self))[0])
    scene.trace("sums/0/1/0/1")
    (headers,) = made
    assert {place for place in headers.searched if place.startswith(("tasks", "rollouts", "verified"))} == {
        "tasks[1]", "rollouts[1]", "verified[1]",
    }  # fmt: skip


def test_the_batch_is_read_from_where_the_one_before_ended(scene: Scene) -> None:
    scene.trained[2] = 3
    scene.step(2)
    assert places(scene.trace("batch:1")) == [
        "batches[0]@7", "outcomes[0]@2", "batches[0]@5", "batches[0]@6", "steps[0]@2"
    ]  # fmt: skip


def test_a_group_on_its_way_and_one_that_died(scene: Scene) -> None:
    pending = scene.trace("sums/0/3/0")
    assert [one.name for one in all_of(pending, "rollout")] == ["sums/0/3/0/0", "sums/0/3/0/1"]
    assert [one.facts["is"] for one in all_of(pending, "sampled")] == ["not yet", "not yet"]
    assert [one.facts["is"] for one in all_of(pending, "outcome")] == ["not yet"]
    dead = scene.trace("sums/0/4/0")
    assert [one.facts["is"] for one in all_of(dead, "outcome")] == ["dead"]
    assert not all_of(dead, "batch")


@pytest.mark.law("lineage")
def test_a_batch_and_the_version_that_it_made(scene: Scene) -> None:
    batch = scene.trace("batch:0")
    assert [one.name for one in all_of(batch, "group")] == ["sums/0/0/0", "sums/0/1/0"]
    assert len(all_of(batch, "experience")) == 4
    assert [one.facts["newest scorer"] for one in all_of(batch, "manifest")] == ["exact 1 of sums"]
    assert [one.name for one in all_of(batch, "step")] == ["1/1"]
    samples = all_of(batch, "sample")
    assert [one.name for one in samples] == ["sums/0/0/0/0", "sums/0/1/0/0", "sums/0/1/0/1"]
    assert {(one.facts["reward"], one.facts["prompt"], one.facts["said"]) for one in samples} == {
        (1.0, "1+2=", "\x03\x04")
    }
    for index in range(4):
        said = (
            ChatMessage(role="user", content=f"{index}+1="),
            ChatMessage(role="assistant", content=f"{index + 1}\n"),
        )
        scene.put("experts", Demonstration(demonstration_id=str(index), source="a.jsonl", messages=said, number=index),
                  partition=index % 2)  # fmt: skip
    ids = [RolloutIds.of(f"experts/0/{index}/0", taskset="experts", sequence=index) for index in (3, 1, 2)]
    scene.put("batches", *(
        dataclasses.replace(experience(one, 2, 0, i), expert=True, reward=None, loss_kind=LossKind.sft)
        for i, one in enumerate(ids)
    ))  # fmt: skip
    assert {
        (one.name, one.facts["prompt"], one.facts["shown"]) for one in all_of(scene.trace("batch:2"), "sample")
    } == {(f"experts/0/{index}/0/0", f"{index}+1=", f"{index + 1}↵") for index in (1, 2, 3)}
    version = scene.trace("v1")
    assert [one.name for one in all_of(version, "batch")] == ["batch:0"]
    for text in ("1/1", "version:1", "versions/000001-00000001.safetensors", "steps[0]@1", "weights[0]@1"):
        assert scene.trace(text) == version
    assert scene.trace("v0").children[0].facts["was"] == "resumed"
    assert all_of(scene.trace("batch:1"), "step")[0].facts["is"] == "not yet"


@pytest.mark.law("fencing", "lineage")
def test_versions_of_a_trainer_that_was_replaced(scene: Scene) -> None:
    scene.step(0, epoch=2, resumed=True)
    scene.step(1, epoch=2)
    first, second = all_of(scene.trace("v1"), "step")
    assert (first.name, first.facts["is"]) == ("1/1", "not in force any more")
    assert (second.name, second.facts["is"]) == ("2/1", None)
    assert [one.name for one in all_of(scene.trace("2/1"), "step")] == ["2/1"]


def test_records_stand_for_what_they_belong_to(scene: Scene) -> None:
    assert scene.trace("verified[1]@1") == scene.trace("sums/0/1/0/1")
    assert scene.trace("outcomes[0]@1") == scene.trace("sums/0/1/0")
    assert scene.trace("batches[0]@4") == scene.trace("batch:0")


@pytest.mark.law("twice")
def test_twins_are_shown_as_such(scene: Scene) -> None:
    scene.put("rollouts", rollout(scene.siblings(1)[1]))
    found = scene.trace("sums/0/1/0/1")
    assert [one.twin for one in all_of(found, "sampled")] == [False, True]
    assert "  TWIN  " in found.to_text()
    scene.decide(1, GroupResult.dead)
    assert [one.twin for one in all_of(scene.trace("sums/0/1/0"), "outcome")] == [False, True]


def test_letters_and_late_ones(scene: Scene) -> None:
    record = next(one for one in Log(scene.transport).read("rollouts") if str(one) == "rollouts[0]@1")
    letter = dead_letter(record, role="verifier", reason="timeout", detail="it\nhung", tries=3, now=0.0)
    scene.put("dead", letter.message)
    (found,) = all_of(scene.trace("sums/0/0/0/1"), "dead")
    assert (str(found.record), found.facts) == ("dead[0]@0", {"role": "verifier", "reason": "timeout", "why": "hung"})
    assert not all_of(scene.trace("sums/0/0/0/0"), "dead")
    assert scene.trace("dead[0]@0") == scene.trace("sums/0/0/0/1")
    scene.late(4, 1)
    assert len(all_of(scene.trace("sums/0/4/0/1"), "late outcome")) == 1
    assert not all_of(scene.trace("sums/0/4/0/0"), "late outcome")


def test_a_letter_by_its_id(scene: Scene) -> None:
    """As `dead list` prints it."""
    (record, *_) = Log(scene.transport).read("rollouts", start={TopicPartition("rollouts", 1): 0})
    ids = record.header("rollout_id")
    assert ids is not None
    node = scene.trace(f"verifier/rollouts/{record.partition}/{record.offset}")
    assert (node.kind, node.name) == ("rollout", ids.decode())


def test_a_traceback_is_one_line_of_the_tree_and_whole_in_the_json() -> None:
    node = Node(kind="verified", name="", facts={"unscorable": "error", "why": "Traceback:\n  here\nValueError: no\n"})
    assert node.line() == "verified  unscorable error, ValueError: no"
    assert node.to_json()["facts"]["why"].startswith("Traceback:")


def test_the_store_is_asked_for_each_version_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(ObjectStore, "exists", lambda store, name: asked.append(name) or True)
    assert len(all_of(scene.trace("sums/0/0/0"), "by version")) > 1
    assert len(asked) == len(set(asked)) > 0


def test_command(scene: Scene) -> None:
    result = call(scene.folder.path, "sums/0/1/0/1")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == "rollout sums/0/1/0/1"
    assert "\n  sampled  rollouts[1]@1 " in result.stdout
    shown: dict[str, Any] = json.loads(call(scene.folder.path, "sums/0/1/0/1", "--json").stdout)
    assert (shown["kind"], shown["name"]) == ("rollout", "sums/0/1/0/1")
    task = shown["children"][0]
    assert (task["topic"], task["partition"], task["offset"]) == ("tasks", 1, 1)
    assert task["facts"]["min_version"] == 0


def test_a_tree_for_terminals(scene: Scene) -> None:
    from rich.console import Console

    console = Console(width=200, record=True, file=(scene.folder.path / "shown").open("w"))
    with console.file:
        console.print(scene.trace("sums/0/1/0/1").to_tree())
        assert "├── sampled  rollouts[1]@1" in console.export_text()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sums/0/1/0/7", "the group sums/0/1/0 has the rollouts 0 to 1; did you mean sums/0/1/0/1?"),
        ("sums/0/11/0/0", "no such rollout in 4 records of outcomes, "),
        ("sums/0/11/0", "; the nearest is sums/0/1/0"),
        ("sum/0/1/0", "tasksets of this run: sums; the nearest is sums/0/1/0"),
        ("batch:9", "has batches batch:0 to batch:1"),
        ("v9", "has v0 to v1, of trainer epochs 1"),
        ("0/1", "did you mean 1/0?"),
        ("17", "a number alone may be batch:17 or v17"),
        ("nonsense", "expected a rollout (sums/0/17/0/3), a group"),
        ("sums/0/1", "trace: got 'sums/0/1', expected a rollout (sums/0/17/0/3), a group"),
        ("rollouts[9]@1", "no such partition"),
        ("rollouts[0]@99", "no record there; the partition ends at 6"),
        ("controll[0]@1", "no such partition"),
    ],
)
def test_names_that_are_wrong(scene: Scene, text: str, says: str) -> None:
    result = call(scene.folder.path, text)
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_misspelt_run(scene: Scene) -> None:
    result = call(scene.folder.path.with_name("demmo"), "v1")
    assert result.exit_code == 2
    assert f"no such file, expected a run folder or a run file; did you mean {scene.folder.path}?" in result.stderr
    assert "name a run on Kafka by a copy of its run file" in call("kafka://broker:9092/sums", "v1").stderr


def test_a_rollout_of_several_turns(scene: Scene) -> None:
    ids = scene.siblings(3)[0]
    turns = (
        Turn(role="assistant", content="?", num_tokens=1, finish_reason="stop", reward=0.5, tool_calls=(
            ToolCall(id="call_0_0", name="add", arguments={"a": 1, "b": "two\n"}, text="?"),
        )),
        Turn(role="tool", content="two\nlines"),
        Turn(role="assistant", content="3", num_tokens=2, finish_reason="length"),
    )  # fmt: skip
    calls = tuple(
        AgentCall(
            number=number, dialect="chat", request_digest=DIGEST, tools_digest=DIGEST, segment=number, start=3,
            count=number + 1, finish_reason=reason, opened=opened,
        )
        for number, (reason, opened) in enumerate([("stop", ""), ("length", "rewritten")])
    )  # fmt: skip
    played = dataclasses.replace(
        rollout(ids), turns=turns, segments=(segment(1), segment(2)), num_tokens=3, calls=calls,
        posted=Posted(reward=0.5, parts={"near": 0.5}),
    )  # fmt: skip
    scene.put("rollouts", played, partition=1)
    found = scene.trace(ids.rollout_id)
    (sampled,) = all_of(found, "sampled")
    assert {name: sampled.facts[name] for name in ("turns", "segments", "calls", "posted")} == {
        "turns": 3, "segments": 2, "calls": 2, "posted": "environment gave reward 0.5: near 0.5",
    }  # fmt: skip
    first, last = all_of(found, "assistant")
    assert (first.facts["reward"], first.facts["segment"], first.children[0].name) == (0.5, 0, 'add(a=1, b="two\\n")')
    assert (last.facts["segment"], last.facts["opened"], last.facts["ended by"]) == (1, "rewritten", "length")
    assert all_of(found, "tool")[0].facts["says"] == "two↵lines"
    assert [node.name for node in all_of(found, "call")] == [f"{ids.rollout_id}/call/{number}" for number in (0, 1)]
    assert "chat, 2 tokens at 3 of segment 1, which it begins (rewritten), ended by length" in found.to_text()
    assert not all_of(scene.trace(ids.group_id), "assistant"), "in a group only how many"
