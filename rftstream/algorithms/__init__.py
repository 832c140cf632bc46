"""Algorithms.

To add one: a module with a class that has a `Config` and keeps `rftstream.algorithms.base.Algorithm`, and a line here.
Most of it is in `rftstream.algorithms.policy_gradient`: inherit from there, and say advantages and losses of tokens.
"""

ALGORITHMS = {
    "grpo": "rftstream.algorithms.grpo:Grpo",
    "dr_grpo": "rftstream.algorithms.dr_grpo:DrGrpo",
    "dapo": "rftstream.algorithms.dapo:Dapo",
    "gspo": "rftstream.algorithms.gspo:Gspo",
    "cispo": "rftstream.algorithms.cispo:Cispo",
    "sapo": "rftstream.algorithms.sapo:Sapo",
    "rloo": "rftstream.algorithms.rloo:Rloo",
    "reinforce_plus_plus": "rftstream.algorithms.reinforce_plus_plus:ReinforcePlusPlus",
    "remax": "rftstream.algorithms.remax:ReMax",
    "ppo": "rftstream.algorithms.ppo:Ppo",
    "gigpo": "rftstream.algorithms.gigpo:GiGpo",
    "maxrl": "rftstream.algorithms.maxrl:MaxRl",
    "dppo": "rftstream.algorithms.dppo:Dppo",
    "m2po": "rftstream.algorithms.m2po:M2po",
    "topr": "rftstream.algorithms.topr:Topr",
    "asymre": "rftstream.algorithms.asymre:AsymRe",
    "opd": "rftstream.algorithms.opd:Opd",
    "opmd": "rftstream.algorithms.opmd:Opmd",
    "kimi": "rftstream.algorithms.kimi:Kimi",
    "sft": "rftstream.algorithms.sft:Sft",
    "dpo": "rftstream.algorithms.dpo:Dpo",
    "mix": "rftstream.algorithms.mix:Mix",
    "chord": "rftstream.algorithms.chord:Chord",
}
