"""Agents in a simulated run, and the laws of their calls: committed before answered, one answer each, sampled once.

An agent asks for rollouts, makes calls that go on from each other, and ends them. Like a client over HTTP it gives a
connection up after a while and tries again, at whichever explorer, until it is answered. Now and then it asks again for
what it was told, falls silent, or sends a request with a key that it has made from another rollout's id. In episodes of
several agents its calls take turns in two roles; some of these end with rewards that do not fit to them.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from random import Random
from typing import Any

from rftstream.contracts.records import Record
from rftstream.contracts.rollouts import PartialRollout, Rollout, RolloutStatus
from rftstream.gateway.dialects import DIALECTS, read_call
from rftstream.gateway.keys import GatewayKeys, KeyOwner
from rftstream.roles.explorer.agents.step import AgentExplorerStep
from rftstream.roles.explorer.model_calls import (
    AgentAnswer,
    AgentRequest,
    CallAnswer,
    Delivered,
    ModelCall,
    Refusal,
    RolloutEnd,
    RolloutEnded,
    SessionGranted,
    SessionWanted,
)
from rftstream.testing import Simulation
from rftstream.testing.simulation import SimulatedProcess
from tests.simulation.laws import Laws
from tests.simulation.unfinished import Unfinished

PATIENCE_S = 3.0
"""Seconds after which an agent gives a connection up."""

SILENT_SHARE = 0.02
"""Share of the answers after which an agent is not heard of again."""

KEYS = GatewayKeys(b"the secret of simulated runs", "simulated")

Wanted = ModelCall | RolloutEnd | SessionWanted


class CallLaws(Unfinished):
    """What the log may say of agents' rollouts, and what agents may be told."""

    def __init__(self, laws: Laws) -> None:
        super().__init__(laws)
        self.answers: dict[tuple[str, int], bytes] = {}
        """Of each call by its number, as it stands on the log."""
        self.num_told = 0
        self.num_told_again = 0
        """Answers by another process than the one that sampled them, or by it a second time."""
        self.granted: list[str] = []
        """Rollouts that were given to agents."""
        self._told: set[tuple[str, int]] = set()
        self.ended: dict[str, Rollout] = {}

    def piece(self, record: Record, piece: PartialRollout) -> None:
        rollout_id, known = piece.ids.rollout_id, self.pieces[piece.ids.rollout_id]
        assert rollout_id not in self._finished, f"{record}: a piece of what is finished"
        assert piece.piece == len(known), f"{record}: piece {piece.piece}, expected {len(known)}"
        assert piece.num_tokens == sum(call.count for call in piece.calls)
        self._laws.versions(piece.ids, piece.segments)
        for call, saved in zip(piece.calls, piece.saved_calls, strict=True):
            assert call.number == sum(len(one.calls) for one in known), "calls are numbered without a gap"
            assert (rollout_id, call.number) not in self.answers, f"{rollout_id}: call {call.number} was sampled twice"
            self.answers[rollout_id, call.number] = saved.answer
        known.append(piece)
        self._live[rollout_id].add(piece.piece)

    def rollout(self, rollout: Rollout) -> None:
        rollout_id = rollout.ids.rollout_id
        self._finished_now.append(rollout_id)
        assert rollout_id not in self.ended, "one record a rollout"
        self.ended[rollout_id] = rollout
        saved = [call for piece in self.pieces[rollout_id] for call in piece.calls]
        assert list(rollout.calls[: len(saved)]) == saved, f"{rollout_id}: a call that was saved is lost"
        twice = [one for one, count in Counter(call.request_digest for call in rollout.calls).items() if count > 1]
        assert not twice, f"{rollout_id}: a request was sampled twice"
        assert rollout.num_tokens == sum(int(one.loss_mask.numpy().sum()) for one in rollout.segments)
        for call in rollout.calls[: len(saved)]:
            ids = rollout.segments[call.segment].token_ids.numpy()[call.start : call.start + call.count]
            text = bytes(ids.tolist()).rstrip(b"\0").decode()
            answer = json.loads(self.answers[rollout_id, call.number])
            assert answer["choices"][0]["message"]["content"] == text, f"{rollout_id}: another answer than its tokens"
            role = rollout.segments[call.segment].role
            assert role == answer["model"].partition(":")[2], f"{rollout_id}: call {call.number} in another role"

    def told(self, rollout_id: str, answer: CallAnswer) -> None:
        """An explorer answers a call."""
        self._laws()  # sees what was committed in this tick
        place = rollout_id, answer.number
        assert place in self.answers, f"{rollout_id}: call {answer.number} is answered before it is on the log"
        assert self.answers[place] == answer.body, f"{rollout_id}: call {answer.number} has two answers"
        self.num_told += 1
        self.num_told_again += place in self._told
        self._told.add(place)


