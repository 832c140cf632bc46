"""A served model that is given new weights: when it is asked what, and what it finds in the folder."""

import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rftstream.clock import SystemClock
from rftstream.config.parts import registry
from rftstream.config.parts.part_names import check_part_names
from rftstream.contracts.rollouts import VersionSpan
from rftstream.errors import ConfigError, PolicyError, WeightsError
from rftstream.models.fake_renderer import FakeRenderer
from rftstream.policies.openai import routing
from rftstream.policies.openai.policy import OpenAiPolicy
from rftstream.policies.served import served_parameters
from rftstream.weights.snapshot import RawTensor
from tests.flow.scene import make_config
from tests.suite.each import each
from tests.unit import tiny
from tests.unit.served import echo


@pytest.fixture
def updated(server, tmp_path):
    """A policy whose server is given weights; what each request found in the folder that it was to load."""
    spec = tiny.make(tmp_path / "model", seed=3)
    (tmp_path / "served").mkdir()
    found = []

    def answer(body):
        if "prompt" in body:
            return echo(body)
        if "folder" in body:
            folder = Path(body["folder"])
            found.append((body, sorted(one.name for one in folder.iterdir()), load_file(folder / "model.safetensors")))
        return {"success": True}

    server.usual = answer
    update = ({"path": "/load", "body": {"folder": "{folder}", "is": ["version {version}"]}}, {"path": "/flush"})
    settings = {"update": update, "update_folder": str(tmp_path / "served")}

    def make(**more):
        config = registry.build_config(OpenAiPolicy, {"url": server.url, "model": "it", **settings, **more}, where="x")
        opened.append(OpenAiPolicy(config, model=spec, renderer=FakeRenderer(64), clock=SystemClock()))
        return opened[-1]

    opened = []
    yield spec, make, found
    for one in opened:
        one.close()


def weights(spec, value):
    parameters, _ = served_parameters(spec)
    return {
        name: RawTensor(dtype, shape, np.full(shape, value, np.float32).tobytes())
        for name, (dtype, shape) in parameters.items()
    }


def until(policy, condition):
    deadline = time.monotonic() + 120
    done = []
    while not condition():
        assert time.monotonic() < deadline
        done += policy.step()
        time.sleep(0.001)
    return done


def held(policy):
    """The version that the server has."""
    (engine,) = policy._engines.values()
    return engine.version


def on_first(updated, version=0, **settings):
    """The model, a policy whose server has its first version, and what requests find."""
    spec, make, found = updated
    policy = make(**settings)
    policy.load(weights(spec, 1.0), tiny.name(version))
    until(policy, lambda: held(policy) == tiny.name(version))
    return spec, policy, found


def paths(server):
    return [path for path, _ in server.requests]


def test_a_server_is_given_each_version_and_asked_only_then(server, updated):
    spec, make, found = updated
    policy = make()
    policy.submit(tiny.request(0, (5, 6, 7), max_tokens=2))
    assert policy.step() == [] and not server.requests
    policy.load(weights(spec, 1.0), tiny.name(4))
    assert policy.version == tiny.name(4)
    done = tiny.drain(policy)
    assert paths(server) == ["/load", "/flush", "/v1/completions"]
    ((body, names, tensors),) = found
    assert body["is"] == ["version 4"] and {"config.json", "model.safetensors"} <= set(names)
    assert tensors.keys() == weights(spec, 1.0).keys() and all((one == 1.0).all() for one in tensors.values())
    assert done["r0"].versions == (VersionSpan(start=0, count=2, trainer_epoch=1, version=4),)


