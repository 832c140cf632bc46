"""Ranks that die or hang where nobody can see their processes: those of a launcher, as on other hosts."""

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
import torch

from rftstream.backends.deepspeed import rank_processes, wire
from rftstream.backends.deepspeed.heartbeat import BEAT_S, Heartbeat
from rftstream.backends.deepspeed.rank_processes import RankPlace, Ranks
from rftstream.backends.deepspeed.worlds.members import WorldRanks
from rftstream.errors import BackendError
from tests.waiting import wait_until

RANK_0 = """
import time
from rftstream.backends.deepspeed import rank_processes
rank_processes.LEAST_SILENCE_S, rank_processes.ABANDON_S = 3.0, 1.0
ranks = rank_processes.Ranks(1, threads=1, timeout_s=1.0)
print("there", flush=True)
time.sleep(600)
"""
"""A trainer that needs nothing of the other ranks."""
DEADLINE_S = 120.0
"""Other work on the machine must not look like a rank that goes on."""


class Store:
    """Counters, as a TCPStore has them."""

    def __init__(self):
        self.counters = {}

    def add(self, key, number):
        self.counters[key] = self.counters.get(key, 0) + number
        return self.counters[key]


@pytest.mark.slow
def test_a_rank_is_silent_once_it_was_heard_and_is_no_longer():
    store = Store()
    heart = Heartbeat(store, 0, [1, 2], silence_s=3 * BEAT_S)
    store.add("beat/1", 1)
    heart.start()
    wait_until(lambda: store.counters.get("beat/0", 0) > 1)
    for _ in range(3):
        heart.tick()
    assert heart.silent() == []
    heart.tick()
    assert heart.silent() == [1]  # 2 may still be starting
    store.add("beat/1", 1)
    wait_until(lambda: not heart.silent())
    heart.stop()


@pytest.mark.slow
def test_a_heartbeat_ends_with_the_store():
    class Gone(Store):
        def add(self, key, number):
            super().add(key, number)
            raise torch.distributed.DistNetworkError("gone")

    store = Gone()
    heart = Heartbeat(store, 1, [0], silence_s=1.0)
    heart.start()
    wait_until(lambda: store.counters)
    assert heart.silent() == []


def beats(store):
    return [store.add(f"beat/{rank}", 0) for rank in range(2)]


def test_a_batch_may_be_larger_than_what_a_store_takes_at_once():
    """8 MiB."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = store.num_keys()
    for value in (["update", {"rows": [bytes(9 << 20), b"end"]}], [], bytes(wire.PART_BYTES)):
        wire.put(store, "call/0", value)
        assert wire.take(store, "call/0") == value
        wire.drop(store, "call/0")
        assert store.num_keys() == before


@pytest.fixture
def launched():
    """Places of two ranks, and what starts a process there."""
    processes = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    places = [RankPlace(rank=rank, size=2, local_rank=rank, host="127.0.0.1", port=port) for rank in range(2)]

    def start(rank, *command):
        environment = {**os.environ, **places[rank].environment()}
        process = subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
        return process

    yield places, start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("signum", "victim"), [
    (signal.SIGSTOP, 0), (signal.SIGSTOP, 1), pytest.param(signal.SIGKILL, 1, marks=pytest.mark.long),
])  # fmt: skip
def test_a_rank_ends_without_the_other(launched, signum, victim):
    """Though its connections stay open, as they do when a host is cut off."""
    _, start = launched
    ranks = [start(0, "-c", RANK_0), start(1, "-m", "rftstream.backends.deepspeed.rank")]
    assert ranks[0].stdout.readline() == "there\n"
    watching = torch.distributed.TCPStore("127.0.0.1", launched[0][0].port, wait_for_workers=False)
    wait_until(lambda: min(beats(watching)) > 0)
    first = beats(watching)
    wait_until(lambda: all(now > then + 1 for now, then in zip(beats(watching), first, strict=True)))  # both have heard
    ranks[victim].send_signal(signum)
    survivor = ranks[1 - victim]
    _, errors = survivor.communicate(timeout=DEADLINE_S)
    assert survivor.returncode == 1
    what = "rank 1 of 2: not heard of for 3 s" if victim else "rank 0 on 127.0.0.1 was not heard of for 3 s"
    assert what in errors and "cut off" in errors


@pytest.mark.slow
def test_a_rank_of_a_launcher_that_hangs_is_named(launched, monkeypatch):
    """In a call, long before its time is up."""
    places, start = launched
    for name, value in places[0].environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_processes, "LEAST_SILENCE_S", 3.0)
    monkeypatch.setattr(rank_processes, "SILENCE", 0.0)
    monkeypatch.setattr(rank_processes, "ABANDON_S", 1e6)  # else this process would end
    ranks = Ranks(1, threads=1, timeout_s=DEADLINE_S)
    other = start(1, "-m", "rftstream.backends.deepspeed.rank")
    wait_until(lambda: ranks._heartbeat._heard[1] > 1)
    other.send_signal(signal.SIGSTOP)
    with pytest.raises(BackendError, match=r"rank 1 of 2: not heard of for 3 s: it hangs, or .* or cut off"):
        ranks.call("leave", {}, lambda: None)
    ranks.end()


def test_what_ends_the_trainer_does_not_say_that_training_goes_on(monkeypatch, caplog):
    """A trainer with min_ranks goes on in another world, unless rank 0 does not notice in time."""

    class Nobody(WorldRanks):
        def __init__(self):
            self._processes = {1: subprocess.Popen([sys.executable, "-c", ""])}
            self._processes[1].wait()
            self._others, self.place, self.store = [1], RankPlace(rank=0, size=2, local_rank=0, host="", port=0), self
            self._heartbeat, self._ended = Heartbeat(Store(), 0, [1], silence_s=60.0), threading.Event()
            self.names, self._is_called, self._timeout_s = {1: "one"}, True, 0.0

        def check(self, keys):
            return False

        def _may_wait(self, lost_s):
            return False

    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr(rank_processes.os, "_exit", end)
    ranks = Nobody()
    assert "goes on" in ranks.trouble()
    with pytest.raises(SystemExit):
        ranks._watch()
    assert "exit code 0; the trainer has to start again" in caplog.text and "goes on" not in caplog.text
