"""`rftstream try` shows rollouts of several turns turn by turn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import commands
from tests.commands import write_run_file

MODULE = '''
import dataclasses, json
import numpy as np
from rftstream.contracts.rollouts import VersionSpan
from rftstream.contracts.tasks import ChatMessage
from rftstream.environments.base import Reply
from rftstream.environments.single_turn import SingleTurn
from rftstream.policies.fake import FakePolicy

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "20+3"}}</tool_call>'


class Caller(FakePolicy):
    """Calls a tool in its first turn, and cannot write the call right in the second."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.said = [CALL, CALL[:30] + CALL[40:]]

    def step(self):
        return [self.changed(one) for one in super().step()]

    def changed(self, one):
        if not self.said:
            return one
        ids = np.frombuffer(self.said.pop(0).encode() + bytes(1), np.uint8).astype(np.int32)
        span = dataclasses.replace(one.versions[0], count=len(ids))
        return dataclasses.replace(
            one, token_ids=ids, behavior_logprobs=np.full(len(ids), -1.0, np.float32), versions=(span,),
            finish_reason="stop",
        )


class Forgetful(SingleTurn):
    """Two turns; the second begins with another context."""

    turns = 0

    def reply(self, said):
        self.turns += 1
        return Reply(
            done=self.turns == 2, reward=0.25, parts={"kept on": 0.25},
            messages=() if self.turns == 2 else (ChatMessage(role="user", content="Forget it."),),
            rewrite=None if self.turns == 2 else (ChatMessage(role="user", content="1+1="),),
        )
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_trial_turns.py").write_text(MODULE)
    (tmp_path / "sums.jsonl").write_text(json.dumps({"prompt": "20+3=", "answer": "23"}) + "\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def run_file(folder: Path, environment: str, reward: str) -> Path:
    return write_run_file(
        folder,
        f'[tasksets.turns]\nsource = "jsonl:sums.jsonl"\nenvironment = "{environment}"\nreward = "{reward}"\n',
    )


@pytest.mark.slow
def test_tool_calls_and_what_the_tool_answers(folder: Path) -> None:
    file = run_file(folder, "tools", "exact")
    policy = (
        "--taskset",
        "turns",
        "--set",
        "explorer.policy=my_trial_turns:Caller",
        "--set",
        "sampling.max_tokens=400",
    )
    text = commands.call("try", file, *policy).stdout
    assert '    -> calls calculator(expression="20+3")\n  tool, masked:\n    23\n  assistant, ' in text
    assert "which cannot be read: " in text
    assert "  tool, masked:\n    Error: " in text
    assert "  1 segment: " in text
    (shown,) = commands.called("try", file, *policy)["rollouts"]
    first, answer, second, *_ = shown["turns"]
    (call,) = first["tool_calls"]
    assert (call["name"], call["arguments"], call["error"]) == ("calculator", {"expression": "20+3"}, None)
    assert (answer["role"], answer["content"], answer["sampled"]) == ("tool", "23", False)
    assert second["tool_calls"][0]["error"]
    assert [first["begins_segment"], second["begins_segment"]] == [0, None]
    (runs,) = shown["segments"]
    assert [run["sampled"] for run in runs] == [False, True, False, True, False, True]
    assert runs[1]["text"] == first["shown"]
    assert sum(run["num_tokens"] for run in runs if run["sampled"]) == shown["num_tokens"]


@pytest.mark.slow
def test_rewards_of_turns_and_a_new_segment(folder: Path) -> None:
    file = run_file(folder, "my_trial_turns:Forgetful", "environment")
    text = commands.call("try", file, "--taskset", "turns").stdout
    assert text.count("    -> reward 0.25\n") == 2
    assert "  user, masked:\n    Forget it.\n  -- segment 1 begins, with a prompt of 4 tokens\n  assistant, " in text
    assert "  2 segments: " in text
    assert "  environment gave reward 0.5: kept on 0.5\n" in text
    (shown,) = commands.called("try", file, "--taskset", "turns")["rollouts"]
    assert [turn["begins_segment"] for turn in shown["turns"]] == [0, None, 1]
    assert [turn["reward"] for turn in shown["turns"]] == [0.25, None, 0.25]
    assert len(shown["posted"].pop("version")) == 12
    assert shown["posted"] == {
        "reward": 0.5,
        "parts": {"kept on": 0.5},
        "source": "environment",
        "error": None,
        "reached": [],
        "roles": {},
    }
    assert (shown["reward"], shown["segments"][1][0]["text"]) == (0.5, "1+1=")
