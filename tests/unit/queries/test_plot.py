"""Curves: what is drawn where; that pictures come out for no steps, one step and many."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rftstream.algorithms.reward_changes import find_reward_changes
from rftstream.config.loader import to_toml
from rftstream.contracts.records import Record
from rftstream.contracts.versions import EvalResult, StepRecord, VersionName
from rftstream.queries.audits.balance import Balance
from rftstream.queries.catalog.counts import CatalogCounts
from rftstream.queries.curves import page_facts, panels, plot, smoothing
from rftstream.queries.curves.history import History, read_history
from rftstream.queries.curves.lines import (
    COLORS,
    Floats,
    Line,
    evaluations,
    metric,
    over_steps,
    over_time,
    per_taskset,
    rates,
)
from rftstream.queries.formatting import number
from rftstream.runs.manifest import make_manifest
from rftstream.runs.observer import Curve
from rftstream.service.role import Log
from rftstream.studio.charts import run_charts, runs_chart
from rftstream.studio.plot_page import write_page
from rftstream.transport.memory.transport import MemoryLog
from tests.configs import small_run
from tests.unit.synthetic import SyntheticLog

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    axis = over_steps(found)
    (line,) = metric(found, axis, "reward", "reward", scale=100)
    assert line.x.tolist() == [1, 4]
    assert line.y.tolist() == [50, 100]
    assert metric(found, axis, "loss", "loss") == []


def test_first_and_last_rewards_are_those_of_the_runs_end() -> None:
    steps = [step(v, **({"reward": v / 60} if v > 15 else {})) for v in range(1, 61)]
    curve = Curve()
    curve.absorb(step(0, resumed=True))
    for one in steps:
        curve.absorb(one)
    found = history(*steps)
    assert found.reward_ends() == (pytest.approx(curve.reward_first()), pytest.approx(curve.reward_last()), 6)
    assert number(curve.reward_last()) in plot.subtitle(found)


def test_a_chart_draws_all_that_its_legend_names() -> None:
    found = history(*(step(v, length_mean=5.0, truncated_share=v / 100, staleness_mean=0.0) for v in range(1, 61)))
    lengths, staleness = run_charts(found, titles=("Completion length", "Staleness"))
    assert [line["suffix"] for line in lengths.data["lines"]] == [" smoothed", " % smoothed"]
    assert {curve.color for curve in lengths.curves} == {line["color"] for line in lengths.data["lines"]}
    assert (staleness.low, staleness.high) == ("0", "1")


def test_a_single_result_is_a_point_on_an_axis_of_versions() -> None:
    found = history(*(step(v, reward=0.5) for v in range(1, 4)), evaluations=(evaluation(0, mean=0.25),))
    (chart,) = run_charts(found, titles=("Evaluations",))
    (curve,) = chart.curves
    first, second = curve.points.split()
    assert (first, curve.dash, chart.begin, chart.end) == (second, "point", "0", "1")


def test_lines_have_a_gap_where_the_reward_changed() -> None:
    """Steps from version 21 on, and the evaluations of versions 30 and 40, are by another reward."""
    pytest.importorskip("matplotlib")
    steps = [
        replace(step(v, reward=0.1 + 0.8 * (v > 20), loss=1.0), scorers={"sums": f"a {v > 20}"}) for v in range(1, 41)
    ]
    results = [replace(evaluation(v, mean=0.5), scorer="a", scorer_version=str(v > 20)) for v in range(0, 41, 10)]
    changes = find_reward_changes((one.name.version, one.scorers) for one in steps)
    found = replace(history(*steps, evaluations=tuple(results)), reward_changes=changes)
    reward, evaluated, loss = run_charts(found, titles=("Reward", "Evaluations", "Loss"))
    for chart, gap in ((reward, [20.0, 21.0]), (evaluated, [20.0, 30.0])):
        assert chart.data["changes"] == [{"x": gap[1], "text": "reward changed"}]
        assert [line["gaps"] for line in chart.data["lines"]] == [[gap]]
        assert [words for _, words in chart.changes] == [f"reward changed at {gap[1]:.0f}"]
    assert reward.data["lines"][0]["mean"] == [0.1] * 20 + [0.9] * 20, "the running mean of one has none of the other"
    assert len(reward.curves) == 4, "values and running mean, each in two parts"
    assert not loss.data["changes"] and not loss.data["lines"][0]["gaps"]
    assert "reward 0.900 in the first tenth, 0.900 in the last since it changed at version 21" in plot.subtitle(found)
    shown = panels.panels(found, over_time(found))
    first, second = (one for one in shown if one.title in ("Reward", "Evaluations"))
    figure = plot._figure(found, over_time(found), "demo", [first, second])
    for ax, gap_at in zip(figure.axes, (20, 3), strict=True):
        assert "reward changed" in [text.get_text() for text in ax.texts]
        assert all(np.flatnonzero(np.isnan(line.get_ydata())).tolist() == [gap_at] for line in ax.get_lines()[:1])
    (compared,) = [runs_chart("Reward", {"one": found, "other": history(*steps[:5])}).data["changes"]]
    assert compared == [{"x": 21.0, "text": "one: reward changed"}]


def test_runs_beside_each_other_are_compared_by_what_both_have() -> None:
    """Without anything in common, each line says what it is of."""
    both = history(evaluations=(evaluation(1, mean=0.2), replace(evaluation(1, mean=0.9), evaluation="another")))
    one, other = history(evaluations=(evaluation(1, mean=0.5),)), replace(evaluation(1, mean=0.7), evaluation="third")
    labels = {
        line["label"]: line["last"] for line in runs_chart("Evaluations", {"one": one, "both": both}).data["lines"]
    }
    assert labels == {"one": "0.500", "both": "0.200"}
    apart = runs_chart("Evaluations", {"one": one, "other": history(evaluations=(other,))}).data["lines"]
    assert [line["label"] for line in apart] == ["one: held-out", "other: third"]


def test_settings_that_a_resume_changed_are_marked_where_it_went_on() -> None:
    """One trainer does versions 1 to 20; two others do 21 to 30 and are rolled back to 20; the last does 21 to 40 with
    two other settings. What changed between trainers that are out of force is no mark."""
    pytest.importorskip("matplotlib")
    log = SyntheticLog(MemoryLog(lambda: 0.0).connect("test"))
    texts = [to_toml(small_run(trainer={"lr": lr}, explorer={"max_concurrent": n}))
             for lr, n in ((1e-3, 8), (7e-3, 8), (2e-3, 16))]  # fmt: skip
    for epoch, text, versions in ((1, 0, (0, 20)), (2, 0, (20, 25)), (3, 1, (25, 30)), (4, 2, (20, 40))):
        log.step(versions[0], epoch=epoch, resumed=True, config=texts[text], at=1000.0 + 60 * versions[0] + epoch)
        for v in range(versions[0] + 1, versions[1] + 1):
            log.trained[v] = v
            log.step(v, epoch=epoch, metrics={"reward": v / 40, "loss": 1.0}, at=1000.0 + 60 * v + 10 * epoch)
    found = read_history(Log(log.transport))
    (change,) = found.setting_changes
    assert change.lines == ("trainer.lr 0.001 -> 0.002", "explorer.max_concurrent 8 -> 16")
    assert (change.version, change.label) == (20, "trainer.lr 0.001 -> 0.002 and 1 more")
    none = Balance(admitted=0, pending_by_stage={}, trained=0, expired=0, filtered=0, dead=0)
    counts = CatalogCounts(groups=none, rollouts=none, newest_batch=-1, reasons={})
    rows = page_facts.lineage_facts(make_manifest(small_run(), "demo", {}, 0.0), found, counts)
    assert dict(rows)["settings changed"] == f"since version 20: {'; '.join(change.lines)}"
    for by_time, at in ((False, 20.0), (True, 18.9)):  # minutes after the first step
        for chart in run_charts(found, by_time=by_time, titles=("Reward", "Loss")):
            assert chart.data["changes"] == [{"x": pytest.approx(at), "text": change.label}]
            assert at not in chart.data["marks"], "one line, not two"
            assert not any(line["gaps"] for line in chart.data["lines"]), "the values compare"
            assert [words for _, words in chart.changes] == [f"{change.label} at {number(at)}"]
    axis = over_steps(found)
    shown = [one for one in panels.panels(found, axis) if one.title in ("Reward", "Loss")]
    figure = plot._figure(found, axis, "demo", shown)
    assert [[change.label in text.get_text() for text in ax.texts].count(True) for ax in figure.axes] == [1, 0]
    assert all(20.0 in [line.get_xdata()[0] for line in ax.get_lines()] for ax in figure.axes)
    reward = replace(metric(found, axis, "reward", "")[0], y=axis.steps > 20)
    assert set(smoothing.thinned(reward, axis, 7).y.tolist()) == {0.0, 1.0}, "no mean is of both"


def test_wall_time_begins_with_the_first_steps_work() -> None:
    found = history(step(1, step_s=30.0, wait_s=10.0), step(2), resumes=(step(1, resumed=True, at=1090.0),))
    axis = over_time(found)
    assert axis.label == "wall time (s)"
    assert axis.steps.tolist() == [40, 100]
    assert axis.resumes.tolist() == [70]
    assert axis.of_evaluation(evaluation(0)) == 0
    assert axis.of_evaluation(evaluation(2)) == 100
    assert over_time(history(step(1), step(200))).label == "wall time (h)"


def test_pauses_take_no_time() -> None:
    """Two steps a minute apart, a night, the start of another trainer, and its first step a minute later."""
    night = 1120.0, 41120.0
    found = replace(
        history(step(1), step(2), step(3, at=41180.0), resumes=(step(2, resumed=True, at=41120.0),)), pauses=(night,)
    )
    axis = over_time(found)
    assert (axis.label, axis.steps.tolist(), axis.resumes.tolist()) == ("time without pauses (s)", [0, 60, 120], [])
    assert axis.pauses == ((60.0, "pause of 11 h 6 min"),) and over_steps(found).pauses == (
        (2.0, "pause of 11 h 6 min"),
    )
    assert axis.of_evaluation(evaluation(3)) == 120
    assert "2 min without pauses" in plot.subtitle(found)


def test_pass_at_k_is_drawn_where_it_says_more_than_the_mean() -> None:
    results = [evaluation(v, **{"mean": v / 10, "pass@1": v / 10, "pass@4": v / 5, "length_mean": 9.0}) for v in (0, 4)]
    found = history(step(1), evaluations=(*results, evaluation(4, "other", mean=0.5)))
    lines = evaluations(found, over_steps(found))
    assert [(line.label, line.dash) for line in lines] == [
        ("held-out", "solid"), ("other", "solid"), ("held-out pass@4", "dash"),
    ]  # fmt: skip
    assert lines[0].color == lines[2].color != lines[1].color


def test_best_and_worst_are_drawn_of_the_most_samples() -> None:
    metrics = {"mean": 0.5, "pass@1": 0.5, "pass@4": 0.8, "best@2": 0.6, "best@4": 0.9, "worst@2": 0.3, "worst@4": 0.1}
    found = history(step(1), evaluations=(evaluation(0, **metrics),))
    labels = [line.label for line in evaluations(found, over_steps(found))]
    assert labels == ["held-out", "held-out pass@4", "held-out best@4", "held-out worst@4"]
    binary = history(step(1), evaluations=(evaluation(0, **{**metrics, "best@4": 0.8}),))
    assert "held-out best@4" not in [line.label for line in evaluations(binary, over_steps(binary))]


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_no_two_lines_of_the_evaluations_look_the_same(names: tuple[str, ...]) -> None:
    metrics = {"mean": 0.5, "pass@2": 0.6, "pass@4": 0.8, "best@4": 0.9, "worst@4": 0.1}
    found = history(step(1), evaluations=tuple(evaluation(1, name, **metrics) for name in names))
    lines = evaluations(found, over_steps(found))
    assert len(lines) == 5 * len(names)
    looks = [(line.color or COLORS[place], line.dash) for place, line in enumerate(lines)]
    assert len(set(looks)) == len(lines)
    by_label = {line.label: look for line, look in zip(lines, looks, strict=True)}
    (one, one_dash), (other, other_dash) = by_label["a pass@4"], by_label["a worst@4"]
    assert one != other and one_dash != other_dash


@pytest.mark.slow
def test_parts_of_the_staleness_stand_upon_each_other() -> None:
    """Of the first the area ends where that of the second begins; the lines lie upon no area's whole."""
    metrics = {"staleness_in_flight": 0.25, "staleness_in_queue": 0.75, "staleness_mean": 1.0, "staleness_max": 1.0}
    ax = drawn_panel("Staleness", history(*(step(v, **metrics) for v in (1, 2))))
    edges = [tuple(np.unique(area.get_paths()[0].vertices[:, 1])) for area in ax.collections]
    assert edges == [(0.0, 0.25), (0.25, 1.0)]
    assert len({str(line.get_linestyle()) + line.get_color() for line in ax.get_lines()}) == 2


