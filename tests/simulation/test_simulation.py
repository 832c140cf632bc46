"""All roles in one process, under a seeded scheduler, with everything going wrong that can.

More seeds: `python -m tests.simulation 0:500`; one again, with its story: `python -m tests.simulation 17 --verbose`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.service.role import Log
from rftstream.testing import Faults, Simulation
from tests.simulation.grid import check_seed, draw_config, draw_faults, is_deterministic, is_short, simulate
from tests.simulation.laws import Laws
from tests.simulation.seeds import seeds

FOUND = (121, 14723, 257897)
"""By these a buffer was found that was killed while its claim was open and hid what others committed from then on; a
version that was never announced, for which an evaluator waited for ever; and a rollout that was saved twice in one turn
and lost what stood beside the tokens before it."""
KINDS = [name for name in Faults.__slots__ if name not in ("share", "roles")]
EVERYTHING = Faults(share=0.03, kills=4, pauses=3, restarts=2, takeovers=2, joins=1, aborts=2, unknowns=2,
                    silences=2, user_pauses=1)  # fmt: skip


def make_config(**settings: Any) -> RunConfig:
    config = loader.from_dict({
        "run": {"name": "simulated", "steps": 10},
        "model": {"path": "fake"},
        "tasksets": {"sums": {"source": "arithmetic"}},
        "feeder": {"groups_per_batch": 2, "group_size": 2},
        "explorer": {"count": 2, "policy": "fake"},
        "verifier": {"count": 2},
        "trainer": {"backend": "fake", "checkpoint_every": 3},
        "transport": {"partitions": 4},
    })  # fmt: skip
    return loader.replace(config, **settings)


def run(folder: Path, seed: int, faults: Faults = Faults(), **settings: Any) -> Simulation:  # noqa: B008
    simulation = Simulation(make_config(**settings), folder=folder / f"{seed}", seed=seed, faults=faults)
    simulation.watch = laws = Laws(simulation)
    simulation.run()
    laws.check_end()
    return simulation


def test_fifty_steps_of_the_whole_set(tmp_path: Path) -> None:
    held_out = {"source": "arithmetic", "options": {"size": 10}, "every": 10}
    simulation = run(
        tmp_path,
        1,
        run__steps=50,
        feeder__groups_per_batch=4,
        feeder__group_size=4,
        evaluations={"held-out": held_out},
        backends={"fake": {"skill_rate": 1.0}},
    )
    assert {one.exit_code for one in simulation.processes} == {0}
    steps = [one for one in simulation.messages("steps") if isinstance(one, StepRecord) and not one.resumed]
    assert [one.name.version for one in steps] == list(range(1, 51))
    rewards = [one.metrics["reward"] for one in steps]
    assert sum(rewards[-10:]) / 10 > 0.8 > 0.5 > sum(rewards[:10]) / 10
    results = [one for one in simulation.messages("evals") if isinstance(one, EvalResult)]
    assert [one.name.version for one in results] == [0, 10, 20, 30, 40, 50]


@pytest.mark.law("derived")
def test_the_same_seed_gives_the_same_log_record_for_record(tmp_path: Path) -> None:
    for faults in (Faults(), EVERYTHING):
        first, again, other = (
            run(tmp_path / name, seed, faults) for name, seed in (("first", 7), ("again", 7), ("other", 8))
        )
        assert first.digest() == again.digest() != other.digest()
        assert first.story == again.story
        assert first.num_ticks == again.num_ticks
    assert first.plan.happened.total() > 10


@pytest.mark.law(
    "lost", "twice", "derived", "order", "fencing", "conservation", "lineage", "replay", "unscorable", "staleness"
)
@seeds(12, range(400), stored=FOUND, fits=is_short)
def test_whatever_goes_wrong(tmp_path: Path, seed: int) -> None:
    check_seed(seed, tmp_path)


def test_the_grid_has_all_that_may_matter() -> None:
    """Of the first of those that the test above runs."""
    from random import Random

    settings: dict[str, set[Any]] = {}
    faults: Counter[str] = Counter()
    for seed in range(40):
        random = Random(f"grid {seed}")
        config, planned = draw_config(random), draw_faults(random)
        for name, value in {
            "max_staleness": config.feeder.max_staleness, "on_stale": config.feeder.on_stale,
            "zero_variance": config.buffer.zero_variance, "group_size": config.feeder.group_size,
            "groups_per_batch": config.feeder.groups_per_batch, "shares": config.trainer.shares,
            "partitions": config.transport.partitions, "minibatches": config.trainer.minibatches,
            "publish_every": config.trainer.publish_every, "explorers": config.explorer.count,
            "stages": bool(config.stages), "taskset's own": any(one.algorithm for one in config.tasksets.values()),
            "ends": config.run.steps is None, "deterministic": is_deterministic(config),
            "deadline": config.buffer.group_deadline_s is None, "fails": config.policies["fake"]["fail_share"],
            "nan": bool(config.backends["fake"]["nan_at"]), "evaluations": bool(config.evaluations),
            "tasksets": len(config.tasksets), "retention": config.retention,
            "experts": config.experts is None, "ratio": config.experts.ratio if config.experts else 0.0,
            "partial_every_s": config.explorer.partial_every_s, "yields": config.explorer.yield_after_tokens,
        }.items():  # fmt: skip
            settings.setdefault(name, set()).add(value)
        faults += Counter({name: getattr(planned, name) for name in KINDS})
    assert settings["max_staleness"] >= {0, 1, 2}
    assert settings["group_size"] == {1, 2, 3, 4, 5, 6}
    assert settings["partitions"] == {1, 2, 3, 4, 5}
    assert settings["shares"] == {1, 2, 3}
    assert all(len(values) > 1 for values in settings.values()), settings
    assert all(faults[name] for name in KINDS), faults


@pytest.mark.law("lost", "twice", "conservation", "lineage", "replay")
def test_kills_between_any_two_ticks_and_at_every_commit(tmp_path: Path) -> None:
    simulation = run(tmp_path, 3, Faults(share=0.1, kills=60), run__steps=8)
    assert simulation.plan.happened["kills"] > 40


@pytest.mark.law("twice", "fencing", "conservation")
def test_processes_that_stand_still_come_back_to_a_changed_world(tmp_path: Path) -> None:
    simulation = run(tmp_path, 4, Faults(share=0.08, pauses=12, takeovers=4), run__steps=8)
    assert simulation.plan.happened["pauses"] > 6
    assert 5 in {one.exit_code for one in simulation.processes}


@pytest.mark.law("lost", "twice", "conservation")
def test_dead_groups_are_put_back_while_much_goes_wrong(tmp_path: Path) -> None:
    """Some of their rollouts failed and are sampled again; the others are scored again as they are."""
    faults = Faults(share=0.08, retries=30, kills=6, takeovers=2, unknowns=3, aborts=3)
    simulation = run(tmp_path, 11, faults, run__steps=12, policies={"fake": {"fail_share": 0.3}}, feeder__group_size=3,
                     feeder__max_staleness=3, buffer__min_siblings=3)  # fmt: skip
    laws = simulation.watch
    assert isinstance(laws, Laws)
    assert simulation.plan.happened["retries"] > 20
    assert laws.num_retried > 5
    assert laws.num_copied > 2
    put_back = [outcome for group, outcome in laws.outcomes.items() if not group.endswith("/0")]
    assert {GroupResult.batched, GroupResult.dead} <= {outcome.result for outcome in put_back}


@pytest.mark.law("fencing", "replay")
def test_somebody_writes_on_the_topics_of_others(tmp_path: Path) -> None:
    """A calm run and one full of foreign records train the same batches to the same weights."""
    settings = {
        "run__steps": 12,
        "policies": {"fake": {"answer_depends_on": "task"}},
        "evaluations": {"held-out": {"source": "arithmetic", "options": {"size": 4}, "every": 4}},
    }
    calm = run(tmp_path / "calm", 9, **settings)
    strange = run(tmp_path / "strange", 9, Faults(share=0.5, strangers=240), **settings)
    assert strange.plan.happened["strangers"] > 60
    kinds = {line.partition("somebody: ")[2].partition("[")[0] for line in strange.story if "somebody: " in line}
    assert {kind.rpartition(" ")[2] for kind in kinds} == set(strange.transport().admin.topics())
    assert len(kinds) > 10

    def digests(simulation: Simulation) -> list[str | None]:
        found = Log(simulation.transport()).in_force("steps")
        return [step.weights_digest for _, step in found if isinstance(step, StepRecord)]

    assert digests(strange) == digests(calm)
    letters = (one for _, one in Log(strange.transport()).in_force("dead"))  # somebody wrote on `dead`, too
    reasons = {one.reason for one in letters if isinstance(one, DeadLetter)}
    assert {"foreign", "undecodable"} <= reasons


def test_a_user_drains_the_run(tmp_path: Path) -> None:
    drained = 0
    for seed in range(5, 12):
        simulation = run(tmp_path, seed, Faults(share=0.01, drains=1))
        laws = simulation.watch
        assert isinstance(laws, Laws) and laws.finished is not None
        if laws.finished.reason == "drained":  # in some it comes after the last step
            assert simulation.plan.happened["drains"] == 1
            assert laws.version < 10
            drained += 1
        if drained == 2:
            return
    raise AssertionError("no seed drains in time")


def test_a_rule_of_the_run_ends_it_for_all(tmp_path: Path) -> None:
    simulation = Simulation(make_config(backends={"fake": {"nan_at": [3, 4, 5]}}), folder=tmp_path, seed=1)
    simulation.run()
    assert simulation.failed is not None
    assert (simulation.failed.name, simulation.failed.exit_code) == ("trainer-0", 6)
    assert simulation.audit().fine


def test_a_failing_seed_tells_its_story_and_how_to_see_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_is_ever_lawful(self: Laws) -> None:
        raise AssertionError("not lawful")

    monkeypatch.setattr(Laws, "check_end", nothing_is_ever_lawful)
    with pytest.raises(AssertionError, match="not lawful") as failed:
        simulate(3, tmp_path)
    notes = "\n".join(failed.value.__notes__)
    assert "again: python -m tests.simulation 3" in notes
    assert "[feeder]" in notes
    assert "trainer-0: " in notes


def test_a_run_that_hangs_is_told_apart(tmp_path: Path) -> None:
    simulation = Simulation(make_config(verifier__count=0), folder=tmp_path, seed=1)
    with pytest.raises(AssertionError, match="the run does not end") as hung:
        simulation.run(max_ticks=500)
    assert "explorer-0: {'role': 'explorer'" in "\n".join(hung.value.__notes__)


@pytest.mark.law("lineage", "never-waits")
def test_a_run_goes_on_when_weights_are_lost_before_anybody_has_them(tmp_path: Path) -> None:
    """Explorers cannot follow, nothing new is sampled, and the trainer would wait for ever."""
    lost = [2, 5]
    config = make_config(
        feeder__max_staleness=0, weights__anchor_every=20, backends={"fake": {"elements": 2048}}, evaluations={}
    )
    simulation = Simulation(config, folder=tmp_path, seed=3)

    def lose(point: str) -> None:
        newest = next(reversed(simulation.store.objects), "")
        if point == "after_versions" and newest.endswith(".delta") and int(newest[-8 - 6 : -6]) in lost:
            lost.remove(int(newest[-8 - 6 : -6]))
            del simulation.store.objects[newest]

    simulation.store.fault = lose
    simulation.run()
    assert not lost
    assert simulation.find("trainer-0").starts == 3
    steps = [one for one in simulation.messages("steps") if isinstance(one, StepRecord) and not one.resumed]
    assert [one.name.version for one in steps] == list(range(1, 11)), "nothing is trained again"
    simulation.clock.advance(61.0)
    assert simulation.audit().fine
