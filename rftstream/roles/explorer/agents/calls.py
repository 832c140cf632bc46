"""Agents' calls, from the request to an answer that can be saved."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from rftstream import faults, metrics
from rftstream.contracts.rollouts import SavedCall
from rftstream.errors import ConfigError, ContractError
from rftstream.policies.base import LOOK_S, Completion, Constraint, Policy, SampleRequest, form_of
from rftstream.roles.explorer.agents.history import RecordedCall
from rftstream.roles.explorer.agents.pieces import CallToSave, EncodedPiece, encode_piece
from rftstream.roles.explorer.agents.session import AgentSession, OpenCall
from rftstream.roles.explorer.attempt import find_oddity
from rftstream.roles.explorer.model_calls import RETRY_AFTER_S, AgentRequest, ModelCall, Refusal, TokensCounted
from rftstream.roles.explorer.open_segment import OpenSegment

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLimits:
    """Limits on the calls and the time of an agent's rollout."""

    max_calls: int = 1000
    """Most calls of one rollout."""
    max_in_flight: int = 16
    """Most calls of one rollout at the same time."""
    idle_timeout_s: float = 600.0
    """Seconds without a request from the agent after which its rollout ends."""
    rollout_timeout_s: float = 0.0
    """Seconds after which a rollout ends in any case; 0: never."""