def test_rates_are_computed_where_they_are_not_recorded() -> None:
    found = history(step(1, rollouts=10.0, step_s=1.0, wait_s=3.0), step(2, rollouts=10.0))
    axis = over_steps(found)
    (line,) = rates(found, axis, "rollouts_per_s", "rollouts", "rollouts/s")
    assert (line.x.tolist(), line.y.tolist()) == ([1], [2.5])
    found = history(step(1, rollouts_per_s=7.0, rollouts=10.0, step_s=1.0))
    (line,) = rates(found, over_steps(found), "rollouts_per_s", "rollouts", "rollouts/s")
    assert line.y.tolist() == [7]


def test_tasksets_are_drawn_only_if_there_are_several() -> None:
    one = history(step(1, **{"reward": 0.5, "reward/sums": 0.5}))
    two = history(step(1, **{"reward": 0.5, "reward/sums": 0.25, "reward/maze": 0.75}))
    assert per_taskset(one, over_steps(one)) == []
    assert [line.label for line in per_taskset(two, over_steps(two))] == ["maze", "sums"]


def test_the_running_mean_by_hand() -> None:
    assert smoothing.smoothed(np.array([0.0, 3.0, 6.0, 0.0]), 3).tolist() == [1.5, 3.0, 3.0, 3.0]
    assert smoothing.smoothed(np.array([1.0, 2.0]), 5).tolist() == [1.0, 2.0]
    assert [smoothing.window(n) for n in (1, 11, 12, 200, 10_000)] == [1, 1, 5, 8, 400]


