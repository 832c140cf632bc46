"""The basis of traces: targets, the tree of results, and reading a log by headers alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rftstream.config.sections import RunConfig
from rftstream.contracts import codec
from rftstream.contracts.control import RunManifest
from rftstream.contracts.messages import Message
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.rollouts import Segment
from rftstream.contracts.summaries import VersionRun
from rftstream.contracts.versions import VersionName, WeightsAnnounced
from rftstream.errors import ConfigError, ContractError, WeightsError
from rftstream.queries.audits.rows import Mark, fingerprint
from rftstream.queries.facts.tables import BITS, WHOLE
from rftstream.queries.formatting import moment, size
from rftstream.queries.plain import Report
from rftstream.runs.folder import OpenRun
from rftstream.service.control_view import read_manifest
from rftstream.service.reading import read_records
from rftstream.service.role import Log
from rftstream.transport.base import Transport
from rftstream.weights.version_parts import objects_of, parse_object_name

if TYPE_CHECKING:
    from rich.tree import Tree

    from rftstream.queries.facts.database import Index
    from rftstream.weights.stores.store import ObjectStore

M = TypeVar("M", bound=Message)

FORMS = (
    "a rollout (sums/0/17/0/3), a group (sums/0/17/0), a batch (batch:17), a version (v12, or 1/12 for trainer "
    "epoch 1), a demonstration (experts/0/17/0, or its id), a problem that joined (more/5, or its id), a record "
    "(rollouts[3]@8172), a dead letter (verifier/rollouts/3/8172), or a data set that was exported (its digest, or its "
    "folder)"
)


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a trace. Only the fields of its kind are set."""

    kind: str
    """rollout, group, batch, version, demonstration, problem, export or record."""
    group_id: str = ""
    sibling: int | None = None
    batch: int = 0
    version: int = 0
    trainer_epoch: int | None = None
    """Trainer epoch. None: any."""
    place: TopicPartition | None = None
    offset: int = 0
    demonstration: str = ""
    """Id of the demonstration."""
    problem: str = ""
    """`taskset/index`, or the id of the problem."""


_PATTERNS: tuple[tuple[str, str], ...] = (
    ("rollout", r"(?P<group>[a-z0-9_-]+/\d+/\d+/\d+)/(?P<sibling>\d+)"),
    ("group", r"(?P<group>[a-z0-9_-]+/\d+/\d+/\d+)"),
    ("demonstration", r"(?P<demonstration>[0-9a-f]{32})"),
    ("batch", r"(?i:batch)(?:: ?| )(?P<batch>\d+)"),
    ("version", r"(?i:v|version(?:: ?| ))(?P<version>\d+)"),
    ("version", r"v?(?P<epoch>\d+)/(?P<version>\d+)"),
    ("problem", r"(?P<problem>[a-z0-9_-]*[a-z_-][a-z0-9_-]*/\d+)"),
    ("problem", r"(?P<problem>[a-z0-9_-]+/\d+/\d+/\d+/[a-z]+/[a-z]+/\d+|[a-z0-9_-]+/given/[0-9a-f]{32})"),
    ("export", r"sha256:[0-9a-f]{6,64}"),
    ("record", r"(?P<topic>[a-z]+)\[(?P<partition>\d+)\]@(?P<offset>\d+)"),
    ("record", r"[a-z]+/(?P<topic>[a-z]+)/(?P<partition>\d+)/(?P<offset>\d+)"),
)


