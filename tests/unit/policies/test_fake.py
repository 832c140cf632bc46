import dataclasses

import numpy as np
import pytest

from rftstream.algorithms.grpo import Grpo
from rftstream.backends.base import OptimizerSettings
from rftstream.backends.fake import FakeBackend
from rftstream.contracts.rollouts import VersionSpan
from rftstream.contracts.tasks import Sampling
from rftstream.contracts.versions import VersionName
from rftstream.models.fake_renderer import FakeRenderer
from rftstream.models.spec import ModelSpec
from rftstream.policies import fake_model
from rftstream.policies.base import SampleRequest
from rftstream.policies.fake import FakePolicy
from rftstream.testing.memory_run import ManualClock
from tests.golden import arithmetic


def weights(skill):
    arrays = {"fake.skill": [skill], "fake.filler": [0.0] * 8}
    return {name: fake_model.serve(np.asarray(values, np.float32), "bfloat16") for name, values in arrays.items()}


def policy(clock=None, skill=0.0, **config):
    spec = ModelSpec(name="fake", folder=None, dtype="bfloat16", context=None)
    opened = FakePolicy(
        FakePolicy.Config(**config), model=spec, renderer=FakeRenderer(), clock=clock or ManualClock(100.0)
    )
    opened.load(weights(skill), VersionName(trainer_epoch=1, version=0))
    return opened


def request(number=0, prompt="3+4=", max_tokens=64, **sampling):
    return SampleRequest(
        request_id=f"r{number}", token_ids=tuple(prompt.encode()), sampling=Sampling(**sampling), seed=number,
        max_tokens=max_tokens,
    )  # fmt: skip


def answers(opened, count=400, **changes):
    for number in range(count):
        opened.submit(request(number, **changes))
    done = arithmetic.drain(opened)
    return [FakeRenderer().decode(done[f"r{number}"].token_ids).strip() for number in range(count)]


@pytest.mark.parametrize("skill", [-2.0, 0.0, 2.0])
def test_skill_decides_how_often_it_is_right(skill):
    share = np.mean([text == "7" for text in answers(policy(skill=skill))])
    assert share == pytest.approx(fake_model.right_probability(skill, "3+4="), abs=0.07)


@pytest.mark.law("derived")
def test_answers_follow_from_the_request_alone():
    assert answers(policy(), 50) == answers(policy(batch_size=3), 50)
    assert answers(policy(answer_depends_on="task"), 50) == answers(policy(answer_depends_on="task", skill=9.0), 50)
    assert answers(policy(skill=9.0), 50) != answers(policy(skill=-9.0), 50)


def test_right_share_and_greedy():
    assert set(answers(policy(answer_depends_on="task", right_share=1.0), 20)) == {"7"}
    assert "7" not in answers(policy(answer_depends_on="task", right_share=0.0), 20)
    assert set(answers(policy(skill=3.0), 20, temperature=0.0)) == {"7"}


def test_the_logprob_of_the_last_digit_is_that_of_the_choice():
    opened = policy(skill=1.0, mean_tokens=5, sigma=0.0)
    opened.submit(request())
    (done,) = opened.step()
    share = fake_model.right_probability(1.0, "3+4=")
    assert len(done.token_ids) == 5
    right = FakeRenderer().decode(done.token_ids).strip() == "7"
    assert np.exp(done.behavior_logprobs[3]) == pytest.approx(share if right else 1 - share)
    assert (done.finish_reason, done.token_ids[-1]) == ("stop", 0)
    assert done.versions == (VersionSpan(start=0, count=len(done.token_ids), trainer_epoch=1, version=0),)


def test_tokens_come_at_their_rate_and_are_stamped():
    clock = ManualClock(100.0)
    opened = policy(clock, tokens_per_s=10.0, mean_tokens=20, sigma=0.0)
    opened.submit(request())
    assert opened.step() == []
    clock.sleep(0.5)
    opened.load(weights(0.0), VersionName(trainer_epoch=1, version=1))
    clock.sleep(1.4)
    assert opened.step() == []
    clock.sleep(0.1)
    (done,) = opened.step()
    assert len(done.token_ids) == 20
    assert done.versions == (
        VersionSpan(start=0, count=5, trainer_epoch=1, version=0),
        VersionSpan(start=5, count=15, trainer_epoch=1, version=1),
    )


