"""Operators of the task side: 100,000 problems through all of them beside bare loops over the same rules, the index of
dedupe beside datasketch at the same parameters, and what five operators cost the feeder and the buffer for each group.
All is measured in CPU time of one process."""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.batches import BatchManifest
from rftstream.contracts.ids import derive_seed, unit_interval
from rftstream.contracts.outcomes import GroupOutcome, GroupResult, RolloutSummary
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.tasks import ChatMessage, Problem, Sampling
from rftstream.data.operators.base import Draw, Problems, RunProblems
from rftstream.data.operators.draws import rollout_value
from rftstream.data.operators.pipeline import TaskPipeline
from rftstream.data.operators.shingles import BandIndex, choose_rows, minhash, shingles_of
from rftstream.data.operators.texts import detect
from rftstream.testing import MemoryRun, RoleDriver
from tests.flow.scene import Scene

NUM_PROBLEMS = 100_000
NUM_TEXTS = 5_000
NUM_GROUPS = 1_000
NUM_BATCHED = 200
NUM_TOKENS = 200
NUM_HASHES = 128
SIMILARITY = 0.8

ALL: tuple[dict[str, Any], ...] = (
    {"op": "length", "max_characters": 2000},
    {"op": "regex", "skip": r"https?://"},
    {"op": "language"},
    {"op": "dedupe"},
    {"op": "mixture", "adaptive": True},
    {"op": "curriculum", "stages": [["low"], ["high"]]},
    {"op": "solve_rate"},
    {"op": "budget"},
)
EXPERIENCE: tuple[dict[str, Any], ...] = (
    {"op": "truncated"},
    {"op": "repetition"},
    {"op": "gibberish"},
    {"op": "outliers"},
    {"op": "zero_variance"},
)
FIVE = tuple(one for one in ALL if one["op"] in ("length", "regex", "mixture", "solve_rate", "budget"))


def run() -> list[dict[str, Any]]:
    return [_problems(), _minhash(), _feeder(), _buffer()]


class Made:
    """Word problems in a list, one in ten a copy, with a level each."""

    digest = ""

    def __init__(self, count: int) -> None:
        rng = random.Random(0)
        words = [f"word{number}" for number in range(2000)]
        self._texts: list[str] = []
        for number in range(count):
            text = self._texts[rng.randrange(number)] if number % 10 == 9 else None
            self._texts.append(text or " ".join(["what is the", *rng.choices(words, k=30), "of it and", str(number)]))

    def __len__(self) -> int:
        return len(self._texts)

    def problem(self, index: int) -> Problem:
        messages = (ChatMessage(role="user", content=self._texts[index]),)
        return Problem(messages=messages, info={"level": "low" if index % 2 else "high"})


