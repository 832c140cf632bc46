"""A run in memory: its log, its object store, its clock. RoleDriver and Simulation use it."""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from rftstream.config.placement import Machine, place
from rftstream.config.sections import RunConfig
from rftstream.contracts import codec
from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.control import Claim
from rftstream.contracts.messages import Message
from rftstream.contracts.records import NewRecord, Record, TopicPartition
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.rollouts import PartialRollout, Rollout
from rftstream.contracts.tasks import Task
from rftstream.contracts.topics import TOPICS, Width
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.errors import WeightsError
from rftstream.runs.folder import RunFolder, create_log
from rftstream.runs.manifest import make_manifest
from rftstream.service.role import Log
from rftstream.testing.played import played_records
from rftstream.transport.base import Position, Transport
from rftstream.transport.memory.transport import MemoryLog
from rftstream.weights.stores.store import ObjectStore

if TYPE_CHECKING:
    from rftstream.queries.audits.balance import AuditReport
    from rftstream.queries.decisions.recomputation import Recomputation

START_TIME_S = 1_700_000_000.0


class ManualClock:
    """A clock that only advances on request. A MemoryRun makes it."""

    def __init__(self, now: float = START_TIME_S) -> None:
        self._now = now

    def now(self) -> float:
        """Return the time in seconds."""
        return self._now

    def stamp(self) -> float:
        """Return the time in seconds."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Advance by a number of seconds, and return at once."""
        self._now += seconds

    def advance(self, seconds: float) -> None:
        """Advance by a number of seconds."""
        self._now += seconds


class Agenda:
    """Tasks with their due times. `Simulation` adds tasks, and does the due ones before each step."""

    def __init__(self) -> None:
        self._tasks: list[tuple[float, Callable[[], None]]] = []

    def add(self, at: float, task: Callable[[], None]) -> None:
        """Add a task that is due at the time `at`."""
        self._tasks.append((at, task))

    def take_due(self, now: float) -> list[Callable[[], None]]:
        """Remove and return the due tasks, in the order in which they were added."""
        due = [task for at, task in self._tasks if at <= now]
        self._tasks = [(at, task) for at, task in self._tasks if at > now]
        return due

    def times(self) -> list[float]:
        """Return the times of all tasks."""
        return [at for at, _ in self._tasks]


class MemoryStore(ObjectStore):
    """An object store that lives as long as this object."""

    def __init__(self) -> None:
        self.url = "memory://"
        self.is_local = True
        self.objects: dict[str, bytes] = {}
        self.fault: Callable[[str], None] | None = None
        """Called as fault("before_versions") and fault("after_versions") when an object is put into the folder
        `versions`, and likewise for other folders; and as fault("before_delete") for each object. Its exception is
        raised by the call."""
        self.is_hidden: Callable[[str], bool] | None = None
        """Asked whether whoever looks for the object of this name does not see it yet, as on a file system that hosts
        have in their caches."""
        self._files = _MemoryFiles(self)


