"""Engines that give way to a trainer on their device: when they sleep and wake, and that rollouts go on."""

import dataclasses

import numpy as np
import pytest
import torch

from rftstream.policies.colocated import EngineShare
from rftstream.testing.devices import MemoryDevice, MemoryLock
from tests.unit import tiny


class Sleeper:
    """A policy that takes two looks to fall asleep, and two to wake."""

    def __init__(self):
        self.events, self._looks = [], 0

    def _ends(self, event):
        self._looks += 1
        self.events.append(event)
        if self._looks == 2:
            self._looks = 0
            return True
        return False

    def sleep(self):
        return self._ends("sleep")

    def wake(self):
        return self._ends("wake")


def test_an_engine_gives_way_and_comes_back():
    device, policy = MemoryDevice(), Sleeper()
    trainer, lock = MemoryLock(device, "trainer-0"), MemoryLock(device, "explorer-0")
    lock.wait_shared()
    share = EngineShare(policy, lock, role="explorer")
    assert share.poll() and share.poll() and share.health() == {"engine": "awake"}
    assert not trainer.take()
    assert not share.poll() and not trainer.take(), "it has the memory until it is asleep"
    assert share.health() == {"engine": "falls asleep"}
    assert not share.poll() and trainer.take()
    assert not share.poll() and share.health() == {"engine": "asleep"}
    trainer.release()
    assert not share.poll() and not trainer.take(), "it has the memory from here on"
    assert share.poll(), "it wakes to its end, and is asked again only then"
    assert policy.events == ["sleep", "sleep", "wake", "wake"]
    assert not share.poll() and policy.events[4:] == ["sleep"]


def sampled(policy, *, moved):
    """Completions of requests of which some join later, with everything moved away and back between the steps."""
    requests = [tiny.request(number, max_tokens=12, temperature=1.0) for number in range(5)]
    done = {}
    for request in requests[:3]:
        policy.submit(dataclasses.replace(request, may_go_on=True))
    for number in range(40):
        if moved:
            policy._state.leave()
            assert policy._state.num_bytes_away > 0
            assert all(one.untyped_storage().nbytes() == 0 for one in policy._model.tensors())
            policy._state.come()
        done.update((one.request_id, one) for one in policy.step())
        if number == 4:
            for request in requests[3:]:
                policy.submit(request)
    assert len(done) == 5
    return [(done[name].token_ids.tolist(), done[name].behavior_logprobs.tobytes()) for name in sorted(done)]


@pytest.mark.slow
def test_what_was_moved_away_and_back_samples_the_same_bits(tmp_path):
    spec = tiny.make(tmp_path)
    tensors = tiny.backend(spec).served_tensors()
    assert sampled(tiny.policy(spec, tensors), moved=True) == sampled(tiny.policy(spec, tensors), moved=False)


@pytest.mark.slow
def test_on_a_cpu_nothing_is_moved(tmp_path):
    spec = tiny.make(tmp_path)
    policy = tiny.policy(spec, tiny.backend(spec).served_tensors())
    policy.submit(tiny.request(0))
    policy.step()
    assert policy.sleep() and policy._state.num_bytes_away == 0
    policy.submit(tiny.request(1))
    before = policy.so_far("r0").token_ids.tolist()
    assert policy.step() == [] and policy.so_far("r0").token_ids.tolist() == before
    assert policy.wake() and len(tiny.drain(policy)) == 2


def test_a_policy_that_is_asleep_can_be_closed(tmp_path):
    spec = tiny.make(tmp_path)
    policy = tiny.policy(spec, tiny.backend(spec).served_tensors())
    policy.submit(tiny.request(0))
    policy.step()
    policy._state.leave()
    assert policy.so_far("r0") is not None
    policy.abort("r0")
    policy.close()


@pytest.mark.gpu
def test_a_gpu_is_free_while_hf_sleeps_and_rollouts_go_on(tmp_path):
    spec = tiny.make(tmp_path, width=512, layers=6, dtype="bfloat16")
    on_gpu = dataclasses.replace(spec, device="cuda")
    tensors = tiny.backend(spec).served_tensors()
    found = []
    for sleeps in (False, True):
        policy = tiny.policy(on_gpu, tensors)
        for number in range(4):
            policy.submit(tiny.request(number, max_tokens=20))
        done = {}
        for number in range(60):
            if sleeps and number in (3, 9):
                before = torch.cuda.memory_allocated()
                assert policy.sleep()
                print(f"{before / 1e6:.1f} MB, asleep {torch.cuda.memory_allocated() / 1e6:.2f} MB")
                assert torch.cuda.memory_allocated() < before / 20
                assert policy.wake()
            done.update((one.request_id, one) for one in policy.step())
        assert len(done) == 4
        found.append([(done[f"r{n}"].token_ids.tolist(), done[f"r{n}"].behavior_logprobs) for n in range(4)])
        policy.close()
    for (tokens, logprobs), (others, other_logprobs) in zip(*found, strict=True):
        assert tokens == others
        np.testing.assert_array_equal(logprobs, other_logprobs)
