"""The agent loop: rollouts that agents make by calling the gateway. It is to them what the turn loop is to environments.

A call goes through these: `_ask` plans where its tokens go, `_submit` has it sampled when the weights are new enough,
`_complete` takes its tokens and writes its answer, `unsaved` hands it out to be saved, and `committed`, called when
that is on the log, releases the answer. So an explorer that dies before has told nobody anything, and one that dies
after is followed by one that tells the same. A rollout ends by the agent's word, or when it is silent for too long.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rftstream.contracts.rollouts import Posted, RolloutStatus, SavedCall
from rftstream.contracts.tasks import Task
from rftstream.errors import ConfigError, ContractError
from rftstream.policies.base import LOOK_S, Completion, Policy, SampleRequest
from rftstream.roles.explorer.agent_history import RecordedCall, digest
from rftstream.roles.explorer.agent_rollout import AgentRollout
from rftstream.roles.explorer.agent_session import AgentSession, EndedAgent, OpenCall, UnsavedCall
from rftstream.roles.explorer.model_calls import (
    RETRY_AFTER_S,
    AgentRequest,
    CallInbox,
    Delivered,
    ModelCall,
    Refusal,
    RolloutEnd,
    RolloutEnded,
    SessionGranted,
    SessionWanted,
    moving,
)
from rftstream.roles.explorer.open_rollout import OpenSegment
from rftstream.roles.explorer.turn_loop import completion_oddity
from rftstream.service.role import FOREVER

log = logging.getLogger(__name__)

MAX_REMEMBERED = 100_000
"""Most ended rollouts whose keys are answered with 409."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLimits:
    """What agents may do."""

    max_calls: int = 1000
    """Calls of one rollout."""
    max_in_flight: int = 16
    """Calls of one rollout at the same time."""
    idle_timeout_s: float = 600.0
    """Seconds after which a rollout ends whose agent is silent."""


