"""Signs that a run does not learn as it should, from its first step on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rftstream.algorithms.reward_signs import Sign
from rftstream.contracts.versions import EvalResult, StepRecord, VersionName
from rftstream.queries.curves.training_watch import find_training_signs
from tests.configs import small_run
from tests.suite.each import each

CONFIG = small_run(
    run={"name": "test", "steps": 100},
    evaluations={"held-out": {"source": "arithmetic"}, "swapped": {"source": "arithmetic", "canary": True}},
)  # fmt: skip
WELL = {
    "reward": (0.1, 0.99), "reward_std": (0.3, 0.1), "entropy": (2.5, 0.05), "zero_variance_share": (0.3, 0.95),
    "truncated_share": (0.9, 0.0), "length_mean": (3.0, 2.0),
}  # fmt: skip
DEAD = {"reward": (0.0, 0.0), "reward_std": (0.0, 0.0), "truncated_share": (0.83, 0.83)}


def steps(num: int, metrics: Mapping[str, tuple[float, float]], without: int = 0) -> list[StepRecord]:
    """Metrics that go evenly from their first to their last value; the newest `without` steps have no signal."""
    return [
        StepRecord(
            name=VersionName(trainer_epoch=1, version=version), batch_sequence=version - 1, positions=(0,),
            trained_groups=version, trained_rollouts=version, weights_digest=None,
            metrics={
                **{name: a + (b - a) * (version - 1) / max(1, num - 1) for name, (a, b) in metrics.items()},
                "steps_without_signal": float(max(0, version - num + without)),
            },
        )
        for version in range(1, num + 1)
    ]  # fmt: skip


def results(name: str, means: Sequence[float], num_tasks: int = 400) -> list[EvalResult]:
    return [
        EvalResult(evaluation=name, name=VersionName(trainer_epoch=1, version=20 * number), num_tasks=num_tasks,
                   num_samples=1, num_unscored=0, metrics={"mean": mean}, generations=None)
        for number, mean in enumerate(means)
    ]  # fmt: skip


def found(*args: object) -> dict[str, Sign]:
    return {sign.kind: sign for sign in find_training_signs(*args, CONFIG)}  # type: ignore[arg-type]


@each(
    ("run", "kinds"),
    [
        (steps(0, {}), set()),
        (steps(1, WELL), {"truncated"}),
        (steps(60, WELL), set()),
        (steps(1, DEAD, without=1), {"truncated", "no_signal"}),
        (steps(3, DEAD, without=3), {"truncated", "no_signal"}),
        (steps(60, {**WELL, "lr": (0.0, 0.0)}), {"lr"}),
        (steps(4, {"lr": (0.0, 0.0)}), set()),  # warming up
        (steps(60, {**WELL, "lr": (1e-3, 0.0)}), set()),  # its last step alone
        (steps(60, DEAD, without=60), {"truncated"}),  # `no_signal` of the status tells it by now
        (steps(1, {"unscored_share": (0.36, 0.36)}), {"unscored"}),
        (steps(60, {"unscored_share": (0.36, 0.36)}), {"unscored"}),
        (steps(60, {"unscored_share": (0.36, 0.0)}), set()),  # it was mended
        (steps(60, {"unscored_share": (0.0, 0.36)}), set()),  # that it rises is a sign of the reward
        (steps(30, WELL, without=4), set()),
        (steps(30, WELL, without=6), {"no_signal"}),
        (steps(60, {**WELL, "reward": (0.1, 0.74), "reward_std": (0.3, 0.44)}), {"entropy"}),
        (steps(60, {**WELL, "reward": (0.1, 0.74), "reward_std": (0.3, 0.44), "entropy": (2.5, 1.0)}), set()),
        (steps(60, {**WELL, "reward": (0.9, 0.9), "length_mean": (100, 300)}), {"length"}),
        (steps(60, {**WELL, "length_mean": (100, 300)}), set()),
        (steps(60, {**WELL, "length_mean": (100, 300), "truncated_share": (0.0, 0.4)}), {"length"}),
        (steps(60, {**WELL, "truncated_share": (0.1, 0.8)}), {"truncated"}),
        (steps(60, {**WELL, "reward": (0.97, 0.01), "reward_std": (0.2, 0.0)}), {"collapsed"}),
        (steps(60, {"reward": (0.6, 0.4)}), set()),
        (
            steps(60, {"reward": (0.08, 0.0), "reward_std": (0.27, 0.0)}),
            set(),
        ),  # so rare a reward comes and goes
    ],
)
def test_signs_of_steps(run: list[StepRecord], kinds: set[str]) -> None:
    assert found(run, []).keys() == kinds


def test_a_learning_rate_of_0_is_told_with_who_set_it() -> None:
    (sign,) = found(steps(60, {"lr": (0.0, 0.0)}), []).values()
    assert sign.text.endswith("so nothing is learned: set trainer.lr")
    (sign,) = found([*steps(5, {"lr": (1e-3, 1e-3)}), *steps(6, {"lr": (0.0, 0.0)})], []).values()
    assert sign.text.endswith("trainer.lr_schedule has brought it there from 0.001")


def test_a_reward_that_was_equal_everywhere_for_a_while_has_not_collapsed() -> None:
    """At its best all rollouts had 0, so nothing was spread there: a single one below is chance."""
    run = steps(60, {**WELL, "reward": (0.0, 0.0), "reward_std": (0.0, 0.0)})
    run[-1].metrics.update(reward=-0.0004, reward_std=0.0044)
    assert "collapsed" not in found(run, [])


def test_a_reward_that_collapsed_is_told_with_the_version() -> None:
    run = [*steps(40, {"reward": (0.9, 0.9)}), *steps(60, {"reward": (0.0, 0.0)})[40:]]
    text = found(run, [])["collapsed"].text
    assert "fell from 0.900 to 0, most of it after version 40;" in text
    assert "`rftstream resume RUN --set run.resume=VERSION --set ...`" in text
    assert "collapsed" not in found(run[:42], []), "two steps may be chance"
    glance, means = steps(3, {"reward": (0.0, 0.0)}), [0.1, 0.9, 0.2]
    told = found(glance, results("held-out", means))["collapsed"]
    assert told.text.startswith("fell from 0.900 at version 20 to 0.200 at version 40; ")
    assert "collapsed" not in found(glance, results("held-out", means, num_tasks=4)), "of few samples it may be chance"


@each(
    ("name", "means", "reward", "told"),
    [
        ("held-out", [0.3, 0.6, 0.4], (0.1, 0.9), True),
        ("held-out", [0.6, 0.4], (0.1, 0.9), True),
        ("held-out", [0.3, 0.6, 0.58], (0.1, 0.9), False),
        ("held-out", [0.3, 0.6, 0.4], (0.9, 0.1), False),
        ("swapped", [0.3, 0.6, 0.4], (0.1, 0.9), False),
    ],
)
def test_an_evaluation_that_falls_while_the_reward_rises(
    name: str, means: list[float], reward: tuple[float, float], told: bool
) -> None:
    run = steps(60, {"reward": reward})
    assert ("evaluation" in found(run, results(name, means))) == told
    assert "evaluation" not in found(run, results(name, means, num_tasks=4)), "of few samples it may be chance"


UNEVEN = {**WELL, "reward": (0.1, 0.74), "reward_std": (0.3, 0.44), "length_mean": (100, 300)}
OF_SIGNS = {
    "entropy": ("entropy", "zero_variance_share", "reward", "reward_std"),
    "length": ("length_mean", "reward", "truncated_share"), "truncated": ("truncated_share",),
}  # fmt: skip


@each("missing", ["entropy", "zero_variance_share", "reward", "reward_std", "length_mean",
                                     "truncated_share"])  # fmt: skip
def test_a_metric_that_no_step_has_is_missing_and_not_0(missing: str) -> None:
    run = {**UNEVEN, "truncated_share": (0.1, 0.9)}
    assert found(steps(60, run), []).keys() == OF_SIGNS.keys()
    told = found(steps(60, {name: ends for name, ends in run.items() if name != missing}), [])
    assert told.keys() == {kind for kind, names in OF_SIGNS.items() if missing not in names}


def test_a_sign_says_what_it_saw() -> None:
    signs = found(steps(3, DEAD, without=3), [])
    assert (
        signs["truncated"].text == "83% of the newest completions are cut off by sampling.max_tokens or model.context"
    )
    assert signs["no_signal"].text.startswith(
        "3 steps since the run began: every reward is 0. Likely causes: the reward"
    )
    fell = found(steps(60, {"reward": (0.1, 0.9)}), results("held-out", [0.3, 0.6, 0.4]))["evaluation"]
    assert fell.to_text() == (
        "evaluation: fell from 0.600 at version 20 to 0.400 at version 40, while the reward went from 0.358 to 0.629"
    )
    assert fell.heading == "look at held-out"