def parse_target(text: str) -> Target:
    """Return the target that a text names, in the form of other commands' output. ConfigError lists the valid forms.
    The text may come from a browser, so nothing on this machine is looked at: `trace` alone knows folders."""
    if (name := parse_object_name(text) or parse_object_name(f"{text}.delta")) is not None:
        return Target("version", version=name.version, trainer_epoch=name.trainer_epoch)
    for kind, pattern in _PATTERNS:
        if (match := re.fullmatch(pattern, text.strip())) is None:
            continue
        found = match.groupdict()
        sibling, epoch, topic = (found.get(name) for name in ("sibling", "epoch", "topic"))
        return Target(
            kind,
            group_id=found.get("group") or "",
            sibling=None if sibling is None else int(sibling),
            batch=int(found.get("batch") or 0),
            demonstration=found.get("demonstration") or "",
            problem=found.get("problem") or "",
            version=int(found.get("version") or 0),
            trainer_epoch=None if epoch is None else int(epoch),
            place=None if topic is None else TopicPartition(topic, int(found["partition"])),
            offset=int(found.get("offset") or 0),
        )
    hint = f"; a number alone may be batch:{text} or v{text}" if text.isdigit() else ""
    raise ConfigError(f"trace: got {text!r}, expected {FORMS}{hint}")


# --------------------------------------------------------------------------------------------- the tree


