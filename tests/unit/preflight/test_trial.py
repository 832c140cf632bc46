"""`rftstream try`: the real roles over a log in memory, and what is printed of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from rftstream.contracts.ids import derive_seed
from rftstream.data.tasksets.order import order
from tests import commands
from tests.commands import write_run_file

MORE = """
[tasksets.sums.options]
size = 20
[tasksets.own]
source = "jsonl:own.jsonl"
reward = "my_trial_rewards:score"
weight = 0
"""
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
REWARDS = """
def score(completion, answer, prompt):
    if prompt == "2+2=":
        raise ValueError("no fours today")
    return {"reward": 0.5, "length": len(completion), "detail": "half right:\\n" + answer}
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    (tmp_path / "my_trial_rewards.py").write_text(REWARDS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return write_run_file(tmp_path, MORE)


def call(*arguments: object) -> Result:
    return commands.call("try", *arguments)


def tried(*arguments: object, code: int = 0) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.exit_code == code, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


@pytest.mark.slow
def test_the_first_tasks_of_a_run_with_their_rewards(run_file: Path) -> None:
    report = tried(run_file, "--num", 2, "--samples", 2)
    first, second = (order(20, 0, derive_seed(0, "order", "sums"))(position) for position in (0, 1))
    ids = [f"sums/0/{index}/0/{sibling}" for index in (first, second) for sibling in (0, 1)]
    assert [one["rollout_id"] for one in report["rollouts"]] == ids
    for one in report["rollouts"]:
        assert one["prompt"].endswith("=")
        assert one["num_prompt_tokens"] == len(one["prompt"])
        assert one["reward"] == float(one["turns"][0]["content"] == one["answer"])
        assert (one["status"], one["reason"], one["parts"]) == ("completed", None, {"exact": one["reward"]})
    assert report["num_scored"] == 4
    assert report["num_tokens"] == sum(one["num_tokens"] for one in report["rollouts"])


@pytest.mark.slow
def test_it_leaves_nothing_behind(run_file: Path) -> None:
    before = sorted(run_file.parent.iterdir())
    assert call(run_file).exit_code == 0
    after = [path for path in run_file.parent.iterdir() if path.name != "__pycache__"]  # Python's, of the own module
    assert sorted(after) == before


@pytest.mark.slow
def test_the_seed_decides(run_file: Path) -> None:
    def ids(seed: int) -> list[str]:
        return [one["rollout_id"] for one in tried(run_file, "--num", 3, "--seed", seed)["rollouts"]]

    assert ids(1) == ids(1) != ids(2)


@pytest.mark.slow
def test_text_to_be_read_and_a_reward_that_fails(run_file: Path) -> None:
    result = call(run_file, "--taskset", "own", "--num", 2, "--set", "verifier.tries=1")
    assert result.exit_code == 0, result.output
    assert "  prompt, 4 tokens:\n    1+1=\n  assistant, " in result.stdout
    assert "  reward 0.5 by score\n" in result.stdout
    assert "  measured: length " in result.stdout
    assert "\n    half right:\n    2\n" in result.stdout
    assert "  no reward: error\n" in result.stdout
    assert "ValueError: no fours today" in result.stdout
    assert "2 rollouts, 1 scored, mean reward 0.500; " in result.stdout
    assert "1 without a reward (error)" in result.stdout


@pytest.mark.slow
def test_a_reward_that_reads_no_answer_is_named_where_completions_have_it(run_file: Path) -> None:
    (run_file.parent / "my_trial_rewards.py").write_text("def score(completion):\n    return 0\n")
    shown = [call(run_file, "--num", 20, "--set", f"tasksets.sums.reward={name}").stdout
             for name in ("my_trial_rewards:score", "exact")]  # fmt: skip
    assert "with the reference answer in the text: 0 by score; where one is right" in shown[0], shown[0]
    assert "with the reference answer in the text" not in shown[1], shown[1]


@pytest.mark.slow
def test_exit_1_when_nothing_can_be_scored_and_fewer_tasks_than_asked_for(run_file: Path) -> None:
    (run_file.parent / "own.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
    more = ("--taskset", "own", "--set", "tasksets.own.passes=1", "--set", "verifier.tries=1")
    report = tried(run_file, "--num", 3, *more, code=1)
    assert [one["reason"] for one in report["rollouts"]] == ["error"]
    assert "3 were asked for" in call(run_file, "--num", 3, *more).stdout


@pytest.mark.slow
def test_a_policy_that_fails_and_a_prompt_that_is_too_long(run_file: Path) -> None:
    report = tried(run_file, "--set", "policies.fake.fail_share=1.0", code=1)
    (one,) = report["rollouts"]
    assert (one["status"], one["reason"], one["reward"]) == ("failed", "failed", None)
    assert one["error"]
    result = call(run_file, "--set", "model.context=3")
    assert result.exit_code == 2
    assert "has a prompt of 4 tokens, expected fewer than the context of 3" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--taskset", "sum"), "--taskset: unknown 'sum'; known: own, sums; did you mean 'sums'?"),
        (("--set", "explorer.policy=fakee"), "did you mean 'fake'"),
        (("--set", "tasksets.sums.reward=exat"), "did you mean 'exact'"),
        (("--num", "0"), "0 is not in the range x>=1"),
    ],
)
def test_bad_input_is_exit_2(run_file: Path, arguments: tuple[str, ...], text: str) -> None:
    result = call(run_file, *arguments)
    assert result.exit_code == 2, result.output
    assert text in result.stderr


def test_a_file_that_is_not_there() -> None:
    result = call("nowhere.toml")
    assert result.exit_code == 2
    assert result.stderr.startswith("rftstream: nowhere.toml: no such file")


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(run_file: Path, tmp_path: Path) -> None:
    """While a reward hangs."""
    begun = tmp_path / "begun"
    (tmp_path / "my_trial_rewards.py").write_text(
        "import os, time\nfrom pathlib import Path\ndef score():\n"
        f"    Path({str(begun)!r}).write_text(str(os.getpid()))\n    time.sleep(600)\n"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "rftstream", "try", str(run_file), "--taskset", "own", "--set",
         "verifier.timeout_s=600"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(scratch)},
    )  # fmt: skip
    try:
        while not (begun.exists() and begun.read_text()):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1
    assert "Traceback" not in error
    assert list(scratch.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)
