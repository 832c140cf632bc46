"""Every Prometheus metric of rftstream, declared once. Tests check docs and dashboards against this file."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator, Mapping
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    Metric,
    ProcessCollector,
    disable_created_metrics,
)

# Otherwise each counter and histogram has one more series, with the time of its creation.
disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry(auto_describe=True)
"""The metrics of this process. The worker's port serves them."""
PROCESS = ProcessCollector(registry=REGISTRY)
"""The usual process_* metrics: CPU time, memory, open files, start time. They exist only on systems with /proc."""

log = logging.getLogger(__name__)

MAX_NAME_CHARACTERS = 200
"""Longest name of a metric or of a part of a reward, in characters; longer names are cut."""
MAX_NAMES_OF_ROLLOUT = 1024
"""Most names of metrics, and of parts, that one rollout may have."""
MAX_NAMES_OF_RECORD = 4096
"""Most names of metrics in a record that sums up many rollouts: of a batch, a step, an evaluation."""
NAMES_LEFT_OUT = "metrics_left_out"
"""The metric that counts the metrics for which a record has no room."""
OF_REWARDS = ("part/", "metric/")
"""Prefixes of names that rewards and environments choose."""

MAX_NAMES = 200
"""Most series of a metric with names that people choose, such as those of evaluations. Further names share one series,
or are not shown."""
OTHERS = "(others)"

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Buckets for work that takes milliseconds: a commit, a slice of work."""
_LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
"""Buckets for work that may take an hour: a rollout of an agent, a verdict of a test suite, the weights of a large
model."""

_counter = partial(Counter, registry=REGISTRY)
_gauge = partial(Gauge, registry=REGISTRY)
_short_times = partial(Histogram, buckets=_SHORT, registry=REGISTRY)
_long_times = partial(Histogram, buckets=_LONG, registry=REGISTRY)

BUILD = Info("rftstream_build", "Versions of this worker.", registry=REGISTRY)

RECORDS_IN = _counter("rftstream_records_in", "Records taken from a topic.", ["role", "topic"])
RECORDS_OUT = _counter("rftstream_records_out", "Records committed to a topic.", ["role", "topic"])
BYTES_OUT = _counter("rftstream_out_bytes", "Bytes of records committed to a topic.", ["role", "topic"])
TRANSACTIONS = _counter(
    "rftstream_transactions", "Transactions by how they ended: committed, aborted, lost, refused.", ["role", "result"]
)
COMMIT_SECONDS = _short_times("rftstream_commit_seconds", "Time of one commit.", ["role"])
STEP_SECONDS = _short_times("rftstream_step_seconds", "Time of one slice of a role's own work.", ["role"])
LAG = _gauge(
    "rftstream_lag_offsets",
    "Offsets, marks of transactions included, that wait in this worker's partitions: not finished (explorer, verifier) "
    "or not read. Records that wait: rftstream_backlog_rollouts.",
    ["role", "topic"],
)
IN_HAND = _gauge("rftstream_in_hand", "Records taken and not yet committed as finished.", ["role"])
DEAD = _counter("rftstream_dead_letters", "Records given up, by reason.", ["role", "reason"])
LOST = _counter(
    "rftstream_lost_offsets",
    "Offsets that were deleted before this worker had read them, without a word on `control`.",
    ["role", "topic"],
)
WRONG_TOPICS = _gauge(
    "rftstream_wrong_topics", "Settings of the run's topics that would lose records or end the run; the run is paused."
)
THROTTLED = _gauge(
    "rftstream_throttled_seconds", "Seconds for which Kafka's brokers made this worker's clients wait, by their quotas."
)
REBALANCES = _counter("rftstream_rebalances", "Changes of the partitions that this worker owns.", ["role"])
PARTITIONS = _gauge("rftstream_partitions", "Partitions that this worker owns.", ["role"])
VERSION = _gauge("rftstream_policy_version", "Version of the weights: trained, or sampled with.", ["role"])
PUBLISHED = _gauge(
    "rftstream_published_version", "Newest version that was published, as the trainer knows it.", ["role"]
)
PROGRESS = _gauge(
    "rftstream_progress_timestamp_seconds",
    "When this worker last put something on the log, in seconds since 1970.",
    ["role"],
)
WEIGHTS_TIMESTAMP = _gauge(
    "rftstream_weights_timestamp_seconds",
    "When the weights that are sampled with were announced, in seconds since 1970: time() less this is their age.",
    ["role"],
)
WEIGHTS_PUBLISH_SECONDS = _long_times(
    "rftstream_weights_publish_seconds", "Time to publish a version: taken from the backend, and written."
)
WEIGHTS_FETCH_SECONDS = _long_times(
    "rftstream_weights_fetch_seconds", "Time to fetch a version and take it over.", ["role"]
)
TRAINING_HELD_UP_SECONDS = _long_times(
    "rftstream_training_held_up_seconds", "For how long a version that is published held up training."
)
SAMPLING_HELD_UP_SECONDS = _long_times(
    "rftstream_sampling_held_up_seconds",
    "For how long a version that is taken over held up rollouts that were being sampled; 0 if there were none.",
    ["role"],
)
DEVICE_SECONDS = _counter(
    "rftstream_device_seconds",
    "Seconds of engines (awake, falls asleep, asleep, wakes) and trainers (waits, trains) that share a device.",
    ["role", "state"],
)
MAX_CONCURRENT = _gauge(
    "rftstream_max_concurrent",
    "Rollouts that this explorer may sample at once now: explorer.max_concurrent, or what `auto` has found.",
)
SAMPLED_TOKENS = _counter("rftstream_sampled_tokens", "Tokens sampled in finished rollouts.", ["role"])
PROMPT_TOKENS = _counter(
    "rftstream_prompt_tokens",
    "Tokens of prompts that `hf` was asked for: computed, or reused from siblings, turns before and forks.",
    ["result"],
)
PARTIAL_TOKENS = _counter(
    "rftstream_partial_tokens",
    "Tokens of unfinished rollouts: saved to the log, resumed from there, lost when work was dropped or begun anew.",
    ["result"],
)
SERVER_REQUESTS = _counter(
    "rftstream_server_requests",
    "Requests to model servers that sample, by how they ended: answered; refused, with this request's rollout; failed.",
    ["server", "result"],
)
SERVER_IN_FLIGHT = _gauge(
    "rftstream_server_in_flight", "Requests on the way to a model server that samples.", ["server"]
)
SERVER_UP = _gauge(
    "rftstream_server_up",
    "Whether a model server is asked to sample (1), or has failed and is left alone (0).",
    ["server"],
)
ENVIRONMENT_SECONDS = _long_times(
    "rftstream_environment_seconds", "Time of one call of an environment, by method.", ["method"]
)
ABANDONED_CALLS = _counter(
    "rftstream_abandoned_calls",
    "Calls of environments that were given up at explorer.reply_timeout_s, by method.",
    ["method"],
)
SEGMENT_BREAKS = _counter(
    "rftstream_segment_breaks",
    "Turns and agents' calls that began a new segment, as their prompt does not go on from tokens before, by reason.",
    ["reason"],
)
ROLLOUTS = _counter("rftstream_rollouts", "Rollouts finished, by status.", ["status"])
ROLLOUT_SECONDS = _long_times(
    "rftstream_rollout_seconds",
    "Time of a finished rollout from the beginning of sampling to its last token, pauses of its explorers included.",
)
VERDICTS = _counter("rftstream_verdicts", "Rollouts scored, or the reason why not.", ["result"])
VERDICT_SECONDS = _long_times(
    "rftstream_verdict_seconds",
    "Time of a verdict from when the rollout was given to the scorer, all tries and the wait for a process included.",
)
REWARD_SPENT = _counter(
    "rftstream_reward_spent",
    "What rewards cost that ask models, by kind: requests, prompt_tokens, completion_tokens, money.",
    ["kind"],
)
GROUPS = _counter("rftstream_groups", "Groups decided, by result.", ["result"])
ADMITTED = _gauge("rftstream_groups_admitted", "Groups admitted since the run began.")
DRAWN = _gauge(
    "rftstream_problems_drawn", "Problems drawn since the run began, in runs with operators of the task side."
)
OPERATOR_PROBLEMS = _gauge(
    "rftstream_operator_problems",
    "Problems that an operator did something to since the run began, by action: skip, change.",
    ["operator", "action"],
)
OPERATOR_GROUPS = _counter(
    "rftstream_operator_groups",
    "Decided groups that an operator did something to, by action: reject, mask, shape.",
    ["operator", "action"],
)
SYNTHESISED = _counter(
    "rftstream_synthesised",
    "Problems that a model was asked for, by kind, and by result: admitted, or why not.",
    ["kind", "result"],
)
PROBLEMS_JOINED = _gauge("rftstream_problems_joined", "Problems that have joined a growing taskset.", ["taskset"])
MAX_STALENESS = _gauge("rftstream_max_staleness", "The setting `feeder.max_staleness`, in versions.")
WITHOUT_SIGNAL = _gauge(
    "rftstream_steps_without_signal", "Steps in a row, until now, in which no group had a spread of rewards."
)
STEPS = _counter("rftstream_steps", "Batches that this trainer dealt with: trained, or skipped for a NaN.", ["result"])
TRAINED_TOKENS = _counter(
    "rftstream_trained_tokens",
    "Tokens that this trainer trained on, by staleness in versions; 64 stands for all that are older.",
    ["staleness"],
)
GROUP_STALENESS = Histogram(
    "rftstream_group_staleness_versions",
    "Staleness of each group that this trainer trained on: of the oldest of its trained tokens.",
    buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 63),
    registry=REGISTRY,
)
DISK_FREE = _gauge("rftstream_disk_free_bytes", "Room on the disk of the run folder.", ["role"])
TRAIN = _gauge("rftstream_train", "The last StepRecord's metrics, by name.", ["metric"])
EVALUATION = _gauge("rftstream_evaluation", "The newest result of an evaluation, by metric.", ["evaluation", "metric"])


_names: dict[Counter | Gauge, set[tuple[str, ...]]] = {}
"""Metric -> the names that have a series."""


def begin(role: str, version: str) -> None:
    """Set the metrics of every role to 0, so that a rate sees the first event and a panel has data."""
    BUILD.info({"version": version, "python": platform.python_version()})
    for result in ("committed", "aborted", "lost", "refused"):
        TRANSACTIONS.labels(role, result)
    for reason in ("undecodable", "foreign"):
        DEAD.labels(role, reason)


def count_named(counter: Counter, *names: str, amount: float = 1.0) -> None:
    """Count something under names that people chose. Names after the first MAX_NAMES share one series."""
    counter.labels(*(names if _has_series(counter, names) else [OTHERS] * len(names))).inc(amount)


def set_named(gauge: Gauge, value: float, *names: str) -> None:
    """Set a gauge under names that people chose. Those after the first MAX_NAMES are not shown."""
    if _has_series(gauge, names):
        gauge.labels(*names).set(value)


def _has_series(metric: Counter | Gauge, names: tuple[str, ...]) -> bool:
    known = _names.setdefault(metric, set())
    if names not in known and len(known) < MAX_NAMES:
        known.add(names)
    return names in known


def named_by_people(values: Mapping[str, float], *, kept: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return the metrics or parts of one rollout that may be added to those in `kept`: at most MAX_NAMES_OF_ROLLOUT in
    all, without names that are too long. The last ones are left out."""
    found = dict(kept or {})
    for name, value in values.items():
        name = name[:MAX_NAME_CHARACTERS]
        if name in found or len(found) < MAX_NAMES_OF_ROLLOUT:
            found[name] = value
    return found


