"""Which workers share a device with the trainer, and which parts cannot."""

import dataclasses

import pytest

from rftstream.backends import BACKENDS
from rftstream.config import loader
from rftstream.config.colocation import check_colocation, is_shared
from rftstream.errors import ConfigError
from rftstream.preflight.checks.advice import find_warnings
from tests.configs import small_run
from tests.suite.each import each


def make(**settings):
    config = small_run(
        run={"name": "one", "steps": 2}, evaluations={"held-out": {"source": "arithmetic"}},
        explorer={"policy": "hf", "devices": ["cuda:0", "cuda:1"]}, evaluator={"device": "cuda:2"},
        trainer={"device": "cuda", "colocate": True},
    )  # fmt: skip
    return loader.replace(config, **settings)


def test_those_on_the_device_of_the_trainer_share_it():
    config = make()
    check_colocation(config)
    assert [is_shared(config, one) for one in ("cuda:0", "cuda", "cuda:1", "cpu")] == [True, True, False, False]
    assert not is_shared(make(trainer__colocate=False), "cuda:0")


@each(("settings", "message"), [
    ({"trainer__device": "cuda:3"}, "trainer.colocate: no engine is on trainer.device 'cuda:3'"),
    ({"explorer__policy": "openai"}, "explorer.policy: 'openai' cannot give its device free"),
    ({"evaluator__policy": "openai", "evaluator__device": "cuda:0"}, "evaluator.policy: 'openai' cannot give"),
    ({"trainer__backend": "deepspeed", "backends": {"deepspeed": {"processes": 2}}},
     r"backends.deepspeed.processes: got 2, expected 1 with trainer.colocate"),
])  # fmt: skip
def test_who_cannot_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_colocation(make(**settings))
    check_colocation(make(trainer__colocate=False, **settings))


MAKES = {"into": "more"}
GROWING = {"sums": {"source": "arithmetic"}, "more": {"source": "log:problems"}}
JUDGED = {"sums": {"source": "arithmetic", "reward": [{"name": "exact"}, {"name": "reward_model", "device": "cuda"}]}}


@each(("settings", "where"), [
    ({"tasksets": GROWING, "synthesiser": MAKES | {"device": "cuda:0"}}, "synthesiser.device"),
    ({"tasksets": JUDGED}, "tasksets.sums.reward: reward_model"),
    ({"evaluations": JUDGED, "evaluator__device": "cuda:0"}, "evaluations.sums.reward: reward_model"),
    ({"tasksets": {"sums": {"source": "arithmetic", "reward": "reward_model"}},
      "rewards": {"reward_model": {"device": "cuda:0"}}}, "tasksets.sums.reward: reward_model"),
])  # fmt: skip
def test_a_model_that_would_stay_on_the_device_is_refused(settings, where):
    with pytest.raises(ConfigError, match=f"{where}: on trainer.device 'cuda', which engines and trainer have in turn"):
        check_colocation(make(**settings))
    check_colocation(make(**settings, explorer__devices=["cuda:1"], trainer__device="cuda:1"))
    check_colocation(make(**settings, trainer__colocate=False))


def test_on_a_cpu_there_is_room_for_models_that_stay():
    cpu = {"trainer__device": "cpu", "explorer__devices": ["cpu"], "evaluator__device": "cpu"}
    check_colocation(make(tasksets=GROWING, synthesiser=MAKES, **cpu))


def test_an_evaluator_that_hardly_gets_the_device_is_warned_of():
    demonstrations = {"experts": {"source": "jsonl:x.jsonl", "per_batch": 2}, "run": {"name": "one"}}
    stages = [{"steps": 2, "algorithm": "sft"}, {"steps": 2, "algorithm": "grpo"}]

    def warned(**settings):
        found = find_warnings(make(**settings), {}, None, None)
        return any("batches of demonstrations alone always are" in one for one in found)

    assert warned(**demonstrations, stages=stages, evaluator__device="cuda:0")
    assert not warned(**demonstrations, stages=stages)
    assert not warned(evaluator__device="cuda:0")


def test_a_backend_in_one_process_shares_and_one_that_never_leaves_does_not(monkeypatch):
    check_colocation(make(trainer__backend="deepspeed"))
    monkeypatch.setitem(BACKENDS, "deepspeed", dataclasses.replace(BACKENDS["deepspeed"], leaves_device=False))
    with pytest.raises(ConfigError, match=r"trainer.backend: 'deepspeed' cannot give its device free"):
        check_colocation(make(trainer__backend="deepspeed"))


def test_an_engine_elsewhere_may_be_of_any_kind():
    check_colocation(make(evaluator__policy="openai"))
