"""Bytes of a version published as a delta, beside the full weights and beside the form that others publish; and times.

SmolLM2-135M (a made model of its depth and width where it is not installed), served in bfloat16, trained by the torch
backend with AdamW and float32 masters on sums answered rightly and wrongly, other ones with every batch. Each version
goes through the trainer's publisher into a store on disk and from there through the explorer's follower into the policy
`hf`. The form of others: gaps between changed elements and their new values, zstd. Times are of one core, digests
included.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from benchmarks._training import make_plan
from rftstream.algorithms.base import TrainingRow
from rftstream.backends.base import OptimizerSettings
from rftstream.clock import SystemClock
from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.tasks import ChatMessage
from rftstream.contracts.versions import VersionName, WeightsAnnounced
from rftstream.errors import ConfigError
from rftstream.models.folders.convert import convert_smollm2
from rftstream.models.folders.folder import prepare_model
from rftstream.models.rendering import open_renderer
from rftstream.policies.base import Policy
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.publisher import WeightsPublisher
from rftstream.weights.snapshot import RawTensor, data_view
from rftstream.weights.stores.store import ObjectStore

CACHE = Path(__file__).parent.parent / ".cache" / "models"
LRS = (1e-6, 5e-6, 2e-5)
NUM_VERSIONS = 5
MEASURED_FROM = 3
"""The first versions come from an optimizer that knows nothing yet."""
NUM_GROUPS, GROUP_SIZE = 4, 4
MADE = {"characters": "0123456789+-*/= becauswdthnmr", "layers": 30, "width": 576, "heads": 9, "context": 512}


@dataclass(slots=True)
class Measured:
    full_bytes: int = 0
    changed_share: list[float] = field(default_factory=list)
    delta_bytes: list[int] = field(default_factory=list)
    others_bytes: list[int] = field(default_factory=list)
    ideal_bytes: list[float] = field(default_factory=list)
    take_s: list[float] = field(default_factory=list)
    write_s: list[float] = field(default_factory=list)
    apply_s: list[float] = field(default_factory=list)
    apply_by_two_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)


def run() -> list[dict[str, Any]]:
    model, name = _model()
    rows, last = [], Measured()
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        for lr in LRS:
            last = measure(model, lr, Path(folder) / f"{lr:g}")
            ours, others = (last.full_bytes / statistics.mean(one) for one in (last.delta_bytes, last.others_bytes))
            share = 100 * statistics.mean(last.changed_share)
            rows.append(
                _row(
                    f"{name}, lr {lr:g} ({share:.2f} % changed): times smaller than full",
                    "x",
                    ours,
                    others,
                    "gaps + new values, zstd-19",
                    ours / others,
                )
            )
            reached, ideal = statistics.mean(last.delta_bytes), statistics.mean(last.ideal_bytes)
            rows.append(
                _row(
                    f"{name}, lr {lr:g}: bytes",
                    "bytes",
                    reached,
                    ideal,
                    "entropy of the coder's model",
                    ideal / reached,
                )
            )
            rows += _times(f"{name}, lr {lr:g}", last, Path(folder))
    return rows


def _times(name: str, found: Measured, folder: Path) -> list[dict[str, Any]]:
    write_s, read_s = safetensors_times(folder / "full", found.full_bytes)
    took = (found.take_s, found.write_s, found.apply_s, found.apply_by_two_s, found.load_s)
    take_s, rest_s, apply_s, by_two_s, load_s = (statistics.median(one) for one in took)
    rounding_s = _rounding(found.full_bytes)
    return [
        _row(f"{name}: to publish", "s", take_s + rest_s, write_s, "write of safetensors", write_s / (take_s + rest_s)),
        _row(f"{name}: of it, training waits", "s", take_s, rounding_s, "torch's rounding alone", rounding_s / take_s),
        _row(f"{name}: to apply", "s", apply_s, read_s, "read of safetensors", read_s / apply_s),
        _row(f"{name}: to apply by two threads", "s", by_two_s, apply_s, "by one", apply_s / by_two_s),
        _row(f"{name}: sampling waits", "s", load_s, apply_s + load_s, "fetched in its thread", apply_s / load_s + 1),
    ]


def _row(
    name: str, unit: str, ours: float, reference: float | None, which: str | None, ratio: float | None
) -> dict[str, Any]:
    return {
        "name": f"weights: {name}",
        "unit": unit,
        "ours": ours,
        "reference": reference,
        "reference_name": which,
        "ratio": ratio,
    }


def measure(model: Mapping[str, Any], lr: float, folder: Path) -> Measured:
    """A trajectory at this learning rate, published version by version."""
    store = ObjectStore("file://weights", base=folder)
    publisher = WeightsPublisher(store, "bench", "bfloat16", anchor_every=1000, threads=1)
    follower, by_two = (WeightsFollower(store, "bench", threads=threads) for threads in (1, 2))
    found, before, policy = Measured(), np.empty(0, np.uint16), None
    for version, tensors in enumerate(_versions(model, lr, folder)):
        began = time.perf_counter()
        taken = publisher.take(tensors, VersionName(trainer_epoch=1, version=version), resumed=version == 0)
        took_s = time.perf_counter() - began
        announced = publisher.write(taken)
        wrote_s = time.perf_counter() - began - took_s
        follower.announced(announced)
        began = time.perf_counter()
        fetched = follower.fetch(announced)
        applied_s = time.perf_counter() - began
        by_two.announced(announced)
        began = time.perf_counter()
        by_two.fetch(announced)
        applied_by_two_s = time.perf_counter() - began
        policy = policy or _policy(model, folder)
        began = time.perf_counter()
        policy.load(fetched, announced.name)
        loaded_s = time.perf_counter() - began
        state = np.concatenate([np.frombuffer(data_view(one), np.uint16) for one in fetched.values()])
        if version >= MEASURED_FROM:
            _note(found, announced, before, state)
            found.take_s.append(took_s)
            found.write_s.append(wrote_s)
            found.apply_s.append(applied_s)
            found.apply_by_two_s.append(applied_by_two_s)
            found.load_s.append(loaded_s)
        before = state
        gc.collect()
    return found


def _note(found: Measured, announced: WeightsAnnounced, before: np.ndarray, state: np.ndarray) -> None:
    assert announced.parent is not None
    found.full_bytes = state.nbytes
    found.changed_share.append(float((before != state).mean()))
    found.delta_bytes.append(announced.num_bytes)
    found.others_bytes.append(num_bytes_of_others(before, state))
    found.ideal_bytes.append(ideal_num_bytes(before, state))


def num_bytes_of_others(before: np.ndarray, state: np.ndarray) -> int:
    """Gaps as 16-bit numbers (a longer one as 65535 and its rest), and new values."""
    places = np.flatnonzero(before != state)
    gaps = np.diff(places, prepend=-1) - 1
    long = gaps >= 65535
    words = np.where(long, 65535, gaps).astype("<u2").tobytes() + gaps[long].astype("<u4").tobytes()
    return len(zstandard.compress(words, 19)) + len(zstandard.compress(state[places].tobytes(), 19))


def ideal_num_bytes(before: np.ndarray, state: np.ndarray) -> float:
    """Return the entropy of the model that the coder assumes, in bytes: by the exponent of the old value, whether an
    element changes, whether its sign does, which way its magnitude goes, and by how much (the length of that number and
    the two bits below its highest). Frequencies are those of the whole model, known for nothing."""
    changed = before != state
    exponents = ((before >> 7) & 0xFF).astype(np.uint8)
    of_all = np.bincount(exponents, minlength=256)
    of_changed = np.bincount(exponents[changed], minlength=256)
    bits = _bernoulli_bits(of_changed, of_all)
    old, new, classes = before[changed], state[changed], exponents[changed].astype(np.int64)
    flips = ((old ^ new) >> 15).astype(np.int64)
    by = (new & 0x7FFF).astype(np.int64) - (old & 0x7FFF)
    sizes = np.abs(by) + flips
    lengths = np.frexp(sizes)[1].astype(np.int64) - 1
    learned = np.minimum(lengths, 2)
    tops = (sizes >> (lengths - learned)) & 3  # a length of 1 has one bit below its highest
    kinds = 2 * classes + flips
    bits += _conditional_bits(classes, flips) + _conditional_bits(kinds, by < 0) + _conditional_bits(kinds, lengths)
    bits += _conditional_bits(32 * kinds + lengths, tops) + float((lengths - learned).sum())
    return bits / 8


def _bernoulli_bits(of_one: np.ndarray, of_all: np.ndarray) -> float:
    zeros = of_all - of_one
    return _log_sum(of_all) - _log_sum(of_one) - _log_sum(zeros)


def _conditional_bits(contexts: np.ndarray, symbols: np.ndarray) -> float:
    """Bits of the symbols, each coded with the frequencies of its context."""
    return _log_sum(np.bincount(contexts)) - _log_sum(np.bincount(32 * contexts + symbols))


def _log_sum(counts: np.ndarray) -> float:
    positive = counts[counts > 0].astype(np.float64)
    return float((positive * np.log2(positive)).sum())


# -- the trajectory


def _versions(model: Mapping[str, Any], lr: float, folder: Path) -> Iterator[Mapping[str, RawTensor]]:
    from rftstream.backends.torch.backend import TorchBackend

    run = _config(model, folder)
    spec = prepare_model(run.model, folder / "model", run.run.seed, threads=2)
    backend = TorchBackend(TorchBackend.Config(), model=spec, optimizer=OptimizerSettings(), seed=0)
    backend.open()
    algorithm_class, options = run.build_part("algorithm", "grpo")
    algorithm = algorithm_class(options)
    plan = make_plan(lr, tokens_per_microbatch=4096)
    chance = np.random.default_rng(0)
    yield backend.served_tensors()
    for _ in range(1, NUM_VERSIONS):
        rows = _rows(run, folder / "model", chance)
        logprobs = backend.logprobs(rows)
        rows = [_with_logprobs(row, behavior) for row, behavior in zip(rows, logprobs, strict=True)]
        assert not backend.update(rows, algorithm, plan).skipped
        yield backend.served_tensors()
    backend.close()


def _config(model: Mapping[str, Any], folder: Path) -> RunConfig:
    return loader.from_dict(
        {
            "run": {"name": "weights", "steps": 1},
            "model": {**model, "dtype": "bfloat16"},
            "tasksets": {"sums": {"source": "arithmetic"}},
            "base": str(folder),
        }
    )


def _policy(model: Mapping[str, Any], folder: Path) -> Policy:
    from rftstream.policies.hf.policy import HfPolicy

    run = _config(model, folder)
    spec = prepare_model(run.model, folder / "model", run.run.seed, threads=1)
    return HfPolicy(HfPolicy.Config(), model=spec, renderer=open_renderer(spec), clock=SystemClock())


def _rows(run: RunConfig, folder: Path, chance: np.random.Generator) -> list[TrainingRow]:
    """Groups of sums, half of each answered rightly."""
    renderer = open_renderer(prepare_model(run.model, folder, run.run.seed))
    rows = []
    for group in range(NUM_GROUPS):
        left, right = chance.integers(0, 99, 2).tolist()
        prompt = renderer.render((ChatMessage(role="user", content=f"{left}+{right}="),))
        for sibling in range(GROUP_SIZE):
            good = 2 * sibling < GROUP_SIZE
            answer = left + right if good else int(chance.integers(0, 198))
            said = renderer.render((ChatMessage(role="assistant", content=f"{answer}"),))
            mask = np.asarray([0.0] * len(prompt) + [1.0] * len(said), np.float32)
            rows.append(
                TrainingRow(
                    token_ids=np.asarray([*prompt, *said], np.int32),
                    loss_mask=mask,
                    behavior_logprobs=0 * mask,
                    advantages=mask if good else -mask,
                    group=group,
                )
            )
    return rows


def _with_logprobs(row: TrainingRow, behavior_logprobs: np.ndarray) -> TrainingRow:
    return TrainingRow(
        token_ids=row.token_ids,
        loss_mask=row.loss_mask,
        behavior_logprobs=behavior_logprobs,
        advantages=row.advantages,
        group=row.group,
    )


def _model() -> tuple[dict[str, Any], str]:
    try:
        return {"path": str(convert_smollm2(CACHE / "SmolLM2-135M-Instruct"))}, "SmolLM2-135M"
    except ConfigError:
        return {"make": MADE}, "a made model"


# -- the reference


def _rounding(num_bytes: int) -> float:
    """Seconds that torch needs to make so many bytes of bfloat16 from float32."""
    import torch

    masters, times = torch.zeros(num_bytes // 2), []
    for _ in range(3):
        began = time.perf_counter()
        masters.to(torch.bfloat16)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def safetensors_times(
    path: Path, num_bytes: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Seconds to write and read so many bytes of bfloat16 with the safetensors library, the file in the page cache."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = {f"layer{one}": torch.zeros(num_bytes // 2 // 30, dtype=torch.bfloat16) for one in range(30)}
    times = []
    for _ in range(3):
        began = clock()
        save_file(tensors, path)
        written = clock()
        checksum = sum(float(one[0]) for one in load_file(path).values())
        assert checksum == 0
        times.append((written - began, clock() - written))
    return tuple(statistics.median(column) for column in zip(*times, strict=True))