def test_stages_are_marked_and_smoothed_each_by_itself() -> None:
    found = history(*[step(v, loss=4.0 if v <= 8 else 0.0, stage=1.0 if v <= 8 else 2.0) for v in range(1, 17)])
    axis = over_steps(found)
    assert axis.stages.tolist() == [8]
    assert over_time(found).stages.tolist() == [7]  # minutes
    (line,) = metric(found, axis, "loss", "")
    assert smoothing.smoothed_by_stage(line, line.y, 5, axis.stages).tolist() == [4.0] * 8 + [0.0] * 8
    assert smoothing.smoothed(line.y, 5)[7] != 4


def test_the_mean_of_rates_is_the_rate_of_the_whole() -> None:
    seconds = [1.0, 3.0] * 10
    found = history(*[step(v, reward=0.5, rollouts_per_s=12 / s, tokens_per_s=24 / s) for v, s in enumerate(seconds)])
    for line, whole in zip(panels.rates(found, over_steps(found), "rollouts_per_s", "", ""), (6.0,), strict=True):
        middle = smoothing.smoothed_by_stage(line, line.y, 4, np.array([]))[2:-2]
        assert middle.tolist() == pytest.approx([12 * 5 / (3 + 3 * 2), 12 * 5 / (2 + 3 * 3)] * 8)
        assert abs(middle.mean() - whole) < 0.15 < line.y.mean() - whole
    staged = history(*[step(v, stage=1.0 + (v > 8), rollouts_per_s=0.0 if v <= 8 else 12 / s)
                       for v, s in enumerate([*[2.0] * 8, *seconds], 1)])  # fmt: skip
    (line,) = panels.rates(staged, axis := over_steps(staged), "rollouts_per_s", "", "")
    of_stages = smoothing.smoothed_by_stage(line, line.y, 4, axis.stages)
    assert of_stages[:8].tolist() == [0.0] * 8
    assert of_stages[10:-2].tolist() == pytest.approx(middle.tolist()), "demonstrations before have no rollouts"
    assert smoothing.thinned(line, axis, 14).y.tolist() == pytest.approx([0.0] * 4 + [6.0] * 10)


