"""What a device needs that a trainer and engines have one after the other."""

from __future__ import annotations

import pytest

from rftstream.backends.deepspeed.backend import DeepSpeedBackend
from rftstream.backends.torch.backend import TorchBackend
from rftstream.config import loader
from rftstream.preflight.memory import MAIN, PINNED, MemoryEstimate, RoleMemory, estimate_memory
from rftstream.preflight.sizes import ModelSizes
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


@pytest.mark.parametrize(("device", "blocks"), [("cpu", 1), ("cuda:0", PINNED)])
def test_pinned_memory_is_counted_in_the_blocks_that_torch_takes(tmp_path, device, blocks):
    spec = tiny.make(tmp_path)
    config = loader.from_dict({
        "run": {"name": "one", "steps": 2}, "model": {"path": "fake"}, "tasksets": {"sums": {"source": "arithmetic"}},
        "trainer": {"device": device},
    })  # fmt: skip
    options = {"backend": TorchBackend.Config(offload_parameters=True, parameters="float32")}
    estimate = estimate_memory(config, spec, longest=10, needs=(), options=options)
    (trainer,) = [role for role in estimate.roles if role.role == "trainer"]
    num_parameters = ModelSizes.of(spec.folder, None).parameters
    assert trainer.parts[MAIN]["state between batches"] == blocks * 12 * num_parameters


@pytest.mark.parametrize(("backend", "bytes_each"), [
    (TorchBackend.Config(parameters="float32"), 12),
    (DeepSpeedBackend.Config(stage=0), 12),
    (DeepSpeedBackend.Config(stage=2), 16),
    (DeepSpeedBackend.Config(stage=3), 20),
    (DeepSpeedBackend.Config(stage=2, offload_optimizer=True), 4),
])  # fmt: skip
def test_what_leaves_a_shared_device_is_in_main_memory(tmp_path, backend, bytes_each):
    """Weights and moments; masters of their own from stage 1 on; room for gradients in stage 3."""
    spec = tiny.make(tmp_path)
    config = loader.from_dict({
        "run": {"name": "one", "steps": 2}, "model": {"path": "fake"}, "tasksets": {"sums": {"source": "arithmetic"}},
        "trainer": {"device": "cuda:0", "colocate": True}, "explorer": {"policy": "hf", "devices": ["cuda:0"]},
    })  # fmt: skip
    estimate = estimate_memory(config, spec, longest=10, needs=(), options={"backend": backend})
    (trainer,) = [role for role in estimate.roles if role.role == "trainer"]
    num_parameters = ModelSizes.of(spec.folder, None).parameters
    assert trainer.parts[MAIN]["state between batches"] == PINNED * bytes_each * num_parameters