def test_what_was_asked_is_answered_before_the_server_gets_new_weights(server, updated):
    spec, policy, found = on_first(updated, batch_size=2)
    server.hold.clear()
    for number in range(3):  # one more than are asked at once
        policy.submit(tiny.request(number, (5, 6, 7), max_tokens=2))
    until(policy, lambda: len(server.requests) == 4)
    policy.load(weights(spec, 2.0), tiny.name(1))
    policy.load(weights(spec, 3.0), tiny.name(2))  # before 1 could be given: it never is
    policy.submit(tiny.request(3, (5, 6, 7), max_tokens=2))
    assert policy.step() == [] and len(server.requests) == 4
    server.hold.set()
    done = tiny.drain(policy)
    versions = {key: one.versions[0].version for key, one in done.items()}
    assert versions == {"r0": 0, "r1": 0, "r2": 2, "r3": 2}
    assert paths(server) == ["/load", "/flush", *["/v1/completions"] * 2, "/load", "/flush", *["/v1/completions"] * 2]
    assert [float(tensors["model.norm.weight"][0]) for _, _, tensors in found] == [1.0, 3.0]


def test_a_version_that_comes_while_another_is_being_given_is_the_next(server, updated):
    spec, make, _ = updated
    policy = make()
    server.hold.clear()
    for version in range(3):
        policy.load(weights(spec, float(version)), tiny.name(version))
        until(policy, lambda: len(server.requests) == 1)
    policy.submit(tiny.request(0, (5, 6, 7), max_tokens=2))
    server.hold.set()
    done = tiny.drain(policy)
    assert done["r0"].versions[0].version == 2
    loads = [body["is"] for path, body in server.requests if path == "/load"]
    assert loads == [["version 0"], ["version 2"]]


def test_old_folders_are_deleted_also_those_of_a_worker_that_was_killed(server, updated, tmp_path):
    spec, make, _ = updated
    policy = make()
    for version in range(4):
        policy.load(weights(spec, 1.0), tiny.name(version))
        until(policy, lambda version=version: held(policy) == tiny.name(version))
    (folder,) = (tmp_path / "served").iterdir()
    assert [one.name for one in folder.iterdir()] == ["000001-00000003"]
    again = make()  # the first is not asked to close
    assert list(folder.iterdir()) == []
    again.close()
    assert not folder.exists()


def test_a_version_that_a_server_still_has_may_be_loaded_again(server, updated):
    spec, policy, found = on_first(updated, version=1)
    policy.load(weights(spec, 1.0), tiny.name(1))
    server.hold.clear()
    policy.load(weights(spec, 2.0), tiny.name(2))
    until(policy, lambda: len(server.requests) >= 3)
    policy.load(weights(spec, 1.0), tiny.name(1))
    server.hold.set()
    assert tiny.drain_one(policy, tiny.request(0)).versions[0].version == 1
    assert float(found[-1][2]["model.norm.weight"][0]) == 1.0


def test_weights_that_cannot_be_written_leave_the_server_those_that_it_has(server, updated, tmp_path):
    spec, policy, found = on_first(updated, version=1)
    wrong = weights(spec, 2.0)
    wrong.popitem()
    with pytest.raises(WeightsError):
        policy.load(wrong, tiny.name(2))
    server.answers.append((None, None))
    assert tiny.drain_one(policy, tiny.request(0)).versions[0].version == 1
    assert [body["is"] for body, _, _ in found] == [["version 1"]] * 2, "its folder is still there"


def test_a_forgotten_request_holds_up_new_weights_until_its_thread_knows(server, updated):
    spec, policy, _ = on_first(updated)
    server.hold.clear()
    policy.submit(tiny.request(1, (5, 6, 7), max_tokens=2))
    until(policy, lambda: len(server.requests) == 3)
    policy.abort("r1")
    policy.load(weights(spec, 2.0), tiny.name(1))
    policy.submit(tiny.request(2, (5, 6, 7), max_tokens=2))
    server.hold.set()
    assert tiny.drain(policy)["r2"].versions[0].version == 1
    assert paths(server).count("/load") == 2, "nothing was lost"


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_server_that_fails_and_is_there_is_not_given_the_weights_again(server, updated, status, monkeypatch):
    monkeypatch.setattr(routing, "FIRST_PAUSE_S", 0.002)
    _, policy, _ = on_first(updated)
    server.answers.append((status, {"error": "later"}))
    done = tiny.drain_one(policy, tiny.request(0, (5, 6, 7), max_tokens=2))
    assert done.token_ids.tolist() == [5, 6]
    assert paths(server) == ["/load", "/flush", "/v1/completions", "/v1/completions"]


