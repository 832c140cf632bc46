"""The processes of a backend on this host: rank 0 is whoever asks, and starts, calls, watches and ends the others.

A call is a record in a key-value store that rank 0 keeps on loopback: the others wait for it, however long; all do what
it says, and the others leave their result, or what went wrong, in the store. So rank 0 may do without them for as long
as it likes, and only what all do together has a limit of time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch

from rftstream.backends.deepspeed_wire import (
    algorithm_in,
    array_out,
    optimizer_in,
    pack,
    plan_in,
    row_in,
    spec_in,
    unpack,
)
from rftstream.errors import BackendError, RftError

log = logging.getLogger(__name__)

distributed: Any = torch.distributed  # its stubs lack the stores

T = TypeVar("T")

HOST = "127.0.0.1"
FOREVER = timedelta(days=365)
GRACE_S = 5.0
"""After an error: so long for what another rank may have to say about it."""
ABANDON_S = 20.0
"""After a rank was lost: so long for rank 0 to come back from where it waits for it."""


class Ranks:
    """Called from one thread."""

    def __init__(self, size: int, *, threads: int, timeout_s: float) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._count = 0
        self._closing = False
        self._calling = threading.Event()
        self._lost: str | None = None
        listening = socket.create_server((HOST, 0))
        self._port = listening.getsockname()[1]
        self._store = distributed.TCPStore(
            HOST, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self._processes = {rank: self._start(rank, threads) for rank in range(1, size)}
        if self._processes:
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _start(self, rank: int, threads: int) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(one or os.getcwd() for one in sys.path),
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, "-m", "rftstream.backends.deepspeed_ranks", str(rank), str(self.size),
                   str(self._port)]  # fmt: skip
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, env=environment)

    def group_store(self) -> Any:
        """For the process group of the ranks."""
        return distributed.PrefixStore("group", self._store)

    # ------------------------------------------------------------------------------------------ calling

    def call(
        self, what: str, arguments: Mapping[str, Any], local: Callable[[], T], *, timeout_s: float | None = None
    ) -> tuple[T, list[Any]]:
        """Has all ranks do it, this one by `local`; what came of it here, and in the others. BackendError if a rank
        ended, failed or did not answer: the ranks are gone then."""
        if (text := self._lost) is not None:
            self._end()
            raise BackendError(text)
        number, self._count = self._count, self._count + 1
        self._calling.set()
        try:
            if self._processes:
                self._store.set(f"call/{number}", pack([what, arguments]))
            found = local()
            deadline = time.monotonic() + (timeout_s or self._timeout_s)
            others = [self._answer(what, number, rank, deadline) for rank in self._processes]
        except RftError:
            self._end()
            raise
        except Exception as error:
            reason = self._what_happened(what, number)
            self._end()
            if reason is None:
                raise
            raise BackendError(reason) from error
        finally:
            self._calling.clear()
        for rank in self._processes:
            self._store.delete_key(f"done/{number}/{rank}")
        self._store.delete_key(f"call/{number}")
        return found, others

    def _answer(self, what: str, number: int, rank: int, deadline: float) -> Any:
        key = f"done/{number}/{rank}"
        while not self._has(key, 1.0):
            if (text := self._lost) is not None:
                raise BackendError(text)
            if time.monotonic() > deadline:
                raise BackendError(
                    f"{self._name(rank)} has not finished {what!r} long after rank 0; it hangs, or "
                    "backends.deepspeed.timeout_s is too short"
                )
        answer = unpack(self._store.get(key))
        if "error" in answer:
            raise BackendError(f"{self._name(rank)} failed in {what!r}: {answer['error']}")
        return answer["result"]

    def _has(self, key: str, wait_s: float) -> bool:
        """Looks again and again: a wait of the store's own writes to stderr when it was in vain."""
        deadline = time.monotonic() + wait_s
        while not (found := self._store.check([key])) and time.monotonic() < deadline:
            time.sleep(0.002)
        return bool(found)

    def _what_happened(self, what: str, number: int) -> str | None:
        """Why the others could not go on, if it was not this rank."""
        deadline = time.monotonic() + GRACE_S
        while self._processes and time.monotonic() < deadline:
            for rank in self._processes:
                if self._has(f"done/{number}/{rank}", 0.05):
                    answer = unpack(self._store.get(f"done/{number}/{rank}"))
                    if "error" in answer:
                        return f"{self._name(rank)} failed in {what!r}: {answer['error']}"
            if self._lost:
                return self._lost
        error = sys.exc_info()[1]
        if self._processes and isinstance(error, RuntimeError) and "tim" in str(error).lower():
            return (
                f"backend deepspeed: ranks waited for one another in {what!r} for {self._timeout_s:g} s, in vain: one "
                f"hangs, or backends.deepspeed.timeout_s is too short ({error})"
            )
        return None

    def _name(self, rank: int) -> str:
        return f"backend deepspeed: rank {rank} of {self.size} (process {self._processes[rank].pid})"

    # ------------------------------------------------------------------------------------------ watching

    def _watch(self) -> None:
        while not self._closing:
            for rank, process in self._processes.items():
                if (code := process.poll()) is not None and not self._closing:
                    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                    self._lost = f"{self._name(rank)} ended with {how}; the trainer has to start again"
                    self._abandon()
                    return
            time.sleep(0.2)

    def _abandon(self) -> None:
        """A rank that waits for the dead is told by most networks, but not by all: then the process has to go."""
        deadline = time.monotonic() + ABANDON_S
        while self._calling.is_set() and not self._closing:
            if time.monotonic() > deadline:
                log.critical("%s; rank 0 waits for it in vain and ends", self._lost)
                os._exit(BackendError.exit_code)
            time.sleep(0.2)

    # ------------------------------------------------------------------------------------------ ending

    def close(self) -> None:
        """Those that still answer end by themselves, together with what this rank does next."""
        self._closing = True
        if self._processes and not self._lost:
            self._store.set(f"call/{self._count}", pack(["close", {}]))

    def wait(self) -> None:
        """Until they have ended."""
        deadline = time.monotonic() + GRACE_S
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
        self._end()

    def _end(self) -> None:
        self._closing = True
        self._lost = self._lost or "backend deepspeed: its processes have been ended; the trainer has to start again"
        for process in self._processes.values():
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


