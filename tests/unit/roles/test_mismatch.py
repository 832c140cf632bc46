"""The warning that sampler and trainer disagree: when it comes, and which cause it names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rftstream.contracts.tasks import Sampling
from rftstream.roles.trainer.update_cycle import MismatchWatch, cause_of_mismatch
from tests.flow.scene import make_config
from tests.suite.each import each
from tests.unit.algorithms.test_grpo import experience


def batch(**sampling: Any) -> list[Any]:
    return [replace(experience("a", 1.0), sampling=Sampling(**sampling)), experience("a", 0.0)]


def test_it_warns_once_and_again_when_it_is_twice_as_much(caplog: pytest.LogCaptureFixture) -> None:
    watch = MismatchWatch(make_config())
    told = []
    for found in (0.05, 0.06, 0.11, 0.13, 0.2, 0.27, float("nan")):
        watch.look({"mismatch_k3": found}, batch())
        told.append(len(caplog.records))
    assert told == [0, 1, 1, 2, 2, 3, 3]
    watch.look({}, batch())
    assert "mismatch_k3 is 0.06 nats per token, expected at most 0.05 (trainer.warn_mismatch)" in caplog.messages[0]
    assert "expected at most 0.05" in caplog.messages[2]


def test_it_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    MismatchWatch(make_config(trainer__warn_mismatch=0.0)).look({"mismatch_k3": 9.0}, batch())
    assert caplog.records == []


@each(("settings", "values", "sampling", "says"), [
    ({"run__imported_from": "/runs/a"}, {}, {"top_p": 0.5}, "the rollouts are another run's"),
    ({"run__imported_from": "/runs/a"}, {}, {}, "; of the algorithms topr and asymre are made for that"),
    ({"run__imported_from": "/runs/a", "trainer__algorithm": "topr"}, {}, {}, "which topr is made for"),
    ({"explorer__policy": "openai"}, {}, {}, "by the server's own weights"),
    ({"explorer__policy": "openai", "policies__openai": {"update": "vllm"}}, {"staleness_mean": 2.0}, {}, "2 versions"),
    ({"trainer__masks": "own"}, {"staleness_mean": 3.0}, {"top_p": 0.9, "min_tokens": 2},
     "sampling.min_tokens, sampling.top_p change"),
    ({"explorer__policy": "hf"}, {"staleness_mean": 3.0}, {"top_p": 0.9, "min_tokens": 2}, "3 versions old on average"),
    ({"explorer__policy": "hf"}, {}, {"top_p": 0.9, "presence_penalty": 0.1}, "sampling.presence_penalty change"),
    ({}, {}, {"temperature": 0.0}, "sampling.temperature change"),
    ({}, {"staleness_mean": 1.5}, {"temperature": 0.7, "stop": ("x",)}, "1.5 versions old on average"),
    ({}, {"router_entropy": 0.5}, {}, "set trainer.routing = 'replay'"),
    ({"trainer__routing": "replay"}, {"router_entropy": 0.5}, {}, "the trainer in float32"),
    ({"model__dtype": "bfloat16"}, {"staleness_mean": 0.0}, {},
     "nothing here is old or truncated, so the two compute otherwise: the sampler in model.dtype = 'bfloat16', the "
     "trainer in float32"),
    ({}, {"staleness_mean": 0.875}, {},
     "0.88 versions old on average, and the policy moves fast (lower trainer.lr or feeder.max_staleness), or the two"),
])  # fmt: skip
def test_the_likely_cause(
    settings: dict[str, Any], values: dict[str, float], sampling: dict[str, Any], says: str
) -> None:
    assert says in cause_of_mismatch(make_config(**settings), values, batch(**sampling))