def test_of_demonstrations_alone_nothing_about_rollouts_is_drawn() -> None:
    found = history(step(1, loss=2.0, held_out_loss=2.5, step_s=1.0, tokens=5.0, rollouts=0.0))
    shown = [one for one in panels.panels(found, over_steps(found)) if one.lines or not one.optional]
    assert [one.title for one in shown] == ["Loss", "Gradient norm", "Entropy", "Rates", "Time of a step"]
    assert shown[0].marks_skipped
    assert [line.label for one in shown if one.title == "Rates" for line in one.lines] == ["tokens/s"]
    none_yet = history()
    assert panels.panels(none_yet, over_steps(none_yet))[0].title == "Reward"


def test_outliers_do_not_dictate_the_view() -> None:
    calm = np.sin(np.arange(500.0))

    def view(y: Floats) -> tuple[float, float] | None:
        return plot.view([Line(x=np.arange(float(len(y))), y=y, label="")])

    assert view(calm) is None
    assert view(calm[:20] * 100) is None
    wild = calm.copy()
    wild[7] = 1e6
    limits = view(wild)
    assert limits is not None
    assert limits[1] < 3
    few = calm[:60].copy()
    few[7] = 1e6  # more than 1 %, and still one alone
    assert view(few) == pytest.approx((-1, 2), abs=0.1)


