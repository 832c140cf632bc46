"""The buffer and demonstrations: how many beside the rollouts, in which order, and that a restart changes nothing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from rftstream.config import loader
from rftstream.config.sections import DemonstrationsSection
from rftstream.contracts import codec
from rftstream.contracts.batches import BatchManifest, Experience, LossKind
from rftstream.contracts.control import TasksEnded
from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.demonstrations import Demonstration, Preference
from rftstream.contracts.tasks import ChatMessage
from rftstream.errors import ConfigError, ContractError, TransactionAborted, TransportError
from rftstream.runs.writes.load_demonstrations import Loaded, load_demonstrations
from rftstream.testing import RoleDriver
from tests.flow import scene as scenes

Row = dict[str, str]
NINE = {"prompt": "9+9=", "completion": "18"}


class Scene(scenes.Scene):
    """Batches of two groups of two, with two demonstrations."""

    def __init__(self, folder: Path, *, ratio: float = 0.5, experts: Any = (), **settings: Any) -> None:
        super().__init__(folder, **{
            "feeder__max_staleness": 100, "trainer__algorithm": "mix", "experts": {"ratio": ratio, **dict(experts)},
            **settings,
        })  # fmt: skip
        self.rows = folder / "rows.jsonl"

    def load(self, count: int) -> Loaded:
        """So many in all."""
        return self.load_rows(*({"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(count)))

    def load_rows(self, *rows: Row, process: str = "", dry_run: bool = False, **settings: Any) -> Loaded:
        """Load exactly these."""
        self.rows.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
        section = DemonstrationsSection(source=f"jsonl:{self.rows}", **settings)
        transport = self.log.connect(process) if process else self.transport()
        return load_demonstrations(transport, self.config, self.folder, section, say=print, dry_run=dry_run)

    def taken(self) -> list[list[tuple[int, int]]]:
        """Pass and number of the demonstrations of each batch, over the shares."""
        found: dict[int, list[tuple[int, int]]] = {}
        for one in self.messages("batches"):
            if isinstance(one, BatchManifest):
                found.setdefault(one.batch_sequence, [])
            if isinstance(one, Experience) and one.expert:
                _, taken, number, _ = one.ids.group_id.split("/")
                found.setdefault(one.batch_sequence, []).append((int(taken), int(number)))
        return [found[batch] for batch in sorted(found)]


def demonstration(number: int, **changes: Any) -> Demonstration:
    said = (ChatMessage(role="user", content="?"), ChatMessage(role="assistant", content="!"))
    return Demonstration(
        **{"demonstration_id": f"d{number}", "source": "x", "messages": said, "number": number, **changes}
    )


def test_each_batch_has_its_share_of_demonstrations(tmp_path: Path) -> None:
    scene = Scene(tmp_path, experts={"shuffle": False}, trainer__shares=2)
    assert scene.load(3).new == 3
    for sequence in range(4):
        scene.verify(sequence)
    RoleDriver(scene, "buffer").work()
    assert scene.taken() == [[(0, 0), (0, 1)], [(0, 2), (1, 0)]]
    experts = [one for one in scene.messages("batches") if isinstance(one, Experience) and one.expert]
    assert {one.loss_kind for one in experts} == {LossKind.sft}
    assert {one.reward for one in experts} == {None}
    assert sorted(one.share for one in experts) == [0, 0, 1, 1]
    assert bytes(experts[0].segments[0].token_ids.numpy().tolist()) == b"0+1=1\0"
    assert experts[0].segments[0].loss_mask.numpy().tolist() == [0, 0, 0, 0, 1, 1]
    manifests = [one for one in scene.messages("batches") if isinstance(one, BatchManifest)]
    assert sorted((one.batch_sequence, one.total_experts) for one in manifests) == [(0, 2), (0, 2), (1, 4), (1, 4)]
    assert {one.metrics["experts"] for one in manifests} == {2.0}
    report = scene.audit()
    assert report.demonstrations is not None
    assert (report.demonstrations.admitted, report.demonstrations.pending, report.demonstrations.trained) == (4, 4, 0)


def test_passes_have_orders_of_their_own_and_new_ones_wait_for_the_next(tmp_path: Path) -> None:
    scene = Scene(tmp_path, feeder__groups_per_batch=1, ratio=1.0)
    scene.load(6)
    buffer = RoleDriver(scene, "buffer")
    for sequence in range(1):
        scene.verify(sequence)
    buffer.work()
    scene.load(9)
    for sequence in range(1, 9):
        scene.verify(sequence)
    buffer.work()
    numbers = [number for batch in scene.taken() for number in batch]
    passes = [[number for taken, number in numbers if taken == one] for one in (0, 1, 2)]
    assert sorted(passes[0]) == list(range(6)), "those that there were when it began"
    assert sorted(passes[1]) == list(range(9))
    assert passes[0] != sorted(passes[0])
    assert [one for one in passes[1] if one < 6] != passes[0]


@pytest.mark.law("twice", "order")
@pytest.mark.parametrize("every", [1, 2])
def test_a_restart_changes_nothing(tmp_path: Path, every: int) -> None:
    def play(folder: Path, restart: bool) -> list[list[tuple[int, int]]]:
        scene = Scene(folder)
        scene.load(5)
        buffer = RoleDriver(scene, "buffer")
        for sequence in range(12):
            scene.verify(sequence)
            buffer.work()
            if restart and sequence % every == 0:
                buffer.restart()
        return scene.taken()

    assert play(tmp_path / "a", False) == play(tmp_path / "b", True)


@pytest.mark.parametrize("seed", range(4))
def test_what_fails_for_now_is_taken_again(tmp_path: Path, seed: int) -> None:
    """Commits that are refused, a log that does not answer in the middle of a batch: the same demonstrations, none of
    them twice, none left out."""
    scene = Scene(tmp_path, experts={"shuffle": False})
    scene.load(5)
    random, failures = Random(seed), iter(range(9))
    buffer = RoleDriver(scene, "buffer")

    def fault(point: str, process: str) -> None:
        if process == "buffer" and random.random() < 0.4 and next(failures, None) is not None:
            if point == "question":
                raise TransportError("no answer")
            if point == "before_commit":
                raise TransactionAborted("so it is tried again")

    scene.log.fault = fault
    for sequence in range(4):
        scene.verify(sequence)
    buffer.work(within_s=0.9)
    scene.log.fault = None
    scene.clock.advance(10.0)  # it may have been waiting for longer than that
    buffer.work(within_s=0.9)
    assert next(failures, 9) > 5, "much of it happened"
    assert scene.taken() == [[(0, 0), (0, 1)], [(0, 2), (0, 3)]]


def test_a_run_may_do_without_for_a_while(tmp_path: Path) -> None:
    scene = Scene(tmp_path, experts={"shuffle": False})
    scene.load(5)
    with_experts = scene.config
    without = loader.replace(with_experts, experts=None, trainer__algorithm="grpo")
    for sequence, config in enumerate((with_experts, without, with_experts)):
        scene.config = config
        scene.verify(2 * sequence)
        scene.verify(2 * sequence + 1)
        RoleDriver(scene, "buffer").work()
    assert scene.taken() == [[(0, 0), (0, 1)], [], [(0, 2), (0, 3)]]
    manifests = [one for one in scene.messages("batches") if isinstance(one, BatchManifest)]
    assert [one.total_experts for one in manifests] == [2, 2, 4]


def test_it_waits_for_the_first_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(tmp_path)
    buffer = RoleDriver(scene, "buffer")
    for sequence in range(2):
        scene.verify(sequence)
    with caplog.at_level(logging.WARNING):
        buffer.work()
        buffer.work()
    assert scene.taken() == []
    assert caplog.text.count("waits for demonstrations") == 1
    scene.load(3)
    buffer.work()
    assert len(scene.taken()) == 1


def test_the_last_groups_wait_for_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that is drained ends, whether somebody brings demonstrations or not."""
    scene = Scene(tmp_path)
    buffer = RoleDriver(scene, "buffer")
    for sequence in range(2):
        scene.verify(sequence)
    buffer.work()
    scene.put("control", TasksEnded(admitted=2, reason="drained"))
    with caplog.at_level(logging.WARNING):
        buffer.work()
    manifests = [one for one in scene.messages("batches") if isinstance(one, BatchManifest)]
    assert [(one.num_groups, one.total_experts, one.last) for one in manifests] == [(2, 0, True)]
    assert "the last batch goes without demonstrations" in caplog.text


