"""MIX where exploring finds nothing: without the log, a tiny model made on the spot, fixed seeds."""

import numpy as np
import pytest

from rftstream.algorithms.grpo import Grpo
from rftstream.algorithms.mix import Mix
from rftstream.contracts.batches import Experience, LossKind
from rftstream.contracts.demonstrations import Demonstration
from rftstream.contracts.ids import derive_seed
from rftstream.contracts.tasks import ChatMessage, RolloutIds, Sampling
from rftstream.contracts.versions import VersionName
from rftstream.data.demonstrations.tokens import tokenise
from rftstream.models.rendering import open_renderer
from rftstream.policies.base import SampleRequest
from tests.golden import arithmetic
from tests.unit import tiny

STEPS, GROUPS, SIBLINGS = 60, 8, 8
ALONE = 12
"""Steps of GRPO alone. It changes nothing in them, so that more would show no more than that."""
SAMPLING = Sampling(max_tokens=7)
SHOWN = [(a, b) for a in range(5) for b in range(5) if (a + 2 * b) % 2 == 0]


def written(left, right):
    return f"<<{left + right}>>"


def demonstrations(renderer, version):
    chosen = [SHOWN[derive_seed(1, version, place) % len(SHOWN)] for place in range(7)]
    found = []
    for place, (left, right) in enumerate(chosen):
        chat = (ChatMessage(role="user", content=f"{left}+{right}="),
                ChatMessage(role="assistant", content=written(left, right)))  # fmt: skip
        segments = tokenise(Demonstration(demonstration_id="d", source="x", messages=chat), renderer)[None]
        group = f"experts/{version}/{place}/0"
        ids = RolloutIds(rollout_id=f"{group}/0", group_id=group, taskset="experts", sibling=0, group_size=1,
                         sequence=0, min_version=0)  # fmt: skip
        found.append(Experience(
            ids=ids, batch_sequence=version, share=0, position=0, loss_kind=LossKind.sft, segments=segments,
            reward=None, sampling=Sampling(), expert=True,
        ))  # fmt: skip
    return found


def rollouts(policy, renderer, version):
    """Only what is written as it should be has a reward."""
    requests = {}
    for group in range(GROUPS):
        left, right = (derive_seed(0, side, version, group) % 5 for side in ("left", "right"))
        prompt = renderer.render([ChatMessage(role="user", content=f"{left}+{right}=")])
        for sibling in range(SIBLINGS):
            name = f"{version}/{group}/{sibling}"
            request = SampleRequest(request_id=name, token_ids=prompt, sampling=SAMPLING, seed=derive_seed(0, name),
                                    max_tokens=SAMPLING.max_tokens)  # fmt: skip
            requests[name] = request, written(left, right), sibling
            policy.submit(request)
    done = arithmetic.drain(policy)
    return [
        arithmetic.experience(request, done[name], float(renderer.decode(done[name].token_ids) == answer),
                              group=name.rpartition("/")[0], sibling=sibling, size=SIBLINGS)
        for name, (request, answer, sibling) in requests.items()
    ]  # fmt: skip


@pytest.mark.sampled(2, "curve")
@pytest.mark.slow
def test_mix_learns_where_grpo_alone_finds_nothing(tmp_path):
    spec = tiny.make(tmp_path, width=64, seed=1, characters="0123456789+=<>")
    renderer, rewards, before = open_renderer(spec), {}, tiny.state(tiny.backend(spec))
    for algorithm, steps in ((Grpo(Grpo.Config()), ALONE), (Mix(Mix.Config(mu=0.2)), STEPS)):
        policy, backend = tiny.policy(spec), tiny.backend(spec)
        curve = []
        for version in range(steps):
            policy.load(backend.served_tensors(), VersionName(trainer_epoch=1, version=version))
            batch = rollouts(policy, renderer, version)
            if isinstance(algorithm, Mix):
                batch += demonstrations(renderer, version)
            curve.append(arithmetic.train(backend, algorithm, batch, lr=3e-3).reward)
        rewards[type(algorithm)] = curve
        assert (tiny.state(backend) == before) == isinstance(algorithm, Grpo)
    assert max(rewards[Grpo]) == 0
    assert np.mean(rewards[Mix][-10:]) > 0.05 > max(rewards[Mix][:5])
