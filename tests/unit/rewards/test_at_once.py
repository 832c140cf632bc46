"""Rewards that ask served models: each rollout is scored by itself, and none waits for another's answer."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rftstream.rewards.at_once import WorkPage
from rftstream.rewards.base import ScoreReply
from rftstream.rewards.frames import IDLE, PAGE_BYTES, read_page
from rftstream.rewards.scorer import ProcessScorer
from tests.unit.rewards.scoring import drain
from tests.unit.rewards.test_scorer import config_of, request

pytestmark = pytest.mark.slow

HELD = threading.Event()
"""Until when the served judge keeps slow answers."""
AT_ONCE: list[int] = []
"""Requests that the judge was answering whenever one came."""
_asked = threading.Semaphore(0)


def usual(body: Any) -> Any:
    """What the served judge says: when the test lets it, or at once."""
    _asked.release()
    AT_ONCE.append(_asked._value)
    if "slow" in body["messages"][-1]["content"]:
        HELD.wait(60.0)
    time.sleep(0.02)
    _asked.acquire()
    return {"choices": [{"finish_reason": "stop", "message": {"content": "Score: 10"}}]}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """The judge keeps slow answers anew, and has counted nothing."""
    HELD.clear()
    AT_ONCE.clear()
    yield
    HELD.set()


def judge(server: Any, **settings: Any) -> dict[str, Any]:
    return {"name": "judge", "url": server.url, "model": "big", "cache_mib": 0, **settings}


BESIDE = """
import signal, threading, time

def score(completion):
    signal.setitimer(signal.ITIMER_REAL, 0)  # only the main thread may
    assert threading.current_thread() is threading.main_thread()
    if completion == "hang":
        time.sleep(1000)
    if completion == "dies":
        import os
        os._exit(7)
    time.sleep(0.15)
    return 1.0

class Hangs:
    batched, num_concurrent = True, 4

    def score_all(self, items):
        return [time.sleep(1000 if one.completion == "hang" else 0.1) or 1.0 for one in items]

    def __call__(self, item):
        return self.score_all([item])[0]
"""


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text(BESIDE)
    return tmp_path


def of(folder: Path, reward: Any, **settings: Any) -> ProcessScorer:
    return ProcessScorer(config_of(reward, folder), **{"processes": 1, "timeout_s": 30.0, "tries": 2, **settings})


def take(scorer: ProcessScorer, count: int) -> dict[str, ScoreReply]:
    replies: dict[str, ScoreReply] = {}
    ends_at = time.monotonic() + 120.0
    while len(replies) < count:
        assert time.monotonic() < ends_at, f"only {sorted(replies)} while a slow answer is awaited"
        replies.update({reply.request_id: reply for reply in scorer.poll(0.2)})
    return replies


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside a function"])
def test_a_slow_answer_keeps_no_other_back(server: Any, beside: Path, is_alone: bool) -> None:
    """The slow answer comes only after all others have been scored, those submitted later, too."""
    served = judge(server, max_concurrent=2)
    with closing(of(beside, served if is_alone else [{"name": "beside:score"}, served])) as scorer:
        for number, text in enumerate(["slow", *["right"] * 9]):
            scorer.submit(request(str(number), text))
        assert take(scorer, 9).keys() == set(map(str, range(1, 10)))
        scorer.submit(request("later", "right"))
        assert take(scorer, 1).keys() == {"later"}
        HELD.set()
        (slow,) = drain(scorer).values()
        assert slow.score is not None and slow.score.reward == (1.0 if is_alone else 2.0)
        assert scorer.num_replaced == 0
    assert max(AT_ONCE) == 2, "as many as max_concurrent says"
    assert len(server.requests) == 11, "nobody was asked twice"


@pytest.mark.law("unscorable")
@pytest.mark.parametrize("how", ["hang", "dies"])
def test_a_reward_that_fails_beside_a_judge_costs_its_own_rollout_alone(server: Any, beside: Path, how: str) -> None:
    with closing(of(beside, [{"name": "beside:score"}, judge(server)], timeout_s=1.5)) as scorer:
        for number, text in enumerate([*["right"] * 5, how, *["right"] * 14]):
            scorer.submit(request(str(number), text))
        replies = drain(scorer)
        assert scorer.num_replaced == 2, "one for each try, and none for those that wait for the main thread"
    without = {name: reply.reason for name, reply in replies.items() if reply.score is None}
    assert without == {"5": "timeout" if how == "hang" else "error"}


def test_a_thread_that_hangs_is_found(beside: Path) -> None:
    with closing(of(beside, "beside:Hangs", timeout_s=1.5)) as scorer:
        for number, text in enumerate([*["right"] * 3, "hang", *["right"] * 8]):
            scorer.submit(request(str(number), text))
        replies = drain(scorer)
        assert scorer.num_replaced == 2
    assert {name: reply.reason for name, reply in replies.items() if reply.score is None} == {"3": "timeout"}


def test_other_tasksets_are_scored_while_a_judge_is_asked(server: Any, beside: Path) -> None:
    with closing(of(beside, judge(server, max_concurrent=2))) as scorer:
        for number in range(4):
            scorer.submit(request(f"slow {number}", "slow"))
        for number in range(20):
            scorer.submit(request(str(number), "7", taskset="eval:held-out"))
        assert take(scorer, 20).keys() == set(map(str, range(20)))
        HELD.set()
        assert len(drain(scorer)) == 4


def test_a_thread_whose_time_is_up_is_shown_before_a_busy_main_thread() -> None:
    with closing(mmap.mmap(-1, PAGE_BYTES)) as page:
        work = WorkPage(page, timeout_s=0.2)
        with work.inside(7):
            work.begin(1, 1, delay_s=0.0)
            assert read_page(page).number == 1
            time.sleep(0.3)
            work.begin(2, 1, delay_s=0.0)
            assert read_page(page).number == 7
            work.allow(60.0)
            assert read_page(page).number == 2, "its reward said how long it may take"
        work.rest()
        assert read_page(page).number == IDLE
