"""Which model a run trains: where its folder is, its dtype and its template. Engines and backends get this."""

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
    """Goes into announcements; weights of another model are refused."""
    folder: Path
    """An ordinary Hugging Face model folder."""
    dtype: str
    """Served dtype: bfloat16, float16 or float32."""
    context: int | None
    """Longest prompt + completion; None: what the model's config says."""
    device: str = "cpu"
    threads: int = 1
    """CPU threads that the process may use for array work."""
    chat_template: str | None = None
    """Text of a Jinja template that stands in for the model's own."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """What the template is given beside messages and tools."""
    lora: LoraSection | None = None
    """Versions are adapters for the weights in `folder`, which stay as they are."""
