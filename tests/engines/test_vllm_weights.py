"""The real vLLM reads new weights where a follower changes them, with one worker and with two that share each layer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rftstream.clock import SystemClock
from rftstream.models.rendering import open_renderer
from rftstream.policies.vllm.policy import VllmPolicy
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.publisher import WeightsPublisher
from rftstream.weights.shared_memory import SharedTensors
from rftstream.weights.snapshot import RawTensor
from rftstream.weights.stores.store import ObjectStore
from tests.engines.replay import Replay
from tests.engines.test_in_flight import PROMPTS, check_stamps
from tests.engines.test_vllm import so_far
from tests.unit import tiny

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]

LAYER = "model.layers.0."
FUSED = [f"{LAYER}self_attn.{one}_proj.weight" for one in "kqv"]
STEPS = [
    ("one of three tensors of a fused layer", [f"{LAYER}self_attn.k_proj.weight"], FUSED),
    ("one of two", [f"{LAYER}mlp.up_proj.weight"], [f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"]),
    ("embeddings and a norm", ["model.embed_tokens.weight", "model.norm.weight"],
     ["model.embed_tokens.weight", "model.norm.weight"]),
]  # fmt: skip
"""What changes from one version to the next, and what an engine's loader has to be given for it."""

EXPERT = f"{LAYER}mlp.experts.1.down_proj.weight"
EXPERTS = [f"{LAYER}mlp.experts.{one}.{what}_proj.weight" for one in range(4) for what in ("down", "gate", "up")]
MIXTURE = [STEPS[0], ("one tensor of one expert of four", [EXPERT], EXPERTS), STEPS[2]]


class Followed:
    """Versions on their way from a trainer to an engine, with a follower in between. `calls`: what the engine's
    workers were told and answered."""

    def __init__(self, policy, spec, folder, check):
        self.policy, self.replay, self.check_completion = policy, Replay(spec), check
        self.names, self.calls = [], []
        served = tiny.backend(spec).served_tensors()
        self.state = {name: np.array(np.frombuffer(one.data, np.uint8)) for name, one in served.items()}
        self.forms = {name: (one.dtype, one.shape) for name, one in served.items()}
        self.store, self.dtype = ObjectStore("file://weights", base=folder), spec.dtype
        self.follower = WeightsFollower(self.store, "m", threads=1, shared=True)
        self.random = np.random.default_rng(0)
        self.trainer_starts()

    def trainer_starts(self):
        self.publisher = WeightsPublisher(self.store, "m", self.dtype, anchor_every=1000, threads=1)

    def listen(self):
        """Note what the workers are asked. The engine has started."""
        engine, ask = self.policy._engine._engine, self.policy._engine._engine.collective_rpc

        async def noted(name, args=()):
            answers = await ask(name, args=args)
            self.calls.append((args, answers))
            return answers

        engine.collective_rpc = noted

    def publish(self, changed=(), epoch=1):
        """Publish the next version: half of the values of these tensors are others."""
        for name in changed:
            values = self.values(name)
            rate = torch.from_numpy(self.random.normal(0, 0.3, values.shape) * (self.random.random(values.shape) < 0.5))
            values += rate.to(values.dtype)
        name = tiny.name(len(self.names), epoch)
        tensors = {one: RawTensor(*self.forms[one], value) for one, value in self.state.items()}
        self.replay.add(name, tensors)
        told = self.publisher.publish(tensors, name, resumed=not self.names or epoch > self.names[-1].trainer_epoch)
        assert self.follower.announced(told)
        self.names.append(name)

    def values(self, name):
        dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[self.forms[name][0]]
        return torch.from_numpy(self.state[name]).view(dtype)

    def load(self):
        """Give the engine the newest version."""
        newest = self.follower.newest()
        tensors = self.follower.fetch(newest)
        assert isinstance(tensors, SharedTensors)
        self.policy.load(tensors, newest.name)
        return tensors

    def check(self, number):
        request = tiny.request(number, PROMPTS[number % 4], max_tokens=60, min_tokens=60)
        completion = tiny.drain_one(self.policy, request)
        name = self.names[-1]
        stamps = [(one.trainer_epoch, one.version) for one in completion.versions]
        assert stamps == [(name.trainer_epoch, name.version)]
        self.check_completion(self.replay, request, completion, self.names)


