"""Ranks that die and come between two batches and within one: the updates are those of a world that nothing befell.

What is equal and how closely is said in with_ranks.py.
"""

import os
import signal
import socket
import subprocess
import sys

import pytest

from rftstream.backends.deepspeed import rank_processes
from rftstream.backends.deepspeed.rank_processes import RankPlace
from rftstream.backends.deepspeed.worlds import members
from rftstream.errors import ConfigError, RanksLost
from tests.unit import tiny
from tests.unit.backends.kept_ranks import TIMEOUT_S
from tests.unit.backends.with_ranks import (
    GRPO,
    KL,
    agree,
    make_backend,
    plan,
    saved,
    torch_backend,
    values_agree,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

BATCHES = [(tiny.rows(seed=seed), plan(minibatches=2)) for seed in range(4)]


@pytest.fixture(scope="module")
def expected(spec, tmp_path_factory):
    """Metrics, logprobs and files of a process that nothing befalls."""
    backend = torch_backend(spec)
    metrics = [backend.update(rows, GRPO, how).metrics for rows, how in BATCHES[:2]]
    backend.renew_reference()
    metrics += [backend.update(rows, KL, how).metrics for rows, how in BATCHES[2:]]
    found = backend.logprobs(tiny.rows(), 30) + backend.reference_logprobs(tiny.rows(), 30)
    return (metrics, saved(backend, tmp_path_factory.mktemp("expected") / "files")), found


@pytest.fixture
def deaths(tmp_path, monkeypatch):
    """Lets a rank die at the next moment of this name, or at a later one."""
    folder = tmp_path / "deaths"
    folder.mkdir()
    monkeypatch.setenv("DEATHS", str(folder))
    monkeypatch.setattr(members.WorldRanks, "module", "tests.unit.backends.dying_ranks")
    return lambda moment, after=0: (folder / moment).write_text(str(after))


def worlds(metrics):
    return [(int(one["rank_world"]), int(one["ranks"])) for one in metrics]


def same(found, expected):
    for one in found[0]:
        one.pop("rank_world")
    agree(found, expected)


@pytest.mark.heavy("six worlds of two processes")
@pytest.mark.sampled(1, "ranks")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_rank_dies_anywhere_and_the_batch_begins_again(spec, expected, open_alone, deaths, stage, tmp_path):
    """In the second step of a batch, when the state was about to be kept, while the next world forms, between batches,
    and while it only looks. What is served and saved is whole while a rank is gone."""
    backend = open_alone(make_backend(spec, processes=2, stage=stage, min_ranks=1, last_call_s=TIMEOUT_S))
    metrics, moments = [], [("step", 1), ("give", 0), ("pass", 1)]
    for number, (rows, how) in enumerate(BATCHES):
        if number < len(moments):
            deaths(*moments[number])
        if number == 1:
            deaths("load")
        if number == 2:
            backend.renew_reference()
        metrics.append(dict(backend.update(rows, GRPO if number < 2 else KL, how).metrics))
    backend._ranks._processes[1].kill()
    backend._ranks._processes[1].wait()
    files = saved(backend, tmp_path / "files")
    deaths("look")
    values_agree(backend.logprobs(tiny.rows(), 30) + backend.reference_logprobs(tiny.rows(), 30), expected[1])
    assert worlds(metrics) == [(2, 2), (4, 2), (5, 2), (5, 2)]
    assert backend._ranks.place.world == 7
    same((metrics, files), expected[0])


@pytest.fixture
def start_other(monkeypatch):
    """Starts another rank than 0, as a launcher on another host does; this process has the place of rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    place = RankPlace(rank=0, size=1, local_rank=0, host="127.0.0.1", port=port)
    for name, value in place.environment().items():
        monkeypatch.setenv(name, value)
    started = []

    def start():
        command = [sys.executable, "-m", "rftstream.backends.deepspeed.rank"]
        started.append(subprocess.Popen(command, env={**os.environ, "RANK": "1", "OMP_NUM_THREADS": "1"}))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.heavy("four worlds, and a process that starts itself again")
def test_a_rank_of_another_host_comes_hangs_and_comes_again(
    spec, expected, open_alone, start_other, monkeypatch, tmp_path
):
    monkeypatch.setattr(rank_processes, "LEAST_SILENCE_S", 6.0)
    monkeypatch.setattr(rank_processes, "SILENCE", 0.0)
    backend = open_alone(make_backend(spec, stage=1, min_ranks=1, last_call_s=0.0))
    other, metrics = start_other(), []

    def is_waiting():
        assert other.poll() is None
        return backend._members.would_grow(backend._ranks.place.size)

    def is_silent():
        return backend._ranks._heartbeat.silent()

    before = [None, is_waiting, is_silent, is_waiting]
    signals = [None, None, signal.SIGSTOP, signal.SIGCONT]
    for number, (rows, how) in enumerate(BATCHES):
        if signals[number] is not None:
            other.send_signal(signals[number])
        if before[number] is not None:
            wait_until(before[number])
        if number == 2:
            backend.renew_reference()
        metrics.append(dict(backend.update(rows, GRPO if number < 2 else KL, how).metrics))
    assert worlds(metrics) == [(1, 1), (2, 2), (3, 1), (4, 2)]
    same((metrics, saved(backend, tmp_path / "files")), expected[0])
    backend.close()
    assert other.wait() == 0


def test_too_few_ranks_are_said(spec, open_alone, monkeypatch):
    monkeypatch.setattr(members.WorldRanks, "module", "tests.no_module")
    with pytest.raises(RanksLost, match=r"found 1 ranks, expected at least 2 \(backends.deepspeed.min_ranks\)"):
        open_alone(make_backend(spec, processes=3, min_ranks=2))


@pytest.mark.parametrize(("config", "text"), [
    ({"processes": 2, "min_ranks": 3}, "min_ranks: got 3, expected at most 2"),
    ({"processes": 4, "min_ranks": 3, "sequence_parallel": 2}, "min_ranks: got 3, expected a multiple of .* 2"),
])  # fmt: skip
def test_worlds_that_cannot_be_are_refused(spec, config, text):
    with pytest.raises(ConfigError, match=text):
        make_backend(spec, **config)
