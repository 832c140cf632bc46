"""The step that `make bench` sets beside ours is the same: the same gradient, also after an update."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks._trl import MAX_GRAD_NORM, TrlStep
from rftstream.algorithms.base import TrainingRow
from rftstream.algorithms.grpo import Grpo
from rftstream.backends.base import OptimizerSettings, UpdatePlan
from rftstream.backends.torch.backend import TorchBackend
from rftstream.config.sections import MakeModel, ModelSection
from rftstream.models.folders.folder import prepare_model

PROMPT = 3


def rows() -> list[TrainingRow]:
    chance, made = np.random.default_rng(0), []
    for number, length in enumerate((9, 5, 12, 4)):
        mask = (np.arange(length) >= PROMPT).astype(np.float32)
        made.append(TrainingRow(
            token_ids=chance.integers(1, 13, length).astype(np.int32), loss_mask=mask, behavior_logprobs=-3 * mask,
            advantages=mask if number % 2 else -mask, group=number // 2,
        ))  # fmt: skip
    return made


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what TRL brings
def test_the_same_step(tmp_path: Path) -> None:
    make = MakeModel(characters="0123456789+=", layers=2, width=32, heads=2, context=16)
    spec = prepare_model(ModelSection(make=make, dtype="float32"), tmp_path / "model", 0)
    ours = TorchBackend(TorchBackend.Config(packing=True), model=spec, optimizer=OptimizerSettings(), seed=0)
    ours.open()
    plan = UpdatePlan(lr=1e-3, minibatches=1, updates_per_batch=1, max_grad_norm=MAX_GRAD_NORM,
                      tokens_per_microbatch=16)  # fmt: skip
    theirs = TrlStep(spec, rows(), rows_at_once=2, lr=1e-3, folder=str(tmp_path / "trl"))
    for _ in range(2):
        norm = ours.update(rows(), Grpo(Grpo.Config(correction="none")), plan).metrics["grad_norm"]
        assert theirs.step() == pytest.approx(norm, rel=1e-3)