def check_nearest(replay, request, completion, names):
    """The stamped versions explain the logprobs far better than any other version does, whatever the arithmetic."""
    assert completion.error is None
    own = np.abs(replay.logprobs(request, completion) - completion.behavior_logprobs).mean()
    stamped = {(one.trainer_epoch, one.version) for one in completion.versions}
    for name in names:
        if (name.trainer_epoch, name.version) not in stamped:
            other = np.abs(replay.logprobs(request, completion, only=name) - completion.behavior_logprobs).mean()
            assert own < other / 2, name


def check_followed(policy, spec, folder, num_workers, subtests, *, check=check_stamps, steps=STEPS):
    """All versions arrive whole at all workers, which read from one memory what they need of it."""
    followed = Followed(policy, spec, folder, check)
    followed.publish()
    first = followed.load()
    assert len(first) == len(followed.state)
    followed.check(0)
    followed.listen()
    for number, (what, changed, given) in enumerate(steps):
        with subtests.test(what):
            followed.publish(changed)
            tensors = followed.load()
            (args, answers), followed.calls = followed.calls[-1], []
            assert args == (first.memory.path, sorted(changed)) and tensors.memory is first.memory
            assert answers == [{"tensors": len(first), "changed": len(changed), "given": len(given)}] * num_workers
            followed.check(number)

    with subtests.test("several deltas at once, while rollouts go on"):
        requests = {f"r{n}": tiny.request(n, PROMPTS[n % 4], max_tokens=160, min_tokens=160) for n in range(4)}
        for request in requests.values():
            policy.submit(request)
        done = {}
        for changed in (FUSED[:1], [EXPERT if EXPERT in followed.state else f"{LAYER}mlp.down_proj.weight"]):
            while len(done) < 4 and so_far(policy, {n: r for n, r in requests.items() if n not in done}) < 20:
                done |= {one.request_id: one for one in policy.step()}
            followed.publish(changed)
            followed.publish(FUSED[1:2])
            followed.load()
        assert [len(args[1]) for args, _ in followed.calls] == [2, 2]
        done |= tiny.drain(policy)
        for request_id, request in requests.items():  # without others: tokens that repeat say little about versions
            check(followed.replay, request, done[request_id], ())

    with subtests.test("the next trainer's anchor, in which one tensor is another one"):
        followed.calls.clear()
        followed.trainer_starts()
        followed.publish(["model.norm.weight"], epoch=2)
        followed.load()
        assert [args[1] for args, _ in followed.calls] == [["model.norm.weight"]]
        followed.check(0)


def open_policy(spec, device="cpu", **engine):
    config = VllmPolicy.Config(batch_size=16, engine={"enforce_eager": True, **engine})
    placed = dataclasses.replace(spec, device=device)
    return VllmPolicy(config, model=placed, renderer=open_renderer(spec), clock=SystemClock())


@pytest.mark.parametrize("ranks", [1, 2])
def test_workers_read_what_changed_where_it_is_followed(tmp_path, subtests, ranks):
    spec = tiny.make(tmp_path, seed=3, width=128, context=256)
    policy = open_policy(spec, kv_cache_memory_bytes=1 << 26, tensor_parallel_size=ranks)
    try:
        check_followed(policy, spec, tmp_path, ranks, subtests)
    finally:
        policy.close()


def test_experts_change_while_it_samples(tmp_path, subtests):
    spec = tiny.make(tmp_path, family="qwen3_moe", seed=3, width=128, context=256)
    policy = open_policy(spec, kv_cache_memory_bytes=1 << 26)
    try:
        check_followed(policy, spec, tmp_path, 1, subtests, steps=MIXTURE)
    finally:
        policy.close()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_workers_on_gpus_read_what_changed_where_it_is_followed(tmp_path, subtests, ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    spec = tiny.make(tmp_path, dtype="bfloat16", seed=3, width=256, context=256)
    devices = ",".join(map(str, range(ranks)))
    policy = open_policy(spec, f"cuda:{devices}", gpu_memory_utilization=0.3, tensor_parallel_size=ranks)
    try:
        check_followed(policy, spec, tmp_path, ranks, subtests, check=check_nearest)
    finally:
        policy.close()