class SimulatedAgent:
    """One agent. The test calls `act` after every step of the simulation."""

    def __init__(self, simulation: Simulation, laws: CallLaws, number: int, *, roles: bool = False) -> None:
        """`roles`: some of its rollouts are episodes of several agents."""
        self._run, self._laws = simulation, laws
        self._has_roles = roles
        self._casting = Random(f"roles {simulation.seed} {number}")
        self._cast: tuple[str, ...] = ()
        """Roles of the rollout, which speak in turns."""
        self._random = Random(f"agent {simulation.seed} {number}")
        self._mischief = Random(f"mischief {simulation.seed} {number}")
        self._name = f"agent-{number}"
        self._num_sessions = 0
        self._request: AgentRequest | None = None
        self._answer: AgentAnswer | None = None
        self._asked_at = 0.0
        self._process: SimulatedProcess | None = None
        self._tries = 0
        self._wait_until = 0.0
        self._rollout_id = ""
        self._history: list[dict[str, Any]] = []
        self._left = 0
        """Calls until it ends the rollout."""
        self._is_forged = False
        """Whether the request on its way has a key that opens nothing."""
        self._is_again = False
        """Whether the request on its way was answered before."""
        self._asked: ModelCall | None = None
        self._last: ModelCall | None = None
        """The call that was answered last."""
        self.num_ended = self.num_refused = 0
        self.offered: dict[str, set[float | None]] = defaultdict(set)
        """Rollout -> the rewards that it has tried to post."""
        self.offered_roles: dict[str, list[dict[str, float | None]]] = defaultdict(list)
        """The same of its roles."""
        self.told: dict[str, list[str]] = defaultdict(list)

    def act(self) -> None:
        """Take an answer, or send what is next, or try again."""
        now = self._run.clock.now()
        if now < self._wait_until:
            return
        if self._answer is not None:
            answer, self._answer, self._request = self._answer, None, None
            self._take(answer)
        elif self._request is None:
            self._send()
        elif now - self._asked_at > PATIENCE_S:
            self._request.is_gone = True
            self._request = None
            self._tries += 1

    def _wanted(self) -> Wanted:
        if not self._rollout_id:
            return SessionWanted(name=f"{self._name}/{self._num_sessions}")
        if self._left == 0:
            reward = self._random.choice((0.0, 1.0))
            self.offered[self._rollout_id].add(reward)
            roles = self._rewards_of_roles()
            self.offered_roles[self._rollout_id].append(roles)
            return RolloutEnd(reward=reward, roles=roles)
        headers = {"x-stainless-retry-count": str(self._tries)}
        model = f"policy:{self._cast[self._left % len(self._cast)]}" if self._cast else "m"
        body = json.dumps({"model": model, "messages": self._history}).encode()
        call = read_call(DIALECTS["chat/completions"], body, headers)
        assert isinstance(call, ModelCall)
        self._asked = call
        return call

    def _rewards_of_roles(self) -> dict[str, float | None]:
        """Of each role; now and then without one of them, or of roles that nobody plays."""
        if not self._has_roles or not (self._cast or self._casting.random() < 0.2):
            return {}
        known = self._cast or ("nobody",)
        rewards = {role: self._casting.choice((0.0, 1.0, None)) for role in known}
        return rewards if self._casting.random() < 0.8 else dict(list(rewards.items())[1:])

    def _send(self) -> None:
        processes = [one for one in self._run.processes if one.role == "explorer" and one.service is not None]
        if not processes:
            return
        if self._process not in processes or self._tries:
            self._process = self._random.choice(processes)
        process = self._process
        assert process is not None and process.service is not None
        step = process.service.step  # type: ignore[attr-defined]
        assert isinstance(step, AgentExplorerStep)
        self._is_forged = bool(self._rollout_id) and self._mischief.random() < 0.1
        wanted = self._last if self._is_again and self._last is not None else self._wanted()
        owner: KeyOwner | None = KeyOwner("", "")
        if self._rollout_id:
            owner = KEYS.owner_of(self._forged_key() if self._is_forged else KEYS.rollout_key(self._rollout_id))
        if owner is None:  # as the server does, which asks no explorer
            self._answer = Refusal(status=401, sentence="the key is of no rollout of this run")
            return
        rollout_id, launch = owner.rollout_id, owner.launch

        def reply(answer: AgentAnswer) -> None:
            if isinstance(answer, CallAnswer):
                self._laws.told(rollout_id, answer)
            if self._request is request:
                self._answer = answer
                if isinstance(answer, CallAnswer):
                    step.inbox.put(Delivered(rollout_id=rollout_id, launch=launch, number=answer.number))

        request = AgentRequest(rollout_id=rollout_id, launch=launch, wanted=wanted, reply=reply)
        self._request, self._asked_at = request, self._run.clock.now()
        step.inbox.put(request)
        process.wake_at = min(process.wake_at, self._run.clock.now())

    def _forged_key(self) -> str:
        """Return a key for another rollout, made from what an agent knows: its own key, and ids."""
        other = self._mischief.choice(self._laws.granted)
        name = KEYS.rollout_key(other).partition(".")[0]
        made = [f"{name}.{KEYS.rollout_key(self._rollout_id).partition('.')[2]}", name, f"{name}."]
        if other == self._rollout_id:
            made = made[1:]
        stranger = GatewayKeys(b"the secret of simulated runs", "another run").rollout_key(other)
        return self._mischief.choice([*made, stranger])

    def _take(self, answer: AgentAnswer) -> None:
        if self._is_forged:
            self._is_forged = False
            self.num_refused += isinstance(answer, Refusal) and answer.status == 401
            return  # whatever it was told: what becomes of it is on the log
        if self._is_again and isinstance(answer, CallAnswer):
            self._is_again = False  # `told` has compared it
            return
        match answer:
            case SessionGranted():
                self._num_sessions += 1
                self._laws.granted.append(answer.rollout_id)
                self._rollout_id, self._tries = answer.rollout_id, 0
                self._history = [{"role": "user", "content": str(answer.problem["messages"][0]["content"])}]
                self._left = self._random.randint(1, 4)
                self._cast = ("solver", "critic") if self._has_roles and self._casting.random() < 0.7 else ()
            case CallAnswer():
                said = json.loads(answer.body)["choices"][0]["message"]["content"]
                self.told[self._rollout_id].append(said)
                self._left, self._tries = self._left - 1, 0
                assert self._asked is not None
                self._last = replace(self._asked, is_retry=True)
                self._history.append({"role": "assistant", "content": said})
                if self._random.random() < 0.2:  # begins its context anew, as a summary does
                    self._history = []
                self._history.append({"role": "user", "content": f"{self._left}+{len(self.told[self._rollout_id])}="})
                self._is_again = self._mischief.random() < 0.1
                if self._mischief.random() < SILENT_SHARE:
                    self._forget()
            case RolloutEnded():
                self._forget()
                self.num_ended += 1
            case Refusal(status=409):  # it was silent for too long, or its group was decided
                self._forget()
            case Refusal():
                assert answer.status in (503, 429), answer
                self._tries += 1
                self._wait_until = self._run.clock.now() + 0.2 + self._random.random()

    def _forget(self) -> None:
        self._rollout_id, self._tries, self._is_again = "", 0, False


def check_told(agents: list[SimulatedAgent], laws: CallLaws) -> None:
    """What agents were told is what stands on the log, call by call."""
    for agent in agents:
        for rollout_id, texts in agent.told.items():
            rollout = laws.ended.get(rollout_id)
            if rollout is not None and rollout.status is RolloutStatus.completed:
                found = [turn.content for turn in rollout.turns if turn.role == "assistant"]
                assert found == texts, f"{rollout_id}: other calls than its agent made"
                posted = None if rollout.posted is None else rollout.posted.reward
                assert posted in agent.offered[rollout_id], f"{rollout_id}: a reward that its agent did not post"
                roles = {} if rollout.posted is None else rollout.posted.roles
                assert roles in agent.offered_roles[rollout_id], f"{rollout_id}: other rewards of roles than posted"