class MemoryRun:
    """A run without processes. A test makes it, starts roles on it, and acts as all other roles."""

    def __init__(self, config: RunConfig, *, folder: Path, marks: bool = False) -> None:
        """Make the log, the object store and the clock. `marks`: whether transactions leave gaps between offsets, as on
        Kafka."""
        self.config = config = place(Machine(), config).config
        self.folder = RunFolder(folder / config.run.name)
        self.folder.path.mkdir(parents=True, exist_ok=True)
        self.clock = ManualClock()
        self.log = MemoryLog(self.clock.now, marks=marks)
        self.store = MemoryStore()
        create_log(self.log.connect("setup"), config)

    # ------------------------------------------------------------------------------------------ writing

    def put(self, topic: str, *messages: Message, partition: int | None = None) -> None:
        """Write messages in one transaction, as their role would. Each goes to its own partition, unless one is
        given."""
        entries = [
            (topic, self._partition(topic, message) if partition is None else partition, message)
            for message in messages
        ]
        manifests = [message for message in messages if isinstance(message, BatchManifest)]
        positions = self._of_the_buffer(manifests[-1]) if manifests else {}
        self._commit(played_records(self.transport(), self.folder.run_id, entries), positions)

    def put_raw(self, *records: NewRecord) -> None:
        """Write unchanged records, in one transaction."""
        self._commit(records, {})

    def _commit(self, records: Sequence[NewRecord], positions: Mapping[TopicPartition, Position]) -> None:
        producer = self.log.connect("test").producer("test")
        producer.start()
        producer.commit(records, positions=positions, group=RoleName.buffer if positions else None)

    def _of_the_buffer(self, manifest: BatchManifest) -> dict[TopicPartition, Position]:
        """Return the position that the buffer commits with a batch, which says which batch is next."""
        committed = Log(self.transport()).committed(RoleName.buffer)
        metadata = f"{manifest.batch_sequence + 1} {int(manifest.last)}"
        return {place: Position(one.offset, f"{one.offset} {metadata}") for place, one in committed.items()}

    def put_manifest(self) -> None:
        """Write the run's manifest, which the feeder writes first and all other roles wait for."""
        digests = {f"taskset.{name}": "" for name in self.config.tasksets}
        manifest = make_manifest(self.config, self.folder.run_id, digests, self.clock.now())
        self.put("control", replace(manifest, config=""))

    def _partition(self, topic: str, message: Message) -> int:
        if TOPICS[topic].width is Width.one:
            return 0
        if isinstance(message, Task | Rollout | PartialRollout | VerifiedRollout):
            return message.ids.sequence % self.config.transport.partitions
        if isinstance(message, Experience | BatchManifest):
            return message.share
        raise ValueError(f"{topic}: say on which partition")

    # ------------------------------------------------------------------------------------------ looking

    def transport(self, process: str = "observer") -> Transport:
        """Return a connection to the log, for the process of this name."""
        return self.log.connect(process)

    def records(self, topic: str) -> list[Record]:
        """Return all records of a topic."""
        return list(Log(self.transport()).read(topic))

    def messages(self, topic: str) -> list[Message]:
        """Return all messages of a topic, decoded. Tombstones are left out."""
        return [codec.from_record(record) for record in self.records(topic) if record.value is not None]

    def audit(self) -> AuditReport:
        """Audit the run, and return the report."""
        from rftstream.queries.audits.audit import audit

        return audit(self.transport())

    def recompute(self, config: RunConfig | None = None) -> Recomputation:
        """Recompute the decisions of all operators from the log, and return the result. `config`: a config with other
        settings."""
        from rftstream.models.folders.folder import prepare_model
        from rftstream.queries.decisions.recompute import recompute

        spec = prepare_model(self.config.model, self.folder.model, self.config.run.seed)
        return recompute(self.transport(), config or self.config, spec)

    def digest(self) -> str:
        """Return a digest of all records of all topics. Host and process id in claims are left out."""
        total = hashlib.sha256()
        for topic in sorted(TOPICS):
            for record in self.records(topic):
                if record.header("contract") == b"claim":
                    claim = codec.from_record(record)
                    assert isinstance(claim, Claim)
                    record = msgspec.structs.replace(record, value=codec.encode(replace(claim, host="", pid=0)))
                total.update(repr(record).encode())
        return total.hexdigest()


class _MemoryFiles:
    foreign_errors = False

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def kind_of(self, error: Exception) -> type[WeightsError]:
        return WeightsError

    def make_scratch(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="rftstream-", dir=_quick_folder()))

    def add(self, name: str, path: Path) -> bool:
        folder = name.partition("/")[0]
        self._fault(f"before_{folder}")
        if name in self._store.objects:
            return False
        self._store.objects[name] = path.read_bytes()
        self._fault(f"after_{folder}")
        return True

    def open(self, name: str, errors: Callable[[], AbstractContextManager[None]]) -> IO[bytes]:
        return io.BytesIO(self._get(name))

    def size(self, name: str) -> int:
        return len(self._get(name))

    def walk(self, folder: str) -> Iterator[str]:
        names = [name for name in self._store.objects if name.startswith(f"{folder}/" if folder else "")]
        yield from [name for name in names if not self._is_hidden(name)]

    def delete(self, name: str) -> None:
        self._fault("before_delete")
        self._get(name)
        del self._store.objects[name]

    def _get(self, name: str) -> bytes:
        if name not in self._store.objects or self._is_hidden(name):
            raise FileNotFoundError(name)
        return self._store.objects[name]

    def _is_hidden(self, name: str) -> bool:
        return self._store.is_hidden is not None and self._store.is_hidden(name)

    def _fault(self, point: str) -> None:
        if self._store.fault is not None:
            self._store.fault(point)


def _quick_folder() -> str | None:
    """Return a folder in memory instead of on a disk, if there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
