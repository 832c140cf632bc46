"""The real vLLM on a GPU: adapters are applied, and an idle engine gives its memory free until there is work again."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rftstream.clock import SystemClock
from rftstream.config.sections import LoraSection
from rftstream.models.rendering import open_renderer
from rftstream.policies.vllm.policy import VllmPolicy
from tests.engines.test_in_flight import versions_of
from tests.unit import tiny
from tests.unit.policies.test_hf import row
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]

TOLERANCE = 0.1
"""Of logprobs in bfloat16, beside the trainer's in float32."""


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    made = tiny.make(tmp_path_factory.mktemp("model"), dtype="bfloat16", seed=3, width=256, context=256)
    return dataclasses.replace(made, lora=LoraSection(rank=4, alpha=8.0))


@pytest.fixture(scope="module")
def policy(spec):
    config = VllmPolicy.Config(
        batch_size=16, sleep_after_s=1.0, engine={"enforce_eager": True, "gpu_memory_utilization": 0.3}
    )
    on_gpu = dataclasses.replace(spec, device="cuda:0")
    opened = VllmPolicy(config, model=on_gpu, renderer=open_renderer(spec), clock=SystemClock())
    yield opened
    opened.close()


def free_bytes():
    return torch.cuda.mem_get_info(0)[0]


def test_an_idle_engine_gives_its_memory_free_and_wakes_with_the_same_adapter(policy, spec, subtests):
    backend = tiny.backend(spec)
    before = free_bytes()
    (*_, (_, tensors)) = versions_of(backend, 2)
    policy.load(tensors, tiny.name(1))
    assert policy._applies
    request = tiny.request(0, max_tokens=60)
    completion = tiny.drain_one(policy, request)
    taken = before - free_bytes()

    with subtests.test("adapters count as in the trainer"):
        again = backend.logprobs([row(request, completion, 1.0)])[0][len(request.token_ids) :]
        np.testing.assert_allclose(completion.behavior_logprobs, again, atol=TOLERANCE)

    with subtests.test("asleep"):
        wait_until(lambda: free_bytes() > before - taken / 2)

    with subtests.test("awake again"):
        other = tiny.drain_one(policy, request)
        assert other.token_ids.tolist() == completion.token_ids.tolist()
        np.testing.assert_allclose(other.behavior_logprobs, completion.behavior_logprobs, atol=TOLERANCE)
        assert [span.version for span in other.versions] == [1]

    with subtests.test("new weights do not wake it, and are there when it wakes"):
        wait_until(lambda: free_bytes() > before - taken / 2)
        (*_, (_, tensors)) = versions_of(backend, 2)
        policy.load(tensors, tiny.name(2))
        assert policy._engine._asleep and free_bytes() > before - taken / 2
        assert [span.version for span in tiny.drain_one(policy, request).versions] == [2]
