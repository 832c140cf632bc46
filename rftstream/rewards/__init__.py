"""Rewards.

To add one: a module with a class that has a `Config` and keeps `rftstream.rewards.base.Reward`, and a line here;
or, outside, any function `score(completion, answer, **more) -> float | dict | Score`, named `module:function`.
"""

REWARDS = {
    "exact": "rftstream.rewards.exact:ExactMatch",
    "math": "rftstream.rewards.math:MathReward",
    "reasoning_gym": "rftstream.rewards.reasoning_gym:ReasoningGymReward",
}
