"""examples/trl_loss.py and examples/fsdp2.py, training loops of users: the weights that they make of a run's batches
are those that our own backend makes of them, also if they are killed in the middle and start again."""

from __future__ import annotations

import signal
import sys

import pytest
import torch

import rftstream
from tests.e2e.test_kills import reach
from tests.e2e.workplace import EXAMPLES, Process, Workplace, sets

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.process]

STEPS = 6
RUN = f"""
[run]
name = "tiny"
steps = {STEPS}
[model]
dtype = "float32"
[model.make]
characters = "0123456789+="
layers = 2
width = 32
heads = 2
context = 16
[tasksets.sums]
source = "arithmetic"
reward = "my_rewards:score"
[sampling]
max_tokens = 4
temperature = 1.2
[feeder]
groups_per_batch = 3
group_size = 5
max_staleness = 1
[explorer]
policy = "hf"
[trainer]
algorithm = "grpo"
backend = "joined"
lr = 1e-3
checkpoint_every = 2
[algorithms.grpo]
correction = "none"
"""
REWARD = """
def score(completion, **columns):
    return sum(map(ord, completion)) % 7 / 7
"""
COMMANDS = {
    "trl_loss.py": [sys.executable],
    "fsdp2.py": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
ROUNDING = 1e-3
"""Largest norm of the differences, as a share of the norm of all that was learned. Losses and gradients differ in their
last bits. Adam divides each gradient by its own size, so the few weights whose gradient is itself rounding move by up
to the learning rate in either direction. The shares are below 1e-4; that of another loss is about 1."""


@pytest.mark.parametrize("name", COMMANDS)
def test_an_own_loop_makes_the_weights_of_our_backend(name: str, place: Workplace) -> None:
    place.write("tiny.toml", RUN)
    place.write("my_rewards.py", REWARD)

    def start() -> Process:
        return place.start(EXAMPLES / name, "runs/tiny", command=COMMANDS[name], env={"GLOO_SOCKET_IFNAME": "lo"})

    run = place.start("run", "tiny.toml")
    view = place.view("runs/tiny")
    place.wait_for(lambda: view.control().manifest, "the manifest")
    first = start()
    reach(place, view, 3)
    for process in place.processes(str(EXAMPLES / name)):
        process.send_signal(signal.SIGKILL)
    first.finish()
    second = start()
    assert run.finish().code == second.finish().code == 0, place.report()
    view.assert_nothing_lost()
    again = place.call("replay", "runs/tiny", "--into", "runs/again", *sets("trainer.backend=torch"))
    assert again.code == 0, again.err

    with rftstream.open(place.folder / "runs/tiny") as theirs, rftstream.open(place.folder / "runs/again") as ours:
        metrics = [
            {step.name.version: (step.metrics["loss"], step.metrics["grad_norm"]) for step in run.steps()}
            for run in (theirs, ours)
        ]
        assert sorted(metrics[0]) == sorted(metrics[1]) == list(range(1, STEPS + 1))
        assert min(norm for _, norm in metrics[1].values()) > 0.01, "nothing is compared"
        for version, found in metrics[0].items():
            assert found == pytest.approx(metrics[1][version], rel=1e-3, abs=1e-6)
        before = weights(ours, 0)
        for version in range(1, STEPS + 1):
            found, wanted = weights(theirs, version), weights(ours, version)
            assert (found - wanted).norm() < ROUNDING * (wanted - before).norm(), f"version {version}"


def weights(run: rftstream.Run, version: int) -> torch.Tensor:
    model, _ = run.version(version).load()
    return torch.cat([one.flatten() for one in model.state_dict().values()])
