"""The reward that environment or agent gave, as it is.

Alone it trains on what the environment says. In a list of rewards it is one part beside others:

    reward = [{ name = "environment" }, { name = "my_pkg.rewards:is_short", weight = 0.1 }]
"""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.errors import NoReward, RewardError
from rftstream.rewards.base import RewardInput, Score


class EnvironmentReward:
    """The sum of the rewards that the environment gave for the turns, with their named parts.

    A rollout without any such reward is unscorable for the reason `no_reward`: it never counts as a reward of 0. A
    reward that is not finite makes it unscorable, too."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.environment]`."""

    def __init__(self, config: Config) -> None:
        self.version = "1"

    def __call__(self, item: RewardInput) -> Score:
        if item.environment_error is not None:
            raise RewardError(f"environment: {item.environment_error}")
        if item.environment_reward is None:
            raise NoReward(
                "environment: neither environment nor agent gave a reward, expected one in at least one turn; "
                "let it give one, or use another reward"
            )
        return Score(reward=item.environment_reward, parts=item.environment_parts)
