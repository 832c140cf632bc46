"""Names that people choose are bounded, and everything of a run has its name."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rftstream.metrics import MAX_NAMES, OTHERS, OfRun, count_named, set_named


def test_counters_of_too_many_names_share_one_series() -> None:
    registry = CollectorRegistry()
    counter = Counter("told", "For this test.", ["operator", "action"], registry=registry)
    for number in (*range(MAX_NAMES + 5), 3):
        count_named(counter, f"operator {number}", "skip")
    (metric,) = registry.collect()
    values = {sample.labels["operator"]: sample.value for sample in metric.samples}
    assert len(values) == MAX_NAMES + 1
    assert values[OTHERS] == 5 and values["operator 3"] == 2


def test_gauges_of_too_many_names_are_not_shown_and_the_known_ones_go_on() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("shown", "For this test.", ["metric"], registry=registry)
    for number in range(MAX_NAMES + 5):
        set_named(gauge, number, f"metric {number}")
    set_named(gauge, 77.0, "metric 3")
    (metric,) = registry.collect()
    values = {sample.labels["metric"]: sample.value for sample in metric.samples}
    assert len(values) == MAX_NAMES
    assert values["metric 3"] == 77.0


def test_each_series_has_the_run_and_none_is_about_its_own_beginning() -> None:
    registry = CollectorRegistry()
    Counter("told", "For this test.", ["role"], registry=registry).labels("buffer").inc()
    Histogram("took_seconds", "For this test.", buckets=(1,), registry=registry).observe(0.5)
    lines = generate_latest(OfRun("sums", registry)).decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'told_total{role="buffer",run="sums"} 1.0',
        'took_seconds_bucket{le="1.0",run="sums"} 1.0',
        'took_seconds_bucket{le="+Inf",run="sums"} 1.0',
        'took_seconds_count{run="sums"} 1.0',
        'took_seconds_sum{run="sums"} 0.5',
    ]
    assert "# TYPE told_total counter" in lines
