"""What the explorer samples with `vllm`, beside `LLM.generate` of vLLM on the same prompts, with the same settings of
the engine and of sampling, seeds and logprobs among them.

`generate` gets all prompts at once, as the explorer finds all tasks on its log. The explorer writes rollouts, stamps
included. Both engines were loaded and have answered one prompt before time is taken. Needs vllm; without it there are
no rows.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks._exploring import CONCURRENT, Load, choose_model, explore, make_load
from rftstream.models.folders.folder import prepare_model
from rftstream.models.rendering import open_renderer

ENGINE = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
"""Compiling takes longer than measuring."""


def run() -> list[dict[str, Any]]:
    if importlib.util.find_spec("vllm") is None:
        return []
    model, name = choose_model()
    threads = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        load = make_load(model, threads, folder, "vllm", engine=ENGINE)
        num_tokens = sum(load.lengths[1:])
        ours = num_tokens / explore(load, Path(folder) / "run")
        reference = num_tokens / generate(load, Path(folder) / "model")
    return [
        {
            "name": f"vllm: {name}, {threads} threads, {CONCURRENT} at once",
            "unit": "tokens/s",
            "ours": ours,
            "reference": reference,
            "reference_name": "LLM.generate of vLLM",
            "ratio": ours / reference,
        }
    ]


def generate(
    load: Load, made: Path, concurrent: int = CONCURRENT, engine: Mapping[str, Any] = MappingProxyType(ENGINE)
) -> float:
    """Seconds for all prompts but the first. The environment is the one that the policy made for its engine."""
    from vllm import LLM, SamplingParams

    spec = prepare_model(load.run.model, made, load.run.run.seed)
    renderer = open_renderer(spec)
    llm: Any = LLM(
        model=str(spec.folder),
        dtype=spec.dtype,
        max_model_len=renderer.context,
        max_num_seqs=concurrent,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        **engine,
    )
    stops = sorted(renderer.stop_token_ids)
    settings = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            min_tokens=length,
            max_tokens=length,
            stop_token_ids=stops,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )
        for seed, length in enumerate(load.lengths)
    ]
    prompts: list[Any] = [{"prompt_token_ids": list(one)} for one in load.prompts]
    llm.generate(prompts[:1], settings[:1], use_tqdm=False)
    began = time.perf_counter()
    done = llm.generate(prompts[1:], settings[1:], use_tqdm=False)
    took_s = time.perf_counter() - began
    assert sum(len(one.outputs[0].logprobs) for one in done) == sum(load.lengths[1:])
    llm.llm_engine.engine_core.shutdown()
    return took_s
