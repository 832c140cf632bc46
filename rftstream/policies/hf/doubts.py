"""Models that `hf` samples slowly, for `check`. Nothing here loads torch before it is asked."""

from __future__ import annotations

from rftstream.models.spec import ModelSpec


def doubt_about(model: ModelSpec) -> str | None:
    """Return why sampling from a model is slow; None if it is not. No weights are loaded."""
    from rftstream.models.exactness import outline
    from rftstream.policies.hf.opening import sampler_path

    shell = outline(model)
    path = sampler_path(type(shell), shell.config)
    if path is None or path.keeps_states:
        return None
    return (
        f"policy hf has no exact cache for {shell.config.model_type}: each token takes a pass over its whole row; "
        "vllm samples it faster (docs/models.md)"
    )
