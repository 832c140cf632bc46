"""Models that `hf` samples slowly, for `check`. Nothing here loads torch before it is asked."""

from __future__ import annotations

from typing import Any


def doubt_about(model: Any) -> str | None:
    """Return why sampling from a model is slow; None if it is not. The model may have no weights."""
    from rftstream.policies.hf.opening import sampler_path

    path = sampler_path(type(model), model.config)
    if path is None or path.keeps_states:
        return None
    return (
        f"policy hf has no exact cache for {model.config.model_type}: each token takes a pass over its whole row; "
        "vllm samples it faster (docs/models.md)"
    )
