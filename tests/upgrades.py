"""A run whose workers are replaced, one role at a time, by those of another release and back, while it goes on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it has no stubs
import psutil

from rftstream.contracts.messages import MESSAGES
from rftstream.contracts.records import Record
from tests.e2e.workplace import Finished, Process, RunView, Workplace
from tests.releases import NOTE, VERSION, later_release

RUN_FILE = """
[run]
name = "{name}"
steps = 100000
[model]
path = "fake"
[tasksets.sums]
source = "arithmetic"
[sampling]
max_tokens = 40
[feeder]
groups_per_batch = 2
group_size = 3
max_staleness = 1
[explorer]
policy = "fake"
partial_every_s = 0.05
[trainer]
backend = "fake"
checkpoint_every = 2
[policies.fake]
tokens_per_s = 80.0
mean_tokens = 10.0
[transport]
partitions = 4
"""

READERS_FIRST: Sequence[str] = ("trainer", "buffer", "verifier", "explorer", "feeder")
"""Against the flow. So the later release is read by itself alone, unless it goes back in this order, too: then all
that it wrote is read by the release before."""

LOOK_S = 0.3

TOPICS = {"explorer": "rollouts", "verifier": "verified", "buffer": "batches", "trainer": "steps"}
"""Where the records of a role are whose contracts have changed."""
NESTED = {"verified_rollout": "rollout"}
"""Contracts that have the new field in one of their fields."""


class RollingUpgrade:
    """A run on any log. The test makes it, calls `play`, and then asks what each release wrote."""

    def __init__(self, place: Workplace, name: str, transport: str = "", *, skippable: bool = True) -> None:
        self._place = place
        self._later = later_release(place.folder / "later", skippable=skippable)
        told = place.call("--version", env=self._later).out
        assert VERSION in told, f"the later release does not run: {told}"
        self._file = place.write("run.toml", RUN_FILE.format(name=name) + transport)
        self.workers: dict[str, Process] = {}
        made = place.call("run", self._file, "--no-workers")
        assert made.code == 0, made.err
        self.view: RunView = place.view(f"runs/{name}")

    def start(self, role: str, *, later: bool) -> Process:
        """Start a worker of one of the releases."""
        env = self._later if later else {}
        self.workers[role] = self._place.start("worker", self._file, "--role", role, env=env)
        return self.workers[role]

    def call_later(self, *arguments: str | Path) -> Finished:
        """A command of the later release."""
        return self._place.call(*arguments, env=self._later)

    def play(self, *passes: tuple[bool, Sequence[str | Sequence[str]]]) -> None:
        """Begin with this release in all roles; in each pass replace all by a release (whether it is the later one), in
        this order, some at the same time. At the end drain the run."""
        self.begin()
        for later, steps in passes:
            for roles in steps:
                self._replace((roles,) if isinstance(roles, str) else roles, later=later)
            if later:  # what goes back from here on meets what the later release wrote
                self._await(lambda: any(note == NOTE for _, note in self.notes("batches")), "a batch with its field")
        self.end()

    def begin(self) -> None:
        """Start all roles by this release, and wait until they work."""
        for role in READERS_FIRST:
            self.start(role, later=False)
        self._place.wait_for(lambda: self._version() >= 2, "the first versions")

    def end(self) -> None:
        """Drain the run; all workers leave."""
        drained = self.call_later("drain", self.view.folder.path)
        assert drained.code == 0, drained.err
        ended = {role: worker.finish().code for role, worker in self.workers.items()}
        assert set(ended.values()) == {0}, self._place.report()
        self._place.assert_nobody_left()

    def _replace(self, roles: Sequence[str], *, later: bool) -> None:
        """Tell the workers to leave, start the others, and wait until those have written and the run goes on."""
        before = {role: (self.workers[role], self._written(role, later=later)) for role in roles}
        for role, (worker, _) in before.items():
            psutil.Process(worker.pid).terminate()
            self.start(role, later=later)
        for worker, _ in before.values():
            assert worker.finish().code in (0, 5), self._place.report()
        version = self._version()

        def goes_on() -> bool:
            for role in roles:
                assert self.workers[role].alive, f"the {role} has ended\n{self.workers[role].err}"
            return self._version() > version and all(self._is_in_force(role, self.workers[role]) for role in roles)

        self._await(goes_on, f"a version with another {' and '.join(roles)}")
        for role, (_, written) in before.items():
            self._await(lambda: self._written(role, later=later) > written, f"records of the {role}")  # noqa: B023

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        """Look less often than a workplace does: a look reads whole topics."""

        def look() -> bool:
            return condition() or time.sleep(LOOK_S) is not None

        self._place.wait_for(look, what)

    def _is_in_force(self, role: str, worker: Process) -> bool:
        claim = self.view.control().claims.get(role)
        return claim is None or claim.pid == worker.pid

    def _version(self) -> int:
        return self.view.curve().version

    def _written(self, role: str, *, later: bool) -> int:
        if role not in TOPICS:
            return len(self.view.records("tasks"))
        return sum(is_later(record) is later for record in self.view.records(TOPICS[role]))

    # ------------------------------------------------------------------------------------------ what came of it

    def assert_whole(self) -> None:
        """Nothing was lost, doubled or refused, and both releases have done all kinds of work."""
        report = self.view.assert_nothing_lost()
        assert report.groups.pending == report.groups.dead == 0, report.to_text()
        assert self.view.dead() == [], "nobody found a record of the other release to be damaged"
        for topic in TOPICS.values():
            by = Counter(is_later(record) for record in self.view.records(topic))
            assert by[False] and by[True], f"{topic}: {by}"
            assert len(self.view.messages(topic)) == by.total(), "this release reads what the later one wrote"

    def notes(self, topic: str) -> list[tuple[bool, str | None]]:
        """Of each record of a topic whether the later release wrote it, and the field that only that one knows."""
        return [(is_later(record), note_of(record)) for record in self.view.records(topic) if _is_changed(record)]

    def assert_field_is_kept(self) -> None:
        """The field that is new is there wherever the later release wrote it and passed it on."""
        sampled = {_rollout_id(one): note_of(one) for one in self.view.records("rollouts")}
        scored = {_rollout_id(one): note_of(one) for one in self.view.records("verified")}
        assert set(sampled.values()) == {None, NOTE}
        for topic, source in (("verified", sampled), ("batches", scored)):
            seen: Counter[tuple[bool, str | None]] = Counter()
            for record in filter(_is_changed, self.view.records(topic)):
                came = source[_rollout_id(record)]
                expected = (came or "") if is_later(record) else None
                assert note_of(record) == expected, f"{record}: of what was sampled with {came!r}"
                seen[is_later(record), came] += 1
            assert seen[True, NOTE], f"{topic}: the later release passed on what it wrote: {seen}"
            assert seen[False, NOTE], f"{topic}: the release before skipped what it does not know: {seen}"


def is_later(record: Record) -> bool:
    """Whether the later release wrote it, of a contract that has changed."""
    contract = (record.header("contract") or b"").decode()
    return int(record.header("contract_version") or b"0") > MESSAGES[contract].version


def note_of(record: Record) -> str | None:
    """The field on the log; None if the writer did not have it."""
    assert record.value is not None
    fields: Mapping[str, Any] = msgpack.unpackb(record.value)
    inner = NESTED.get((record.header("contract") or b"").decode())
    note: str | None = (fields[inner] if inner else fields).get("note")
    return note


def _is_changed(record: Record) -> bool:
    return record.header("contract") != b"batch_manifest"


def _rollout_id(record: Record) -> str:
    return (record.header("rollout_id") or b"").decode()
