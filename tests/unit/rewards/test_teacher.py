"""The teacher: logprobs of exactly a rollout's tokens, served by a small server of our own or from a model folder; what
cannot be compared has no verdict."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rftstream.config.loader import from_dict
from rftstream.contracts.verdicts import UnscorableReason, VerifiedRollout
from rftstream.contracts.versions import StepRecord
from rftstream.errors import ConfigError, RewardError, RewardTimeout
from rftstream.rewards import teacher as teacher_module
from rftstream.rewards.base import Score, TokenSegment
from rftstream.rewards.resolve import build_reward
from rftstream.rewards.scorer import ProcessScorer
from rftstream.rewards.teacher import TeacherReward
from rftstream.testing import Simulation
from tests.flow.scene import make_config
from tests.suite.each import each
from tests.unit import tiny
from tests.unit.reward_inputs import reward_input
from tests.unit.rewards.scoring import replies_of


def segment(ids, mask, logprobs=None):
    logprobs = [-1.0] * len(ids) if logprobs is None else logprobs
    return TokenSegment(
        token_data=np.asarray(ids, "<i4").tobytes(), mask_data=np.asarray(mask, "u1").tobytes(),
        logprob_data=np.asarray(logprobs, "<f4").tobytes(),
    )  # fmt: skip


def item(*segments):
    return reward_input("5", "5", prompt="2+3=", data_source="", segments=segments)


def judged(body, *, change=None):
    """As vLLM answers: a logprob of -id/4 for each token, and the likeliest one beside it."""
    places = [None, *({str(one): {"logprob": -one / 4, "rank": 2, "decoded_token": "x"}, "99": {"logprob": -0.1}}
                      for one in body["prompt"][1:])]  # fmt: skip
    if change is not None:
        change(places)
    return {"choices": [{"text": "", "finish_reason": "length", "prompt_logprobs": places}]}


usual = judged


def served(server, **settings):
    return TeacherReward(TeacherReward.Config(**{"url": server.url, "model": "big", "tries": 2, **settings}))


def test_it_is_asked_about_the_tokens_and_nothing_else(server):
    score = served(server, api_key="sk-secret", extra={"priority": 1})(item(segment([8, 4, 2], [0, 1, 1])))
    ((path, body),) = server.requests
    assert path == "/v1/completions"
    assert body == {"model": "big", "prompt": [8, 4, 2], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1,
                    "priority": 1}  # fmt: skip
    assert server.keys == ["Bearer sk-secret"]
    assert score.additions["teacher_logprobs"].numpy().tolist() == [0.0, -1.0, -0.5]
    assert score.reward == pytest.approx(((-1.0 + 1) + (-0.5 + 1)) / 2)


def test_segments_stand_one_after_the_other(server):
    one, unsampled, other = segment([8, 4, 2], [0, 1, 0]), segment([3, 3], [0, 0]), segment([6, 6], [1, 1], [0.0, -2.0])
    score = served(server)(item(one, unsampled, other))
    assert score.additions["teacher_logprobs"].numpy().tolist() == [0.0, -1.0, 0.0, 0.0, 0.0, 0.0, -1.5]
    assert score.reward == pytest.approx((0.0 + 0.5) / 2)
    assert len(server.requests) == 2


def cut(places):
    del places[-1]


def lose(places):
    del places[1]["4"]


def spoil(places):
    places[2]["2"]["logprob"] = math.nan


@pytest.mark.law("unscorable")
@pytest.mark.parametrize(("answer", "says"), [
    ((200, judged({"prompt": [8, 4, 2]}, change=cut)), "the server gave 2 prompt_logprobs for 3 tokens"),
    ((200, judged({"prompt": [8, 4, 2]}, change=lose)), r"no prompt_logprobs of these tokens \(KeyError: '4'\)"),
    ((200, judged({"prompt": [8, 4, 2]}, change=spoil)), "the logprob of token 2 is nan, expected a finite number"),
    ((200, {"choices": [{"text": "hi"}]}), "no prompt_logprobs of these tokens"),
    ((200, {}), "no prompt_logprobs of these tokens"),
    ((400, {"error": {"message": "too long"}}), "400: too long; is its context longer than the rollout"),
    ((401, {"error": {"message": "wrong key sk-secret"}}), r"401: wrong key \*\*\*; mend url, model or api_key in \["),
])  # fmt: skip
def test_what_cannot_be_compared_has_no_score(server, answer, says):
    server.answers.append(answer)
    with pytest.raises(RewardError, match=says) as error:
        served(server, api_key="sk-secret")(item(segment([8, 4, 2], [0, 1, 1])))
    assert "sk-secret" not in str(error.value)


def test_a_busy_server_is_asked_again_and_then_given_up(server):
    server.answers += [(500, {})]
    assert isinstance(served(server)(item(segment([8, 4], [0, 1]))), Score)
    server.answers += [(500, {"error": "out of memory"})] * 2
    with pytest.raises(RewardError, match="500: out of memory, after 2 tries"):
        served(server)(item(segment([8, 4], [0, 1])))


def test_a_silent_server_is_a_timeout(server):
    server.hold.clear()
    with pytest.raises(RewardTimeout, match=r"within 0.05 s \(rewards.teacher.timeout_s"):
        served(server, timeout_s=0.05)(item(segment([8, 4], [0, 1])))
    assert len(server.requests) == 1, "the verifier tries again"
    server.hold.set()


def test_a_rollout_without_sampled_tokens_has_no_score(server):
    with pytest.raises(RewardError, match="no sampled token"):
        served(server)(item(segment([8, 4], [1, 0])))
    assert server.requests == []


def test_its_version_changes_with_the_teacher_and_not_with_the_key(server):
    version = served(server, api_key="one").version
    assert version == served(server, api_key="two", timeout_s=9.0).version
    assert version != served(server, model="bigger").version


@each(("settings", "says"), [
    ({}, "expected url"),
    ({"url": "http://127.0.0.1:1/v1", "path": "x"}, "expected url"),
    ({"url": "http://127.0.0.1:1/v1"}, "rewards.teacher: expected url and model, where the model is served"),
    ({"url": "http://me:secret@127.0.0.1/v1", "model": "big"}, "without keys in it"),
    ({"path": "nowhere"}, "rewards.teacher.path: found no config.json in"),
])  # fmt: skip
def test_settings_that_name_no_teacher(settings, says):
    with pytest.raises(ConfigError, match=says):
        TeacherReward(TeacherReward.Config(**settings))


# ------------------------------------------------------------------------------------------------ a model folder


def test_one_that_is_its_own_teacher_sees_no_gap(tmp_path):
    spec = tiny.make(tmp_path)
    policy = tiny.policy(spec, tiny.backend(spec).served_tensors())
    request = tiny.request(0, max_tokens=6)
    done = tiny.drain_one(policy, request)
    prompt, sampled = list(request.token_ids), done.token_ids.tolist()
    own = segment(prompt + sampled, [0] * len(prompt) + [1] * len(sampled),
                  [0.0] * len(prompt) + done.behavior_logprobs.tolist())  # fmt: skip
    teacher = TeacherReward(TeacherReward.Config(path="tiny"), base=str(tmp_path))
    score = teacher(item(own))
    assert score.reward == pytest.approx(0.0, abs=2e-5)
    found = score.additions["teacher_logprobs"].numpy()
    np.testing.assert_allclose(found[len(prompt) :], done.behavior_logprobs, atol=2e-5)
    with pytest.raises(RewardError, match="got token 5000; another tokenizer"):
        teacher(item(segment([1, 5000], [0, 1])))


@pytest.mark.slow
def test_a_folder_is_loaded_once_in_small_pieces_and_named_by_its_content(tmp_path, monkeypatch):
    spec = tiny.make(tmp_path)
    config = TeacherReward.Config(path="tiny")
    first, second = (TeacherReward(config, base=str(tmp_path)) for _ in range(2))
    shutil.copytree(spec.folder, tmp_path / "elsewhere" / "tiny", copy_function=shutil.copyfile)  # with new times
    copied = TeacherReward(config, base=str(tmp_path / "elsewhere"))
    with (tmp_path / "elsewhere" / "tiny" / "config.json").open("a") as file:
        file.write("\n")
    changed = TeacherReward(config, base=str(tmp_path / "elsewhere"))
    assert first.version == second.version == copied.version != changed.version

    asked = item(segment([1, 5, 3, 7, 2, 6], [0, 1, 1, 1, 1, 1]))
    whole = first(asked).additions["teacher_logprobs"].numpy()
    monkeypatch.setattr(teacher_module, "CHUNK", 2)
    np.testing.assert_allclose(second(asked).additions["teacher_logprobs"].numpy(), whole, atol=1e-6)
    assert first._teacher._model is second._teacher._model


@pytest.mark.law("no-pickle")
def test_a_pickled_model_is_not_read(tmp_path):
    spec = tiny.make(tmp_path)
    weights = spec.folder / "model.safetensors"
    torch.save(load_file(weights), spec.folder / "pytorch_model.bin")
    weights.unlink()
    teacher = TeacherReward(TeacherReward.Config(path="tiny"), base=str(tmp_path))
    with pytest.raises(ConfigError, match=r"rewards\.teacher\.path: .* cannot be read as a model"):
        teacher.open()


# ------------------------------------------------------------------------------------------------ in a run

RUN = {"run": {"name": "t", "steps": 1}, "model": {"path": "fake"}}


def test_beside_another_reward_it_stamps_and_may_count_nothing(server):
    parts = [{"name": "exact"}, {"name": "teacher", "weight": 0.0}]
    config = from_dict({**RUN, "tasksets": {"t": {"source": "arithmetic", "reward": parts}},
                        "rewards": {"teacher": {"url": server.url, "model": "big"}}})  # fmt: skip
    score = build_reward(config.tasksets["t"].reward, config)(item(segment([8, 4], [0, 1])))
    assert (score.reward, dict(score.parts)) == (1.0, {"exact": 1.0, "teacher": 0.0})
    assert score.additions["teacher_logprobs"].numpy().tolist() == [0.0, -1.0]
    twice = build_reward("teacher", config)
    assert twice(item(segment([8, 4], [0, 1]))).reward == 0.0


@pytest.mark.slow
def test_children_hand_the_arrays_on(server, monkeypatch):
    monkeypatch.setenv("TEACHERS", "sk-secret")
    config = from_dict({
        **RUN, "tasksets": {"t": {"source": "arithmetic", "reward": "teacher"}},
        "rewards": {"teacher": {"url": server.url, "model": "big", "api_key": "env:TEACHERS", "tries": 1,
                                "max_concurrent": 1}},
        "verifier": {"tries": 1},
    })  # fmt: skip
    server.answers.append((503, {"error": "sk-secret is busy"}))
    failed, scored = replies_of(ProcessScorer(config), [item(segment([8, 4], [0, 1]))] * 2, "t")
    assert (failed.score, failed.reason) == (None, "error")
    assert "503: *** is busy" in failed.detail
    assert scored.score.additions["teacher_logprobs"].numpy().tolist() == [0.0, -1.0]
    assert set(server.keys) == {"Bearer sk-secret"}


def test_a_run_learns_from_a_served_teacher(server, tmp_path):
    """Every verdict and every step has it; what the teacher would not answer is unscorable, and no 0."""
    server.answers.append((400, {"error": "no"}))
    config = make_config(
        run__steps=3, tasksets__sums__reward=[{"name": "exact"}, {"name": "teacher", "weight": 0.0}],
        rewards={"teacher": {"url": server.url, "model": "big", "max_concurrent": 1}}, trainer__algorithm="opd",
        feeder__group_size=3, verifier__tries=1,
    )  # fmt: skip
    simulation = Simulation(config, folder=tmp_path)
    simulation.run()
    assert simulation.audit().fine
    verified = [one for one in simulation.messages("verified") if isinstance(one, VerifiedRollout)]
    failed = [one for one in verified if one.verdict is None]
    assert [one.reason for one in failed] == [UnscorableReason.error]
    assert "the server answered 400: no" in (failed[0].detail or "")
    for one in verified:
        if one.verdict is not None:
            stamped = one.verdict.additions["teacher_logprobs"]
            tokens = np.concatenate([part.token_ids.numpy() for part in one.rollout.segments])
            mask = np.concatenate([part.loss_mask.numpy() for part in one.rollout.segments])
            assert stamped.dtype == "float32"
            np.testing.assert_allclose(stamped.numpy(), np.where(mask, -tokens / 4, 0))
    steps = [one for one in simulation.messages("steps") if isinstance(one, StepRecord) and not one.resumed]
    assert len(steps) == 3
    assert all(step.metrics["teacher_kl"] > 0 for step in steps)
    assert all(step.metrics["part/teacher"] == pytest.approx(-step.metrics["teacher_kl"], abs=2.0) for step in steps)
    assert Path(simulation.folder.final / "config.json").is_file()
