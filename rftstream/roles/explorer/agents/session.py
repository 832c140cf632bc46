"""An agent's rollout in progress: calls being sampled, calls that are not on the log yet, and waiting requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from rftstream import faults
from rftstream.roles.explorer.agents.history import RecordedCall
from rftstream.roles.explorer.agents.pieces import EncodedPiece
from rftstream.roles.explorer.agents.rollout import AgentRollout, PlannedCall
from rftstream.roles.explorer.attempt import CUT_SHORT, Attempt
from rftstream.roles.explorer.model_calls import AgentRequest, CallAnswer, ModelCall, Refusal, digest


@dataclass(slots=True, kw_only=True)
class OpenCall:
    """A call that is being sampled or waits for weights."""

    request_id: str
    """Id of the call's request at the policy."""
    call: ModelCall
    """The model call that the agent asked for."""
    plan: PlannedCall
    """Plan for the call's tokens."""
    requests: list[AgentRequest]
    """Requests that wait for the call. The later ones are retries of the first."""
    started_at: float
    """Time when the first of these requests came."""
    seed: int
    """Seed of its sampling."""
    is_submitted: bool = False
    """Whether the call was submitted to the policy."""


@dataclass(slots=True, kw_only=True)
class AgentSession:
    """A rollout in hand that an agent makes. Only the agent loop makes and changes it."""

    key: int
    """The number of its item."""
    rollout: AgentRollout
    """Its calls and segments."""
    started_at: float
    """Time when an agent got the rollout; before that, time when the task came."""
    last_active: float
    """Time of the agent's last request or answer."""
    idle_timeout_s: float
    """Seconds without a request from the agent after which the rollout ends."""
    session: str | None = None
    """Digest of the name of the request that got the rollout; None if no agent has it yet."""
    launch: str = ""
    """The launch whose agent may make calls; empty for an agent that no explorer has started."""
    is_session_saved: bool = False
    """Whether `session` is on the log."""
    open_calls: dict[str, OpenCall] = field(default_factory=dict)
    """Id at the policy -> call that is being sampled or waits for weights."""
    num_asked: int = 0
    """Number of calls begun so far. Ids of calls are made from it."""
    next_piece: int = 0
    """Number of the next piece."""
    unsaved: list[EncodedPiece] = field(default_factory=list)
    """Calls to be saved, in order."""
    waiting: dict[int, list[AgentRequest]] = field(default_factory=dict)
    """Number of a call that is not on the log yet -> requests that wait for its answer."""
    num_committed: int = 0
    """Calls below this number are on the log."""
    num_committing: int = 0
    """Calls below this number are on the log, or in a transaction."""
    grants: list[AgentRequest] = field(default_factory=list)
    """Requests for the session that wait until the session is on the log."""
    refused_for: str = ""
    """The limit for which the newest call was refused, in words; empty if it was not refused."""
    ended: Attempt | None = None
    """The end of the rollout, while its record is not on the log yet; None before the end."""
    ends: list[AgentRequest] = field(default_factory=list)
    """Requests to end the rollout that wait for its record to be on the log."""

    @property
    def rollout_id(self) -> str:
        """The rollout's id."""
        return self.rollout.task.ids.rollout_id

    @property
    def new_session(self) -> str | None:
        """The session, if it must still be written to the log; otherwise None."""
        return None if self.is_session_saved else self.session

    @property
    def has_work(self) -> bool:
        """Whether a call is being sampled, or anything is not on the log yet."""
        return bool(self.open_calls or self.waiting or self.unsaved or self.grants)

    @property
    def limit_met(self) -> str:
        """The limit that the agent has just reached, in words: a call was refused, or the last answer was cut off."""
        if self.refused_for or not self.rollout.calls:
            return self.refused_for
        reason = self.rollout.calls[-1].call.finish_reason
        return f"its last answer was cut off ({reason})" if reason in CUT_SHORT else ""

    @property
    def is_sampling(self) -> bool:
        """Whether the policy is sampling a call of this rollout. Other calls wait for weights."""
        return any(open_call.is_submitted for open_call in self.open_calls.values())

    def requests(self) -> Iterator[AgentRequest]:
        """Yield all requests that wait for an answer."""
        for open_call in self.open_calls.values():
            yield from open_call.requests
        for waiting in self.waiting.values():
            yield from waiting
        yield from self.grants
        yield from self.ends

    def occurrences(self, request_digest: str) -> int:
        """Return the number of calls with this request so far."""
        recorded = len(self.rollout.calls_of(request_digest))
        return recorded + sum(call.call.digest == request_digest for call in self.open_calls.values())

    def answer_of(self, name: str) -> bytes | None:
        """Return the answer to the call with this id; None if it is not on the log."""
        rollout_id, _, number = name.rpartition("/call/")
        is_known = rollout_id == self.rollout_id and number.isdecimal() and int(number) < self.num_committed
        return self.rollout.calls[int(number)].answer if is_known else None

    def resolved(self, call: ModelCall) -> ModelCall | Refusal:
        """Return the call with references to earlier answers replaced by the messages."""
        if call.unresolved is None:
            return call
        found = call.unresolved(self.answer_of)
        return found if isinstance(found, Refusal) else replace(call, messages=found, unresolved=None)

    def answered_before(self, call: ModelCall) -> RecordedCall | OpenCall | Refusal | None:
        """Return the earlier call that a request repeats, which gives the same answer. None for a new call.

        With an idempotency key, that is the call with the same key. Without one, it is a call with an equal request, if
        the client marks the request as a retry or if no client has received that call's answer. A key that was used for
        another request is refused."""
        if call.idempotency_key is not None:
            name = digest(call.idempotency_key)
            for recorded in self.rollout.calls:
                if recorded.call.idempotency_digest == name:
                    return recorded if recorded.call.request_digest == call.digest else _other_request()
            for one in self.open_calls.values():
                if one.call.idempotency_key == call.idempotency_key:
                    return one if one.call.digest == call.digest else _other_request()
            return None
        sampled = [one for one in self.open_calls.values() if one.call.digest == call.digest]
        for one in sampled:
            if all(request.is_gone for request in one.requests):
                return one
        recorded_calls = self.rollout.calls_of(call.digest)
        for recorded in recorded_calls:
            waits = any(not request.is_gone for request in self.waiting.get(recorded.call.number, ()))
            if not recorded.is_delivered and not waits:
                return recorded
        if call.is_retry:
            return sampled[-1] if sampled else recorded_calls[-1] if recorded_calls else None
        return None

    def is_given_up(self, launch: str | None) -> bool:
        """Return whether requests of this launch come too late, because another launch has begun since."""
        return launch is not None and launch != self.launch

    def rewind(self) -> None:
        """Use the calls so far as answers for an agent that runs again from its start: each call answers the next equal
        request, as if its answer had not been delivered before."""
        for request in self.requests():
            request.is_gone = True
        for recorded in self.rollout.calls:
            recorded.is_delivered = False

    def wait_for(self, found: RecordedCall | OpenCall, request: AgentRequest) -> None:
        """Answer a request with the answer of the call that it repeats, now or once that call is on the log."""
        if isinstance(found, OpenCall):
            found.requests.append(request)
        elif found.call.number < self.num_committed:
            request.reply(CallAnswer(number=found.call.number, body=found.answer))
        else:
            self.waiting.setdefault(found.call.number, []).append(request)

    def acknowledge(self) -> None:
        """Record that the committed transaction is on the log, and answer the requests that wait for it."""
        newly, self.num_committed = range(self.num_committed, self.num_committing), self.num_committing
        for number in newly:
            faults.at("call_committed", number + 1)
            for request in self.waiting.pop(number, ()):
                request.reply(CallAnswer(number=number, body=self.rollout.calls[number].answer))


def _other_request() -> Refusal:
    return Refusal(
        status=400,
        sentence="idempotency-key: it was given to another request of this rollout; expected a new one for each",
    )
