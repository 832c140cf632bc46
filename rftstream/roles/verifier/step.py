"""The verifier reads `rollouts` and writes `verified`: each rollout with a verdict, or with the reason why it has none.

A reward that could not be computed never becomes a number. The rollout is passed on with the reason, and the original
record goes to `dead`. Two more kinds of rollouts get such a dead letter: those that failed, and those that were too
large for one record. Skipped rollouts are passed on without a dead letter. So are rollouts whose task could not be
decoded: the explorer has already written a dead letter for the task.

A verifier stops the run if too many of its last rollouts have no reward (`verifier.max_dead_share`). All reasons count
alike, but skipped rollouts are not counted. So a broken reward or environment does not spoil the data of a whole night.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rftstream import metrics
from rftstream.clock import Clock
from rftstream.contracts import codec
from rftstream.contracts.assistant import ToolCall
from rftstream.contracts.records import Record
from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.contracts.tasks import RolloutIds
from rftstream.contracts.verdicts import UnscorableReason, Verdict, VerifiedRollout, spent_amounts
from rftstream.error_kinds import Kinds, common_text, kind_of, last_line
from rftstream.errors import ContractError, StopRule
from rftstream.rewards.base import (
    RewardInput,
    Scorer,
    ScoreReply,
    ScoreRequest,
    TokenSegment,
    message_seen,
    problem_input,
)
from rftstream.roles.verifier import VERIFIER
from rftstream.service.dead_letters import dead_letter
from rftstream.service.role import FOREVER, ConcurrentStep, Done, Item, Publish

log = logging.getLogger(__name__)

WAIT_S = 0.02
"""Seconds to wait for the scorer when there is nothing else to do."""

JUDGED_OVER = 200
"""Number of rollouts over which the share without a reward is computed."""

_UNSCORED = {
    RolloutStatus.failed: UnscorableReason.failed,
    RolloutStatus.skipped: UnscorableReason.skipped,
    RolloutStatus.oversized: UnscorableReason.oversized,
}


class Deaths:
    """Counts how many of the last rollouts have no reward, and why. The step makes it, and calls `scored` or `died` for
    each rollout that was not skipped."""

    def __init__(self) -> None:
        self._recent: deque[tuple[str, str, str] | None] = deque(maxlen=JUDGED_OVER)
        """The last rollouts. A rollout with a reward is None. The others have the reason, the scorer (empty if the
        rollout was not given to a scorer) and the last line of the detail."""

    @property
    def share(self) -> float:
        """The share of the last JUDGED_OVER rollouts that have no reward; 0 before there are that many."""
        return self._num_dead / JUDGED_OVER if len(self._recent) == JUDGED_OVER else 0.0

    @property
    def _num_dead(self) -> int:
        return sum(death is not None for death in self._recent)

    def scored(self) -> None:
        """Count a rollout that has a reward."""
        self._recent.append(None)

    def died(self, reason: str, detail: str, *, scorer: str = "") -> None:
        """Count a rollout that has no reward. `scorer` is empty if the rollout was not given to a scorer."""
        self._recent.append((str(reason), scorer, last_line(detail)))

    def sentence(self, limit: float) -> str:
        """Return a message for the user that says what is wrong. `limit` is the share that is allowed."""
        deaths = [death for death in self._recent if death is not None]
        scorers = Counter(scorer for _, scorer, _ in deaths)
        failed = scorers.pop("", 0)
        by = " and ".join(scorers)
        if failed and scorers:
            what = (
                f"have no reward ({failed} failed before they could be scored, "
                f"{scorers.total()} could not be scored by {by})"
            )
        else:
            what = f"could not be scored by {by}" if scorers else "failed before they could be scored"
        causes = Counter((reason, kind_of(line)) for reason, _, line in deaths)
        (reason, kind), count = causes.most_common(1)[0]
        lines = {line for other, _, line in deaths if (other, kind_of(line)) == (reason, kind)}
        line = common_text(lines)
        cause = "reason of the last one" if len(causes) == 1 else f"reason of {count} of them"
        mend = "the reward" if not failed else "the environment or the policy" if not scorers else "the causes"
        return (
            f"{len(deaths)} of the last {JUDGED_OVER} rollouts {what}, expected at most {limit:.0%} "
            f"(verifier.max_dead_share); {cause}: {reason}, {line}. Mend {mend}, put back the groups "
            "that died (`rftstream dead retry RUN --all`), then run `rftstream resume`"
        )


class VerifierStep(ConcurrentStep):
    """The step of a verifier: it gives rollouts to a scorer and publishes the results. `workers/verifier.py` makes the
    step, and ConcurrentService calls it in this order:

    - `start` gives a rollout to the scorer. A rollout that cannot be scored is passed on at once.
    - `advance` collects the scorer's replies and returns one `verified` record for each. A rollout without a reward
      also gets a dead letter. `advance` raises StopRule if too many of the last rollouts have no reward.
    - `drop` forgets rollouts of lost partitions. Replies for them are ignored.
    - `close` ends the scorer.
    """

    def __init__(self, *, scorer: Scorer, max_concurrent: int, max_dead_share: float, clock: Clock) -> None:
        self._scorer = scorer
        self._max_concurrent = max_concurrent
        self._max_dead_share = max_dead_share
        self._clock = clock
        self._active: dict[str, tuple[Item, float]] = {}
        """Items that are being scored, each with the time when its scoring began."""
        self._done: list[Done] = []
        self._deaths = Deaths()
        self._kinds = Kinds()

    @property
    def room(self) -> int:
        """Number of further rollouts that this worker can take now."""
        return self._max_concurrent - len(self._active)

    def start(self, item: Item) -> None:
        """Give the rollout to the scorer. A rollout that cannot be scored is passed on at once."""
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
            self._active[key] = item, self._clock.now()
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
        """Forget rollouts. Replies for them are ignored."""
        for key in map(str, numbers):
            if self._active.pop(key, None) is not None and hasattr(self._scorer, "withdraw"):
                self._scorer.withdraw(key)

    def not_begun(self) -> Collection[int]:
        """Return all rollouts that are being scored. A worker that leaves does not wait for them.
        Waiting could take long: a rollout whose reward hangs is finished only when its last try has timed out."""
        return [item.number for item, _ in self._active.values()]

    def advance(self) -> Sequence[Done]:
        """Collect replies, and return the rollouts that they finish. StopRule if too many rollouts have no reward; it
        is raised only after all finished rollouts have been returned."""
        if not self._done and self._deaths.share > self._max_dead_share:
            raise StopRule("dead_letters", f"verifier: {self._deaths.sentence(self._max_dead_share)}")
        for reply in self._scorer.poll(0.0 if self._done else WAIT_S if self._active else 0.0):
            active = self._active.pop(reply.request_id, None)
            if active is not None:
                item, began_at = active
                metrics.VERDICT_SECONDS.observe(max(0.0, self._clock.now() - began_at))
                self._judged(item, reply)
        done, self._done = self._done, []
        return done

    def idle_s(self) -> float:
        """Return 0 while rollouts are being scored, since `advance` itself waits for the scorer."""
        return 0.0 if self._done or self._scorer.num_active else FOREVER

    def undecodable(self, record: Record, ids: RolloutIds, error: ContractError) -> tuple[Publish, ...]:
        """Return the `verified` record for a rollout that cannot be decoded."""
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
                parts=metrics.named_by_people(reply.score.parts),
                metrics=metrics.named_by_people(reply.score.metrics),
                additions=dict(reply.score.additions),
            )
            verified = self._verified(rollout.ids, rollout, verdict, None, None)
            try:
                value = codec.encode(verified)
            except ContractError as error:  # a name in the verdict that a record cannot hold, or too many bytes
                reply = replace(reply, score=None, reason="error", detail=str(error))
            else:
                self._deaths.scored()
                for kind, amount in spent_amounts(verdict.metrics).items():
                    if 0 <= amount < math.inf:
                        metrics.count_named(metrics.REWARD_SPENT, kind, amount=amount)
                self._finish(item, verified, value=value)
                return
        reply = replace(reply, detail=reply.detail.encode(errors="backslashreplace").decode())
        reason = UnscorableReason(reply.reason or "error")
        self._say(rollout, reply)
        self._deaths.died(reason, reply.detail, scorer=reply.scorer)
        letter = self._letter(item, reason, reply.detail, reply.tries)
        self._finish(item, self._verified(rollout.ids, rollout, None, reason, reply.detail[:2000]), letter)

    def _pass_on(self, item: Item, rollout: Rollout) -> None:
        """Pass on a rollout that cannot be scored: it was skipped, it failed, or it was too large for one record."""
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
        """Log one line for a rollout without a reward. For the first error of a kind, log the full detail, too."""
        line = last_line(reply.detail)
        more = "\n" + reply.detail.strip() if self._kinds.is_new(line) and line != reply.detail.strip() else ""
        log.warning(
            "%s: no reward from %s after %d tries (%s): %s%s",
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
    """Return the part of a rollout that a reward sees."""
    problem = rollout.problem
    assert problem is not None
    said = [turn for turn in rollout.turns if turn.role == "assistant"]
    before, posted = problem_input(problem), rollout.posted
    turns = (
        message_seen(turn.role, turn.content, [_tool_call(call) for call in turn.tool_calls]) for turn in rollout.turns
    )
    return replace(
        before,
        completion=said[-1].content if said else "",
        reasoning=said[-1].reasoning if said else "",
        messages=(*before.messages, *turns),
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
        environment_reward=None if posted is None else posted.reward,
        environment_parts={} if posted is None else posted.parts,
        environment_error=None if posted is None else posted.error,
    )


def _tool_call(call: ToolCall) -> dict[str, Any]:
    arguments = call.text if call.arguments is None else call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
