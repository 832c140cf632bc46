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


def ended_by_its_rule(place: Workplace, done: Finished, *words: str) -> dict[str, Any]:
    """Exit 6 and one line with the words, which `status` repeats; what it prints as JSON."""
    assert done.code == 6, f"{done.code}: {done.out}{done.err}"
    (line,) = [line for line in done.err.splitlines() if line.startswith("rftstream: ")]
    for word in words:
        assert word in line
    status: dict[str, Any] = place.look("status", "runs/tiny", "--json").result
    assert status["stopped"]["by"] == "error"
    assert status["stopped"]["error"].replace("RUN", "runs/tiny") in line
    place.view("runs/tiny").assert_nothing_lost()
    return status


ERRORS = {
    "mine:Raises": ("AttributeError: 'Raises' object has no attribute 'answers'", "return self.answers[said.text]"),
    "mine:Awaited": ("KeyError: 'nobody knows'", "return Reply(done=self.problem.info['nobody knows'])"),
}
"""Environment -> what it fails with, and the line of it."""


def test_environments_that_always_fail(place: Workplace) -> None:
    """One answers at once, and one is awaited."""
    place.write("mine.py", ENVIRONMENT)
    tables = [f'[tasksets.{name.partition(":")[2].lower()}]\nsource = "arithmetic"\nenvironment = "{name}"'
              for name in ERRORS]  # fmt: skip
    place.write("tiny.toml", FAKE.replace('[tasksets.sums]\nsource = "arithmetic"', "\n".join(tables)))
    done = place.call("run", "tiny.toml", "--json")
    status = ended_by_its_rule(
        place, done, "200 of the last 200 rollouts failed before they could be scored", "failed, environment mine:",
        "Mend the environment or the policy, put back",
    )  # fmt: skip
    assert any(f"failed, environment {name}: reply: {error}" in done.err for name, (error, _) in ERRORS.items())
    assert status["dead_letters"]["failed"] == sum(kind["count"] for kind in status["dead_errors"]) >= 200
    told, listed = (place.look(*words, "runs/tiny").out for words in (("status",), ("dead", "list")))
    logged = place.view("runs/tiny").log_of("explorer-0")
    for error, source in ERRORS.values():
        (kind,) = [kind for kind in status["dead_errors"] if error in kind["error"]]
        assert kind["reason"] == "failed"
        assert f"{kind['error']} ({kind['count']:,} failed)" in told
        counted = ["failed", f"{kind['count']:,}"]
        assert any(line.split()[:2] == counted and error in line for line in listed.splitlines())
        assert source in logged
    assert logged.count("Traceback (most recent call last)") == len(ERRORS), "of each kind the first"

    works = [f"tasksets.{name.partition(':')[2].lower()}.environment=mine:Works" for name in ERRORS]
    resumed = place.call("resume", "runs/tiny", *sets(*works))
    assert resumed.code == 0, resumed.err
    assert place.view("runs/tiny").assert_nothing_lost().version == 6
