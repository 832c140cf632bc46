"""Algorithms: each binds a `Config` to the functions of `rftstream.core`.

In the order of reading: `base` says what an algorithm is; `settings`, `scored` and `policy_gradient` are what most have
in common; then one module for each algorithm, `grpo` first. `by_taskset` makes one algorithm of several, `requirements`
says what they ask of the rest of a run, and `learning_signal` notices steps that taught nothing.

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
