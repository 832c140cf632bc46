"""The scorer: whatever a reward does, every request gets exactly one reply, and the other ones lose nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError, RewardError
from rftstream.rewards.base import RewardInput, Score, ScoreReply, ScoreRequest
from rftstream.rewards.process import BatchSizes
from rftstream.rewards.scorer import InlineScorer, ProcessScorer
from rftstream.testing.conformance_tests.bench import await_true
from rftstream.testing.memory_run import ManualClock
from tests.configs import small_run
from tests.unit.reward_inputs import reward_input
from tests.unit.rewards import scoring
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

USER_REWARDS = """
import ctypes, os, re, subprocess, sys, time

def score(completion, answer, info):
    if completion == "hang":
        time.sleep(1000)
    if completion == "hang in C":
        re.match(r"(a+)+$", "a" * 64 + "b")
    if completion == "hang once" and first_time(info):
        time.sleep(1000)
    if completion == "hang with a child":
        child = subprocess.Popen(["sleep", "1000"])
        open(info["pid_file"], "w").write(str(child.pid))
        time.sleep(1000)
    if completion == "crash":
        ctypes.string_at(0)
    if completion == "exit":
        sys.exit(3)
    if completion == "hard exit":
        os._exit(7)
    if completion == "crash once" and first_time(info):
        os._exit(1)
    if completion == "raise":
        raise KeyError("no such thing")
    if completion == "raise late":
        time.sleep(0.6)
        raise KeyError("nobody answers")
    if completion == "raise once" and first_time(info):
        raise KeyError("not yet")
    if completion == "print":
        print("printed " * 100)
        os.write(1, b"written " * 100)
        subprocess.run(["echo", "echoed"])
    if completion == "read":
        return len(sys.stdin.read())
    if completion == "nan":
        return float("nan")
    if completion == "none":
        return None
    if completion == "huge":
        return {"reward": 1.0, "text": "x" * 50_000_000, "length": 50_000_000}
    if completion == "many metrics":
        return {"reward": 1.0, **{str(i): i for i in range(100_000)}}
    if completion == "huge error":
        raise ValueError("x" * 50_000_000)
    if completion == "slow":
        time.sleep(0.02)
    return float(completion == answer)

def first_time(info):
    try:
        os.mkdir(info["mark"])
        return True
    except FileExistsError:
        return False