def test_passes_may_end_and_a_short_batch_has_fewer(tmp_path: Path) -> None:
    scene = Scene(tmp_path, experts={"passes": 1}, ratio=0.75)
    scene.load(4)
    for sequence in range(5):
        scene.verify(sequence)
    scene.put("control", TasksEnded(admitted=5, reason="taskset"))
    RoleDriver(scene, "buffer").work()
    assert [len(batch) for batch in scene.taken()] == [3, 1, 0]


@pytest.mark.law("twice")
def test_what_is_of_no_use_goes_to_dead_once(tmp_path: Path) -> None:
    """A pair among chats, a chat in which nobody answers, a record that cannot be decoded: passes go on without."""
    scene = Scene(tmp_path, transport__partitions=2)
    scene.load(3)
    pair = Preference(
        prompt=(ChatMessage(role="user", content="?"),), chosen=(ChatMessage(role="assistant", content="1"),),
        rejected=(ChatMessage(role="assistant", content="2"),),
    )  # fmt: skip
    scene.put("experts", demonstration(3, messages=(), preference=pair), partition=1)
    scene.put("experts", demonstration(4, messages=(ChatMessage(role="user", content="?"),)), partition=0)
    broken = codec.to_record(demonstration(5), "experts", 1, run=scene.folder.run_id)
    scene.put_raw(msgspec.structs.replace(broken, value=b"\xc1"))
    buffer = RoleDriver(scene, "buffer")
    for sequence in range(16):
        scene.verify(sequence)
        buffer.work()
        if sequence == 7:
            buffer.restart()
    letters = [one for one in scene.messages("dead") if isinstance(one, DeadLetter)]
    assert sorted(one.reason for one in letters) == ["undecodable", "unusable", "unusable"]
    numbers = [number for batch in scene.taken() for _, number in batch]
    assert [len(batch) for batch in scene.taken()] == [2] * 8
    assert set(numbers) == {0, 1, 2}
    report = scene.audit()
    assert report.demonstrations is not None
    assert (report.demonstrations.admitted, report.demonstrations.dead) == (19, 3)
    assert report.demonstrations.balanced
    assert not any("demonstration" in problem for problem in report.problems)


