"""A backend that learns nothing: every version has the weights of the first. The control run beside a real one."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rftstream.algorithms.base import Algorithm, TrainingRow
from rftstream.backends.base import OptimizerSettings, Update, UpdatePlan
from rftstream.errors import ConfigError
from rftstream.models.spec import ModelSpec
from rftstream.weights.snapshot import DTYPES, RawTensor, decode_snapshot


class Frozen:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        pass

    def __init__(self, config: Config, *, model: ModelSpec, optimizer: OptimizerSettings, seed: int) -> None:
        self._spec = model
        self._num_batches = 0

    def open(self) -> None:
        self._num_batches = 0
        self._tensors: dict[str, RawTensor] = {}
        for file in sorted(self._spec.folder.glob("*.safetensors")):
            self._tensors |= decode_snapshot(file.read_bytes(), where=str(file))
        for name, tensor in self._tensors.items():
            if tensor.dtype != DTYPES[self._spec.dtype]:
                raise ConfigError(f"model.dtype: {name} is {tensor.dtype}, expected {DTYPES[self._spec.dtype]}")

    def update(self, rows: Sequence[TrainingRow], algorithm: Algorithm, plan: UpdatePlan) -> Update:
        self._num_batches += 1
        num_tokens = float(sum(row.loss_mask.sum() for row in rows))
        return Update(metrics={"num_tokens": num_tokens, "batches": float(self._num_batches)})

    def served_tensors(self) -> Mapping[str, RawTensor]:
        return self._tensors

    def save(self, folder: Path) -> None:
        (folder / "batches").write_text(f"{self._num_batches}\n")

    def load(self, folder: Path) -> None:
        self._num_batches = int((folder / "batches").read_text())

    def export(self, folder: Path) -> None:
        shutil.copytree(self._spec.folder, folder, dirs_exist_ok=True)

    def close(self) -> None:
        self._tensors = {}
