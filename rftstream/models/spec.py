"""The description of the model that a run trains, for engines and backends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rftstream.config.sections import LoraSection


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Where a model is and how it is used. `prepare_model` makes it; engines and backends read it."""

    name: str
    """Name of the model in announcements; weights of another model are refused."""
    folder: Path
    """An ordinary Hugging Face model folder."""
    dtype: str
    """Dtype in which weights are served: bfloat16, float16 or float32."""
    context: int | None
    """Largest number of tokens of prompt and completion together; None for the limit in the model's config."""
    device: str = "cpu"
    """Where the model is computed: cpu, cuda, cuda:0 or the like."""
    threads: int = 1
    """CPU threads that the process may use for array work."""
    chat_template: str | None = None
    """Text of a Jinja template that replaces the model's own."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Values that the template gets beside messages and tools, by name."""
    as_classifier: bool = False
    """Whether the run trains a sequence classifier with one output, initialised from the model in `folder`."""
    replays_experts: bool = False
    """Whether the trainer forces the experts of a mixture that the sampler recorded."""
    quantize: str | None = None
    """nf4: the model in `folder` is rounded so that a trainer can hold its linear layers in four bits."""
    lora: LoraSection | None = None
    """Settings of the adapters that versions consist of; the weights in `folder` stay unchanged. None if all weights
    are trained."""
