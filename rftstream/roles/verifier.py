"""The verifier: rollouts -> verified, each with a verdict or with the reason why it has none.

A reward that could not be computed never becomes a number: the rollout goes on with its reason, and the original to
`dead`. A verifier most of whose rollouts cannot be scored stops, so that a broken reward does not eat a night's data.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from rftstream import codec, metrics
from rftstream.clock import Clock
from rftstream.errors import ContractError, StopRule
from rftstream.messages import (
    Rollout,
    RolloutIds,
    RolloutStatus,
    UnscorableReason,
    Verdict,
    VerifiedRollout,
)
from rftstream.rewards.base import RewardInput, Scorer, ScoreReply, ScoreRequest, TokenSegment, problem_input
from rftstream.runtime.role import FOREVER, Done, Item, Publish, Received, dead_letter
from rftstream.topics import MAX_RECORD_BYTES
from rftstream.transport.base import Record

log = logging.getLogger(__name__)

WAIT_S = 0.02
"""For the scorer, when there is nothing else to do."""

JUDGED_OVER = 200
"""Rollouts that the dead-letter rate is taken over."""

_UNSCORED = {
    RolloutStatus.failed: UnscorableReason.failed,
    RolloutStatus.skipped: UnscorableReason.skipped,
    RolloutStatus.oversized: UnscorableReason.oversized,
}


class VerifierStep:
    def __init__(self, *, scorer: Scorer, max_concurrent: int, tries: int, max_dead_share: float, clock: Clock) -> None:
        self._scorer = scorer
        self._max_concurrent = max_concurrent
        self._tries = tries
        self._max_dead_share = max_dead_share
        self._clock = clock
        self._active: dict[str, Item] = {}
        self._done: list[Done] = []
        self._recent: deque[bool] = deque(maxlen=JUDGED_OVER)
        """Of the last rollouts handed to a reward: whether it failed."""

    @property
    def room(self) -> int:
        return self._max_concurrent - len(self._active)

    def follow(self, received: Received) -> None:
        pass

    def start(self, item: Item) -> None:
        rollout = item.received.message
        assert isinstance(rollout, Rollout)
        if rollout.status is RolloutStatus.undecodable:
            verified = self._verified(rollout.ids, None, None, UnscorableReason.undecodable, rollout.error)
            self._finish(item, verified)
        elif rollout.status in _UNSCORED:
            self._finish(item, self._verified(rollout.ids, rollout, None, _UNSCORED[rollout.status], rollout.error))
        else:
            key = str(item.number)
            self._active[key] = item
            self._scorer.submit(ScoreRequest(request_id=key, taskset=rollout.ids.taskset, item=reward_input(rollout)))

    def drop(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self._active.pop(str(number), None)

    def not_begun(self) -> Collection[int]:
        """Also what a reward is at: one that hangs would hold up the leaving for all its tries."""
        return [item.number for item in self._active.values()]

    def advance(self) -> Sequence[Done]:
        for reply in self._scorer.poll(0.0 if self._done else WAIT_S if self._active else 0.0):
            item = self._active.pop(reply.request_id, None)
            if item is not None:
                self._judged(item, reply)
        done, self._done = self._done, []
        return done

    def idle_s(self) -> float:
        return 0.0 if self._done or self._scorer.num_active else FOREVER

    def undecodable(self, record: Record, ids: RolloutIds, error: ContractError) -> tuple[Publish, ...]:
        verified = self._verified(ids, None, None, UnscorableReason.undecodable, str(error))
        return (Publish("verified", record.partition, verified),)

    def health(self) -> Mapping[str, object]:
        return {"scoring": len(self._active)}

    def close(self) -> None:
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
                self._recent.append(False)
                self._finish(item, verified, value=value)
                return
        self._recent.append(True)
        reply = replace(reply, detail=reply.detail.encode(errors="backslashreplace").decode())
        reason = UnscorableReason(reply.reason or "error")
        log.warning(
            "%s: no reward from %s after %d tries: %s: %s",
            rollout.ids.rollout_id,
            reply.scorer,
            self._tries,
            reason,
            reply.detail.strip().rpartition("\n")[2],
        )
        metrics.DEAD.labels("verifier", str(reason)).inc()
        letter = dead_letter(
            item.received.record,
            role="verifier",
            reason=str(reason),
            detail=reply.detail,
            tries=self._tries,
            now=self._clock.now(),
        )
        self._finish(item, self._verified(rollout.ids, rollout, None, reason, reply.detail[:2000]), letter)
        self._check_rate(reply)

    def _check_rate(self, reply: ScoreReply) -> None:
        failed = sum(self._recent)
        if len(self._recent) == JUDGED_OVER and failed > self._max_dead_share * JUDGED_OVER:
            said = reply.detail.strip().rpartition("\n")[2]
            raise StopRule(
                "dead_letters",
                f"verifier: {failed} of the last {JUDGED_OVER} rollouts could not be scored by {reply.scorer}, "
                f"expected at most {self._max_dead_share:.0%} (verifier.max_dead_share); the last one: {reply.reason}: "
                f"{said}. Mend the reward, then `rftstream resume`",
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
    """What a reward sees of a rollout."""
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
                token_data=segment.token_ids.data, mask_data=segment.loss_mask.data,
                logprob_data=segment.behavior_logprobs.data,
            )
            for segment in rollout.segments
        ),
    )  # fmt: skip
