"""Settings that bound something: a run ends well, goes on and its audit balances, with each at its smallest, just below
what the run has of it, at that, and far above.

A new setting of this kind needs a row in BOUNDS, or in ELSEWHERE. Constants have theirs in
tests/unit/test_constants.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from rftstream.config.sections import RunConfig
from tests.broker.driven import DrivenRun
from tests.e2e.workplace import Workplace

pytestmark = pytest.mark.law("bounded", "conservation")

COLUMNS = ("smallest", "below", "at", "above")

BOUNDS: dict[str, tuple[int, int, int, int]] = {
    "feeder.groups_per_batch": (1, 2, 3, 9),
    "feeder.group_size": (1, 2, 3, 17),
    "feeder.max_staleness": (0, 1, 2, 5),
    "explorer.count": (1, 1, 2, 3),
    "explorer.max_concurrent": (1, 11, 12, 1000),
    "explorer.yield_after_tokens": (1, 7, 8, 1_000_000),
    "explorer.repetition_tokens": (0, 7, 8, 1_000_000),
    "explorer.repetition_period": (1, 3, 4, 100_000),
    "verifier.count": (1, 1, 2, 2),
    "verifier.max_concurrent": (1, 11, 12, 1000),
    "verifier.processes": (1, 1, 2, 2),
    "verifier.max_batch": (1, 11, 12, 1000),
    "verifier.tries": (1, 2, 3, 9),
    "buffer.max_refill": (1, 5, 6, 1_000_000),
    "buffer.min_siblings": (1, 2, 3, 17),
    "buffer.max_body_bytes": (1, 1000, 2000, 1 << 40),
    "trainer.minibatches": (1, 1, 2, 9),
    "trainer.updates_per_batch": (1, 1, 2, 3),
    "trainer.tokens_per_microbatch": (1, 12, 13, 1 << 30),
    "trainer.shares": (1, 2, 3, 11),
    "trainer.checkpoint_every": (1, 5, 6, 100),
    "trainer.keep_checkpoints": (2, 2, 3, 50),
    "trainer.publish_every": (1, 2, 3, 6),
    "trainer.max_skips_in_a_row": (1, 5, 6, 1000),
    "trainer.warmup_steps": (0, 5, 6, 1000),
    "transport.partitions": (1, 11, 12, 129),
    "weights.anchor_every": (1, 5, 6, 1000),
    "weights.keep": (2, 2, 3, 100),
    "retention.checkpoints": (2, 2, 3, 50),
}
"""Setting -> its smallest value that makes a run, one below what the run has of it, just that, and far above. The run
has 6 steps of 2 groups of 3 rollouts of at most 8 tokens, of which 12 rollouts are on their way at a time."""

_NO_BOUND = "no bound"
_SHAPE = "no bound: the shape of a model that is made"

ELSEWHERE: dict[str, str] = {
    **{
        f"{section}.threads": "no bound"
        for section in ("explorer", "verifier", "buffer", "trainer", "evaluator", "synthesiser")
    },
    **{f"model.make.{name}": _SHAPE for name in ("layers", "width", "heads")},
    "model.lora.rank": _SHAPE,
    "run.seed": _NO_BOUND,
    "run.resume": "no bound: the number of a version",
    "run.imported_versions": "no bound: the numbers of versions",
    "run.steps": "tests/flow/test_trainer.py",
    "run.hours": "tests/flow/test_trainer.py",
    "run.stop_reward_over": "tests/flow/test_trainer.py",
    "model.context": "tests/flow/test_explorer.py",
    "model.make.context": "tests/e2e/test_bounds.py",
    "tasksets.passes": "tests/flow/test_feeder.py",
    "experts.per_batch": "tests/flow/test_buffer_demonstrations.py",
    "experts.passes": "tests/flow/test_buffer_demonstrations.py",
    "experts.held_out_every": "tests/simulation/test_experts.py",
    "experts.held_out_most": "no bound: how many are looked at",
    "evaluations.every": "tests/flow/test_evaluator.py",
    "evaluations.num_tasks": "tests/flow/test_evaluator.py",
    "evaluations.n": "tests/flow/test_evaluator.py",
    "evaluations.k": "tests/flow/test_evaluator.py",
    "sampling.max_tokens": "tests/unit/policies/test_fake.py",
    "sampling.min_tokens": "tests/unit/policies/test_hf.py",
    "sampling.top_k": "tests/unit/policies/test_hf.py",
    "explorer.partial_every_s": "tests/flow/test_partials.py",
    "explorer.gateway_max_body_bytes": "tests/unit/gateway/test_server.py",
    "explorer.max_calls": "tests/flow/test_agents.py",
    "explorer.max_calls_at_once": "tests/flow/test_agents.py",
    "explorer.idle_timeout_s": "tests/flow/test_agents.py",
    "explorer.reply_timeout_s": "tests/flow/test_replies.py",
    "explorer.rollout_timeout_s": "tests/flow/test_agents.py",
    "verifier.timeout_s": "tests/flow/test_hanging_rewards.py",
    "verifier.group_timeout_s": "tests/flow/test_compared_siblings.py",
    "verifier.max_waiting_bytes": "tests/flow/test_compared_siblings.py",
    "buffer.group_deadline_s": "tests/flow/test_buffer.py",
    "feedback.quorum": "tests/flow/test_feedback.py",
    "feedback.expires_s": "tests/flow/test_feedback.py",
    "feedback.hold_s": "tests/flow/test_feedback.py",
    "trainer.reference_every": "tests/flow/test_learned_beside.py",
    "trainer.keep_every": "tests/flow/test_trainer_checkpoints.py",
    "trainer.max_steps_without_signal": "tests/flow/test_trainer.py",
    "stages.steps": "tests/flow/test_stages.py",
    "stages.warmup_steps": "tests/unit/config/test_stages.py",
    "stages.minibatches": "no bound of its own: that of [trainer]",
    "stages.updates_per_batch": "no bound of its own: that of [trainer]",
    "stages.experts_per_batch": "tests/unit/config/test_stages.py",
    "evaluator.count": "tests/flow/test_evaluator.py",
    "evaluator.max_concurrent": "tests/flow/test_evaluator.py",
    "synthesiser.count": "tests/simulation/test_synthesis.py",
    "synthesiser.per_parent": "tests/flow/test_synthesiser.py",
    "synthesiser.most": "tests/flow/test_synthesiser.py",
    "synthesiser.max_concurrent": "tests/flow/test_synthesiser.py",
    "synthesiser.check_samples": "tests/flow/test_synthesiser.py",
    "synthesiser.server.timeout_s": "tests/unit/models/test_server_client.py",
    "synthesiser.server.tries": "tests/unit/models/test_server_client.py",
    "transport.patience_s": "tests/flow/test_losses.py",
    "transport.session_timeout_s": "tests/broker/test_kafka_driven.py",
    "weights.patience_s": "tests/unit/weights/test_store_s3.py",
    "weights.timeout_s": "tests/unit/weights/test_store_s3.py",
}
"""Setting -> where it is reached, as it says nothing in a run without models, agents, people and so on, or is a time;
or why there is nothing to reach."""


def column(number: int) -> dict[str, int]:
    return {name: values[number] for name, values in BOUNDS.items()}


def bounds_in(cls: Any, section: str) -> set[str]:
    """Return the settings below this one that are whole numbers, or times."""
    found = set()
    for field in dataclasses.fields(cls):
        kinds = list(plain_types(get_type_hints(cls, include_extras=True)[field.name]))
        name = f"{section}.{field.name}".removeprefix(".")
        is_time = float in kinds and (field.name.endswith("_s") or field.name == "hours")
        if int in kinds or is_time:
            found.add(name)
        for kind in kinds:
            if dataclasses.is_dataclass(kind):
                found |= bounds_in(kind, name)
    return found


def plain_types(kind: Any) -> set[Any]:
    """Return the types that a value of this type may have, those of items among them."""
    if get_origin(kind) is Annotated:
        return plain_types(get_args(kind)[0])
    if not get_args(kind):
        return {kind}
    return {one for part in get_args(kind) if isinstance(part, type) or get_args(part) for one in plain_types(part)}


def test_every_setting_that_bounds_something_has_a_row() -> None:
    found = bounds_in(RunConfig, "")
    known = BOUNDS.keys() | ELSEWHERE.keys()
    assert found - known == set(), "no row"
    assert known - found == set(), "no such setting"
    for setting, place in ELSEWHERE.items():
        if not place.startswith(_NO_BOUND):
            assert setting.rpartition(".")[2].removeprefix("gateway_") in Path(place).read_text(), setting


def run_with(place: Workplace, values: dict[str, int], name: str = "bounds", servers: str | None = None) -> None:
    """Play a run to its end, then go on with it for a step, and look whether anything is lost."""
    run = DrivenRun.make(place, name, servers, *(f"{setting}={value}" for setting, value in values.items()))
    assert run.to_the_end().version == 6
    run.resume("run.steps=7")
    assert run.to_the_end().version == 7


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4), ids=COLUMNS)
def test_all_at_once(place: Workplace, number: int) -> None:
    run_with(place, column(number))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("number", range(4), ids=COLUMNS)
@pytest.mark.parametrize("setting", BOUNDS)
def test_each_alone(place: Workplace, setting: str, number: int) -> None:
    needs = {"buffer.min_siblings": ("feeder.group_size",), "trainer.publish_every": ("feeder.max_staleness",)}
    needs |= {"retention.checkpoints": ("trainer.keep_checkpoints",)}
    needs |= {"explorer.repetition_tokens": ("explorer.repetition_period",)}
    run_with(place, {name: BOUNDS[name][number] for name in (setting, *needs.get(setting, ()))})
