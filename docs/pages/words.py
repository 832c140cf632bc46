"""Meanings of settings that have no line in the code. One that has gets its meaning from there."""

from __future__ import annotations

WORDS = {
    "run.stop_reward_over": "Steps that the mean for `stop_reward` is taken over.",
    "run.seed": "The order of problems, the seed of each rollout and made weights derive from it. Fixed for a run.",
    "model.make.characters": "The vocabulary, beside padding, end and unknown.",
    "model.make.layers": "",
    "model.make.width": "A multiple of heads, with an even number for each head.",
    "model.make.heads": "",
    "model.make.context": "Longest prompt + completion in tokens.",
    "tasksets.NAME.reward": "A built-in name, `module:function`, or a list of these with weights, which are added up.",
    "tasksets.NAME.environment": "A built-in name or `module:Class`.",
    "evaluations.NAME.source": "As in a taskset.",
    "evaluations.NAME.columns": "As in a taskset.",
    "evaluations.NAME.reward": "As in a taskset.",
    "evaluations.NAME.sampling": "Differences from [sampling].",
    "evaluations.NAME.environment": "As in a taskset.",
    "evaluations.NAME.system": "System prompt put in front.",
    "evaluations.NAME.options": "The source's own.",
    "feeder.groups_per_batch": "Problems in a batch; each batch makes one version.",
    "feeder.group_size": "Rollouts of each problem.",
    "feeder.max_staleness": "Versions that may lie between what sampled a token and what is trained on it. 0: strictly "
    "in turn.",
    "feeder.on_stale": "`wait`: batches take groups in the order in which they were admitted, and wait for the next. "
    "`drop`: as they become ready; what is then too old expires.",
    "explorer.policy": "A built-in name or `module:Class`.",
    "verifier.count": "Processes that `run` starts; more can be started by hand at any time.",
    "verifier.max_concurrent": "Rollouts in hand in one process.",
    "verifier.tries": "Of one reward, before the rollout goes on without one.",
    "trainer.algorithm": "A built-in name or `module:Class`.",
    "trainer.backend": "A built-in name or `module:Class`.",
    "trainer.device": "`cpu`, `cuda:0`, ...",
    "trainer.lr": "Learning rate of AdamW.",
    "trainer.lr_schedule": "From lr, after the warm-up, to `min_lr_share` of it at `run.steps`; without `run.steps` "
    "each is constant.",
    "trainer.warmup_steps": "Versions over which the learning rate rises from 0 to lr.",
    "trainer.weight_decay": "AdamW's; of matrices, not of norms and biases.",
    "trainer.adam_betas": "AdamW's.",
    "trainer.adam_eps": "AdamW's.",
    "trainer.minibatches": "Optimizer steps in one pass over a batch; groups stay together.",
    "trainer.updates_per_batch": "Passes over a batch.",
    "evaluator.count": "1, or 0 to start it by hand.",
    "evaluator.device": "`cpu`, `cuda:0`, ...",
    "evaluator.max_concurrent": "Samples in flight.",
    "transport.kind": "A built-in name or `module:Class`.",
    "transport.partitions": "Of the topics that rollouts travel on: so many workers of a role can share them. Fixed "
    "for a run.",
    "transport.servers": "The embedded log has none.",
    "transport.options": "The transport's own.",
    "log.level": "Least level that is written.",
    "log.format": "`text` for people, `json` for machines.",
    "reasoning_gym.seed": "Other problems for each.",
    "arithmetic.operation": "",
    "arithmetic.terms": "Numbers in a problem.",
    "arithmetic.seed": "Another order for each.",
}
"""`section.key`, or `part.key` for a part's setting."""