def fit_names(values: Mapping[str, float], counts: Mapping[str, int] | None = None) -> dict[str, float]:
    """Return the metrics that fit into a record which sums up many rollouts. NAMES_LEFT_OUT counts the others. Metrics
    named by rewards and environments are left out first, those that the fewest rollouts have before others. `counts`:
    metric -> number of rollouts that have it."""
    if len(values) <= MAX_NAMES_OF_RECORD:
        return dict(values)
    numbers = counts or {}
    names = [name for name in values if name != NAMES_LEFT_OUT]
    ordered = sorted(names, key=lambda name: (name.startswith(OF_REWARDS), -numbers.get(name, 0)))
    kept = set(ordered[: MAX_NAMES_OF_RECORD - 1])
    if NAMES_LEFT_OUT not in values:
        log.warning(
            "%d names of metrics, expected at most %d in one record; left out are %s, ... (does a reward or an "
            "environment put ids into the names of its metrics?)",
            len(names),
            MAX_NAMES_OF_RECORD,
            ordered[-1],
        )
    left_out = values.get(NAMES_LEFT_OUT, 0.0) + len(names) - len(kept)
    return {name: values[name] for name in names if name in kept} | {NAMES_LEFT_OUT: left_out}


class OfRun(CollectorRegistry):
    """The metrics of this process with the label `run`. A worker of a run serves it."""

    def __init__(self, run: str, metrics: CollectorRegistry = REGISTRY) -> None:
        super().__init__()
        self._run = run
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Return all metrics; Prometheus's client calls it at each scrape."""
        for metric in self._metrics.collect():
            labelled = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            labelled.samples = [
                sample._replace(labels={"run": self._run, **sample.labels}) for sample in metric.samples
            ]
            yield labelled
