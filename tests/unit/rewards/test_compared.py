"""Rewards that compare siblings: what each gives, and how they go together with those that see one rollout."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.rewards.base import RewardGroup, RewardInput, Score, ScoreReply, ScoreRequest
from rftstream.rewards.resolve import build_reward
from rftstream.rewards.scorer import ProcessScorer
from tests.configs import small_run
from tests.suite.each import each
from tests.unit.reward_inputs import reward_input
from tests.unit.rewards.scoring import drain

JUDGE = {"url": "http://127.0.0.1:1", "model": "m"}


def says(text: str) -> dict[str, Any]:
    return {"choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": text}}]}


def usual(body: Mapping[str, Any]) -> dict[str, Any]:
    """A judge to whom the longer answer is the better one."""
    answers = dict(re.findall(r"<(answer_\w+) \w+>\n(.*?)\n</", body["messages"][-1]["content"], re.DOTALL))
    if "answer_a" in answers:
        a, b = len(answers["answer_a"]), len(answers["answer_b"])
        return says(json.dumps({"reasoning": "", "better": "A" if a > b else "B" if b > a else "tie"}))
    most = max(map(len, answers.values()))
    return says(json.dumps({"reasoning": "", **{name: len(text) / most for name, text in answers.items()}}))


def config_of(reward: Any, **more: Any) -> RunConfig:
    return small_run(tasksets={"train": {"source": "arithmetic", "reward": reward}}, **more)


def built(*parts: str | dict[str, Any], **more: Any) -> Any:
    named = [{"name": part} if isinstance(part, str) else part for part in parts]
    return build_reward(named, config_of(named, **more))


def items(*texts: str, answer: str | None = None, **given: Any) -> list[RewardInput]:
    return [reward_input(text, answer, **{"num_tokens": len(text), **given}) for text in texts]


def scores(reward: Any, siblings: Sequence[RewardInput], **more: Any) -> list[Any]:
    return list(reward.score_all(siblings, group=replace(RewardGroup.of(siblings), **more)))


def rewards(found: Sequence[Any]) -> list[float | str]:
    return [round(one.reward, 6) if isinstance(one, Score) else type(one).__name__ for one in found]


@each(("parts", "texts", "expected"), [
    (("majority_vote",), ("4", "5", "4"), [1, 0, 1]),
    (("majority_vote",), (r"so \boxed{1/2}", "0.5", "2", r"\boxed{\frac{2}{4}}"), [1, 1, 0, 1]),
    (({"name": "majority_vote", "equal": "text"},), ("1/2", "0.5", "0.5 "), [0, 1, 1]),
    (({"name": "majority_vote", "extract": r"is (\w+)"},), ("it is Red", "blue", "is blue. is red", ""), [1, 0, 1, 0]),
    (("majority_vote",), ("5", "4", "4", "5"), [1, 0, 0, 1]),
    (("majority_vote",), ("", "  ", ""), [0, 0, 0]),
    (({"name": "majority_vote", "min_share": 0.6},), ("4", "5", "4", "6"), [0, 0, 0, 0]),
    (("diversity",), ("a b c", "a b c", "x y z"), [0.5, 0.5, 1.0]),
    (({"name": "diversity", "n": 1},), ("a b", "b c", ""), [(2 / 3 + 1) / 2, (2 / 3 + 1) / 2, 1.0]),
    (("diversity",), ("alone",), [0.0]),
    (("relative_length",), ("a", "aaa", "aaaaa"), [0.5, 0.0, -0.5]),
    (("relative_length",), ("aa", "bb"), [0.0, 0.0]),
    (("exact", "relative_length"), ("4", "44", "444"), [1.5, 0.0, -0.5]),
    (("exact", "relative_length"), ("5", "4  ", "44444"), [0.0, 1.0, -0.5]),
    (({"name": "exact", "weight": 0.0}, {"name": "best_of_n", "by": "exact"}), ("5", "4", "4"), [0, 1, 1]),
    (("exact", {"name": "length_penalty", "soft": 0, "hard": 10}, "best_of_n"), ("4", "4    ", "5"), [1.9, 0.5, -0.1]),
    (("exact", {"name": "best_of_n", "top": 2}), ("5", "4", "6"), [1, 2, 1]),
    (({"name": "exact", "use": "gate"}, "relative_length"), ("4", "4    ", "55"), [0.5, -0.5, 0.0]),
    (("relative_length", {"name": "majority_vote", "use": "gate"}), ("4", "4    ", "55"), [0.5, -0.5, 0.0]),
    (("best_of_n",), ("4", "5"), ["RewardError"] * 2),
])  # fmt: skip
def test_what_they_give(parts: Sequence[Any], texts: Sequence[str], expected: list[Any]) -> None:
    found = scores(built(*parts), items(*texts, answer="4"))
    assert rewards(found) == pytest.approx(expected)


@each(("answer", "texts", "expected"), [
    ("4", ("4", "5", "4"), {"majority_share": 2 / 3, "maj@4": 1.0}),
    ("5", ("4", "5", "4"), {"majority_share": 2 / 3, "maj@4": 0.0}),
    (None, ("4", "5", "4"), {"majority_share": 2 / 3}),
    ("4", ("", "", ""), {"majority_share": 0.0, "maj@4": 0.0}),
])  # fmt: skip
def test_the_label_against_the_answer(answer: str | None, texts: Sequence[str], expected: dict[str, float]) -> None:
    """k counts those that are absent, too."""
    found = scores(built("majority_vote"), items(*texts, answer=answer), absent={3: "failed"})
    assert [dict(one.metrics) for one in found] == [expected] * 3


def test_a_sibling_that_fails_alone_has_no_reward_and_the_others_do() -> None:
    siblings = [*items("4", "5", answer="4"), *items("4", answer=None)]
    found = scores(built("exact", "best_of_n"), siblings)
    assert rewards(found) == [2.0, 0.0, "RewardError"]


@pytest.mark.parametrize(("settings", "texts", "expected", "num_asked"), [
    ({}, ("a", "aaaa", "aaa", "aa"), {"aaaa": 1.0}, 6),
    ({"seed": 7}, ("a", "aaaa", "aaa", "aa"), {"aaaa": 1.0}, 6),
    ({}, ("a", "aaa", "aa", "aaaaa", "aaaa"), {"aaaaa": 1.0}, 8),
    ({}, ("aa", "a", "aa", "aa"), {"aa": 1.0, "a": 0.0}, 2),
    ({}, ("same", "same"), {"same": 0.5}, 0),
    ({"pairing": "round_robin"}, ("a", "aaaa", "aaa", "aa"), {"a": 0, "aa": 1 / 3, "aaa": 2 / 3, "aaaa": 1}, 12),
    ({"pairing": "round_robin"}, ("ab", "cd", "x"), {"ab": 0.75, "cd": 0.75, "x": 0.0}, 6),
])  # fmt: skip
def test_a_tournament(
    server: Any, settings: dict[str, Any], texts: Sequence[str], expected: dict[str, float], num_asked: int
) -> None:
    """A restart asks nobody again and gives the same ranking, in whatever order the siblings come."""
    base = {"url": server.url, "model": "big", **settings}
    first = scores(built({"name": "tournament", **base}), items(*texts))
    found = dict(zip(texts, rewards(first), strict=True))
    assert {text: found[text] for text in expected} == pytest.approx(expected)
    assert len(server.requests) == num_asked
    assert sum(one.metrics.get("spent_requests", 0.0) for one in first) == pytest.approx(num_asked)
    again = scores(built({"name": "tournament", **base}), items(*texts[::-1]))
    assert rewards(again) == rewards(first)[::-1]
    assert len(server.requests) == num_asked
    assert {one.metrics.get("cached", 1.0) for one in again} == {1.0}


def test_a_judge_that_prefers_the_first_decides_nothing(server: Any) -> None:
    server.usual = lambda body: says('{"reasoning": "", "better": "A"}')
    found = scores(built({"name": "tournament", "url": server.url, "model": "big"}), items("a", "b", "c", "d"))
    assert {one.metrics["undecided"] for one in found} == {1.0}
    assert sorted(rewards(found)) == [0.0, 0.0, 0.5, 1.0]


def test_ruler_scores_all_siblings_in_one_question(server: Any) -> None:
    settings = {"name": "ruler", "url": server.url, "model": "big", "rubric": "- The longer, the better."}
    said = (("user", "p"), ("assistant", "look"), ("tool", "found"))
    messages = tuple({"role": role, "content": content} for role, content in said)
    siblings = [*items("aa", "aaaa", "aa"), replace(items("z")[0], num_prompt_messages=1, messages=messages)]
    found = scores(built(settings), siblings)
    whole = len("assistant: look\n\ntool: found")
    assert rewards(found) == [round(2 / whole, 6), round(4 / whole, 6), round(2 / whole, 6), 1.0]
    ((_, body),) = server.requests
    assert "- The longer, the better." in body["messages"][-1]["content"]
    again = scores(built(settings), siblings[::-1])
    assert rewards(again) == rewards(found)[::-1] and len(server.requests) == 1
    assert rewards(scores(built(settings), items("a", "a"))) == [0.5, 0.5] and len(server.requests) == 1


def test_a_judge_that_fails_leaves_the_whole_group_without_a_reward(server: Any) -> None:
    server.usual = lambda body: says("I like both.")
    for name in ("ruler", "tournament"):
        found = scores(built({"name": name, "url": server.url, "model": "big"}), items("a", "b"))
        assert rewards(found) == ["RewardError"] * 2 and str(found[0]).startswith(f"{name}: no JSON object")


@each(("parts", "error"), [
    ([{"name": "exact", "group": True}], "'exact' scores each rollout alone, expected a method score_group"),
    (["tournament"], "rewards.tournament: expected url and model"),
    ([{"name": "majority_vote", "extract": "("}], "is no regular expression"),
    ([{"name": "ruler", "prompt": "?", **JUDGE}], "expected {answers}"),
    ([{"name": "tournament", "prompt": "?", **JUDGE}], "expected {first} and {second}"),
])  # fmt: skip
def test_what_cannot_be_built(parts: list[Any], error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        built(*parts)


OWN = """
import os
from pathlib import Path
from rftstream.rewards.evaluating import evaluating_answer
from rftstream.errors import RewardError

