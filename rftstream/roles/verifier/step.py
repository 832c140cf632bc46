"""The verifier: rollouts -> verified, each with a verdict or with the reason why it has none.

A reward that could not be computed never becomes a number: the rollout goes on with its reason, and the original to
`dead`; so does one that failed before there was anything to score. A verifier most of whose rollouts have no reward
stops, whatever they died of, so that a broken reward or environment does not eat a night's data.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from rftstream import metrics
from rftstream.clock import Clock
from rftstream.contracts import codec
from rftstream.contracts.records import Record
from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.contracts.tasks import RolloutIds
from rftstream.contracts.topics import MAX_RECORD_BYTES
from rftstream.contracts.verdicts import UnscorableReason, Verdict, VerifiedRollout
from rftstream.error_kinds import Kinds, kind_of, last_line
from rftstream.errors import ContractError, StopRule
from rftstream.rewards.base import RewardInput, Scorer, ScoreReply, ScoreRequest, TokenSegment, problem_input
from rftstream.roles.verifier import VERIFIER
from rftstream.service.dead_letters import dead_letter
from rftstream.service.role import FOREVER, Done, Item, Publish
from rftstream.service.step_defaults import ConcurrentStepDefaults

log = logging.getLogger(__name__)

WAIT_S = 0.02
"""Seconds to wait for the scorer when there is nothing else to do."""

JUDGED_OVER = 200
"""How many rollouts the share without a reward is taken over."""

_UNSCORED = {
    RolloutStatus.failed: UnscorableReason.failed,
    RolloutStatus.skipped: UnscorableReason.skipped,
    RolloutStatus.oversized: UnscorableReason.oversized,
}


class Deaths:
    """How many of the last rollouts have no reward, and why. The step makes it, and calls `scored` or `died` for each
    rollout that was not skipped."""

    def __init__(self) -> None:
        self._recent: deque[tuple[str, str, str] | None] = deque(maxlen=JUDGED_OVER)
        """Reason, scorer (empty: it did not come to be scored), last line; None for one with a reward."""

    @property
    def share(self) -> float:
        """The share of the last rollouts that have no reward; 0 until there were enough."""
        return self._num_dead / JUDGED_OVER if len(self._recent) == JUDGED_OVER else 0.0

    @property
    def _num_dead(self) -> int:
        return sum(death is not None for death in self._recent)

    def scored(self) -> None:
        """Count a rollout that has a reward."""
        self._recent.append(None)

    def died(self, reason: str, detail: str, *, scorer: str = "") -> None:
        """Count a rollout that has no reward. `scorer`: empty if it did not come to be scored."""
        self._recent.append((str(reason), scorer, last_line(detail)))

    def sentence(self, limit: float) -> str:
        """Return what is wrong, in a sentence for the user. `limit`: the share that is allowed."""
        deaths = [death for death in self._recent if death is not None]
        scorers = Counter(scorer for _, scorer, _ in deaths)
        failed = scorers.pop("", 0)
        by = " and ".join(scorers)
        if failed and scorers:
            what = f"have no reward ({failed} failed before they could be scored, {scorers.total()} by {by})"
        else:
            what = f"could not be scored by {by}" if scorers else "failed before they could be scored"
        causes = Counter((reason, kind_of(line)) for reason, _, line in deaths)
        (reason, kind), count = causes.most_common(1)[0]
        line = next(line for other, _, line in reversed(deaths) if (other, kind_of(line)) == (reason, kind))
        cause = "the last one" if len(causes) == 1 else f"{count} of them"
        mend = "the reward" if not failed else "the environment or the policy" if not scorers else "the causes"
        return (
            f"{len(deaths)} of the last {JUDGED_OVER} rollouts {what}, expected at most {limit:.0%} "
            f"(verifier.max_dead_share); {cause}: {reason}: {line}. Mend {mend}, then `rftstream resume`"
        )


class VerifierStep(ConcurrentStepDefaults):
    """The step of a verifier: it has rollouts scored. `workers/verifier.py` makes it; ConcurrentService calls it, in
    this order:

    - `start` hands a rollout to the scorer, or passes it on at once if there is nothing to score.
    - `advance` collects the scorer's replies and hands out one `verified` record each, with a dead letter where there
      is no reward. StopRule: too many of the last rollouts have none.
    - `drop` forgets rollouts of lost partitions; a reply that comes later is ignored.
    - `close` ends the scorer.
    """

    def __init__(self, *, scorer: Scorer, max_concurrent: int, max_dead_share: float, clock: Clock) -> None:
        self._scorer = scorer
        self._max_concurrent = max_concurrent
        self._max_dead_share = max_dead_share
        self._clock = clock
        self._active: dict[str, Item] = {}
        self._done: list[Done] = []
        self._deaths = Deaths()
        self._kinds = Kinds()

    @property
    def room(self) -> int:
        """How many more rollouts may be scored at once."""
        return self._max_concurrent - len(self._active)

    def start(self, item: Item) -> None:
        """Hand the rollout to the scorer, or pass it on if there is nothing to score."""
        rollout = item.received.message
        assert isinstance(rollout, Rollout)
        if rollout.status is RolloutStatus.undecodable:
            verified = self._verified(rollout.ids, None, None, UnscorableReason.undecodable, rollout.error)
            self._deaths.died("undecodable", rollout.error or "")
            self._finish(item, verified)
        elif rollout.status in _UNSCORED:
            self._pass_on(item, rollout)
        else:
            key = str(item.number)
            self._active[key] = item
            self._scorer.submit(
                ScoreRequest(
                    request_id=key,
                    taskset=rollout.ids.taskset,
                    item=reward_input(rollout),
                    rollout_id=rollout.ids.rollout_id,
                    group_id=rollout.ids.group_id,
                )
            )

    def drop(self, numbers: Collection[int]) -> None:
        """Forget rollouts; replies for them are ignored."""
        for number in numbers:
            self._active.pop(str(number), None)

    def not_begun(self) -> Collection[int]:
        """Return all that is being scored, too: a reward that hangs would hold up the leaving for all its tries."""
        return [item.number for item in self._active.values()]

    def advance(self) -> Sequence[Done]:
        """Collect replies; return what they finish. StopRule if too many have no reward, once all is handed out."""
        if not self._done and self._deaths.share > self._max_dead_share:
            raise StopRule("dead_letters", f"verifier: {self._deaths.sentence(self._max_dead_share)}")
        for reply in self._scorer.poll(0.0 if self._done else WAIT_S if self._active else 0.0):
            item = self._active.pop(reply.request_id, None)
            if item is not None:
                self._judged(item, reply)
        done, self._done = self._done, []
        return done

    def idle_s(self) -> float:
        """Return 0 while something is scored: waiting for the scorer is part of `advance`."""
        return 0.0 if self._done or self._scorer.num_active else FOREVER

    def undecodable(self, record: Record, ids: RolloutIds, error: ContractError) -> tuple[Publish, ...]:
        """Return the record that says so."""
        verified = self._verified(ids, None, None, UnscorableReason.undecodable, str(error))
        self._deaths.died("undecodable", str(error))
        return (Publish("verified", record.partition, verified),)

    def health(self) -> Mapping[str, object]:
        """Return how many rollouts are being scored."""
        return {"scoring": len(self._active)}

    def close(self) -> None:
        """End the scorer."""
        self._scorer.close()

    def _judged(self, item: Item, reply: ScoreReply) -> None:
        rollout = item.received.message
        assert isinstance(rollout, Rollout)
        if reply.score is not None:
            verdict = Verdict(
                reward=reply.score.reward,
                scorer=reply.scorer,
                scorer_version=reply.scorer_version,
                parts=dict(reply.score.parts),
                metrics=dict(reply.score.metrics),
                additions=dict(reply.score.additions),
            )
            verified = self._verified(rollout.ids, rollout, verdict, None, None)
            try:
                value = codec.encode(verified)
                if len(value) > MAX_RECORD_BYTES:
                    raise ContractError(f"with its verdict {len(value)} bytes, expected at most {MAX_RECORD_BYTES}")
            except ContractError as error:  # by a name that no record can hold, or by its size
                reply = replace(reply, score=None, reason="error", detail=str(error))
            else:
                self._deaths.scored()
                self._finish(item, verified, value=value)
                return
        reply = replace(reply, detail=reply.detail.encode(errors="backslashreplace").decode())
        reason = UnscorableReason(reply.reason or "error")
        self._say(rollout, reply)
        self._deaths.died(reason, reply.detail, scorer=reply.scorer)
        letter = self._letter(item, reason, reply.detail, reply.tries)
        self._finish(item, self._verified(rollout.ids, rollout, None, reason, reply.detail[:2000]), letter)

    def _pass_on(self, item: Item, rollout: Rollout) -> None:
        """Pass on a rollout of which nothing was sampled: on purpose, or since its environment or policy failed."""
        reason, detail = _UNSCORED[rollout.status], rollout.error
        verified = self._verified(rollout.ids, rollout, None, reason, detail)
        if reason is UnscorableReason.skipped:
            self._finish(item, verified)
        else:
            self._deaths.died(reason, detail or "")
            self._finish(item, verified, self._letter(item, reason, detail or "", 1))

    def _letter(self, item: Item, reason: UnscorableReason, detail: str, tries: int) -> Publish:
        metrics.DEAD.labels(VERIFIER.name, str(reason)).inc()
        return dead_letter(
            item.received.record,
            role=VERIFIER.name,
            reason=str(reason),
            detail=detail,
            tries=tries,
            now=self._clock.now(),
        )

    def _say(self, rollout: Rollout, reply: ScoreReply) -> None:
        """Log a line; the first of a kind with all that is known."""
        line = last_line(reply.detail)
        more = "\n" + reply.detail.strip() if self._kinds.is_new(line) and line != reply.detail.strip() else ""
        log.warning(
            "%s: no reward from %s after %d tries: %s: %s%s",
            rollout.ids.rollout_id,
            reply.scorer,
            reply.tries,
            reply.reason,
            line,
            more,
        )

    def _verified(
        self,
        ids: RolloutIds,
        rollout: Rollout | None,
        verdict: Verdict | None,
        reason: UnscorableReason | None,
        detail: str | None,
    ) -> VerifiedRollout:
        return VerifiedRollout(
            ids=ids, rollout=rollout, verdict=verdict, reason=reason, detail=detail, verified_at=self._clock.now()
        )

    def _finish(self, item: Item, verified: VerifiedRollout, *more: Publish, value: bytes | None = None) -> None:
        metrics.VERDICTS.labels(str(verified.reason or "scored")).inc()
        output = Publish("verified", item.received.record.partition, verified, value)
        self._done.append(Done(item.number, (output, *more)))


def reward_input(rollout: Rollout) -> RewardInput:
    """Return what a reward sees of a rollout."""
    problem = rollout.problem
    assert problem is not None
    said = [turn for turn in rollout.turns if turn.role == "assistant"]
    before = problem_input(problem)
    return replace(
        before,
        completion=said[-1].content if said else "",
        messages=(*before.messages, *({"role": turn.role, "content": turn.content} for turn in rollout.turns)),
        num_tokens=rollout.num_tokens,
        truncated=rollout.status is RolloutStatus.truncated,
        segments=tuple(
            TokenSegment(
                token_data=segment.token_ids.data,
                mask_data=segment.loss_mask.data,
                logprob_data=segment.behavior_logprobs.data,
            )
            for segment in rollout.segments
        ),
    )
