"""Several rewards as one: sums, minimums, gates, second opinions, and the built-in rewards that are made for them."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rftstream.config.loader import from_dict
from rftstream.config.parts.reward_uses import reward_formula, reward_uses
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError, RewardError
from rftstream.rewards.base import RewardInput, Score, TokenSegment
from rftstream.rewards.composite import CompositeReward
from rftstream.rewards.resolve import build_reward
from tests.suite.each import each
from tests.unit.reward_inputs import reward_input

ITEM = reward_input("7", "7", prompt="3+4=", messages=({"role": "user", "content": "3+4="},), num_tokens=5)

ASKED: list[str] = []
"""Names of the rewards below, as often as they were asked."""


@pytest.fixture(autouse=True)
def rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    ASKED.clear()
    module = ModuleType("given")
    for name in ("a", "b", "c"):
        setattr(module, name, _giver(name))
    monkeypatch.setitem(sys.modules, "given", module)


def _giver(name: str) -> Any:
    def give(item: RewardInput, scale: float = 1.0) -> float | None:
        ASKED.append(name)
        value = item.info[name]
        if value is None:
            raise RewardError(f"{name} is down")
        return float(value) * scale

    return give


def config_of(reward: Any, **more: Any) -> RunConfig:
    run = {"run": {"name": "test", "steps": 1}, "model": {"make": {}}}
    return from_dict({**run, "tasksets": {"train": {"source": "arithmetic", "reward": reward}}, **more})


def built(*named: dict[str, Any]) -> CompositeReward:
    of_given = [{**one, "name": f"given:{one['name']}"} if len(one["name"]) == 1 else one for one in named]
    return build_reward(of_given, config_of(of_given))


def score(reward: CompositeReward, **values: float | None) -> Score:
    return reward(replace(ITEM, info=values))


GATE = {"name": "a", "use": "gate"}


def test_an_open_gate_adds_nothing() -> None:
    found = score(built(GATE, {"name": "b"}, {"name": "c", "weight": 0.5}), a=1.0, b=1.0, c=1.0)
    assert (found.reward, found.parts) == (1.5, {"a": 1.0, "b": 1.0, "c": 1.0})


def test_a_closed_gate_is_the_whole_and_saves_the_others() -> None:
    found = score(built({"name": "b"}, {**GATE, "otherwise": -1.0, "at_least": 0.5}), a=0.4, b=None)
    assert (found.reward, found.parts) == (-1.0, {"a": 0.4})
    assert ASKED == ["a"]


@pytest.mark.law("unscorable")
def test_a_gate_without_a_result_makes_the_whole_unscorable() -> None:
    with pytest.raises(RewardError, match="a is down"):
        score(built(GATE, {"name": "b"}), a=None, b=1.0)


def test_each_rollout_has_its_own_gate() -> None:
    items = [replace(ITEM, info={"a": a, "b": 3.0}) for a in (1.0, 0.0, 1.0)]
    found = built(GATE, {"name": "b"}).score_all(items)
    assert [one.reward for one in found if isinstance(one, Score)] == [3.0, 0.0, 3.0]
    assert ASKED == ["a", "a", "a", "b", "b"]


def test_all_minimums_are_one_term_of_the_sum() -> None:
    reward = built({"name": "a", "use": "minimum"}, {"name": "b", "use": "minimum", "weight": 2.0}, {"name": "c"})
    assert score(reward, a=1.0, b=0.25, c=10.0).reward == 10.5
    assert score(reward, a=-1.0, b=0.25, c=10.0).reward == 9.0


def test_a_second_opinion_never_counts() -> None:
    reward = built({"name": "a"}, {"name": "b", "use": "check", "share": 1.0})
    found = score(reward, a=1.0, b=0.25)
    assert (found.reward, found.parts, found.metrics) == (1.0, {"a": 1.0}, {"b.apart": 0.75, "b.failed": 0.0})
    assert score(reward, a=1.0, b=None) == Score(reward=1.0, parts={"a": 1.0}, metrics={"b.failed": 1.0})


def test_what_a_second_opinion_measured_and_cost_is_kept() -> None:
    reward = built({"name": "a"}, {"name": "object_count", "use": "check", "share": 1.0})
    assert score(reward, a=0.5).metrics == {
        "object_count.parsed": 1.0, "object_count.off": 0.0, "object_count.apart": 0.5, "object_count.failed": 0.0,
    }  # fmt: skip


def test_a_second_opinion_is_asked_of_the_same_share_each_time() -> None:
    reward = built({"name": "a"}, {"name": "b", "use": "check", "share": 0.2})
    items = [replace(ITEM, completion=str(n), info={"a": 1.0, "b": 0.0}) for n in range(500)]
    first, second = reward.score_all(items), [reward(item) for item in reversed(items)]
    assert first == second[::-1]
    assert 60 < sum("b.apart" in one.metrics for one in first if isinstance(one, Score)) < 140


def test_settings_in_the_list_differ_from_the_table() -> None:
    named = [{"name": "given:a", "scale": 3.0}, {"name": "given:a"}]
    config = config_of(named, rewards={"given:a": {"scale": 2.0}})
    assert score(build_reward(named, config), a=1.0).parts == {"a": 3.0, "a-2": 2.0}
    alone = {"name": "exact", "casefold": True}
    assert build_reward(alone, config_of(alone))(replace(ITEM, completion="X", answer="x")).reward == 1.0


def test_versions_tell_uses_apart() -> None:
    uses: list[dict[str, Any]] = [
        {}, {"weight": 2.0}, {"use": "minimum"}, {"use": "gate"}, {"use": "gate", "at_least": 2.0},
        {"use": "gate", "otherwise": -1.0}, {"use": "check"}, {"use": "check", "share": 0.5}, {"scale": 2.0},
    ]  # fmt: skip
    versions = {built({"name": "a", **use}, {"name": "b"}).version for use in uses}
    assert len(versions) == len(uses)


@each(
    ("named", "message"),
    [
        ([], r"train\.reward: an empty list"),
        ([{"weight": 1.0}], r"train\.reward\.0: found no name"),
        ([{"name": "exact", "use": "gate"}], "has only gates, expected a reward that counts"),
        ([{"name": "exact", "use": "gat"}], r"reward\.0\.use: got 'gat'; .*did you mean 'gate'"),
        ([{"name": "exact"}, {"name": "exact", "use": "gate", "weight": 2.0}], r"reward\.1\.weight: means nothing"),
        ([{"name": "exact", "otherwise": 1.0}], r"reward\.0\.otherwise: means nothing for use = 'sum'"),
        ([{"name": "exact", "use": "check", "share": 0.0}], r"reward\.0\.share"),
        ([{"name": "exact", "casefld": True}], r"reward\.casefld: unknown key; .*casefold"),
        ([{"name": "exct"}], r"unknown 'exct'; .*exact"),
        ({"name": "length_penalty", "soft": 9, "hard": 5}, r"length_penalty\.soft: got 9, expected less than hard"),
        ({"name": "length_penalty"}, r"missing 'soft'"),
        ({"name": "well_formed", "pattern": "("}, r"well_formed\.pattern.* no regular expression"),
        ({"name": "well_formed", "tags": ["a b"]}, r"well_formed\.tags"),
    ],
)
def test_what_is_refused(named: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_reward(named, config_of(named), where="tasksets.train.reward")


def test_secrets_inside_of_a_list_are_not_written_down() -> None:
    config = config_of([{"name": "given:a", "api_key": "sk-very-secret"}, {"name": "given:b"}])
    assert "sk-very-secret" not in repr(config)


def test_formula() -> None:
    def formula(*named: str | dict[str, Any]) -> str:
        return reward_formula(reward_uses(list(named), "reward"))

    assert formula({"name": "math"}) == "math"
    assert formula("math", {"name": "length_penalty", "weight": 0.2}) == "1 math + 0.2 length_penalty"
    guarded = formula({"name": "well_formed", "use": "gate"}, {"name": "math"}, {"name": "exact", "use": "check"})
    assert guarded == "1 math, if well_formed >= 1 (else 0), checked by exact on 5%"
    assert formula({"name": "a", "use": "minimum"}, {"name": "b", "use": "minimum"}) == "min(1 a, 1 b)"


@each(
    ("settings", "completion", "reward"),
    [
        ({}, "<think>so</think><answer>7</answer>", 1.0),
        ({}, " <think>so\nand so</think>\n\n<answer>7</answer>\n", 1.0),
        ({}, "<think>so</think> well <answer>7</answer>", 0.0),
        ({}, "<think>so</think><answer>7</answer> or 8", 0.0),
        ({}, "<think><think>so</think></think><answer>7</answer>", 0.0),
        ({}, "<answer>7</answer>", 0.0),
        ({"begun": "<think>"}, "so</think><answer>7</answer>", 1.0),
        ({"begun": "<think>"}, "<think>so</think><answer>7</answer>", 0.0),
        ({"tags": ["answer"]}, "<answer>7</answer>", 1.0),
        ({"pattern": r"\d+"}, "7", 1.0),
        ({"pattern": r"\d+"}, "7 8", 0.0),
    ],
)
def test_format(settings: dict[str, Any], completion: str, reward: float) -> None:
    named = {"name": "well_formed", **settings}
    assert build_reward(named, config_of(named))(replace(ITEM, completion=completion)).reward == reward


@each(("tokens", "reward"), [(0, 0.0), (100, 0.0), (150, -0.5), (200, -1.0), (5_000, -1.0)])
def test_length(tokens: int, reward: float) -> None:
    named = {"name": "length_penalty", "soft": 100, "hard": 200}
    assert build_reward(named, config_of(named))(replace(ITEM, num_tokens=tokens)).reward == reward


@each(
    ("ids", "reward"),
    [([], 0.0), ([1], 0.0), ([1, 2, 3, 4], 0.0), ([1, 1, 1, 1], -2 / 3), ([1, 2] * 50, 2 / 99 - 1)],
)
def test_repetition(ids: list[int], reward: float) -> None:
    named = {"name": "ngram_penalty", "n": 2}
    prompt = [9, 9, 9, 9]
    segment = TokenSegment(
        token_data=np.array([*prompt, *ids], "<i4").tobytes(),
        mask_data=np.array([0] * len(prompt) + [1] * len(ids), "u1").tobytes(),
        logprob_data=np.zeros(len(prompt) + len(ids), "<f4").tobytes(),
    )
    assert build_reward(named, config_of(named))(replace(ITEM, segments=(segment,))).reward == pytest.approx(reward)


def by_role(item: RewardInput) -> Any:
    return item.info["given"]


SOLVED = {"reward": 0.5, "roles": {"solver": 1.0, "critic": 0.0, "judge": None}}


def test_each_role_has_the_sum_of_what_the_rewards_say_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward that says nothing of roles counts alike for all of them; a gate closes for all."""
    monkeypatch.setattr(sys.modules["given"], "by_role", by_role, raising=False)
    mine = {"name": "given:by_role", "weight": 2.0}
    item = replace(ITEM, info={"given": SOLVED, "a": 1.0, "b": 0.5}, roles=("solver", "critic", "judge"))
    alone, beside = build_reward(mine, config_of(mine)), built(GATE, mine, {"name": "b"})
    assert alone(item).roles == {"solver": 2.0, "critic": 0.0, "judge": None}
    assert (beside(item).reward, beside(item).roles) == (1.5, {"solver": 2.5, "critic": 0.5, "judge": None})
    shut = replace(item, info={**item.info, "a": 0.0})
    assert beside(shut).roles == {}, "only the gate was asked, which tells no roles apart"
    assert built(GATE, {"name": "b"})(item).roles == {}
    assert beside(replace(item, roles=("critic",))).roles == {"critic": 0.5}, "who did not speak is left out"


class AllAtOnce:
    """A reward of a user's that scores several rollouts at once."""

    batched, scorer, version = True, "own", "1"

    def score_all(self, items: Any) -> list[Score]:
        return [Score(reward=1.0, metrics={"found": item.info["found"]}, detail=5000 * "\udc80") for item in items]


def test_scores_that_come_together_are_checked_like_those_that_come_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a record could not hold them, and the process of the rewards would end."""
    monkeypatch.setattr(sys.modules["given"], "AllAtOnce", AllAtOnce, raising=False)
    reward = build_reward("given:AllAtOnce", config_of("given:AllAtOnce"))
    good, bad = reward.score_all([replace(ITEM, info={"found": value}) for value in (1.0, float("nan"))])
    assert isinstance(good, Score) and good.detail.startswith("\\udc80") and len(good.detail) == 2000
    assert isinstance(bad, RewardError) and "metric 'found'" in str(bad)
