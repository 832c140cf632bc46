"""The verifier reads `rollouts` and writes `verified`: each rollout with a verdict, or with the reason why it has none.

A reward that could not be computed never becomes a number. The rollout is passed on with the reason, and the original
record goes to `dead`. Two more kinds of rollouts get such a dead letter: those that failed, and those that were too
large for one record. Skipped rollouts are passed on without a dead letter. So are rollouts whose task could not be
decoded: the explorer has already written a dead letter for the task.

A verifier stops the run if too many of its last rollouts have no reward (`verifier.max_dead_share`). All reasons count
alike, but skipped rollouts are not counted. So a broken reward or environment does not spoil the data of a whole night.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from rftstream import metrics
from rftstream.clock import Clock
from rftstream.contracts import codec
from rftstream.contracts.assistant import ToolCall
from rftstream.contracts.records import Record
from rftstream.contracts.rollouts import Rollout, RolloutStatus, roles_of
from rftstream.contracts.tasks import RolloutIds
from rftstream.contracts.verdicts import UnscorableReason, Verdict, VerifiedRollout, spent_amounts
from rftstream.error_kinds import Kinds, counted_kinds, last_line
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
from rftstream.roles.verifier.groups import WaitingGroup, WaitingGroups
from rftstream.service.dead_letters import dead_letter
from rftstream.service.role import ConcurrentStep, Done, Item, Publish

log = logging.getLogger(__name__)

WAIT_S = 0.02
"""Seconds to wait for the scorer when there is nothing else to do."""

JUDGED_OVER = 200
"""Number of rollouts over which the share without a reward is computed."""

_UNSCORED = {
    RolloutStatus.failed: UnscorableReason.failed,
    RolloutStatus.skipped: UnscorableReason.skipped,
    RolloutStatus.oversized: UnscorableReason.oversized,
    RolloutStatus.undecodable: UnscorableReason.undecodable,
}


class Deaths:
    """Counts how many of the last rollouts have no reward, and why. The step makes it, and calls `scored` or `died` for
    each rollout that was not skipped."""

    def __init__(self, max_concurrent: int) -> None:
        self._recent: deque[tuple[str, str, str] | None] = deque(maxlen=JUDGED_OVER + max_concurrent)
        """The last JUDGED_OVER rollouts, and before them as many as may be scored at a time, since those that are tried
        again come last. A rollout with a reward is None. The others have the reason, the scorer (empty if the rollout
        was not given to a scorer) and the last line of the detail."""

    def exceed(self, limit: float) -> bool:
        """Return whether more than this share has no reward, of the last JUDGED_OVER rollouts and of all `_recent`
        ones; False before there are JUDGED_OVER."""
        if len(self._recent) < JUDGED_OVER or len(self._last()) <= limit * JUDGED_OVER:
            return False
        return sum(death is not None for death in self._recent) > limit * len(self._recent)

    def _last(self) -> list[tuple[str, str, str]]:
        """Return those of the last JUDGED_OVER rollouts that have no reward, the oldest first."""
        return [death for death in islice(reversed(self._recent), JUDGED_OVER) if death is not None][::-1]

    def scored(self) -> None:
        """Count a rollout that has a reward."""
        self._recent.append(None)

    def died(self, reason: str, detail: str, *, scorer: str = "") -> None:
        """Count a rollout that has no reward. `scorer` is empty if the rollout was not given to a scorer."""
        self._recent.append((str(reason), scorer, last_line(detail)))

    def sentence(self, limit: float) -> str:
        """Return a message for the user that says what is wrong. `limit` is the share that is allowed."""
        deaths = self._last()
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
        causes = [
            (count, reason, line)
            for reason in dict.fromkeys(reason for reason, _, _ in deaths)
            for line, count in counted_kinds((line, 1) for other, _, line in deaths if other == reason)
        ]
        count, reason, line = max(causes, key=lambda cause: cause[0])
        cause = "reason of each" if len(causes) == 1 else f"reason of {count} of them"
        mend = "the reward" if not failed else "the environment or the policy" if not scorers else "the causes"
        return (
            f"{len(deaths)} of the last {JUDGED_OVER} rollouts {what}, expected at most {limit:.0%} "
            f"(verifier.max_dead_share); {cause}: {reason}, {line}. Mend {mend}, put back the groups "
            "that died (`rftstream dead retry RUN --all`), then `rftstream resume RUN`"
        )


class VerifierStep(ConcurrentStep):
    """The step of a verifier: it gives rollouts to a scorer and publishes the results. `workers/verifier.py` makes the
    step, and ConcurrentService calls it in this order:

    - `start` gives a rollout to the scorer. A rollout that cannot be scored is passed on at once. If its reward
      compares siblings, it waits for them (groups.py).
    - `advance` collects the scorer's replies and returns one `verified` record for each. A rollout without a reward
      also gets a dead letter. `advance` raises StopRule if too many of the last rollouts have no reward.
    - `drop` forgets rollouts of lost partitions. Replies for them are ignored.
    - `close` ends the scorer.
    """

    def __init__(
        self, *, scorer: Scorer, max_concurrent: int, max_dead_share: float, clock: Clock, groups: WaitingGroups
    ) -> None:
        self._scorer = scorer
        self._groups = groups
        self._judging: dict[str, JudgedGroup] = {}
        """Groups that are being scored, by each of the request ids of their siblings."""
        self._max_concurrent = max_concurrent
        self._max_dead_share = max_dead_share
        self._clock = clock
        self._active: dict[str, tuple[Item, float]] = {}
        """Items that are being scored, each with the time when its scoring began."""
        self._done: list[Done] = []
        self._deaths = Deaths(max_concurrent)
        self._kinds = Kinds()

    @property
    def room(self) -> int:
        """Number of further rollouts that this worker can take now. Rollouts that wait for siblings take no room: those
        siblings may be the next ones on the log."""
        return 0 if self._scorer.grouped is None else self._max_concurrent - len(self._active)

    def start(self, item: Item) -> None:
        """Give the rollout to the scorer, or let it wait for its siblings. A rollout that cannot be scored is passed on
        at once."""
        rollout = item.received.message
        assert isinstance(rollout, Rollout)
        if rollout.ids.taskset in (self._scorer.grouped or ()):
            status = rollout.status
            self._groups.add(item, rollout.ids, absent=str(status) if status in _UNSCORED else None)
        elif rollout.status in _UNSCORED:
            self._finish([item], *self._passed_on(item, rollout))
        else:
            self._scorer.submit(self._request(item))

    def hold_undecodable(self, item: Item, ids: RolloutIds, error: ContractError) -> bool:
        """Let a rollout that cannot be decoded wait for its siblings, if their reward compares them."""
        if ids.taskset not in (self._scorer.grouped or ()):
            return False
        self._groups.add(item, ids, absent=str(UnscorableReason.undecodable), error=str(error))
        return True

    def drop(self, numbers: Collection[int]) -> None:
        """Forget rollouts. Replies for them are ignored. The siblings of a group are lost together."""
        for key in map(str, numbers):
            self._judging.pop(key, None)
            if self._active.pop(key, None) is not None and hasattr(self._scorer, "withdraw"):
                self._scorer.withdraw(key)
        self._groups.drop(numbers)

    def not_begun(self) -> Collection[int]:
        """Return all rollouts that are being scored or wait for siblings. A worker that leaves does not wait for them.
        Waiting could take long: a rollout whose reward hangs is finished only when its last try has timed out."""
        alone = {item.number for item, _ in self._active.values()}
        judged = {number for one in self._judging.values() for number in one.group.numbers}
        return sorted(alone | judged | set(self._groups.numbers))

    def advance(self) -> Sequence[Done]:
        """Collect replies, and return the rollouts that they finish. StopRule if too many rollouts have no reward; it
        is raised only after all finished rollouts have been returned."""
        if not self._done and self._deaths.exceed(self._max_dead_share):
            raise StopRule("dead_letters", f"verifier: {self._deaths.sentence(self._max_dead_share)}")
        self._groups.waited(has_room=self.room > 0)
        for group in self._groups.take_due():
            self._judge(group)
        for reply in self._scorer.poll(0.0 if self._done else WAIT_S if self._active else 0.0):
            active = self._active.pop(reply.request_id, None)
            if active is not None:
                item, began_at = active
                metrics.VERDICT_SECONDS.observe(max(0.0, self._clock.now() - began_at))
                if (judged := self._judging.pop(reply.request_id, None)) is None:
                    self._finish([item], *self._judged(item, reply))
                else:
                    judged.replies[item.number] = reply
                    self._finish_group(judged)
        done, self._done = self._done, []
        return done

    def idle_s(self) -> float:
        """Return 0 while rollouts are being scored, since `advance` itself waits for the scorer; else the seconds until
        a group has waited long enough for its siblings."""
        if self._done or self._scorer.num_active:
            return 0.0
        return WAIT_S if self._scorer.grouped is None else self._groups.due_in_s()

    def undecodable(self, record: Record, ids: RolloutIds, error: ContractError) -> tuple[Publish, ...]:
        """Return the `verified` record for a rollout that cannot be decoded."""
        self._deaths.died("undecodable", str(error))
        verified = self._verified(ids, None, None, UnscorableReason.undecodable, str(error))
        return (Publish("verified", record.partition, verified),)

    def health(self) -> Mapping[str, object]:
        """Return how many rollouts are being scored, and how many wait for siblings."""
        return {"scoring": len(self._active), "waiting": len(self._groups)}

    def close(self) -> None:
        """End the scorer, and close the reader of waiting rollouts."""
        self._scorer.close()
        self._groups.close()

    # ------------------------------------------------------------------------------------------ groups

    def _judge(self, group: WaitingGroup) -> None:
        """Give the siblings of a group to the scorer, or pass them on if there is nothing to compare."""
        judged = JudgedGroup(group)
        if group.is_majority:
            requests = [self._request(sibling.item) for _, sibling in group.compared]
            self._judging.update({request.request_id: judged for request in requests})
            if requests:
                self._scorer.submit_group(requests, group.absent)
        self._finish_group(judged)

    def _finish_group(self, judged: JudgedGroup) -> None:
        """Finish all siblings of a group, once all of them have their replies."""
        if judged in self._judging.values():
            return
        siblings = [sibling for _, sibling in sorted(judged.group.siblings.items())]
        outputs: list[Publish] = []
        for sibling in siblings:
            item, reply = sibling.item, judged.replies.get(sibling.item.number)
            rollout = item.received.message
            if reply is not None:
                outputs += self._judged(item, reply)
            elif sibling.error is not None:
                outputs += self.undecodable(item.received.record, sibling.ids, ContractError(sibling.error))
            elif isinstance(rollout, Rollout) and sibling.absent is not None:
                outputs += self._passed_on(item, rollout)
            else:
                outputs += self._judged(item, _too_late(judged.group))
        self._finish([sibling.item for sibling in siblings], *outputs)

    # ------------------------------------------------------------------------------------------ verdicts

    def _request(self, item: Item) -> ScoreRequest:
        """Return the request for a rollout, whose scoring begins now."""
        rollout, key = item.received.message, str(item.number)
        assert isinstance(rollout, Rollout)
        self._active[key] = item, self._clock.now()
        return ScoreRequest(
            request_id=key,
            taskset=rollout.ids.taskset,
            item=reward_input(
                rollout, with_tokens=rollout.ids.taskset not in getattr(self._scorer, "without_tokens", ())
            ),
            rollout_id=rollout.ids.rollout_id,
            group_id=rollout.ids.group_id,
            sibling=rollout.ids.sibling,
        )

    def _judged(self, item: Item, reply: ScoreReply) -> tuple[Publish, ...]:
        """Return the records of a rollout that the scorer replied to."""
        rollout = item.received.message
        assert isinstance(rollout, Rollout)
        if reply.score is not None:
            verdict = Verdict(
                reward=reply.score.reward,
                scorer=reply.scorer,
                scorer_version=reply.scorer_version,
                parts=metrics.named_by_people(reply.score.parts),
                roles=dict(reply.score.roles),
                metrics=metrics.named_by_people(reply.score.metrics),
                additions=dict(reply.score.additions),
            )
            verified = self._verified(rollout.ids, rollout, verdict, None, reply.score.detail or None)
            try:
                value = codec.encode(verified)
            except ContractError as error:  # a name in the verdict that a record cannot hold, or too many bytes
                reply = replace(reply, score=None, reason="error", detail=str(error))
            else:
                self._deaths.scored()
                for kind, amount in spent_amounts(verdict.metrics).items():
                    if 0 <= amount < math.inf:
                        metrics.count_named(metrics.REWARD_SPENT, kind, amount=amount)
                return (Publish("verified", item.received.record.partition, verified, value),)
        reply = replace(reply, detail=reply.detail.encode(errors="backslashreplace").decode())
        reason = UnscorableReason(reply.reason or "error")
        self._say(rollout, reply)
        self._deaths.died(reason, reply.detail, scorer=reply.scorer)
        verified = self._verified(rollout.ids, rollout, None, reason, reply.detail[:2000])
        letter = self._letter(item, reason, reply.detail, reply.tries)
        return Publish("verified", item.received.record.partition, verified), letter

    def _passed_on(self, item: Item, rollout: Rollout) -> tuple[Publish, ...]:
        """Return the records of a rollout that cannot be scored: it was skipped, it failed, it was too large for one
        record, or its task could not be decoded."""
        reason, detail = _UNSCORED[rollout.status], rollout.error
        left = None if reason is UnscorableReason.undecodable else rollout
        verified = self._verified(rollout.ids, left, None, reason, detail)
        output = Publish("verified", item.received.record.partition, verified)
        if reason is not UnscorableReason.skipped:
            self._deaths.died(reason, detail or "")
        if reason in (UnscorableReason.skipped, UnscorableReason.undecodable):
            return (output,)
        return output, self._letter(item, reason, detail or "", 1)

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
        """Log one line for a rollout without a reward: a warning with the full detail for the first error of a kind."""
        line = last_line(reply.detail)
        is_new = self._kinds.is_new(line)
        more = "\n" + reply.detail.strip() if is_new and line != reply.detail.strip() else ""
        log.log(
            logging.WARNING if is_new else logging.INFO,
            "%s: no reward from %s (%s): %s%s",
            rollout.ids.rollout_id,
            reply.scorer,
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

    def _finish(self, items: Sequence[Item], *outputs: Publish) -> None:
        """Finish rollouts with their records, all in one transaction."""
        for output in outputs:
            if isinstance(output.message, VerifiedRollout):
                _verdicts(str(output.message.reason or "scored")).inc()
        first, *also = (item.number for item in items)
        self._done.append(Done(first, outputs, tuple(also)))


_verdicts = functools.cache(metrics.VERDICTS.labels)  # looking up a labelled metric costs more than counting


@dataclass(slots=True, eq=False)
class JudgedGroup:
    """A group that is being scored."""

    group: WaitingGroup
    replies: dict[int, ScoreReply] = field(default_factory=dict)
    """By the number of the item."""


def _too_late(group: WaitingGroup) -> ScoreReply:
    """Return the reply for a sibling that is not compared, since less than half of its group is here."""
    detail = (
        f"{len(group.siblings)} of the group's {group.size} rollouts came together within verifier.group_timeout_s, "
        "expected more than half; make it longer"
    )
    return ScoreReply(request_id="", score=None, scorer="", scorer_version="", reason="timeout", detail=detail)


def reward_input(rollout: Rollout, *, with_tokens: bool = True) -> RewardInput:
    """Return the part of a rollout that a reward sees. `with_tokens`: whether the reward gets them."""
    problem = rollout.problem
    assert problem is not None
    said, posted = [turn for turn in rollout.turns if turn.role == "assistant"], rollout.posted
    turns = (
        message_seen(turn.role, turn.content, [_tool_call(call) for call in turn.tool_calls]) for turn in rollout.turns
    )
    return problem_input(
        problem,
        turns,
        completion=said[-1].content if said else "",
        reasoning=said[-1].reasoning if said else "",
        num_tokens=rollout.num_tokens,
        truncated=rollout.status is RolloutStatus.truncated,
        segments=tuple(
            TokenSegment(
                token_data=segment.token_ids.data,
                mask_data=segment.loss_mask.data,
                logprob_data=segment.behavior_logprobs.data,
                role=segment.role,
            )
            for segment in (rollout.segments if with_tokens else ())
        ),
        environment_reward=None if posted is None else posted.reward,
        environment_parts={} if posted is None else posted.parts,
        environment_error=None if posted is None else posted.error,
        environment_roles={} if posted is None else posted.roles,
        environment_version="" if posted is None else posted.version,
        roles=roles_of(rollout.segments),
    )


def _tool_call(call: ToolCall) -> dict[str, Any]:
    arguments = call.text if call.arguments is None else call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
