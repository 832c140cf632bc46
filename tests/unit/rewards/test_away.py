"""A reward whose service is away: it is asked again with pauses, and what waits loses nothing."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from types import ModuleType
from urllib.error import HTTPError

import httpx
import pytest

from rftstream.errors import RewardError
from rftstream.rewards.away import is_away
from rftstream.rewards.base import ScoreReply
from rftstream.rewards.frames import ScoreOutcome
from rftstream.rewards.queue import ScoringQueue
from rftstream.rewards.scorer import InlineScorer, ProcessScorer
from rftstream.rewards.served import AskedModel, ServedConfig
from rftstream.testing.memory_run import ManualClock
from tests.loopback import free_ports
from tests.suite.each import each
from tests.unit.rewards.test_scorer import config_of, request

NUM = 40
Ask = Callable[[str], float]


def replies_of(
    ask: Ask, clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, took_s: float = 0.0
) -> dict[str, ScoreReply]:
    """Of NUM rollouts of as many groups, by a reward that calls `ask` and takes some time."""
    module = ModuleType("asking_rewards")
    module.__dict__["score"] = lambda completion: ask(completion)
    monkeypatch.setitem(sys.modules, "asking_rewards", module)
    scorer = InlineScorer(config_of("asking_rewards:score", tmp_path), clock=clock, latency_s=lambda one: took_s)
    found: dict[str, ScoreReply] = {}
    for number in range(NUM):
        scorer.submit(request(str(number), str(number)))
    for _ in range(10 * NUM):
        found |= {reply.request_id: reply for reply in scorer.poll(10.0)}
    assert len(found) == NUM, "each poll waits until there is something to do"
    return found


@each("back_after_s", [0.5, 30.0, 90.0])
def test_an_absence_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, back_after_s: float
) -> None:
    caplog.set_level(logging.WARNING)
    caplog.clear()  # the rows share it
    clock = ManualClock(100.0)
    asked: list[float] = []

    def ask(completion: str) -> float:
        asked.append(clock.now() - 100.0)
        if asked[-1] < back_after_s:
            raise ConnectionRefusedError("Connection refused")
        return 1.0

    found = replies_of(ask, clock, tmp_path, monkeypatch)
    assert {reply.score.reward for reply in found.values() if reply.score} == {1.0}
    assert all(reply.score for reply in found.values())
    probes = [at for at, count in sorted(Counter(asked).items()) if 0 < at < back_after_s]
    assert probes == [at for at in (1.0, 4.0, 13.0, 40.0) if at < back_after_s]
    assert all(asked.count(at) == 1 for at in probes), "the others wait"
    said = [record.message for record in caplog.records]
    assert ["away" in line for line in said] == [True] * (1 + len(probes)) + [False]
    assert "it came back" in said[-1]


def test_refusals_now_and_then_are_said_once_and_then_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of each batch the first answer is refused."""
    caplog.set_level(logging.WARNING)
    clock, refused = ManualClock(100.0), set[str]()

    class TooMany(Exception):
        status = 429

    def ask(completion: str) -> float:
        if completion not in refused and int(completion) % 2:
            refused.add(completion)
            raise TooMany("429 Too Many Requests")
        return 1.0

    module = ModuleType("asking_rewards")
    module.__dict__["score"] = lambda completion: ask(completion)
    monkeypatch.setitem(sys.modules, "asking_rewards", module)
    scorer = InlineScorer(config_of("asking_rewards:score", tmp_path), clock=clock)
    for batch in range(NUM):
        for number in (2 * batch + 1, 2 * batch):
            scorer.submit(request(str(number), str(number)))
        while scorer.num_active:
            assert all(reply.score for reply in scorer.poll(1.0))
        clock.advance(4.0)
    said = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert [line[:12] for line in said] == ["its service ", "it came back", *["in the last "] * (len(said) - 2)], said
    assert len(said) - 2 == (clock.now() - 100.0) // 60.0
    counts = [int(line.split(" more times, for ")[0].split()[-1]) for line in said[2:]]
    assert NUM - 15 < sum(counts) < NUM and "429 Too Many" in said[-1]


def test_one_that_stays_away_is_given_up_and_never_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(100.0)

    def ask(completion: str) -> float:
        raise ConnectionResetError("Connection reset by peer")

    found = replies_of(ask, clock, tmp_path, monkeypatch, took_s=0.5)
    assert {(reply.reason, reply.score) for reply in found.values()} == {("error", None)}
    assert "Connection reset by peer" in found["0"].detail
    assert clock.now() - 100.0 == 1.0 + 3.0 + 9.0 + 27.0 + 60.0 + 6 * 0.5


def test_what_comes_after_the_giving_up_waits_for_the_next_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(0.0)
    module = ModuleType("asking_rewards")

    def score(completion: str) -> float:
        if clock.now() < 130.0:
            raise ConnectionRefusedError
        return 1.0

    module.__dict__["score"] = score
    monkeypatch.setitem(sys.modules, "asking_rewards", module)
    scorer = InlineScorer(config_of("asking_rewards:score", tmp_path), clock=clock)
    found: dict[str, ScoreReply] = {}
    for number in range(NUM):
        scorer.submit(request(str(number), str(number)))
    while scorer.num_active:
        found |= {reply.request_id: reply for reply in scorer.poll(4.0)}
    assert clock.now() == 100.0 and not any(reply.score for reply in found.values())
    for number in range(NUM, 2 * NUM):
        scorer.submit(request(str(number), str(number)))
    while scorer.num_active:
        found |= {reply.request_id: reply for reply in scorer.poll(4.0)}
    assert clock.now() < 200.0
    assert all(found[str(number)].score for number in range(NUM, 2 * NUM))


