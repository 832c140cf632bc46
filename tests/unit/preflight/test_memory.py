"""What a device needs that a trainer and engines have one after the other."""

from __future__ import annotations

import pytest

from rftstream.backends.deepspeed.backend import DeepSpeedBackend
from rftstream.backends.torch.backend import TorchBackend
from rftstream.preflight.estimate import ModelSizes
from rftstream.preflight.memory import MAIN, PINNED, MemoryEstimate, RoleMemory, estimate_memory
from tests.configs import small_run
from tests.unit import tiny


def test_a_device_in_turns_needs_what_the_larger_of_them_needs():
    roles = (
        RoleMemory(role="trainer", count=1, parts={"cuda:0": {"weights": 70}, MAIN: {"process": 5}}),
        RoleMemory(role="explorer", count=2, parts={"cuda:0": {"weights": 20, "cache": 5}, MAIN: {"process": 5}}),
    )
    there = {"cuda:0": 80}
    together = MemoryEstimate(roles=roles, machine=there)
    in_turns = MemoryEstimate(roles=roles, machine=there, in_turns="cuda:0")
    assert (together.total("cuda:0"), in_turns.total("cuda:0")) == (120, 70)
    assert together.total(MAIN) == in_turns.total(MAIN) == 15
    assert (together.too_much, in_turns.too_much) == (["cuda:0"], [])


def bytes_between_batches(folder, backend, **sections):
    """Return how many a parameter takes in main memory."""
    spec = tiny.make(folder)
    config = small_run(run={"name": "one", "steps": 2}, **sections)
    estimate = estimate_memory(config, spec, longest=10, needs=(), options={"backend": backend})
    (trainer,) = [role for role in estimate.roles if role.role == "trainer"]
    return trainer.parts[MAIN]["state between batches"] / ModelSizes.of(spec.folder, None).parameters


@pytest.mark.parametrize(("device", "blocks"), [("cpu", 1), ("cuda:0", PINNED)])
def test_pinned_memory_is_counted_in_the_blocks_that_torch_takes(tmp_path, device, blocks):
    backend = TorchBackend.Config(offload_parameters=True, parameters="float32")
    assert bytes_between_batches(tmp_path, backend, trainer={"device": device}) == blocks * 12


@pytest.mark.parametrize(("backend", "bytes_each"), [
    (TorchBackend.Config(parameters="float32"), 12),
    (DeepSpeedBackend.Config(stage=0), 12),
    (DeepSpeedBackend.Config(stage=2), 16),
    (DeepSpeedBackend.Config(stage=3), 20),
    (DeepSpeedBackend.Config(stage=2, offload_optimizer=True), 4),
])  # fmt: skip
def test_what_leaves_a_shared_device_is_in_main_memory(tmp_path, backend, bytes_each):
    """Weights and moments; masters of their own from stage 1 on; room for gradients in stage 3."""
    shared = {"trainer": {"device": "cuda:0", "colocate": True}, "explorer": {"policy": "hf", "devices": ["cuda:0"]}}
    assert bytes_between_batches(tmp_path, backend, **shared) == PINNED * bytes_each
