"""Operators of the experience side, one by one: what they decide about groups whose numbers are done by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rftstream.config.parts import registry
from rftstream.contracts.arrays import Array
from rftstream.contracts.outcomes import GroupOutcome, GroupResult, RolloutSummary
from rftstream.contracts.rollouts import Rollout, RolloutStatus, Segment, Turn, VersionSpan
from rftstream.contracts.tasks import ChatMessage, Problem, RolloutIds, Sampling
from rftstream.contracts.verdicts import Verdict, VerifiedRollout
from rftstream.data.operators.base import (
    KEEP,
    ExperienceDecision,
    Mask,
    Offer,
    Reject,
    ScoredGroup,
    ScoredRollout,
    Shape,
    TokenSpan,
)
from rftstream.data.operators.facts import RECENT_GROUPS, Facts
from rftstream.data.operators.leaving_out import strange_share, worst_mean
from rftstream.data.operators.sampled import hash_ngrams
from rftstream.errors import ConfigError
from tests.suite.each import each


def rollout(
    sibling: int,
    reward: float,
    *,
    tokens: Sequence[int] = (5, 6, 7),
    logprobs: Sequence[float] | None = None,
    text: str = "7",
    parts: dict[str, float] | None = None,
    versions: Sequence[tuple[int, int]] = (),
) -> ScoredRollout:
    """A rollout of one prompt token and these sampled ones. `versions`: (count, version) of spans after the prompt."""
    ids = RolloutIds(rollout_id=f"sums/0/0/0/{sibling}", group_id="sums/0/0/0", taskset="sums", sibling=sibling,
                     group_size=9, sequence=0, min_version=0)  # fmt: skip
    spans, start = [], 1
    for count, version in versions or ((len(tokens), 0),):
        spans.append(VersionSpan(start=start, count=count, trainer_epoch=1, version=version))
        start += count
    segment = Segment(
        token_ids=Array.of([9, *tokens], "int32"),
        behavior_logprobs=Array.of([0.0, *(logprobs if logprobs is not None else [-1.0] * len(tokens))], "float32"),
        loss_mask=Array.of([0] + [1] * len(tokens), "uint8"),
        versions=tuple(spans),
    )
    body = Rollout(
        ids=ids, status=RolloutStatus.completed, problem=Problem(messages=(ChatMessage(role="user", content="3+4="),)),
        turns=(Turn(role="assistant", content=text, num_tokens=len(tokens)), Turn(role="user", content="\0\0\0")),
        segments=(segment,), num_tokens=len(tokens), sampling=Sampling(),
    )  # fmt: skip
    verdict = Verdict(reward=reward, scorer="exact", scorer_version="1", parts=parts or {})
    verified = VerifiedRollout(ids=ids, rollout=body, verdict=verdict)
    return ScoredRollout(
        sibling=sibling,
        reward=reward,
        num_tokens=len(tokens),
        truncated=False,
        load=lambda: verified,
        oldest_version=min(span.version for span in spans),
    )


def lengths(*counts: int, rewards: Sequence[float] = ()) -> tuple[ScoredRollout, ...]:
    return tuple(
        rollout(number, rewards[number] if rewards else 0.0, tokens=range(count)) for number, count in enumerate(counts)
    )


def rewarded(*rewards: float) -> tuple[ScoredRollout, ...]:
    return tuple(rollout(number, reward) for number, reward in enumerate(rewards))


def build(name: str, **settings: Any) -> Any:
    part = registry.resolve("operator", name)
    return part(registry.build_config(part, settings, where="pipeline.0"))


def decide(
    name: str,
    rollouts: Sequence[ScoredRollout],
    *,
    facts: Facts | None = None,
    seed: int = 1,
    version: int | None = None,
    **settings: Any,
) -> ExperienceDecision:
    group = ScoredGroup(group_id="sums/0/0/0", taskset="sums", sequence=0, size=len(rollouts),
                        rollouts=tuple(rollouts), version=version)  # fmt: skip
    decision: ExperienceDecision = build(name, **settings).decide(group, facts or Facts(), seed)
    return decision


def outcome(sequence: int, *rollouts: tuple[float, int]) -> GroupOutcome:
    """The outcome of a group with these rewards and lengths."""
    summaries = tuple(
        RolloutSummary(rollout_id=f"sums/0/{sequence}/0/{number}", num_tokens=count, status=RolloutStatus.completed,
                       reward=reward)
        for number, (reward, count) in enumerate(rollouts)
    )  # fmt: skip
    return GroupOutcome(group_id=f"sums/0/{sequence}/0", taskset="sums", sequence=sequence,
                        result=GroupResult.filtered, reason="test", rollouts=summaries)  # fmt: skip


# --------------------------------------------------------------------------------------------- outliers


def test_a_length_far_from_the_siblings_is_an_outlier() -> None:
    """Median 11, distances 1 1 0 1 89: MAD 1, so 100 has the score 60 and 10 has 0.67."""
    group = lengths(10, 12, 11, 10, 100)
    assert decide("outliers", group) == Reject("length far from the others", (4,))
    assert decide("outliers", group, max_score=60.1) == KEEP
    assert decide("outliers", group, side="low") == KEEP
    assert decide("outliers", group, side="high") == Reject("length far from the others", (4,))
    assert decide("outliers", group, min_values=6) == KEEP
    masked = decide("outliers", group, action="mask")
    assert masked == Mask({4: (TokenSpan(0, 0, 101),)}, "length far from the others")


def test_a_rare_success_is_no_outlier() -> None:
    assert decide("outliers", rewarded(0, 0, 0, 0, 0, 0, 1), of="reward") == KEEP
    assert decide("outliers", rewarded(0.0, 0.1, 0.2, 0.1, -50), of="reward") == Reject(
        "reward far from the others", (4,)
    )


def test_outliers_of_a_part_pass_over_who_lacks_it() -> None:
    values = (0.1, 0.2, 0.3, 0.2, None, 9.0)
    group = [rollout(number, 0.0, parts={} if one is None else {"style": one}) for number, one in enumerate(values)]
    assert decide("outliers", group, of="reward", on="style") == Reject("style far from the others", (5,))
    with pytest.raises(ConfigError, match="on: got 'style'"):
        decide("outliers", group, of="length", on="style")
    with pytest.raises(ConfigError, match="within"):
        decide("outliers", group, of="reward", on="style", within="taskset")


def test_outliers_of_a_taskset_are_far_from_its_newest_groups() -> None:
    """A whole group of long rollouts is unremarkable by itself, and far from what was before."""
    facts = Facts()
    group = lengths(100, 100)
    assert decide("outliers", group, facts=facts, within="taskset") == KEEP
    facts.absorb(outcome(0, (0.0, 10), (1.0, 12)))
    facts.absorb(outcome(1, (0.0, 11), (1.0, 10), (0.0, 13)))
    assert decide("outliers", group, facts=facts, within="taskset") == Reject("length far from the others", (0, 1))
    assert decide("outliers", rewarded(0.5), facts=facts, of="reward", within="taskset", max_score=1) == KEEP
    for number in range(RECENT_GROUPS):
        facts.absorb(outcome(number + 2, (0.0, 90), (1.0, 110)))
    assert decide("outliers", group, facts=facts, within="taskset") == KEEP
    assert len(facts.taskset("sums").recent_lengths()) == 2 * RECENT_GROUPS
    assert facts.problem("sums", 0).recent_rewards() == []


# --------------------------------------------------------------------------------------------- gibberish


def test_characters_that_no_text_has() -> None:
    assert strange_share("") == 0.0
    assert strange_share("Zwölf\n\t數學 é 🙂 ∫²") == 0.0
    assert strange_share("ab\ufffd\0") == 0.5
    assert strange_share("\ue000\u0378ab\x1b") == 0.6


def test_gibberish_is_what_the_policy_wrote_and_no_other_turn() -> None:
    group = (rollout(0, 1.0, text="plain"), rollout(1, 1.0, text="a" * 97 + "\ufffd" * 3), rollout(2, 0.0, text=""))
    assert decide("gibberish", group) == Reject("strange characters", (1,))
    assert decide("gibberish", group, max_strange_share=0.03) == KEEP
    assert decide("gibberish", group, action="mask") == Mask({1: (TokenSpan(0, 0, 4),)}, "strange characters")


def test_gibberish_by_logprobs() -> None:
    calm = rollout(0, 1.0, tokens=range(4), logprobs=(-1, -1, -1, -1))
    late = rollout(1, 1.0, tokens=range(4), logprobs=(0, 0, -3, -5))  # mean -2, its last two -4
    none = rollout(2, 1.0, tokens=())
    assert decide("gibberish", (calm, late, none), min_mean_logprob=-2.5) == KEEP
    assert decide("gibberish", (calm, late, none), min_mean_logprob=-1.5) == Reject("unlikely tokens", (1,))
    assert decide("gibberish", (calm, late, none), min_mean_logprob=-2.5, window=2) == Reject("unlikely tokens", (1,))
    spikes = {"spike_logprob": -2.5, "max_spike_share": 0.4}
    assert decide("gibberish", (calm, late, none), **spikes) == Reject("spikes of entropy", (1,))
    assert decide("gibberish", (calm, late, none), **{**spikes, "max_spike_share": 0.5}) == KEEP


@pytest.mark.parametrize("logprob", [-np.inf, np.nan])
def test_a_logprob_that_cannot_be_is_a_sign_of_gibberish(logprob: float) -> None:
    group = (rollout(0, 1.0, tokens=range(4), logprobs=(-1, logprob, -1, -1)),)
    for settings in ({"min_mean_logprob": -100.0}, {"min_mean_logprob": -100.0, "window": 2}, {"max_spike_share": 0.2}):
        assert isinstance(decide("gibberish", group, **settings), Reject)


def test_the_worst_mean_of_a_window() -> None:
    values = np.array([0.0, -1.0, -5.0, -3.0, 0.0])
    assert worst_mean(values, 0) == pytest.approx(-9 / 5)
    assert worst_mean(values, 2) == pytest.approx(-4.0)
    assert worst_mean(values, 5) == worst_mean(values, 99) == pytest.approx(-9 / 5)
    assert worst_mean(values, 1) == pytest.approx(-5.0)


# --------------------------------------------------------------------------------------------- shape


def test_the_length_term_by_hand() -> None:
    group = lengths(10, 20, 30, 12, rewards=(1.0, 1.0, 1.0, 0.0))
    decision = decide("shape", group, term="length", weight=0.2)
    assert isinstance(decision, Shape)
    assert decision.name == "length"
    assert decision.terms == pytest.approx({0: 0.1, 2: -0.1})  # 1 is in the middle; 3 is short and wrong
    assert decide("shape", lengths(10, 10), term="length") == KEEP
    assert decide("shape", lengths(10), term="length") == KEEP


def test_the_diversity_term_by_hand() -> None:
    """Bigrams: {12 23}, {12 23}, {12 24}, and none of 3. Of 0: distances 0, 1 - 1/3, 1; their mean is 5/9."""
    tokens = ((1, 2, 3), (1, 2, 3), (1, 2, 4), (8,))
    group = [rollout(number, float(number != 2), tokens=some) for number, some in enumerate(tokens)]
    decision = decide("shape", group, term="diversity", weight=0.9, ngram=2)
    assert isinstance(decision, Shape)
    assert decision.terms == pytest.approx({0: 0.5, 1: 0.5, 3: 0.9})
    assert decide("shape", rewarded(0, 0), term="diversity") == KEEP  # nobody is right
    assert decide("shape", rewarded(1, 1), term="diversity") == KEEP  # all the same


def test_who_is_right_may_be_said_by_a_part() -> None:
    group = [rollout(0, 0.0, tokens=(1, 2), parts={"exact": 1.0}), rollout(1, 9.0, tokens=(3, 4))]
    decision = decide("shape", group, term="diversity", on="exact", ngram=1, weight=1)
    assert decision == Shape({0: 1.0}, "diversity")


# --------------------------------------------------------------------------------------------- amplify


def test_failures_are_left_out_until_the_successes_are_a_quarter() -> None:
    decision = decide("amplify", rewarded(0, 0, 0, 0, 0, 0, 1, 0))
    assert isinstance(decision, Reject)
    assert decision.reason == "one failure of many"
    assert decision.siblings is not None
    assert len(decision.siblings) == 4  # 3 failures stay beside the one success
    assert 6 not in decision.siblings
    assert decide("amplify", rewarded(0, 0, 0, 0, 0, 0, 1, 0)) == decision
    others = {decide("amplify", rewarded(0, 0, 0, 0, 0, 0, 1, 0), seed=seed) for seed in range(20)}
    assert len(others) > 10, "the seed chooses"


@each(
    ("rewards", "settings", "num_rejected"),
    [
        ((0, 0, 0, 0), {}, 0),  # no success
        ((1, 0, 0, 0), {}, 0),  # a quarter already
        ((1, 1, 0, 0, 0, 0, 0, 0, 0), {}, 1),  # 2 and 6
        ((1, 0, 0, 0, 0), {"min_share": 1.0}, 2),  # min_wrong stay
        ((1, 0, 0, 0, 0), {"min_share": 1.0, "min_wrong": 1}, 3),
        ((0.3, 0.1, 0.1, 0.1), {"right_from": 0.3, "min_share": 0.5, "min_wrong": 1}, 2),
        ((1, 1, 1, 0, 0, 0, 0, 0, 0), {"min_share": 0.3}, 0),  # 3 of 9: 0.33
    ],
)
def test_how_many_failures_are_left_out(
    rewards: tuple[float, ...], settings: dict[str, Any], num_rejected: int
) -> None:
    decision = decide("amplify", rewarded(*rewards), **settings)
    assert (len(decision.siblings or ()) if isinstance(decision, Reject) else 0) == num_rejected


# --------------------------------------------------------------------------------------------- stale


def test_stale_rejects_rollouts_or_masks_their_old_tokens() -> None:
    young = rollout(0, 1.0, versions=((3, 4),))
    mixed = rollout(1, 0.0, tokens=range(6), versions=((2, 2), (3, 3), (1, 4)))
    older = rollout(2, 0.0, versions=((3, 3),))
    group = (young, mixed, older)
    assert decide("stale", group) == KEEP, "without a version nothing is old"
    assert decide("stale", group, version=3) == KEEP
    assert decide("stale", group, version=4) == Reject("too old", (1,))
    assert decide("stale", group, version=5) == Reject("too old", (1, 2))
    assert decide("stale", group, version=5, max_age=3) == KEEP
    masked = {1: (TokenSpan(0, 1, 3), TokenSpan(0, 3, 6)), 2: (TokenSpan(0, 1, 4),)}
    assert decide("stale", group, version=5, action="mask") == Mask(masked, "too old")
    assert decide("stale", group, version=4, action="mask") == Mask({1: (TokenSpan(0, 1, 3),)}, "too old")


def test_ngrams_have_equal_numbers_where_they_are_equal() -> None:
    """Also those that differ in one token, or in the order of two."""
    rng = np.random.default_rng(0)
    for vocabulary, size in ((2, 3), (3, 8), (150_000, 2)):
        tokens = rng.integers(0, vocabulary, 3000).astype(np.int32)
        wanted = [tuple(tokens[place : place + size].tolist()) for place in range(len(tokens) - size + 1)]
        numbers = hash_ngrams(tokens, size)
        assert len(numbers) == len(wanted)
        assert len(set(numbers)) == len(set(wanted)) == len(set(zip(numbers, wanted, strict=True)))
    assert hash_ngrams(np.asarray([1, 2], np.int32), 3) == []
    assert hash_ngrams(np.asarray([1, 2, 3], np.int32), 3) == [hash_ngrams(np.asarray([1, 2, 3]), 3)[0]]
    assert hash_ngrams(np.asarray([1, 2, 3], np.int32), 3) != hash_ngrams(np.asarray([2, 1, 3], np.int32), 3)


def test_a_group_without_a_spread_is_rejected_unless_one_of_its_roles_has_one() -> None:
    flat = rewarded(0.0, 0.0)
    told = [replace(one, roles={"left": reward, "judge": None}) for one, reward in zip(flat, (1.0, -1.0), strict=True)]
    assert decide("zero_variance", flat) == Reject("")
    assert decide("zero_variance", told) == KEEP
    assert decide("zero_variance", told, min_spread=2.0) == Reject("")
    assert decide("replay", flat) == KEEP and isinstance(decide("replay", told), Offer)
