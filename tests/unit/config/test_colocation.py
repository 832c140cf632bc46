"""Which workers share a device with the trainer, and which parts cannot."""

from __future__ import annotations

import pytest

from rftstream.config import loader
from rftstream.config.colocation import check_colocation, is_shared
from rftstream.errors import ConfigError


def make(**settings):
    config = loader.from_dict({
        "run": {"name": "one", "steps": 2},
        "model": {"path": "fake"},
        "tasksets": {"sums": {"source": "arithmetic"}},
        "evaluations": {"held-out": {"source": "arithmetic"}},
        "explorer": {"policy": "hf", "devices": ["cuda:0", "cuda:1"]},
        "evaluator": {"device": "cuda:2"},
        "trainer": {"device": "cuda", "colocate": True},
    })  # fmt: skip
    return loader.replace(config, **settings)


def test_those_on_the_device_of_the_trainer_share_it():
    config = make()
    check_colocation(config)
    assert [is_shared(config, one) for one in ("cuda:0", "cuda", "cuda:1", "cpu")] == [True, True, False, False]
    assert not is_shared(make(trainer__colocate=False), "cuda:0")


@pytest.mark.parametrize(("settings", "message"), [
    ({"trainer__device": "cuda:3"}, "trainer.colocate: no engine is on trainer.device 'cuda:3'"),
    ({"explorer__policy": "openai"}, "explorer.policy: 'openai' cannot give its device free"),
    ({"evaluator__policy": "openai", "evaluator__device": "cuda:0"}, "evaluator.policy: 'openai' cannot give"),
    ({"trainer__backend": "deepspeed"}, "trainer.backend: 'deepspeed' cannot give its device free"),
])  # fmt: skip
def test_who_cannot_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_colocation(make(**settings))
    check_colocation(make(trainer__colocate=False, **settings))


def test_an_engine_elsewhere_may_be_of_any_kind():
    check_colocation(make(evaluator__policy="openai"))
