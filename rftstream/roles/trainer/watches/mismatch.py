"""Says so when sampler and trainer disagree about the probabilities of tokens, and what the cause may be."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from rftstream.config.parts import registry
from rftstream.config.parts.part_names import server_update
from rftstream.config.parts.part_specs import PolicySpec
from rftstream.config.sections import RunConfig
from rftstream.contracts.batches import Experience
from rftstream.contracts.tasks import Sampling

log = logging.getLogger(__name__)


class MismatchWatch:
    """Warns at the first step above `trainer.warn_mismatch`, and again when the mismatch is twice that of the last
    warning. The trainer's UpdateCycle makes it and calls `look` once for each trained batch."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._warns_above = config.trainer.warn_mismatch

    def look(self, values: Mapping[str, float], batch: Sequence[Experience]) -> None:
        """Warn if need be. `values`: metrics of the step."""
        found = values.get("mismatch_k3", 0.0)
        if not self._warns_above or not found > self._warns_above:
            return
        log.warning(
            "mismatch_k3 is %.3g nats per token, expected at most %.3g (trainer.warn_mismatch): sampler and trainer "
            "disagree about the tokens' probabilities; %s",
            found,
            self._config.trainer.warn_mismatch,
            likely_cause(self._config, values, batch),
        )
        self._warns_above = max(2 * found, self._warns_above)


def likely_cause(config: RunConfig, values: Mapping[str, float], batch: Sequence[Experience]) -> str:
    """Return the likeliest cause: certain causes come first, then possible ones."""
    if config.run.imported_from is not None:
        return "the rollouts are another run's; of the algorithms topr and asymre are made for that"
    policy = config.explorer.policy
    if not registry.find_spec(PolicySpec, policy).takes_weights and server_update(config, policy) is None:
        return f"explorer.policy {policy!r} samples by the server's own weights, not by those that are trained"
    changed = sorted({name for experience in batch if not experience.expert for name in _inexact(experience.sampling)})
    if changed:
        names = ", ".join(f"sampling.{name}" for name in changed)
        return (
            f"{names} change the probabilities that are sampled from, which the trainer does not redo; switch them off"
        )
    if (staleness := values.get("staleness_mean", 0.0)) >= 1:
        return (
            f"the rollouts are {staleness:.2g} versions old on average, and the policy moves fast: lower trainer.lr or "
            "feeder.max_staleness"
        )
    return (
        f"nothing here is old or truncated, so the two compute otherwise: the sampler in model.dtype = "
        f"'{config.model.dtype}', the trainer in float32. Try model.dtype = 'float32', and another explorer.policy; an "
        "engine that loaded other weights or positions looks the same"
    )


def _inexact(sampling: Sampling) -> list[str]:
    """Settings with which the recorded logprobs are of another distribution than the trainer's (docs/algorithms.md)."""
    off = {
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
    }
    changed = [name for name, value in off.items() if getattr(sampling, name) != value]
    return [*changed, "temperature"] if sampling.temperature == 0 else changed
