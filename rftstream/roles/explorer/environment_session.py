"""The turn loop's view of an environment: one object of user code, its calls, and the checks of what they return."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol

from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.rollouts import Posted, StoredState
from rftstream.contracts.tasks import ChatMessage
from rftstream.environments.base import Environment, Reply
from rftstream.environments.calls import CallLine, CallResult
from rftstream.error_kinds import last_line
from rftstream.metrics import named_by_people


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailure:
    """The failure of a call of an environment."""

    text: str
    """Environment, method and the last line of the traceback, for log lines."""
    error: BaseException | None = None
    """Error that the call raised; None if the call was given up."""

    @property
    def timed_out(self) -> bool:
        """Whether the call was given up because it exceeded its time limit."""
        return self.error is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The beginning of a conversation, or a saved conversation to be continued."""

    messages: tuple[ChatMessage, ...]
    """First messages of the environment, or the saved conversation that the rollout continues."""
    tools: tuple[Mapping[str, Any], ...]
    """Tools that the environment offers."""


class StateKeeper(Protocol):
    """Stores large states of one rollout's environment outside of the log: `saved_states.RolloutStates`. The session
    calls `put` and `get` in the threads of the environment's calls, so they may block."""

    def is_large(self, state: bytes) -> bool:
        """Return whether a state must be stored here."""

    def put(self, state: bytes) -> StoredState:
        """Store a state. It is durable when this returns."""

    def get(self, stored: StoredState) -> bytes:
        """Return a stored state. WeightsError if it is missing or damaged."""


KeepMedia = Callable[[Sequence[ChatMessage]], tuple[ChatMessage, ...]]
"""Returns the messages with each embedded image replaced by a reference."""


