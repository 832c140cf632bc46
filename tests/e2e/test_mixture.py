"""A mixture of experts is trained on the experts that its sampler took, in whole rollouts and in those that go on after
a kill; the recorded run is replayed bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from rftstream.contracts.beside import columns_of
from rftstream.contracts.token_values import EXPERTS
from rftstream.faults import VARIABLE
from tests.e2e.workplace import Workplace

pytestmark = [pytest.mark.slow, pytest.mark.law("replay", "lost")]

RUN = """
[run]
name = "mixture"
steps = 6
[model]
dtype = "bfloat16"
[model.make]
family = "qwen3_moe"
characters = "0123456789+-*/= "
layers = 2
width = 32
heads = 2
[tasksets.sums]
source = "arithmetic"
reward = "digits:share"
[sampling]
max_tokens = 12
[feeder]
groups_per_batch = 2
group_size = 4
[explorer]
policy = "hf"
partial_every_s = 0.05
[trainer]
lr = 1e-3
routing = "replay"
checkpoint_every = 2
[algorithms.grpo]
kl_coef = 0.01
[transport]
partitions = 2
"""
DIGITS = """
def share(completion):
    return sum(map(str.isdigit, completion)) / 12
"""


@pytest.mark.sampled(5, "kills")
def test_killed_again_and_again_it_trains_on_the_experts_that_were_taken(place: Workplace) -> None:
    place.write("mixture.toml", RUN)
    place.write("digits.py", DIGITS)
    faults = "explorer:in_commit:3,trainer:after_commit:3,explorer:after_commit:9"
    done = place.call("run", "mixture.toml", "--json", env={VARIABLE: faults})
    assert done.code == 0, done.err
    view = place.view("runs/mixture")
    view.assert_nothing_lost()
    for segment in [segment for experience in view.experiences() for segment in experience.segments]:
        column = columns_of(segment.beside)[EXPERTS]
        assert column.counts_T.tolist() == [0, *[4] * (segment.token_ids.shape[0] - 1)], "two of each of two layers"
        assert column.values.dtype == np.uint8 and column.values.max() < 4
    shares = [step.metrics["routing_mismatch"] for step in view.steps() if not step.resumed]
    assert len(shares) >= 6 and all(0 <= share < 1 for share in shares), shares
    assert shares[0] < 0.1, "of the same weights, in bfloat16 and float32"
    replayed = place.call("replay", "runs/mixture")
    assert replayed.code == 0 and "equal bit for bit" in replayed.out + replayed.err
    place.assert_nobody_left()
