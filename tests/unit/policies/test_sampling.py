import numpy as np
import pytest
import torch

from rftstream.contracts.tasks import Sampling
from rftstream.core.allowed import read_sets
from rftstream.core.logprobs import token_logprobs
from rftstream.policies.sampling import Sampler, SamplingTable
from tests.suite.each import each

CPU = torch.device("cpu")
STOPS = (0, 7)

MANY = {"top_p": 0.7, "top_k": 40, "min_p": 0.02, "temperature": 1.3, "min_tokens": 4}


def drawn(settings, vocabulary, *, forbidden_BV=None, num_sampled=0, seed=0, rows=24):
    generator = torch.Generator().manual_seed(seed)
    logits_BV = 3 * torch.randn(rows, vocabulary, generator=generator)
    table = SamplingTable.of(range(rows), [Sampling(**settings)] * rows)
    sampler = Sampler(table, STOPS, CPU, records_sets=True)
    places_B = np.full(rows, num_sampled)
    return logits_BV, *sampler.draw(logits_BV, places_B, places_B, forbidden_BV=forbidden_BV)


@pytest.mark.slow
@each("vocabulary", [17, 3000])
@each("forbids", [False, True])
@each(
    "settings",
    [{"top_p": 0.7}, {"top_p": 0.999}, {"top_k": 5}, {"min_p": 0.1, "temperature": 0.6}, {"min_tokens": 3},
     {"temperature": 0.0, "top_p": 0.5, "min_tokens": 3}, MANY, {}],
)  # fmt: skip
def test_the_trainer_finds_the_samplers_logprobs_over_the_recorded_sets(settings, forbids, vocabulary):
    forbidden_BV = None
    if forbids:
        forbidden_BV = torch.rand(24, vocabulary, generator=torch.Generator().manual_seed(9)) < 0.6
        forbidden_BV[:, 1] = False
    for seed in range(3):
        logits_BV, tokens_B, logprobs_B, sets = drawn(settings, vocabulary, forbidden_BV=forbidden_BV, seed=seed)
        if not forbids and settings.keys() <= {"temperature"}:
            assert sets is None
            continue
        allowed = read_sets(sets, tokens_B, vocabulary)
        temperature = settings.get("temperature", 1.0) or 1.0
        again_B, _ = token_logprobs(
            logits_BV, None, torch.from_numpy(tokens_B), torch.full((24,), temperature), allowed=allowed, chunk_tokens=5
        )
        np.testing.assert_allclose(logprobs_B, again_B, atol=1e-5)


def test_without_an_end_in_reach_a_grammar_that_is_over_goes_before_min_tokens():
    forbidden_BV = torch.ones(24, 17, dtype=torch.bool)
    forbidden_BV[::2, list(STOPS)] = False
    forbidden_BV[1::2, [3, 7]] = False
    _, tokens_B, logprobs_B, sets = drawn({"min_tokens": 3}, 17, forbidden_BV=forbidden_BV)
    assert set(tokens_B[::2]) <= set(STOPS) and set(tokens_B[1::2]) == {3}
    assert (logprobs_B[1::2] == 0).all()
    assert set(sets[::2]) == {bytes([0x81, 0, 0])} and set(sets[1::2]) == {bytes([3, 1])}
    assert set(drawn({"min_tokens": 3}, 17, forbidden_BV=forbidden_BV, num_sampled=3)[1][1::2]) == {3, 7}


def test_no_set_is_recorded_where_nobody_asks():
    table = SamplingTable.of([1], [Sampling(top_p=0.5)])
    assert Sampler(table, STOPS, CPU).draw(torch.zeros(1, 17), np.zeros(1), np.zeros(1))[2] is None
