"""What a device needs that a trainer and engines have in turns, and the rollouts that each role has in hand."""

import functools
import json

import pytest

from rftstream.backends.deepspeed.backend import DeepSpeedBackend
from rftstream.backends.torch.backend import TorchBackend
from rftstream.models.spec import ModelSpec
from rftstream.preflight.estimate import CHARACTERS_PER_TOKEN, ModelSizes, beside_bytes
from rftstream.preflight.in_hand import RECORD_BYTES, TOKEN_BYTES, RolloutsHeld
from rftstream.preflight.memory import MAIN, PINNED, PROCESS_BYTES, MemoryEstimate, RoleMemory, estimate_memory
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


@pytest.mark.parametrize(("settings", "groups", "layers", "asked"), [
    ({}, 30, 2, 8 * 500), ({}, 5, 2, 20 * 100), ({"gradient_checkpointing": True}, 30, 1, 8 * 500),
    ({}, 1, 0, 0), ({"share_prefixes": False}, 30, 0, 0), ({"packing": False}, 30, 0, 0),
])  # fmt: skip
def test_keys_of_a_path_are_counted_once_for_each_run(tmp_path, settings, groups, layers, asked):
    """Of 4 rows of 100 tokens for each group, and micro-batches of 500, which hold one group without sharing."""
    spec = tiny.make(tmp_path)
    config = small_run(
        run={"name": "one", "steps": 2}, trainer={"backend": "torch", "device": "cpu", "tokens_per_microbatch": 500},
        feeder={"groups_per_batch": groups, "group_size": 4},
    )  # fmt: skip
    backend = TorchBackend.Config(**settings)
    estimate = estimate_memory(config, spec, longest=100, needs=(), options={"backend": backend})
    (trainer,) = [role for role in estimate.roles if role.role == "trainer"]
    width = ModelSizes.of(spec.folder, None).keys
    assert trainer.parts[MAIN].get("keys of what rows share", 0) == asked * 4 * 2 * width * layers


RECORD = 1000 * (TOKEN_BYTES + CHARACTERS_PER_TOKEN) + RECORD_BYTES
COMPARED = {"source": "arithmetic", "reward": "majority_vote"}


@pytest.mark.law("bounded")
@pytest.mark.parametrize(("role", "settings", "item", "num_bytes"), [
    ("explorer", {"explorer.max_concurrent": 5}, "rollouts", 3 * 5 * RECORD),
    ("explorer", {"explorer.max_concurrent": 5, "explorer.yield_after_tokens": 9}, "rollouts", 3 * 10 * RECORD),
    ("explorer", {"explorer.max_concurrent": 999}, "rollouts", 3 * 24 * RECORD),
    ("explorer", {"explorer.max_concurrent": 5}, "saved pieces", 5 * RECORD),
    ("explorer", {"explorer.partial_every_s": 0.0}, "saved pieces", 0),
    ("verifier", {"verifier.max_concurrent": 7}, "rollouts", 4 * 7 * RECORD),
    ("verifier", {}, "rollouts", 4 * 24 * RECORD),
    ("verifier", {}, "siblings", 0),
    ("verifier", {"tasksets.sums": COMPARED}, "siblings", 2 * 24 * RECORD),
    ("verifier", {"tasksets.sums": COMPARED, "verifier.max_waiting_bytes": RECORD}, "siblings", 2 * RECORD),
    ("scorer", {"verifier.max_concurrent": 7}, "rollouts", 2 * 7 * RECORD),
    ("buffer", {}, "bodies", 24 * RECORD),
    ("buffer", {"feeder.max_staleness": 3}, "bodies", 32 * RECORD),
    ("buffer", {"buffer.max_body_bytes": 20 * RECORD}, "bodies", 20 * RECORD),
    ("buffer", {}, "batch", 8 * (9000 + RECORD_BYTES)),
    ("buffer", {"buffer.max_body_bytes": 20 * RECORD}, "batch", 8 * (9000 + RECORD_BYTES) + 4 * RECORD),
    ("buffer", {"buffer.max_body_bytes": 1}, "batch", 8 * (9000 + RECORD_BYTES) + 8 * RECORD),
    ("buffer", {"transport.kind": "kafka"}, "batch", 3 * 8 * (9000 + RECORD_BYTES)),
    ("trainer", {}, "batches", 3 * 8 * (9000 + RECORD_BYTES)),
    ("trainer", {"feeder.groups_per_batch": 4}, "rows", 16 * 12000),
    ("evaluator", {}, "samples", 2 * 3 * 5 * RECORD),
    ("evaluator", {"evaluations.all.num_tasks": 2}, "samples", 2 * 2 * 5 * RECORD),
])  # fmt: skip
def test_rollouts_in_hand(tmp_path, role, settings, item, num_bytes):
    """Of rollouts of 1,000 tokens, 2 groups of 4 in a batch and 24 on their way; for engines without a model."""
    given = {
        "run": {"name": "one", "steps": 2}, "feeder": {"groups_per_batch": 2, "group_size": 4, "max_staleness": 2},
        "evaluations": {"all": {"source": "arithmetic", "every": 1, "n": 5}},
    }  # fmt: skip
    for name, value in settings.items():
        *sections, last = name.split(".")
        functools.reduce(lambda values, section: values.setdefault(section, {}), sections, given)[last] = value
    if "transport.kind" in settings:
        given["transport"]["servers"] = "127.0.0.1:1"
    spec = ModelSpec(name="fake", folder=tmp_path, dtype="bfloat16", context=None)
    estimate = estimate_memory(small_run(**given), spec, longest=1000, needs=(), options={}, tasks={"all": 3})
    (found,) = [one for one in estimate.roles if one.role == role]
    assert found.parts[MAIN].get(item, 0) == num_bytes
    assert found.parts[MAIN]["process"] == PROCESS_BYTES


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 48, "num_experts_per_tok": 8, "num_experts": 128}, 384),
        ({"text_config": {"num_hidden_layers": 4, "num_experts_per_tok": 2, "n_routed_experts": 512}}, 16),
        ({"num_hidden_layers": 4}, 4),
    ],
)
def test_recorded_experts_are_counted_wherever_rollouts_are_held(tmp_path, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = small_run(trainer={"routing": "replay"}, explorer={"policy": "hf"})
    assert beside_bytes(run, tmp_path) == expected
    assert beside_bytes(small_run(), tmp_path) == 0
    held = [RolloutsHeld(run, 1000, {}, beside) for beside in (0, expected)]
    assert held[1].record - held[0].record == 1000 * expected
    for role in ("buffer", "trainer", "explorer", "verifier"):
        assert sum(getattr(held[1], role)().values()) > sum(getattr(held[0], role)().values())
