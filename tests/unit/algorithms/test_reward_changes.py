"""Where the reward of a run changed, and which of its numbers compare."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rftstream.algorithms.reward_changes import (
    by_newest_scorer,
    changed_at,
    changes_to_text,
    find_reward_changes,
    is_changed,
)
from rftstream.contracts.verdicts import with_environment
from rftstream.contracts.versions import EvalResult, VersionName
from rftstream.roles.trainer.watches.hacked import HackedRewardWatch
from rftstream.roles.trainer.watches.turns import TurnsWatch
from tests.configs import small_run
from tests.suite.each import each


@each(
    "scored, changes",
    [
        ([], []),
        ([{}, {"a": "1"}, {}, {"a": "1"}], []),  # an older release says nothing
        ([{"a": "1"}, {"a": "1", "b": "7"}, {"b": "7"}], []),  # another taskset joins
        ([{"a": "1"}, {"a": "2"}, {"a": "2"}], [("a", "1", "2", 1)]),
        ([{"a": "1"}, {"a": "2"}, {"a": "1"}], [("a", "1", "2", 1), ("a", "2", "1", 2)]),
        ([{"a": "1", "b": "7"}, {"b": "7"}, {"a": "2"}, {"b": "8"}], [("a", "1", "2", 2), ("b", "7", "8", 3)]),
        ([{"a": "1"}, {"a": "1+env-a"}, {"a": "1"}, {"a": "1+env-a"}], []),  # an older release does not say which
        ([{"a": "1"}, {"a": "1+env-a"}, {"a": "1+env-b"}], [("a", "1+env-a", "1+env-b", 2)]),
        ([{"a": "1+env-a"}, {"a": "2"}], [("a", "1+env-a", "2", 1)]),
    ],
)
def test_a_change_is_where_a_taskset_has_another_scorer(
    scored: list[dict[str, str]], changes: list[tuple[str, str, str, int]]
) -> None:
    found = find_reward_changes(enumerate(scored))
    assert [(one.taskset, one.before, one.after, one.version) for one in found] == changes
    assert changed_at(found) == max((version for *_, version in changes), default=0)
    known: dict[str, str] = {}
    for version, scorers in enumerate(scored):
        assert is_changed(known, scorers) == any(version == at for *_, at in changes)
        known |= scorers


def test_two_rewards_in_turns_are_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    """A mended reward is a change, and may be taken back; verifiers of two hosts with different code make dozens."""
    scored = [{"a": scorer} for scorer in "1223" + "4" + "5454545" + "67"] + [{"b": "1"}, {"b": "2"}, {"b": "1"}]
    lines = changes_to_text(find_reward_changes(enumerate(scored)), 9)
    assert [line.partition(",")[0].partition(";")[0] for line in lines] == [
        "a: 1 -> 2 since version 1", "a: 2 -> 3 since version 3", "a: 3 -> 4 since version 4",
        "a: 4 and 5 score in turns", "a: 5 -> 6 since version 12", "a: 6 -> 7 since version 13",
        "b: 1 -> 2 since version 15", "b: 2 -> 1 since version 16",
    ]  # fmt: skip
    assert "7 times from version 5 to 11" in lines[3] and "same files" in lines[3]
    assert changes_to_text(find_reward_changes(enumerate(scored)), 1) == lines[-1:]
    watch = TurnsWatch()
    for version, scorers in enumerate(scored):
        watch.look(version, scorers)
    assert len(caplog.messages) == 1 and "3 times from version 5 to 7" in caplog.messages[0], "the trainer warns once"


def result(scorer: str, at: float) -> EvalResult:
    return EvalResult(
        evaluation="e", name=VersionName(trainer_epoch=1, version=0), num_tasks=1, num_samples=1, num_unscored=0,
        metrics={}, generations=None, evaluated_at=at, scorer=scorer, scorer_version="1",
    )  # fmt: skip


@each(
    "scorers, times, kept",
    [
        ("", "", ""),
        ("aab", "012", "b"),
        ("aba", "012", "aa"),
        ("aab", "021", "aa"),  # an old version was evaluated again, before a later one that came by itself
        ("--aa", "0123", "--aa"),  # of a release that does not say who scored
        ("--ab", "0123", "b"),
        ("ab-", "012", "b"),  # nothing could be scored
        ("--", "01", "--"),
    ],
)
def test_results_compare_that_the_newest_reward_scored(scorers: str, times: str, kept: str) -> None:
    results = [result(scorer.strip("-"), float(at)) for scorer, at in zip(scorers, times, strict=True)]
    assert "".join(one.scorer or "-" for one in by_newest_scorer(results)) == kept


@each(
    "digests, kept",
    [("--", "--"), ("-a", "-a"), ("-ab", "b"), ("--aba", "--aa"), ("a-", "a-")],
)
def test_a_result_that_does_not_say_which_environment_was_played_is_of_the_first(digests: str, kept: str) -> None:
    results = [
        replace(result("environment", float(at)), scorer_version=with_environment("1", digest.strip("-")))
        for at, digest in enumerate(digests)
    ]
    found = [one.scorer_version[-1] if "+" in one.scorer_version else "-" for one in by_newest_scorer(results)]
    assert "".join(found) == kept


def test_two_environments_in_turns_are_those_of_explorers() -> None:
    scored = [{"a": f"environment 1+env-{digest}"} for digest in "ababa"]
    scored.insert(1, {"a": "environment 1"})  # which an older release verified
    (line,) = changes_to_text(find_reward_changes(enumerate(scored)))
    assert "explorers have another environment; give every host the same files" in line


def test_steps_before_a_change_are_no_sign_of_a_hacked_reward() -> None:
    """Ever more rollouts without a reward: by the same reward that is a sign, by another it says nothing."""
    for changed in (False, True):
        watch = HackedRewardWatch(small_run(run={"name": "r", "steps": 99, "stop_on": ["unscored"]}))
        for version in range(1, 40):
            scorers = {"train": "strict" if changed and version > 20 else "mild"}
            values = {"reward": 0.5, "unscored_share": 0.0 if version <= 20 else 0.4}
            found = watch.look(version, values, scorers)
            watch._steps[version] = values, scorers
        assert (found is None) is changed
