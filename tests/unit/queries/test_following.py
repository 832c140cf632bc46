"""What somebody sees who follows a run that goes on while it is looked at."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from rftstream.config import loader
from rftstream.contracts.control import RunFinished
from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.ids import next_attempt
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.contracts.versions import VersionName
from rftstream.errors import ConfigError
from rftstream.queries.audits.rows import Mark, NewRecords
from rftstream.queries.catalog.updating import CatalogUpdater
from rftstream.queries.state import following
from rftstream.queries.state.flow_map import what_is_wrong
from rftstream.queries.state.following import RunFollower
from rftstream.runs.folder import OpenRun
from rftstream.testing import MemoryRun
from rftstream.transport.base import TopicSettings
from rftstream.transport.memory.transport import MemoryLog
from tests.unit.synthetic import SyntheticLog, task

CONFIG = {
    "run": {"name": "demo", "steps": 8},
    "model": {"path": "fake"},
    "tasksets": {"sums": {"source": "arithmetic"}},
    "explorer": {"policy": "fake"},
    "trainer": {"backend": "fake"},
    "transport": {"partitions": 4},
}


def test_what_is_called_finished_is_counted_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # a run in memory has its catalog there
    memory = MemoryRun(loader.from_dict(CONFIG), folder=tmp_path)
    memory.put_manifest()
    log = SyntheticLog(memory.transport(), partitions=4)
    log.flow(0, 1)
    follower = RunFollower(OpenRun(memory.folder, memory.config, memory.transport("studio")))

    def update(self: CatalogUpdater, should_stop: Callable[[], bool] = lambda: False) -> bool:
        found = original(self, should_stop)
        if self.done >= self.total and not log.trained.get(1):  # all is read; now the run ends, and the look goes on
            log.batch(0, [0, 1])
            log.step(1)
            name = VersionName(trainer_epoch=1, version=1)
            log.put("control", RunFinished(reason="steps", name=name, finished_at=9.0))
        return found

    original = CatalogUpdater.update
    monkeypatch.setattr(CatalogUpdater, "update", update)
    during, after = follower.look(), follower.look()
    follower.close()
    assert during.status.state != "finished" and during.counts is not None
    assert during.counts.groups.trained == 0
    assert after.status.state == "finished" and after.counts is not None
    assert (after.counts.groups.trained, after.status.groups["batched"], after.status.history.version) == (2, 2, 1)


def test_who_needs_all_counts_waits_for_the_process_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of workers and a report of what is half counted would be wrong."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = MemoryRun(loader.from_dict(CONFIG), folder=tmp_path)
    memory.put_manifest()
    SyntheticLog(memory.transport(), partitions=4).flow(0, 3)
    studio = CatalogUpdater(OpenRun(memory.folder, memory.config, memory.transport("studio")))
    studio.update(lambda: True)  # it has the catalog, and is asked to stop before it reads
    follower = RunFollower(OpenRun(memory.folder, memory.config, memory.transport("plan")))
    with pytest.raises(ConfigError, match="0% of the log is counted, expected all; a studio or exporter"):
        follower.look_at_all(0.0)
    monkeypatch.setattr(following.time, "sleep", lambda _: studio.update())
    counts = follower.look_at_all().counts
    assert counts is not None and counts.rollouts.admitted > 0
    follower.close()
    studio.close()


def test_dead_letters_are_nothing_wrong_once_all_are_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = MemoryRun(loader.from_dict(CONFIG), folder=tmp_path)
    memory.put_manifest()
    log = SyntheticLog(memory.transport(), partitions=4)
    log.flow(0, 1)
    for sequence in (0, 1):
        log.decide(sequence, GroupResult.dead)
    log.put("dead", DeadLetter(
        topic="rollouts", partition=0, offset=0, key=b"k", value=b"v", headers=(), role="verifier", reason="error",
        detail="no", tries=3,
    ))  # fmt: skip
    follower, told = RunFollower(OpenRun(memory.folder, memory.config, memory.transport("studio"))), list[bool]()
    for sequence in (0, 1):
        told.append("1 dead letter" in [one.title for one in what_is_wrong(follower.look().status, now=0.0)])
        again = [
            replace(one, group_id=next_attempt(one.group_id), rollout_id=f"{next_attempt(one.group_id)}/{one.sibling}",
                    sequence=2 + sequence)
            for one in log.siblings(sequence)
        ]  # fmt: skip
        log.put("tasks", *map(task, again))
    last = follower.look().status
    follower.close()
    assert told == [True, True] and last.dead_letters == {"error": 1}
    assert "1 dead letter" not in [one.title for one in what_is_wrong(last, now=0.0)]


@pytest.mark.parametrize("seed", range(8))
def test_who_stops_in_the_middle_goes_on_there(seed: int) -> None:
    """Records come meanwhile, and the same reader is at other topics in between."""
    random = Random(seed)
    transport = MemoryLog(lambda: 0.0).connect("somebody")
    transport.admin.ensure_topics({topic: TopicSettings(partitions=3) for topic in ("tasks", "rollouts")})
    producer = transport.producer("somebody")
    producer.start()
    records = NewRecords(transport)
    marks: dict[TopicPartition, Mark] = {}
    found: dict[TopicPartition, list[int]] = {}
    for number in range(60):
        topic = random.choice(("tasks", "rollouts"))
        if number < 50:
            new = [NewRecord(topic, random.randrange(3), b"k", b"v") for _ in range(random.randrange(12))]
            producer.commit(new)
        ends = {
            place: end for each in ("tasks", "rollouts") for place, end in transport.admin.end_offsets(each).items()
        }
        known, left = dict(marks), random.randrange(1, 5) if number < 50 else 1000
        topic = random.choice(("tasks", "rollouts")) if number < 58 else ("tasks", "rollouts")[number - 58]
        with closing(records.read(topic, known, ends, max_polled=random.randrange(1, 8))) as polls:
            some = list(islice(polls, left))
        if random.random() < 0.9 or number >= 58:  # else what was read is not kept, and is read again
            marks = known
            for record in (record for poll in some for record in poll):
                found.setdefault(record.place, []).append(record.offset)
    for place in (TopicPartition(topic, number) for topic in ("tasks", "rollouts") for number in range(3)):
        assert found.get(place, []) == list(range(transport.admin.end_offsets(place.topic)[place]))


def test_what_was_fetched_ahead_is_not_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Kafka all that is left would be, at each look."""
    transport = MemoryLog(lambda: 0.0).connect("somebody")
    transport.admin.ensure_topics({"rollouts": TopicSettings(partitions=3)})
    producer = transport.producer("somebody")
    producer.start()
    producer.commit([NewRecord("rollouts", number % 3, b"k", b"v") for number in range(60)])
    records, marks, ends = NewRecords(transport), dict[TopicPartition, Mark](), transport.admin.end_offsets("rollouts")
    for _ in range(6):
        with closing(records.read("rollouts", marks, ends, max_polled=5)) as polls:
            next(polls)
        assert records._reader is not None
        monkeypatch.setattr(records._reader, "seek", None)
    assert sum(mark.end for mark in marks.values()) == 30
