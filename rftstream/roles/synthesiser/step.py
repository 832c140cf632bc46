"""The synthesiser: it reads the configured topics, and asks a model for new problems made from the problems there.

A record in hand is finished when every problem made from it is decided: admitted after a check, or rejected with a
reason. All of these problems are published in the transaction that commits the record's position, under ids derived
from the record. So the work of a killed synthesiser is done again, and no problem is published twice."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rftstream import metrics
from rftstream.clock import Clock
from rftstream.config.role_sections import SynthesiserSection
from rftstream.contracts.ids import derive_seed
from rftstream.contracts.problems import NewProblem, RejectedProblem, RejectReason, problem_digest
from rftstream.contracts.records import Record
from rftstream.contracts.tasks import Problem, RolloutIds, Sampling
from rftstream.contracts.versions import WeightsAnnounced
from rftstream.data.tasksets.growing import GrowingTasksets
from rftstream.errors import ConfigError, ContractError
from rftstream.rewards.base import Scorer, ScoreReply, ScoreRequest
from rftstream.roles.synthesiser.making import Making, wanted_of
from rftstream.roles.synthesiser.models import ModelReply, ModelRequest, SynthesisModel
from rftstream.roles.synthesiser.parents import NotYetKnown, ParentChooser
from rftstream.roles.synthesiser.wording import AnswerReader, RejectedAnswer, request_for
from rftstream.service.records.problem_records import PROBLEMS
from rftstream.service.role import ConcurrentStep, Done, Item, Publish, Received, Wakeup

log = logging.getLogger(__name__)

WAIT_S = 0.02
"""Seconds to wait for the scorer when there is no other work."""


@dataclass(slots=True)
class _InHand:
    """A record in hand, with its problems in the making; None while its problem is not known."""

    item: Item
    makings: list[Making] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesisPlan:
    """The settings for making problems. `workers/synthesiser.py` makes it from the run file."""

    settings: SynthesiserSection
    into: str
    """Name of the taskset that new problems join."""
    run_seed: int
    asking: Sampling
    """Sampling settings of requests."""
    attempting: Sampling
    """Sampling settings of attempts."""
    reader: AnswerReader
    num_tokens: Callable[[Problem], int]
    """Returns the length of a problem's prompt. ConfigError if it cannot be rendered."""
    context: int | None
    """The longest prompt + completion in tokens; None if unknown."""


@dataclass(slots=True)
class _Waiting:
    """The problems in the making that wait for answers or scores, by the key of the request."""

    makings: dict[str, Making] = field(default_factory=dict)
    attempts: set[str] = field(default_factory=set)
    """Keys of the requests that are attempts."""

    def add(self, key: str, making: Making) -> None:
        self.makings[key] = making
        making.keys.add(key)

    def pop(self, key: str) -> Making | None:
        self.attempts.discard(key)
        making = self.makings.pop(key, None)
        if making is not None:
            making.keys.discard(key)
        return making


