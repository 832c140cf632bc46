"""How `hf` opens a model. If that is exact (`models.exactness`), rows are packed over a cache of our own. A model that
keeps states is computed in plain batches over transformers' cache of its family, in slots as well. If neither is exact,
there is no cache, and each token takes a pass over its whole row."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import logging as transformers_logging

from rftstream.models import exactness
from rftstream.models.exactness import EAGER, SDPA, Probe
from rftstream.models.folders.folder import loading
from rftstream.models.folders.outlines import outline_of
from rftstream.models.folders.tiny_copy import names_window
from rftstream.models.routers import Routing
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.seeing import SeeingModel, model_class
from rftstream.policies.hf import attention, linear
from rftstream.policies.hf.cache import SlotCache
from rftstream.policies.hf.family_cache import Fixed
from rftstream.policies.hf.model import HfModel
from rftstream.policies.hf.packed import PackedRows
from rftstream.policies.hf.row import RowDecoder
from rftstream.weights.checkpoint_names import names_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerPath:
    """How a model is sampled from. `sampler_path` finds it."""

    attention: str
    """The name of the attention, for `attn_implementation`."""
    keeps_states: bool
    """Whether keys and values are kept, and states."""
    packs: bool = True
    """Whether rows are packed; else they are computed in plain batches of rows with equally many new tokens."""
    continues: bool = True
    """Whether several tokens may follow a state in one pass. Otherwise prompts of further turns are computed whole."""

    def trial(self, model: Any, probe: Probe) -> Iterator[tuple[Tensor, Tensor]]:
        """Compute a probe's rows in this way."""
        if not self.keeps_states:
            return exactness.alone(model, probe)
        return kept(model, probe, packs=self.packs, continues=self.continues)


def open_model(spec: ModelSpec, *, records_experts: bool = False) -> HfModel:
    """Load a model from its folder for exact computation. ConfigError if it is no decoder. `records_experts`: whether
    it says which experts tokens take."""
    torch.set_num_threads(spec.threads)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device, loader = torch.device(spec.device), model_class(spec.folder)
    with loading(spec):
        outline = outline_of(loader, spec.folder)
        path, names = sampler_path(type(outline), outline.config), names_of(outline, spec.folder)
        model = loader.from_pretrained(
            spec.folder,
            dtype=getattr(torch, spec.dtype),
            attn_implementation=EAGER if path is None else path.attention,
            use_safetensors=True,
        )
    model.to(device)
    model.eval()
    if device.type == "cpu" and linear.lacks(model.dtype):
        linear.widen(model)
    path = _confirmed(model, path)
    row = RowDecoder.of(model, spec.threads) if device.type == "cpu" and path.keeps_states else None
    seeing = SeeingModel.of(model, spec.folder)
    return HfModel(
        model,
        keeps_states=path.keeps_states,
        packs=path.packs,
        continues=path.continues,
        names=names,
        seeing=seeing,
        row=row,
        routing=Routing.of(model, where="trainer.routing") if records_experts else None,
    )


def _confirmed(model: Any, path: SamplerPath | None) -> SamplerPath:
    """Try a model with its own weights on its own device. Return how to sample from it: by this path, unless the trial
    shows that its results differ."""
    probe = exactness.of_model(model, exactness.LENGTHS if path is None else exactness.SHORT_LENGTHS)
    if probe is None:
        return path or SamplerPath(attention=EAGER, keeps_states=False)
    if path is None and not names_window(model.config):
        path = _find(type(model), model.config, probe)
    elif path is not None and not probe.holds(path.attention, path.trial):
        log.warning("%s: its weights give something else than eager attention", type(model).__name__)
        path = None
    if path is None:
        path = _without_cache(type(model), probe)
    if model.config._attn_implementation != path.attention:
        model.set_attn_implementation(path.attention)
    return path


def _find(kind: Any, config: Any, probe: Probe) -> SamplerPath:
    exactness.check_causal(probe, config)
    ours, own = attention.register()
    paths = [SamplerPath(attention=name, keeps_states=True) for name in (ours, own)]
    for continues in (True, False):
        paths += [
            SamplerPath(attention=name, keeps_states=True, packs=False, continues=continues) for name in (ours, EAGER)
        ]
    if not exactness.takes_other_attention(kind):
        paths = [path for path in paths if path.attention != ours]
    for path in paths:
        if probe.holds(path.attention, path.trial):
            return path
    return _without_cache(kind, probe)


sampler_path = exactness.once_per_kind(_find)
"""How a model of this class and config is sampled from."""


def _without_cache(kind: Any, probe: Probe) -> SamplerPath:
    name = SDPA if probe.holds(SDPA, exactness.alone) else EAGER
    log.warning(
        "%s: policy hf has no cache that is exact for this model, so each token takes a pass over its whole row, with "
        "transformers' %s attention; an engine of its own (explorer.policy = 'vllm' or 'openai') is faster",
        kind.__name__,
        name,
    )
    return SamplerPath(attention=name, keeps_states=False)


def kept(model: Any, probe: Probe, *, packs: bool, continues: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute all but the last tokens of each row as prompts, and the last ones over a cache: some rows with one token,
    as in decoding, and some with several, as in further turns. TypeError for plain batches without states."""
    hf = HfModel(model, keeps_states=True, packs=packs, continues=continues)
    ends_B = np.asarray([len(row_T) for row_T in probe.rows])
    has_several = continues & (np.arange(len(ends_B)) % 2 == 0)
    counts_B = np.where(has_several, np.maximum(ends_B // 4, 1), 1)
    starts_B = np.maximum(ends_B - 1 - counts_B, 1)
    counts_B = ends_B - 1 - starts_B
    block = hf.compute(
        tuple(tuple(row_T[:start].tolist()) for row_T, start in zip(probe.rows, starts_B, strict=True)), {}
    )
    for found_V, true_TV, start in zip(block.logits_UV, probe.true, starts_B, strict=True):
        yield found_V, true_TV[start - 1]
    if not packs and not (isinstance(block.states[-1], Fixed) and block.states[-1]):
        raise TypeError("the model keeps no states")
    cache = SlotCache(len(probe.rows), family=lambda: hf.family)
    slots_B = np.asarray(cache.put(block.states, range(len(starts_B)), starts_B.tolist()))
    while (counts_B > 0).all():
        rows = PackedRows(slots_B, starts_B, counts_B, hf.device)
        token_ids_N = np.concatenate(
            [probe.rows[row][starts_B[row] : starts_B[row] + counts_B[row]].cpu().numpy() for row in rows.order_B]
        )
        logits_BV = hf.compute_new(token_ids_N, rows.positions_N, rows, cache, {})
        starts_B = starts_B + counts_B
        for found_V, true_TV, start in zip(logits_BV, probe.true, starts_B, strict=True):
            yield found_V, true_TV[start - 1]
        counts_B = np.minimum(1, ends_B - starts_B)
