"""The agent loop: rollouts that agents make by calling the gateway. It does for agents what the turn loop does for
environments.

A call takes these steps. `CallSampler` plans its segment, submits it once the weights are new enough, and builds its
answer. `unsaved` returns it for saving. `committed`, called when it is on the log, releases the answer. If the explorer
dies before the commit, no agent has seen the answer; if it dies after, its successor gives the same answer. A rollout
ends when the agent says so, or when the agent sends nothing for too long."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rftstream import faults
from rftstream.contracts.rollouts import Posted, RolloutStatus
from rftstream.contracts.tasks import Task
from rftstream.metrics import named_by_people
from rftstream.policies.base import Constraint, Policy
from rftstream.roles.explorer.agents.calls import AgentLimits, CallSampler
from rftstream.roles.explorer.agents.pieces import EncodedPiece, encode_piece
from rftstream.roles.explorer.agents.rollout import AgentRollout
from rftstream.roles.explorer.agents.session import AgentSession
from rftstream.roles.explorer.attempt import Attempt
from rftstream.roles.explorer.model_calls import (
    RETRY_AFTER_S,
    AgentBegins,
    AgentRequest,
    CallInbox,
    CountWanted,
    Delivered,
    ModelCall,
    Refusal,
    RolloutEnd,
    RolloutEnded,
    SessionGranted,
    SessionWanted,
    digest,
    moving,
)
from rftstream.service.role import FOREVER

log = logging.getLogger(__name__)

MAX_REMEMBERED = 100_000
"""Most ended rollouts that are remembered. Requests for them are answered with 409."""


@dataclass(frozen=True, slots=True)
class _Past:
    """A rollout that has ended."""

    status: str
    word: str | None
    """Digest of the agent's last request, which ended the rollout; None if it ended otherwise."""


