"""What vLLM lists of its sampler, made up from ours: both have the same sets."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rftstream.contracts.tasks import Sampling
from rftstream.core.allowed import column_of, encode_sets, read_sets, written_in
from rftstream.policies.base import Constraint
from rftstream.policies.sampling import Sampler, SamplingTable
from rftstream.policies.vllm import sets
from rftstream.policies.vllm.sets import SampledSets
from tests.suite.each import each
from tests.unit import tiny

STOPS = (0, 7)
NUM = 12


def drawn(settings, vocabulary):
    """Tokens of one completion, the sets that they were drawn from, and their logprobs [T, V]."""
    logits_TV = 3 * torch.randn(NUM, vocabulary, generator=torch.Generator().manual_seed(1))
    table = SamplingTable.of(range(NUM), [Sampling(**settings)] * NUM)
    places_T = np.arange(NUM)
    tokens_T, _, written = Sampler(table, STOPS, torch.device("cpu"), records_sets=True).draw(
        logits_TV, places_T, places_T
    )
    allowed_TV = torch.ones_like(logits_TV, dtype=torch.bool)
    allowed_TV[: settings.get("min_tokens", 0), list(STOPS)] = False
    if written is not None and (found := read_sets(written, tokens_T, vocabulary)) is not None:
        allowed_TV = ~found.forbidden(slice(0, NUM), logits_TV.shape, torch.device("cpu"))
    return tokens_T, written, logits_TV.masked_fill(~allowed_TV, -torch.inf).log_softmax(-1)


def listed(tokens_T, logprobs_TV, count):
    """The sampled token and the likeliest `count`, place by place, as vLLM's FlatLogprobs has them."""
    top_TK = logprobs_TV.topk(count).indices
    ids_TL = torch.cat([torch.from_numpy(tokens_T)[:, None], top_TK], dim=1)
    ends_T = (1 + count) * np.arange(1, len(tokens_T) + 1)
    return SimpleNamespace(
        start_indices=(ends_T - 1 - count).tolist(), end_indices=ends_T.tolist(), token_ids=ids_TL.flatten().tolist(),
        logprobs=logprobs_TV.gather(1, ids_TL).flatten().tolist(),
    )  # fmt: skip


@each(
    ("settings", "vocabulary", "count"),
    [
        ({"top_p": 0.7}, 300, 300),
        ({"top_k": 20, "top_p": 0.9, "min_tokens": 3}, 3000, 24),
        ({"min_tokens": 5}, 3000, 0),
        ({"top_p": 0.7}, 3000, 0),
        ({"top_k": 5, "temperature": 0.0}, 3000, 0),
        ({}, 300, 0),
    ],
)
def test_lists_are_the_sets_that_were_sampled_from(settings, vocabulary, count):
    request = dataclasses.replace(tiny.request(0), sampling=Sampling(**settings))
    recorded = SampledSets(None, STOPS, vocabulary)
    assert recorded.num_listed(request) == count
    tokens_T, written, logprobs_TV = drawn(settings, vocabulary)
    found = recorded.columns(request, tokens_T, listed(tokens_T, logprobs_TV, count))
    told = written if written is not None and (count or "min_tokens" in settings) else [b""] * NUM
    assert (written_in(found, np.arange(NUM)) or [b""] * NUM) == told


def test_more_ties_than_are_listed_are_any_token():
    request = dataclasses.replace(tiny.request(0), sampling=Sampling(top_k=2))
    logprobs_TV = torch.zeros(1, 3000).log_softmax(-1)
    assert not SampledSets(None, STOPS, 3000).columns(request, np.array([5]), listed(np.array([5]), logprobs_TV, 6))


def test_what_a_grammar_leaves_is_computed_again_from_the_tokens(spec, monkeypatch):
    pytest.importorskip("llguidance")
    monkeypatch.setattr(sets, "MOST_LISTED", 4)
    constraint = Constraint(kind="choice", value=["12", "345"])
    request = dataclasses.replace(tiny.request(0), constraint=constraint, num_sampled=1, token_ids=(9, 4))
    recorded = SampledSets(spec, STOPS, tiny.VOCABULARY)
    assert recorded.num_listed(request) == 0
    allowed_TV = torch.zeros(3, tiny.VOCABULARY, dtype=torch.bool)
    allowed_TV[range(3), [5, 6, 0]] = True
    assert recorded.columns(request, np.array([5, 6, 0]), None)["allowed"].values.tolist() == (
        column_of(encode_sets(allowed_TV))["allowed"].values.tolist()
    )