def test_an_answer_that_brings_the_service_down_ends_after_its_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[str] = Counter()

    def ask(completion: str) -> float:
        asked[completion] += 1
        if completion == "7":
            raise ConnectionResetError
        return 1.0

    found = replies_of(ask, ManualClock(), tmp_path, monkeypatch)
    assert {name for name, reply in found.items() if reply.score is None} == {"7"}
    assert 1 < asked["7"] <= 10
    assert all(count == 1 for name, count in asked.items() if name != "7")


def test_of_a_group_one_sibling_tells_that_a_service_is_away() -> None:
    queue = ScoringQueue(tries=2, timeout_s=30.0, now=ManualClock(100.0).now)
    queue.submit(request("0", "a"), request("1", "a"), absent={})
    failed = [ScoreOutcome(None, "error", "KeyError"), ScoreOutcome(None, "error", "refused", away=True)]
    queue.ended(queue.waiting.popleft(), failed, seconds=0.0)
    assert (queue.next_at(), len(queue.waiting)) == (101.0, 0)


def test_a_child_says_that_a_service_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    back = tmp_path / "back"
    (tmp_path / "away_rewards.py").write_text(
        "import os, urllib.request\n\n"
        "def score(completion):\n"
        f"    if not os.path.exists({str(back)!r}):\n"
        f"        urllib.request.urlopen('http://127.0.0.1:{free_ports(1)[0]}/', timeout=5)\n"
        "    return 1.0\n"
    )
    scorer = ProcessScorer(config_of("away_rewards:score", tmp_path), processes=2, timeout_s=30.0, tries=1)
    try:
        for number in range(NUM):
            scorer.submit(request(str(number), str(number)))
        found: list[ScoreReply] = []
        while not scorer._queue._probe_at:
            found += scorer.poll(0.1)
        assert all(reply.score is None for reply in found), "it had one try, and did not know that others failed, too"
        back.touch()
        while scorer.num_active:
            found += scorer.poll(1.0)
    finally:
        scorer.close()
    assert len([reply for reply in found if reply.score]) >= NUM - 1


def refused() -> BaseException:
    with pytest.raises(httpx.ConnectError) as raised:
        httpx.get(f"http://127.0.0.1:{free_ports(1)[0]}/")
    return raised.value


def refused_async() -> BaseException:
    async def ask() -> None:
        async with httpx.AsyncClient() as client:
            await client.get(f"http://127.0.0.1:{free_ports(1)[0]}/")

    with pytest.raises(httpx.ConnectError) as raised:
        asyncio.run(ask())
    return raised.value


def refused_at_each_address() -> BaseException:
    """As `localhost` is refused where it has an address of each family."""
    port, ask = free_ports(1)[0], socket.getaddrinfo

    async def get() -> None:
        async with httpx.AsyncClient() as client:
            await client.get(f"http://judge:{port}/")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda *_, **__: [*ask("127.0.0.1", port), *ask("127.0.0.2", port)])
        with pytest.raises(httpx.ConnectError) as raised:
            asyncio.run(get())
    return raised.value


def refused_by_urllib() -> BaseException:
    with pytest.raises(OSError, match="refused") as raised:
        urllib.request.urlopen(f"http://127.0.0.1:{free_ports(1)[0]}/", timeout=5)
    return raised.value


def ask_judge(port: int) -> BaseException:
    """By the client of the rewards that ask a model."""
    config = ServedConfig(url=f"http://127.0.0.1:{port}/v1", model="judge", tries=1)
    asked = AskedModel("judge", config, "chat/completions", fixed={})
    with pytest.raises(RewardError, match="is the server up") as raised:
        asked.ask({})
    return raised.value


def answered(status: int) -> BaseException:
    with pytest.raises(httpx.HTTPStatusError) as raised:
        httpx.Response(status, request=httpx.Request("GET", "http://judge/")).raise_for_status()
    return raised.value


def answered_by_urllib(status: int) -> BaseException:
    return HTTPError("http://judge/", status, "", Message(), None)


def answered_by_aiohttp(status: int) -> BaseException:
    error = RuntimeError("Service Unavailable")
    error.__dict__["status"] = status
    return error


def raised_after_a_reset() -> BaseException:
    error = ValueError("the judge said nothing")
    error.__context__, error.__suppress_context__ = ConnectionResetError(), True
    return error


@each(
    "error, away",
    [
        (refused, True),
        (refused_async, True),
        (refused_at_each_address, True),
        (refused_by_urllib, True),
        (lambda: answered_by_urllib(503), True),
        (lambda: answered_by_urllib(500), False),
        (lambda: answered_by_aiohttp(503), True),
        (lambda: OSError(errno.EHOSTUNREACH, "No route to host"), True),
        (lambda: ExceptionGroup("tasks", [KeyError("a"), ConnectionRefusedError()]), True),
        (lambda: BrokenPipeError(errno.EPIPE, "Broken pipe"), False),
        (lambda: ask_judge(free_ports(1)[0]), True),
        (lambda: answered(503), True),
        (lambda: answered(429), True),
        (lambda: answered(500), False),
        (lambda: answered(404), False),
        (raised_after_a_reset, True),
        (lambda: KeyError("answer"), False),
        (lambda: SystemExit(503), False),
        (lambda: FileNotFoundError(2, "No such file"), False),
    ],
)
def test_which_errors_say_so(error: Callable[[], BaseException], away: bool) -> None:
    assert is_away(error()) is away
