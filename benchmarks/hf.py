"""What the explorer samples with `hf`, beside `generate` of transformers on the same prompts, in equal batches.

`generate` takes as many prompts at a time as the explorer has places, in the order of the tasks, and samples from the
model's distribution without its stop token. The explorer computes logprobs and stamps, `generate` tokens alone.
Loading is not counted.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._exploring import CONCURRENT, MAX_TOKENS, Load, choose_model, explore, make_load
from rftstream.models.folder import prepare_model
from rftstream.models.rendering import open_renderer


def run() -> list[dict[str, Any]]:
    rows = []
    model, name = choose_model()
    for threads in sorted({1, os.cpu_count() or 1}):
        with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
            load = make_load(model, threads, folder, "hf")
            ours = sum(load.lengths[1:]) / explore(load, Path(folder) / "run")
            reference = sum(load.lengths) / _generate(load, Path(folder) / "model")
        rows.append(
            {
                "name": f"hf: {name}, {threads} thread{'s' * (threads > 1)}, {CONCURRENT} at once",
                "unit": "tokens/s",
                "ours": ours,
                "reference": reference,
                "reference_name": "generate of transformers",
                "ratio": ours / reference,
            }
        )
    return rows


def _generate(load: Load, made: Path) -> float:
    """Seconds for all prompts, batch after batch, each until its longest row is done."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    spec = prepare_model(load.run.model, made, load.run.run.seed)
    torch.set_num_threads(load.run.explorer.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(spec.folder, dtype=torch.bfloat16)
    model.eval()
    stops = sorted(open_renderer(spec).stop_token_ids)
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_TOKENS,
        pad_token_id=stops[0],
        suppress_tokens=stops,
    )
    num_sampled = 0
    began = time.perf_counter()
    for start in range(0, len(load.prompts), CONCURRENT):
        prompts, lengths = load.prompts[start : start + CONCURRENT], load.lengths[start : start + CONCURRENT]
        longest = max(map(len, prompts))
        rows = [[stops[0]] * (longest - len(one)) + list(one) for one in prompts]
        mask = [[0] * (longest - len(one)) + [1] * len(one) for one in prompts]
        ends = longest + torch.tensor(lengths)
        tokens = model.generate(
            input_ids=torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            generation_config=settings,
            stopping_criteria=[lambda ids, scores, ends=ends: ids.shape[1] >= ends],
        )
        num_sampled += sum(min(tokens.shape[1] - longest, length) for length in lengths)
        assert tokens.shape[1] == longest + max(lengths)
    took_s = time.perf_counter() - began
    assert num_sampled == sum(load.lengths)
    return took_s