"""


def config_of(reward: Any, base: Path, **more: Any) -> RunConfig:
    return small_run(
        tasksets={"train": {"source": "arithmetic", "reward": reward}},
        evaluations={"held-out": {"source": "arithmetic", "reward": "exact"}}, base=str(base), **more,
    )  # fmt: skip


def item(completion: str, answer: str | None = "7", **info: Any) -> RewardInput:
    messages = ({"role": "user", "content": "3+4="}, {"role": "assistant", "content": completion})
    return reward_input(
        completion, answer, prompt="3+4=", messages=messages, info=info, data_source="test", num_tokens=len(completion)
    )


def request(request_id: str, completion: str, taskset: str = "train", **info: Any) -> ScoreRequest:
    return ScoreRequest(request_id=request_id, taskset=taskset, item=item(completion, **info))


def drain(scorer: ProcessScorer | InlineScorer, completions: Iterable[str] = ()) -> dict[str, ScoreReply]:
    """Submit these, with their places as names, and return all replies."""
    for number, completion in enumerate(completions):
        scorer.submit(request(str(number), completion))
    return scoring.drain(scorer)


@pytest.fixture
def user_rewards(tmp_path: Path) -> Path:
    (tmp_path / "user_rewards.py").write_text(USER_REWARDS)
    return tmp_path


Make = Callable[..., ProcessScorer]


@pytest.fixture
def make(user_rewards: Path) -> Iterator[Make]:
    made: list[ProcessScorer] = []

    def build(reward: Any = "user_rewards:score", verifier: Any = (), **settings: Any) -> ProcessScorer:
        settings = {"processes": 1, "timeout_s": 30.0, "tries": 2, **settings}
        made.append(ProcessScorer(config_of(reward, user_rewards, verifier=dict(verifier)), **settings))
        return made[-1]

    before = set(psutil.Process().children(recursive=True))
    yield build
    for scorer in made:
        scorer.close()
    assert not set(psutil.Process().children(recursive=True)) - before, "a process was left behind"


def test_scores(make: Make) -> None:
    scorer = make()
    scorer.submit(request("right", "7"))
    scorer.submit(request("wrong", "8"))
    scorer.submit(request("evaluated", "7", taskset="eval:held-out"))
    assert scorer.num_active == 3
    replies = drain(scorer)
    assert replies["right"].score == Score(reward=1.0, parts={"score": 1.0})
    assert replies["wrong"].score == Score(reward=0.0, parts={"score": 0.0})
    assert replies["right"].scorer == "score"
    assert replies["right"].scorer_version
    assert (replies["evaluated"].scorer, replies["evaluated"].reason) == ("exact", None)
    assert replies["evaluated"].score == Score(reward=1.0, parts={"exact": 1.0})


def test_poll_does_not_block_while_nothing_is_active(make: Make) -> None:
    scorer = make()
    started = time.monotonic()
    assert scorer.poll(500.0) == []
    assert time.monotonic() - started < 250.0


def test_many_items_in_several_children(make: Make) -> None:
    scorer = make("exact", processes=2)
    for number in range(5000):
        scorer.submit(request(str(number), "7" if number % 3 else "8"))
    replies = drain(scorer)
    assert len(replies) == 5000
    assert all(reply.score and reply.score.reward == float(int(i) % 3 > 0) for i, reply in replies.items())


def test_big_items(make: Make) -> None:
    scorer = make("exact")
    assert all(reply.score and reply.score.reward == 0.0 for reply in drain(scorer, ["x" * 4_000_000] * 12).values())


@pytest.mark.law("unscorable")
@pytest.mark.parametrize("how", ["hang", "hang in C"])
def test_a_hang_is_a_timeout_and_holds_up_nobody_for_ever(make: Make, how: str) -> None:
    scorer = make(timeout_s=1.0)
    replies = drain(scorer, [*["7"] * 5, how, *["7"] * 14])
    assert (replies["5"].score, replies["5"].reason) == (None, "timeout")
    place, last = replies["5"].detail.splitlines()
    assert last == "no result within 1 s (verifier.timeout_s) (tried 2 times)"
    line = 1 + next(n for n, text in enumerate(USER_REWARDS.splitlines()) if f'== "{how}"' in text) + 1
    assert re.fullmatch(rf"at /\S+/user_rewards\.py:{line}, in score", place), "not in the library that it waits in"
    assert [i for i, reply in replies.items() if reply.score is None] == ["5"]
    assert scorer.num_replaced == 2


@pytest.mark.law("unscorable")
def test_where_all_hang_few_are_tried_and_none_is_zero(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    scorer = make(timeout_s=0.5, tries=3)
    for number in range(48):
        scorer.submit(replace(request(str(number), "hang"), rollout_id=f"r{number}", group_id=f"g{number // 8}"))
    replies = drain(scorer)
    assert {(reply.score, reply.reason) for reply in replies.values()} == {(None, "timeout")}
    assert scorer.num_replaced < 12, "not 144"
    assert any("not tried: 6 tries of others in a row" in reply.detail for reply in replies.values())
    said = r"r0: reward score of train: at \S+, in score: no result within 0.5 s \(verifier.timeout_s\) \(try 1 of 3"
    assert re.search(said, caplog.text)
    scorer.submit(request("well again", "7"))
    assert drain(scorer)["well again"].score == Score(reward=1.0, parts={"score": 1.0})
    assert "it came back" in caplog.text


def test_nobody_is_given_up_while_a_process_starts(make: Make, user_rewards: Path) -> None:
    (user_rewards / "slow_start.py").write_text("import time\ntime.sleep(2)\nfrom user_rewards import score\n")
    scorer = make("slow_start:score", timeout_s=1.0, tries=3)
    for number in range(12):
        scorer.submit(replace(request(str(number), "hang"), group_id=f"g{number // 3}"))
    assert any("not tried: 6 tries of others in a row" in reply.detail for reply in drain(scorer).values())
    assert all(reply.score for reply in drain(scorer, ["7"] * 40).values()), (
        "a process that starts says nothing of them"
    )


def test_where_all_take_their_process_along_few_are_tried(make: Make) -> None:
    scorer = make(tries=3)
    replies = drain(scorer, ["hard exit"] * 48)
    assert {(reply.score, reply.reason) for reply in replies.values()} == {(None, "error")}
    assert scorer.num_replaced == 6, "however soon they died, and however long they might have waited"


def test_no_try_is_said_to_be_one_of_fewer(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    scorer = make(tries=3)
    for number in range(2):  # of one group: 16 tries in a row before the reward is given up
        scorer.submit(replace(request(str(number), "hard exit"), group_id="one"))
    drain(scorer)
    drain(scorer, ["hard exit"] * 20)
    said = re.findall(r"\(try (\d+) of (\d+)\)", caplog.text)
    assert len(said) == scorer.num_replaced
    assert all(int(one) <= int(of) for one, of in said)
    assert ("2", "2") in said or ("1", "1") in said, "the last one where no more are worth it"


def test_an_error_after_a_long_wait_is_as_bad_as_a_hang(make: Make) -> None:
    scorer = make(timeout_s=1.0, tries=3)
    replies = drain(scorer, ["raise late"] * 24)
    assert {(reply.score, reply.reason) for reply in replies.values()} == {(None, "error")}
    assert sorted(reply.tries for reply in replies.values()) == [0] * 18 + [1] * 6, "one at a time after the first"


def test_what_waited_behind_a_slow_failure_is_scored(make: Make) -> None:
    scorer = make(timeout_s=1.0, tries=2)
    replies = drain(scorer, ["7", "raise late", *["7"] * 18])
    assert [name for name, reply in replies.items() if reply.score is None] == ["1"]
    assert {reply.tries for name, reply in replies.items() if name != "1"} == {1}
    assert (replies["1"].tries, scorer.num_replaced) == (2, 0)


def test_errors_at_once_are_tried_as_often_as_ever(make: Make) -> None:
    scorer = make(tries=3)
    assert {reply.tries for reply in drain(scorer, ["raise"] * 24).values()} == {3}


def test_slow_items_are_not_taken_for_hanging_ones(make: Make) -> None:
    scorer = make(timeout_s=0.8)
    assert all(reply.score for reply in drain(scorer, ["slow"] * 60).values()), "1.2 s together"
    assert scorer.num_replaced == 0


@pytest.mark.law("unscorable")
@pytest.mark.parametrize(
    ("how", "detail"),
    [
        ("crash", "the scoring process died: killed by SIGSEGV"),
        ("hard exit", "the scoring process died: exit code 7"),
        ("exit", "the reward called sys.exit(3)"),
        ("raise", "KeyError: 'no such thing'"),
        ("nan", "got nan, expected a finite number"),
        ("none", "got None, expected a number"),
        ("many metrics", "more than 200 parts, roles and metrics"),
        ("huge error", "xxxxxx"),
    ],
)
def test_what_cannot_be_scored_is_an_error_and_never_zero(make: Make, how: str, detail: str) -> None:
    scorer = make()
    replies = drain(scorer, [*["7"] * 4, how, *["7"] * 5])
    assert (replies["4"].score, replies["4"].reason) == (None, "error")
    assert detail in replies["4"].detail
    assert len(replies["4"].detail) < 5000
    assert "(tried 2 times)" in replies["4"].detail
    assert all(reply.score and reply.score.reward == 1.0 for i, reply in replies.items() if i != "4")


@pytest.mark.parametrize("how", ["hang once", "crash once", "raise once"])
def test_the_next_try_counts(make: Make, how: str, tmp_path: Path) -> None:
    scorer = make(timeout_s=1.0)
    scorer.submit(request("1", how, mark=str(tmp_path / "mark")))
    reply = drain(scorer)["1"]
    assert reply.score == Score(reward=0.0, parts={"score": 0.0})


def test_prints_and_stdin_do_not_touch_the_protocol(make: Make) -> None:
    scorer = make()
    for number in range(5):
        scorer.submit(request(f"print {number}", "print"))
    scorer.submit(request("read", "read"))
    replies = drain(scorer)
    assert all(reply.score and reply.score.reward == 0.0 for reply in replies.values())


@pytest.mark.law("bounded")
def test_huge_results_are_cut_to_their_numbers(make: Make) -> None:
    scorer = make()
    scorer.submit(request("1", "huge"))
    assert drain(scorer)["1"].score == Score(reward=1.0, parts={"score": 1.0}, metrics={"length": 5e7})


def scoring_child() -> psutil.Process:
    """Of this process, which has others: servers that tests share."""
    return next(child for child in psutil.Process().children() if "rftstream.rewards.child" in child.cmdline())


def test_a_killed_child_costs_nothing(make: Make) -> None:
    scorer = make("exact", tries=3)
    scorer.submit(request("first", "7"))
    drain(scorer)
    for number in range(3000):
        scorer.submit(request(str(number), "7"))
    early = scorer.poll(1.0)
    os.kill(scoring_child().pid, signal.SIGKILL)
    replies = {**{reply.request_id: reply for reply in early}, **drain(scorer)}
    assert len(replies) == 3000
    assert all(reply.score for reply in replies.values())
    assert scorer.num_replaced == 1


def test_a_child_killed_while_idle_is_replaced(make: Make) -> None:
    scorer = make("exact")
    drain(scorer, ["7"])
    child = scoring_child()
    child.kill()
    await_true("the child has died", lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 120.0)
    scorer.submit(request("2", "7"))
    assert drain(scorer)["2"].score


def test_a_replaced_child_stamps_the_code_that_it_has_read(
    make: Make, user_rewards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rftstream")
    scorer = make(processes=2)
    (old,) = {reply.scorer_version for reply in drain(scorer, ["7"] * 200).values()}
    (user_rewards / "user_rewards.py").write_text("def score(completion, answer):\n    return 0.25\n")
    assert {reply.scorer_version for reply in drain(scorer, ["7"] * 200).values()} == {old}, "it is what still runs"
    scoring_child().kill()
    seen: set[tuple[float, str]] = set()
    deadline = time.monotonic() + 120.0
    while not any(reward == 0.25 for reward, _ in seen):
        assert time.monotonic() < deadline
        seen |= {
            (reply.score.reward, reply.scorer_version) for reply in drain(scorer, ["7"] * 200).values() if reply.score
        }
    (new,) = {version for _, version in seen} - {old}
    assert seen <= {(1.0, old), (0.25, new)}, "two children of two codes, and no verdict under the other's name"
    assert caplog.text.count(f"reward score of train: its code has changed ({old} -> {new})") == 1
    assert caplog.text.count(f"scores train by score {old}") == caplog.text.count("scores train by") == 1


def test_what_a_hanging_reward_started_is_killed_too(make: Make, tmp_path: Path) -> None:
    scorer = make(timeout_s=1.0, tries=1)
    scorer.submit(request("1", "hang with a child", pid_file=str(tmp_path / "pid")))
    assert drain(scorer)["1"].reason == "timeout"
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_rewards_that_cannot_be_built_are_config_errors(make: Make, user_rewards: Path) -> None:
    (user_rewards / "broken_rewards.py").write_text("def score(completion: 1 +\n")
    for reward, text in [
        ("exat", "tasksets.train.reward: unknown 'exat'"),
        ("no_such_module:score", "no module named 'no_such_module'"),
        ("user_rewards:scores", "has no 'scores'"),
        ("broken_rewards:score", "SyntaxError"),
    ]:
        scorer = make(reward)
        with pytest.raises(ConfigError, match=text):
            drain(scorer, ["7"])


def test_children_that_die_at_start_are_not_started_for_ever(make: Make, user_rewards: Path) -> None:
    (user_rewards / "deadly_rewards.py").write_text("import os\nos._exit(9)\n")
    scorer = make("deadly_rewards:score")
    with pytest.raises(RewardError, match=r"3 scorers in a row died at start \(exit code 9\)"):
        drain(scorer, ["7"])


@pytest.mark.law("unscorable")
def test_a_missing_checker_is_said_and_not_retried(make: Make, user_rewards: Path) -> None:
    (user_rewards / "needy_rewards.py").write_text(
        "from rftstream.errors import MissingChecker\n"
        "class Needy:\n"
        "    def __init__(self):\n"
        "        raise MissingChecker('needs the package x')\n"
    )
    scorer = make("needy_rewards:Needy")
    scorer.submit(request("1", "7"))
    scorer.submit(request("2", "7", taskset="eval:held-out"))
    replies = drain(scorer)
    assert (replies["1"].reason, replies["1"].detail) == ("missing_checker", "needs the package x")
    assert replies["2"].score


def test_an_unknown_taskset_is_refused(make: Make) -> None:
    with pytest.raises(RewardError, match="reward of 'other': unknown; known: eval:held-out, train"):
        make().submit(request("1", "7", taskset="other"))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a child that hangs outlives its parent")
def test_children_die_with_their_parent_even_while_they_hang(user_rewards: Path) -> None:
    script = (
        "import os, signal, sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\n"
        "import psutil\n"
        "from test_scorer import config_of, request, ProcessScorer\n"
        f"scorer = ProcessScorer(config_of('user_rewards:score', Path({str(user_rewards)!r})), timeout_s=100.0)\n"
        "scorer.submit(request('1', '7'))\n"
        "while scorer.num_active: scorer.poll(1.0)\n"
        "scorer.submit(request('2', 'hang in C'))\n"
        "scorer.poll(0.3)\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=240, check=False)
    pid = int(done.stdout)
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_inline(user_rewards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(user_rewards)
    scorer = InlineScorer(config_of("user_rewards:score", user_rewards))
    for number, completion in enumerate(("7", "raise", "exit", "nan")):
        scorer.submit(request(str(number), completion))
    replies = drain(scorer)
    assert [replies[str(i)].reason for i in range(4)] == [None, "error", "error", "error"]
    assert replies["0"].score == Score(reward=1.0, parts={"score": 1.0})


def test_inline_latency_is_time_of_the_clock(tmp_path: Path) -> None:
    clock = ManualClock(100.0)
    latencies = {"a": 3.0, "b": 1.0, "c": 2.0}
    scorer = InlineScorer(config_of("exact", tmp_path), clock=clock, latency_s=lambda one: latencies[one.request_id])
    for request_id in latencies:
        scorer.submit(request(request_id, "7"))
    assert scorer.poll() == []
    assert scorer.num_active == 3
    clock.advance(2.0)
    assert [reply.request_id for reply in scorer.poll()] == ["b", "c"]
    assert scorer.poll(0.5) == []
    assert clock.now() == 102.5
    assert [reply.request_id for reply in scorer.poll(5.0)] == ["a"]
    assert clock.now() == 103.0
    assert scorer.num_active == 0


# ------------------------------------------------------------------------------------------------ over lists

BATCHED = """
import os, sys, time

