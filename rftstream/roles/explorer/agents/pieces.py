"""The pieces on `partials` for an agent's rollout: one for each call, or one for a session without calls."""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.contracts import codec
from rftstream.contracts.rollouts import AgentCall, PartialRollout, SavedCall, Segment
from rftstream.contracts.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class CallToSave:
    """The data of a call that a piece holds."""

    call: AgentCall
    saved: SavedCall
    segment: Segment
    """Tokens that the call adds to its segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPiece:
    """A piece with its bytes. It is encoded once, when its call is recorded, so that a call too large for a record is
    refused."""

    piece: PartialRollout
    value: bytes


def encode_piece(
    task: Task, call: CallToSave | None, *, number: int, session: str | None, now: float, explorer: str
) -> EncodedPiece:
    """Return the piece that holds a call, or only the session that the rollout was given to. ContractError if no record
    can hold it."""
    calls = () if call is None else (call,)
    piece = PartialRollout(
        ids=task.ids,
        piece=number,
        turns=(),
        segments=tuple(one.segment for one in calls),
        num_tokens=sum(one.call.count for one in calls),
        saved_at=now,
        explorer=explorer,
        session=session,
        calls=tuple(one.call for one in calls),
        saved_calls=tuple(one.saved for one in calls),
    )
    return EncodedPiece(piece=piece, value=codec.encode(piece))
