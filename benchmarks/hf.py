"""What the explorer samples with `hf`, beside `generate` of transformers on the same prompts, in equal batches.

`generate` takes as many prompts at a time as the explorer has places, in the order of the tasks, and samples from the
model's distribution without its stop token. The explorer computes logprobs and stamps, `generate` tokens alone.
Loading is not counted.

The last long row of a group is sampled alone. What a token of it costs stands beside a bare read of the weights, in CPU
time with one thread, in turns.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._exploring import CONCURRENT, MAX_TOKENS, Load, choose_model, explore, make_load, weights
from rftstream.clock import SystemClock
from rftstream.contracts.tasks import Sampling
from rftstream.contracts.versions import VersionName
from rftstream.models.folders.folder import prepare_model
from rftstream.models.rendering import open_renderer
from rftstream.policies.base import SampleRequest
from rftstream.policies.hf.policy import HfPolicy

ROW_TOKENS, ROW_PROMPT = 60, 200
"""Tokens of a row that is sampled alone, and of its prompt."""


def run() -> list[dict[str, Any]]:
    rows = []
    model, name = choose_model()
    for threads in sorted({1, os.cpu_count() or 1}):
        with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
            load = make_load(model, threads, folder, "hf")
            ours = sum(load.lengths[1:]) / explore(load, Path(folder) / "run")
            reference = sum(load.lengths) / generate(load, Path(folder) / "model")
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
    rows.append(_row_alone(model, name))
    return rows


def _row_alone(model: dict[str, Any], name: str) -> dict[str, Any]:
    """Tokens of one row, and reads of all weights, for a CPU second."""
    import torch

    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        run = make_load(model, 1, folder, "hf").run
        spec = replace(prepare_model(run.model, Path(folder) / "model", run.run.seed), threads=1)
        policy = HfPolicy(HfPolicy.Config(), model=spec, renderer=open_renderer(spec), clock=SystemClock())
        policy.load(weights(spec), VersionName(trainer_epoch=1, version=0))
        parameters = [parameter.detach().view(-1) for parameter in policy._model.parameters.values()]
        sampling = Sampling(min_tokens=ROW_TOKENS, max_tokens=ROW_TOKENS)
        prompt = tuple(1 + number % 16 for number in range(ROW_PROMPT))
        policy.submit(
            SampleRequest(request_id="row", token_ids=prompt, sampling=sampling, seed=0, max_tokens=ROW_TOKENS)
        )
        policy.step()
        ours_s, reference_s = [], []
        while policy.num_active:
            ours_s.append(_cpu_s(policy.step))
            reference_s.append(_cpu_s(lambda: [part.view(torch.int16).max() for part in parameters]))
        policy.close()
    ours, reference = (1 / statistics.median(seconds) for seconds in (ours_s, reference_s))
    return {
        "name": f"hf: {name}, 1 thread, one row alone",
        "unit": "tokens/CPU s",
        "ours": ours,
        "reference": reference,
        "reference_name": "reads of all weights",
        "ratio": ours / reference,
    }


def _cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def generate(load: Load, made: Path, now: Callable[[], float] = time.perf_counter) -> float:
    """Seconds for all prompts, batch after batch, each until its longest row is done. `now`: time.process_time for CPU
    seconds."""
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
    began = now()
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
    took_s = now() - began
    assert num_sampled == sum(load.lengths)
    return took_s
