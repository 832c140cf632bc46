"""A new version in vLLM's engine: the time until it has it, and bytes that are written to shared memory for it.

SmolLM2-135M (a made model of its depth and width where it is not installed) in bfloat16. Versions go through the
trainer's publisher and a follower, as in a run, into the engine of the policy `vllm`. In half of them 1 % of the
elements of every tensor change, in the others 1 % of the elements of every fourth layer. The reference is a whole copy
of the model in new memory for each version, all of which the engine's workers load. Times are medians. Needs vllm;
without it there are no rows.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._exploring import choose_model, weights
from benchmarks.vllm import ENGINE
from rftstream.clock import SystemClock
from rftstream.config import loader
from rftstream.contracts.tasks import Sampling
from rftstream.contracts.versions import VersionName
from rftstream.models.folders.folder import prepare_model
from rftstream.models.rendering import open_renderer
from rftstream.policies.base import SampleRequest
from rftstream.policies.vllm.engine import label_of
from rftstream.policies.vllm.policy import VllmPolicy
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.publisher import WeightsPublisher
from rftstream.weights.shared_memory import SharedTensors, WeightsMemory
from rftstream.weights.snapshot import RawTensor, data_view, write_snapshot
from rftstream.weights.stores.store import ObjectStore

NUM_VERSIONS = 3
"""Of each kind."""
SHARE = 0.01


def run() -> list[dict[str, Any]]:
    if importlib.util.find_spec("vllm") is None:
        return []
    model, name = choose_model()
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as folder:
        updates = _Updates(model, Path(folder))
        try:
            every = [updates.measure(updates.names) for _ in range(NUM_VERSIONS)]
            some = [updates.measure([one for one in updates.names if _is_fourth(one)]) for _ in range(NUM_VERSIONS)]
        finally:
            updates.close()
    return [
        *_rows(f"{name}, {SHARE:.0%} of all tensors changed", every),
        *_rows(f"{name}, {SHARE:.0%} of every fourth layer changed", some),
    ]


def _rows(name: str, found: list[tuple[float, int, float, int]]) -> list[dict[str, Any]]:
    ours_s, ours_bytes, whole_s, whole_bytes = (statistics.median(one) for one in zip(*found, strict=True))
    return [
        _row(f"{name}: until the engine has it", "s", ours_s, whole_s),
        _row(f"{name}: written to shared memory", "bytes", ours_bytes, whole_bytes),
    ]


def _row(name: str, unit: str, ours: float, reference: float) -> dict[str, Any]:
    return {
        "name": f"vllm updates: {name}",
        "unit": unit,
        "ours": ours,
        "reference": reference,
        "reference_name": "a copy of the model for each version",
        "ratio": reference / ours,
    }


def _is_fourth(name: str) -> bool:
    _, _, rest = name.partition("layers.")
    return bool(rest) and int(rest.partition(".")[0]) % 4 == 0


class _Updates:
    """An engine that has the first version, and how it gets others."""

    def __init__(self, model: Mapping[str, Any], folder: Path) -> None:
        run = loader.from_dict(
            {
                "run": {"name": "bench", "steps": 1},
                "model": {**model, "dtype": "bfloat16"},
                "tasksets": {"sums": {"source": "arithmetic"}},
                "base": str(folder),
            }
        )
        spec = prepare_model(run.model, folder / "model", run.run.seed, threads=os.cpu_count() or 1)
        self._config, renderer = VllmPolicy.Config(batch_size=8, engine=ENGINE), open_renderer(spec)
        self._policy = VllmPolicy(self._config, model=spec, renderer=renderer, clock=SystemClock())
        store = ObjectStore("file://weights", base=folder)
        self._publisher = WeightsPublisher(store, "bench", "bfloat16", anchor_every=1000)
        self._follower = WeightsFollower(store, "bench", shared=True)
        self._chance = np.random.default_rng(0)
        self._tensors = {
            name: RawTensor(one.dtype, one.shape, np.array(np.frombuffer(data_view(one), np.uint16)).data)
            for name, one in weights(spec).items()
        }
        self.names, self._version = list(self._tensors), 0
        self._give(self._publish())
        self._sample()  # the engine has started, and has the weights

    def close(self) -> None:
        self._policy.close()

    def measure(self, names: list[str]) -> tuple[float, int, float, int]:
        """Seconds and bytes of a version in which these tensors changed, and those of a whole copy of it."""
        num_bytes = 0
        for name in names:
            values = np.frombuffer(data_view(self._tensors[name]), np.uint16)
            places = self._chance.choice(values.size, max(1, int(SHARE * values.size)), replace=False)
            values[places] += 1
            num_bytes += 2 * places.size
        shared = self._publish()
        took_s = self._give(shared)
        self._sample()
        return took_s, num_bytes, *self._give_copy(shared)

    def _publish(self) -> SharedTensors:
        name = VersionName(trainer_epoch=1, version=self._version)
        self._version += 1
        announced = self._publisher.publish(self._tensors, name, resumed=not name.version)
        self._follower.announced(announced)
        tensors = self._follower.fetch(announced)
        assert isinstance(tensors, SharedTensors)
        return tensors

    def _give(self, tensors: SharedTensors) -> float:
        began = time.perf_counter()
        self._policy.load(tensors, VersionName(trainer_epoch=1, version=self._version - 1))
        return time.perf_counter() - began

    def _give_copy(self, shared: SharedTensors) -> tuple[float, int]:
        """Seconds until workers have loaded a copy that is written for them, as if they had nothing yet."""
        engine = self._policy._engine
        label = label_of(VersionName(trainer_epoch=1, version=self._version - 1))
        memory = WeightsMemory()
        began = time.perf_counter()
        with os.fdopen(os.memfd_create("reference"), "wb") as file:
            num_bytes = write_snapshot(file, shared)
            file.flush()
            memory.path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
            engine._weights._taken = None
            self._policy._loop.call(engine.load(SharedTensors(shared, memory, shared.marks), label))
            return time.perf_counter() - began, num_bytes

    def _sample(self) -> None:
        request = SampleRequest(
            request_id="it", token_ids=(1, 2, 3), sampling=Sampling(min_tokens=2, max_tokens=2), seed=0, max_tokens=2
        )
        self._policy.submit(request)
        while self._policy.num_active:
            for completion in self._policy.step():
                assert completion.error is None and len(completion.token_ids) == 2
