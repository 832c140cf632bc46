"""Names of metrics and parts are cut at every door, and there are not more than a rollout may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rftstream.contracts.rollouts import Posted
from rftstream.environments.base import Reply
from rftstream.metrics import MAX_NAME_CHARACTERS, MAX_NAMES_OF_ROLLOUT, named_by_people
from rftstream.rewards.functions import to_score
from rftstream.roles.explorer.environment_session import add_reply, checked_reply
from tests.suite.each import each

Numbers = Mapping[str, float]


def over_turns(numbers: Numbers) -> Numbers:
    """Each number in a turn of its own."""
    posted: Posted | None = None
    for turn, (name, value) in enumerate(numbers.items()):
        posted = add_reply(posted, checked_reply(Reply(done=False, parts={name: value})), turn)
    assert posted is not None
    return posted.parts


DOORS: dict[str, Callable[[Numbers], Numbers]] = {
    "metrics of a reply": lambda numbers: checked_reply(Reply(done=True, metrics=numbers)).metrics,
    "parts of a reply": lambda numbers: checked_reply(Reply(done=True, parts=numbers)).parts,
    "parts over turns": over_turns,
    "metrics of a verdict or an agent": named_by_people,
}


@each("door", DOORS)
def test_names_are_cut_at_every_door(door: str) -> None:
    names = DOORS[door]({"x" * 1_500_000: 1.0, **{f"{i}": 1.0 for i in range(MAX_NAMES_OF_ROLLOUT)}})
    assert list(names)[:2] == ["x" * MAX_NAME_CHARACTERS, "0"]
    assert len(names) == MAX_NAMES_OF_ROLLOUT


def test_a_reward_has_names_of_the_same_length() -> None:
    (name,) = to_score({"reward": 1.0, "x" * 1_500_000: 1.0}, where="r").metrics
    assert len(name) == MAX_NAME_CHARACTERS
