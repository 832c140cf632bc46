"""Rules of rewards that compare siblings, left out one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.roles.verifier.groups import WaitingGroup
from rftstream.roles.verifier.step import VerifierStep
from rftstream.service.role import Done, Item, Publish
from tests.simulation.changes import Change, around, instead
from tests.simulation.compared import SCORED


def finish_apart(self: VerifierStep, items: Sequence[Item], *outputs: Publish) -> None:
    """The verdicts of a group are results of their own, any of which may be the last one before a kill."""
    for item in items:
        record, message = item.received.record, VerifiedRollout
        mine = [
            one for one in outputs
            if (isinstance(one.message, DeadLetter) and one.message.offset == record.offset)
            or (isinstance(one.message, message) and one.message.ids.rollout_id == record.text("rollout_id"))
        ]  # fmt: skip
        self._done.append(Done(item.number, tuple(mine)))


@around(VerifierStep, "start")
def failed_passed_on(start: Any, self: VerifierStep, item: Item) -> None:
    """A sibling that failed waits for nobody, so that a restart forgets it."""
    rollout: Any = item.received.message
    if rollout.status in SCORED:
        start(self, item)
    else:
        self._finish([item], *self._passed_on(item, rollout))


RULES: dict[str, tuple[str, str, Change]] = {
    "siblings-apart": (
        "lost", "the verdicts of a group commit one by one", instead(VerifierStep, _finish=finish_apart)
    ),
    "minority-judged": (
        "twice", "a group is judged whenever its time is up, whoever is there",
        instead(WaitingGroup, is_majority=property(lambda self: True)),
    ),
    "failed-passed-on": ("lost", "siblings that failed do not wait for their group", failed_passed_on),
}  # fmt: skip
