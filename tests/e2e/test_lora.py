"""A run that trains adapters, by the command: it goes on where it was, is replayed bit for bit, and is exported."""

from __future__ import annotations

import pytest
from safetensors.numpy import load_file

from tests.e2e.test_resume import digests
from tests.e2e.workplace import Workplace, sets

pytestmark = [pytest.mark.slow, pytest.mark.law("replay")]

RUN = """
[run]
name = "lora"
steps = 4
[model]
dtype = "float32"
[model.make]
characters = "0123456789+-*/= "
layers = 1
width = 16
heads = 2
[model.lora]
rank = 2
[tasksets.sums]
source = "arithmetic"
reward = "digits:share"
[sampling]
max_tokens = 4
[feeder]
groups_per_batch = 2
group_size = 4
[explorer]
policy = "hf"
[trainer]
lr = 0.01
checkpoint_every = 2
[algorithms.grpo]
kl_coef = 0.01
[transport]
partitions = 2
"""

DIGITS = """
def share(completion):
    return sum(map(str.isdigit, completion)) / 4
"""


@pytest.mark.sampled(3, "examples")
def test_it_goes_on_and_is_replayed_bit_for_bit(place: Workplace) -> None:
    place.write("lora.toml", RUN)
    place.write("digits.py", DIGITS)
    first = place.call("run", "lora.toml", "--json", *sets("run.steps=2"))
    assert first.code == 0, first.err
    resumed = place.call("resume", "runs/lora", "--json", *sets("run.steps=4"))
    assert resumed.code == 0, resumed.err
    theirs = digests(place.view("runs/lora"))
    assert set(theirs) == set(range(5))
    assert theirs[0] != theirs[4]
    again = place.look("replay", "runs/lora", "--json")
    assert again.code == 0, again.out
    assert again.result["num_batches"] == 4
    verified = place.look("weights", "verify", "runs/lora")
    assert verified.code == 0, verified.out
    exported = place.look(
        "weights", "export", "runs/lora", "--adapter", "--to", str(place.folder / "adapter"), "--json"
    )
    assert exported.code == 0, exported.out
    final = place.folder / "runs" / "lora" / "final"
    alone, beside = (
        load_file(one / "adapter_model.safetensors") for one in (place.folder / "adapter", final / "adapter")
    )
    assert {name: one.tobytes() for name, one in alone.items()} == {name: one.tobytes() for name, one in beside.items()}
    assert all(".lora_" in name for name in alone)
    assert "model.embed_tokens.weight" in load_file(final / "model.safetensors")
    place.assert_nobody_left()