def score(prompts, completions, **columns):
    print("noise " * 1000)
    sizes = columns.get("sizes") or [None]
    if sizes[0]:
        with open(sizes[0], "a") as file:
            file.write(f"{len(completions)}\\n")
    if "hang" in completions:
        time.sleep(1000)
    if "crash" in completions:
        os._exit(7)
    if "exit" in completions:
        sys.exit(3)
    time.sleep(0.05)
    return [{"score": float(text == "7"), "length": len(text)} for text in completions]
"""


@pytest.mark.parametrize("bad", ["hang", "crash", "exit"])
def test_one_bad_rollout_of_a_batch_spoils_no_other(make: Make, tmp_path: Path, bad: str) -> None:
    (tmp_path / "lists.py").write_text(BATCHED)
    replies = drain(make("lists:score", timeout_s=1.5), [*["7"] * 11, bad, *["7"] * 8])
    assert {name for name, reply in replies.items() if reply.score is None} == {"11"}
    assert replies["11"].reason == ("timeout" if bad == "hang" else "error")
    assert replies["3"].score == Score(reward=1.0, parts={"score": 1.0}, metrics={"length": 1.0})


def test_all_that_waits_in_the_child_is_one_call(make: Make, tmp_path: Path) -> None:
    (tmp_path / "lists.py").write_text(BATCHED)
    sizes, scorer = tmp_path / "sizes", make("lists:score", verifier={"max_batch": 16})
    for number in range(40):
        scorer.submit(request(str(number), "7", sizes=str(sizes)))
        scorer.submit(request(f"other {number}", "7", taskset="eval:held-out"))
    replies = drain(scorer)
    assert all(reply.score is not None for reply in replies.values()) and len(replies) == 80
    assert [int(line) for line in sizes.read_text().split()] == [16, 16, 8]


GIVEN_UP = threading.Event()


def usual(body: Any) -> Any:
    """What the served judge says: late, never, or at once."""
    asked = body["messages"][-1]["content"]
    GIVEN_UP.wait(60.0 if "no answer at all" in asked else 2.0 if "a slow answer" in asked else 0.0)
    return {"choices": [{"finish_reason": "stop", "message": {"content": "Score: 10"}}]}


def test_a_late_judge_costs_its_own_rollout_alone(make: Make, server: Any) -> None:
    """Its answers are waited for as long as the judge's own setting says, which is longer than one call may last."""
    judge = {"name": "judge", "url": server.url, "model": "big", "timeout_s": 4.0, "cache_mib": 0}
    scorer = make(judge, timeout_s=0.8)
    replies = drain(scorer, [*["right"] * 9, "no answer at all", "a slow answer", *["right"] * 9])
    GIVEN_UP.set()
    assert {name: reply.reason for name, reply in replies.items() if reply.score is None} == {"9": "timeout"}
    assert "no answer within 4 s (rewards.judge.timeout_s) (tried 2 times)" in replies["9"].detail
    assert scorer.num_replaced == 0 and len(server.requests) == 21, "nobody else was asked twice"


