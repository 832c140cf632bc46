"""Reward models from pairs: the loss by hand, where a text is read, and that what is exported says what was trained."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from rftstream.algorithms.base import Denominators
from rftstream.algorithms.requirements import check_demands, trained_spec
from rftstream.algorithms.reward_model import RewardModel
from rftstream.backends.base import OptimizerSettings
from rftstream.backends.fake import FakeBackend
from rftstream.backends.torch.backend import TorchBackend
from rftstream.config.loader import from_dict
from rftstream.contracts.batches import LossKind
from rftstream.core.imitation import bradley_terry_loss
from rftstream.errors import ConfigError
from rftstream.models.folders.files import read_json
from rftstream.rewards.base import RewardInput
from rftstream.rewards.reward_model import ModelReward
from tests.suite.each import each
from tests.unit import tiny
from tests.unit.algorithms.test_imitation import experience, segment

END, DIGITS = 0, list(range(1, 11))


def loss(scores, *, pairs=(0, 0, 1, 1), signs=(1, -1, 1, -1), weights=None, margins=None, centring=0.0, num_pairs=2.0):
    ones = torch.ones(len(scores), dtype=torch.float64)
    given = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    found, sums = bradley_terry_loss(
        given, torch.tensor(pairs), torch.tensor(signs), ones if weights is None else torch.tensor(weights),
        0 * ones if margins is None else torch.tensor(margins), centring=centring, num_pairs=num_pairs,
    )  # fmt: skip
    found.backward()
    return given, found.detach(), sums


def softplus(x):
    return math.log1p(math.exp(x))


# ------------------------------------------------------------------------------------------------ the loss


def test_the_loss_by_hand():
    scores, found, sums = loss([2.0, 1.0, -1.0, 0.5])
    assert float(found) == pytest.approx((softplus(-1.0) + softplus(1.5)) / 2)
    push, pull = 1 / (1 + math.exp(1.0)) / 2, 1 / (1 + math.exp(-1.5)) / 2
    assert scores.grad.tolist() == pytest.approx([-push, push, -pull, pull])
    assert {name: float(one) for name, one in sums.items()} == pytest.approx(
        {"pairs": 2, "accuracy": 1, "margin": -0.5, "chosen_reward": 1.0, "rejected_reward": 1.5}
    )


def test_weights_margins_and_centring_by_hand():
    _, found, _ = loss([2.0, 1.0, -1.0, 0.5], weights=[3.0, 3.0, 0.5, 0.5], margins=[1.0, 1.0, 2.0, 2.0], centring=0.01)
    expected = 3.0 * softplus(0.0) + 0.5 * softplus(3.5) + 0.01 * (3.0**2 + 0.5**2)
    assert float(found) == pytest.approx(expected / 2)


def test_equal_scores_are_right_by_half():
    assert float(loss([1.0, 1.0, 0.0, 0.0])[2]["accuracy"]) == 1.0


def test_the_gradient_is_that_of_the_loss():
    def of(scores):
        return bradley_terry_loss(
            scores, torch.tensor([0, 1, 0, 1]), torch.tensor([1, 1, -1, -1]), torch.tensor([1.0, 2.0, 1.0, 2.0]),
            torch.full((4,), 0.3), centring=0.05, num_pairs=2.0,
        )[0]  # fmt: skip

    assert torch.autograd.gradcheck(of, torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize(("changes", "says"), [
    ({"signs": (1, 1, 1, -1)}, "pair 0 has only one side"),
    ({"signs": (1, 0, 1, -1)}, "neither 1 nor -1"),
    ({"centring": -1.0}, "centring -1.0, expected at least 0"),
])  # fmt: skip
def test_what_is_no_batch_of_pairs(changes, says):
    with pytest.raises(ValueError, match=says):
        loss([0.0, 0.0, 0.0, 0.0], **changes)


# ------------------------------------------------------------------------------------------------ the algorithm


def pair(number, chosen, rejected, prompt=(11, 12), weight=1.0):
    """Both sides of a pair as the buffer gives them: prompt, answer and the end."""
    return [
        replace(
            experience(f"p{number}", segment([*prompt, *said, END], [0] * len(prompt) + [1] * (len(said) + 1))),
            loss_kind=LossKind.dpo, pair=side, weight=weight,
        )
        for side, said in (("chosen", chosen), ("rejected", rejected))
    ]  # fmt: skip


def pairs(count, seed=0):
    """A planted preference: the answer with more of token 7 is the better one."""
    random = np.random.default_rng(seed)
    found = []
    while len(found) < 2 * count:
        one, other = (random.choice(DIGITS, int(random.integers(2, 7))).tolist() for _ in range(2))
        if one.count(7) != other.count(7):
            one, other = sorted((one, other), key=lambda said: -said.count(7))
            found += pair(len(found), one, other, prompt=random.choice(DIGITS, 3).tolist())
    return found


def algorithm(**settings):
    return RewardModel(RewardModel.Config(**settings))


def test_each_side_is_a_row_that_is_read_at_its_end():
    rows, metrics = algorithm().prepare(pair(0, [3], [4, 5], weight=2.0))
    assert [row.token_ids.tolist() for row in rows] == [[11, 12, 3, END, END], [11, 12, 4, 5, END, END]]
    assert [row.loss_mask.tolist() for row in rows] == [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1]]
    assert [float(row.additions["sign"][0]) for row in rows] == [1.0, -1.0]
    assert {row.group for row in rows} == {0}
    assert metrics == {"num_pairs": 1.0}
    assert Denominators.of(rows).num_groups == 1


def test_pairs_with_one_side_and_rollouts_are_left_out():
    one_sided = [*pair(0, [3], [4]), *pair(1, [5], [6])]
    one_sided[0] = replace(one_sided[0], segments=(segment([11, 12, 3], [0, 0, 0]),))
    rows, metrics = algorithm().prepare([*one_sided, experience("x", segment([1, 2], [0, 1]), loss_kind=LossKind.sft)])
    assert [bool(row.loss_mask.any()) for row in rows] == [False, False, True, True]
    assert metrics == {"num_pairs": 1.0, "pairs_one_sided": 1.0}


def test_the_weight_may_be_the_margin():
    rows, _ = algorithm().prepare([*pair(0, [3], [4], weight=2.0), *pair(1, [5], [6], weight=0.0)])
    scores = [
        np.where(row.loss_mask > 0, one, 0).astype(np.float32) for row, one in zip(rows, [1, 0, 0, 1], strict=True)
    ]
    as_weight = algorithm(margin=0.5).held_out(rows, scores, None)
    as_margin = algorithm(margin=0.5, weight_as="margin").held_out(rows, scores, None)
    assert as_weight["held_out_loss"] == pytest.approx(2.0 * softplus(0.5 - 1.0) / 2)
    assert as_margin["held_out_loss"] == pytest.approx((softplus(1.0 - 1.0) + softplus(0.0 + 1.0)) / 2)
    assert as_weight["held_out_accuracy"] == as_margin["held_out_accuracy"] == 0.5
    assert as_weight["held_out_margin"] == 0.0


# ------------------------------------------------------------------------------------------------ the backend


@pytest.fixture
def spec(tmp_path):
    return replace(tiny.make(tmp_path, characters="0123456789+=", context=32), as_classifier=True)


def opened(spec, **config):
    backend = TorchBackend(TorchBackend.Config(**config), model=spec, optimizer=OptimizerSettings(), seed=0)
    backend.open()
    return backend


def trained(spec, *, steps=3, lr=3e-3, count=32, **config):
    backend, learns = opened(spec, **config), algorithm()
    metrics = [
        backend.update(learns.prepare(pairs(count, seed))[0], learns, tiny.plan(lr=lr)).metrics for seed in range(steps)
    ]
    return backend, metrics


@pytest.mark.slow
def test_it_begins_at_log_2_and_learns_a_planted_preference(spec):
    backend, metrics = trained(spec, steps=60)
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert (metrics[0]["accuracy"], metrics[0]["margin"]) == (0.5, 0.0)
    assert "entropy" not in metrics[0]
    learns, rows = algorithm(), algorithm().prepare(pairs(200, seed=1000))[0]
    found = learns.held_out(rows, backend.logprobs(rows), None)
    assert found["held_out_accuracy"] > 0.95
    assert found["held_out_loss"] < 0.3
    assert found["held_out_margin"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("packing", [True, False])
def test_no_budget_and_no_layout_changes_the_scores(spec, packing):
    rows = algorithm().prepare(pairs(12))[0]
    plain, _ = trained(spec, packing=False)
    other, _ = trained(spec, packing=packing)
    for tokens in (1, 40, 16384):
        for found, said in zip(other.logprobs(rows, tokens), plain.logprobs(rows, 16384), strict=True):
            np.testing.assert_allclose(found, said, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_what_is_exported_is_what_the_reward_and_transformers_read(spec, tmp_path):
    """The folder says for each pair what the backend said of it in training."""
    from transformers import AutoModelForSequenceClassification

    backend, _ = trained(spec, steps=5)
    final = tmp_path / "final"
    final.mkdir()
    backend.export(final)
    config = read_json(final / "config.json")
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "reward"}
    rows = algorithm().prepare([*pair(0, [3, 7], [4]), *pair(1, [], [7, 7])])[0]
    said = [float(one.sum()) for one in backend.logprobs(rows)]
    assert len(set(said)) == 4
    model = AutoModelForSequenceClassification.from_pretrained(final)
    with torch.no_grad():
        theirs = [
            float(model(input_ids=torch.from_numpy(row.token_ids[None, :-1].astype(np.int64))).logits) for row in rows
        ]
    assert theirs == pytest.approx(said, abs=1e-5)
    reward = ModelReward(ModelReward.Config(path="final"), base=str(tmp_path))
    characters = dict(enumerate("0123456789+=", start=1))
    items = []
    for row in rows:
        text = "".join(characters[int(token)] for token in row.token_ids if token != END)
        messages = ({"role": "user", "content": text[:2]}, {"role": "assistant", "content": text[2:]})
        items.append(RewardInput(completion=text[2:], answer=None, prompt=text[:2], messages=messages, info={},
                                 data_source="", num_tokens=1, truncated=False))  # fmt: skip
    assert [score.reward for score in reward.score_all(items)] == pytest.approx(said, abs=1e-5)


@pytest.mark.slow
def test_another_run_begins_with_what_was_exported(spec, tmp_path):
    backend, _ = trained(spec, steps=4)
    final = tmp_path / "final"
    final.mkdir()
    backend.export(final)
    again = opened(replace(spec, folder=final))
    rows = algorithm().prepare(pairs(4))[0]
    for found, said in zip(again.logprobs(rows), backend.logprobs(rows), strict=True):
        np.testing.assert_array_equal(found, said)


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint_to_the_bit(spec, tmp_path):
    whole, _ = trained(spec, steps=4)
    half, _ = trained(spec, steps=2)
    (tmp_path / "half").mkdir()
    half.save(tmp_path / "half")
    again, learns = opened(spec), algorithm()
    again.load(tmp_path / "half")
    for seed in (2, 3):
        again.update(learns.prepare(pairs(32, seed))[0], learns, tiny.plan(lr=3e-3))
    assert tiny.whole_state(again, tmp_path / "again") == tiny.whole_state(whole, tmp_path / "whole")


def test_a_policy_is_not_trained_as_a_classifier(tmp_path):
    learns = algorithm()
    with pytest.raises(ConfigError, match="needs scores"):
        tiny.backend(tiny.make(tmp_path)).update(learns.prepare(pairs(2))[0], learns, tiny.plan())


def test_a_head_with_several_labels_is_refused(spec, tmp_path):
    shutil.copytree(spec.folder, tmp_path / "several")
    config = read_json(tmp_path / "several" / "config.json")
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}
    (tmp_path / "several" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="has a head with 2 labels, expected one"):
        opened(replace(spec, folder=tmp_path / "several"))


# ------------------------------------------------------------------------------------------------ the run file

RUN = {
    "run": {"name": "t", "steps": 1}, "model": {"make": {"characters": "0123"}}, "experts": {"source": "pairs.jsonl"},
    "trainer": {"algorithm": "reward_model"},
}  # fmt: skip


@each(("changes", "says"), [
    ({"evaluations": {"e": {"source": "arithmetic"}}}, "evaluations: 'reward_model' trains a classifier"),
    ({"tasksets": {"e": {"source": "arithmetic"}}}, "tasksets: .* nothing can be sampled"),
    ({"model": {"path": "x", "lora": {}}}, r"model\.lora: .* adapters of classifiers"),
    ({"stages": [{"steps": 1}], "run": {"name": "t"}}, "stages: .* one head"),
])  # fmt: skip
def test_what_only_a_policy_can_do_is_refused_before_the_run(changes, says):
    with pytest.raises(ConfigError, match=says):
        check_demands(from_dict({**RUN, **changes}), [algorithm()], TorchBackend)


def test_a_backend_that_cannot_is_refused_before_the_run():
    config = from_dict({**RUN, "trainer": {"algorithm": "reward_model", "backend": "fake"}})
    with pytest.raises(ConfigError, match=r"trainer\.backend: 'fake' cannot train a classifier"):
        check_demands(config, [algorithm()], FakeBackend)


def test_the_model_is_a_classifier_where_the_algorithm_says_so(spec):
    plain = replace(spec, as_classifier=False)
    assert trained_spec(from_dict(RUN), plain).as_classifier
    assert not trained_spec(from_dict({**RUN, "trainer": {"algorithm": "dpo"}}), plain).as_classifier
