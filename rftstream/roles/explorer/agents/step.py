"""An explorer that agents call, too. Tasks of environments go to the turn loop, tasks of agents to the agent loop.

An agent's call is saved as a piece of its rollout, in a transaction that is due at once. Calls that finish while a
transaction is written share the next one. The agent gets its answer once the piece is on the log."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rftstream import metrics
from rftstream.contracts.records import Record
from rftstream.contracts.rollouts import Rollout
from rftstream.models.rendering import Renderer
from rftstream.roles.explorer.agents.parts import AgentParts
from rftstream.roles.explorer.agents.pieces import EncodedPiece
from rftstream.roles.explorer.agents.rollout import AgentRollout
from rftstream.roles.explorer.attempt import Attempt
from rftstream.roles.explorer.fit_to_record import rollout_of, skipped
from rftstream.roles.explorer.saved.partials import TOPIC, numbers_of, tombstones
from rftstream.roles.explorer.saved.pieces import CannotGoOnError
from rftstream.roles.explorer.saved.stored import stored_rollout
from rftstream.roles.explorer.step import ExplorerStep, finish_work, may_begin
from rftstream.roles.explorer.work import RolloutInHand
from rftstream.service.role import Done, Item, Publish, Received, Saved, Wakeup

log = logging.getLogger(__name__)


class AgentExplorerStep(ExplorerStep):
    """The step of an explorer with a gateway. It works like `ExplorerStep`; in addition, `committed` answers agents,
    and `close` closes the gateway."""

    def __init__(
        self,
        *,
        parts: AgentParts,
        renderers: Mapping[str, Renderer],
        **others: Any,
    ) -> None:
        """`parts` are the parts for agents, whose inbox rings the pipe. `others` are the arguments of ExplorerStep."""
        super().__init__(renderers=renderers, **others)
        self._parts, self._agents, self._launcher = parts, parts.loop, parts.launcher
        self.inbox = parts.inbox
        """Queue of the gateway's requests."""
        self._own_renderers = renderers
        self._agent_works: dict[int, RolloutInHand] = {}
        self._num_elsewhere = lambda: sum(not self._agents.is_free(number) for number in self._agent_works)
        self._stale: dict[int, list[int]] = {}
        """Item -> numbers of pieces that could not be continued. They are withdrawn with its next pieces."""
        self._has_decided = False
        """Whether groups were decided since the last check of waiting tasks."""
        self._saved_tokens = metrics.PARTIAL_TOKENS.labels("saved")

    # ------------------------------------------------------------------------------------------ the loop's side

    @property
    def room(self) -> int:
        """Number of further rollouts that the explorer accepts."""
        return super().room - len(self._agent_works)

    def follow(self, received: Received) -> None:
        """Apply an announcement of weights or the outcome of a group."""
        super().follow(received)
        self._has_decided = True

    def start(self, item: Item, stored: Rollout | None = None) -> None:
        """Take a task in hand. An agent's task is open to calls from now on."""
        work = RolloutInHand(item)
        task = work.task
        is_agents = task.environment in self._parts.environments
        if is_agents and task.ids.sequence not in self._decided:
            stored = stored_rollout(task, self._fetch_rollout)
        if not is_agents or stored is not None:
            super().start(item, stored)
            return
        records = self._partials.of(work.partition, task.ids.rollout_id)
        if task.ids.sequence in self._decided:
            work.pieces = numbers_of(records)
            self._done.append(finish_work(work, skipped(task, self._clock.now())))
        else:
            rollout, session = self._restored(work, records)
            self._agent_works[item.number] = work
            used = work.pieces or self._stale.get(item.number, [])
            next_piece = max(used, default=-1) + 1  # so that no number is used twice
            self._parts.begin(item.number, rollout, session, next_piece=next_piece)
        self._partials.forget(work.partition, task.ids.rollout_id)

    def drop(self, numbers: Collection[int]) -> None:
        """Forget rollouts. Their agents are told to retry."""
        super().drop(numbers)
        self._launcher.cancel(
            work.task.ids.rollout_id for number in numbers if (work := self._agent_works.get(number)) is not None
        )
        self._agents.drop(numbers)
        for number in numbers:
            self._agent_works.pop(number, None)
            self._stale.pop(number, None)

    def not_begun(self) -> Collection[int]:
        """Return the waiting items that were neither sampled nor given to an agent."""
        return [*super().not_begun(), *(number for number in self._agent_works if self._agents.is_free(number))]

    def advance(self) -> Sequence[Done]:
        """Do a slice of work in both loops. Return the finished items."""
        self._launcher.check()
        done = list(super().advance())
        if not self._leaving:
            self._skip_decided()
            ended = self._agents.step(lambda task: may_begin(task, self._policy, False), self._is_to_come)
            done += [self._ended(one) for one in ended]
        return done

    def idle_s(self) -> float:
        """Return the seconds until there is work."""
        if self._share is not None and not self._share.is_awake:
            return super().idle_s()
        return min(super().idle_s(), self._agents.idle_s())

    def wakeups(self) -> Sequence[Wakeup]:
        """Return the pipe that rings for requests of agents and for answers of environments."""
        return () if self._pipe is None else (self._pipe,)

    def save(self, *, leaving: bool) -> Sequence[Saved]:
        """Return the records that save the agents' calls and the other rollouts."""
        saved = list(super().save(leaving=leaving))
        idle: Collection[int] = ()
        if leaving:
            self._launcher.cancel_all()  # before the agents are refused, because a refusal would make them fail
            idle = set(self._agents.leave())
        num_tokens = 0
        for number, pieces in self._agents.unsaved().items():
            saved.append(Saved(number, self._outputs(self._agent_works[number], pieces), waits=True))
            num_tokens += sum(encoded.piece.num_tokens for encoded in pieces)
        self._saved_tokens.inc(num_tokens)
        return [*saved, *(Saved(number, (), leaves=True, waits=True) for number in idle)]

    def committed(self, saved: Collection[int], finished: Collection[int]) -> None:
        """Answer the agents whose calls, sessions and ends are on the log now."""
        super().committed(saved, finished)
        self._agents.committed(saved, finished)

    def health(self) -> Mapping[str, object]:
        """Return the explorer's values, the number of agents' rollouts, the number of these without an agent, and the
        gateway's address."""
        return {
            **super().health(),
            "agents": len(self._agent_works),
            "agents_wanted": sum(map(self._agents.is_free, self._agent_works)),
            "gateway": self._parts.gateway_url,
        }

    def close(self) -> None:
        """Close the agents, then the gateway, then everything else."""
        self._parts.close()
        super().close()

    # ------------------------------------------------------------------------------------------ parts of it

    def _restored(self, work: RolloutInHand, records: Sequence[Record]) -> tuple[AgentRollout, str | None]:
        """Return the rollout with its saved calls, and the session that has it. If a rollout cannot continue from its
        pieces, it starts over, and the pieces are withdrawn with the first new one."""
        task = work.task
        renderer = self._own_renderers.get(task.ids.taskset)
        rollout = self._parts.new_rollout(task, renderer)
        if not records:
            return rollout, None
        if self._launcher.begins_anew(task):
            self._stale[work.item.number] = numbers_of(records)
            return rollout, ""
        try:
            pieces = self._partials.read(records)
            rollout.restore(pieces)
        except CannotGoOnError as error:
            log.warning("%s: cannot go on from its pieces: %s; begun anew", task.ids.rollout_id, error)
            self._stale[work.item.number] = numbers_of(records)
            return self._parts.new_rollout(task, renderer), ""
        work.pieces = numbers_of(records)
        metrics.PARTIAL_TOKENS.labels("resumed").inc(rollout.num_tokens)
        return rollout, next((piece.session for piece in pieces if piece.session is not None), "")

    def _is_to_come(self, session: str) -> bool:
        """Return whether the saved rollout of a session will be started soon. It will not be if rollouts without an
        agent occupy all places."""
        return self.room > 0 and self._partials.holds_session(session)

    def _outputs(self, work: RolloutInHand, pieces: Sequence[EncodedPiece]) -> tuple[Publish, ...]:
        """Return the records for the new part of an agent's rollout: a piece for each call, or one piece for a
        session."""
        stale = self._stale.pop(work.item.number, [])
        outputs = list(tombstones(work.task.ids.rollout_id, work.partition, stale))
        for encoded in pieces:
            work.pieces.append(encoded.piece.piece)
            outputs.append(Publish(TOPIC, work.partition, encoded.piece, encoded.value))
        return tuple(outputs)

    def _skip_decided(self) -> None:
        """Skip tasks that no agent has and whose groups have an outcome."""
        if not self._has_decided:
            return
        self._has_decided = False
        for number, work in list(self._agent_works.items()):
            if work.task.ids.sequence in self._decided and self._agents.is_free(number):
                self._agents.drop([number])
                del self._agent_works[number]
                self._done.append(finish_work(work, skipped(work.task, self._clock.now())))

    def _ended(self, ended: Attempt) -> Done:
        number = int(ended.key)
        work = self._agent_works.pop(number)
        work.pieces += self._stale.pop(number, [])
        self._launcher.cancel([work.task.ids.rollout_id])
        task = work.task
        rollout = rollout_of(ended, task.ids, task.problem, task.sampling, self._clock.now())
        return finish_work(work, rollout, rollout.num_tokens)