def test_a_short_run_beside_a_long_one_is_in_view() -> None:
    long = Line(x=np.arange(500.0), y=np.sin(np.arange(500.0)), label="")
    short = Line(x=np.arange(4.0), y=np.asarray([90.0, 95.0, 97.0, 99.0]), label="")
    assert plot.view([long, short]) is None
    wild = replace(long, y=np.where(long.x == 7, 1e6, long.y))
    assert plot.view([wild, short]) == pytest.approx((-1, 99), abs=0.1)


@pytest.mark.parametrize(("values", "limits"), [([1e-15, 2e-3, 1e-2], (1e-6, 1e-2)), ([0.5, 20.0, 60.0], (0.5, 60.0))])
def test_rounding_does_not_dictate_a_logarithmic_axis(values: list[float], limits: tuple[float, float]) -> None:
    line = Line(x=np.arange(3.0), y=np.asarray(values), label="")
    assert plot.goes_wide(line.y)
    assert plot.log_view(line.y) == pytest.approx(limits)
    assert plot.above(line, limits[0]).y.tolist() == [value for value in values if value >= limits[0]]


def test_what_is_rarely_not_0_is_in_view() -> None:
    rare = np.zeros(500)
    rare[100] = 5.0
    assert plot.view([Line(x=np.arange(500.0), y=rare, label="")]) is None


