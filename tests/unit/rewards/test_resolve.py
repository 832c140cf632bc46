"""Users' functions and classes, weighted sums, and what counts as a score."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError, MissingChecker, RewardError
from rftstream.rewards.base import Score
from rftstream.rewards.functions import to_score
from rftstream.rewards.resolve import build_reward, build_rewards, reward_specs
from tests.configs import small_run
from tests.unit.reward_inputs import reward_input

numbers_of_modules = itertools.count()


def config_of(reward: Any = "exact", **more: Any) -> RunConfig:
    return small_run(tasksets={"train": {"source": "arithmetic", "reward": reward}}, **more)


ITEM = reward_input(
    "seven", "7", prompt="3+4=", messages=({"role": "user", "content": "3+4="},),
    info={"level": 3, "completion": "not this one"}, data_source="test", num_tokens=5,
)  # fmt: skip


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Source -> the name of a module that has it."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> str:
        name = f"user_module_{next(numbers_of_modules)}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


@pytest.mark.parametrize(
    ("source", "reward"),
    [
        ("def score(completion, answer): return len(completion)", 5.0),
        ("def score(completion, answer, **kwargs): return kwargs['info']['level']", 3.0),
        ("def score(completion, **kwargs): return len(kwargs) + kwargs['level']", 14.0),
        ("def score(answer): return int(answer)", 7.0),
        ("def score(completion, /, answer): return int(answer)", 7.0),
        ("def score(*, num_tokens, truncated): return num_tokens + truncated", 5.0),
        ("def score(level): return level", 3.0),
        ("def score(completion, level, other=2): return level * other", 6.0),
        ("def score(item): return item.num_tokens", 5.0),
        ("def score(item, scale=2): return item.num_tokens * scale", 10.0),
        ("def score(prompt, messages): return prompt == messages[-1]['content']", 1.0),
        ("async def score(completion): return 0.5", 0.5),
        ("score = lambda completion: 0.25", 0.25),
        ("class Scorer:\n    def __call__(self, completion): return 2\nscore = Scorer()", 2.0),
    ],
)
def test_functions_are_called_by_their_signature(module: Any, source: str, reward: float) -> None:
    assert build_reward(f"{module(source)}:score", config_of())(ITEM).reward == reward


def test_options_of_functions(module: Any) -> None:
    name = f"{module('def score(completion, answer, scale=1, shift=0): return scale * int(answer) + shift')}:score"
    config = config_of(rewards={name: {"scale": 10, "shift": 1}})
    assert build_reward(name, config)(ITEM).reward == 71.0
    with pytest.raises(ConfigError, match="takes no scal"):
        build_reward(name, config_of(rewards={name: {"scal": 10}}))


def test_dicts_and_scores(module: Any) -> None:
    source = (
        "from rftstream.rewards.base import Score\n"
        "def mapping(completion): return {'score': 0.5, 'length': 9, 'ok': True, 'text': 'x', 'list': [1]}\n"
        "def score(completion): return Score(reward=3.0, parts={'a': 1, 'b': 2}, metrics={'m': 4})\n"
    )
    name = module(source)
    mapping = build_reward(f"{name}:mapping", config_of())(ITEM)
    assert mapping == Score(reward=0.5, parts={"mapping": 0.5}, metrics={"length": 9.0, "ok": 1.0})
    score = build_reward(f"{name}:score", config_of())(ITEM)
    assert score == Score(reward=3.0, parts={"a": 1.0, "b": 2.0}, metrics={"m": 4.0})


def test_classes(module: Any) -> None:
    source = (
        "from dataclasses import dataclass\n"
        "class Fixed:\n"
        "    @dataclass(frozen=True, kw_only=True)\n"
        "    class Config:\n"
        "        value: float = 1.0\n"
        "    def __init__(self, config): self.version = f'v{config.value}'; self._value = config.value\n"
        "    def __call__(self, item): return self._value\n"
        "class Plain:\n"
        "    def __call__(self, item): return 4\n"
    )
    name = module(source)
    fixed = build_reward(f"{name}:Fixed", config_of(rewards={f"{name}:Fixed": {"value": 2.5}}))
    assert (fixed(ITEM).reward, fixed.scorer, fixed.version) == (2.5, "Fixed", "v2.5")
    assert build_reward(f"{name}:Plain", config_of())(ITEM).reward == 4.0
    with pytest.raises(ConfigError, match=r"rewards\..*:Fixed\.valeu: unknown key"):
        build_reward(f"{name}:Fixed", config_of(rewards={f"{name}:Fixed": {"valeu": 2.5}}))


def test_weighted_sums(module: Any) -> None:
    source = "def correct(answer): return {'reward': 1.0, 'digits': 2}\ndef length(num_tokens): return num_tokens\n"
    name = module(source)
    spec = [{"name": f"{name}:correct"}, {"name": f"{name}:length", "weight": -0.1}, {"name": "exact", "weight": 2.0}]
    config = config_of(spec)
    reward = build_reward(config.tasksets["train"].reward, config)
    score = reward(ITEM)
    assert score.reward == pytest.approx(1.0 - 0.5 + 0.0)
    assert score.parts == {"correct": 1.0, "length": 5.0, "exact": 0.0}
    assert score.metrics == {"correct.digits": 2.0}
    assert reward.scorer == "correct+length+exact"


def test_versions_follow_source_options_and_weights(module: Any) -> None:
    one, same = module("def score(completion): return 1"), module("def score(completion): return 1")
    other = module("def score(completion): return 2")
    versions = [build_reward(f"{name}:score", config_of()).version for name in (one, same, other)]
    assert versions[0] == versions[1] != versions[2]
    name = f"{module('def score(completion, scale=1): return scale')}:score"
    scaled = config_of(rewards={name: {"scale": 2}})
    assert build_reward(name, config_of()).version != build_reward(name, scaled).version
    helper = module("LEAST = 1")
    user = f"{module(f'def score(completion): from {helper} import LEAST; return LEAST')}:score"
    before = build_reward(user, config_of()).version
    Path(str(importlib.import_module(helper).__file__)).write_text("LEAST = 2")
    assert build_reward(user, config_of()).version != before, "what it imports from its folder counts, too"
    calls = module("class Scorer:\n    def __call__(self, completion): return 2\none, other = Scorer(), Scorer()")
    objects = [build_reward(f"{calls}:{name}", config_of()).version for name in ("one", "other")]
    assert objects[0] == objects[1], "an object has the version of its class, in every process"
    library = module("def score(completion, least): return least")
    bound = f"from functools import partial\nfrom {library} import score\nharsh = partial(score, least=%d)"
    partial = module(bound % 1)
    before = build_reward(f"{partial}:harsh", config_of()).version
    Path(str(importlib.import_module(partial).__file__)).write_text(bound % 2)
    assert build_reward(f"{partial}:harsh", config_of()).version != before, "the module that the run file names counts"
    half = config_of([{"name": "exact", "weight": 0.5}])
    assert build_reward(half.tasksets["train"].reward, half).version != build_reward("exact", half).version


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), "x: reward: got nan, expected a finite number"),
        (float("-inf"), "x: reward: got -inf, expected a finite number"),
        (None, "x: reward: got None, expected a number"),
        ("1", "x: reward: got '1', expected a number"),
        ([1.0], "x: reward: got list, expected a number"),
        (1j, "x: reward: got complex, expected a number"),
        ({"rewards": 1.0}, "x: returned a dict with"),
        ({"reward": None}, "x: reward: got None"),
        ({"reward": 1.0, "m": float("nan")}, "x: metric 'm': got nan"),
        (Score(reward=1.0, parts={"p": float("inf")}), "x: part 'p': got inf"),
        pytest.param(10**400, "x: reward: got inf", id="big"),
    ],
)
def test_everything_else_is_an_error(value: Any, text: str) -> None:
    with pytest.raises(RewardError, match=text):
        to_score(value, where="x")


def test_config_errors(module: Any) -> None:
    with pytest.raises(ConfigError, match=r"train: unknown 'exat'.*did you mean 'exact'"):
        build_reward("exat", config_of(), where="train")
    with pytest.raises(ConfigError, match="an empty list"):
        build_reward([], config_of())
    with pytest.raises(ConfigError, match="is a int, expected a function or a class"):
        build_reward(f"{module('score = 3')}:score", config_of())
    with pytest.raises(ConfigError, match=r"importing .* failed: ZeroDivisionError"):
        build_reward(f"{module('1 / 0')}:score", config_of())


def test_all_rewards_of_a_run(module: Any) -> None:
    needy = module(
        "from rftstream.errors import MissingChecker\ndef f(): pass\nclass Needy:\n    def __init__(self):\n"
        "        raise MissingChecker('needs x')"
    )
    config = small_run(
        tasksets={"a": {"source": "arithmetic"}, "b": {"source": "arithmetic", "reward": f"{needy}:Needy"}},
        evaluations={"a": {"source": "arithmetic", "reward": "exact"}},
    )  # fmt: skip
    assert set(reward_specs(config)) == {"a", "b", "eval:a"}
    rewards = build_rewards(config)
    assert isinstance(rewards["b"], MissingChecker)
    assert not isinstance(rewards["eval:a"], MissingChecker)
    assert rewards["eval:a"].scorer == "exact"