@pytest.mark.law("lost")
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"max_tokens": 7}], ids=str)
def test_what_goes_on_elsewhere_is_what_it_would_have_been_bit_for_bit(settings):
    config = {"tokens_per_s": 1.0, "mean_tokens": 9, "sigma": 0.3}
    for number in range(12):
        whole_clock = ManualClock(100.0)
        undisturbed = policy(whole_clock, skill=0.4, **config)
        asked = request(number, "13+4=", **{"max_tokens": 64, **settings})
        undisturbed.submit(asked)
        undisturbed.step()
        whole_clock.sleep(100)
        (whole,) = undisturbed.step()
        for cut in range(1, len(whole.token_ids)):
            clock = ManualClock(100.0)
            first = policy(clock, skill=0.4, **config)
            first.submit(asked)
            first.step()
            clock.sleep(cut)
            assert first.step() == []
            half = first.so_far(asked.request_id)
            assert half.finish_reason == "unfinished"
            second = policy(clock, skill=0.4, **config)
            going_on = dataclasses.replace(
                asked, token_ids=(*asked.token_ids, *half.token_ids.tolist()), num_sampled=cut,
                max_tokens=asked.max_tokens - cut,
            )  # fmt: skip
            second.submit(going_on)
            second.step()
            clock.sleep(100)
            (rest,) = second.step()
            assert rest.finish_reason == whole.finish_reason
            for name in ("token_ids", "behavior_logprobs"):
                joined = np.concatenate([getattr(half, name), getattr(rest, name)])
                assert joined.tobytes() == getattr(whole, name).tobytes()
            assert [(one.start, one.count) for one in rest.versions] == [(0, len(rest.token_ids))]


def test_what_is_complete_is_told_by_the_next_step_alone():
    clock = ManualClock(100.0)
    opened = policy(clock, tokens_per_s=1.0, mean_tokens=5, sigma=0.0)
    opened.submit(request())
    assert opened.so_far("r0") is None
    opened.step()
    clock.sleep(4)
    opened.load(weights(0.0), VersionName(trainer_epoch=1, version=1))
    assert len(opened.so_far("r0").token_ids) == 4
    clock.sleep(1)
    opened.load(weights(0.0), VersionName(trainer_epoch=1, version=2))
    assert opened.so_far("r0") is None
    (done,) = opened.step()
    assert [(one.version, one.count) for one in done.versions] == [(0, 4), (1, 1)]


def test_lengths_have_a_long_tail():
    opened = policy(mean_tokens=40, sigma=1.0)
    for number in range(3000):
        opened.submit(request(number, max_tokens=10**6))
    lengths = np.asarray([len(one.token_ids) for one in arithmetic.drain(opened).values()])
    assert lengths.mean() == pytest.approx(40, rel=0.15)
    assert np.median(lengths) < 0.7 * lengths.mean()
    assert lengths.max() > 5 * lengths.mean()


def test_limits_cut():
    opened = policy(mean_tokens=30, sigma=0.0)
    opened.submit(request(max_tokens=12))
    (done,) = opened.step()
    assert (len(done.token_ids), done.finish_reason) == (12, "length")


def test_some_fail():
    opened = policy(fail_share=0.25)
    for number in range(400):
        opened.submit(request(number))
    done = arithmetic.drain(opened).values()
    assert np.mean([one.finish_reason == "error" for one in done]) == pytest.approx(0.25, abs=0.07)
    assert all((one.error is not None) == (one.finish_reason == "error") for one in done)


def test_slots_abort_and_no_weights():
    clock = ManualClock(100.0)
    opened = policy(clock, batch_size=2, tokens_per_s=1.0)
    for number in range(5):
        opened.submit(request(number))
    opened.step()
    opened.abort("r0")
    opened.abort("r4")
    opened.abort("unknown")
    assert (opened.slots, opened.num_active) == (2, 3)
    clock.sleep(1000)
    assert [one.request_id for one in opened.step()] == ["r1"]
    clock.sleep(1000)
    assert [one.request_id for one in opened.step()] == ["r2"]
    opened._version = None
    opened.submit(request(9))
    assert opened.step() == []


def test_it_says_how_busy_it_is_by_the_clock():
    clock = ManualClock(100.0)
    opened = policy(clock, tokens_per_s=10.0, mean_tokens=1000.0, sigma=0.0, batch_size=2)
    clock.sleep(50)
    for number in range(3):
        opened.submit(request(number, max_tokens=500))
    opened.step()
    clock.sleep(3)
    opened.step()
    opened.sleep()
    clock.sleep(50)
    opened.wake()
    clock.sleep(2)
    opened.step()
    load = opened.engine_load()
    assert (load.num_tokens, load.num_waiting) == (100, 1) and load.busy_s == pytest.approx(5.0)


@pytest.mark.slow
def test_policy_and_backend_learn_together():
    spec = ModelSpec(name="fake", folder=None, dtype="bfloat16", context=None)
    backend = FakeBackend(FakeBackend.Config(), model=spec, optimizer=OptimizerSettings(), seed=0)
    backend.open()
    sampler = dataclasses.replace(arithmetic.SAMPLING, max_tokens=8)
    steps = arithmetic.play(
        policy(), backend, Grpo(Grpo.Config()), FakeRenderer(), steps=50, groups=8, sampling=sampler, top=10
    )
    rewards = [step.reward for step in steps]
    assert np.mean(rewards[:5]) < 0.5
    assert np.mean(rewards[-5:]) > 0.8
