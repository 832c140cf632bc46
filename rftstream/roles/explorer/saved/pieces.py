"""Joins the pieces of an unfinished rollout, so that a successor can continue it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rftstream.contracts.beside import columns_of
from rftstream.contracts.rollouts import PartialRollout, Posted, Segment, StoredState, Turn
from rftstream.contracts.tasks import ChatMessage, Task
from rftstream.models.splice import Conversation
from rftstream.roles.explorer.open_rollout import OpenRollout
from rftstream.roles.explorer.open_segment import OpenSegment


class CannotGoOnError(Exception):
    """The rollout must start over. The text gives the reason in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRollout:
    """All pieces of a rollout joined into one. The fields are those of PartialRollout."""

    turns: tuple[Turn, ...]
    segments: tuple[Segment, ...]
    num_tokens: int
    carried: int
    """Number of tokens at the end of the last segment that belong to an unfinished turn."""
    messages: tuple[ChatMessage, ...]
    metrics: dict[str, float]
    environment_state: bytes | StoredState | None
    """State of the environment; None if no turn is finished, so that the environment starts again."""
    sampler_state: bytes | None
    started_at: float
    posted: Posted | None = None


def join_pieces(task: Task, pieces: Sequence[PartialRollout]) -> SavedRollout:
    """Join the pieces of the task's rollout. CannotGoOnError if they are inconsistent."""
    segments: list[OpenSegment] = []
    turns: list[Turn] = []
    messages = task.problem.messages
    metrics: dict[str, float] = {}
    state: bytes | StoredState | None = None
    state_turn = 0
    for number, piece in enumerate(pieces):
        _check(piece, number, task, known=len(messages), continues=bool(segments))
        turns += piece.turns
        new = list(piece.segments)
        if piece.continues:
            segments[-1].fill(columns_of(piece.beside_before))
            segments[-1].extend(new.pop(0))
        segments += map(OpenSegment.of, new)
        messages = messages[: piece.kept_messages] + piece.messages
        metrics |= piece.metrics
        saved_now = piece.environment_state if piece.stored_state is None else piece.stored_state
        if saved_now is not None:
            state, state_turn = saved_now, num_finished(turns)
    if num_finished(turns) and (state is None or state_turn != num_finished(turns)):
        raise CannotGoOnError("its environment was not saved")
    num_tokens = sum(piece.num_tokens for piece in pieces)
    carried = num_tokens - sum(turn.num_tokens for turn in turns)
    whole = sum(segment.num_sampled() for segment in segments)
    last = segments[-1].num_sampled(len(segments[-1].mask) - carried) if segments and carried >= 0 else -1
    if whole != num_tokens or last != carried:
        raise CannotGoOnError(f"{whole} sampled tokens in it, expected {num_tokens}, {carried} of them at its end")
    return SavedRollout(
        turns=tuple(turns),
        segments=tuple(segment.close() for segment in segments),
        num_tokens=num_tokens,
        carried=carried,
        messages=messages,
        metrics=metrics,
        environment_state=state,
        sampler_state=pieces[-1].sampler_state,
        started_at=pieces[0].started_at,
        posted=pieces[-1].posted,
    )


def go_on_from(state: OpenRollout, saved: SavedRollout) -> None:
    """Copy the saved rollout into a reopened one. The tools are already set."""
    state.started_at, state.metrics, state.posted = saved.started_at, dict(saved.metrics), saved.posted
    state.turns, state.segments = list(saved.turns), [OpenSegment.of(segment) for segment in saved.segments]
    state.num_tokens, state.carried, state.sampler_state = saved.num_tokens, saved.carried, saved.sampler_state
    state.turn, state.messages = num_finished(saved.turns), list(saved.messages)
    state.asked = Conversation(messages=saved.messages, tools=state.tools)
    state.saved(state.segments[-1], environment=saved.environment_state is not None)


def _check(piece: PartialRollout, number: int, task: Task, *, known: int, continues: bool) -> None:
    if piece.ids != task.ids:
        raise CannotGoOnError(f"piece {piece.piece} is of {piece.ids}, expected the task's {task.ids}")
    if piece.piece != number:
        raise CannotGoOnError(f"piece {number} is missing")
    if piece.kept_messages > known or (piece.continues and not (continues and piece.segments)):
        raise CannotGoOnError(f"piece {number} does not fit to the one before")
    oldest = min((span.version for segment in piece.segments for span in segment.versions), default=None)
    if oldest is not None and oldest < task.ids.min_version:
        raise CannotGoOnError(f"version {oldest} sampled of it, expected at least {task.ids.min_version}")


def num_finished(turns: Sequence[Turn]) -> int:
    """Return the number of finished turns of the policy, without those of the environment."""
    return sum(turn.finish_reason is not None for turn in turns)