class AgentLoop:
    """The rollouts that agents make, over the explorer's policy. The step calls `start` for each task, `step` in each
    slice, `unsaved` and `committed` around each transaction, and `drop` for what it has lost."""

    def __init__(
        self,
        *,
        policy: Policy,
        inbox: CallInbox,
        limits: AgentLimits,
        context: int | None,
        fits: Callable[[Task, UnsavedCall], None],
        now: Callable[[], float],
    ) -> None:
        """`fits` raises ContractError for a call that no record can hold."""
        self._policy, self._inbox, self._limits = policy, inbox, limits
        self._context, self._fits, self._now = context, fits, now
        self._sessions: dict[int, AgentSession] = {}
        self._by_id: dict[str, AgentSession] = {}
        self._past: dict[str, str] = {}
        """Rollouts that have ended here -> their status, newest last."""
        self._ended: list[EndedAgent] = []

    @property
    def num_open(self) -> int:
        """How many rollouts are in hand, those that wait for an agent included."""
        return sum(session.ended is None for session in self._sessions.values())

    # ------------------------------------------------------------------------------------------ the step's side

    def start(self, key: int, rollout: AgentRollout, *, session: str | None) -> None:
        """Take a task in hand. `rollout` has the calls that were saved, and `session` what was saved of who has it."""
        now = self._now()
        self._sessions[key] = self._by_id[rollout.task.ids.rollout_id] = AgentSession(
            key=key,
            rollout=rollout,
            started_at=now,
            last_active=now,
            session=session,
            is_session_saved=session is not None,
            num_committing=len(rollout.calls),
        )

    def step(self, may_sample: Callable[[Task], bool]) -> list[EndedAgent]:
        """Do one slice of work: take requests, have calls sampled, take what was sampled; return rollouts that ended.
        `may_sample`: whether the weights are new enough for a task."""
        for item in self._inbox.take():
            if isinstance(item, Delivered):
                self._note_delivered(item)
            else:
                self._take(item)
        for session in self._sessions.values():
            for open_call in session.open_calls.values():
                if not open_call.is_submitted and may_sample(session.rollout.task):
                    self._submit(session, open_call)
        for completion in self._policy.step():
            self._complete(completion)
        self._end_silent()
        ended, self._ended = self._ended, []
        return ended

    def unsaved(self, key: int) -> tuple[str | None, list[UnsavedCall]] | None:
        """Return what of a rollout is to be saved now: who it was given to, if that is not saved, and calls. None if
        there is nothing. It counts as on its way to the log from now on."""
        session = self._sessions[key]
        grant = None if session.is_session_saved else session.session
        if session.ended is not None or (grant is None and not session.unsaved):
            return None
        calls, session.unsaved = session.unsaved, []
        session.num_committing += len(calls)
        return grant, calls

    def committed(self, saved: Collection[int], finished: Collection[int]) -> None:
        """Take note that what was handed out for these rollouts is on the log, and answer those who wait for it."""
        now = self._now()
        for key in saved:
            if (session := self._sessions.get(key)) is not None:
                session.acknowledge()
                session.is_session_saved = session.session is not None
                session.last_active = now
                for request in session.grants:
                    request.reply(_granted(session))
                session.grants = []
        for key in finished:
            if (session := self._sessions.pop(key, None)) is not None:
                del self._by_id[session.rollout_id]
                assert session.ended is not None
                session.num_committing = len(session.rollout.calls)
                session.acknowledge()
                for request in session.ends:
                    request.reply(RolloutEnded(rollout_id=session.rollout_id, status=str(session.ended.status)))

    def drop(self, keys: Iterable[int]) -> None:
        """Forget rollouts that are another explorer's now; their agents are told to come again."""
        for key in keys:
            if (session := self._sessions.pop(key, None)) is not None:
                del self._by_id[session.rollout_id]
                self._abort(session.open_calls.values())
                for request in session.requests():
                    request.reply(moving())
                self._past.pop(session.rollout_id, None)

    def hold(self, min_version_above: int) -> None:
        """Forget what is being sampled for tasks that need a newer version; it is sampled anew when that is here."""
        for session in self._sessions.values():
            if session.rollout.task.ids.min_version > min_version_above:
                self._abort(session.open_calls.values())
                for open_call in session.open_calls.values():
                    open_call.is_submitted = False

    def leave(self) -> list[int]:
        """Stop sampling; return the rollouts that have nothing left to be saved, so that they can be given back."""
        for session in self._sessions.values():
            self._abort(session.open_calls.values())
            for open_call in session.open_calls.values():
                session.rollout.release(open_call.plan)
                for request in open_call.requests:
                    request.reply(moving())
            session.open_calls.clear()
        return [key for key, one in self._sessions.items() if one.ended is None and not one.has_work]

    def rewind(self, key: int) -> None:
        """Have the recorded calls answer an agent that is run again from its start: each answers the next equal request
        as if nobody had got its answer."""
        for recorded in self._sessions[key].rollout.calls:
            recorded.is_delivered = False

    def idle_s(self) -> float:
        """Return the seconds until `step` has something to do, if no request comes."""
        if len(self._inbox) or self._ended:
            return 0.0
        if any(session.open_calls for session in self._sessions.values()):
            return min(self._policy.idle_s(), LOOK_S)
        ends = [self._ends_at(session) for session in self._sessions.values() if self._may_fall_silent(session)]
        return max(0.0, min(ends) - self._now()) if ends else FOREVER

    def close(self) -> None:
        """Tell all agents to come again."""
        self._inbox.close()
        self.drop(list(self._sessions))

    # ------------------------------------------------------------------------------------------ requests

    def _take(self, request: AgentRequest) -> None:
        if isinstance(request.wanted, SessionWanted):
            self._grant(request, request.wanted)
            return
        session = self._by_id.get(request.rollout_id)
        status = self._past.get(request.rollout_id) if session is None else None
        if session is not None and session.ended is None:
            session.last_active = self._now()
            if session.session is None:  # an agent that has the key needs no session
                session.session = ""
            if isinstance(request.wanted, ModelCall):
                self._call(session, request, request.wanted)
            else:
                session.ends.append(request)
                self._end_by_word(session, request.wanted)
        elif isinstance(request.wanted, RolloutEnd) and (session is not None or status is not None):
            if session is not None:
                session.ends.append(request)
            else:
                request.reply(RolloutEnded(rollout_id=request.rollout_id, status=str(status)))
        elif session is not None or status is not None:
            request.reply(Refusal(status=409, sentence=f"the rollout {request.rollout_id} has ended"))
        else:
            request.reply(moving())

    def _grant(self, request: AgentRequest, wanted: SessionWanted) -> None:
        """Give a rollout away, once that is on the log; the same one for a request of the same name."""
        name = digest(wanted.name) if wanted.name else ""
        free = None
        for session in self._sessions.values():
            if session.ended is None and session.session is None:
                free = free or session
            elif name and session.session == name and session.ended is None:
                free = session
                break
        if free is None:
            request.reply(
                Refusal(status=503, sentence="no rollout waits for an agent now", retry_after_s=RETRY_AFTER_S)
            )
            return
        free.last_active = self._now()
        if free.session is None:
            free.session, free.started_at = name, self._now()
        if free.is_session_saved:
            request.reply(_granted(free))
        else:
            free.grants.append(request)

    def _call(self, session: AgentSession, request: AgentRequest, call: ModelCall) -> None:
        found = session.answered_before(call) or self._refusal(session, call)
        if isinstance(found, Refusal):
            request.reply(found)
        elif found is not None:
            session.wait_for(found, request)
        else:
            self._begin(session, request, call)

    def _refusal(self, session: AgentSession, call: ModelCall) -> Refusal | None:
        limits, sampling = self._limits, session.rollout.task.sampling
        num_calls = len(session.rollout.calls) + len(session.open_calls)
        if len(session.open_calls) >= limits.max_in_flight:
            return Refusal(
                status=429,
                sentence=f"got {limits.max_in_flight} calls of this rollout at once, expected at most that",
                retry_after_s=RETRY_AFTER_S,
            )
        if num_calls >= limits.max_calls:
            return _refused(f"the rollout has made {num_calls} calls, expected at most {limits.max_calls}; end it")
        if session.rollout.num_tokens >= sampling.max_tokens:
            return _refused(f"the rollout has used its {sampling.max_tokens} tokens (sampling.max_tokens); end it")
        if not call.messages or call.messages[-1].role == "assistant":
            return _refused("the last message is the assistant's, expected one that it can answer")
        return None

    def _begin(self, session: AgentSession, request: AgentRequest, call: ModelCall) -> None:
        try:
            plan = session.rollout.plan(call)
        except ConfigError as error:
            request.reply(_refused(f"the messages cannot be rendered: {error}"))
            return
        if self._context is not None and len(plan.prompt) >= self._context:
            session.rollout.release(plan)
            request.reply(
                _refused(f"a prompt of {len(plan.prompt)} tokens leaves no room in the context of {self._context}")
            )
            return
        open_call = OpenCall(
            request_id=f"{session.key}/call/{session.num_asked}",
            call=call,
            plan=plan,
            requests=[request],
            started_at=self._now(),
            seed=_seed(session.rollout.task.seed, call.digest, session.occurrences(call.digest)),
        )
        session.num_asked += 1
        session.open_calls[open_call.request_id] = open_call

    # ------------------------------------------------------------------------------------------ calls

    def _submit(self, session: AgentSession, open_call: OpenCall) -> None:
        sampling, prompt = session.rollout.task.sampling, open_call.plan.prompt
        limits = [sampling.max_tokens - session.rollout.num_tokens, open_call.call.max_tokens]
        if self._context is not None:
            limits.append(self._context - len(prompt))
        open_call.is_submitted = True
        self._policy.submit(
            SampleRequest(
                request_id=open_call.request_id,
                token_ids=prompt,
                sampling=sampling,
                seed=open_call.seed,
                max_tokens=max(1, min(limit for limit in limits if limit is not None)),
            )
        )

    def _complete(self, completion: Completion) -> None:
        """Take what was sampled for a call, and write its answer. Nobody gets it before it is on the log."""
        session = self._sessions.get(int(completion.request_id.partition("/")[0]))
        open_call = None if session is None else session.open_calls.pop(completion.request_id, None)
        if session is None or open_call is None:
            return
        session.last_active = self._now()
        why = completion.error or "the policy failed"
        if completion.finish_reason == "error" or (why := completion_oddity(completion)):
            log.warning("%s: a call failed: %s", session.rollout_id, why)
            self._fail(session, open_call, Refusal(status=500, sentence=f"the call failed: {why}"))
            return
        try:
            unsaved, recorded = self._recorded(session, open_call, completion)
        except ContractError as error:
            self._fail(session, open_call, Refusal(status=413, sentence=f"the call cannot be recorded: {error}"))
            return
        session.unsaved.append(unsaved)
        session.waiting[recorded.call.number] = open_call.requests

    def _recorded(
        self, session: AgentSession, open_call: OpenCall, completion: Completion
    ) -> tuple[UnsavedCall, RecordedCall]:
        """Add the call to its rollout. ContractError, and nothing is added, if no record can hold it."""
        rollout, plan, now = session.rollout, open_call.plan, self._now()
        result = rollout.result(plan, open_call.call, completion, now)
        answer = json.dumps(open_call.call.dialect.answer(result), ensure_ascii=False).encode()
        call = rollout.new_call(plan, open_call.call, completion, (open_call.started_at, now))
        added = OpenSegment()
        added.prompt(plan.new_prompt)
        added.sampled(completion)
        saved = SavedCall(
            answer=answer,
            parent=plan.parent,
            messages=plan.new_messages,
            tools=tuple(map(dict, plan.conversation.tools)) if plan.parent is None else (),
        )
        unsaved = UnsavedCall(call=call, saved=saved, segment=added.close())
        self._fits(rollout.task, unsaved)
        return unsaved, rollout.record(plan, result, call, answer, unsaved.segment)

    def _fail(self, session: AgentSession, open_call: OpenCall, refusal: Refusal) -> None:
        session.rollout.release(open_call.plan)
        for request in open_call.requests:
            request.reply(refusal)

    def _abort(self, open_calls: Iterable[OpenCall]) -> None:
        for open_call in open_calls:
            if open_call.is_submitted:
                self._policy.abort(open_call.request_id)

    def _note_delivered(self, notice: Delivered) -> None:
        session = self._by_id.get(notice.rollout_id)
        if session is not None and notice.number < len(session.rollout.calls):
            session.rollout.calls[notice.number].is_delivered = True

    # ------------------------------------------------------------------------------------------ the end

    def _end_by_word(self, session: AgentSession, end: RolloutEnd) -> None:
        gave = end.reward is not None or end.parts
        posted = Posted(reward=end.reward, parts=dict(end.parts), source="agent") if gave else None
        if end.error is not None:
            self._end(session, RolloutStatus.failed, f"the agent failed: {end.error}", posted, dict(end.metrics))
        elif not session.rollout.calls:
            self._end(session, RolloutStatus.failed, "the agent ended without a call", None, dict(end.metrics))
        else:
            self._end(session, RolloutStatus.completed, None, posted, dict(end.metrics))

    def _end_silent(self) -> None:
        for session in self._sessions.values():
            if self._may_fall_silent(session) and self._now() >= self._ends_at(session):
                silent = f"the agent was silent for {self._limits.idle_timeout_s:g} s (explorer.idle_timeout_s)"
                if session.rollout.calls:
                    self._end(session, RolloutStatus.truncated, silent, None, {})
                else:
                    self._end(session, RolloutStatus.failed, f"{silent}, and made no call", None, {})

    def _may_fall_silent(self, session: AgentSession) -> bool:
        return session.ended is None and session.session is not None and not session.has_work

    def _ends_at(self, session: AgentSession) -> float:
        return session.last_active + self._limits.idle_timeout_s

    def _end(
        self,
        session: AgentSession,
        status: RolloutStatus,
        error: str | None,
        posted: Posted | None,
        metrics: Mapping[str, Any],
    ) -> None:
        self._abort(session.open_calls.values())
        ended = Refusal(status=409, sentence=f"the rollout {session.rollout_id} has ended")
        for open_call in session.open_calls.values():
            self._fail(session, open_call, ended)
        session.open_calls.clear()
        for request in session.grants:
            request.reply(ended)
        session.grants = []
        session.ended = EndedAgent(
            key=session.key,
            rollout=session.rollout,
            status=status,
            error=error,
            posted=posted,
            metrics=dict(metrics),
            started_at=session.started_at,
        )
        self._ended.append(session.ended)
        self._past[session.rollout_id] = str(status)
        while len(self._past) > MAX_REMEMBERED:
            del self._past[next(iter(self._past))]


def _granted(session: AgentSession) -> SessionGranted:
    task = session.rollout.task
    problem = {
        "messages": [{"role": message.role, "content": message.content} for message in task.problem.messages],
        "tools": list(task.problem.tools),
        "info": dict(task.problem.info),
    }
    return SessionGranted(rollout_id=session.rollout_id, problem=problem, seed=task.seed)


def _refused(sentence: str) -> Refusal:
    return Refusal(status=400, sentence=sentence)


def _seed(task_seed: int, request_digest: str, occurrence: int) -> int:
    """Return the seed of a call. It depends on what is asked for and how often, not on when: so a call that was sampled
    and not committed is sampled again alike."""
    text = f"{task_seed}/{request_digest}/{occurrence}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