def _config(*operators: Mapping[str, Any]) -> RunConfig:
    return loader.from_dict(
        {
            "run": {"name": "bench", "steps": 10_000_000},
            "model": {"path": "fake", "dtype": "float32"},
            "tasksets": {"sums": {"source": "arithmetic", "options": {"high": 999}}},
            "feeder": {"groups_per_batch": NUM_GROUPS // 2, "group_size": 8, "max_staleness": 1},
            "explorer": {"policy": "fake"},
            "trainer": {"backend": "fake"},
            "pipeline": list(operators),
        }
    )


def _problems() -> dict[str, Any]:
    """The time of `decide` alone: the index is made once, and measured by itself."""
    taskset = Made(NUM_PROBLEMS)
    pipeline = TaskPipeline.of(_config(*ALL), RunProblems((Problems("sums", taskset),)))
    facts = pipeline.new_facts()
    for index in range(0, NUM_PROBLEMS, 5):
        facts.absorb(_outcome(index))
    sampling = Sampling()
    draws = [
        Draw(group_id=f"sums/0/{n}/0", taskset="sums", taskset_pass=0, index=n, problem=taskset.problem(n),
             sampling=sampling, group_size=8)
        for n in range(NUM_PROBLEMS)
    ]  # fmt: skip
    began = time.process_time()
    ours = [(one.skipped is None, one.draw.group_size) for one in (pipeline.decide(draw, facts) for draw in draws)]
    ours_s = time.process_time() - began

    first: dict[str, int] = {}
    repeated = [first.setdefault(draw.problem.messages[0].content, draw.index) != draw.index for draw in draws]
    rates = {index: (float(sum(_rewards(index))), len(_rewards(index))) for index in range(0, NUM_PROBLEMS, 5)}
    solved = facts.taskset("sums").recent() or 0.0
    began = time.process_time()
    bare = _bare(draws, repeated, rates, 4 * solved * (1 - solved))
    bare_s = time.process_time() - began
    assert ours == bare, "the loops follow the same rules"
    return _row("pipeline: problems through all eight operators", "problems/s", NUM_PROBLEMS / ours_s,
                NUM_PROBLEMS / bare_s, "bare loops over the same rules")  # fmt: skip


def _bare(
    draws: list[Draw], repeated: list[bool], rates: Mapping[int, tuple[float, int]], chance: float
) -> list[tuple[bool, int]]:
    pattern = re.compile(r"https?://")
    found = []
    for index, draw in enumerate(draws):
        text, size = draw.problem.messages[0].content, 8
        kept = len(text) <= 2000 and not pattern.search(text) and detect(text) in ("en", "unknown")
        kept = kept and not repeated[index] and unit_interval(_seed(4, draw)) < max(0.1, chance)
        kept = kept and draw.problem.info["level"] == "low"
        if kept and index in rates:
            total, count = rates[index]
            if not 0.05 <= total / count <= 0.95:
                kept = unit_interval(_seed(6, draw)) < 0.1
            if kept:
                rate, size = (total + 1) / (count + 2), 2
                while size < 32 and rollout_value(rate, size + 1) >= 0.001:
                    size += 1
        found.append((kept, size))
    return found


def _seed(number: int, draw: Draw) -> int:
    return derive_seed(0, "operator", number, draw.group_id)


def _rewards(index: int) -> list[float]:
    return [float(n < index // 5 % 9) for n in range(8)]


def _outcome(index: int) -> GroupOutcome:
    rollouts = tuple(
        RolloutSummary(rollout_id=str(n), num_tokens=1, status=RolloutStatus.completed, reward=reward)
        for n, reward in enumerate(_rewards(index))
    )
    return GroupOutcome(group_id=f"sums/0/{index}/0", taskset="sums", sequence=index, result=GroupResult.filtered,
                        reason="bench", rollouts=rollouts)  # fmt: skip


def _minhash() -> dict[str, Any]:
    import datasketch

    taskset = Made(NUM_TEXTS)
    sets = [shingles_of(taskset.problem(index).messages[0].content, 3) for index in range(NUM_TEXTS)]
    rows = choose_rows(SIMILARITY, NUM_HASHES)

    def ours() -> int:
        bands, found = BandIndex(rows), 0
        for number, signature in enumerate(minhash(sets, NUM_HASHES, 1)):
            found += bool(bands.candidates(signature))
            bands.add(number, signature)
        return found

    def theirs() -> int:
        index, found = datasketch.MinHashLSH(num_perm=NUM_HASHES, params=(NUM_HASHES // rows, rows)), 0
        for number, one in enumerate(sets):
            signature = datasketch.MinHash(num_perm=NUM_HASHES, seed=1)
            signature.update_batch([shingle.encode() for shingle in one])
            found += bool(index.query(signature))
            index.insert(number, signature)
        return found

    assert ours() == theirs() == NUM_TEXTS // 10
    return _row(f"pipeline: MinHash, {NUM_HASHES} hashes, bands of {rows}", "texts/s",
                NUM_TEXTS / _seconds(ours), NUM_TEXTS / _seconds(theirs), "datasketch")  # fmt: skip


def _feeder() -> dict[str, Any]:
    """Groups a second of the feeder: what it admits, encodes and commits to a log in memory."""
    with_five, without = _in_turns(_admit, FIVE, rounds=10)
    return _row("pipeline: groups of 8 through the feeder", "groups/s", NUM_GROUPS / with_five,
                NUM_GROUPS / without, "without operators, ours with five")  # fmt: skip


def _admit(operators: tuple[dict[str, Any], ...]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = MemoryRun(_config(*operators), folder=Path(folder))
        driver = RoleDriver(run, "feeder")
        began = time.process_time()
        driver.work()
        return time.process_time() - began


def _buffer() -> dict[str, Any]:
    """Groups a second of the buffer: rollouts of 200 tokens from `verified` into batches, on a log in memory."""
    with_five, without = _in_turns(_batch, EXPERIENCE, rounds=5)
    return _row("pipeline: groups of 8 through the buffer", "groups/s", NUM_BATCHED / with_five,
                NUM_BATCHED / without, "without operators, ours with five")  # fmt: skip


def _batch(operators: tuple[dict[str, Any], ...]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder), feeder__groups_per_batch=20, feeder__group_size=8, feeder__max_staleness=20,
                      pipeline=list(operators))  # fmt: skip
        for sequence in range(NUM_BATCHED):
            scene.admit(sequence)
            scene.verify(sequence, [float(n < 1 + sequence % 7) for n in range(8)], num_tokens=NUM_TOKENS)
        driver = RoleDriver(scene, "buffer")
        began = time.process_time()
        driver.work()
        took_s = time.process_time() - began
        batched = sum(one.num_groups for one in scene.messages("batches") if isinstance(one, BatchManifest))
        assert batched == NUM_BATCHED, batched
        return took_s


def _in_turns(
    work: Callable[[tuple[dict[str, Any], ...]], float], operators: tuple[dict[str, Any], ...], *, rounds: int
) -> tuple[float, float]:
    """Return the least seconds with operators, and without. Other work on the machine comes and goes."""
    both = [(work(operators), work(())) for _ in range(rounds)]
    return min(ours for ours, _ in both), min(without for _, without in both)


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _row(name: str, unit: str, ours: float, reference: float, reference_name: str) -> dict[str, Any]:
    return {"name": name, "unit": unit, "ours": ours, "reference": reference, "reference_name": reference_name,
            "ratio": ours / reference}  # fmt: skip
