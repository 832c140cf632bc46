"""The state of a live run for its progress views: rates, lags, a completion, a standstill. It reads the log only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rftstream.algorithms.reward_signs import Sign, find_reward_signs
from rftstream.config.sections import RunConfig
from rftstream.contracts import codec
from rftstream.contracts.control import DesiredState
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.errors import ContractError, TransportError
from rftstream.launch.supervisor import Slot
from rftstream.models.rendering import Renderer, joined, pieces_of_turns
from rftstream.queries.curves.history import LONG_WAIT
from rftstream.queries.curves.training_watch import find_training_signs
from rftstream.queries.formatting import run_named
from rftstream.queries.state.standstill import (
    FailingTaskset,
    Standstill,
    find_failing,
    find_standstill,
    look_at_movement,
)
from rftstream.queries.state.workers import ask_workers
from rftstream.roles.buffer import BUFFER
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.verifier import VERIFIER
from rftstream.runs.folder import RunFolder, shown_path
from rftstream.runs.making.elsewhere import steps_followed
from rftstream.runs.modules import edited_modules
from rftstream.runs.observer import Observer
from rftstream.runs.studio_address import find_address
from rftstream.service.reading import read_records
from rftstream.transport.base import Transport

LAG_EVERY_S = 2.0
SAMPLE_EVERY_S = 20.0
TROUBLE_EVERY_S = 30.0
"""Seconds between two checks for a standstill or failing rollouts."""
RATE_OVER_S = 60.0
RATE_OVER_STEPS = 4
"""Seconds, and newest steps, that rates are taken over: whichever is more."""
LAGS = {topic: spec.name for spec in (EXPLORER, VERIFIER, BUFFER) for topic in spec.consumes}
"""Topic -> the group whose lag is shown; `verified` holds the open groups, too."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion in readable form."""

    prompt: str
    completion: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class Rates:
    """The speed of a run, measured over its newest steps."""

    steps_per_s: float
    rollouts_per_s: float
    tokens_per_s: float


