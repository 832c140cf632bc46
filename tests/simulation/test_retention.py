"""Runs that delete from their log, under faults: every law holds, and what is kept is enough to go on from."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.queries.audits.audit import audit
from rftstream.queries.facts.database import Index
from rftstream.runs.roll_back import roll_back
from rftstream.service.control_view import read_control
from rftstream.testing import Faults, Simulation
from tests.simulation.laws import Laws
from tests.simulation.seeds import seeds

FAULTS = Faults(share=0.05, kills=12, pauses=4, restarts=2, takeovers=4, aborts=3, unknowns=4, silences=4, retries=3)


def make_config(seed: int, **settings: object) -> RunConfig:
    random = Random(f"retention {seed}")
    config = loader.from_dict({
        "run": {"name": "simulated", "steps": 12, "seed": seed},
        "model": {"path": "fake"},
        "tasksets": {"sums": {"source": "arithmetic"}},
        "feeder": {"groups_per_batch": 3, "group_size": 3, "max_staleness": random.randint(0, 2)},
        "explorer": {"count": 2, "policy": "fake"},
        "verifier": {"count": 2},
        "trainer": {
            "backend": "fake", "checkpoint_every": random.choice([1, 2, 3]), "keep_checkpoints": random.randint(2, 3),
            "shares": random.randint(1, 2),
        },
        "transport": {"partitions": random.randint(1, 4)},
        "policies": {"fake": {"answer_depends_on": "task", "tokens_per_s": 300.0, "mean_tokens": 6.0, "sigma": 1.0,
                              "fail_share": random.choice([0.0, 0.2])}},
        "retention": {},
    })  # fmt: skip
    return loader.replace(config, **settings)


def laws_of(simulation: Simulation) -> Laws:
    laws = simulation.watch
    assert isinstance(laws, Laws)
    return laws


def simulated(folder: Path, seed: int, faults: Faults, **settings: object) -> Simulation:
    simulation = Simulation(make_config(seed, **settings), folder=folder, seed=seed, faults=faults)
    simulation.watch = Laws(simulation)
    return simulation


@pytest.mark.law("lost", "twice", "conservation", "bounded")
@seeds(1, range(20), stored=(0, 775392))
def test_laws_hold_and_an_index_made_before_a_deletion_says_the_same_after_it(tmp_path: Path, seed: int) -> None:
    simulation = simulated(tmp_path, seed, FAULTS)
    (tmp_path / "index").mkdir()
    random = Random(seed)
    counts: list[int] = []
    while laws_of(simulation).finished is None:
        stop = simulation.num_ticks + random.randint(50, 400)
        # An audit waits for positions that are being committed, which nobody else does here meanwhile.
        simulation.run(
            until=lambda stop=stop: (  # type: ignore[misc]
                simulation.num_ticks >= stop and not any(group.pending for group in simulation.log.groups.values())
            )
        )
        assert simulation.failed is None, simulation.to_text()
        with closing(Index(tmp_path / "index", "this run")) as index:
            report = audit(simulation.transport(), index)
        assert report == simulation.audit()
        assert report.fine, report.to_text()
        assert [note for note in index.notes if "rebuilt" in note] == []
        counts.append(report.deleted_groups)
    simulation.run()
    laws_of(simulation).check_end()
    if seed == 0:  # else there may be little of it
        assert laws_of(simulation).deletions.num_deleted > 50
        assert counts[-1] > 0
        assert simulation.plan.happened.total() > 15


KEPT = {"trainer__keep_checkpoints": 3, "trainer__checkpoint_every": 2, "retention": {"checkpoints": 3},
        "feeder__max_staleness": 0}  # fmt: skip


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Laws:
    simulation = simulated(tmp_path_factory.mktemp("calm"), 3, Faults(), **KEPT)
    simulation.run()
    return laws_of(simulation)


@pytest.mark.law("lost", "replay")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_whoever_goes_on_from_a_kept_checkpoint_ends_with_the_same_weights(
    calm: Laws, tmp_path: Path, place: int
) -> None:
    killed = simulated(tmp_path, 3, Faults(), **KEPT)
    killed.run(until=lambda: laws_of(killed).version >= 9)
    for process in killed.processes:
        if process.service is not None:
            killed.kill(process)
    said = read_control(killed.transport()).deleted
    assert len(said.checkpoints) == 3
    assert said.sequence > 0
    roll_back(killed.transport(), killed.store, killed.folder.run_id, said.checkpoints[place].version)
    killed.run()
    laws_of(killed).check_end()
    assert laws_of(killed).version == calm.version == 12
    assert laws_of(killed).digests == calm.digests
