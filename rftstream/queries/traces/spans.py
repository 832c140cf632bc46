"""A run as spans of a tracing system. They are made from its log, live or weeks later, without any code in the roles.

Each group is a trace: admitted until decided, with its rollouts, their model calls, and the way to their verdicts.
Each batch is a trace: closed until trained, with the steps that trained it, the trainers that started with its
version, the weights and the evaluations of their versions; evaluations of version 0 are a trace of their own. Links
lead from a group to its batch, from a batch to its groups, and from a rollout to the steps whose versions sampled it.

Ids are digests of the run's id and of a span's subject, so a span always gets the same id. Times are those of the
records, in seconds since 1970. A span is made once all its records are on the log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rftstream.contracts.batches import BatchManifest
from rftstream.contracts.messages import Message
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.contracts.versions import EvalResult, StepRecord, VersionName, WeightsAnnounced
from rftstream.service.role import Log

MAX_LINKS = 128
"""Most links of one span, the default of the specification. A batch with more groups has links to the first ones."""

TOPICS = ("tasks", "rollouts", "verified", "batches", "outcomes", "steps", "weights", "evals")
"""The topics, in this order, so that a reader that starts at the beginning knows a group's admission before its
outcome."""

Value = str | int | float | bool | tuple[str, ...]

PROVIDER = "rftstream"
"""Value of `gen_ai.provider.name`: the weights are the run's own, whichever engine computed them."""


@dataclass(frozen=True, slots=True)
class SpanKey:
    """The ids by which a tracing system knows a span."""

    trace_id: int
    """128 bits, not 0."""
    span_id: int
    """64 bits, not 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A piece of work that took some time."""

    key: SpanKey
    name: str
    """Kind of span. There are few kinds, so that tracing systems can group by them."""
    start_s: float
    end_s: float
    """End in seconds, not before the start."""
    parent: SpanKey | None = None
    """Id of the parent. None: this is the root of its trace."""
    attributes: Mapping[str, Value] = field(default_factory=dict)
    links: tuple[SpanKey, ...] = ()
    error: str | None = None
    """Why it failed. None: it did not."""