def test_where_none_is_of_use_the_run_ends(tmp_path: Path) -> None:
    scene = Scene(tmp_path, transport__partitions=1)
    scene.put("experts", demonstration(0, messages=(ChatMessage(role="user", content="?"),)), partition=0)
    buffer = RoleDriver(scene, "buffer")
    for sequence in range(2):
        scene.verify(sequence)
    with pytest.raises(ConfigError, match="none of 1 demonstrations can be used"):
        buffer.work()


@pytest.mark.law("lost")
def test_a_number_left_out_is_noticed(tmp_path: Path) -> None:
    scene = Scene(tmp_path, transport__partitions=1)
    scene.put("experts", demonstration(0), demonstration(2), partition=0)
    with pytest.raises(ContractError, match="found demonstration 2, expected 1; numbers are dense"):
        RoleDriver(scene, "buffer").work()


def test_an_algorithm_that_takes_none_is_refused(tmp_path: Path) -> None:
    from rftstream.runs.writes.load_demonstrations import check_demonstrations

    scene = Scene(tmp_path, trainer__algorithm="grpo")
    with pytest.raises(ConfigError, match=r"trainer.algorithm 'grpo' takes none, expected mix or chord"):
        check_demonstrations(scene.config)


# --------------------------------------------------------------------------------------------- loading


def test_loading_again_adds_what_is_new(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    first = scene.load(3)
    assert (first.rows, first.new, first.known, first.total) == (3, 3, 0, 3)
    assert first.kinds == {"chats": 3}
    again = scene.load(5)
    assert (again.rows, again.new, again.known, again.total) == (5, 2, 3, 5)
    twice = scene.load_rows(*2 * [json.loads(line) for line in scene.rows.read_text().splitlines()])
    assert (twice.new, twice.known, twice.total) == (0, 10, 5)
    found = {
        codec.from_record(one).number: one.partition  # type: ignore[union-attr]
        for one in scene.records("experts")
    }
    assert found == {number: number % 3 for number in range(5)}
    assert scene.audit().fine


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.load(2)
    found = scene.load_rows(NINE, dry_run=True)
    assert (found.new, found.total, found.tokens) == (1, 3, 3)
    assert len(scene.records("experts")) == 2
    assert "1 chats to be loaded" in found.to_text()


def test_one_bad_row_and_nothing_is_written(tmp_path: Path) -> None:
    scene = Scene(tmp_path, model__context=8)
    rows = [{"prompt": "1+1=", "completion": "2" * length} for length in (1, 9)]
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: 14 tokens, expected at most the context of 8"):
        scene.load_rows(*rows)
    assert scene.records("experts") == []
    left_out = scene.load_rows(*rows, too_long="skip")
    assert (left_out.new, left_out.too_long) == (1, 1)


def test_pairs_are_not_for_an_algorithm_of_chats(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: a pair, expected a chat, as the run's algorithm takes"):
        scene.load_rows({"prompt": "1+1=", "chosen": "2", "rejected": "3"})


@pytest.mark.law("twice")
def test_two_loads_at_once_do_not_share_numbers(tmp_path: Path) -> None:
    """The later one takes over; the earlier one says so, and can be done again."""
    scene = Scene(tmp_path)
    begun = []

    def fault(point: str, process: str) -> None:
        if point == "before_commit" and process == "first" and not begun:
            begun.append(point)
            scene.load(2)

    scene.log.fault = fault
    with pytest.raises(ConfigError, match="another load into flow began meanwhile"):
        scene.load_rows(NINE, process="first")
    assert len(scene.records("experts")) == 2
    assert scene.load_rows(NINE, process="first").total == 3
    assert scene.audit().fine