@dataclass(eq=False)
class EnvironmentSession:
    """One environment object. The turn loop makes it, calls `begin` or `resume`, then `reply` for each turn and `save`
    in between, and `close` last. Every answer comes by a callback. If the environment answers immediately, the callback
    runs before the method returns; otherwise it runs when the calls are polled. After `close` no callback runs.

    Its rewards carry `version`, the digest of its settings and code. Errors show `name` and `timeout_s`, the time limit
    of a call. `states` stores large states. `keep` moves images in messages to the store."""

    line: CallLine
    make: Callable[[], Environment]
    _: KW_ONLY
    name: str
    timeout_s: float
    version: Callable[[], str] = str
    states: StateKeeper | None = None
    keep: KeepMedia | None = None
    _environment: Environment | None = field(default=None, init=False)

    @property
    def is_busy(self) -> bool:
        """Whether a call is still running."""
        return self.line.is_busy

    def begin(self, then: Callable[[Opening | CallFailure], None]) -> None:
        """Make the environment and call its `start`."""

        def started(found: Any) -> None:
            if isinstance(found, CallFailure):
                then(found)
            else:
                self._kept("start", found, kept)

        def kept(found: Any) -> None:
            if isinstance(found, CallFailure):
                then(found)
            else:
                self._ask_tools(found, then)

        self._made("start", then, lambda: self._call("start", checked_messages, started))

    def resume(
        self,
        state: bytes | StoredState | None,
        messages: Sequence[ChatMessage],
        then: Callable[[Opening | CallFailure], None],
    ) -> None:
        """Make the environment and load `state`. If `state` is None, start the environment, whose first messages must
        be those of `messages`."""

        def loaded(found: Any) -> None:
            if isinstance(found, CallFailure):
                then(found)
            elif state is None:
                self._kept("start", found, begun)
            else:
                self._ask_tools(tuple(messages), then)

        def begun(found: Any) -> None:
            if isinstance(found, CallFailure):
                then(found)
            elif found != tuple(messages):
                then(CallFailure(text="its environment begins otherwise now", error=ValueError()))
            else:
                self._ask_tools(tuple(messages), then)

        def fetched(result: CallResult) -> None:
            if (failure := self._failure("load", result)) is not None:
                then(failure)
            else:
                self._made("load", then, lambda: self._call("load", _anything, loaded, result.value))

        if state is None:
            self._made("start", then, lambda: self._call("start", checked_messages, loaded))
        elif isinstance(state, StoredState):
            assert self.states is not None, "whoever saved it could keep it"
            self.line.call("load", self.states.get, state, then=fetched)
        else:
            fetched(CallResult(value=state))

    def reply(self, said: AssistantMessage, then: Callable[[Reply | CallFailure], None]) -> None:
        """Ask the environment for its reply to a turn."""

        def replied(found: Reply | CallFailure) -> None:
            if isinstance(found, CallFailure):
                then(found)
            elif found.rewrite is not None:
                rewrite = found.rewrite
                self._kept("reply", rewrite, lambda kept: then(_with(found, rewrite=kept)))
            else:
                self._kept("reply", found.messages, lambda kept: then(_with(found, messages=kept)))

        self._call("reply", checked_reply, replied, said)

    def _kept(self, method: str, messages: Sequence[ChatMessage], then: Callable[[Any], None]) -> None:
        """Move images in messages to the store, in the threads of the environment's calls."""
        keep = self.keep
        if keep is None or not any(media.url.startswith("data:") for message in messages for media in message.media):
            then(messages)
            return

        def done(result: CallResult) -> None:
            failure = self._failure(method, result)
            then(result.value if failure is None else failure)

        self.line.call(method, keep, messages, then=done)

    def save(self, then: Callable[[bytes | StoredState | CallFailure | None], None]) -> None:
        """Ask the environment for its state. A large state is stored before `then` is called."""
        states = self.states

        def kept(result: CallResult) -> None:
            failure = self._failure("save", result)
            if failure is not None and failure.timed_out:  # the store has failed: the environment was not slow
                failure = CallFailure(text=failure.text, error=TimeoutError("the object store"))
            then(result.value if failure is None else failure)

        def saved(found: bytes | CallFailure | None) -> None:
            if states is not None and isinstance(found, bytes) and states.is_large(found):
                self.line.call("save", states.put, found, then=kept)
            else:
                then(found)

        self._call("save", _checked_state, saved)

    def close(self, told: Callable[[CallFailure], None]) -> None:
        """Close the environment once none of its calls is running. `told` is called if that fails."""
        self.line.close("close", self._close, then=lambda result: self._told("close", _anything, result, told))

    def _close(self) -> object:
        # Read the attribute only here, when no other call is running: a running call may just be making the
        # environment.
        environment, self._environment = self._environment, None
        return environment.close() if environment is not None else None

    def _made(self, method: str, then: Callable[[CallFailure], None], go_on: Callable[[], None]) -> None:
        def make() -> None:
            self._environment = self.make()

        def made(result: CallResult) -> None:
            if (failure := self._failure(method, result)) is not None:
                then(failure)
            else:
                go_on()

        self.line.call(method, make, then=made)

    def _ask_tools(self, messages: tuple[ChatMessage, ...], then: Callable[[Opening | CallFailure], None]) -> None:
        def asked(found: Any) -> None:
            then(found if isinstance(found, CallFailure) else Opening(messages=messages, tools=found))

        if hasattr(self._environment, "tools"):
            self._call("tools", checked_tools, asked)
        else:
            asked(())

    def _call(self, method: str, check: Callable[[Any], Any], then: Callable[[Any], None], *arguments: Any) -> None:
        function = getattr(self._environment, method, None)
        if function is None:
            then(CallFailure(text=self._text(method, text := f"it has no method {method}"), error=TypeError(text)))
            return
        self.line.call(
            method,
            function,
            *arguments,
            then=lambda result: then(self._checked(method, check, result)),
            more_s=self._more_s(method),
        )

    def _more_s(self, method: str) -> float:
        """Return the extra seconds that a method may take, since an environment may declare how long its start
        takes."""
        return float(getattr(self._environment, "start_timeout_s", 0.0)) if method in ("start", "load") else 0.0

    def _checked(self, method: str, check: Callable[[Any], Any], result: CallResult) -> Any:
        if (failure := self._failure(method, result)) is not None:
            return failure
        try:
            return check(result.value)
        except Exception as error:  # about the return value of user code
            return self._failure(method, CallResult(error=error))

    def _told(
        self, method: str, check: Callable[[Any], Any], result: CallResult, told: Callable[[CallFailure], None]
    ) -> None:
        if (failure := self._failure(method, result)) is not None:
            told(failure)

    def _failure(self, method: str, result: CallResult) -> CallFailure | None:
        if result.timed_out:
            return CallFailure(text=self._text(method, f"no answer within {self.timeout_s + self._more_s(method):g} s"))
        if result.error is not None:
            return CallFailure(text=self._text(method, _line_of(result.error)), error=result.error)
        return None

    def _text(self, method: str, what: str) -> str:
        return f"environment {self.name}: {method}: {what}"


def _with(reply: Reply, **changes: Any) -> Reply | CallFailure:
    """Return the reply with these messages, or the failure that replaces them."""
    failure = next((value for value in changes.values() if isinstance(value, CallFailure)), None)
    if failure is not None:
        return failure
    return reply if all(getattr(reply, name) is value for name, value in changes.items()) else replace(reply, **changes)