@pytest.mark.slow
def test_an_evaluation_that_lacks_a_number_here_and_there_is_drawn(tmp_path: Path) -> None:
    """Another k from version 30 on, and none with a reward at version 50."""
    results = [evaluation(v, **{"mean": 0.5, "pass@4" if v < 30 else "pass@8": 0.75} if v != 50 else {"length_mean": 1})
               for v in range(60)]  # fmt: skip
    found = history(step(1), evaluations=tuple(results))
    lines = {line.label: line for line in evaluations(found, over_steps(found))}
    assert lines["held-out pass@4"].x.tolist() == [*range(30)]
    assert lines["held-out"].x.tolist() == [v for v in range(60) if v != 50]
    assert len(plot.plot(found, run="demo", folder=tmp_path)) == 2


def test_of_many_evaluations_every_mean_comes_first() -> None:
    metrics = {"mean": 0.5, "pass@4": 0.8, "pass@8": 0.9, "best@8": 0.95, "worst@8": 0.1}
    found = history(step(1), evaluations=tuple(evaluation(1, name, **metrics) for name in ("a", "b", "c")))
    labels = [line.label for line in evaluations(found, over_steps(found))]
    assert (labels[:4], len(labels)) == (["a", "b", "c", "a pass@4"], 15)


def drawn_panel(title: str, found: History) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    axis = over_steps(found)
    (panel,) = (one for one in panels.panels(found, axis) if one.title == title)
    figure = Figure(figsize=(15, 5))
    ax = plot._panel(figure.add_subplot(1, 3, 1), axis, panel)
    FigureCanvasAgg(figure).draw()
    return ax


def test_lines_that_are_not_drawn_are_counted_and_names_stay_in_their_panel() -> None:
    names = {f"metric/quite_a_long_name_of_a_thing_{i}": float(i) for i in range(9)}
    ax = drawn_panel("What rewards and environments measured", history(step(1, **names)))
    legend = ax.get_legend()
    *shown, more = [text.get_text() for text in legend.get_texts()]
    assert more == "+3 more"
    assert len(set(shown)) == panels.MAX_LINES
    assert shown[0].startswith("qui") and shown[0].endswith("_0")
    assert legend.get_window_extent().width <= 1.05 * ax.get_window_extent().width


def test_what_belongs_to_the_right_alone_stands_at_the_left() -> None:
    ax = drawn_panel("Rates", history(step(1, loss=1.0, step_s=2.0, tokens=10.0)))
    assert (ax.get_ylabel(), len(ax.figure.axes)) == ("trained tokens/s", 1)


def test_a_name_may_begin_with_an_underscore() -> None:
    ax = drawn_panel("Reward", history(step(1, **{"reward": 0.5, "reward/_own": 0.25, "reward/sums": 0.75})))
    assert [text.get_text().strip() for text in ax.get_legend().get_texts()] == ["all tasksets", "_own", "sums"]


def test_long_names_lose_their_middle() -> None:
    assert [plot.shorten("abcdefgh", length) for length in (8, 6, 5)] == ["abcdefgh", "abc…gh", "ab…gh"]


@pytest.mark.slow
def test_a_picture_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, _) = plot.plot(history(step(1, reward=0.5)), run="demo", folder=tmp_path)
    before = first.read_bytes()

    def half(figure: Figure, file: Path, **options: Any) -> None:
        Path(file).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", half)
    with pytest.raises(OSError, match="no space"):
        plot.plot(history(step(1)), run="demo", folder=tmp_path)
    assert first.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["by_step.png", "by_time.png"]


