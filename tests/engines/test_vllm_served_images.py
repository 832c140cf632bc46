"""vLLM's own server, with a made model that sees, as what the policy `openai` samples from and gives weights to."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rftstream.clock import SystemClock
from rftstream.models.rendering import open_renderer
from rftstream.policies.openai.policy import OpenAiPolicy
from tests.engines.test_vllm import pytestmark  # noqa: F401
from tests.engines.test_vllm_images import MODEL, check, sampled, versions  # noqa: F401
from tests.engines.test_vllm_served import serving
from tests.unit import tiny
from tests.unit.policies.test_images import PICTURES, prompted

OPTIONS = ("--enable-scale-out", "--mm-processor-kwargs", '{"backend": "pil"}', "--load-format", "dummy")


@pytest.fixture(scope="module")
def server(spec, tmp_path_factory):
    with serving(spec, tmp_path_factory.mktemp("server") / "log", *OPTIONS) as url:
        yield url


def test_a_server_samples_from_prompts_with_images(server, spec, versions, tmp_path):  # noqa: F811
    """Each version in turn, the first twice: what another one made of an image must not be taken."""
    config = OpenAiPolicy.Config(
        url=server, model="made", batch_size=16, update="vllm-cpu", update_folder=str(tmp_path), timeout_s=120.0
    )
    policy = OpenAiPolicy(
        config, model=spec, renderer=open_renderer(spec), clock=SystemClock(), images=tiny.images(spec)
    )
    requests = [prompted(spec, n) for n in range(8)]
    requests += [prompted(spec, n, images=PICTURES[n - 8 : n - 6]) for n in (8, 9)]
    requests += [prompted(spec, 10, images=[])]
    for number, (backend, tensors) in enumerate([*versions, versions[0]]):
        policy.load(tensors, tiny.name(number % 2))
        for request, completion in zip(requests, sampled(policy, requests), strict=True):
            check(backend, request, completion)
            assert {span.version for span in completion.versions} == {number % 2}

    hot = [prompted(spec, n, temperature=2.0, max_tokens=64, min_tokens=64) for n in range(32)]
    said = np.concatenate([one.token_ids for one in sampled(policy, hot)])
    assert open_renderer(spec).images.token_id not in said and len(set(said.tolist())) == tiny.VOCABULARY - 1

    good = prompted(spec, 0)
    other = dataclasses.replace(good, images=(dataclasses.replace(good.images[0], count=15),))
    assert f"a prompt of {len(good.token_ids) + 1} tokens, expected" in sampled(policy, [other])[0].error
    policy.close()
