"""Metrics of whole runs, from their logs: what `rftstream exporter` serves and Prometheus keeps.

Each worker serves metrics of its own work (rftstream/metrics.py), which end with the worker. Waiting rollouts, fates of
admitted ones and the age of the newest step come from the log alone, whichever workers are alive.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from rftstream.config.sections import RunConfig
from rftstream.contracts.questions import VoteEffect
from rftstream.metrics import OTHERS
from rftstream.queries.audits.balance import STAGES
from rftstream.queries.people.feedback import FeedbackView, question_state
from rftstream.queries.state.following import Look, scale_plan
from rftstream.roles.buffer import BUFFER
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.trainer import TRAINER
from rftstream.roles.verifier import VERIFIER
from rftstream.version import __version__

STATES = ("running", "paused", "draining", "stopped", "finished")
QUESTION_STATES = ("open", "judged", "expired")
MAX_NAMES = 50
"""Most names of a kind that people choose, such as evaluations, with a series each; the others share one."""
WAITS_FOR = dict(zip(STAGES, (EXPLORER.name, VERIFIER.name, BUFFER.name, TRAINER.name), strict=True))
"""Stage of a pending rollout -> the role that does the next step."""


class Kind(StrEnum):
    """The kinds of metrics in Prometheus."""

    gauge = "gauge"
    counter = "counter"
    info = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The declaration of a metric of runs. All metrics but those of the exporter itself have the label `run`."""

    name: str
    """Name of the metric in Prometheus."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ("run",)


def _gauge(name: str, help_: str, *labels: str) -> Exported:
    return Exported(name=name, kind=Kind.gauge, help=help_, labels=("run", *labels))


def _counter(name: str, help_: str, *labels: str) -> Exported:
    return Exported(name=name, kind=Kind.counter, help=help_, labels=("run", *labels))


EXPORTED = (
    Exported(
        name="rftstream_build_info", kind=Kind.info, help="Versions of the exporter.", labels=("version", "python")
    ),
    _gauge("rftstream_run_up", "1 if the exporter could read the run's log at its last look, else 0."),
    _gauge(
        "rftstream_run_read_ratio", "How much of the log the exporter has read. Below 1 the others are not right yet."
    ),
    _gauge("rftstream_run_state", "1 for the state that the run is in.", "state"),
    _gauge(
        "rftstream_run_failed",
        "1 if an error ended the run, or a rule of its own; 0 if it goes on, was stopped by somebody or has done all.",
    ),
    _gauge("rftstream_run_lost_offsets", "Offsets that were deleted from the log and not by the run itself.", "topic"),
    _gauge(
        "rftstream_backlog_rollouts",
        "Pending rollouts, as `audit` counts them, whose next step is this role's.",
        "role",
    ),
    _gauge("rftstream_backlog_batches", "Batches that wait to be trained."),
    _gauge("rftstream_workers_wanted", "Workers for this backlog, as `rftstream scale-plan` says.", "role"),
    _gauge("rftstream_run_partitions", "Partitions of its topics: no more explorers, or verifiers, work."),
    _counter("rftstream_run_rollouts_admitted_total", "Rollouts that the feeder asked for."),
    _counter("rftstream_run_rollouts_total", "Rollouts by what became of them.", "result"),
    _counter("rftstream_run_groups_admitted_total", "Groups that the feeder asked for."),
    _counter("rftstream_run_groups_total", "Groups by what became of them, and why.", "result", "reason"),
    _counter("rftstream_run_dead_letters_total", "Records given up, by reason.", "reason"),
    _gauge("rftstream_run_version", "The version in force: steps that were trained."),
    _gauge("rftstream_run_steps_planned", "The version at which the run ends; not there if that is not known."),
    _gauge("rftstream_run_last_step_timestamp_seconds", "When the version in force was recorded."),
    _gauge("rftstream_run_oldest_open_timestamp_seconds", "When the oldest group without an outcome was admitted."),
    _gauge("rftstream_run_reward", "Mean reward of the rollouts decided between the last two steps, filtered or not."),
    _gauge("rftstream_run_evaluation", "Newest mean of an evaluation.", "evaluation"),
    _gauge("rftstream_run_epoch", "How often a process took this role over: the epoch in force.", "role"),
    _gauge("rftstream_run_questions", "Questions to people by how they stand: open, judged, expired.", "state"),
    _counter("rftstream_run_votes_total", "Votes of people by what became of them.", "effect"),
    _gauge("rftstream_run_votes_pending", "Votes of people that the buffer has not judged yet."),
    _gauge("rftstream_run_oldest_question_timestamp_seconds", "When the oldest open question was asked."),
)
"""Every metric of runs. Tests check docs, dashboards and alerts against it."""

Figures = dict[str, list[tuple[tuple[str, ...], float]]]
"""Name of a metric -> its label values after the run's, and the value."""