@dataclass(slots=True)
class Node(Report):
    """A record, or a heading for several records, with the nodes below it."""

    JSON = (
        "kind name topic=record.topic? partition=record.partition? offset=record.offset? timestamp=record.timestamp_s? "
        "twin facts children"
    )

    kind: str
    """group, rollout, task, verified, outcome, batch, experience, manifest, step, version, evaluation, dead, ..."""
    name: str
    record: Record | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts that are shown after the name, and in the JSON."""
    twin: bool = False
    """Whether it is a twin: a second record where there may be only one."""
    children: list[Node] = field(default_factory=list)

    def line(self) -> str:
        parts = [f"{self.kind} {self.name}".rstrip()]
        if self.record is not None:
            parts.append(f"{self.record} {moment(self.record.timestamp_s)}")
        if self.twin:
            parts.append("TWIN")
        if facts := ", ".join(_fact(name, value) for name, value in self.facts.items() if value is not None):
            parts.append(facts)
        return "  ".join(parts)

    def to_text(self, depth: int = 0) -> str:
        lines = [f"{'  ' * depth}{self.line()}", *(child.to_text(depth + 1) for child in self.children)]
        return "\n".join(lines)

    def to_tree(self) -> Tree:
        """Return the tree as text for a terminal."""
        from rich.text import Text
        from rich.tree import Tree

        def grow(node: Node, tree: Tree | None) -> Tree:
            head, _, rest = node.line().partition("  ")
            style = "bold red" if node.twin else "bold"
            label = Text.assemble((head, style), "  ", Text.from_ansi(rest))
            grown = Tree(label, guide_style="dim", highlight=False) if tree is None else tree.add(label)
            for child in node.children:
                grow(child, grown)
            return grown

        return grow(self, None)


def _fact(name: str, value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else last_line(str(value))  # of a traceback
    return text if name in ("is", "by", "why") else f"{name} {text}"


# --------------------------------------------------------------------------------------------- reading


class Headers:
    """Reads a log by headers, and bodies of single records only."""

    def __init__(self, transport: Transport, index: Index | None = None) -> None:
        self.transport = transport
        self.index = index
        """Index of the records that were read before. It is not extended."""
        self._newest: tuple[tuple[TopicPartition, int], Message | str] | None = None
        self.searched: dict[str, int] = {}
        """Partition -> number of records that were searched."""

    def scan(
        self, places: Collection[TopicPartition], *, start: Mapping[TopicPartition, int] | None = None
    ) -> Iterator[Record]:
        """Yield the records of some partitions of one topic without bodies, up to their current ends."""
        topic = next(iter(places)).topic
        partitions = {place.partition for place in places}
        for record in Log(self.transport).read(topic, start=start, bodies=False, partitions=partitions):
            self.searched[str(record.place)] = self.searched.get(str(record.place), 0) + 1
            yield record

    def of_group(
        self, places: Collection[TopicPartition], group_id: bytes
    ) -> tuple[list[Record], dict[TopicPartition, int]]:
        """Return the records of a group in these partitions of one topic that the index has, and the offsets from which
        on it has none."""
        if self.index is None or (number := self.index.names.find(group_id)) is None:
            return [], self._read_up_to(places)
        topic = next(iter(places)).topic
        if topic == "outcomes":
            return self._indexed(places, "SELECT 0, offset FROM on_outcomes WHERE grp = ?", (number,))
        own, rest = "rollout BETWEEN ? AND ?", "grp = ? AND grp != rollout >> 20"
        query = " UNION ALL ".join(f"SELECT partition, offset FROM on_{topic} WHERE {which}" for which in (own, rest))
        records, start = self._indexed(places, query, (number << BITS, number << BITS | WHOLE, number))
        return [record for record in records if record.header("group_id") == group_id], start

    def of_batch(self, batch: int) -> tuple[list[Record], dict[TopicPartition, int]]:
        """Return the outcomes of a batch, in the form of `of_group`."""
        return self._indexed(self.places("outcomes"), "SELECT 0, offset FROM on_outcomes WHERE batch = ?", (batch,))

    def _indexed(
        self, places: Collection[TopicPartition], query: str, parameters: tuple[Any, ...]
    ) -> tuple[list[Record], dict[TopicPartition, int]]:
        start = self._read_up_to(places)
        found: dict[int, set[int]] = defaultdict(set)
        for partition, offset in self.index.rows(query, parameters) if self.index is not None and start else ():
            found[partition].add(offset)
        records: list[Record] = []
        for place in sorted(start):
            records += read_records(self.transport, place, found[place.partition]).values()
        return records, start

    def _read_up_to(self, places: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        marks = {} if self.index is None else self.index.marks(next(iter(places)).topic)
        return {
            place: mark.end
            for place in places
            if (mark := marks.get(place)) is not None and self._is_as_it_was(place, mark)
        }

    def _is_as_it_was(self, place: TopicPartition, mark: Mark) -> bool:
        admin = self.transport.admin
        if admin.end_offsets(place.topic).get(place, -1) < mark.end:
            return False
        if mark.last < admin.begin_offsets(place.topic)[place]:  # deleted meanwhile, or there was none
            return True
        last = self.record_at(place, mark.last)
        return last is not None and fingerprint(last) == mark.fingerprint

    def all_of(self, topic: str) -> Iterator[Record]:
        return self.scan(self.places(topic))

    def places(self, topic: str) -> list[TopicPartition]:
        return sorted(self.transport.admin.end_offsets(topic))

    def record_at(self, place: TopicPartition, offset: int) -> Record | None:
        """Return the record at this offset with its body, or None if there is none."""
        return read_records(self.transport, place, [offset]).get(offset)

    def message_of(self, record: Record) -> Message | str:
        """Return the decoded message, or why there is none. The newest message is cached, since several facts are read
        from it."""
        where = record.place, record.offset
        if self._newest is None or self._newest[0] != where:
            self._newest = where, self._read_message(record)
        return self._newest[1]

    def facts_of(self, record: Record, kind: type[M], facts: Callable[[M], dict[str, Any]]) -> dict[str, Any]:
        """Return the facts of a message, or why there is none of its kind."""
        message = self.message_of(record)
        return facts(message) if isinstance(message, kind) else {"why": message}

    def _read_message(self, record: Record) -> Message | str:
        whole = record if record.value is not None else self.record_at(record.place, record.offset)
        if whole is None or whole.value is None:
            return "its body is gone"
        try:
            return codec.from_record(whole)
        except ContractError as error:
            return str(error)


def header(record: Record, name: str) -> str | None:
    value = record.header(name)
    return None if value is None else value.decode("ascii", "backslashreplace")


def number(record: Record, name: str) -> int | None:
    text = header(record, name)
    return int(text) if text is not None and text.isdigit() else None


def version_of(record: Record) -> VersionName | None:
    """Return the version in the headers of a step, an announcement or an evaluation."""
    epoch, version = number(record, "trainer_epoch"), number(record, "version")
    return None if epoch is None or version is None else VersionName(trainer_epoch=epoch, version=version)


def name_of(version: VersionName) -> str:
    return f"{version.trainer_epoch}/{version.version}"


def count_stamps(segments: Iterable[Segment]) -> dict[VersionName, int]:
    """Return version -> number of tokens that it sampled."""
    counts: dict[VersionName, int] = defaultdict(int)
    for segment in segments:
        for span in segment.versions:
            counts[VersionName(trainer_epoch=span.trainer_epoch, version=span.version)] += span.count
    return dict(counts)


def sampled_by(segments: Iterable[Segment], other: str | None) -> str | None:
    """Return the versions that sampled tokens. `other`: the run of these versions, if it is another one."""
    names = ", ".join(map(name_of, count_stamps(segments)))
    return f"{names} of {other}" if names and other is not None else names or None


def whereabouts(store: ObjectStore, announced: WeightsAnnounced) -> str:
    """Return the size of the version's object, or that the object is gone."""
    try:
        there = all(store.exists(one.object) for one in objects_of(announced))
    except WeightsError as error:
        return f"the store does not answer ({error})"
    return size(announced.num_bytes) if there else "deleted from the store"


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def named_siblings(outcomes: Iterable[Message | str]) -> set[int]:
    """Return the numbers of the rollouts that outcomes name."""
    found = [rollout for outcome in outcomes if isinstance(outcome, GroupOutcome) for rollout in outcome.rollouts]
    return {int(one.rollout_id.rpartition("/")[2]) for one in found}


