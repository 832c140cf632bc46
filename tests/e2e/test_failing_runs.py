"""A run that can never succeed ends by its own rule, and says why: in what it prints, in `status`, in `dead list`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.workplace import FAKE, Finished, Workplace, sets

pytestmark = pytest.mark.law("unscorable")

ENVIRONMENT = """
from dataclasses import dataclass

from rftstream.environments.base import Reply


class Alone:
    @dataclass(frozen=True)
    class Config:
        pass

    def __init__(self, config, *, problem, seed):
        self.problem = problem

    def start(self):
        return self.problem.messages

    def save(self):
        return None

    def close(self):
        pass


class Raises(Alone):
    def reply(self, said):
        return self.answers[said.text]


class Awaited(Alone):
    async def reply(self, said):
        return Reply(done=self.problem.info['nobody knows'])


class Works(Alone):
    def reply(self, said):
        return Reply(done=True)
"""

HANGS = """
import time

def score(completion, answer):
    time.sleep(600)
"""


def ended_by_its_rule(place: Workplace, done: Finished, *words: str) -> dict[str, Any]:
    """Exit 6 and one line with the words, which `status` repeats; what it prints as JSON."""
    assert done.code == 6, f"{done.code}: {done.out}{done.err}"
    (line,) = [line for line in done.err.splitlines() if line.startswith("rftstream: ")]
    for word in words:
        assert word in line
    status: dict[str, Any] = place.look("status", "runs/tiny", "--json").result
    assert status["stopped"]["by"] == "error"
    assert status["stopped"]["error"] in line
    place.view("runs/tiny").assert_nothing_lost()
    return status


@pytest.mark.parametrize(
    ("environment", "error", "source"),
    [
        (
            "mine:Raises",
            "AttributeError: 'Raises' object has no attribute 'answers'",
            "return self.answers[said.text]",
        ),
        ("mine:Awaited", "KeyError: 'nobody knows'", "return Reply(done=self.problem.info['nobody knows'])"),
    ],
)
def test_an_environment_that_always_fails(place: Workplace, environment: str, error: str, source: str) -> None:
    place.write("mine.py", ENVIRONMENT)
    named = f'source = "arithmetic"\nenvironment = "{environment}"'
    place.write("tiny.toml", FAKE.replace('source = "arithmetic"', named))
    done = place.call("run", "tiny.toml", "--json")
    status = ended_by_its_rule(
        place, done, "200 of the last 200 rollouts failed before they could be scored",
        f"failed, environment {environment}: reply: ", error,
        "Mend the environment or the policy, then run `rftstream resume`",
    )  # fmt: skip
    count = status["dead_letters"]["failed"]
    assert count >= 200
    (kind,) = status["dead_errors"]
    assert (kind["reason"], kind["count"]) == ("failed", count)
    assert error in kind["error"]
    assert f"{kind['error']} ({count:,} failed)" in place.look("status", "runs/tiny").out
    listed = place.look("dead", "list", "runs/tiny").out
    assert any(line.split()[:2] == ["failed", f"{count:,}"] and error in line for line in listed.splitlines())

    logged = place.view("runs/tiny").log_of("explorer-0")
    assert logged.count("Traceback (most recent call last)") == 1, "of each kind the first"
    assert source in logged

    resumed = place.call("resume", "runs/tiny", *sets("tasksets.sums.environment=mine:Works"))
    assert resumed.code == 0, resumed.err
    assert place.view("runs/tiny").assert_nothing_lost().version == 6


def test_a_reward_that_always_hangs(place: Workplace) -> None:
    place.write("mine.py", HANGS)
    done = place.call("run", "tiny.toml", "--json", *sets("tasksets.sums.reward=mine:score", "verifier.timeout_s=1"))
    status = ended_by_its_rule(
        place, done, "200 of the last 200 rollouts could not be scored by score", "timeout, ", "no result within 1 s",
        "Mend the reward, then run `rftstream resume`",
    )  # fmt: skip
    assert set(status["dead_letters"]) == {"timeout"}
    view = place.view("runs/tiny")
    assert all(one.verdict is None for one in view.verified()), "not a reward of 0"
    logged = view.log_of("verifier-0")
    first = next(line for line in logged.splitlines() if "(try 1 of 3)" in line)
    assert "sums/0/" in first and "reward score of sums: no result within 1 s" in first
    assert logged.count("its process was replaced") < 40, "not 600 times"

    place.write("mine.py", "def score(completion, answer):\n    return float(completion.strip() == answer)\n")
    resumed = place.call("resume", "runs/tiny")
    assert resumed.code == 0, resumed.err
    assert view.assert_nothing_lost().version == 6
