"""Models that `hf` samples slowly, for `check`. Nothing here loads torch before it is asked."""

from __future__ import annotations

from typing import Any


def doubt_about(model: Any) -> str | None:
    """Return why sampling from a model is slow; None if it is not. The model may have no weights."""
    from rftstream.policies.hf.opening import sampler_path

    path = sampler_path(type(model), model.config)
    if path is None or (path.keeps_states and path.packs):
        return None
    family = model.config.model_type
    if not path.keeps_states:
        found = f"policy hf has no exact cache for {family}: each token takes a pass over its whole row"
    else:
        found = (
            f"policy hf computes {family} in plain batches, since it keeps states: prompts of each length take a pass"
        )
        if not path.continues:
            found += ", and each further turn is computed from its beginning"
    return f"{found}; vllm samples it faster (docs/models.md)"