@pytest.mark.slow
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
    shown = {panel.title: panel for panel in panels.panels(plain, over_steps(plain))}
    assert [line.label for line in shown["Loss"].lines] == [""]
    assert not any(panel.lines for panel in shown.values() if panel.optional)
    full = history(step(1, **{
        "reward": 0.5, "reward/a": 0.25, "reward/b": 0.75, "reward_std": 0.5, "reward_std/a": 0.1, "reward_std/b": 0.2,
        "part/exact": 0.5, "part/a/exact": 0.25, "part/b/exact": 0.75, "metric/parsed": 1.0, "metric/judge.score": 7.0,
        "loss": 0.1, "policy_loss": 0.2, "kl_loss": 0.01, "entropy_loss": -0.1, "kl": 0.1, "teacher_kl": 1.5,
        "clip_fraction": 0.25, "masked_fraction": 0.5, "staleness_in_flight": 0.5, "staleness_in_queue": 1.0,
        "lr": 1e-6, "mfu": 0.3, "value_loss": 0.2, "value_explained_variance": 0.6, "advantage_std": 1.0,
    }))  # fmt: skip
    axis = over_steps(full)
    shown = {panel.title: panel for panel in panels.panels(full, axis)}

    def drawn(title: str) -> dict[str, float]:
        return {line.label: line.y[0] for line in shown[title].lines}

    assert drawn("Spread of rewards") == {"a": 0.1, "b": 0.2, "all": 0.5}
    assert drawn("Parts of the reward") == {"a/exact": 0.25, "b/exact": 0.75}
    assert drawn("What rewards and environments measured") == {"judge.score": 7.0, "parsed": 1.0}
    assert drawn("Loss") == {"all": 0.1, "policy": 0.2, "divergence": 0.01, "entropy": -0.1}
    assert drawn("Divergence") == {"from version 0": 0.1, "from the teacher": 1.5}
    assert drawn("Clipped and left out") == {"clipped": 25, "prompt or masked": 50}
    assert drawn("Staleness") == {"while sampled": 0.5, "in the queue": 1.0}
    assert drawn("Gradient norm") == {"learning rate": 1e-6}
    assert drawn("Work of the trainer") == {"MFU": 30}
    assert drawn("Critic") == {"loss": 0.2, "explained variance": 0.6}
    assert drawn("Advantages") == {"std": 1.0}


# --------------------------------------------------------------------------------------------- the page


