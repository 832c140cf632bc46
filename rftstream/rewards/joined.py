"""The scorer of a joined verifier: every rollout goes to a loop of the user's own, by way of a desk."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rftstream.desk import Desk
from rftstream.rewards.base import Score, ScoreReply, ScoreRequest

SCORER = "joined"
"""Name of the scorer in verdicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedScore:
    """A loop's answer for a rollout: a score, or the reason why there is none."""

    score: Score | None
    version: str = ""
    """Version of the loop's reward."""
    detail: str = ""


class JoinedScorer:
    """A scorer as `Scorer` describes it. The verifier submits rollouts, and the loop takes them from the desk."""

    grouped: Collection[str] = ()
    """A loop of one's own gets one rollout after the other, whatever the run file says of its reward."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def submit(self, request: ScoreRequest) -> None:
        """Lay a rollout on the desk."""
        self._desk.offer(request.request_id, request)

    def submit_group(self, requests: Sequence[ScoreRequest], absent: Mapping[int, str]) -> None:
        """Lay the rollouts of a group on the desk, each for itself."""
        for request in requests:
            self.submit(request)

    def poll(self, wait_s: float = 0.0) -> Sequence[ScoreReply]:
        """Return the loop's answers. Wait up to `wait_s` seconds for the first."""
        replies = []
        for item in self._desk.collect(wait_s):
            answer: JoinedScore = item.answer
            reason = None if answer.score is not None else "error"
            replies.append(
                ScoreReply(
                    request_id=item.key,
                    score=answer.score,
                    scorer=SCORER,
                    scorer_version=answer.version,
                    reason=reason,
                    detail=answer.detail,
                )
            )
        return replies

    def withdraw(self, request_id: str) -> None:
        """Take a rollout back: another worker has it now."""
        self._desk.withdraw(request_id)

    @property
    def num_active(self) -> int:
        """Number of rollouts without a collected answer."""
        return self._desk.num_active

    def close(self) -> None:
        """Withdraw all rollouts."""
        self._desk.end()