class SynthesiserStep(ConcurrentStep):
    """The step of a synthesiser. `workers/synthesiser.py` makes it, and ConcurrentService calls it in this order:

    - `follow` applies announcements of weights and records of `problems`.
    - `start` takes a record in hand.
    - `advance` asks the model, has attempts scored, and returns the finished records, each with its problems.
    - `drop` forgets the problems made from records of lost partitions. `close` closes model and scorer.
    """

    def __init__(
        self,
        plan: SynthesisPlan,
        *,
        model: SynthesisModel,
        scorer: Scorer,
        parents: ParentChooser,
        growing: GrowingTasksets,
        clock: Clock,
    ) -> None:
        """`growing` holds the run's growing tasksets, still empty."""
        self._plan, self._model, self._scorer = plan, model, scorer
        self._parents, self._growing, self._clock = parents, growing, clock
        self._in_hand: dict[int, _InHand] = {}
        self._waiting = _Waiting()
        self._watch = RejectWatch(plan.settings.warn_share)
        self._num_admitted = self._num_rejected = 0

    # ------------------------------------------------------------------------------------------ the loop's side

    @property
    def room(self) -> int:
        """Number of further records that this worker can take now."""
        return self._plan.settings.max_concurrent - len(self._in_hand)

    def follow(self, received: Received) -> None:
        """Apply an announcement of weights or a record of `problems`."""
        if isinstance(received.message, WeightsAnnounced):
            self._model.announced(received.message)
        elif received.record.topic == PROBLEMS.topic:
            self._growing.absorb(received.message, received.record.offset)

    def start(self, item: Item) -> None:
        """Take a record in hand."""
        self._in_hand[item.number] = _InHand(item)

    def drop(self, numbers: Collection[int]) -> None:
        """Forget records and their problems in the making."""
        for number in numbers:
            if (work := self._in_hand.pop(number, None)) is not None:
                for making in work.makings or ():
                    self._forget(making)

    def not_begun(self) -> Collection[int]:
        """Return all records in hand, since a leaving worker does not wait for a model."""
        return list(self._in_hand)

    def advance(self) -> Sequence[Done]:
        """Begin new records, process answers and scores, and return the finished records."""
        for work in self._in_hand.values():
            if work.makings is None:
                self._begin(work)
        for said in self._model.step():
            self._take(said)
        only_scores = self._scorer.num_active > 0 and self._model.idle_s() > 0
        for reply in self._scorer.poll(WAIT_S if only_scores else 0.0):
            self._scored(reply)
        return [self._finish(number) for number, work in list(self._in_hand.items()) if _is_ended(work)]

    def idle_s(self) -> float:
        """Return the seconds until the model may have answered; 0 while attempts are scored."""
        return 0.0 if self._scorer.num_active else self._model.idle_s()

    def wakeups(self) -> Sequence[Wakeup]:
        """Return the wakeups that ring when the model has answered."""
        return self._model.wakeups()

    def undecodable(self, record: Record, ids: RolloutIds, error: ContractError) -> tuple[Publish, ...]:
        """Return nothing, since no problem is made from an undecodable record."""
        return ()

    def health(self) -> Mapping[str, object]:
        """Return the number of problems in the making, admitted and rejected, and any faults."""
        version = self._model.version
        return {
            **({} if version is None else {"version": version.version}),
            "making": sum(len(work.makings or ()) for work in self._in_hand.values()),
            "problems_admitted": self._num_admitted,
            "problems_rejected": self._num_rejected,
            "rejects_most": self._watch.trouble(),
            "waits_for": self._model.waits_for(),
        }

    def close(self) -> None:
        """End the model and the scorer."""
        self._model.close()
        self._scorer.close()

    # ------------------------------------------------------------------------------------------ making

    def _begin(self, work: _InHand) -> None:
        """Ask the model for new problems made from a record's problem, once that problem is known."""
        settings, into = self._plan.settings, self._plan.into
        try:
            parent = self._parents.parent_of(work.item.received.message, work.item.received.record.offset)
        except NotYetKnown:
            return
        enough = settings.most is not None and len(self._growing.tasksets[into]) >= settings.most
        work.makings = []
        if parent is not None and not enough:
            work.makings = wanted_of(parent, settings, into=into, made_by=self._model.name)
        for making in work.makings:
            request = request_for(making.kind, making.parent.problem, settings.prompts)
            self._ask(making, making.problem_id, request, self._plan.asking, is_attempt=False)

    def _ask(self, making: Making, key: str, problem: Problem, sampling: Sampling, *, is_attempt: bool) -> None:
        seed = derive_seed(self._plan.run_seed, "synthesis", key)
        self._waiting.add(key, making)
        if is_attempt:
            self._waiting.attempts.add(key)
        self._model.ask(ModelRequest(key=key, problem=problem, sampling=sampling, seed=seed, is_attempt=is_attempt))

    def _take(self, said: ModelReply) -> None:
        """Process an answer of the model: a problem to be attempted, or an attempt to be scored."""
        is_attempt = said.key in self._waiting.attempts
        making = self._waiting.pop(said.key)
        if making is None:
            return
        if said.item is None and is_attempt:
            making.attempted(None, said.error)
        elif said.item is None:
            making.reject(RejectReason.refused if said.refused else RejectReason.failed, said.error)
        elif is_attempt:
            self._waiting.add(said.key, making)
            group = making.problem_id
            self._scorer.submit(
                ScoreRequest(
                    request_id=said.key, taskset=making.taskset, item=said.item, rollout_id=said.key, group_id=group
                )
            )
        else:
            making.said = said.item.completion
            try:
                problem = self._plan.reader.read(making.said, making.kind, making.parent.problem)
                self._check(problem)
            except RejectedAnswer as rejected:
                making.reject(rejected.reason, rejected.detail)
            else:
                making.made(problem, self._model.version)
                for number in range(making.settings.check_samples):
                    key = f"{making.problem_id}/attempt/{number}"
                    self._ask(making, key, problem, self._plan.attempting, is_attempt=True)

    def _check(self, problem: Problem) -> None:
        """Raise RejectedAnswer for a problem that cannot join, whatever the result of its attempts."""
        if self._growing.tasksets[self._plan.into].has_digest(problem_digest(problem)):
            raise RejectedAnswer(RejectReason.known, "the taskset has this problem already")
        context = self._plan.context
        try:
            length = self._plan.num_tokens(problem)
        except ConfigError as error:
            raise RejectedAnswer(RejectReason.unreadable, str(error)) from None
        if context is not None and length >= context:
            raise RejectedAnswer(
                RejectReason.too_long, f"a prompt of {length:,} tokens, expected fewer than the context of {context:,}"
            )

    def _scored(self, reply: ScoreReply) -> None:
        making = self._waiting.pop(reply.request_id)
        if making is not None:
            making.attempted(None if reply.score is None else reply.score.reward, reply.detail)

    # ------------------------------------------------------------------------------------------ the end

    def _finish(self, number: int) -> Done:
        work = self._in_hand.pop(number)
        results = [making.result(self._clock.now()) for making in work.makings or ()]
        for result in results:
            self._count(result)
        return Done(number, tuple(Publish(*PROBLEMS, result) for result in results))

    def _count(self, result: NewProblem | RejectedProblem) -> None:
        rejected = result if isinstance(result, RejectedProblem) else None
        self._num_rejected += rejected is not None
        self._num_admitted += rejected is None
        self._watch.note(rejected)
        metrics.SYNTHESISED.labels(str(result.kind), str(rejected.reason) if rejected else "admitted").inc()

    def _forget(self, making: Making) -> None:
        """Forget the keys that the problem waits for. Later scores are dropped."""
        self._model.drop(making.keys)
        for key in list(making.keys):
            self._waiting.pop(key)