def figures_of(config: RunConfig, look: Look, people: FeedbackView, now: float) -> Figures:
    """Return the metrics of a run after a poll. `people`: its questions and votes at that time."""
    status, counts = look.status, look.counts
    history = status.history
    found: Figures = {one.name: [] for one in EXPORTED}

    def put(name: str, value: float | None, *labels: str) -> None:
        if value is not None:
            found[name].append((labels, value))

    put("rftstream_run_up", 1)
    put("rftstream_run_read_ratio", look.share_read)
    for state in STATES:
        put("rftstream_run_state", state == status.state, state)
    put("rftstream_run_failed", status.failed)
    for topic, count in status.lost.items():
        put("rftstream_run_lost_offsets", count, topic)
    put("rftstream_run_partitions", config.transport.partitions)
    put("rftstream_backlog_batches", status.lag["batches"])
    put("rftstream_run_version", history.version)
    put("rftstream_run_steps_planned", status.num_steps)
    if history.current is not None and history.current.recorded_at:
        put("rftstream_run_last_step_timestamp_seconds", history.current.recorded_at)
    put("rftstream_run_oldest_open_timestamp_seconds", look.oldest_open_at)
    rewards = history.rewards()
    put("rftstream_run_reward", rewards[-1] if rewards else None)
    evaluations = {evaluation.evaluation: evaluation.metrics.get("mean") for evaluation in history.evaluations}
    for name, mean in list(evaluations.items())[:MAX_NAMES]:
        put("rftstream_run_evaluation", mean, name)
    for claim in status.control.claims.values():
        put("rftstream_run_epoch", claim.epoch, claim.role)
    for reason, count in _few(status.dead_letters).items():
        put("rftstream_run_dead_letters_total", count, reason)
    found |= people_figures(people, now)
    if counts is None:
        return found
    for stage, role in WAITS_FOR.items():
        put("rftstream_backlog_rollouts", counts.rollouts.pending_by_stage[stage], role)
    for one in scale_plan(config, counts.rollouts):
        put("rftstream_workers_wanted", one.wanted, one.role)
    put("rftstream_run_rollouts_admitted_total", counts.rollouts.admitted)
    put("rftstream_run_groups_admitted_total", counts.groups.admitted)
    for result in ("trained", "expired", "filtered", "dead"):
        put("rftstream_run_rollouts_total", getattr(counts.rollouts, result), result)
    for (result, reason), count in _few_reasons(counts.reasons).items():
        put("rftstream_run_groups_total", count, result, reason)
    return found


def people_figures(people: FeedbackView, now: float) -> Figures:
    """Return the metrics of questions and votes; none if there are none."""
    if not people.questions and not people.votes:
        return {}
    states = [question_state(people, question, now) for question in people.questions]
    effects = Counter(vote.judgement.effect for vote in people.votes if vote.recorded)
    asked = [question.asked_at for question, state in zip(people.questions, states, strict=True) if state == "open"]
    return {
        "rftstream_run_questions": [((state,), states.count(state)) for state in QUESTION_STATES],
        "rftstream_run_votes_total": [((str(effect),), effects[effect]) for effect in VoteEffect],
        "rftstream_run_votes_pending": [((), len(people.votes) - effects.total())],
        "rftstream_run_oldest_question_timestamp_seconds": [((), min(asked))] if asked else [],
    }


def _few(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of the most frequent names, and of all others together."""
    kept = Counter(counts).most_common(MAX_NAMES)
    rest = sum(counts.values()) - sum(count for _, count in kept)
    return dict(kept) | ({OTHERS: rest} if rest else {})


def _few_reasons(counts: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for result in {result for result, _ in counts}:
        few = _few({reason: count for (one, reason), count in counts.items() if one == result})
        found |= {(result, reason): count for reason, count in few.items()}
    return found


class RunCollector:
    """Gives Prometheus the metrics of several runs. The exporter registers it."""

    def __init__(self, runs: Callable[[], Iterable[tuple[str, Figures]]]) -> None:
        """`runs` returns the name and the current figures of each run."""
        self._runs = runs

    def collect(self) -> Iterator[Metric]:
        """Return all metrics; Prometheus's client calls it at each scrape."""
        runs = list(self._runs())
        for one in EXPORTED:
            if one.kind is Kind.info:
                about = {"version": __version__, "python": platform.python_version()}
                yield InfoMetricFamily(one.name.removesuffix("_info"), one.help, about)
                continue
            family = CounterMetricFamily if one.kind is Kind.counter else GaugeMetricFamily
            metric = family(one.name.removesuffix("_total"), one.help, labels=one.labels)
            for run, figures in runs:
                for labels, value in figures.get(one.name, ()):
                    metric.add_metric([run, *labels], value)
            yield metric


def unreadable() -> Figures:
    """Return the figures of a run whose log could not be read yet."""
    return {"rftstream_run_up": [((), 0.0)]}