class Page(HTMLParser):
    """What a browser would find: text, what is fetched, and what is run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.heads: list[str] = []
        self.scripts: list[str] = []
        self.fetched: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        if tag == "script":
            self.scripts.append("")
        self.fetched += [
            value or "" for name, value in attrs if name in ("src", "srcset") or (tag, name) == ("link", "href")
        ]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def panels(self) -> list[dict[str, Any]]:
        """Return the panels of both sections, as the browser gets them."""
        return [panel for script in self.scripts[1:] for panel in json.loads(script)]

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside in ("td", "h1"):
            (self.cells if self._inside == "td" else self.heads).append(data)


def page_of(found: History, folder: Path, run: str = "demo") -> Page:
    file = write_page(found, run=run, folder=folder)
    assert [one.name for one in folder.iterdir()] == ["index.html"]
    return Page(file.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_page_has_every_panel_twice_and_fetches_nothing(tmp_path: Path) -> None:
    steps = [step(v, reward=v / 60, loss=1.0, **{"reward/a": 0.1, "reward/b": 0.2}) for v in range(1, 61)]
    found = history(*steps, evaluations=(evaluation(0, mean=0.125), evaluation(50, mean=0.5), evaluation(50, "other")))
    page = page_of(found, tmp_path)
    expected = [
        panel.title for axis in (over_steps(found), over_time(found))
        for panel in panels.panels(found, axis) if panel.lines or not panel.optional
    ]  # fmt: skip
    assert [panel["title"] for panel in page.panels()] == expected
    assert page.fetched == []
    assert page.cells == ["0", "0.125", "-", "50", "0.500", "-"]


@pytest.mark.slow
def test_names_are_text_on_the_page(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    found = history(step(1, **{"reward": 1.0, f"reward/{evil}": 1.0, "reward/b": 1.0}),
                    evaluations=(evaluation(0, evil, mean=0.1),))  # fmt: skip
    page = page_of(found, tmp_path, run=f"a & {evil}")
    assert "".join(page.heads) == f"a & {evil}"
    assert len(page.scripts) == 3 and "alert(1)" not in page.scripts[0]
    assert evil in [line["label"] for panel in page.panels() for line in panel["lines"]]


def test_lines_of_other_scales_have_limits_of_their_own() -> None:
    found = history(
        *(step(v, **{"metric/score": v / 10, "metric/length": 100.0 * v, "loss": 0.1}) for v in range(1, 5))
    )
    measured, loss = (
        next(iter(run_charts(found, titles=(title,)))) for title in ("What rewards and environments measured", "Loss")
    )
    assert {line["label"]: line["limits"] for line in measured.data["lines"]} == {
        "length": [100, 400],
        "score": [0.1, 0.4],
    }
    assert (measured.low, measured.data["unit"]) == ("", "each line within its own limits")
    assert {curve.points.split()[0] for curve in measured.curves} == {"8.0,192.0"}, "both begin at the bottom"
    assert [line["limits"] for line in loss.data["lines"]] == [None]
    assert {panel.theme for panel, _ in panels.PANELS} == set(panels.THEMES)


def test_long_lines_become_means_of_equal_parts() -> None:
    line = Line(x=np.arange(6000.0), y=np.arange(6000.0) % 3, label="a")
    thin = smoothing.thinned(line, (axis := over_steps(history())))
    assert thin.x.tolist()[:3] == [1.0, 4.0, 7.0] and thin.y.tolist() == [1.0] * smoothing.MAX_POINTS
    assert smoothing.thinned(thin, axis) is thin


@pytest.mark.slow
def test_samples_are_of_different_groups_if_there_are_enough() -> None:
    def chosen(*groups: str) -> list[int]:
        records = [
            Record("verified", 0, place, 0, None, None, (("group_id", group.encode()),))
            for place, group in enumerate(groups)
        ]
        return [record.offset for record in page_facts._of_many_groups(records)]

    assert chosen(*"aaaabbbccddeeffgg") == [0, 4, 7, 9, 11, 13]
    assert chosen(*"aaaabbb") == [0, 4, 1, 2, 3, 5], "siblings, where there are but two groups"


def test_the_page_has_samples_and_settings(tmp_path: Path) -> None:
    sample = page_facts.ShownSample(
        rollout_id="sums/0/1/0/2", version=7, reward="reward 1",
        turns=(("user", [("1+1=", False)]), ("assistant", [("2</pre>", False), ("<eos>", True)])),
    )  # fmt: skip
    file = write_page(history(step(1, reward=1.0)), run="demo", folder=tmp_path,
                      settings=[("trainer.lr", "0.001")], samples=[sample])  # fmt: skip
    text = file.read_text(encoding="utf-8")
    assert '<span>2&lt;/pre&gt;</span><span class="special">&lt;eos&gt;</span></pre>' in text
    assert "version 7, reward 1, sums/0/1/0/2" in text
    assert "<dt>trainer.lr</dt><dd>0.001</dd>" in text
    assert "prefers-color-scheme: dark" in text


def test_settings_that_are_as_by_default_are_not_shown() -> None:
    config = small_run(
        run={"name": "r", "steps": 10}, trainer={"lr": 1e-3, "minibatches": 1}, algorithms={"grpo": {"clip_low": 0.1}},
    )  # fmt: skip
    found = dict(page_facts.own_settings(config))
    assert found["trainer.lr"] == "0.001" and found["tasksets.sums.source"] == "arithmetic"
    assert found["algorithms.grpo.clip_low"] == "0.1"
    assert "trainer.minibatches" not in found and "base" not in found
    other = replace(config, model=replace(config.model, chat_template=""))
    differing = dict(page_facts.differing_settings([config, replace(other, trainer=replace(config.trainer, lr=1e-6))]))
    assert differing == {"model.chat_template": ["(default)", ""], "trainer.lr": ["0.001", "1e-06 (default)"]}


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_page_of_little(tmp_path: Path, num_steps: int) -> None:
    page = page_of(history(*[step(v, reward=0.5) for v in range(num_steps)]), tmp_path)
    assert page.heads == ["demo"] and page.cells == []
