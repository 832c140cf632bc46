"""Compares a run's topics with the settings that topics.py and the run file require."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.topics import TOPICS
from rftstream.errors import ConfigError
from rftstream.queries.formatting import columns, plural
from rftstream.queries.plain import Report
from rftstream.runs.folder import (
    RunFolder,
    candidates,
    create_log,
    find_run,
    lies_in_folder,
    next_folder,
    open_transport,
    wanted_topics,
)
from rftstream.runs.log_settings import shape_differences
from rftstream.transport.base import TopicSettings, Transport
from rftstream.transport.findings import ServerLook


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicLine(Report):
    """A topic with its settings, and the required ones."""

    JSON = (
        "topic=name exists partitions=found.partitions compacted=found.compacted "
        "max_record_bytes=found.max_record_bytes wanted_partitions=wanted.partitions offsets=num_offsets differences"
    )

    name: str
    wanted: TopicSettings
    found: TopicSettings | None
    """The topic's settings; None if the topic does not exist."""
    num_offsets: int | None
    """Offsets from the first kept record to the end. On Kafka, marks of transactions are included."""
    differences: tuple[str, ...]

    @property
    def exists(self) -> bool:
        """Whether the topic is there."""
        return self.found is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsReport(Report):
    """The topics of a run. `list_topics` and `apply_topics` make it."""

    JSON = "run transport=kind fine made topics=lines"

    run: str
    kind: str
    """Kind of the transport."""
    lines: tuple[TopicLine, ...]
    made: tuple[str, ...] = ()
    """Whether `apply` has just created it."""

    @property
    def fine(self) -> bool:
        """Return whether all topics exist with the required settings."""
        return all(line.found is not None and not line.differences for line in self.lines)

    def to_text(self) -> str:
        """Return the report as text for people."""
        rows: list[tuple[object, ...]] = [("topic", "is", "partitions", "offsets")]
        for line in self.lines:
            is_ = "missing" if line.found is None else "different" if line.differences else "as wanted"
            partitions = line.wanted.partitions if line.found is None else line.found.partitions
            offsets = None if line.num_offsets is None else f"{line.num_offsets:,}"
            rows.append((line.name, is_, partitions, offsets))
        texts = [f"{self.run} on {self.kind}", "", *columns(rows, left=2, indent="  ")]
        if different := [f"  {line.name}: {text}" for line in self.lines for text in line.differences]:
            texts += ["", "differences:", *different]
        if self.made:
            texts += ["", f"made {plural(len(self.made), 'topic')}: {', '.join(self.made)}"]
        return "\n".join(texts)


def find_log(path: Path, layers: Sequence[Path] = ()) -> tuple[RunConfig, RunFolder]:
    """Find the run that `path` names, or the one that the run file, with the `layers` over it, would start next."""
    if path.is_dir() or not path.exists():
        folder, config = find_run(path, layers)
        return config, folder
    config = loader.load([path, *layers])
    existing = candidates(config)
    return config, existing[-1] if existing else next_folder(config, None)


def list_topics(config: RunConfig, folder: RunFolder) -> TopicsReport:
    """Compare the topics of a run from `find_log` with the required settings. Nothing is created."""
    if lies_in_folder(config) and not folder.log.is_dir():
        return _report(config, folder, {}, None)  # opening the log would create it
    with closing(open_transport(config, folder, create=True)) as transport:
        return _report(config, folder, transport.admin.topics(), transport)


def apply_topics(config: RunConfig, folder: RunFolder) -> TopicsReport:
    """Create the missing topics, and position 0 for every group. ConfigError if a topic has other settings."""
    folder.path.mkdir(parents=True, exist_ok=True)
    with closing(open_transport(config, folder, create=True)) as transport:
        before = transport.admin.topics()
        _refuse_others(config, folder, before)
        create_log(transport, config)
        made = [name for name in TOPICS if name not in before]
        return _report(config, folder, transport.admin.topics(), transport, made)


def _refuse_others(config: RunConfig, folder: RunFolder, there: dict[str, TopicSettings]) -> None:
    wrong = [
        f"{name}: {text}"
        for name, wanted in wanted_topics(config).items()
        if name in there
        for text in shape_differences(name, there[name], wanted)
    ]
    if wrong:
        raise ConfigError(
            f"{folder.run_id}: {'; '.join(wrong)}; partitions are fixed for a run: use the run file that the topics "
            "were made with, another run.name, or `rftstream delete` the run"
        )


def _report(
    config: RunConfig,
    folder: RunFolder,
    there: dict[str, TopicSettings],
    transport: Transport | None,
    made: Iterable[str] = (),
) -> TopicsReport:
    wanted = wanted_topics(config)
    look: ServerLook | None = getattr(transport.admin, "look", None) if transport is not None else None
    more = {} if look is None else look.topic_differences(wanted)
    lines = []
    for name, settings in wanted.items():
        found = there.get(name)
        differences = [] if found is None else [*shape_differences(name, found, settings), *more.get(name, ())]
        lines.append(
            TopicLine(
                name=name,
                wanted=settings,
                found=found,
                differences=tuple(differences),
                num_offsets=None if found is None or transport is None else num_offsets(transport, name),
            )
        )
    return TopicsReport(run=folder.run_id, kind=config.transport.kind, lines=tuple(lines), made=tuple(made))


def num_offsets(transport: Transport, topic: str) -> int:
    """Return the number of offsets that a topic keeps. On Kafka some of them are marks of transactions, without a
    record."""
    begins = transport.admin.begin_offsets(topic)
    return sum(end - begins[place] for place, end in transport.admin.end_offsets(topic).items())
