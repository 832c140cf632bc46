"""What a run needs whose operators make demonstrations of attempts."""

from __future__ import annotations

from collections.abc import Collection

from rftstream.config.sections import RunConfig
from rftstream.config.stages import Stages, taken_kinds
from rftstream.contracts.batches import LossKind
from rftstream.contracts.outcomes import ReuseKind
from rftstream.data.operators.base import ReuseLimits
from rftstream.errors import ConfigError


def makes_demonstrations(reusing: Collection[ReuseLimits]) -> bool:
    """Return whether any of these limits is about demonstrations."""
    return any(limits.kind is ReuseKind.hindsight for limits in reusing)


def check_demonstrating(config: RunConfig, reusing: Collection[ReuseLimits]) -> None:
    """Check that the run can learn from what operators offer. ConfigError if not."""
    if not makes_demonstrations(reusing):
        return
    stages = Stages.of(config)
    if stages.named:
        takes = any(stage.takes_rollouts and stage.kind is LossKind.sft for stage in stages.all)
    else:
        takes = {LossKind.rl, LossKind.sft} <= taken_kinds(config)
    if not takes:
        raise ConfigError(
            "pipeline: found an operator that makes demonstrations of attempts, as hindsight does, and no algorithm "
            "that learns from rollouts and demonstrations; expected trainer.algorithm = 'mix' or 'chord', or a stage "
            "with one"
        )
    if config.buffer.zero_variance == "replace":
        raise ConfigError(
            "buffer.zero_variance: found 'replace', which leaves out groups before operators such as hindsight are "
            'asked about them; expected op = "zero_variance" behind it in the pipeline'
        )
