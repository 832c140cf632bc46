"""Algorithms: each binds a `Config` to functions of `rftstream.core`.

In the order of reading: `base` defines an algorithm. `settings`, `scored` and `policy_gradient` hold what most
algorithms share. Then come the algorithms, `grpo` first; small ones are together in `clips` and `ratios`. `by_taskset`
combines several algorithms into one, `requirements` has their demands on the rest of a run, `learning_signal` detects
steps that taught nothing, and `reward_signs` rewards that are gained without solving the task.

To add one, write a module with a class that has a `Config` and implements `rftstream.algorithms.base.Algorithm`, and
add a line here. Most of the work is done in `rftstream.algorithms.policy_gradient`: inherit from it, and define
advantages and token losses."""

from rftstream.config.parts.part_specs import AlgorithmSpec

ALGORITHMS = {
    "grpo": AlgorithmSpec("rftstream.algorithms.grpo:Grpo", compares_siblings=True, steps_setting="step_rewards"),
    "dr_grpo": AlgorithmSpec(
        "rftstream.algorithms.clips:DrGrpo", compares_siblings=True, max_tokens_setting="row_tokens"
    ),
    "dapo": AlgorithmSpec(
        "rftstream.algorithms.clips:Dapo", compares_siblings=True, replaces_groups=True, steps_setting="step_rewards"
    ),
    "gspo": AlgorithmSpec("rftstream.algorithms.clips:Gspo", compares_siblings=True),
    "cispo": AlgorithmSpec("rftstream.algorithms.ratios:Cispo", compares_siblings=True),
    "sapo": AlgorithmSpec("rftstream.algorithms.ratios:Sapo", compares_siblings=True),
    "rloo": AlgorithmSpec("rftstream.algorithms.clips:Rloo", compares_siblings=True),
    "reinforce_plus_plus": AlgorithmSpec("rftstream.algorithms.clips:ReinforcePlusPlus"),
    "remax": AlgorithmSpec("rftstream.algorithms.clips:ReMax", greedy_baseline=True),
    "ppo": AlgorithmSpec("rftstream.algorithms.ppo:Ppo"),
    "gigpo": AlgorithmSpec("rftstream.algorithms.clips:GiGpo", compares_siblings=True),
    "maxrl": AlgorithmSpec("rftstream.algorithms.clips:MaxRl", compares_siblings=True),
    "dppo": AlgorithmSpec("rftstream.algorithms.ratios:Dppo", compares_siblings=True),
    "m2po": AlgorithmSpec("rftstream.algorithms.ratios:M2po", compares_siblings=True),
    "topr": AlgorithmSpec("rftstream.algorithms.ratios:Topr"),
    "asymre": AlgorithmSpec("rftstream.algorithms.ratios:AsymRe"),
    "opd": AlgorithmSpec("rftstream.algorithms.opd:Opd", needs_teacher=True),
    "opmd": AlgorithmSpec("rftstream.algorithms.ratios:Opmd", compares_siblings=True),
    "kimi": AlgorithmSpec("rftstream.algorithms.ratios:Kimi", compares_siblings=True),
    "sft": AlgorithmSpec("rftstream.algorithms.sft:Sft"),
    "dpo": AlgorithmSpec("rftstream.algorithms.dpo:Dpo"),
    "reward_model": AlgorithmSpec("rftstream.algorithms.reward_model:RewardModel", trains_classifier=True),
    "mix": AlgorithmSpec("rftstream.algorithms.mix:Mix", steps_setting="step_rewards"),
    "chord": AlgorithmSpec("rftstream.algorithms.chord:Chord", steps_setting="step_rewards"),
}
