"""Rewards.

To add one: a module with a class that has a `Config` and keeps `rftstream.rewards.base.Reward`, and a line here;
or, outside, any function of ours, verl's or TRL's signature (functions.py), named `module:function`.
"""

REWARDS = {
    "exact": "rftstream.rewards.exact:ExactMatch",
    "math": "rftstream.rewards.math:MathReward",
    "judge": "rftstream.rewards.judge:JudgeReward",
    "teacher": "rftstream.rewards.teacher:TeacherReward",
    "reasoning_gym": "rftstream.rewards.reasoning_gym:ReasoningGymReward",
}
