"""A role with any number of workers: it says of each scored rollout whether it is long, as feedback."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rftstream.clock import Clock
from rftstream.contracts.feedback import Feedback
from rftstream.contracts.tasks import RolloutIds
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.errors import ContractError
from rftstream.service.role import FOREVER, ConcurrentStep, Done, Item, Publish, Role, RoleContext
from rftstream.service.role_spec import RoleKind, RoleSpec

MAX_TOKENS = 3

LENGTHS = RoleSpec(
    name="lengths",
    kind=RoleKind.concurrent,
    build="my_roles:build",
    summary="verified -> feedback",
    consumes=("verified",),
    produces=("feedback", "dead"),
    positions=("verified",),
    count=lambda config: 2,
)


def build(context: RoleContext) -> Role:
    return Role(spec=LENGTHS, step=LengthStep(context.clock))


class LengthStep(ConcurrentStep):
    """Finishes each item in the next slice of work. `feedback` has as many partitions as `verified`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._items: dict[int, Item] = {}

    @property
    def room(self) -> int:
        return 100 - len(self._items)

    def start(self, item: Item) -> None:
        self._items[item.number] = item

    def drop(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self._items.pop(number, None)

    def not_begun(self) -> Collection[int]:
        return ()

    def advance(self) -> Sequence[Done]:
        items, self._items = self._items, {}
        return [Done(number, self._judge(item)) for number, item in items.items()]

    def _judge(self, item: Item) -> tuple[Publish, ...]:
        verified, partition = item.received.message, item.received.record.partition
        if not isinstance(verified, VerifiedRollout) or verified.rollout is None:
            return ()
        feedback = Feedback(
            feedback_id=f"lengths/{verified.ids.rollout_id}",
            rollout_id=verified.ids.rollout_id,
            source="lengths",
            reward=float(verified.rollout.num_tokens <= MAX_TOKENS),
            given_at=self._clock.now(),
        )
        return (Publish("feedback", partition, feedback),)

    def idle_s(self) -> float:
        return 0.0 if self._items else FOREVER

    def undecodable(self, record: object, ids: RolloutIds, error: ContractError) -> tuple[Publish, ...]:
        return ()

    def health(self) -> Mapping[str, object]:
        return {"items": len(self._items)}

    def close(self) -> None:
        self._items.clear()
