"""Rules of agents' calls, left out one at a time."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

from rftstream.gateway.keys import PREFIX, GatewayKeys, KeyOwner
from rftstream.roles.explorer.agents import session as session_module
from rftstream.roles.explorer.agents.history import RecordedCall
from rftstream.roles.explorer.agents.loop import AgentLoop
from rftstream.roles.explorer.agents.rollout import AgentRollout
from rftstream.roles.explorer.agents.session import AgentSession
from rftstream.roles.explorer.model_calls import CallAnswer
from tests.simulation.changes import changed


def answered_before_commit() -> Iterator[None]:
    """An answer leaves as soon as it is handed out to be saved."""
    original = AgentLoop.unsaved

    def unsaved(self: AgentLoop) -> Any:
        found = original(self)
        for key in found:
            self._sessions[key].acknowledge()
        return found

    with changed(AgentLoop, "unsaved", unsaved):
        yield


def retries_sampled_again() -> Iterator[None]:
    """A retry is a new sample."""
    with changed(AgentSession, "answered_before", lambda self, call: None):
        yield


def any_answer_replayed() -> Iterator[None]:
    """A retry gets the answer of the newest call, whatever that was asked."""

    def answered_before(self: AgentSession, call: Any) -> Any:
        return self.rollout.calls[-1] if call.is_retry and self.rollout.calls else None

    with changed(AgentSession, "answered_before", answered_before):
        yield


def answer_made_again() -> Iterator[None]:
    """A recorded answer is made anew for a retry, at another time."""

    def made_again(*, number: int, body: bytes) -> CallAnswer:
        return CallAnswer(number=number, body=body + b" ")

    with changed(session_module, "CallAnswer", made_again):
        yield


def any_key_accepted() -> Iterator[None]:
    """A key opens the rollout that it names, whoever made it."""

    def owner_of(self: GatewayKeys, key: str) -> KeyOwner:
        name = key.removeprefix(PREFIX).partition(".")[0]
        return KeyOwner(base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode(), "")

    with changed(GatewayKeys, "owner_of", owner_of):
        yield


def roles_share_a_segment() -> Iterator[None]:
    """A call goes on in the segment of another role."""
    original = AgentRollout._is_open

    def is_open(self: AgentRollout, parent: RecordedCall, role: str) -> bool:
        return original(self, parent, self._segments[parent.call.segment].role)

    with changed(AgentRollout, "_is_open", is_open):
        yield


RULES: dict[str, tuple[str, str, Callable[[], Iterator[None]]]] = {
    "answered-before-commit": ("lost", "a call is answered before it is on the log", answered_before_commit),
    "retries-sampled-again": ("twice", "a retry is a new sample", retries_sampled_again),
    "any-answer-replayed": ("twice", "a retry gets the answer of another request", any_answer_replayed),
    "answer-made-again": ("twice", "a retry gets other bytes", answer_made_again),
    "roles-share-a-segment": ("lineage", "a call goes on in the segment of another role", roles_share_a_segment),
    "any-key-accepted": ("fencing", "the key of another rollout is accepted", any_key_accepted),
}
"""Name -> the law that it breaks, what is left out, and how."""
