"""Ranks that may change between two batches: who takes part, and in which world.

A world is a number of ranks that train together; nobody joins or leaves it. A process that would be a rank takes a
ticket in the store of rank 0, and beats until it gets a place. Rank 0 gives places to those that beat, and everything
that the ranks of a world say lies in the world's own part of the store. When a rank is lost, or another one waits, rank
0 ends the world and forms the next: ranks that it started are killed and started again, and others replace themselves
(rank.py) and take new tickets. So a rank that slept through the end of its world is heard by nobody.

Between worlds the state is in the main memory of rank 0 (kept.py). Versions, checkpoints and the log are rank 0's alone
too: if it is lost, the trainer starts again as ever.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rftstream.backends.deepspeed.heartbeat import BEAT_S
from rftstream.backends.deepspeed.rank_processes import ABANDON_S, RankPlace, Ranks, open_store, start_rank
from rftstream.backends.deepspeed.wire import pack, put, take, unpack
from rftstream.errors import RanksLost

log = logging.getLogger(__name__)

OVER = "over"
"""Key by which rank 0 ends a world, in the world's part of the store."""
WAITS_S = 3.0
"""Seconds after its last beat in which a waiting process counts as alive."""


def wait_for_place(place: RankPlace, store: Any) -> RankPlace | None:
    """Wait until rank 0 gives this process a place in a world; None if none is needed any more. `place`: the one of the
    launcher, of which only host, port and `local_rank` count. Rank 0's end raises an error of torch."""
    ticket = store.add("tickets", 1)
    put(store, f"ticket/{ticket}", {"host": socket.gethostname(), "pid": os.getpid(), "local": place.local_rank})
    while not store.check([f"place/{ticket}"]):
        store.add(f"waits/{ticket}", 1)
        time.sleep(BEAT_S / 2)
    given = unpack(store.get(f"place/{ticket}"))
    return None if given is None else dataclasses.replace(place, **given)


@dataclass(slots=True)
class _Ticket:
    """A process that waits for a place."""

    number: int
    host: str
    pid: int
    local: int
    """Number of the process on its host, which decides on its GPU."""
    beats: int = 0
    heard_at: float = field(default_factory=time.monotonic)


class WorldRanks(Ranks):
    """The other ranks of one world. `Members.form` makes it. After `over` its processes wait for a place in another
    world; `end` ends them."""

    so = "training goes on without it, in another world"

    def __init__(
        self,
        place: RankPlace,
        store: Any,
        processes: Mapping[int, subprocess.Popen[bytes]],
        names: Mapping[int, str],
        *,
        timeout_s: float,
    ) -> None:
        """`store`: the part of this world. `processes`: those that were started here. `names`: host and process of each
        rank."""
        self.names = names
        self._begin(place, store, processes, timeout_s)
        self._heartbeat.expect()

    def over(self) -> None:
        """End the world. What its ranks are about to do or say counts for nothing."""
        self._end()
        self.store.set(OVER, b"")

    @property
    def num_left(self) -> int:
        """Number of ranks, this one included, that are not known to be lost. After a call has failed these are the ones
        that answered."""
        lost = {rank for rank, process in self._processes.items() if process.poll() is not None}
        lost |= {*self._heartbeat.silent()}
        if self._is_called:
            lost |= {rank for rank in self._others if not self._has_answered(rank)}
        return self.place.size - len(lost)

    def _has_answered(self, rank: int) -> bool:
        return bool(self.store.check([f"done/{self._count - 1}/{rank}"])) or self._said(rank) is not None

    def _may_wait(self, lost_s: float) -> bool:
        """Return whether rank 0 may go on although a rank was lost. It learns of that when it makes a call."""
        return not self._is_called or lost_s <= self._timeout_s + ABANDON_S


