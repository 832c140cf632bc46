"""The worked examples of docs/extending.md do what they say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from my_algorithms import Imitate
from my_environments import HigherLower
from my_policies import Uniform
from my_tasksets import Backwards

from rftstream.algorithms.base import Denominators, MicroBatch
from rftstream.config import loader
from rftstream.config.parts import registry
from rftstream.config.sections import RunConfig
from rftstream.contracts.arrays import Array
from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.batches import Experience, LossKind
from rftstream.contracts.outcomes import GroupOutcome, GroupResult, RolloutSummary
from rftstream.contracts.rollouts import RolloutStatus, Segment, VersionSpan
from rftstream.contracts.tasks import ChatMessage, Problem, RolloutIds, Sampling
from rftstream.contracts.versions import VersionName
from rftstream.data.operators.base import Draw
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.pipeline import TaskPipeline
from rftstream.data.operators.problems import all_problems
from rftstream.models.fake_renderer import FakeRenderer
from rftstream.models.spec import ModelSpec
from rftstream.policies.base import SampleRequest
from rftstream.rewards.resolve import build_reward
from rftstream.testing import ManualClock
from tests.unit.reward_inputs import reward_input


def run_config(**more: Mapping[str, Any]) -> RunConfig:
    return loader.from_dict({
        "run": {"name": "examples", "steps": 1}, "model": {"path": "fake"},
        "tasksets": {"sums": {"source": "arithmetic"}}, **more,
    })  # fmt: skip


def test_reward() -> None:
    name = "my_rewards:closeness"
    score = build_reward(name, run_config(rewards={name: {"scale": 5}}))
    assert score(reward_input("7", "7")).reward == 1.0
    assert score(reward_input("6", "7")).reward == pytest.approx(0.8)
    assert score(reward_input("1", "7")).reward == 0.0
    wrong = score(reward_input("seven", "7"))
    assert (wrong.reward, wrong.metrics) == (0.0, {"is_number": 0.0})
    with pytest.raises(ValueError, match="seven"):
        score(reward_input("7", "seven"))


def test_operator() -> None:
    config = run_config(pipeline=[{"op": "my_operators:Spaced", "solved": 0.8}])
    pipeline, facts = TaskPipeline.of(config, all_problems(config, {})), Facts()

    def share_skipped(index: int) -> float:
        draws = (
            Draw(group_id=f"sums/{number}/{index}/0", taskset="sums", taskset_pass=number, index=index,
                 problem=Problem(messages=()), sampling=Sampling(), group_size=2)
            for number in range(200)
        )  # fmt: skip
        return sum(pipeline.decide(draw, facts).skipped is not None for draw in draws) / 200

    for number, (index, reward) in enumerate([(3, 1.0), (3, 1.0), (3, 1.0), (4, 0.5)]):
        rollout = RolloutSummary(rollout_id="", num_tokens=1, status=RolloutStatus.completed, reward=reward)
        facts.absorb(GroupOutcome(group_id=f"sums/{number}/{index}/0", taskset="sums", sequence=number,
                                  result=GroupResult.batched, reason="complete", rollouts=(rollout,)))  # fmt: skip
    assert share_skipped(3) == pytest.approx(3 / 4, abs=0.12)
    assert share_skipped(4) == share_skipped(5) == 0.0


def test_taskset() -> None:
    settings = registry.build_config(Backwards, {"size": 5, "length": 4, "letters": "xyz"}, where="options")
    words = [Backwards(settings, location="", columns={}, system="Spell it backwards.") for _ in range(2)]
    problems = [words[0].problem(index) for index in range(len(words[0]))]
    assert [words[1].problem(index) for index in reversed(range(5))] == problems[::-1]
    assert words[0].digest == words[1].digest
    for problem in problems:
        assert problem.answer == problem.messages[-1].content[::-1]
        assert problem.messages[0].role == "system"


def said(text: str) -> AssistantMessage:
    return AssistantMessage(content=text, text=text)


def test_environment() -> None:
    problem = Problem(messages=(ChatMessage(role="user", content="1 to 9?"),), answer="6")
    game = HigherLower(HigherLower.Config(max_guesses=3), problem=problem, seed=0)
    assert game.start() == problem.messages
    assert [message.content for message in game.reply(said("5")).messages] == ["higher"]
    again = HigherLower(HigherLower.Config(max_guesses=3), problem=problem, seed=0)
    again.load(game.save() or b"")
    assert [message.content for message in again.reply(said("?")).messages] == ["a number, please"]
    last = again.reply(said("6"))
    assert last.done
    assert last.metrics == {"guesses": 3, "found": True}


def experience(group: str, sibling: int, reward: float) -> Experience:
    ids = RolloutIds(rollout_id=f"{group}/{sibling}", group_id=group, taskset="t", sibling=sibling, group_size=2,
                     sequence=0, min_version=0)  # fmt: skip
    segment = Segment(
        token_ids=Array.of([5, 6, 7], "int32"), behavior_logprobs=Array.of([0, -1, -2], "float32"),
        loss_mask=Array.of([0, 1, 1], "uint8"),
        versions=(VersionSpan(start=1, count=2, trainer_epoch=1, version=0),),
    )  # fmt: skip
    return Experience(ids=ids, batch_sequence=0, share=0, position=0, loss_kind=LossKind.rl, segments=(segment,),
                      reward=reward, sampling=Sampling())  # fmt: skip


def test_algorithm_by_hand() -> None:
    import torch

    algorithm = Imitate(Imitate.Config(at_least=0.5, correction_high=2.0))
    assert algorithm.name == "my_algorithms:Imitate"
    batch = [experience("t/0/0/0", 0, 1.0), experience("t/0/0/0", 1, 0.25), experience("t/0/1/0", 0, 1.0)]
    rows, _ = algorithm.prepare(batch)
    assert [float(row.advantages[1]) for row in rows] == [1.0, 0.0, 1.0]
    assert [row.group for row in rows] == [0, 0, 1]

    policy_BT = torch.tensor([[9.0, -1.0, -1.0], [9.0, -0.5, -5.0]], requires_grad=True)
    micro = MicroBatch(
        loss_mask_BT=torch.tensor(np.stack([row.loss_mask for row in rows[:2]])),
        behavior_logprobs_BT=torch.tensor(np.stack([row.behavior_logprobs for row in rows[:2]])),
        advantages_BT=torch.tensor(np.stack([row.advantages for row in rows[:2]])),
    )
    loss, _ = algorithm.loss(policy_BT, micro, Denominators(num_tokens=4, num_rows=2))
    loss.backward()
    # -w A / 4 at sampled tokens, w = min(exp(policy - behaviour), 2); nothing at the prompt
    weights = [[1.0, 2.0], [np.exp(0.5), np.exp(-3.0)]]
    wanted = [[0.0, *(-w * a / 4 for w in row)] for row, a in zip(weights, (1.0, 0.0), strict=True)]
    assert policy_BT.grad is not None
    np.testing.assert_allclose(policy_BT.grad.numpy(), wanted, rtol=1e-6)


def test_policy(tmp_path: Path) -> None:
    renderer = FakeRenderer()
    spec = ModelSpec(name="fake", folder=tmp_path, dtype="float32", context=None)
    policy = Uniform(Uniform.Config(slots=2), model=spec, renderer=renderer, clock=ManualClock())
    requests = [
        SampleRequest(request_id=str(seed), token_ids=(1,), sampling=Sampling(), seed=seed, max_tokens=8)
        for seed in range(3)
    ]
    for request in requests:
        policy.submit(request)
    assert policy.step() == []  # no weights, no tokens
    policy.load({}, VersionName(trainer_epoch=1, version=4))
    first, second = policy.step()
    assert policy.num_active == 1
    assert 1 <= len(first.token_ids) <= 8
    np.testing.assert_allclose(np.exp(first.behavior_logprobs), 1 / 256, rtol=1e-6)
    assert [(span.count, span.version) for span in second.versions] == [(len(second.token_ids), 4)]
    policy.submit(requests[0])
    assert policy.step()[1].token_ids.tolist() == first.token_ids.tolist()
