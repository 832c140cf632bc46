"""Spans of simulated runs: all that is on the log is in them once, they hang together, and a reader who looks on while
the run goes on makes the same ones as one who comes afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.queries.traces.spans import Span, SpanReader
from rftstream.service.role import Log
from rftstream.testing import Faults, Simulation
from tests.simulation.seeds import seeds
from tests.simulation.test_simulation import EVERYTHING, make_config


class Watch:
    """Reads spans now and then while a run goes on, as a follower does."""

    def __init__(self, simulation: Simulation) -> None:
        self.reader = SpanReader(Log(simulation.transport()), simulation.folder.run_id, "tiny")
        self.spans: list[Span] = []
        self._looks = 0

    def __call__(self, *_: object) -> None:
        self._looks += 1
        if self._looks % 40 == 0:
            self.spans += self.reader.read()


def played(folder: Path, seed: int, faults: Faults) -> tuple[Simulation, list[Span]]:
    evaluation = {"source": "arithmetic", "options": {"size": 3}, "every": 4}
    simulation = Simulation(make_config(evaluations={"held-out": evaluation}), folder=folder, seed=seed, faults=faults)
    simulation.watch = watch = Watch(simulation)
    simulation.run()
    watch.spans += watch.reader.read()
    return simulation, watch.spans


@pytest.mark.law("lineage")
@seeds(1, range(20), stored=(658631,))
def test_spans_say_what_the_log_says_live_and_afterwards(tmp_path: Path, seed: int) -> None:
    simulation, live = played(tmp_path / "run", seed, EVERYTHING)
    log = Log(simulation.transport())
    reader = SpanReader(log, simulation.folder.run_id, "tiny")
    afterwards = list(reader.read())
    assert {span.key: span for span in live} == {span.key: span for span in afterwards}
    keys = [span.key for span in afterwards]
    assert len(set(keys)) == len(keys) == len(live)
    assert all(span.end_s >= span.start_s for span in afterwards)

    by_key = {span.key: span for span in afterwards}
    for span in afterwards:
        if span.parent is not None:
            assert span.parent.trace_id == span.key.trace_id
            assert span.parent in by_key, f"{span.name} hangs in the air"
    count = {name: sum(span.name == name for span in afterwards) for name in {span.name for span in afterwards}}
    outcomes = [one.message for one in log.messages("outcomes") if isinstance(one.message, GroupOutcome)]
    groups = [one for one in outcomes if not one.late]
    assert count["group"] == len(groups)
    assert count["batch"] == 10
    assert count["step"] >= 10
    assert count["evaluation"] >= 2
    assert count["rollout"] == count["verdict"] == sum(1 for _ in log.messages("verified"))

    trained = {one.group_id for one in groups if one.result is GroupResult.batched}
    for span in afterwards:
        if span.name == "group" and span.attributes["rftstream.group_id"] in trained:
            (batch,) = (by_key[key] for key in span.links)
            assert batch.attributes["rftstream.batch"] == span.attributes["rftstream.batch"]
            assert span.key in batch.links
            assert span.start_s <= span.end_s
        if span.name == "rollout":
            newest = span.attributes.get("rftstream.version.newest", 0)
            versions = [by_key[key].attributes["rftstream.version"] for key in span.links]
            assert not newest or versions[-1:] == [newest]
            assert span.attributes["gen_ai.operation.name"] == "invoke_agent"
            assert span.attributes["gen_ai.usage.output_tokens"] == span.attributes["rftstream.num_tokens"]
            assert span.attributes["gen_ai.request.model"] == "tiny"
    assert reader.resource["rl.run.id"] == simulation.folder.run_id


def test_other_runs_have_other_ids(tmp_path: Path) -> None:
    simulation, spans = played(tmp_path / "run", 1, Faults())
    others = SpanReader(Log(simulation.transport()), "another").read()
    assert not {span.key.trace_id for span in spans} & {span.key.trace_id for span in others}
