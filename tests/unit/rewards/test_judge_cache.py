"""What judges said is kept: by content and version, by all processes, within its limit, whole after a kill."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rftstream.rewards.judge_cache import ENTRY_BYTES, JudgeCache, cache_folder
from rftstream.rewards.scorer import ProcessScorer
from tests.configs import small_run
from tests.unit.rewards.scoring import replies_of
from tests.unit.rewards.test_judge_forms import RUBRIC, item, judge, rubric_says, says


def usual(body: Any) -> dict[str, Any]:
    return rubric_says(correct=8, polite=2)


def total(folder: Path) -> tuple[int, int]:
    """Return the bytes that the cache has counted, and those that are there."""
    with closing(sqlite3.connect(folder / "judge.sqlite3")) as database:
        counted = database.execute("SELECT bytes FROM total").fetchone()[0]
        return counted, database.execute("SELECT coalesce(sum(bytes), 0) FROM answers").fetchone()[0]


def test_a_question_is_paid_for_once(server: Any, tmp_path: Path) -> None:
    first = judge(server, rubric=RUBRIC)(item())
    again = judge(server, rubric=RUBRIC, api_key="another", price_prompt=1.0, max_concurrent=1)(item())
    assert (again.reward, again.parts) == (first.reward, first.parts)
    assert (first.metrics["cached"], again.metrics["cached"], len(server.requests)) == (0.0, 1.0, 1)
    file = tmp_path / "cache" / "rftstream" / "judge" / "judge.sqlite3"
    assert file.stat().st_size and file.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"model": "other"}, {}),
        ({"system": "Be fair."}, {}),
        ({"prompt": "{completion}?"}, {}),
        ({"rubric": [*RUBRIC[:1], {**RUBRIC[1], "about": "politeness"}]}, {}),
        ({"rubric": [*RUBRIC[:1], {**RUBRIC[1], "high": 6.0}]}, {}),
        ({"extra": {"temperature": 1.0}}, {}),
        ({"max_tokens": 7}, {}),
        ({"response_format": "object"}, {}),
        ({}, {"completion": "6"}),
        ({}, {"answer": "7"}),
    ],
)
def test_another_question_is_another_entry(server: Any, settings: Any, changed: Any) -> None:
    judge(server, rubric=RUBRIC)(item())
    judge(server, **{"rubric": RUBRIC, **settings})(item(**changed))
    assert len(server.requests) == 2


def test_it_can_be_switched_off_and_put_elsewhere(server: Any, tmp_path: Path) -> None:
    reward = judge(server, rubric=RUBRIC, cache_mib=0)
    assert [reward(item()).metrics["cached"] for _ in range(2)] == [0.0, 0.0]
    assert not (tmp_path / "cache").exists()
    judge(server, rubric=RUBRIC, cache_folder=str(tmp_path / "own"))(item())
    assert (tmp_path / "own" / "judge.sqlite3").exists()
    assert cache_folder("kept", "/runs") == Path("/runs/kept")


def test_what_cannot_be_read_is_asked_again_and_not_kept(server: Any) -> None:
    server.answers.append((200, says("prose")))
    reward = judge(server, rubric=RUBRIC, asks=1)
    outcomes = [reward.score_all([item()])[0] for _ in range(3)]
    assert [isinstance(one, Exception) for one in outcomes] == [True, False, False]
    assert len(server.requests) == 2


def test_the_least_used_go_first_and_the_limit_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**9, 4000))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    size = 1000 + 2 + ENTRY_BYTES
    cache = JudgeCache(tmp_path, max_bytes=10 * size)
    for number in range(10):
        cache.put(f"k{number}", "x" * 1000)
    assert cache.get("k0") is not None  # used again
    cache.put("kA", "x" * 1000)
    assert [number for number in range(10) if cache.get(f"k{number}") is None] == [1, 2]
    assert total(tmp_path) == (9 * size, 9 * size)
    cache.put("kA", "y")  # replaces
    assert cache.get("kA") == "y"
    assert total(tmp_path)[0] == total(tmp_path)[1] == 8 * size + 1 + 2 + ENTRY_BYTES
    cache.put("huge", "x" * 100_000)
    assert cache.get("huge") is None
    cache.put("half", "\ud800")
    assert cache.get("half") is None
    cache.close()


WRITER = """
import sys
from contextlib import closing
from pathlib import Path
from rftstream.rewards.judge_cache import JudgeCache
cache = JudgeCache(Path(sys.argv[1]), max_bytes=200_000)
for number in range(1_000_000):
    if number == 201:
        print("full", flush=True)
    cache.put(f"{sys.argv[2]}-{number}", "x" * 1000)
    assert cache.get(f"{sys.argv[2]}-{number}") in (None, "x" * 1000)
"""


def test_it_stays_whole_when_writers_are_killed(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name], stdout=subprocess.PIPE) for name in "ab"
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == b"full\n"
        cache = JudgeCache(tmp_path, max_bytes=200_000)
    finally:
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
    cache.put("after", "kill")
    assert cache.get("after") == "kill"
    cache.close()
    with closing(sqlite3.connect(tmp_path / "judge.sqlite3")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    counted, there = total(tmp_path)
    assert counted == there <= 200_000


def test_threads_share_it(tmp_path: Path) -> None:
    cache = JudgeCache(tmp_path, max_bytes=1 << 20)

    def work(name: str) -> None:
        for number in range(50):
            cache.put(f"{name}{number}", name)
            assert cache.get(f"{name}{number}") == name

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(cache.get(f"{name}{number}") == name for name in "abcd" for number in range(50))
    cache.close()


def test_a_file_that_is_no_database_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "judge.sqlite3").write_bytes(b"not a database" * 1000)
    cache = JudgeCache(tmp_path, max_bytes=1 << 20)
    cache.put("key", "said")
    assert cache.get("key") == "said"
    cache.close()


def test_a_place_that_cannot_be_written_costs_the_cache_alone(server: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    reward = judge(server, rubric=RUBRIC, cache_folder=str(tmp_path / "file" / "below"))
    assert [reward(item()).parts["correct"] for _ in range(2)] == [0.8, 0.8]
    assert len(server.requests) == 2


@pytest.mark.slow  # verifiers' children start
def test_verifier_processes_share_it_and_a_later_scoring_asks_nobody(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-judge")
    config = small_run(
        tasksets={"train": {"source": "arithmetic", "reward": "judge"}},
        rewards={"judge": {"url": server.url, "model": "big", "api_key": "env:JUDGE_KEY", "rubric": RUBRIC}},
        verifier={"timeout_s": 60.0}, base=str(tmp_path),
    )  # fmt: skip
    for cached in (0.0, 1.0):
        replies = replies_of(ProcessScorer(config, processes=2), [item(str(number)) for number in range(6)])
        scores = [reply.score for reply in replies if reply.score is not None]
        assert [(score.parts["correct"], score.metrics["cached"]) for score in scores] == [(0.8, cached)] * 6
    assert (len(server.requests), set(server.keys)) == (6, {"Bearer sk-judge"})
