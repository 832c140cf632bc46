"""What the backend torch trains, beside a bare torch loop: the same rows, forward, loss, backward and optimizer step.

SmolLM2-135M (a made model of its depth and width where it is not installed) in float32, rows of 64 to 512 tokens. The
bare loop pads rows of like lengths together, as the backend does without packing, and takes logits of the trained
tokens alone; it computes no entropy and no metrics. TRL's GRPOTrainer gets the same rows, prompts of 32 tokens and
completions of the rest, 2 at once, which is at most as many tokens as the others have at once. It pads all rows of a
batch to the longest one, takes on a CPU every position through its head, and computes entropy and metrics, as the
backend does. All begin with the same weights, and their first gradients agree. Each side has steps in turn, and its
best counts, in tokens of the rows, without padding. Memory: the peak of a step above what is held between steps. Then
rows that begin alike (_prefixes.py), the head alone, in chunks, beside all logits at once, and the attention over
packed rows alone. Without trl its rows are left out.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from benchmarks._exploring import choose_model
from benchmarks._packed_attention import LONG_ROWS, SHORT_ROWS, times
from benchmarks._prefixes import measure
from benchmarks._training import make_plan
from benchmarks._trl import TrlStep, installed
from rftstream.algorithms.base import TrainingRow
from rftstream.algorithms.grpo import Grpo
from rftstream.backends.base import OptimizerSettings
from rftstream.backends.torch.backend import TorchBackend
from rftstream.config import loader
from rftstream.core.logprobs import token_logprobs
from rftstream.core.packing import pad_rows, split_microbatches
from rftstream.models.folders.folder import prepare_model
from rftstream.models.spec import ModelSpec

LENGTHS = tuple(range(64, 513, 64))
NUM_PROMPT = 32
TOKENS_PER_MICROBATCH = 1024
REPEATS = 2
LR = 1e-6
TRL = "TRL's GRPOTrainer"
HEAD_TOKENS, HEAD_CHUNK_BYTES = 2048, 64 << 20


def run() -> list[dict[str, Any]]:
    model, name = choose_model()
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        run_ = loader.from_dict(
            {
                "run": {"name": "train", "steps": 1},
                "model": model,
                "tasksets": {"sums": {"source": "arithmetic"}},
                "base": folder,
            }
        )
        spec = prepare_model(run_.model, Path(folder) / "model", 0, threads=threads)
        seconds, peaks, vocabulary, width = _steps(spec, folder)
        total = sum(LENGTHS)
        label = f"train: {name}, {threads} thread{'s' * (threads > 1)}"
        speeds = {which: total / took_s for which, took_s in seconds.items()}
        padded, packed, bare = (speeds[which] for which in ("padded", "packed", "bare"))
        return [
            _row(f"{label}, padded", "tokens/s", padded, bare, "bare torch loop", padded / bare),
            _row(f"{label}, packed", "tokens/s", packed, bare, "bare torch loop", packed / bare),
            _row(f"{label}, packed", "tokens/s", packed, padded, "padded", packed / padded),
            _row(
                f"{label}, packed: peak of a step",
                "MB",
                peaks["packed"],
                peaks["bare"],
                "bare torch loop",
                peaks["bare"] / peaks["packed"],
            ),
            *(
                [
                    _row(f"{label}, packed", "tokens/s", packed, speeds["trl"], TRL, packed / speeds["trl"]),
                    _row(
                        f"{label}, packed: peak of a step",
                        "MB",
                        peaks["packed"],
                        peaks["trl"],
                        TRL,
                        peaks["trl"] / peaks["packed"],
                    ),
                ]
                if "trl" in speeds
                else []
            ),
            *(
                _row(f"{label}, {shape}", "tokens/CPU s", ours, other, which, ours / other)
                for shape, which, ours, other in measure(spec, folder, vocabulary)
            ),
            *_head(width, vocabulary),
            *_attention(),
        ]


def _row(name: str, unit: str, ours: float, reference: float, which: str, ratio: float) -> dict[str, Any]:
    return {"name": name, "unit": unit, "ours": ours, "reference": reference, "reference_name": which, "ratio": ratio}


def _steps(spec: ModelSpec, folder: str) -> tuple[dict[str, float], dict[str, float], int, int]:
    """Seconds and megabytes of each side, and the sizes of the head."""
    plan = make_plan(LR, TOKENS_PER_MICROBATCH)
    grpo = Grpo(Grpo.Config(correction="none"))
    sides: dict[str, Callable[[], float]] = {}
    bare = Bare(spec)
    vocabulary, width = bare.head.shape
    rows = make_rows(vocabulary)
    sides["bare"] = lambda: bare.step(rows)
    for which in ("padded", "packed"):
        backend = TorchBackend(
            TorchBackend.Config(packing=which == "packed"), model=spec, optimizer=OptimizerSettings(), seed=0
        )
        backend.open()
        sides[which] = lambda backend=backend: backend.update(rows, grpo, plan).metrics["grad_norm"]  # type: ignore[misc]
    if installed():
        at_once = TOKENS_PER_MICROBATCH // max(LENGTHS)
        sides["trl"] = TrlStep(spec, rows, rows_at_once=at_once, lr=LR, folder=folder).step
    seconds: dict[str, list[float]] = {which: [] for which in sides}
    peaks: dict[str, list[float]] = {which: [] for which in sides}
    norms: dict[str, float] = {}
    for _ in range(REPEATS):
        for which, step in sides.items():
            took_s, peak, norm = _measured(step)
            seconds[which].append(took_s)
            peaks[which].append(peak)
            norms.setdefault(which, norm)
    # all did the same: the first gradients agree
    assert all(abs(norm / norms["bare"] - 1) < 1e-3 for norm in norms.values()), norms
    return (
        {which: min(found) for which, found in seconds.items()},
        {which: min(found[1:]) for which, found in peaks.items()},
        vocabulary,
        width,
    )


def make_rows(vocabulary: int, lengths: Sequence[int] = LENGTHS) -> list[TrainingRow]:
    chance = np.random.default_rng(0)
    rows = []
    for number, length in enumerate(chance.permutation(lengths).tolist()):
        mask = np.ones(length, np.float32)
        mask[:NUM_PROMPT] = 0
        rows.append(
            TrainingRow(
                token_ids=chance.integers(0, vocabulary, length).astype(np.int32),
                loss_mask=mask,
                behavior_logprobs=-3 * mask,
                advantages=mask if number % 2 else -mask,
                group=number // 2,
            )
        )
    return rows


class Bare:
    """As one would write it without rftstream; on GPUs with autocast to bfloat16."""

    def __init__(self, spec: ModelSpec, tokens_per_microbatch: int = TOKENS_PER_MICROBATCH) -> None:
        from transformers import AutoModelForCausalLM, logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        torch.set_num_threads(spec.threads)
        loader: Any = AutoModelForCausalLM
        self._model = loader.from_pretrained(spec.folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        self._model.to(spec.device)
        self._device, self._tokens = torch.device(spec.device), tokens_per_microbatch
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.head: Tensor = self._model.get_output_embeddings().weight

    def step(self, rows: Sequence[TrainingRow]) -> float:
        num_tokens = sum(float(row.loss_mask.sum()) for row in rows)
        lengths = np.asarray([len(row.token_ids) for row in rows])
        for numbers in split_microbatches(lengths, self._tokens, packed=False):
            chosen = [rows[number] for number in numbers]
            ids, mask, advantages = (
                torch.from_numpy(pad_rows([getattr(row, name) for row in chosen])).to(self._device)
                for name in ("token_ids", "loss_mask", "advantages")
            )
            trained = mask[:, 1:] > 0
            with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._device.type == "cuda"):
                hidden = self._model.model(input_ids=ids[:, :-1].long(), use_cache=False).last_hidden_state[trained]
                logits = self._model.lm_head(hidden)
            targets = ids[:, 1:][trained].long()
            logprobs = torch.log_softmax(logits.float(), dim=-1).gather(1, targets[:, None])[:, 0]
            ratios = (logprobs - logprobs.detach()).exp()
            loss = -(ratios * advantages[:, 1:][trained]).sum() / num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm


def _attention() -> list[dict[str, Any]]:
    """The attention over packed rows as the backend computes it, beside other ways."""
    rows = []
    for which, lengths in (("short", SHORT_ROWS), ("long", LONG_ROWS)):
        found = times(lengths)
        name = f"train: attention of {len(lengths)} {which} rows packed, {min(lengths)} to {max(lengths)} tokens"
        rows += [
            _row(name, "s", found["used"], found[other], label, found[other] / found["used"])
            for other, label in (("by row", "a call for each row"), ("padded", "padded to like lengths"))
            if other in found
        ]
    return rows


def _head(width: int, vocabulary: int) -> list[dict[str, Any]]:
    """Logprobs of trained tokens from hidden states, forward and backward."""
    hidden_ND = torch.randn(HEAD_TOKENS, width).requires_grad_()
    weight_VD = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
    token_ids_N = torch.randint(vocabulary, (HEAD_TOKENS,))

    def chunked() -> float:
        logprobs_N, _ = token_logprobs(
            hidden_ND, weight_VD, token_ids_N, chunk_tokens=max(HEAD_CHUNK_BYTES // (4 * vocabulary), 1)
        )
        return backward(logprobs_N)

    def whole() -> float:
        log_NV = (hidden_ND @ weight_VD.T).log_softmax(dim=-1)
        return backward(log_NV.gather(1, token_ids_N[:, None])[:, 0])

    def backward(logprobs_N: Tensor) -> float:
        hidden_ND.grad = weight_VD.grad = None
        logprobs_N.sum().backward()  # type: ignore[no-untyped-call]
        assert weight_VD.grad is not None
        return float(weight_VD.grad.norm())

    found = {which: _measured(one) for which, one in (("whole", whole), ("chunked", chunked))}
    assert abs(found["chunked"][2] / found["whole"][2] - 1) < 1e-3
    name = f"train: logprobs of {HEAD_TOKENS:,} tokens of {vocabulary:,}, {HEAD_CHUNK_BYTES >> 20} MB of logits at once"
    which = "log_softmax of all"
    return [
        _row(
            f"{name}: peak",
            "MB",
            found["chunked"][1],
            found["whole"][1],
            which,
            found["whole"][1] / found["chunked"][1],
        ),
        _row(name, "s", found["chunked"][0], found["whole"][0], which, found["whole"][0] / found["chunked"][0]),
    ]


def _measured(work: Callable[[], float]) -> tuple[float, float, float]:
    """Seconds, peak memory above what was held before in MB, and what the work gives."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = psutil.Process().memory_info().rss
    began = time.perf_counter()
    result = work()
    took_s = time.perf_counter() - began
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return took_s, (int(found[1]) * 1024 - before) / 1e6, result
