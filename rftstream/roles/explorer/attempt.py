"""The result of a finished rollout, and the checks that make a completion fit for training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from rftstream.contracts.assistant import ToolCall
from rftstream.contracts.checks import MAX_DEPTH
from rftstream.contracts.rollouts import AgentCall, Posted, RolloutStatus, Segment, Turn
from rftstream.contracts.token_values import DTYPES
from rftstream.error_kinds import Kinds
from rftstream.policies.base import Completion
from rftstream.roles.explorer.environment_session import CallFailure

log = logging.getLogger(__name__)

CUT_SHORT = ("length", "repetition")
"""Finish reasons of completions that were cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A rollout that has ended, made by the turn loop or by an agent."""

    key: str
    """Name of the rollout in its loop."""
    status: RolloutStatus
    turns: tuple[Turn, ...]
    segments: tuple[Segment, ...]
    num_tokens: int
    error: str | None
    metrics: dict[str, float]
    started_at: float
    posted: Posted | None = None
    calls: tuple[AgentCall, ...] = ()
    """Model calls of an agent."""


class FailureLog:
    """Logs failures of rollouts. The first failure of each kind is logged with its traceback. A turn loop makes it."""

    def __init__(self) -> None:
        self._kinds = Kinds()

    def say(self, rollout: str, text: str, error: BaseException | None) -> None:
        """Log the text, unless a failure of this kind was logged before."""
        if self._kinds.is_new(text):
            log.warning("%s: %s (the first of its kind in this process)", rollout, text, exc_info=error)

    def of_call(self, rollout: str, failure: CallFailure) -> None:
        """Log the failed call of an environment, unless a failure of this kind was logged before."""
        self.say(rollout, failure.text, failure.error)


def find_oddity(completion: Completion) -> str:
    """Return the fault of a completion; empty if a trainer can learn from it. Policies may be user code, so their
    completions are checked."""
    logprobs, count = completion.behavior_logprobs, len(completion.token_ids)
    if len(logprobs) != count:
        return f"{len(logprobs)} logprobs for {count} tokens"
    if not np.isfinite(logprobs).all():
        return "a logprob that is not finite"
    end = 0
    for span in completion.versions:
        if span.start != end or span.count < 1:
            return f"a version for {span.count} tokens from {span.start} on, expected some from {end} on"
        end += span.count
    for name, column in completion.beside.items():
        if len(column) < count:
            return f"{name} beside {len(column)} of {count} tokens"
        if str(column.values.dtype) not in DTYPES:
            return f"{name} of {column.values.dtype}, expected one of {', '.join(DTYPES)}"
    return "" if end == count else f"versions for {end} of {count} tokens"


def without_more(key: str, reason: str) -> Completion:
    """Return an empty completion for a turn that was already complete when it was saved."""
    return Completion(
        request_id=key,
        token_ids=np.zeros(0, np.int32),
        behavior_logprobs=np.zeros(0, np.float32),
        versions=(),
        finish_reason=reason,
    )


def recordable_call(call: ToolCall) -> ToolCall:
    """Return the call in a form that a record can hold. A model may write numbers, texts and nesting that a record
    cannot hold."""
    try:
        msgspec.msgpack.encode((call.name, call.arguments, call.text))
        if _depth(call.arguments) <= MAX_DEPTH:
            return call
        error = f"arguments of more than {MAX_DEPTH} levels"
    except (ValueError, OverflowError, RecursionError) as found:  # UnicodeEncodeError is a ValueError
        error = f"arguments that no record can hold: {found}"
    name, text = (value.encode(errors="backslashreplace").decode() for value in (call.name, call.text))
    return replace(call, name=name, text=text, arguments=None, error=call.error or error)


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    if isinstance(value, list | tuple):
        return 1 + max(map(_depth, value), default=0)
    return 0


def oldest_version(segments: Sequence[Segment]) -> int | None:
    """Return the oldest version that sampled a token; None if no token was sampled."""
    versions = [span.version for segment in segments for span in segment.versions]
    return min(versions) if versions else None