@dataclass(eq=False, kw_only=True)
class CallSampler:
    """Submits agents' calls to the policy. The agent loop makes it. For each call it asks `refusal`, then calls
    `begin`. In each slice it calls `sample`, then `complete` for each completion of the policy, or `cancel`.

    `explorer` is the name of this process. `check_form` raises ConfigError for a form that the policy cannot constrain
    tokens to; None if it cannot constrain tokens."""

    policy: Policy
    limits: AgentLimits
    context: int | None
    explorer: str
    now: Callable[[], float]
    check_form: Callable[[Constraint], object] | None

    def finished(self) -> list[Completion]:
        """Let the policy do a slice of work. Return the completions that have finished."""
        return self.policy.step()

    def idle_s(self) -> float:
        """Return the seconds until the policy may have a completion."""
        return min(self.policy.idle_s(), LOOK_S)

    def refusal(self, session: AgentSession, call: ModelCall) -> Refusal | None:
        """Return the refusal of a new call; None if the call may be made."""
        limits, sampling = self.limits, session.rollout.task.sampling
        num_calls = len(session.rollout.calls) + len(session.open_calls)
        if len(session.open_calls) >= limits.max_in_flight:
            return Refusal(
                status=429,
                sentence=f"got {limits.max_in_flight} calls of this rollout at once, expected at most that",
                retry_after_s=RETRY_AFTER_S,
            )
        if num_calls >= limits.max_calls:
            session.refused_for = f"the rollout has made {num_calls} calls, expected at most {limits.max_calls}"
            return refused(f"{session.refused_for}; end it")
        if session.rollout.num_tokens >= sampling.max_tokens:
            session.refused_for = f"the rollout has used its {sampling.max_tokens} tokens (sampling.max_tokens)"
            return refused(f"{session.refused_for}; end it")
        if not call.messages or call.messages[-1].role == "assistant":
            return refused("the last message is the assistant's, expected one that it can answer")
        return None if call.constraint is None else self._refused_form(call.constraint)

    def _refused_form(self, constraint: Constraint) -> Refusal | None:
        if self.check_form is None:
            return refused(
                f"{constraint.setting}: this policy does not constrain tokens (hf, vllm and openai do); remove it"
            )
        try:
            self.check_form(constraint)
        except ConfigError as error:
            return refused(str(error))
        return None

    def count(self, session: AgentSession, call: ModelCall) -> TokensCounted | Refusal:
        """Return the number of tokens in a call's prompt, without making the call."""
        try:
            plan = session.rollout.plan(call)
        except ConfigError as error:
            return _cannot_render(error)
        session.rollout.release(plan)
        return TokensCounted(count=len(plan.prompt))

    def begin(self, session: AgentSession, request: AgentRequest, call: ModelCall) -> None:
        """Plan the segment of a new call. `sample` then submits it to the policy."""
        try:
            plan = session.rollout.plan(call)
        except ConfigError as error:
            request.reply(_cannot_render(error))
            return
        if self.context is not None and len(plan.prompt) >= self.context:
            session.rollout.release(plan)
            session.refused_for = (
                f"a prompt of {len(plan.prompt)} tokens leaves no room in the context of {self.context}"
            )
            request.reply(refused(session.refused_for))
            return
        open_call = OpenCall(
            request_id=f"{session.key}/call/{session.num_asked}",
            call=call,
            plan=plan,
            requests=[request],
            started_at=self.now(),
            seed=_seed(session.rollout.task.seed, call.digest, session.occurrences(call.digest)),
        )
        session.num_asked += 1
        session.open_calls[open_call.request_id] = open_call
        faults.at("call_received", len(session.rollout.calls) + len(session.open_calls))

    def sample(self, session: AgentSession, may_sample: bool) -> None:
        """Submit the waiting calls of a rollout to the policy. If the trainer went back to a version that is too old
        for the task, drop the tokens so far; they are sampled again later."""
        if may_sample:
            for open_call in session.open_calls.values():
                if not open_call.is_submitted:
                    self._submit(session, open_call)
        else:
            self._abort(session)

    def _submit(self, session: AgentSession, open_call: OpenCall) -> None:
        sampling, prompt = session.rollout.task.sampling, open_call.plan.prompt
        limits = [sampling.max_tokens - session.rollout.num_tokens, open_call.call.max_tokens]
        if self.context is not None:
            limits.append(self.context - len(prompt))
        open_call.is_submitted = True
        self.policy.submit(
            SampleRequest(
                request_id=open_call.request_id,
                token_ids=prompt,
                sampling=replace(sampling, stop=(*sampling.stop, *open_call.call.stop)),
                constraint=open_call.call.constraint or form_of(sampling),
                seed=open_call.seed,
                max_tokens=max(1, min(limit for limit in limits if limit is not None)),
                group_id=session.rollout.task.ids.group_id,
                rollout_id=session.rollout.task.ids.rollout_id,
                may_go_on=True,
            )
        )

    def complete(self, session: AgentSession, completion: Completion) -> None:
        """Take the completion of a call, and build the answer. The agent gets the answer once it is on the log."""
        open_call = session.open_calls.get(completion.request_id)
        if open_call is None:
            return
        oldest = min((span.version for span in completion.versions), default=None)
        if oldest is not None and oldest < session.rollout.task.ids.min_version:
            open_call.is_submitted = False
            return
        del session.open_calls[completion.request_id]
        session.last_active = self.now()
        why = completion.error or "the policy failed"
        if completion.finish_reason == "error" or (why := find_oddity(completion)):
            log.warning("%s: a call failed: %s", session.rollout_id, why)
            self._fail(session, open_call, Refusal(status=500, sentence=f"the call failed: {why}"))
            return
        try:
            piece, recorded = self._recorded(session, open_call, completion)
        except ContractError as error:
            self._fail(session, open_call, Refusal(status=413, sentence=f"the call cannot be recorded: {error}"))
            return
        session.refused_for = ""
        session.unsaved.append(piece)
        session.next_piece += 1
        session.waiting[recorded.call.number] = open_call.requests
        faults.at("call_sampled", recorded.call.number + 1)

    def _recorded(
        self, session: AgentSession, open_call: OpenCall, completion: Completion
    ) -> tuple[EncodedPiece, RecordedCall]:
        """Add the call to its rollout. ContractError, with nothing added, if no record can hold it."""
        rollout, plan, now = session.rollout, open_call.plan, self.now()
        result = rollout.result(plan, open_call.call, completion, now)
        told = open_call.call.dialect.answer(result)
        answer = msgspec.json.encode(told)
        call = rollout.new_call(plan, open_call.call, completion, (open_call.started_at, now))
        added = OpenSegment(role=open_call.call.role)
        added.prompt(plan.new_prompt)
        added.sampled(completion)
        saved = SavedCall(
            answer=answer,
            parent=plan.parent,
            messages=plan.new_messages,
            tools=tuple(map(dict, plan.conversation.tools)) if plan.parent is None else (),
        )
        piece = encode_piece(
            rollout.task,
            CallToSave(call=call, saved=saved, segment=added.close()),
            number=session.next_piece,
            session=session.new_session,
            now=now,
            explorer=self.explorer,
        )
        if plan.opened not in ("", "first"):
            metrics.SEGMENT_BREAKS.labels(plan.opened).inc()
        return piece, rollout.record(plan, result, call, answer, told, added)

    def _fail(self, session: AgentSession, open_call: OpenCall, refusal: Refusal) -> None:
        session.rollout.release(open_call.plan)
        for request in open_call.requests:
            request.reply(refusal)

    def cancel(self, session: AgentSession, refusal: Refusal) -> None:
        """Refuse all calls of a rollout that have no tokens yet."""
        self._abort(session)
        for open_call in session.open_calls.values():
            self._fail(session, open_call, refusal)
        session.open_calls.clear()

    def _abort(self, session: AgentSession) -> None:
        for open_call in session.open_calls.values():
            if open_call.is_submitted:
                self.policy.abort(open_call.request_id)
                open_call.is_submitted = False


def _cannot_render(error: ConfigError) -> Refusal:
    return refused(f"the messages cannot be rendered: {error}")


def refused(sentence: str) -> Refusal:
    """Return the refusal of a request that is not supported."""
    return Refusal(status=400, sentence=sentence)


def _seed(task_seed: int, request_digest: str, occurrence: int) -> int:
    """Return the seed of a call. It depends on the request and on how often that request was made, not on the time. So
    a call that was sampled and not committed is sampled the same way again."""
    text = f"{task_seed}/{request_digest}/{occurrence}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
