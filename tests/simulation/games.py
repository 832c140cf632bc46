"""Environments of several turns for simulated runs: rewards, time, failures, all from the seed of the rollout. And what
the log may say of their rollouts."""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from random import Random
from typing import Any

from rftstream.config.sections import RunConfig
from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.contracts.tasks import ChatMessage, Problem, Task
from rftstream.environments.base import AssistantMessage, Reply
from rftstream.environments.calls import Pause
from rftstream.policies.fake_model import uniform
from rftstream.roles.explorer.saved.saved_states import LARGE_BYTES

NAME = f"{__name__}:Game"
HANG_S = 1e9


@dataclass(frozen=True, kw_only=True)
class GameConfig:
    max_turns: int = 3
    reply_s: float = 0.0
    """Longest time of a call, on the clock."""
    state_bytes: int = 1
    """Size of what a game saves of itself."""
    odd_share: float = 0.0
    """Share of rollouts that hang, fail or give a reward that is none, in some turn."""


class Plan:
    """What happens in the rollout of a seed."""

    def __init__(self, config: GameConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        self.num_turns = 1 + int(config.max_turns * uniform(seed, "turns"))
        is_odd = uniform(seed, "odd") < config.odd_share
        self.odd_turn = int(self.num_turns * uniform(seed, "odd turn")) if is_odd else -1
        self.odd = ("hangs", "fails", "nan")[int(3 * uniform(seed, "which"))]
        self.saves = uniform(seed, "saves") < 0.7

    def seconds(self, what: str, turn: int) -> float:
        return self._config.reply_s * uniform(self._seed, f"seconds {what}", turn)

    def reward(self, turn: int) -> float | None:
        """A finite one."""
        luck = uniform(self._seed, "reward", turn)
        return None if luck < 0.3 or (turn == self.odd_turn and self.odd == "nan") else round(luck, 3)

    def reached(self, turn: int) -> tuple[ChatMessage, ...]:
        """What the rollout did reach, where its last turn has a reward."""
        if self.reward(turn) is None or uniform(self._seed, "reached") < 0.3:
            return ()
        return (ChatMessage(role="user", content=f"{self._seed % 10}+0="),)


class Game:
    """As its plan says. Its coroutines wait by the clock; `save` is a plain function, as most are."""

    Config = GameConfig

    def __init__(self, config: GameConfig, *, problem: Problem, seed: int) -> None:
        self._plan, self._problem = Plan(config, seed), problem
        self._state_bytes = config.state_bytes
        self._turn, self._is_called, self._is_closed = 0, False, False

    async def start(self) -> tuple[ChatMessage, ...]:
        return await self._alone("start", self._problem.messages)

    async def load(self, state: bytes) -> None:
        self._turn = await self._alone("load", state[0])

    async def reply(self, said: AssistantMessage) -> Reply:
        plan, turn = self._plan, self._turn
        odd = plan.odd if turn == plan.odd_turn else ""
        if odd == "hangs":
            await Pause(HANG_S)
        await self._alone("reply", None)
        if odd == "fails":
            raise RuntimeError("a game failed")
        self._turn += 1
        done = self._turn == plan.num_turns
        return Reply(
            done=done,
            messages=() if done else (ChatMessage(role="user", content=f"{turn}+{self._turn}="),),
            reward=math.nan if odd == "nan" else plan.reward(turn),
            metrics={"turns": self._turn},
            reached=plan.reached(turn) if done else (),
        )

    def save(self) -> bytes | None:
        assert not self._is_called
        return bytes([self._turn]).ljust(self._state_bytes) if self._plan.saves else None

    def close(self) -> None:
        assert not self._is_closed, "it is closed once"
        self._is_closed = True

    async def _alone(self, what: str, result: Any) -> Any:
        assert not self._is_called, "one call at a time"
        assert not self._is_closed
        self._is_called = True
        if (seconds := self._plan.seconds(what, self._turn)) > 0:
            await Pause(seconds)
        self._is_called = False
        return result


def draw_games(values: dict[str, Any]) -> None:
    """Let some runs be of games. From numbers of its own: what else a seed means stays as it was."""
    own = Random(f"games {values!r}")
    if own.random() < 0.65:
        return
    for section in (*values["tasksets"].values(), *values.get("evaluations", {}).values()):
        section["environment"] = NAME
    values["environments"] = {NAME: {
        "max_turns": own.randint(1, 4), "reply_s": own.choice([0.0, 0.0, 0.05, 1.0]),
        "odd_share": own.choice([0.0, 0.05, 0.1]),
    }}  # fmt: skip
    if Random(f"sizes of states {values!r}").random() < 0.4:
        values["environments"][NAME]["state_bytes"] = LARGE_BYTES + 1
    values["explorer"]["reply_timeout_s"] = 1.5
    if own.random() < 0.3:
        values["sampling"] = {"max_tokens": own.randint(5, 60)}
    wall_time_matters = values["policies"]["fake"]["answer_depends_on"] != "task"
    if wall_time_matters and own.random() < 0.3:
        values["explorer"]["rollout_timeout_s"] = own.choice([2.0, 10.0])
    if values["buffer"].get("group_deadline_s", 10.0) < 10.0 and values["environments"][NAME]["reply_s"] == 1.0:
        values["environments"][NAME]["reply_s"] = 0.05  # else no group is whole in time, and nothing is ever trained


def check_rollout(config: RunConfig, task: Task, rollout: Rollout) -> None:
    """The turns are those of the plan, and the rewards of all turns are there, whoever made them."""
    if task.environment != NAME or task.stored_rollout is not None or rollout.status is RolloutStatus.skipped:
        return
    plan = Plan(GameConfig(**config.environments.get(NAME, {})), task.seed)
    said = [turn for turn in rollout.turns if turn.role == "assistant"]
    whole = rollout.status is RolloutStatus.completed
    answered = len(said) if whole else int(rollout.metrics.get("turns", 0))
    assert len(said) - answered in (0, 1), f"{rollout.ids.rollout_id}: {answered} of {len(said)} turns have an answer"
    rewards = [plan.reward(turn) for turn in range(answered)]
    assert [turn.reward for turn in said[:answered]] == rewards
    given = [reward for reward in rewards if reward is not None]
    has_nan = 0 <= plan.odd_turn < answered and plan.odd == "nan"
    if not given and not has_nan:
        assert rollout.posted is None
    else:
        assert rollout.posted is not None
        assert (rollout.posted.error is not None) is has_nan
        added = functools.reduce(operator.add, given) if given else None  # since Python 3.12 sum() rounds otherwise
        assert rollout.posted.reward == added, "rewards of turns are added once"
    if whole:
        assert len(said) == plan.num_turns
        assert plan.odd_turn < 0 or plan.odd == "nan", "others hang or fail"