DIED = Path(__file__).with_suffix(".died")

def by_length(group):
    if any("crash" in one.completion for one in group.siblings) and not DIED.exists():
        DIED.touch()
        os._exit(3)
    if any("bad" in one.completion for one in group.siblings):
        raise RewardError("not these")
    longest = max(len(one.completion) for one in group.siblings)
    return [{"reward": len(one.completion) / longest, "lates": sum(w == "late" for w in group.absent.values())}
            for one in group.siblings]

def trl(prompts, completions, **rest):
    return [float(len(completions)) for _ in completions]

async def later(group):
    return [1.0] * len(group.siblings)

def short(group):
    return [1.0]

class Own:
    group = True
    def score_group(self, group):
        return [1.0 if number == max(group.numbers) else None for number in group.numbers]

def content(completion):
    with evaluating_answer():
        while completion == "for ever":
            pass
    return 1.0
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own_compared.py").write_text(OWN)
    return tmp_path


@pytest.mark.parametrize(("name", "expected"), [
    ("by_length", [0.5, 1.0]), ("trl", [2.0, 2.0]), ("later", [1.0, 1.0]), ("short", ["RewardError"] * 2),
    ("Own", ["RewardError", 1.0]),
])  # fmt: skip
def test_ones_own(own: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: list[Any]) -> None:
    monkeypatch.syspath_prepend(str(own))
    part = {"name": f"own_compared:{name}"} | ({} if name == "Own" else {"group": True})
    assert rewards(scores(built(part), items("aa", "bbbb"))) == expected


