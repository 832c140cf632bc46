"""How the trainer computes a model: the attention, and whether rows are packed. It takes the fastest way among the
exact ones (`models.exactness`)."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rftstream.backends.torch import attention
from rftstream.core.packing import grow
from rftstream.models import exactness
from rftstream.models.exactness import EAGER, SDPA, Probe
from rftstream.models.folders.outlines import outline_of
from rftstream.models.folders.tiny_copy import names_window

log = logging.getLogger(__name__)


class Rows(enum.Enum):
    """How the rows of a micro-batch are put together. If one way is exact, so are those below it."""

    PACKED = enum.auto()
    PADDED = enum.auto()
    ALONE = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPath:
    """How a model is computed. `trainer_path` finds it."""

    attention: str
    """The name of the attention, for `attn_implementation`."""
    rows: Rows
    """PACKED: concatenated into one sequence. PADDED: side by side. ALONE: each by itself."""
    has_plain_head: bool
    """Whether logits are one matrix product of the states. Other models apply soft caps or scales."""
    shares: bool = False
    """Whether packed rows may be trees, which hold tokens that rows begin with once."""


_SAFE = TrainerPath(attention=EAGER, rows=Rows.ALONE, has_plain_head=False)
"""How a model is computed if nothing else is known about it."""


def load(
    loader: Any, folder: Path, device: torch.device, *, part: Callable[[Any], Any] = exactness.whole, **settings: Any
) -> Any:
    """Load a model in float32 and without dropout, as `loader.from_pretrained` does with these settings, with an exact
    attention; afterwards `path_of` returns how the model is computed.

    `part`: returns the part of a loaded model that is computed. ConfigError if that part is no decoder."""
    outline = part(outline_of(loader, folder))
    path = trainer_path(type(outline), outline.config)
    found = loader.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation=EAGER if path is None else path.attention,
        use_safetensors=True,
        **settings,
    )
    model = found[0] if isinstance(found, tuple) else found
    model.to(device).eval()  # samplers have no dropout, so the ratio must not see any either
    _confirm(part(model), path)
    return found


def path_of(model: Any) -> TrainerPath:
    """Return how a model that `load` returned is computed."""
    path: TrainerPath = model.rftstream_path
    return path


def _confirm(model: Any, path: TrainerPath | None) -> None:
    """Try a model with its own weights on its own device, and record how it is computed: by this path, unless the trial
    shows that its results differ."""
    name = type(model).__name__
    probe = exactness.of_model(model, exactness.LENGTHS if path is None else exactness.SHORT_LENGTHS)
    if probe is not None and path is None and not names_window(model.config):
        path = _find(type(model), model.config, probe)
    elif probe is not None and path is not None:
        exactness.check_causal(probe, model.config)
        path = replace(path, shares=path.shares and probe.holds(path.attention, trees))
        if not path.shares and not probe.holds(
            path.attention, {Rows.PACKED: packed, Rows.PADDED: exactness.padded}.get(path.rows, exactness.alone)
        ):
            log.warning("%s: its weights give something else than eager attention", name)
            path = None
    if path is None:
        log.warning("%s: it is computed by transformers' eager attention, each row by itself", name)
        path = _SAFE
    if model.config._attn_implementation != path.attention:
        model.set_attn_implementation(path.attention)
    model.rftstream_path = path


def _find(kind: Any, config: Any, probe: Probe) -> TrainerPath:
    exactness.check_causal(probe, config)
    has_plain_head = probe.holds(EAGER, exactness.of_head)
    ours = attention.register() if exactness.takes_other_attention(kind) else None
    for name in (ours, SDPA, EAGER):
        if name is None or not probe.holds(name, exactness.padded):
            continue
        rows = Rows.PACKED if name == ours and probe.holds(name, packed) else Rows.PADDED
        if rows is not Rows.PACKED:
            log.warning(
                "%s: packed rows would not give what each gives by itself, so they are padded, with %s attention",
                kind.__name__,
                "our" if name == ours else f"transformers' {name}",
            )
        shares = rows is Rows.PACKED and probe.holds(name, trees)
        if rows is Rows.PACKED and not shares:
            log.warning("%s: what rows begin with alike is computed for each row: trees would differ", kind.__name__)
        return TrainerPath(attention=name, rows=rows, has_plain_head=has_plain_head, shares=shares)
    log.warning("%s: what a row gives depends on those beside it, so each is computed by itself", kind.__name__)
    return TrainerPath(attention=EAGER, rows=Rows.ALONE, has_plain_head=has_plain_head)


trainer_path = exactness.once_per_kind(_find)
"""How a model of this class and config is computed."""


def doubt_about(model: Any) -> str | None:
    """Return why a model is trained slowly, for `check`; None if it is not. The model may have no weights."""
    path = trainer_path(type(model), model.config)
    if path is None or path.shares:
        return None
    ways = {Rows.PACKED: "packed", Rows.PADDED: "padded", Rows.ALONE: "computed one by one"}
    return (
        f"the trainer shares no prompt among rows of {model.config.model_type}, since that would not be exact: they "
        f"are {ways[path.rows]} (docs/models.md)"
    )


def packed(model: Any, probe: Probe) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute the rows concatenated into one sequence."""
    lengths = [len(row_T) for row_T in probe.rows]
    position_ids = torch.cat([torch.arange(length, device=model.device) for length in lengths])[None]
    inputs = {"input_ids": torch.cat(probe.rows)[None], **packed_inputs(position_ids, lengths)}
    yield from zip(exactness.logits(model, **inputs)[0].split(lengths), probe.true, strict=True)  # type: ignore[no-untyped-call]


def trees(model: Any, probe: Probe) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute the rows as trees."""
    forest = grow([row_T.numpy(force=True)[:, None] for row_T in probe.rows], least=1)
    token_ids_P = torch.cat([probe.rows[row][start:stop] for row, start, stop in forest.pieces()])
    position_ids = torch.from_numpy(forest.positions()).to(model.device)[None]
    more = packed_inputs(position_ids, forest.lengths_S.tolist(), forest.parents_S.tolist())
    found_PV = exactness.logits(model, input_ids=token_ids_P[None], **more)[0]
    for nodes_T, true_TV in zip(forest.nodes(), probe.true, strict=True):
        yield found_PV[torch.from_numpy(nodes_T).to(found_PV.device)], true_TV


def packed_inputs(
    position_ids: Tensor, lengths: Sequence[int], parents: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """Return the model's arguments for packed rows, besides their tokens. lengths, parents: as in `Inputs`; without
    parents each run is a row."""
    return {"position_ids": position_ids, "attention_mask": attention.run_lengths(lengths, parents)}
