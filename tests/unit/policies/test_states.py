"""Models that keep states beside keys and values, or states alone, and models with sinks and soft caps: what `hf`
samples over a cache has the logprobs of eager attention for one row at a time."""

import copy
import dataclasses
import inspect
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from rftstream.policies.hf.family_cache import name_of_cache
from rftstream.weights.tensors import raw
from tests.families import STATES
from tests.suite.sampling import cases
from tests.unit import tiny
from tests.unit.models import test_exactness
from tests.unit.models.test_exactness import rows, true_logprobs

QUICK = ("lfm2", "mamba", "qwen3_next", "gpt_oss")
"""Families that every run has: a short convolution, a state alone, a gated delta net, and attention with sinks."""
NEAR = {"atol": 1e-3, "rtol": 1e-3}
"""Largest difference of logprobs in float32. Nemotron-H's with transformers' own cache is 2e-3, others' is 1e-6."""
ATTENTION = {"bamba": {"attn_layer_indices": [1, 3]}, "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16}}
"""Layers of families that have no attention by default."""
CACHED = sorted({*STATES, "gemma2", "gpt_oss"})


@pytest.fixture(params=cases(CACHED, kept=QUICK, num=3))
def case(request, tmp_path, monkeypatch):
    """A model with two versions of its weights, their tensors, and the spec."""
    family = request.param
    monkeypatch.setattr(test_exactness, "CONFIGS", {**test_exactness.CONFIGS, **ATTENTION})
    (folder := tmp_path / "first").mkdir()
    model, spec = test_exactness.made(family, folder)
    first = load_file(folder / "model.safetensors")
    torch.manual_seed(2)
    second = {name: one + 0.05 * torch.randn_like(one) * name.endswith("weight") for name, one in first.items()}
    newer = shutil.copytree(folder, tmp_path / "second")
    save_file(second, newer / "model.safetensors", {"format": "pt"})
    models = model, type(model).from_pretrained(newer, attn_implementation="eager", dtype=torch.float32).eval()
    return models, spec, [{name: raw(one) for name, one in tensors.items()} for tensors in (first, second)]


def prompt(number):
    return tuple(rows()[number].token_ids[:-1].tolist())


def request(number, token_ids, **settings):
    return dataclasses.replace(tiny.request(number, token_ids, max_tokens=9), may_go_on=True, **settings)


def assert_true(model, token_ids, done, first=0):
    """The logprobs of sampled tokens, from one of them on, are those of a pass over the row."""
    assert done.error is None
    true = true_logprobs(model, [*token_ids, *done.token_ids.tolist()])[len(token_ids) - 1 :].detach().numpy()
    np.testing.assert_allclose(done.behavior_logprobs[first:], true[first:], **NEAR)


@pytest.mark.slow
def test_siblings_and_rows_that_join_and_leave(case):
    (model, _), spec, (tensors, _) = case
    policy = tiny.policy(spec, tensors)
    prompts = {n: prompt((4, 2, 3, 1)[max(n - 7, 0)]) for n in range(11)}  # eight siblings, and three others
    done = {}
    for number, token_ids in prompts.items():
        limit = 3 + number % 5
        policy.submit(dataclasses.replace(request(number, token_ids), max_tokens=limit))
        done |= {one.request_id: one for one in policy.step()}
    done |= tiny.drain(policy)
    for number, token_ids in prompts.items():
        assert_true(model, token_ids, done[f"r{number}"])


def test_turns_go_on_from_their_states(case):
    """Two of one length and one of another, beside a row that is being decoded. A model that cannot go on with several
    tokens computes them anew."""
    (model, _), spec, (tensors, _) = case
    policy = tiny.policy(spec, tensors)
    for number, which in enumerate((3, 2, 3)):
        policy.submit(request(number, prompt(which)))
    done = tiny.drain(policy)
    longer = {
        f"r{n}": (*prompt(which), *done[f"r{n}"].token_ids.tolist(), *prompt(1)[: 1 + n % 2], 7, 3)
        for n, which in enumerate((3, 2, 3))
    }
    policy.submit(dataclasses.replace(request(5, prompt(0)), max_tokens=30))
    done = {one.request_id: one for one in policy.step()}
    for number in range(3):
        policy.submit(request(number, longer[f"r{number}"]))
    assert all(policy._turns.find(one) for one in longer.values()) == policy._model.continues
    done |= tiny.drain(policy)
    for name, token_ids in {**longer, "r5": prompt(0)}.items():
        assert_true(model, token_ids, done[name])


@torch.no_grad()
def kept_logprobs(models, token_ids, sampled, cut):
    """Logprobs of sampled tokens by transformers' own cache of one row, which the second model continues after some."""
    model, newer = copy.deepcopy(models[0]), models[1]
    name, found = name_of_cache(model), []
    cache = None if model.config.model_type in ("minimax", "xlstm") else DynamicCache(config=model.config)
    read = [*token_ids, *sampled]
    parts = [read[: len(token_ids)], *([token] for token in sampled[:-1])]
    for number, part in enumerate(parts):
        if number == cut:  # in place, since one family keeps states in its modules
            model.load_state_dict(newer.state_dict())
        given = {} if cache is None else {name: cache}
        if "position_ids" in inspect.signature(model.forward).parameters:
            start = len(token_ids) + number - 1 if number else 0
            given["position_ids"] = torch.arange(start, start + len(part))[None]
        output = model(input_ids=torch.tensor([part]), use_cache=True, **given)
        cache = getattr(output, name, cache)
        found.append(float(output.logits[0, -1].log_softmax(-1)[sampled[number]]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_weights_that_come_in_flight(case, in_flight):
    """Kept states are those that the old weights computed; others are those of the new weights alone."""
    models, spec, (first, second) = case
    policy = tiny.policy(spec, first, in_flight=in_flight)
    prompts = {f"r{n}": prompt((3, 2, 3)[n]) for n in range(3)}
    for number, token_ids in enumerate(prompts.values()):
        policy.submit(request(number, token_ids))
    for _ in range(4):
        policy.step()
    policy.load(second, tiny.name(1))
    done = {name: one for name, one in tiny.drain(policy).items() if len(one.versions) > 1}
    assert done
    for name in done:
        token_ids, cut = prompts[name], done[name].versions[1].start
        if in_flight == "recompute":
            assert_true(models[1], token_ids, done[name], first=cut)
        else:
            true = kept_logprobs(models, token_ids, done[name].token_ids.tolist(), cut)
            np.testing.assert_allclose(done[name].behavior_logprobs, true, **NEAR)
    policy.submit(request(0, prompts["r0"]))  # nothing is left of its old prompt and turn
    assert_true(models[1], prompts["r0"], tiny.drain(policy)["r0"])


@pytest.mark.slow
def test_a_partial_rollout_goes_on_elsewhere(case):
    (model, _), spec, (tensors, _) = case
    first, second = (tiny.policy(spec, tensors) for _ in range(2))
    whole = tiny.drain_one(first, request(0, prompt(3)))
    first.submit(request(0, prompt(3)))
    for _ in range(4):
        first.step()
    half = first.so_far("r0").token_ids.tolist()
    assert half == whole.token_ids[:4].tolist()
    rest = tiny.drain_one(second, dataclasses.replace(request(0, (*prompt(3), *half)), num_sampled=4, max_tokens=5))
    assert [*half, *rest.token_ids.tolist()] == whole.token_ids.tolist()
    assert_true(model, (*prompt(3), *half), rest)
