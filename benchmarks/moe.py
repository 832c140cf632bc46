"""A small mixture of experts: what the backend torch trains and what `hf` samples of it, beside bare loops of
transformers; and the bytes of its deltas, beside those of a dense model that computes as much for each token.

32 experts of width 128 in each of 4 layers, 4 for a token; the dense model has one of width 512 in their place. The
bare trainer is that of `train`, the bare sampler (`generate` in equal batches) that of `hf`, both with transformers'
own products of experts. Each side of the trainer has steps in turn, and its best counts. One thread and its CPU time,
so that the figures do not depend on what else the machine does.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import hf, train
from benchmarks._exploring import CONCURRENT, MADE, explored, make_load
from benchmarks._training import best_steps, make_plan
from rftstream.algorithms.grpo import Grpo
from rftstream.backends.base import OptimizerSettings
from rftstream.backends.torch.backend import TorchBackend
from rftstream.config.sections import MakeModel
from rftstream.contracts.versions import VersionName, WeightsKind
from rftstream.models.folders.made import make_model
from rftstream.models.spec import ModelSpec
from rftstream.weights.publisher import WeightsPublisher
from rftstream.weights.stores.store import ObjectStore

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 512,
}
EXPERTS: dict[str, Any] = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
MIXTURE, DENSE = ("qwen3_moe", {**SIZES, **EXPERTS}), ("qwen3", SIZES)
REPEATS, CONTEXT = 3, 512
GRPO = Grpo(Grpo.Config(correction="none"))
PLAN = make_plan(train.LR, train.TOKENS_PER_MICROBATCH)


def run() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        mixture, dense = (make_sized_model(Path(folder) / family, family, sizes) for family, sizes in (MIXTURE, DENSE))
        rows = [_trained(mixture), _sampled(mixture, folder)]
        (ours, whole), (reference, dense_whole) = (_delta_bytes(spec) for spec in (mixture, dense))
    return [
        *rows,
        _row(f"moe: delta of a step, lr {train.LR:g}: bytes", "bytes", ours, reference, "of the dense model"),
        _row(
            f"moe: delta of a step, lr {train.LR:g}: times smaller than full",
            "x",
            whole / ours,
            dense_whole / reference,
            "of the dense model",
        ),
    ]


def _row(name: str, unit: str, ours: float, reference: float, which: str) -> dict[str, Any]:
    return {
        "name": name,
        "unit": unit,
        "ours": ours,
        "reference": reference,
        "reference_name": which,
        "ratio": ours / reference,
    }


def make_sized_model(folder: Path, family: str, sizes: Mapping[str, Any], context: int = CONTEXT) -> ModelSpec:
    """A made model's tokenizer and template, with weights of this family and size."""
    import torch
    import transformers

    make_model(MakeModel(characters=str(MADE["characters"]), context=context, width=32), folder, 0)
    made = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ids = {name: value for name, value in made.items() if name.endswith("token_id") or name == "vocab_size"}
    kinds: Any = transformers.CONFIG_MAPPING
    config = kinds[family](**sizes, **ids, max_position_embeddings=context)
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return ModelSpec(name=family, folder=folder, dtype="bfloat16", context=context, threads=1)


def _opened(spec: ModelSpec) -> TorchBackend:
    backend = TorchBackend(TorchBackend.Config(), model=spec, optimizer=OptimizerSettings(), seed=0)
    backend.open()
    return backend


def _trained(spec: ModelSpec) -> dict[str, Any]:
    """Tokens per second of the trainer beside a bare loop."""
    bare, backend = train.Bare(spec), _opened(spec)
    rows = train.make_rows(int(bare.head.shape[0]))
    steps: dict[str, Callable[[], float]] = {
        "ours": lambda: backend.update(rows, GRPO, PLAN).metrics["grad_norm"],
        "bare": lambda: bare.step(rows),
    }
    took_s, norms = best_steps(steps, REPEATS)
    assert abs(norms["ours"] / norms["bare"] - 1) < 1e-3, norms  # both did the same
    ours, reference = (sum(train.LENGTHS) / took_s[which] for which in ("ours", "bare"))
    return _row("moe: trainer, packed", "tokens/CPU s", ours, reference, "bare torch loop")


def _sampled(spec: ModelSpec, folder: str) -> dict[str, Any]:
    """Tokens per second of the sampler beside `generate`."""
    load = make_load({"path": str(spec.folder)}, 1, folder, "hf")
    took_s, _ = explored(load, Path(folder) / "run", time.process_time)
    ours = sum(load.lengths[1:]) / took_s
    reference = sum(load.lengths) / hf.generate(load, spec.folder, time.process_time)
    return _row(f"moe: hf, {CONCURRENT} at once", "tokens/CPU s", ours, reference, "generate of transformers")


def _delta_bytes(spec: ModelSpec) -> tuple[float, float]:
    """Bytes of the version after one step, and of a full one."""
    backend = _opened(spec)
    rows = train.make_rows(int(json.loads((spec.folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]))
    store = ObjectStore("file://weights", base=spec.folder)
    publisher = WeightsPublisher(store, spec.name, spec.dtype, anchor_every=9)
    full = publisher.publish(backend.served_tensors(), VersionName(trainer_epoch=1, version=0), resumed=True)
    backend.update(rows, GRPO, PLAN)
    delta = publisher.publish(backend.served_tensors(), VersionName(trainer_epoch=1, version=1))
    assert delta.kind is WeightsKind.delta
    return float(delta.num_bytes), float(full.num_bytes)
