"""Where a completion's answer begins when it thinks first: what is a thought alone has none, for any reward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rftstream.contracts.rollouts import Turn
from rftstream.contracts.tasks import RolloutIds
from rftstream.models.calls.tool_calls import parse_text
from rftstream.rewards.anls import AnlsReward
from rftstream.rewards.base import RewardInput
from rftstream.rewards.box_iou import BoxReward
from rftstream.rewards.chart_answer import ChartReward
from rftstream.rewards.code import CodeReward
from rftstream.rewards.judge_forms import ScoreForm, UnreadableJudgement
from rftstream.rewards.k12 import SchoolReward
from rftstream.rewards.math import MathReward
from rftstream.rewards.object_count import CountReward
from rftstream.rewards.simple import ExactMatch
from rftstream.roles.verifier.step import reward_input
from tests.suite.each import each
from tests.unit.synthetic import rollout

IDS = RolloutIds(
    rollout_id="sums/0/0/0/0", group_id="sums/0/0/0", taskset="sums", sibling=0, group_size=1, sequence=0, min_version=0
)


def seen(written: str, *, in_thought: bool, answer: str = "56", decoded: str | None = None) -> RewardInput:
    """Return what a reward sees of a completion; `in_thought`: the prompt ended with <think>. `decoded`: its text where
    the marks of thoughts are special tokens."""
    said = parse_text(written, text=written, tools=(), finish_reason="length", turn=0, in_thought=in_thought)
    turn = Turn(role="assistant", content=written if decoded is None else decoded, reasoning=said.reasoning)
    return replace(reward_input(replace(rollout(IDS, num_tokens=2), turns=(turn,))), answer=answer)


@each(
    ("written", "in_thought", "conclusion"),
    [
        ("so \\boxed{56}, let me check\n", True, ""),
        ("so \\boxed{56}, let me check\n", False, "so \\boxed{56}, let me check\n"),
        ("7*8\n</think>\n\n\\boxed{56}", True, "\n</think>\n\n\\boxed{56}"),
        ("7</think>7", True, "</think>7"),
        ("<think>\n7</think>7", False, "</think>7"),
        ("<think>\n#### 56", False, ""),
        ("56", False, "56"),
        ("", True, ""),
    ],
)
def test_the_conclusion_follows_what_the_prompt_has_opened(written: str, in_thought: bool, conclusion: str) -> None:
    assert seen(written, in_thought=in_thought).conclusion == conclusion


def test_marks_that_are_special_tokens_are_not_needed() -> None:
    item = seen("is it 55?[/THINK]56", in_thought=True, decoded="is it 55?56")
    assert (item.completion, item.conclusion) == ("is it 55?56", "56")
    assert seen("[THINK]it is 56", in_thought=False, decoded="it is 56").conclusion == ""


def of(reward: Any, answer: str = "56") -> Callable[[RewardInput], float]:
    def score(item: RewardInput) -> float:
        found = reward(replace(item, answer=answer))
        return float(getattr(found, "reward", found))

    return score


def has_program(item: RewardInput) -> float:
    """Run no program: 1 if there is one."""
    reward = CodeReward(CodeReward.Config())
    reward._run = lambda source, tests, item: ([True], [])  # type: ignore[method-assign]
    return reward(replace(item, answer=None, info={"tests": {"inputs": ["1"], "outputs": ["56"]}})).reward


def has_judgement(item: RewardInput) -> float:
    form = ScoreForm(None, r"\*\*Score:\*\* (\d+)", 0.0, 10.0, fenced=True)
    try:
        return form.read(item.completion) / 10
    except UnreadableJudgement:
        return 0.0


READERS: dict[str, tuple[str, Callable[[RewardInput], float]]] = {
    "math": (r"so \boxed{56}", of(MathReward(MathReward.Config()))),
    "k12": (r"so \boxed{56}", of(SchoolReward(SchoolReward.Config()))),
    "exact": ("#### 56", of(ExactMatch(ExactMatch.Config(extract=r"#### (\d+)")))),
    "chart_answer": ("The answer is 56", of(ChartReward(ChartReward.Config()))),
    "object_count": ("The answer is 56", of(CountReward(CountReward.Config()))),
    "anls": ("<answer>56</answer>", of(AnlsReward(AnlsReward.Config()))),
    "box_iou": ("[[1, 2, 3, 4]]", of(BoxReward(BoxReward.Config()), "[[1, 2, 3, 4]]")),
    "code": ("```python\nprint(56)\n```", has_program),
    "judge": ("**Score:** 10", has_judgement),
}
"""Reward -> what it reads as the right answer, and the reward."""


@each("name", READERS)
def test_no_reward_reads_an_answer_in_an_unfinished_thought(name: str) -> None:
    text, score = READERS[name]
    assert score(seen(text, in_thought=False)) == 1.0
    assert score(seen(f"<think>{text}", in_thought=False)) == 0.0
    assert score(seen(f"x\n</think>\n{text}", in_thought=True)) == 1.0
    if name != "judge":  # it has no prompt of ours
        assert score(seen(f"{text}\nlet me check", in_thought=True)) == 0.0
