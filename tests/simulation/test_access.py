"""No worker reads, writes or asks for anything beyond what its role declares: rights on a log follow from that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftstream import roles
from rftstream.config import loader
from rftstream.roles import role_specs
from rftstream.service.role_spec import RoleKind
from rftstream.transport.memory.transport import MemoryAdmin, MemoryProducer, MemoryTransport
from tests.simulation import test_retention, test_simulation, test_synthesis
from tests.simulation.annotators import play_people

SPECS = {spec.name: spec for spec in role_specs()}


class Touched:
    """What the workers of each role asked of the log, by what was done."""

    def __init__(self) -> None:
        self.done: defaultdict[tuple[str, str], set[str]] = defaultdict(set)

    def note(self, process: str, what: str, *names: str) -> None:
        role = process.partition("-")[0]
        if role in SPECS:
            self.done[role, what].update(names)

    def of(self, what: str) -> dict[str, set[str]]:
        return {role: names for (role, done), names in self.done.items() if done == what}


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Touched:
    found = Touched()

    def watch(kind: type, method: str, note: Callable[..., None]) -> None:
        call = getattr(kind, method)

        def watched(self: Any, *arguments: Any, **more: Any) -> Any:
            note(self._process, *arguments, **more)
            return call(self, *arguments, **more)

        monkeypatch.setattr(kind, method, watched)

    def on_read(process: str, positions: Any, **_: Any) -> None:
        found.note(process, "read", *(place.topic for place in positions))

    def on_member(process: str, group: str, topics: Any, **_: Any) -> None:
        found.note(process, "group", group)
        found.note(process, "read", *topics)

    def on_producer(process: str, transactional_id: str, **_: Any) -> None:
        found.note(process, "producer", transactional_id)

    def on_commit(process: str, records: Any, positions: Any = None, group: Any = None, snapshot: Any = None) -> None:
        found.note(process, "write", *(record.topic for record in records))
        if positions:
            found.note(process, "group", group or snapshot.group)
            found.note(process, "read", *(place.topic for place in positions))

    def on_delete(process: str, offsets: Any) -> None:
        found.note(process, "delete", *(place.topic for place in offsets))

    watch(MemoryTransport, "reader", on_read)
    watch(MemoryTransport, "member", on_member)
    watch(MemoryTransport, "producer", on_producer)
    watch(MemoryProducer, "commit", on_commit)
    watch(MemoryAdmin, "delete_before", on_delete)
    watch(MemoryAdmin, "committed", lambda process, group: found.note(process, "positions", group))
    watch(MemoryAdmin, "lag", lambda process, group, topic: found.note(process, "positions", group))
    for method in ("ensure_topics", "commit_initial", "delete_topics"):
        watch(MemoryAdmin, method, lambda process, *_, method=method: found.note(process, "manage", method))
    return found


@pytest.mark.slow
def test_nobody_does_what_its_role_does_not_declare(tmp_path: Path, touched: Touched) -> None:
    held_out = {"source": "arithmetic", "options": {"size": 10}, "every": 2}
    evaluated = {"evaluations": {"held-out": held_out}}
    test_retention.simulated(tmp_path / "retention", 1, test_retention.FAULTS, **evaluated).run()
    test_simulation.run(tmp_path / "all", 1, test_simulation.EVERYTHING, **evaluated)
    test_synthesis.play(tmp_path / "growing", 0, test_simulation.EVERYTHING)
    play_people(tmp_path / "people", 1)

    growing = test_synthesis.growing()
    read = {role: set(spec.reads(growing)) for role, spec in SPECS.items()}
    assert {role: names - read[role] for role, names in touched.of("read").items() if names - read[role]} == {}
    written = {role: set(spec.writes()) for role, spec in SPECS.items()}
    assert {role: names - written[role] for role, names in touched.of("write").items() if names - written[role]} == {}
    assert touched.of("delete") == {role: set(spec.deletes) for role, spec in SPECS.items() if spec.deletes}
    assert touched.of("group") == {role: {name} for role, spec in SPECS.items() if (name := spec.group()) is not None}
    others = {role: names - {role} for role, names in touched.of("positions").items()}
    assert {role for role, names in others.items() if names} == {r for r, spec in SPECS.items() if spec.sees_positions}
    assert touched.of("manage") == {}, "topics and first positions are the operator's"
    for role, names in touched.of("producer").items():
        for name in names:
            is_single = SPECS[role].kind is RoleKind.single
            assert name.endswith(f".{role}") if is_single else name.startswith(f"{role}."), name


def test_most_of_what_is_declared_is_used(tmp_path: Path, touched: Touched) -> None:
    """Without faults, or anything beside the plain loop."""
    test_simulation.run(tmp_path, 1)
    for role in ("feeder", "explorer", "verifier", "buffer", "trainer"):
        made = set(SPECS[role].produces) - {"dead", "partials", "questions", "judgements"}
        assert made <= touched.of("write")[role]
        assert set(SPECS[role].consumes) <= touched.of("read")[role]


def test_a_topic_that_is_not_declared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = loader.replace(test_simulation.make_config(), run__steps=2)
    short = replace(SPECS["verifier"], produces=("dead",))
    monkeypatch.setattr("workers.verifier.VERIFIER", short)  # imports both modules, before either is changed
    monkeypatch.setattr("rftstream.roles.verifier.VERIFIER", short)
    assert roles.role_spec("verifier") is short
    simulation = test_simulation.Simulation(config, folder=tmp_path, seed=1)
    simulation.run(max_ticks=2000)
    failed = simulation.failed
    assert failed is not None
    assert "verifier: writes to 'verified', expected one of dead; name it in `produces`" in simulation.to_text()