class Watch:
    """Collects what the progress views show, each thing at its own interval.

    The session makes it. A view passes it all news by `absorb`, calls `look` before it draws, and reads the attributes.
    """

    def __init__(
        self,
        config: RunConfig,
        transport: Transport,
        observer: Observer,
        slots: Sequence[Slot],
        *,
        folder: RunFolder,
        renderer: Renderer | None = None,
    ) -> None:
        """Make a watch without any data. A `renderer` shows completions with their special tokens."""
        self.config = config
        self.observer = observer
        self.slots = slots
        self.title = folder.run_id
        self.began = time.monotonic()
        self.signs: tuple[Sign, ...] = ()
        """Signs that something may be wrong with the training."""
        self.sample: Sample | None = None
        self.lags: dict[str, int] = {}
        self.num_loaded: int | None = 0
        """Workers of `slots` that have loaded what they need. None once the run moves."""
        self.num_decided = 0
        """Groups that the buffer has decided about, before the first step."""
        self.studio: str | None = None
        """Address of a studio that shows the run."""
        self.edited: tuple[str, ...] = ()
        """Own modules, such as a reward's, whose files have other code than the run began with."""
        self.standstill: Standstill | None = None
        self._results: list[EvalResult] = []
        self.failing: tuple[FailingTaskset, ...] = ()
        self._folder = folder
        self._moving_since = time.time()
        """Time since which the run should move. Before that, it had not begun here or was paused."""
        self._trouble_at = time.monotonic() + TROUBLE_EVERY_S
        self._transport = transport
        self._renderer = renderer
        self._lag_at = 0.0
        self._sample_at = time.monotonic() + 1.0
        self._shown: dict[TopicPartition, int] | None = None
        """Partition of `verified` -> its end when a completion of it was last read; at first what a resumed run had."""

    @property
    def steps(self) -> int | None:
        """Return the number of steps of the whole run, or None if that is not known."""
        ended = self.observer.control.ended
        counted = ended.batches if ended is not None else None
        imported = (self.config.run.imported_versions or (0, None))[1]
        followed = steps_followed(self.config, self.observer.control, self.observer.curve.settings)
        return min(filter(None, (followed, counted, imported)), default=None)

    def absorb(self, news: Sequence[StepRecord | EvalResult]) -> None:
        """Keep the results of evaluations, to be told. A step shows that the workers have loaded."""
        for message in news:
            if isinstance(message, EvalResult):
                self._results.append(message)
            else:
                self.num_loaded = None

    def named(self, text: str) -> str:
        """Return a text whose commands name this run where they say RUN."""
        return run_named(text, shown_path(self._folder.path))

    def _find_signs(self, steps: Sequence[StepRecord]) -> tuple[Sign, ...]:
        metrics = [(step.name.version, step.metrics) for step in steps]
        found = (
            *find_training_signs(steps, self._results, self.config),
            *find_reward_signs(metrics, self._results, self.config),
        )
        return tuple(replace(sign, text=self.named(sign.text)) for sign in found)

    def look(self) -> None:
        """Refresh what is due: signs in the steps and, from the log, lags, a completion and a standstill."""
        now, curve = time.monotonic(), self.observer.curve
        try:
            if now >= self._lag_at:
                self._lag_at = now + LAG_EVERY_S
                since = curve.changed_at
                self.signs = self._find_signs([step for step in curve.steps() if step.name.version >= since])
                admin = self._transport.admin
                self.lags = {topic: sum(admin.lag(group, topic).values()) for topic, group in LAGS.items()}
                self.num_loaded = self._count_loaded()
                if curve.last is None:
                    self.num_decided = sum(admin.end_offsets("outcomes").values())
                self.studio = find_address(self._folder)
                self.edited = tuple(map(self.named, edited_modules(self._folder)))
            if self._shown is None:
                self._shown = dict(self._transport.admin.end_offsets("verified"))
            if now >= self._sample_at:
                self._sample_at = now + SAMPLE_EVERY_S
                self.sample = self._newest_completion() or self.sample
            if now >= self._trouble_at:
                self._trouble_at = now + TROUBLE_EVERY_S
                self.standstill = self._look_for_standstill()
                self.failing = find_failing(self._transport)
        except TransportError:
            pass  # the next call may succeed; the display must not end a run

    def rates(self) -> Rates | None:
        """Return the rates over the newest steps, or None if there are too few."""
        recent = self.observer.curve.recent
        if len(recent) < 2:
            return None
        slow = recent[-min(len(recent), 1 + RATE_OVER_STEPS)].recorded_at
        since = min(recent[-1].recorded_at - RATE_OVER_S, slow)
        if recent[-1].recorded_at >= self._moving_since:  # none from before a stop or a pause
            since = max(since, self._moving_since)
        steps = [step for step in recent if step.recorded_at >= since]
        seconds = steps[-1].recorded_at - steps[0].recorded_at
        if seconds <= 0:
            return None
        counted = steps[1:]
        return Rates(
            len(counted) / seconds,
            sum(step.metrics.get("rollouts", 0.0) for step in counted) / seconds,
            sum(step.metrics.get("tokens", 0.0) for step in counted) / seconds,
        )

    def seconds_left(self) -> float | None:
        """Estimate the seconds until the run ends by its steps or hours; None if unknown. Steps tell nothing while the
        run stands still, or one takes far longer than those before."""
        if self.observer.control.finished is not None:
            return None
        run, curve, rates = self.config.run, self.observer.curve, self.rates()
        left = []
        if self.steps and rates and self._is_moving(rates):
            left.append(max(0, self.steps - curve.version) / rates.steps_per_s)
        if run.hours and (manifest := self.observer.control.manifest):
            left.append(max(0.0, manifest.created_at + run.hours * 3600 - time.time()))
        return min(left) if left else None

    def _is_moving(self, rates: Rates) -> bool:
        idle_s = time.time() - max(self.observer.curve.recent[-1].recorded_at, self._moving_since)
        return self.standstill is None and idle_s * rates.steps_per_s <= LONG_WAIT

    def _look_for_standstill(self) -> Standstill | None:
        control = self.observer.control
        paused = control.state is not None and control.state.state is DesiredState.paused
        if paused or control.finished is not None:
            self._moving_since = time.time()
            return None
        return find_standstill(
            look_at_movement(
                self.config,
                self._transport,
                steps=tuple(self.observer.curve.recent),
                lag=self.lags,
                workers=ask_workers(self._folder),
                now=time.time(),
                began_at=self._moving_since,
            )
        )

    def _count_loaded(self) -> int | None:
        """Return how many workers have loaded what they need; None once all have, or the run has moved."""
        if self.num_loaded is None or self.lags["rollouts"] or self.lags["verified"]:
            return None
        answers = [worker.health or {} for worker in ask_workers(self._folder)]
        count = sum("process" in answer and answer.get("version", 0) is not None for answer in answers)
        return None if self.slots and count >= len(self.slots) else count

    def _newest_completion(self) -> Sample | None:
        """Read the last record of the partition of `verified` that has grown most since it was last read, so that no
        completion is shown twice. Return None if none has grown."""
        ends, before = self._transport.admin.end_offsets("verified"), self._shown or {}
        grown = {place: end - before.get(place, 0) for place, end in ends.items()}
        place = max(sorted(grown), key=grown.__getitem__)
        if grown[place] <= 0:
            return None
        newest = range(max(before.get(place, 0), ends[place] - 3), ends[place])  # some offsets may be gaps
        self._shown = {**before, place: ends[place]}
        try:
            for _, record in sorted(read_records(self._transport, place, newest).items(), reverse=True):
                if (sample := self._sample_of(record)) is not None:
                    return sample
        except ContractError:
            pass
        return None

    def _sample_of(self, record: Record) -> Sample | None:
        """Return the completion in a record, or None if it has none."""
        message = codec.from_record(record) if record.value is not None else None
        if not isinstance(message, VerifiedRollout) or (rollout := message.rollout) is None or rollout.problem is None:
            return None
        shown = pieces_of_turns(self._renderer, rollout.turns, rollout.segments, rollout.calls)
        said = [joined(pieces) for pieces, turn in zip(shown, rollout.turns, strict=True) if turn.role == "assistant"]
        return Sample(
            prompt=rollout.problem.messages[-1].content,
            completion="\n".join(said),
            reward=None if message.verdict is None else message.verdict.reward,
        )