def no_version(target: Target, runs: Sequence[VersionRun], run_id: str) -> str:
    """Return the error text for a target that is not among the versions of any trainer."""
    epoch = "" if target.trainer_epoch is None else f"{target.trainer_epoch}/"
    text = f"trace: {epoch or 'v'}{target.version}: no such version"
    if not runs:
        return f"{text}; the run {run_id} has none yet"
    swapped = VersionName(trainer_epoch=target.version, version=target.trainer_epoch or 0)
    is_swapped = target.trainer_epoch is not None and any(
        run.trainer_epoch == swapped.trainer_epoch and run.first <= swapped.version <= run.last for run in runs
    )
    hint = f"; did you mean {name_of(swapped)}?" if is_swapped else ""
    epochs = ", ".join(str(run.trainer_epoch) for run in runs)
    newest = max(run.last for run in runs)
    return f"{text}; the run {run_id} has v0 to v{newest}, of trainer epochs {epochs}{hint}"


# ---------------------- the source of a run's records, if it is made from another run: `rescore`, `replay --into`


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin(Report):
    """The source of a run's records. `origin_of` makes it."""

    run: str
    """Folder of the other run."""
    versions: tuple[int, int] | None
    """Batches between these versions are trained here. None: the rollouts were scored again, or decided anew."""
    changed: tuple[str, ...]
    """`key before -> after` for each setting that differs from the other run."""

    @property
    def name(self) -> str:
        """Return the name of the other run."""
        return Path(self.run).name

    is_scored: bool = True
    """Whether the rollouts have new verdicts here. False: their batches are made anew."""

    @property
    def how(self) -> str:
        """Return in words how its records are used here."""
        if self.versions is None:
            return (
                "its rollouts, scored again" if self.is_scored else "its rollouts by their own verdicts, batched anew"
            )
        return f"its batches from version {self.versions[0]} to {self.versions[1]}"


def origin_of(config: RunConfig, manifest: RunManifest | None) -> Origin | None:
    """Return the source of the run's records; None if the run sampled its rollouts itself."""
    if config.run.imported_from is None:
        return None
    changed = () if manifest is None else manifest.changed
    return Origin(
        run=config.run.imported_from,
        versions=config.run.imported_versions,
        changed=changed,
        is_scored=config.verifier.count > 0 or any(line.startswith("verdicts of the scorer ") for line in changed),
    )


def origin_node(run: OpenRun) -> list[Node]:
    """Return the source as nodes of a trace; empty if the run sampled its rollouts itself."""
    if run.config.run.imported_from is None:
        return []
    origin = origin_of(run.config, read_manifest(run.transport))
    assert origin is not None, "it is imported"
    facts = {"is": origin.how, "changed": "; ".join(origin.changed) or None}
    return [Node("made of", origin.run, facts=facts)]
