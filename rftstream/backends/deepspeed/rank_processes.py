"""The processes of a backend as rank 0 sees them. Rank 0 starts them on its host, unless a launcher started them all;
it calls, watches and ends them.

A call is a record in a key-value store that rank 0 keeps. The other ranks wait for a call, however long. All ranks
carry it out, and the others leave their result or their error in the store. So rank 0 may leave them idle for any time,
and only the calls have a time limit.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch

from rftstream.backends.deepspeed.heartbeat import BEAT_S, Heartbeat
from rftstream.backends.deepspeed.wire import drop, pack, put, take, unpack
from rftstream.errors import BackendError, ConfigError, RanksLost

log = logging.getLogger(__name__)

distributed: Any = torch.distributed  # its stubs lack the stores

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
ELASTIC = "elastic"
"""Key of the kind of device of ranks that may change; its value is empty if they never do."""
FOREVER = timedelta(days=365)
GRACE_S = 5.0
"""Seconds in which the other ranks may report an error and end."""
ABANDON_S = 30.0
"""Seconds in which rank 0 should notice by itself that a rank was lost."""
SILENCE = 0.5
"""Share of the timeout after which a rank that beat before and is silent now counts as lost. So with the default
timeout all ranks have ended within a minute."""
LEAST_SILENCE_S = 10.0
"""Shortest silence, in seconds, that counts: a busy machine may delay a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A process's place among the ranks, as launchers pass it in the environment."""

    rank: int
    size: int
    local_rank: int
    """Number of the rank on its host."""
    host: str
    """Host of rank 0, to which `port` belongs."""
    port: int
    world: int = 0
    """Number of the world of these ranks (worlds/members.py). 0: the ranks never change."""

    @staticmethod
    def given() -> RankPlace | None:
        """Return the place in the environment; None if no launcher started this process."""
        try:
            rank, size, local_rank, host, port = (
                os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
            )
        except KeyError:
            return None
        return RankPlace(rank=int(rank), size=int(size), local_rank=int(local_rank), host=host, port=int(port))

    def environment(self) -> dict[str, str]:
        """Return the environment variables that describe this place."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }

    def connect(self) -> Any:
        """Connect to rank 0's store, to the part of this world. While one caller waits in a connection, it can do
        nothing else."""
        return self.part_of(distributed.TCPStore(self.host, self.port, wait_for_workers=False))

    def part_of(self, store: Any) -> Any:
        """Return the part of the store in which the ranks of this world find each other."""
        return distributed.PrefixStore(f"world/{self.world}", store) if self.world else store

    def interface(self) -> str | None:
        """Return the name of the network interface through which this host reaches rank 0's host, or through which it
        reaches its own address if it is that host. None if the interface is unknown, or other hosts cannot reach this
        one through it."""
        try:
            family, kind, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as unsent:  # connecting a datagram socket sends nothing
                unsent.connect(address)
                own = unsent.getsockname()[0]
        except OSError:
            return None
        if ipaddress.ip_address(own).is_loopback:  # the address that rank 0's host resolves its name to
            return None
        for name, addresses in psutil.net_if_addrs().items():
            if any(address.address.partition("%")[0] == own for address in addresses):
                return name
        return None


def is_of_others(error: Exception) -> bool:
    """Return whether an error of torch's networks only means that another rank is late or gone."""
    return isinstance(error, distributed.DistError) or (type(error) is RuntimeError and "gloo" in str(error))


def open_store(processes: int, *, elastic: str = "") -> tuple[RankPlace, Any]:
    """Open the store of rank 0, which is this process. Return its place among `processes` ranks of this host, or that
    of a launcher, and the store. `elastic`: kind of device of ranks that may change; empty if they never do."""
    place = RankPlace.given()
    how: dict[str, Any] = {}
    if place is None:
        listening = socket.create_server((LOOPBACK, 0))
        port = listening.getsockname()[1]
        place = RankPlace(rank=0, size=processes, local_rank=0, host=LOOPBACK, port=port)
        how = {"master_listen_fd": listening.detach()}
    elif place.rank:
        raise ConfigError(
            f"backend deepspeed: found a trainer that is rank {place.rank} of a launcher, expected rank 0; have "
            "it start `--module rftstream.backends.deepspeed.rank worker FILE --role trainer`"
        )
    store = distributed.TCPStore(place.host, place.port, is_master=True, wait_for_workers=False, **how)
    store.set(ELASTIC, pack(elastic))
    return place, store