def _line_of(error: BaseException) -> str:
    """Return the last line of the error's traceback, with its type."""
    text = last_line(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def add_reply(posted: Posted | None, reply: Reply, turn: int, version: Callable[[], str] = str) -> Posted | None:
    """Return the environment's total reward, with the reward of the reply to turn number `turn`. `version` returns the
    environment's."""
    if reply.reward is None and not reply.parts and not reply.reached:
        return posted
    posted = posted or Posted(reward=None)
    reward, parts, error = posted.reward, dict(posted.parts), posted.error

    def summed(before: float | None, given: float, what: str) -> float | None:
        nonlocal error
        total = given if before is None else before + given
        if math.isfinite(total):
            return total
        error = error or f"the {what} of turn {turn} is {given}, expected a finite number, also as a sum over turns"
        return before

    if reply.reward is not None:
        reward = summed(reward, reply.reward, "reward")
    for name, given in reply.parts.items():
        if (total := summed(parts.get(name), given, f"part {name!r}")) is not None:
            parts[name] = total
    reached = reply.reached or posted.reached
    return Posted(
        reward=reward,
        parts=named_by_people(parts),
        source="environment",
        error=error,
        reached=reached,
        version=version(),
    )


# ------------------------------------------------------------------------------------------ what may come


def checked_messages(found: Any) -> tuple[ChatMessage, ...]:
    """Return messages as a tuple. TypeError if the value is not a sequence of messages."""
    if type(found) is not tuple and (not isinstance(found, Iterable) or isinstance(found, str | bytes | Mapping)):
        raise TypeError(f"got {type(found).__name__}, expected a list of ChatMessage")
    messages = tuple(found)
    for message in messages:
        if not isinstance(message, ChatMessage):
            raise TypeError(f"got a message of type {type(message).__name__}, expected ChatMessage")
        for name in ("role", "content"):
            if not isinstance(getattr(message, name), str):
                raise TypeError(f"got a message with {name} {getattr(message, name)!r:.100}, expected a text")
    return messages


def checked_tools(found: Any) -> tuple[Mapping[str, Any], ...]:
    """Return tool definitions in the form that JSON gives back. TypeError if they are not tool definitions."""
    if not isinstance(found, Iterable) or isinstance(found, str | bytes | Mapping):
        raise TypeError(f"got {type(found).__name__}, expected a list of tools")
    tools = tuple(found)
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise TypeError(f"got a tool of type {type(tool).__name__}, expected a map with type and function")
    return tuple(json.loads(json.dumps([dict(tool) for tool in tools], allow_nan=False)))


def checked_reply(found: Any) -> Reply:
    """Return the reply in plain types. TypeError if the value is not a reply."""
    if not isinstance(found, Reply):
        raise TypeError(f"got {type(found).__name__}, expected Reply")
    return Reply(
        done=bool(found.done),
        messages=checked_messages(found.messages),
        reward=None if found.reward is None else _number(found.reward, "a reward"),
        parts=_numbers(found.parts, "parts"),
        metrics=_numbers(found.metrics, "metrics"),
        rewrite=None if found.rewrite is None else checked_messages(found.rewrite),
        reached=_checked_texts(found.reached),
    )


def _checked_texts(found: Any) -> tuple[ChatMessage, ...]:
    """Return messages without images as a tuple. TypeError for other values."""
    messages = checked_messages(found)
    if any(message.media for message in messages):
        raise TypeError("got an image in `reached`, expected text alone")
    return messages


def _numbers(found: Any, what: str) -> dict[str, float]:
    if type(found) is dict and not found:
        return {}
    if not isinstance(found, Mapping):
        raise TypeError(f"got {what} of type {type(found).__name__}, expected a map from names to numbers")
    if odd := [name for name in found if not isinstance(name, str)]:
        raise TypeError(f"got {odd[0]!r:.100} as a name in {what}, expected a text")
    return named_by_people({name: _number(value, f"{name!r:.100} in {what}") for name, value in found.items()})


def _number(value: Any, what: str) -> float:
    plain = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    if not isinstance(plain, numbers.Real):
        raise TypeError(f"got {what} of type {type(value).__name__}, expected a number")
    try:
        return float(plain)
    except OverflowError:
        return math.inf


def _checked_state(found: Any) -> bytes | None:
    if found is not None and not isinstance(found, bytes):
        raise TypeError(f"got {type(found).__name__}, expected bytes or None")
    return found


def _anything(found: Any) -> Any:
    return found