@pytest.mark.parametrize("gone", [(None, None), (502, {"error": "none there"})], ids=["no answer", "no gateway"])
def test_a_server_that_was_gone_is_given_the_weights_again(server, updated, gone):
    """It may have begun anew, with those that it was started with."""
    _, policy, found = on_first(updated)
    server.answers.append(gone)
    policy.submit(tiny.request(0, (5, 6, 7), max_tokens=2))
    done = tiny.drain(policy)
    assert done["r0"].token_ids.tolist() == [5, 6] and done["r0"].versions[0].version == 0
    assert paths(server) == ["/load", "/flush", "/v1/completions", "/load", "/flush", "/v1/completions"]
    assert [body["is"] for body, _, _ in found] == [["version 0"]] * 2


def test_a_server_that_never_answers_is_given_up(server, updated):
    _, policy, _ = on_first(updated, batch_size=1, tries=3)
    usual = server.usual
    server.usual = lambda body: {"error": "x"} if "prompt" in body else usual(body)
    server.answers += 4 * [(502, {}), (200, {}), (200, {})]
    policy.submit(tiny.request(0))
    with pytest.raises(PolicyError, match=r"502.*4 times in a row"):
        tiny.drain(policy)


def test_a_server_that_cannot_flush_yet_is_asked_again(server, updated):
    spec, make, _ = updated
    policy = make()
    server.answers += [(200, {}), (200, {"success": False}), (200, {"success": False})]
    policy.load(weights(spec, 1.0), tiny.name(0))
    tiny.drain_one(policy, tiny.request(0))
    assert paths(server) == ["/load", "/flush", "/flush", "/flush", "/v1/completions"]


@pytest.mark.parametrize(("update", "answers", "says"), [
    (None, [(200, {}), *[(200, {"success": False, "message": "busy"})] * 5], "new weights: .*/flush: .*busy"),
    ("vllm", [(404, {"detail": "Not Found"})], "/collective_rpc: 404: .*; vLLM has this .*VLLM_SERVER_DEV_MODE=1"),
    (None, [(400, {"error": {"message": "no such file"}})], "new weights: the server answered 400: no such file"),
])  # fmt: skip
def test_new_weights_that_the_server_does_not_take(server, updated, update, answers, says):
    spec, make, _ = updated
    policy = make(**({"update": update} if update else {}))
    server.answers += answers
    policy.load(weights(spec, 1.0), tiny.name(0))
    policy.submit(tiny.request(0))
    with pytest.raises(PolicyError, match=says):
        tiny.drain(policy)


def test_another_models_weights_are_refused(server, updated):
    spec, make, _ = updated
    policy = make()
    tensors = weights(spec, 1.0)
    tensors.popitem()
    with pytest.raises(WeightsError, match="is missing"):
        policy.load(tensors, tiny.name(0))


def test_a_folder_that_cannot_be_written_to(server, updated, tmp_path):
    _, make, _ = updated
    with pytest.raises(ConfigError, match=r"policies\.openai\.update_folder: .*nowhere"):
        make(update_folder=str(tmp_path / "nowhere"))


@each(("sets", "says"), [
    ({}, "1 explorer and 1 evaluator would give"),
    ({"explorer__count": 3, "evaluator__policy": "hf"}, "3 explorers would give"),
    ({"evaluator__policy": "hf"}, None),
    ({"explorer__policy": "hf", "evaluator__policy": "openai"}, None),
])  # fmt: skip
def test_a_server_that_two_workers_would_give_weights(sets, says):
    run = make_config(**{
        "explorer__policy": "openai", "policies__openai": {"url": "http://x/v1", "model": "it", "update": "vllm"},
        "evaluations__it": {"source": "arithmetic"}, "transport__kind": "embedded", **sets,
    })  # fmt: skip
    if says is None:
        check_part_names(run)
    else:
        with pytest.raises(ConfigError, match=says):
            check_part_names(run)