class AgentLoop:
    """The rollouts that agents make, over the explorer's policy. The step calls `start` for each task, `step` in each
    slice, `unsaved` and `committed` around each transaction, and `drop` for lost rollouts."""

    def __init__(
        self,
        *,
        policy: Policy,
        inbox: CallInbox,
        limits: AgentLimits,
        context: int | None,
        explorer: str,
        now: Callable[[], float],
        check_form: Callable[[Constraint], object] | None = None,
        version_of: Callable[[str, str], str] = lambda taskset, name: "",
    ) -> None:
        """`policy` must be stepped by this loop alone. `explorer` is the name of this process. `check_form` raises
        ConfigError for a form that the policy cannot constrain tokens to; None if it cannot constrain tokens.
        `version_of` returns the digest of an environment by its name, for a taskset or an evaluation."""
        self._inbox, self._limits, self._explorer, self._now = inbox, limits, explorer, now
        self._version_of = version_of
        self._calls = CallSampler(
            policy=policy, limits=limits, context=context, explorer=explorer, now=now, check_form=check_form
        )
        self._sessions: dict[int, AgentSession] = {}
        self._by_id: dict[str, AgentSession] = {}
        self._past: dict[str, _Past] = {}
        """Rollouts that have ended here, newest last."""
        self._ended: list[Attempt] = []
        self._unsaved: dict[int, None] = {}
        """Rollouts that may have something to be saved, oldest first. Most rollouts have nothing, so checking only
        these is faster."""
        self._late_at = 0.0
        """No rollout's time limit or silence limit is reached before this time."""

    # ------------------------------------------------------------------------------------------ the step's side

    def start(self, key: int, rollout: AgentRollout, *, session: str | None, next_piece: int) -> None:
        """Take a task in hand. `rollout` contains the calls that were saved. `session` is the digest of the request
        that the rollout was given to; it is empty for an agent that this explorer starts, and None if no agent has the
        rollout. `next_piece` is the number of its next piece."""
        now = self._now()
        self._sessions[key] = self._by_id[rollout.task.ids.rollout_id] = AgentSession(
            key=key,
            rollout=rollout,
            started_at=min((call.call.started_at for call in rollout.calls), default=now),
            last_active=now,
            idle_timeout_s=self._limits.idle_timeout_s,
            session=session,
            is_session_saved=session is not None,
            num_committed=len(rollout.calls),
            num_committing=len(rollout.calls),
            next_piece=next_piece,
        )
        self._late_at = 0.0

    def step(
        self, may_sample: Callable[[Task], bool], is_to_come: Callable[[str], bool] = lambda session: False
    ) -> list[Attempt]:
        """Do one slice of work: take requests, submit calls, take completions. Return the rollouts that ended.
        `may_sample` tells whether the weights are new enough for a task. `is_to_come` tells whether the rollout of this
        session will start soon."""
        for item in self._inbox.take():
            if isinstance(item, AgentRequest):
                self._take(item, is_to_come)
            else:
                self._note(item)
        for session in self._sessions.values():
            if session.open_calls:
                self._calls.sample(session, may_sample(session.rollout.task))
        for completion in self._calls.finished():
            session_of_it = self._sessions.get(int(completion.request_id.partition("/")[0]))
            if session_of_it is not None:
                self._calls.complete(session_of_it, completion)
                self._unsaved[session_of_it.key] = None
        self._end_late()
        ended, self._ended = self._ended, []
        return ended

    def unsaved(self) -> dict[int, list[EncodedPiece]]:
        """Return the unsaved part of each rollout: its calls, or the session that it was given to. These parts now
        count as on their way to the log."""
        found = {}
        keys, self._unsaved = self._unsaved, {}
        for key in keys:
            session = self._sessions.get(key)
            if session is None or session.ended is not None:
                continue
            pieces, session.unsaved = session.unsaved, []
            session.num_committing += len(pieces)
            if session.grants and session.new_session is not None and not pieces:
                pieces = [
                    encode_piece(
                        session.rollout.task,
                        None,
                        number=session.next_piece,
                        session=session.new_session,
                        now=self._now(),
                        explorer=self._explorer,
                    )
                ]
                session.next_piece += 1
            if pieces:
                found[key] = pieces
        return found

    def committed(self, saved: Collection[int], finished: Collection[int]) -> None:
        """Record that the parts returned by `unsaved` for these rollouts are on the log. Answer the requests that wait
        for them."""
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
        """Forget rollouts that another explorer has now. Their agents are told to retry."""
        for key in keys:
            if (session := self._sessions.pop(key, None)) is not None:
                del self._by_id[session.rollout_id]
                self._calls.cancel(session, moving())
                for request in session.requests():
                    request.reply(moving())
                self._past.pop(session.rollout_id, None)

    def leave(self) -> list[int]:
        """Stop sampling and refuse further requests. Return the rollouts that have nothing left to be saved, so that
        they can be given back. The other rollouts may take long to finish."""
        for item in self._inbox.take():
            if isinstance(item, AgentRequest):
                item.reply(moving())
        for session in self._sessions.values():
            self._calls.cancel(session, moving())
        return [key for key, one in self._sessions.items() if one.ended is None and not one.has_work]

    def is_free(self, key: int) -> bool:
        """Return whether no agent has the rollout."""
        session = self._sessions.get(key)
        return session is not None and session.session is None

    def rewind(self, key: int) -> None:
        """Use the recorded calls as answers for an agent that runs again from its start."""
        self._sessions[key].rewind()

    def idle_s(self) -> float:
        """Return the seconds until `step` has work, if no request comes."""
        if self._inbox.has_woken or self._ended:
            return 0.0
        if any(session.is_sampling for session in self._sessions.values()):
            return self._calls.idle_s()
        ends = (self._ends_at(session) for session in self._sessions.values())
        return max(0.0, min(ends, default=FOREVER) - self._now())

    def close(self) -> None:
        """Tell all agents to retry."""
        self._inbox.close()
        self.drop(list(self._sessions))

    # ------------------------------------------------------------------------------------------ requests

    def _take(self, request: AgentRequest, is_to_come: Callable[[str], bool]) -> None:
        if isinstance(request.wanted, SessionWanted):
            self._grant(request, request.wanted, is_to_come)
            return
        session = self._by_id.get(request.rollout_id)
        past = self._past.get(request.rollout_id)
        if session is not None and session.ended is None and session.is_given_up(request.launch):
            request.reply(Refusal(status=409, sentence=f"the agent of {request.rollout_id} was started again since"))
        elif session is not None and session.ended is None:
            session.last_active = self._now()
            if session.session is None:  # an agent with the key needs no session
                session.session, self._late_at = "", 0.0
            if isinstance(request.wanted, RolloutEnd):
                session.ends.append(request)
                self._end_by_word(session, request.wanted)
            else:
                self._call(session, request, request.wanted)
        elif past is None:
            request.reply(moving())
        elif not isinstance(request.wanted, RolloutEnd):
            request.reply(Refusal(status=409, sentence=f"the rollout {request.rollout_id} has ended"))
        elif past.word not in (None, digest(asdict(request.wanted))):
            sentence = (
                f"the rollout {request.rollout_id} has ended with another reward, metric or error; that one holds"
            )
            request.reply(Refusal(status=409, sentence=sentence))
        elif session is not None:
            session.ends.append(request)
        else:
            request.reply(RolloutEnded(rollout_id=request.rollout_id, status=past.status))

    def _grant(self, request: AgentRequest, wanted: SessionWanted, is_to_come: Callable[[str], bool]) -> None:
        """Give a rollout to an agent, effective once it is on the log. A request with the same name gets the same
        rollout."""
        name = digest(wanted.name) if wanted.name else ""
        free = None
        for session in self._sessions.values():
            if session.ended is None and session.session is None:
                free = free or session
            elif name and session.session == name and session.ended is None:
                free = session
                break
        else:
            if name and is_to_come(name):  # if it got another rollout, the saved one would never be made
                request.reply(moving())
                return
        if free is None:
            request.reply(
                Refusal(
                    status=503,
                    sentence="no rollout waits for an agent here now; ask again, or at one of `gateways`",
                    retry_after_s=RETRY_AFTER_S,
                )
            )
            return
        free.last_active = self._now()
        if free.session is None:
            free.session, free.started_at, self._late_at = name, self._now(), 0.0
        if wanted.idle_timeout_s is not None:
            free.idle_timeout_s, self._late_at = min(wanted.idle_timeout_s, self._limits.idle_timeout_s), 0.0
        if free.is_session_saved:
            request.reply(_granted(free))
        else:
            free.grants.append(request)
            self._unsaved[free.key] = None

    def _call(self, session: AgentSession, request: AgentRequest, wanted: ModelCall | CountWanted) -> None:
        call = session.resolved(wanted if isinstance(wanted, ModelCall) else wanted.call)
        if isinstance(call, Refusal):
            request.reply(call)
            return
        if isinstance(wanted, CountWanted):
            request.reply(self._calls.count(session, call))
            return
        found = session.answered_before(call) or self._calls.refusal(session, call)
        if isinstance(found, Refusal):
            request.reply(found)
        elif found is not None:
            session.wait_for(found, request)
        else:
            self._calls.begin(session, request, call)

    def _note(self, notice: Delivered | AgentBegins) -> None:
        session = self._by_id.get(notice.rollout_id)
        if isinstance(notice, AgentBegins):
            if session is not None and session.ended is None:
                session.rewind()
                session.launch = notice.launch
                if notice.keeps_time:
                    session.idle_timeout_s, self._late_at = FOREVER, 0.0
                session.last_active = self._now()
        elif (
            session is not None
            and not session.is_given_up(notice.launch)
            and notice.number < len(session.rollout.calls)
        ):
            session.rollout.calls[notice.number].is_delivered = True
            faults.at("call_answered", notice.number + 1)

    # ------------------------------------------------------------------------------------------ the end

    def _end_by_word(self, session: AgentSession, end: RolloutEnd) -> None:
        word = digest(asdict(end))
        gave = end.reward is not None or end.parts or end.roles
        task, posted = session.rollout.task, None
        if gave:
            posted = Posted(
                reward=end.reward,
                parts=named_by_people(end.parts),
                source="agent",
                roles=dict(end.roles),
                version=self._version_of(task.ids.taskset, task.environment),
            )
        if end.error is not None and session.rollout.calls and (limit := session.limit_met):
            self._cut_short(session, f"{limit}, and then the agent failed: {end.error}", word)
        elif end.error is not None:
            self._end(session, RolloutStatus.failed, f"the agent failed: {end.error}", posted, dict(end.metrics), word)
        elif end.cut_short is not None:
            self._cut_short(session, end.cut_short, word)
        elif not session.rollout.calls:
            self._end(session, RolloutStatus.failed, "the agent ended without a call", None, dict(end.metrics), word)
        else:
            self._end(session, RolloutStatus.completed, None, posted, dict(end.metrics), word)

    def _end_late(self) -> None:
        """End rollouts whose agents are silent or whose time is up. A request from an agent only postpones the end of
        its rollout, so no rollout is checked before the earliest end."""
        now, limits = self._now(), self._limits
        if now < self._late_at:
            return
        ends = (self._ends_at(session) for session in self._sessions.values())
        self._late_at = min((at for at in ends if at > now), default=FOREVER)
        shortest = min((session.idle_timeout_s for session in self._sessions.values()), default=limits.idle_timeout_s)
        self._late_at = min(self._late_at, now + shortest)
        for session in self._sessions.values():
            if now < self._ends_at(session):
                continue
            silent = now >= session.last_active + session.idle_timeout_s and not session.has_work
            is_own = session.idle_timeout_s != limits.idle_timeout_s
            whose = "its session's idle_timeout_s" if is_own else "explorer.idle_timeout_s"
            why = (
                f"the agent was silent for {session.idle_timeout_s:g} s ({whose})"
                if silent
                else f"the rollout took {limits.rollout_timeout_s:g} s (explorer.rollout_timeout_s)"
            )
            self._cut_short(session, why)

    def _cut_short(self, session: AgentSession, why: str, word: str | None = None) -> None:
        if session.rollout.calls:
            self._end(session, RolloutStatus.truncated, why, None, {}, word)
        else:
            self._end(session, RolloutStatus.failed, f"{why}, and made no call", None, {}, word)

    def _ends_at(self, session: AgentSession) -> float:
        """Return the time at which a rollout ends if its agent sends nothing more."""
        if session.ended is not None or session.session is None:
            return FOREVER
        at = FOREVER if session.has_work else session.last_active + session.idle_timeout_s
        if self._limits.rollout_timeout_s:
            at = min(at, session.started_at + self._limits.rollout_timeout_s)
        return at

    def _end(
        self,
        session: AgentSession,
        status: RolloutStatus,
        error: str | None,
        posted: Posted | None,
        metrics: Mapping[str, Any],
        word: str | None = None,
    ) -> None:
        ended = Refusal(status=409, sentence=f"the rollout {session.rollout_id} has ended")
        self._calls.cancel(session, ended)
        for request in session.grants:
            request.reply(ended)
        session.grants = []
        session.ended = Attempt(
            key=str(session.key),
            status=status,
            turns=session.rollout.turns(),
            segments=session.rollout.segments(),
            num_tokens=session.rollout.num_tokens,
            error=error,
            metrics=named_by_people(metrics),
            started_at=session.started_at,
            posted=posted,
            calls=tuple(recorded.call for recorded in session.rollout.calls),
        )
        self._ended.append(session.ended)
        self._past[session.rollout_id] = _Past(str(status), word)
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