def ask(scorer: ProcessScorer, group: Sequence[RewardInput], absent: Mapping[int, str]) -> dict[str, ScoreReply]:
    requests = [
        ScoreRequest(request_id=f"{number}", taskset="train", item=item, sibling=number)
        for number, item in enumerate(group)
    ]  # fmt: skip
    scorer.submit_group(requests, absent)
    return drain(scorer)


@pytest.mark.slow  # children start
@pytest.mark.law("unscorable")
@pytest.mark.parametrize(("texts", "expected", "tries"), [
    (("aa", "bbbb"), [1.5, 2.0], 1),
    (("aa", "crash"), [1.4, 2.0], 2),
    (("aa", "bad"), ["error", "error"], 2),
    (("aa", "for ever", "bbbb"), [1.25, 1.0, 1.5], 1),
], ids=["fine", "its process dies once", "raises", "one answer cannot be evaluated"])  # fmt: skip
def test_in_children(own: Path, texts: Sequence[str], expected: list[Any], tries: int) -> None:
    """The group is tried again as a whole, and only the one whose answer exceeds a limit has 0 for that."""
    named = [{"name": "own_compared:content"}, {"name": "own_compared:by_length", "group": True}]
    config = config_of(named, base=str(own))
    with closing(ProcessScorer(config, processes=1, timeout_s=2.0, tries=2)) as scorer:
        while scorer.grouped is None:
            scorer.poll(0.1)
        assert set(scorer.grouped) == {"train"}
        replies = ask(scorer, items(*texts), {len(texts): "late"})
    found = [replies[str(number)] for number in range(len(texts))]
    assert [reply.score.reward if reply.score else reply.reason for reply in found] == pytest.approx(expected)
    assert {reply.tries for reply in found} == {tries}
    assert all(reply.score.metrics["by_length.lates"] == 1.0 for reply in found if reply.score)
