"""Pauses in curves: on an axis of time they take no room, and each is said in words."""

from __future__ import annotations

from dataclasses import replace

from rftstream.queries.curves import panels, plot
from rftstream.queries.curves.lines import over_steps, over_time
from rftstream.studio.charts import make_chart
from tests.unit.queries.test_plot import history, step


def test_a_line_over_time_is_interrupted_by_a_pause_and_says_so() -> None:
    """Over versions it goes on: the values compare, and no running mean begins anew."""
    pause = 1180.0, 4780.0
    steps = [step(v, at=1000.0 + 60.0 * v + 3600.0 * (v > 3), reward=v / 10) for v in range(1, 7)]
    found = replace(history(*steps), pauses=(pause,))
    for axis, gaps in ((over_time(found), [3]), (over_steps(found), [])):
        (reward, *_) = panels.panels(found, axis)
        assert [line.gaps for line in reward.lines] == [gaps] and [line.changed for line in reward.lines] == [[]]
        chart = make_chart(reward, axis)
        assert [words.partition(" at ")[0] for _, words in chart.changes] == ["pause of 60 min"]
        assert len(chart.data["lines"][0]["gaps"]) == len(gaps) and len(chart.curves) == 1 + len(gaps)
        assert not chart.data["marks"], "a pause is drawn once"
    figure = plot._figure(found, over_time(found), "demo", panels.panels(found, over_time(found))[:1])
    assert ["pause of 60 min" in text.get_text() for text in figure.axes[0].texts].count(True) == 1
