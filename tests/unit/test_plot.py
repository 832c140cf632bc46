"""Curves: what is drawn where; that pictures come out for no steps, one step and many."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from rftstream.messages import EvalResult, StepRecord, VersionName
from rftstream.views import panels, plot
from rftstream.views.history import History


def step(version: int, *, resumed: bool = False, at: float | None = None, **metrics: float) -> StepRecord:
    return StepRecord(
        name=VersionName(trainer_epoch=1, version=version), batch_sequence=None if resumed else version - 1,
        positions=(0,), trained_groups=version, trained_rollouts=version, weights_digest=None, metrics=metrics,
        resumed=resumed, skipped=version == 3, recorded_at=1000.0 + 60 * version if at is None else at,
    )  # fmt: skip


def evaluation(version: int, name: str = "held-out", **metrics: float) -> EvalResult:
    return EvalResult(evaluation=name, name=VersionName(trainer_epoch=1, version=version), num_tasks=5, num_samples=1,
                      num_unscored=0, metrics=metrics, generations=None)  # fmt: skip


def history(
    *steps: StepRecord, resumes: tuple[StepRecord, ...] = (), evaluations: tuple[EvalResult, ...] = ()
) -> History:
    return History(steps=steps, resumes=resumes, evaluations=evaluations, current=steps[-1] if steps else None)


def test_lines_leave_out_what_is_missing() -> None:
    found = history(step(1, reward=0.5), step(2), step(3, reward=math.nan), step(4, reward=1.0))
    axis = panels.over_steps(found)
    (line,) = panels.metric(found, axis, "reward", "reward", scale=100)
    assert line.x.tolist() == [1, 4]
    assert line.y.tolist() == [50, 100]
    assert panels.metric(found, axis, "loss", "loss") == []


def test_wall_time_begins_with_the_first_steps_work() -> None:
    found = history(step(1, step_s=30.0, wait_s=10.0), step(2), resumes=(step(1, resumed=True, at=1090.0),))
    axis = panels.over_time(found)
    assert axis.label == "wall time (s)"
    assert axis.steps.tolist() == [40, 100]
    assert axis.resumes.tolist() == [70]
    assert axis.of_evaluation(evaluation(0)) == 0
    assert axis.of_evaluation(evaluation(2)) == 100
    assert panels.over_time(history(step(1), step(200))).label == "wall time (h)"


def test_pass_at_k_is_drawn_where_it_says_more_than_the_mean() -> None:
    results = [evaluation(v, **{"mean": v / 10, "pass@1": v / 10, "pass@4": v / 5, "length_mean": 9.0}) for v in (0, 4)]
    found = history(step(1), evaluations=(*results, evaluation(4, "other", mean=0.5)))
    lines = panels.evaluations(found, panels.over_steps(found))
    assert [(line.label, line.dashed) for line in lines] == [
        ("held-out", False), ("held-out pass@4", True), ("other", False),
    ]  # fmt: skip
    assert lines[0].color == lines[1].color != lines[2].color


def test_best_and_worst_are_drawn_of_the_most_samples() -> None:
    metrics = {"mean": 0.5, "pass@1": 0.5, "pass@4": 0.8, "best@2": 0.6, "best@4": 0.9, "worst@2": 0.3, "worst@4": 0.1}
    found = history(step(1), evaluations=(evaluation(0, **metrics),))
    labels = [line.label for line in panels.evaluations(found, panels.over_steps(found))]
    assert labels == ["held-out", "held-out pass@4", "held-out best@4", "held-out worst@4"]
    binary = history(step(1), evaluations=(evaluation(0, **{**metrics, "best@4": 0.8}),))
    assert "held-out best@4" not in [line.label for line in panels.evaluations(binary, panels.over_steps(binary))]


def test_rates_are_computed_where_they_are_not_recorded() -> None:
    found = history(step(1, rollouts=10.0, step_s=1.0, wait_s=3.0), step(2, rollouts=10.0))
    axis = panels.over_steps(found)
    (line,) = panels.rates(found, axis, "rollouts_per_s", "rollouts", "rollouts/s")
    assert (line.x.tolist(), line.y.tolist()) == ([1], [2.5])
    found = history(step(1, rollouts_per_s=7.0, rollouts=10.0, step_s=1.0))
    (line,) = panels.rates(found, panels.over_steps(found), "rollouts_per_s", "rollouts", "rollouts/s")
    assert line.y.tolist() == [7]


def test_tasksets_are_drawn_only_if_there_are_several() -> None:
    one = history(step(1, **{"reward": 0.5, "reward/sums": 0.5}))
    two = history(step(1, **{"reward": 0.5, "reward/sums": 0.25, "reward/maze": 0.75}))
    assert panels.per_taskset(one, panels.over_steps(one)) == []
    assert [line.label for line in panels.per_taskset(two, panels.over_steps(two))] == ["maze", "sums"]


def test_the_running_mean_by_hand() -> None:
    assert plot.smoothed(np.array([0.0, 3.0, 6.0, 0.0]), 3).tolist() == [1.5, 3.0, 3.0, 3.0]
    assert plot.smoothed(np.array([1.0, 2.0]), 5).tolist() == [1.0, 2.0]
    assert [plot.window(n) for n in (1, 11, 12, 200, 10_000)] == [1, 1, 5, 8, 400]


def test_outliers_do_not_dictate_the_view() -> None:
    calm = np.sin(np.arange(500.0))

    def view(y: panels.Floats) -> tuple[float, float] | None:
        return plot.view([panels.Line(x=np.arange(float(len(y))), y=y, label="")])

    assert view(calm) is None
    assert view(calm[:20] * 100) is None
    wild = calm.copy()
    wild[7] = 1e6
    limits = view(wild)
    assert limits is not None
    assert limits[1] < 3


@pytest.mark.parametrize("num_steps", [0, 1, 60])
def test_pictures(tmp_path: Path, num_steps: int) -> None:
    names = ("reward", "loss", "grad_norm", "entropy", "staleness_mean", "staleness_max", "length_mean",
             "truncated_share", "mismatch_k3", "ess", "step_s", "wait_s", "rollouts", "tokens", "reward/a",
             "reward/b", "zero_variance_share", "kl", "clip_fraction", "mfu", "value_loss", "metric/a")  # fmt: skip
    steps = [step(v, **{name: (v % 7 + 1.0) ** i for i, name in enumerate(names)}) for v in range(1, num_steps + 1)]
    found = history(*steps, resumes=(step(1, resumed=True),) if steps else (),
                    evaluations=(evaluation(0, mean=0.1), evaluation(1, mean=0.2)))  # fmt: skip
    files = plot.plot(found, run="demo $a_b$", folder=tmp_path / "plots")
    assert [file.name for file in files] == ["by_step.png", "by_time.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 20_000 for file in files)


def test_panels_that_nothing_fills_are_left_out_and_others_have_their_lines() -> None:
    plain = history(step(1, **{"reward": 0.5, "part/exact": 0.5, "loss": 0.1, "policy_loss": 0.1}))
    shown = {panel.title: panel for panel in panels.panels(plain, panels.over_steps(plain))}
    assert [line.label for line in shown["Loss"].lines] == [""]
    assert not any(panel.lines for panel in shown.values() if panel.optional)
    full = history(step(1, **{
        "reward": 0.5, "reward/a": 0.25, "reward/b": 0.75, "reward_std": 0.5, "reward_std/a": 0.1, "reward_std/b": 0.2,
        "part/exact": 0.5, "part/a/exact": 0.25, "part/b/exact": 0.75, "metric/parsed": 1.0, "metric/judge.score": 7.0,
        "loss": 0.1, "policy_loss": 0.2, "kl_loss": 0.01, "entropy_loss": -0.1, "kl": 0.1, "teacher_kl": 1.5,
        "clip_fraction": 0.25, "masked_fraction": 0.5, "staleness_in_flight": 0.5, "staleness_in_queue": 1.0,
        "lr": 1e-6, "mfu": 0.3, "value_loss": 0.2, "value_explained_variance": 0.6, "advantage_std": 1.0,
    }))  # fmt: skip
    axis = panels.over_steps(full)
    shown = {panel.title: panel for panel in panels.panels(full, axis)}

    def drawn(title: str) -> dict[str, float]:
        return {line.label: line.y[0] for line in shown[title].lines}

    assert drawn("Spread of rewards") == {"a": 0.1, "b": 0.2, "all": 0.5}
    assert drawn("Parts of the reward") == {"a/exact": 0.25, "b/exact": 0.75}
    assert drawn("What rewards and environments measured") == {"judge.score": 7.0, "parsed": 1.0}
    assert drawn("Loss") == {"all": 0.1, "policy": 0.2, "divergence": 0.01, "entropy": -0.1}
    assert drawn("Divergence") == {"from version 0": 0.1, "from the teacher": 1.5}
    assert drawn("Clipped and left out") == {"clipped": 25, "masked": 50}
    assert drawn("Staleness") == {"while sampled": 0.5, "in the queue": 1.0}
    assert drawn("Gradient norm") == {"learning rate": 1e-6}
    assert drawn("Work of the trainer") == {"MFU": 30}
    assert drawn("Critic") == {"loss": 0.2, "explained variance": 0.6}
    assert drawn("Advantages") == {"std": 1.0}