# --------------------------------------------------------------------------------------------- the other ranks


def main() -> None:
    rank, size, port = (int(one) for one in sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 says when it is over
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Connections of their own: who waits in one of them keeps it from all else.
    store, group = (distributed.TCPStore(HOST, port, wait_for_workers=False) for _ in range(2))
    worker = _Worker(rank, size, distributed.PrefixStore("group", group))
    for number, what, arguments in _calls(store):
        try:
            answer = {"result": getattr(worker, f"do_{what}")(**arguments)}
        except Exception as error:
            log.debug("%s", what, exc_info=True)
            answer = {"error": str(error) if isinstance(error, RftError) else f"{type(error).__name__}: {error}"}
        if what == "close":
            return
        store.set(f"done/{number}/{rank}", pack(answer))
        if "error" in answer:
            raise SystemExit(1)


def _calls(store: Any) -> Iterator[tuple[int, str, dict[str, Any]]]:
    number = 0
    while True:
        store.wait([f"call/{number}"], FOREVER)
        what, arguments = unpack(store.get(f"call/{number}"))
        yield number, what, arguments
        number += 1


def _end_with_parent() -> None:
    """Its end of the pipe closes with it, however it ends. Also while this process waits for others."""
    while os.read(0, 1):
        pass
    os._exit(1)


class _Worker:
    """What the calls mean."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self._rank, self._size, self._store = rank, size, store
        self._worker: Any = None

    def do_open(self, model: dict[str, Any], optimizer: dict[str, Any], settings: dict[str, Any]) -> None:
        from rftstream.backends.deepspeed_rank import Rank, RankSettings

        self._worker = Rank(
            self._rank, self._size, model=spec_in(model), optimizer=optimizer_in(optimizer),
            settings=RankSettings(**settings),
        )  # fmt: skip
        self._worker.load_model()

    def do_join(self) -> None:
        self._worker.join(self._store)

    def do_update(self, rows: list[Any], algorithm: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
        taken = self._worker.update([row_in(row) for row in rows], algorithm_in(algorithm), plan_in(plan))
        return taken.passes.part()  # type: ignore[no-any-return]

    def do_logprobs(self, rows: list[Any], tokens_per_microbatch: int, reference: bool) -> list[Any]:
        found = self._worker.logprobs([row_in(row) for row in rows], tokens_per_microbatch, reference=reference)
        return [(number, array_out(array)) for number, array in found]

    def do_gather(self, kind: str, name: str) -> None:
        self._worker.shards.gather(kind, name)

    def do_load(self, moments: bool, num_steps: float) -> None:
        self._worker.load(moments, num_steps, None)

    def do_close(self) -> None:
        self._worker.close()


if __name__ == "__main__":
    main()