def _is_ended(work: _InHand) -> bool:
    return work.makings is not None and all(making.is_ended for making in work.makings)


# ------------------------------------------------------------------------------------------
#
# The warning when hardly any problem from the model can be used.


WATCHED = 50
"""Number of problems over which the share of rejected ones is computed."""


class RejectWatch:
    """Counts recently admitted and rejected problems. The step makes it and calls `note` for each problem that
    ended."""

    def __init__(self, warn_share: float) -> None:
        """A share of rejected problems above `warn_share` is reported."""
        self._warn_share = warn_share
        self._recent: deque[RejectedProblem | None] = deque(maxlen=WATCHED)
        """The latest problems; None for an admitted one."""
        self._silent = 0
        """Problems that must end before the warning is repeated."""

    def note(self, rejected: RejectedProblem | None) -> None:
        """Add the next problem that ended; None if it was admitted. Warn if too many were rejected."""
        self._recent.append(rejected)
        self._silent = max(0, self._silent - 1)
        if self.trouble() and not self._silent:
            self._silent = WATCHED
            log.warning("%s; `rftstream problems list RUN --rejected` shows them", self.trouble())

    def trouble(self) -> str:
        """Return a warning for users; empty if enough problems are admitted, or if too few have ended to tell."""
        rejected = [one for one in self._recent if one is not None]
        if len(self._recent) < WATCHED or len(rejected) <= self._warn_share * WATCHED:
            return ""
        (reason, count), *_ = Counter(one.reason for one in rejected).most_common(1)
        last = next(one for one in reversed(rejected) if one.reason is reason)
        said = " ".join(last.said.split())[:100]
        return (
            f"{len(rejected)} of the last {WATCHED} problems that {last.made_by} made were rejected, {count} of them "
            f"as {reason}: {last.detail}; it said {said!r}"
        )
