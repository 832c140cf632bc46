"""Rows that begin alike are computed as trees: what they give and teach is what each row gives by itself."""

import dataclasses
from random import SystemRandom

import numpy as np
import pytest
import torch

from rftstream.backends.deepspeed.settings import even_budget
from rftstream.backends.torch import attention, inputs
from rftstream.contracts.beside import Beside
from rftstream.core import packing as trees
from tests.unit import tiny
from tests.unit.backends.forests import KINDS, Doubled, Models, algorithm_of, learned, random_rows

NEAR = 1e-9
NOT_COMPARED = {"computed_tokens", "asked_tokens", "shared_share", "tflop", "routing_mismatch", "accuracy"}
"""Metrics of the tokens that were computed, and one of signs: between equal rows rounding decides which is better."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """All that is computed is in float64, and the shortest run is shared."""
    monkeypatch.setattr(trees, "LEAST", 1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with Doubled():
        yield
    torch.set_default_dtype(before)


def differences(models, seed, kind=None):
    """The largest differences between trees and rows of a random forest, by what differs, in shares of the largest
    value; and the share of tokens that the trees saved."""
    random = np.random.default_rng(seed)
    kind = KINDS[int(random.integers(len(KINDS)))] if kind is None else kind
    rows = random_rows(random, models.made[kind][0], kind)
    algorithm, name = algorithm_of(random, kind)
    if not any(row.loss_mask[1:].any() for row in rows):
        return {}, 0.0
    tokens = int(random.choice([20, 60, 16384]))
    plans = tiny.plan(tokens_per_microbatch=tokens), tiny.plan(tokens_per_microbatch=1)
    by_tree, by_row = (
        learned(network, network, rows, algorithm, plan)
        for network, plan in zip((models.network(kind, shared=one) for one in (True, False)), plans, strict=True)
    )
    assert by_tree[1].keys() == by_row[1].keys()
    assert by_tree[0].keys() == by_row[0].keys()
    found = {
        f"{name} {kind} gradient of {key}": float((one - by_tree[1][key]).abs().max() / one.abs().max().clamp(min=1))
        for key, one in by_row[1].items()
    }
    for key in by_row[0].keys() - NOT_COMPARED:
        one, other = by_row[0][key], by_tree[0][key]
        found[f"{name} {kind} {key}"] = 0.0 if one == other else abs(one - other) / max(abs(one), 1)
    return found, by_tree[0].get("shared_share", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("count", [16, pytest.param(2000, marks=pytest.mark.long)])
def test_random_forests_teach_what_their_rows_teach(models, count):
    """Others each time."""
    first = SystemRandom().randrange(10**9)
    shares = []
    for seed in range(first, first + count):
        print(f"seed {seed}")
        found, share = differences(models, seed)
        assert not {name: one for name, one in found.items() if not one <= NEAR}
        shares.append(share)
    assert max(shares) > 0.3


def test_ranks_share_what_is_computed():
    row = random_rows(np.random.default_rng(0), None, ("llama", "policy"))[0]
    row = dataclasses.replace(row, loss_mask=np.ones_like(row.loss_mask))
    plan, length = tiny.plan(tokens_per_microbatch=10_000), len(row.token_ids)
    apart, shared = (even_budget([row] * 8, plan, 2, shared=one) for one in (False, True))
    assert (apart, shared) == (4 * length + -(-length // 2), length)


def test_a_fingerprint_is_that_of_a_tokens_values():
    prints = inputs.fingerprints(Beside(np.array([0, 2, 2, 2, 1, 2, 0]), np.array([1, 2, 2, 1, 1, 2, 0, 0, 0])))
    assert prints[0] == prints[6] == 0
    assert prints[1] == prints[3]
    assert len(set(prints.tolist())) == 5


def sees_a_sibling(monkeypatch):
    """The second of two runs goes on from the first."""
    before = attention.run_lengths

    def mutated(lengths, parents=None):
        parents = list(parents or ())
        for run in range(len(parents) - 1, 0, -1):
            sibling = next((one for one in range(run) if parents[one] == parents[run] != trees.ROOT), None)
            parents[run] = parents[run] if sibling is None else sibling
        return before(lengths, parents or None)

    monkeypatch.setattr(attention, "run_lengths", mutated)


def forgets_an_ancestor(monkeypatch):
    """A run sees the one before it and not those before that."""
    monkeypatch.setattr(attention, "path_to", lambda run, parents: trees.path_to(run, parents)[-2:])


def begins_anew(monkeypatch):
    """Positions begin anew at each run."""
    grow = inputs.grow

    def mutated(keys):
        forest = grow(keys)
        anew = np.concatenate([np.arange(length) for length in forest.lengths_S])
        monkeypatch.setattr(trees.Forest, "positions", lambda self: anew)
        return forest

    monkeypatch.setattr(inputs, "grow", mutated)


def knows_tokens_alone(monkeypatch):
    """Another image behind the same tokens, or other experts, are taken for the same."""
    for module in ("rftstream.backends.torch.inputs.keys", "rftstream.backends.passes.keys"):
        monkeypatch.setattr(module, lambda rows: [np.asarray(row.token_ids)[:, None] for row in rows])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutate", "kind"),
    [
        (sees_a_sibling, ("llama", "policy")),
        (forgets_an_ancestor, ("gpt2", "policy")),
        (begins_anew, ("gemma3_text", "policy")),
        (knows_tokens_alone, ("vision", "policy")),
        (knows_tokens_alone, ("qwen3_moe", "policy")),
    ],
    ids=lambda one: getattr(one, "__name__", None) or one[0],
)
def test_a_tree_that_is_computed_wrongly_is_found(models, monkeypatch, mutate, kind):
    mutate(monkeypatch)
    for seed in range(20):
        try:
            found, _ = differences(models, seed, kind)
        except KeyError:
            return  # no row is left to show an image
        except (RuntimeError, ValueError, IndexError):
            continue
        if any(not one <= 1e-6 for one in found.values()):
            return
    pytest.fail("no forest of twenty showed it")