class SpanReader:
    """Makes spans from a run's log. Each call of `read` yields the spans that became complete since the last call.
    After an error, make a new reader: it starts at the beginning, and makes the same ids.

    It keeps the admission times of groups without an outcome, and the times at which batches were closed and trained.
    """

    def __init__(self, log: Log, run_id: str, model: str = "") -> None:
        """`model`: the name of the model that the run trains; empty if it has none."""
        self._log, self._run_id, self._model = log, run_id, model
        self._names: dict[str, Value] = {"gen_ai.provider.name": PROVIDER}
        if model:
            self._names["gen_ai.request.model"] = model
        self._next: dict[str, dict[TopicPartition, int]] = {topic: {} for topic in TOPICS}
        self._admitted: dict[bytes, float] = {}
        self._closed: dict[int, float] = {}
        self._groups: dict[int, tuple[str, ...]] = {}
        self._newest_batch = -1
        self._trained: dict[VersionName, float] = {}

    @property
    def resource(self) -> dict[str, Value]:
        """Return what all spans of the run have in common. The names `rl.*` are those that OpenTelemetry's group for
        generative AI discusses (open-telemetry/semantic-conventions-genai, issue 88)."""
        model = {"rl.model.name": self._model} if self._model else {}
        return {"rftstream.run": self._run_id, "rl.system": PROVIDER, "rl.run.id": self._run_id, **model}

    def read(self) -> Iterator[Span]:
        """Yield the spans that became complete. TransportError if the log does not answer."""
        # The ends of effects are looked up before the ends of their causes, so a reader of a live run meets each
        # cause before its effect.
        ends = {topic: self._log.ends(topic) for topic in reversed(TOPICS)}
        for record in self._records("tasks", ends["tasks"], bodies=False):  # their headers are enough
            self._admitted.setdefault(record.header("group_id") or b"", record.timestamp_s)
        for topic in TOPICS[1:]:
            for record, message in self._log.rule.messages(self._records(topic, ends[topic])):
                if message is not None:
                    yield from self._spans(record, message)

    def _records(self, topic: str, ends: Mapping[TopicPartition, int], *, bodies: bool = True) -> Iterator[Record]:
        start = self._next[topic]
        for record in self._log.read(topic, start=start, bodies=bodies):
            if record.offset < ends[record.place]:
                start[record.place] = record.offset + 1
                yield record

    def _key(self, trace: str, span: str = "") -> SpanKey:
        """Return the key of a span, from its trace's subject and its own subject. Without a subject, it is the root."""
        whole = hashlib.sha256(f"{self._run_id}\0{trace}".encode()).digest()
        part = hashlib.sha256(f"{self._run_id}\0{trace}\0{span}".encode()).digest()
        return SpanKey(int.from_bytes(whole[:16]) or 1, int.from_bytes(part[:8]) or 1)

    def _of_group(self, group_id: str, span: str = "") -> SpanKey:
        return self._key(f"group {group_id}", span)

    def _of_batch(self, sequence: int, span: str = "") -> SpanKey:
        return self._key(f"batch {sequence}", span)

    def _of_version(self, name: VersionName) -> SpanKey:
        """Return the key of the step that made a version, or of the start of the trainer that took it over. The step
        after batch k makes version k + 1."""
        return self._of_batch(name.version - 1, f"step {name.version}/{name.trainer_epoch}")

    def _spans(self, record: Record, message: Message) -> Iterator[Span]:
        match message:
            case Rollout():
                yield from self._rollout(record, message)
            case VerifiedRollout():
                yield self._verdict(record, message)
            case GroupOutcome() if not message.late:
                yield self._group(record, message)
            case BatchManifest():
                self._close(record, message)
            case StepRecord() if message.batch_sequence is not None:
                yield from self._step(record, message, message.batch_sequence)
            case StepRecord() if message.name.version > 0:
                yield self._start(record, message)
            case WeightsAnnounced() if message.name.version > 0 and not message.resumed:
                yield self._weights(record, message)
            case EvalResult():
                yield self._evaluation(record, message)
            case _:
                pass

    # ------------------------------------------------------------------------------------------ groups

    def _rollout(self, record: Record, rollout: Rollout) -> Iterator[Span]:
        ids = rollout.ids
        key = self._of_group(ids.group_id, f"rollout {ids.rollout_id}")
        spans = (span for segment in rollout.segments for span in segment.versions)
        versions = {one.version: VersionName(trainer_epoch=one.trainer_epoch, version=one.version) for one in spans}
        start = rollout.started_at or record.timestamp_s
        facts: dict[str, Value] = {
            "rftstream.rollout_id": ids.rollout_id,
            "rftstream.status": rollout.status.value,
            "rftstream.num_tokens": rollout.num_tokens,
            "rftstream.record": str(record),
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.conversation.id": ids.rollout_id,
            "gen_ai.request.temperature": rollout.sampling.temperature,
            "gen_ai.request.top_p": rollout.sampling.top_p,
            "gen_ai.usage.output_tokens": rollout.num_tokens,
            **self._names,
        }
        if versions:
            facts |= {"rftstream.version.oldest": min(versions), "rftstream.version.newest": max(versions)}
        yield Span(
            key=key,
            name="rollout",
            parent=self._of_group(ids.group_id),
            start_s=start,
            end_s=max(start, rollout.finished_at or record.timestamp_s),
            attributes=facts,
            links=tuple(self._of_version(versions[version]) for version in sorted(versions) if version > 0)[:MAX_LINKS],
            error=rollout.error or "failed" if rollout.status is RolloutStatus.failed else None,
        )
        for call in rollout.calls:
            yield Span(
                key=self._of_group(ids.group_id, f"call {ids.rollout_id}/{call.number}"),
                name="call",
                parent=key,
                start_s=call.started_at or start,
                end_s=max(call.started_at or start, call.finished_at),
                attributes={
                    "gen_ai.operation.name": "chat",
                    "gen_ai.conversation.id": ids.rollout_id,
                    "gen_ai.response.id": f"{ids.rollout_id}/call/{call.number}",
                    "gen_ai.response.finish_reasons": (call.finish_reason,),
                    "gen_ai.usage.input_tokens": call.start,
                    "gen_ai.usage.output_tokens": call.count,
                    **self._names,
                    "rftstream.call": call.number,
                    "rftstream.dialect": call.dialect,
                    "rftstream.finish_reason": call.finish_reason,
                },
            )

    def _verdict(self, record: Record, verified: VerifiedRollout) -> Span:
        """Return the span from the rollout's last token to its verdict, including the wait for a verifier."""
        ids, verdict = verified.ids, verified.verdict
        end = verified.verified_at or record.timestamp_s
        facts: dict[str, Value] = {"rftstream.rollout_id": ids.rollout_id, "rftstream.record": str(record)}
        if verdict is not None:
            facts |= {"rftstream.reward": verdict.reward, "rftstream.scorer": verdict.scorer}
        if verified.reason is not None:
            facts["rftstream.reason"] = verified.reason.value
        sampled = verified.rollout.finished_at if verified.rollout is not None else 0.0
        return Span(
            key=self._of_group(ids.group_id, f"verdict {ids.rollout_id}"),
            name="verdict",
            parent=self._of_group(ids.group_id, f"rollout {ids.rollout_id}"),
            start_s=min(sampled or end, end),
            end_s=end,
            attributes=facts,
            error=None if verdict is not None else verified.detail or facts["rftstream.reason"],  # type: ignore[arg-type]
        )

    def _group(self, record: Record, outcome: GroupOutcome) -> Span:
        end = outcome.decided_at or record.timestamp_s
        start = min(self._admitted.pop(outcome.group_id.encode(), end), end)
        facts: dict[str, Value] = {
            "rftstream.group_id": outcome.group_id,
            "rftstream.taskset": outcome.taskset,
            "rftstream.result": outcome.result.value,
            "rftstream.reason": outcome.reason,
            "rftstream.num_rollouts": len(outcome.rollouts),
        }
        links: tuple[SpanKey, ...] = ()
        if outcome.batch_sequence is not None:
            facts["rftstream.batch"] = outcome.batch_sequence
            links = (self._of_batch(outcome.batch_sequence),)
        return Span(
            key=self._of_group(outcome.group_id),
            name="group",
            start_s=start,
            end_s=end,
            attributes=facts,
            links=links,
            error=outcome.reason if outcome.result is GroupResult.dead else None,
        )

    # ------------------------------------------------------------------------------------------ batches

    def _close(self, record: Record, manifest: BatchManifest) -> None:
        number = manifest.batch_sequence
        self._closed[number] = max(self._closed.get(number, 0.0), record.timestamp_s)
        if number > self._newest_batch:
            self._groups[number] = self._groups.get(number, ()) + manifest.groups + manifest.reused

    def _step(self, record: Record, step: StepRecord, sequence: int) -> Iterator[Span]:
        end = step.recorded_at or record.timestamp_s
        start = min(self._closed.get(sequence, end), end)
        self._trained[step.name] = end
        if sequence > self._newest_batch:  # a trainer that took over may train it again: another step
            self._newest_batch = sequence
            groups = self._groups.pop(sequence, ())
            yield Span(
                key=self._of_batch(sequence),
                name="batch",
                start_s=start,
                end_s=end,
                attributes={"rftstream.batch": sequence, "rftstream.num_groups": len(groups)},
                links=tuple(self._of_group(group) for group in groups[:MAX_LINKS]),
            )
        metrics = {f"rftstream.{name}": step.metrics[name] for name in ("reward", "loss") if name in step.metrics}
        yield Span(
            key=self._of_version(step.name),
            name="step",
            parent=self._of_batch(sequence),
            start_s=start,
            end_s=end,
            attributes={**self._version_facts(step.name), "rftstream.skipped": step.skipped, **metrics},
        )

    def _start(self, record: Record, step: StepRecord) -> Span:
        """Return a span of length 0 for a trainer that started with a version. From then on the version has that
        trainer's epoch in its name, so later spans are below this one and not below the step that made the version."""
        end, sequence = step.recorded_at or record.timestamp_s, step.name.version - 1
        self._trained[step.name] = end
        return Span(
            key=self._of_version(step.name),
            name="start",
            parent=self._of_batch(sequence) if sequence <= self._newest_batch else None,
            start_s=end,
            end_s=end,
            attributes=self._version_facts(step.name),
        )

    def _weights(self, record: Record, weights: WeightsAnnounced) -> Span:
        name, end = weights.name, weights.announced_at or record.timestamp_s
        return Span(
            key=self._of_batch(name.version - 1, f"weights {name.version}/{name.trainer_epoch}"),
            name="weights",
            parent=self._of_version(name),
            start_s=min(self._trained.get(name, end), end),
            end_s=end,
            attributes={
                **self._version_facts(name),
                "rftstream.kind": weights.kind.value,
                "rftstream.num_bytes": weights.num_bytes,
            },
        )

    def _evaluation(self, record: Record, result: EvalResult) -> Span:
        name, end = result.name, result.evaluated_at or record.timestamp_s
        facts: dict[str, Value] = {**self._version_facts(name), "rftstream.evaluation": result.evaluation}
        if "mean" in result.metrics:
            facts["rftstream.mean"] = result.metrics["mean"]
        facts["rftstream.num_unscored"] = result.num_unscored
        return Span(
            key=self._of_batch(name.version - 1, f"evaluation {result.evaluation} {name.version}/{name.trainer_epoch}"),
            name="evaluation",
            parent=self._of_version(name) if name.version > 0 else None,
            start_s=end - max(0.0, result.metrics.get("seconds", 0.0)),
            end_s=end,
            attributes=facts,
        )

    def _version_facts(self, name: VersionName) -> dict[str, Value]:
        return {"rftstream.version": name.version, "rftstream.trainer_epoch": name.trainer_epoch}
