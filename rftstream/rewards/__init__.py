"""Rewards.

To add one, write a module with a class that has a `Config` and implements `rftstream.rewards.base.Reward`, and add a
line here. Outside this package any function with our signature, verl's or TRL's is a reward (functions.py), named
`module:function`.
"""

from rftstream.config.parts.part_specs import RewardSpec

REWARDS = {
    "environment": RewardSpec("rftstream.rewards.simple:EnvironmentReward", takes_given=True),
    "exact": RewardSpec("rftstream.rewards.simple:ExactMatch"),
    "well_formed": RewardSpec("rftstream.rewards.simple:WellFormedReward"),
    "length_penalty": RewardSpec("rftstream.rewards.simple:LengthPenalty"),
    "ngram_penalty": RewardSpec("rftstream.rewards.simple:NgramPenalty"),
    "math": RewardSpec("rftstream.rewards.math:MathReward"),
    "code": RewardSpec("rftstream.rewards.code:CodeReward", runs_programs=True),
    "k12": RewardSpec("rftstream.rewards.k12:SchoolReward"),
    "box_iou": RewardSpec("rftstream.rewards.box_iou:BoxReward"),
    "object_count": RewardSpec("rftstream.rewards.object_count:CountReward"),
    "chart_answer": RewardSpec("rftstream.rewards.chart_answer:ChartReward"),
    "anls": RewardSpec("rftstream.rewards.anls:AnlsReward"),
    "judge": RewardSpec("rftstream.rewards.judge:JudgeReward", asks_server=True),
    "majority_vote": RewardSpec("rftstream.rewards.compared:MajorityVote", group=True),
    "best_of_n": RewardSpec("rftstream.rewards.compared:BestOfN", group=True),
    "relative_length": RewardSpec("rftstream.rewards.compared:RelativeLength", group=True),
    "diversity": RewardSpec("rftstream.rewards.compared:Diversity", group=True),
    "ruler": RewardSpec("rftstream.rewards.ranked:RulerReward", asks_server=True, group=True),
    "tournament": RewardSpec("rftstream.rewards.ranked:TournamentReward", asks_server=True, group=True),
    "reward_model": RewardSpec("rftstream.rewards.reward_model:ModelReward", steps_setting="steps"),
    "teacher": RewardSpec("rftstream.rewards.teacher:TeacherReward", asks_teacher=True),
    "ifeval": RewardSpec("rftstream.rewards.ifeval:IfevalReward"),
    "reasoning_gym": RewardSpec("rftstream.rewards.reasoning_gym:ReasoningGymReward"),
}