def test_a_list_is_as_long_as_the_time_limit_allows() -> None:
    sizes = BatchSizes(max_batch=64, timeout_s=10.0)
    assert sizes.limit("loop") == 64
    sizes.took("loop", 1, 1.0)
    assert sizes.limit("loop") == 5
    sizes.took("loop", 5, 5.0)
    assert sizes.limit("loop") == 5, "a second for each: half of the time limit"
    for _ in range(6):
        sizes.took("judge", sizes.limit("judge"), 1.0)
    assert sizes.limit("judge") == 64, "a second for all"
    sizes.took("slow", 1, 100.0)
    assert sizes.limit("slow") == 1


def test_a_reward_that_loops_over_its_list_is_not_killed_for_it(make: Make, tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(
        "import time\ndef score(completions):\n    return [time.sleep(0.2) or 1.0 for _ in completions]\n"
    )
    scorer = make("loops:score", timeout_s=3.0)
    replies = drain(scorer, ["7"] * 24)
    assert all(reply.score is not None for reply in replies.values()) and len(replies) == 24
    assert scorer.num_replaced <= 1, "once, before it is known how long it takes"


def test_a_slow_reward_beside_a_served_judge_is_not_killed_for_their_list(
    make: Make, server: Any, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef score(completion):\n    return time.sleep(0.1) or 1.0\n")
    judge = {"name": "judge", "url": server.url, "model": "big", "cache_mib": 0}
    scorer = make([{"name": "slow:score"}, judge], timeout_s=1.0)
    for _ in range(2):
        replies = drain(scorer, ["right"] * 15)
        assert len(replies) == 15 and all(reply.score is not None for reply in replies.values())
    assert scorer.num_replaced <= 1, "once, before it is known how long it takes"


EVALUATING = """
import ctypes
from rftstream.rewards.evaluating import evaluating_answer

def score(completion, answer):
    if completion == "not yet":
        while True:
            pass
    with evaluating_answer():
        while completion == "for ever":
            pass
        if completion == "crash":
            ctypes.string_at(0)
        if completion == "memory":
            try:
                return float(len(bytearray(64 << 30)))
            except MemoryError:
                return 0.25
    return float(completion == answer)
"""


@pytest.mark.law("unscorable")
def test_an_answer_that_exceeds_the_limits_is_wrong_and_not_unscorable(make: Make, tmp_path: Path) -> None:
    (tmp_path / "evaluating_rewards.py").write_text(EVALUATING)
    rewards = [{"name": "evaluating_rewards:score", "weight": 2.0}, {"name": "exact", "weight": 0.5}]
    texts = ("for ever", "7", "crash", "memory", "not yet")
    replies = drain(make(rewards, timeout_s=1.0, tries=1), texts)
    given = {texts[int(place)]: reply.score and reply.score.reward for place, reply in replies.items()}
    assert given == {"for ever": 0.0, "7": 2.5, "crash": 0.0, "memory": 0.5, "not yet": None}
    assert replies["0"].score is not None
    assert replies["0"].score.metrics == {"score.over_limit": 1.0}
    assert replies["4"].reason == "timeout"
