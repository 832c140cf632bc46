"""The real vLLM, with versions that are adapters and are applied as such."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rftstream.clock import SystemClock
from rftstream.config.sections import LoraSection
from rftstream.errors import WeightsError
from rftstream.models.rendering import open_renderer
from rftstream.policies.vllm.policy import VllmPolicy
from rftstream.weights.adapters import whole_tensors
from tests.engines.replay import Replay
from tests.engines.test_in_flight import PROMPTS, check_stamps, versions_of
from tests.engines.test_vllm import TOLERANCE, so_far
from tests.unit import tiny
from tests.unit.policies.test_hf import row

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    made = tiny.make(tmp_path_factory.mktemp("model"), seed=3, width=128, context=256)
    return dataclasses.replace(made, lora=LoraSection(rank=4, alpha=8.0))


@pytest.fixture(scope="module")
def policy(spec):
    config = VllmPolicy.Config(
        batch_size=16, adapters="apply", engine={"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}
    )
    opened = VllmPolicy(config, model=spec, renderer=open_renderer(spec), clock=SystemClock())
    yield opened
    opened.close()


def test_adapters_are_exchanged_in_flight_and_count_as_if_they_were_merged(policy, spec, subtests):
    backend, replay, names, done = tiny.backend(spec), Replay(spec), [], {}
    requests = {f"r{n}": tiny.request(n, PROMPTS[n % 4], max_tokens=200, min_tokens=200) for n in range(8)}
    for version, (_, tensors) in enumerate(versions_of(backend, 3)):
        assert all(".lora_" in name for name in tensors)
        names.append(tiny.name(20 + version))
        replay.add(names[-1], whole_tensors(spec, tensors, policy._parameters, where="test"))
        policy.load(tensors, names[-1])
        if version == 0:
            for request in requests.values():
                policy.submit(request)
        while version < 2 and so_far(policy, requests) < 40 * (version + 1):
            done |= {one.request_id: one for one in policy.step()}
    done |= tiny.drain(policy)
    assert done.keys() == requests.keys()
    for request_id, request in requests.items():
        check_stamps(replay, request, done[request_id], names)
    assert max(len(completion.versions) for completion in done.values()) >= 2

    with subtests.test("logprobs are the trainer's"):
        request = tiny.request(50, max_tokens=60)  # without min_tokens, which the trainer does not know of
        completion = tiny.drain_one(policy, request)
        again = backend.logprobs([row(request, completion, 1.0)])[0][len(request.token_ids) :]
        np.testing.assert_allclose(completion.behavior_logprobs, again, atol=TOLERANCE)

    with subtests.test("an adapter of another rank is refused, and the one before goes on"):
        other = tiny.backend(dataclasses.replace(spec, lora=LoraSection(rank=2, alpha=8.0))).served_tensors()
        with pytest.raises(WeightsError, match="rank 4"):
            policy.load(other, tiny.name(30))
        assert policy.version == names[-1]
        assert tiny.drain_one(policy, request).token_ids.tolist() == completion.token_ids.tolist()
