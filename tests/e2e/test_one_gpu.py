"""vLLM and a trainer in turns on one GPU: a whole run with a model of the body of SmolLM2-135M, made on the spot.

    pytest -m gpu tests/e2e/test_one_gpu.py -s

It prints the speed of the loop, the time of each change of hands, and the memory that each of them leaves free.
"""

from __future__ import annotations

import importlib.util
import statistics

import pytest

from rftstream.contracts.versions import StepRecord
from rftstream.models.device_lock import FileLock
from tests.e2e.test_lora import DIGITS
from tests.e2e.workplace import Workplace, sets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

STEPS = 8
RUN = f"""
[run]
name = "one"
steps = {STEPS}
[model]
dtype = "bfloat16"
[model.make]
characters = "0123456789+-*/= "
layers = 30
width = 576
heads = 9
context = 512
[tasksets.sums]
source = "arithmetic"
reward = "digits:share"
[sampling]
max_tokens = 256
[feeder]
groups_per_batch = 8
group_size = 8
max_staleness = 1
[explorer]
policy = "vllm"
devices = ["cuda:0"]
max_concurrent = 128
[policies.vllm]
batch_size = 128
engine = {{ enforce_eager = true, gpu_memory_utilization = 0.5 }}
[trainer]
device = "cuda:0"
colocate = true
lr = 1e-5
[transport]
partitions = 4
"""
START_S = 600.0


def who_is_there(lock: FileLock) -> str:
    """Asked from outside: the trainer if it has asked and nobody may share the device."""
    if not lock.is_wanted():
        return "engines"
    return "trainer" if lock.is_taken() else "changing"


@pytest.mark.parametrize("backend", ["torch", "deepspeed"])
def test_engine_and_trainer_have_one_gpu_in_turns(place: Workplace, backend: str) -> None:
    import torch

    def used() -> int:
        free, total = torch.cuda.mem_get_info(0)
        return total - free

    place.write("one.toml", RUN)
    place.write("digits.py", DIGITS)
    before, lock = used(), FileLock("cuda:0")
    run = place.start("run", "one.toml", "--json", *sets(f"trainer.backend='{backend}'"))
    view = place.view("runs/one")
    seen: dict[str, list[int]] = {"engines": [], "trainer": [], "changing": []}

    def has_ended() -> bool:
        if view.curve().version >= 2:  # by then vLLM has started, and compiled what it compiles
            who, size = who_is_there(lock), used() - before
            if who == who_is_there(lock):
                seen[who].append(size)
        return not run.alive

    place.wait_for(has_ended, "the end of the run", START_S)
    done = run.finish()
    assert done.code == 0, done.err
    view.assert_nothing_lost()
    lock.close()
    steps = [one for one in view.messages("steps") if isinstance(one, StepRecord) and not one.resumed]
    assert [one.name.version for one in steps] == list(range(1, STEPS + 1))

    for name in ("tokens_per_s", "device_wait_s", "step_s", "publish_s", "wait_s", "mismatch_k3"):
        print(f"{name}: {statistics.median(one.metrics[name] for one in steps[2:]):.3f} in the median")
    print({who: f"{statistics.median(sizes) / 1e9:.2f} GB" for who, sizes in seen.items() if sizes})
    assert statistics.median(seen["trainer"]) < statistics.median(seen["engines"]) / 2, "the engine sleeps meanwhile"
    assert max(one.metrics["device_wait_s"] for one in steps) > 0
    assert statistics.median(one.metrics["mismatch_k3"] for one in steps) < 0.05
