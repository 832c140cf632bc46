"""Feedback is a late judgement of a rollout by a person or an environment. Topic `feedback`."""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.contracts.message_spec import MessageSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """A late judgement of a rollout by a person or an environment. `feedback`: gateway -> buffer."""

    feedback_id: str
    """Derived from its source and rollout."""
    rollout_id: str
    """The rollout that is judged."""
    source: str
    """Who judges."""
    reward: float | None = None
    """The judgement as a number, if it is one."""
    comment: str | None = None
    """The judgement in words."""
    given_at: float = 0.0
    """When it was given."""


FEEDBACK = MessageSpec(
    type=Feedback,
    contract="feedback",
    topic="feedback",
    key=lambda feedback: feedback.feedback_id,
    headers=lambda feedback: {"rollout_id": feedback.rollout_id},
)