class Members:
    """The processes that take part in training beside rank 0. `DeepSpeedBackend` makes it in rank 0, forms a world
    after another, and calls `close`."""

    def __init__(
        self,
        processes: int,
        *,
        least: int,
        together: int,
        device: str,
        threads: int,
        timeout_s: float,
        last_call_s: float,
    ) -> None:
        """`processes`: the number of ranks on this host. If a launcher started them, its number counts instead.
        `least`: of ranks in a world. `together`: the number of ranks divides by it. `timeout_s`: for answers in a
        world. `last_call_s`: how long others are waited for once there are enough."""
        self._place, self._store = open_store(processes, elastic=device)
        self._least, self._together, self._threads = least, together, threads
        self._timeout_s, self._last_call_s = timeout_s, last_call_s
        self._wanted = self._place.size
        self._is_launched = RankPlace.given() is not None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        """Processes that were started here, by their number on this host."""
        self._tickets: dict[int, _Ticket] = {}
        """Tickets that wait for a place."""
        self._unread: set[int] = set()
        """Tickets that were taken and say nothing yet. It stays so if the process has died in between."""
        self._num_taken = 0
        self._world = 0

    # ------------------------------------------------------------------------------------------ worlds

    def form(self, *, within_s: float) -> WorldRanks:
        """Form the next world of the processes that wait. RanksLost if there are too few within the time."""
        if not self._is_launched:
            self._start_again()
        there = self._gather(within_s)
        size = (1 + len(there)) // self._together * self._together
        self._world += 1
        place = dataclasses.replace(self._place, size=size, world=self._world)
        here = socket.gethostname()
        names, processes = {0: f"{here} (process {os.getpid()})"}, {}
        own = {process.pid: process for process in self._processes.values()}
        chosen = sorted(there[: size - 1], key=lambda one: (one.host != here, one.host, one.local))  # hosts together
        for rank, ticket in enumerate(chosen, 1):
            given = {"rank": rank, "size": size, "local_rank": ticket.local, "world": self._world}
            names[rank] = f"{ticket.host} (process {ticket.pid})"
            if not self._is_launched:
                processes[rank] = own[ticket.pid]
            del self._tickets[ticket.number]
            self._store.set(f"place/{ticket.number}", pack(given))
        log.info("world %d of ranks: %s", self._world, ", ".join(f"{rank} on {name}" for rank, name in names.items()))
        return WorldRanks(place, place.part_of(self._store), processes, names, timeout_s=self._timeout_s)

    def want(self, count: int) -> None:
        """Do not wait for more than `count` ranks when the next world is formed."""
        if self._is_launched:  # others are started here, and come as soon
            self._wanted = count

    def would_grow(self, size: int) -> bool:
        """Return whether a world would have more than `size` ranks now."""
        return (size + len(self._alive())) // self._together * self._together > size

    def close(self) -> None:
        """End all processes. Those that wait are told that they are not needed."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        for ticket in self._alive():
            self._store.set(f"place/{ticket.number}", pack(None))

    # ------------------------------------------------------------------------------------------ processes

    def _start_again(self) -> None:
        """Start all processes of this host anew: those that are left are in an unknown state."""
        for number in range(1, self._wanted):
            if (before := self._processes.get(number)) is not None:
                if before.poll() is None and before.pid in {ticket.pid for ticket in self._alive()}:
                    continue  # it waits already
                before.kill()
                before.wait()
            self._processes[number] = start_rank(self._place, number, threads=self._threads, module=WorldRanks.module)

    def _gather(self, within_s: float) -> list[_Ticket]:
        """Wait for enough processes, and then a while for the rest."""
        deadline = time.monotonic() + within_s
        last_call: float | None = None
        while True:
            count = 1 + len(there := self._alive())
            now, most = time.monotonic(), self._wanted
            if not self._is_launched:
                most = 1 + sum(process.poll() is None for process in self._processes.values())
            enough = count // self._together * self._together >= self._least
            if enough:
                last_call = last_call or now + self._last_call_s
                if count >= most or now >= last_call:
                    return there
            elif now >= deadline or (most < self._least and not self._is_launched):
                raise RanksLost(
                    f"backend deepspeed: found {count} ranks, expected at least {self._least} "
                    "(backends.deepspeed.min_ranks); the trainer has to start again"
                )
            time.sleep(BEAT_S / 2)

    def _alive(self) -> list[_Ticket]:
        """Return the tickets of processes that wait and live, in the order in which they came."""
        before, self._num_taken = self._num_taken, self._store.add("tickets", 0)
        self._unread.update(range(before + 1, self._num_taken + 1))
        for number in [one for one in self._unread if self._store.check([f"ticket/{one}"])]:
            about = take(self._store, f"ticket/{number}")
            self._tickets[number] = _Ticket(number, about["host"], about["pid"], about["local"])
            self._unread.discard(number)
        return [ticket for _, ticket in sorted(self._tickets.items()) if self._lives(ticket)]

    def _lives(self, ticket: _Ticket) -> bool:
        if not self._is_launched:
            return any(one.pid == ticket.pid and one.poll() is None for one in self._processes.values())
        beats, now = self._store.add(f"waits/{ticket.number}", 0), time.monotonic()
        if beats != ticket.beats:
            ticket.beats, ticket.heard_at = beats, now
        return now - ticket.heard_at <= WAITS_S