def start_rank(of: RankPlace, number: int, *, threads: int, module: str) -> subprocess.Popen[bytes]:
    """Start another rank on this host. `of`: the place of rank 0. `number`: its number on the host."""
    environment = {
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # otherwise each writes a long message when rank 0 is gone
        **os.environ,
        **dataclasses.replace(of, rank=number, local_rank=number).environment(),
        "PYTHONPATH": os.pathsep.join(one or os.getcwd() for one in sys.path),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-P", "-m", module]  # imports are looked up as here
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment)


class Ranks:
    """The other ranks as rank 0 sees them. `DeepSpeedBackend` makes it, makes calls from one thread at a time, and ends
    it with `end`."""

    module = "rftstream.backends.deepspeed.rank"
    """Module that the started processes run."""
    so = "the trainer has to start again"
    """End of the sentence that says that a rank is lost: what follows."""

    def __init__(self, processes: int, *, threads: int, timeout_s: float) -> None:
        """`processes`: the number of ranks on this host. If a launcher started them, its number counts instead."""
        place, store = open_store(processes)
        started = {} if RankPlace.given() else {
            rank: start_rank(place, rank, threads=threads, module=self.module) for rank in range(1, processes)
        }  # fmt: skip
        self._begin(place, store, started, timeout_s)

    def _begin(
        self, place: RankPlace, store: Any, processes: Mapping[int, subprocess.Popen[bytes]], timeout_s: float
    ) -> None:
        """`processes`: those that were started here."""
        self.place, self.store, self._processes = place, store, processes
        self._timeout_s = timeout_s
        self._count = 0
        self._is_called = False
        """Whether the other ranks were told of a call that has not ended well."""
        self._ended = threading.Event()
        self._others = range(1, self.place.size)
        self._silence_s = max(SILENCE * timeout_s, LEAST_SILENCE_S)
        self.store.set("silence", pack(self._silence_s))
        self._heartbeat = Heartbeat(self.place.connect(), 0, self._others, silence_s=self._silence_s)
        if self._others:
            self._heartbeat.start()
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    # ------------------------------------------------------------------------------------------ calling

    def call(
        self, what: str, arguments: Mapping[str, Any], local: Callable[[], T], *, timeout_s: float | None = None
    ) -> tuple[T, list[Any]]:
        """Have all ranks make a call, this one with `local`. Return the result of this rank and those of the others.

        BackendError if another rank failed; RanksLost if one ended or did not answer. After any error the ranks are
        gone."""
        if self.ended:
            raise BackendError(f"backend deepspeed: its ranks have ended; {self.so}")
        number, self._count = self._count, self._count + 1
        try:
            if (trouble := self.trouble()) is not None:
                raise self._error(trouble)
            if self._others:
                put(self.store, f"call/{number}", [what, arguments])
            self._is_called = True
            found = local()
            answers = [self._answer(what, number, rank, timeout_s or self._timeout_s) for rank in self._others]
        except Exception as error:
            told = self._error(self._reason(what, error)) if is_of_others(error) else None
            self._end()
            if told is None:
                raise
            raise told from error
        self._is_called = False
        for rank in self._others:
            drop(self.store, f"done/{number}/{rank}")
        if self._others:
            drop(self.store, f"call/{number}")
        return found, answers

    def _answer(self, what: str, number: int, rank: int, timeout_s: float) -> Any:
        key, deadline = f"done/{number}/{rank}", time.monotonic() + timeout_s
        while not self.store.check([key]):  # a failed `wait` of the store writes to stderr
            if (trouble := self.trouble()) is not None:
                raise self._error(trouble)
            if time.monotonic() > deadline:
                raise RanksLost(self._late(what, timeout_s))
            time.sleep(0.002)
        return take(self.store, key)

    def _error(self, reason: str) -> BackendError:
        """Return the error for this reason: RanksLost unless a rank failed by itself, as it would again."""
        said = [self._said(rank) for rank in self._others]
        failed = any(failure is not None and not failure["of_others"] for failure in said)
        return BackendError(reason) if failed else RanksLost(reason)

    def trouble(self, so: str | None = None) -> str | None:
        """Return the error that a rank reported, or how a silent rank ended, and `so` what follows."""
        so = so or self.so
        codes = {rank: process.poll() for rank, process in self._processes.items()}  # before reading the reports
        said = {rank: self._said(rank) for rank in self._others}
        for rank, failure in said.items():
            if failure is not None and not failure["of_others"]:
                return f"{self._name(rank)} failed in {failure['what']!r}: {failure['error']}"
        for rank, code in codes.items():
            if code is not None and said[rank] is None:
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                return f"{self._name(rank)} ended with {how}; {so}"
        for rank in self._heartbeat.silent():
            if said[rank] is None:
                return (
                    f"{self._name(rank)}: not heard of for {self._silence_s:g} s: it hangs, or it or its host is gone, "
                    f"or cut off; {so}"
                )
        return None

    def _said(self, rank: int) -> Any:
        key = f"failed/{rank}"
        return unpack(self.store.get(key)) if self.store.check([key]) else None

    def _reason(self, what: str, error: Exception) -> str:
        """Return why the others kept this rank waiting. Their error may arrive a little later than its consequences."""
        deadline = time.monotonic() + GRACE_S
        while (trouble := self.trouble()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return trouble or f"{self._late(what, self._timeout_s)} ({error})"

    def _late(self, what: str, timeout_s: float) -> str:
        silent = [rank for rank in self._others if self._said(rank) is None]
        names = ", ".join(map(self._name, silent)).removeprefix("backend deepspeed: ") or "ranks wait for one another"
        return (
            f"backend deepspeed: {names}: not done with {what!r} within {timeout_s:g} s; one hangs, or "
            "backends.deepspeed.timeout_s is too short"
        )

    def _name(self, rank: int) -> str:
        process = f" (process {self._processes[rank].pid})" if rank in self._processes else ""
        return f"backend deepspeed: rank {rank} of {self.place.size}{process}"

    # ------------------------------------------------------------------------------------------ watching

    def _watch(self) -> None:
        """End this process if a rank has ended or is silent and rank 0 does not notice. Rank 0 may not call the others
        for a long time, or may wait in a network that does not report dead peers."""
        lost_s = 0.0
        while not self._ended.wait(BEAT_S):
            self._heartbeat.tick()
            lives = all(process.poll() is None for process in self._processes.values())
            lost_s = 0.0 if lives and not self._heartbeat.silent() else lost_s + BEAT_S  # may be heard again
            if not self._may_wait(lost_s):
                log.critical("%s", self.trouble(Ranks.so) or "backend deepspeed: a rank has ended")
                os._exit(BackendError.exit_code)

    def _may_wait(self, lost_s: float) -> bool:
        return lost_s <= ABANDON_S

    # ------------------------------------------------------------------------------------------ ending

    @property
    def ended(self) -> bool:
        """Whether the ranks were ended."""
        return self._ended.is_set()

    def end(self) -> None:
        """End the ranks. Ranks that a launcher started end by themselves, within GRACE_S."""
        if not self.ended and not self._processes:
            put(self.store, f"call/{self._count}", ["end", {}])
            keys, deadline = [f"done/{self._count}/{rank}" for rank in self._others], time.monotonic() + GRACE_S
            while keys and not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(0.02)
        self._end()

    def _end(self) -> None:
        self._ended.set()
        self._heartbeat.stop()
        for process in self._processes.values():
            process.kill()
            process.wait()
