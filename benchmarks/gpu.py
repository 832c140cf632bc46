"""What a GPU trains and samples, beside a bare torch loop and bare vLLM, and what the whole loop does with both in
turns on it. Without a GPU there are no rows.

Two models with random weights and the vocabulary of made ones, so that heads cost nearly nothing: one of Qwen3-0.6B's
sizes, trained as a whole, and a mixture with the layers of OLMoE-1B-7B, four of its 16, of which adapters are trained.
The bare trainer is that of `train`, in bfloat16 by autocast (of the mixture it trains the whole, which costs more);
bare vLLM is that of `vllm`. Each side of the trainer has steps in turn, and its best counts. Both engines were loaded
and have answered one prompt before time is taken.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import moe, train, vllm
from benchmarks._exploring import explore, make_load
from benchmarks._training import best_steps, make_plan
from rftstream.algorithms.grpo import Grpo
from rftstream.backends.base import OptimizerSettings
from rftstream.backends.torch.backend import TorchBackend
from rftstream.config import loader
from rftstream.config.sections import LoraSection
from rftstream.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A model, and how much of everything is measured with it."""

    family: str
    config: Mapping[str, Any]
    lora: LoraSection | None = None
    lengths: tuple[int, ...] = tuple(range(256, 2049, 128)) * 4
    """Of the rows that are trained."""
    tokens_per_microbatch: int = 16384
    concurrent: int = 256
    groups: int = 64
    tokens: int = 1024
    """Of a completion, at most."""
    steps: int = 6
    """Of the loop. The first two do not count: engines start and compile."""
    engine: Mapping[str, Any] = field(default_factory=lambda: {"gpu_memory_utilization": 0.5})


MODELS = {
    "Qwen3-0.6B's sizes": Sizes(
        family="qwen3",
        config={
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "tie_word_embeddings": True,
        },
    ),
    "four layers of OLMoE-1B-7B, LoRA": Sizes(
        family="olmoe",
        config={
            "hidden_size": 2048,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        lora=LoraSection(rank=16),
    ),
}
CONTEXT = 4096


def run() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    gpu = torch.cuda.get_device_name(0)
    return [row for name, sizes in MODELS.items() for row in measure(f"{gpu}, {name}", sizes, "cuda:0")]


def measure(name: str, sizes: Sizes, device: str) -> list[dict[str, Any]]:
    """Measure one model on a device."""
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        made = Path(folder) / "made"
        moe.make_sized_model(made, sizes.family, sizes.config, CONTEXT)
        rows = [_trained(name, sizes, made, device)]
        if importlib.util.find_spec("vllm") is not None and device != "cpu":
            rows.append(_sampled(name, sizes, made, device, folder))
            rows.append(_loop(name, sizes, made, device, folder, rows))
        return rows


def _trained(name: str, sizes: Sizes, made: Path, device: str) -> dict[str, Any]:
    """Tokens per second of the trainer beside a bare loop."""
    spec = ModelSpec(name=name, folder=made, dtype="bfloat16", context=None, device=device, lora=sizes.lora)
    plan = make_plan(train.LR, sizes.tokens_per_microbatch)
    backend = TorchBackend(TorchBackend.Config(), model=spec, optimizer=OptimizerSettings(), seed=0)
    backend.open()
    bare = train.Bare(spec, sizes.tokens_per_microbatch)
    rows = train.make_rows(int(bare.head.shape[0]), sizes.lengths)
    grpo = Grpo(Grpo.Config(correction="none"))
    steps: dict[str, Callable[[], float]] = {
        "ours": lambda: backend.update(rows, grpo, plan).metrics["grad_norm"],
        "bare": lambda: bare.step(rows),
    }
    # A step returns a number of the device, so it has ended.
    took_s, _ = best_steps(steps, 1 + train.REPEATS, time.perf_counter)
    ours, reference = (sum(sizes.lengths) / took_s[which] for which in ("ours", "bare"))
    return _row(f"gpu: {name}: trainer, packed", ours, reference, "bare torch loop")


def _sampled(name: str, sizes: Sizes, made: Path, device: str, folder: str) -> dict[str, Any]:
    """Tokens per second of the explorer with vLLM beside `LLM.generate`."""
    load = make_load(
        {"path": str(made)},
        1,
        folder,
        "vllm",
        device=device,
        groups=sizes.groups,
        concurrent=sizes.concurrent,
        most_tokens=sizes.tokens,
        engine=dict(sizes.engine),
    )
    num_tokens = sum(load.lengths[1:])
    ours = num_tokens / explore(load, Path(folder) / "sampled")
    reference = num_tokens / vllm.generate(load, Path(folder) / "model", sizes.concurrent, sizes.engine)
    return _row(f"gpu: {name}: vllm, {sizes.concurrent} at once", ours, reference, "LLM.generate of vLLM")


def _loop(name: str, sizes: Sizes, made: Path, device: str, folder: str, alone: list[dict[str, Any]]) -> dict[str, Any]:
    """Trained tokens per second of a whole run, beside what training and sampling by themselves would make in turns."""
    import rftstream

    config = loader.from_dict(
        {
            "run": {"name": "loop", "steps": sizes.steps},
            "model": {
                "path": str(made),
                **({} if sizes.lora is None else {"lora": {"rank": sizes.lora.rank}}),
            },
            "tasksets": {"sums": {"source": "arithmetic", "reward": "exact"}},
            "sampling": {"max_tokens": sizes.tokens},
            "feeder": {"groups_per_batch": sizes.groups, "group_size": 8, "max_staleness": 1},
            "explorer": {"policy": "vllm", "devices": [device], "max_concurrent": sizes.concurrent},
            "policies": {"vllm": {"batch_size": sizes.concurrent, "engine": dict(sizes.engine)}},
            "trainer": {
                "device": device,
                "colocate": True,
                "lr": train.LR,
                "tokens_per_microbatch": sizes.tokens_per_microbatch,
            },
            "base": folder,
        }
    )
    result = rftstream.run(config, run_dir=Path(folder) / "loop", progress="none")
    steps = [one.metrics["tokens_per_s"] for one in rftstream.open(result.run_dir).steps()]
    ours = statistics.median(steps[2:])
    reference = 1 / sum(1 / row["ours"] for row in alone)
    return _row(f"gpu: {name}: the whole loop in turns", ours, reference, "trainer and vllm alone, in turns")


def _row(name: str, ours: float, reference: float, which: str) -> dict[str, Any]:
    return {
        "name": name,
        "unit": "tokens/s",
        "ours": ours,
        "reference": reference,
        "reference_name": which,
        "ratio": ours / reference,
    }
