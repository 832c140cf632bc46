"""Rules of rewards that compare siblings, left out one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.roles.verifier.groups import WaitingGroup
from rftstream.roles.verifier.step import VerifierStep
from rftstream.service.role import Done, Item, Publish
from tests.simulation.changes import changed
from tests.simulation.compared import SCORED


def siblings_apart() -> Iterator[None]:
    """The verdicts of a group are results of their own, any of which may be the last one before a kill."""

    def mutated(self: VerifierStep, items: Sequence[Item], *outputs: Publish) -> None:
        for item in items:
            record, message = item.received.record, VerifiedRollout
            mine = [
                one for one in outputs
                if (isinstance(one.message, DeadLetter) and one.message.offset == record.offset)
                or (isinstance(one.message, message) and one.message.ids.rollout_id == record.text("rollout_id"))
            ]  # fmt: skip
            self._done.append(Done(item.number, tuple(mine)))

    with changed(VerifierStep, "_finish", mutated):
        yield


def minority_judged() -> Iterator[None]:
    """Whoever is there in time is judged, and so are those that come later."""
    with changed(WaitingGroup, "is_majority", property(lambda self: True)):
        yield


def failed_passed_on() -> Iterator[None]:
    """A sibling that failed waits for nobody, so that a restart forgets it."""
    start = VerifierStep.start

    def mutated(self: VerifierStep, item: Item) -> None:
        rollout: Any = item.received.message
        if rollout.status in SCORED:
            start(self, item)
        else:
            self._finish([item], *self._passed_on(item, rollout))

    with changed(VerifierStep, "start", mutated):
        yield


RULES = {
    "siblings-apart": ("lost", "the verdicts of a group commit one by one", siblings_apart),
    "minority-judged": ("twice", "a group is judged whenever its time is up, whoever is there", minority_judged),
    "failed-passed-on": ("lost", "siblings that failed do not wait for their group", failed_passed_on),
}
