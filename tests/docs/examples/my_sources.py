"""A source: judgements that come to a UDP port become records on `feedback`, each exactly once."""

from __future__ import annotations

import json
import socket
import zlib
from collections.abc import Mapping, Sequence

from rftstream.clock import Clock
from rftstream.contracts.feedback import Feedback
from rftstream.service.role import FOREVER, Publish, Received, Role, RoleContext, Wakeup
from rftstream.service.role_spec import RoleKind, RoleSpec

MAX_PER_TRANSACTION = 100

JUDGEMENTS = RoleSpec(
    name="judgements",
    kind=RoleKind.source,
    build="my_sources:build",
    summary="a UDP port -> feedback",
    follows=("feedback",),  # its own output: so it knows after a restart what it has written
    produces=("feedback",),
    count=lambda config: 1,
)


def build(context: RoleContext, *, port: int = 7007) -> Role:
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.bind(("127.0.0.1", port))
    listener.setblocking(False)
    step = Judgements(listener, num_partitions=context.config.transport.partitions, clock=context.clock)
    return Role(spec=JUDGEMENTS, step=step)


class Judgements:
    """Takes datagrams like {"source": "ann", "rollout_id": "7", "reward": 1.0}, and answers with the feedback's id once
    it is on the log. Who gets no answer sends again."""

    def __init__(self, listener: socket.socket, *, num_partitions: int, clock: Clock) -> None:
        self._listener, self._num_partitions, self._clock = listener, num_partitions, clock
        self._written: set[str] = set()
        """Ids that are on the log."""
        self._waiting: dict[str, set[tuple[str, int]]] = {}
        """Ids that are being written, with the addresses to answer."""
        self._is_leaving = False

    def follow(self, received: Received) -> None:
        if isinstance(received.message, Feedback):
            self._written.add(received.message.feedback_id)

    def advance(self) -> tuple[Publish, ...]:
        outputs: list[Publish] = []
        while not self._is_leaving and len(outputs) < MAX_PER_TRANSACTION:
            try:
                datagram, sender = self._listener.recvfrom(65536)
            except BlockingIOError:
                break
            try:
                feedback = self._parse(datagram)
            except (ValueError, KeyError, TypeError) as error:
                self._listener.sendto(f"error: {error}".encode(), sender)
                continue
            if feedback.feedback_id in self._written:
                self._listener.sendto(feedback.feedback_id.encode(), sender)
                continue
            if feedback.feedback_id not in self._waiting:
                partition = zlib.crc32(feedback.feedback_id.encode()) % self._num_partitions
                outputs.append(Publish("feedback", partition, feedback))
            self._waiting.setdefault(feedback.feedback_id, set()).add(sender)
        return tuple(outputs)

    def _parse(self, datagram: bytes) -> Feedback:
        said = json.loads(datagram)
        source, rollout_id = str(said["source"]), str(said["rollout_id"])
        return Feedback(
            feedback_id=f"{source}/{rollout_id}",
            rollout_id=rollout_id,
            source=source,
            reward=float(said["reward"]),
            given_at=self._clock.now(),
        )

    def committed(self, outputs: tuple[Publish, ...]) -> None:
        for output in outputs:
            assert isinstance(output.message, Feedback)
            name = output.message.feedback_id
            self._written.add(name)
            for sender in self._waiting.pop(name):
                self._listener.sendto(name.encode(), sender)

    def wakeups(self) -> Sequence[Wakeup]:
        return () if self._is_leaving else (self._listener,)

    def idle_s(self) -> float:
        return FOREVER

    def draining(self) -> None:
        self._is_leaving = True

    @property
    def busy(self) -> bool:
        return False  # all that was received goes into the next transaction

    def health(self) -> Mapping[str, object]:
        return {"written": len(self._written), "waiting": len(self._waiting)}

    def close(self) -> None:
        self._listener.close()
