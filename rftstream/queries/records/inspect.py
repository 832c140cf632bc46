"""Records for people and scripts: headers, then the decoded message or the reason why there is none."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rftstream.config.parts.registry import suggest
from rftstream.contracts import codec
from rftstream.contracts.arrays import Array
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.rollouts import PartialRollout, Posted, Rollout, Segment, Turn
from rftstream.contracts.tasks import ChatMessage, RolloutIds, Sampling
from rftstream.contracts.topics import TOPICS
from rftstream.errors import ConfigError, ContractError
from rftstream.models.rendering import Pieces
from rftstream.queries.formatting import columns, moment, number, size
from rftstream.queries.plain import as_base64, pick, printable
from rftstream.queries.records.shown import PLAIN, CompletionReader, cut, model_call_text, posted_text, turn_lines
from rftstream.queries.state.topics import num_offsets
from rftstream.service.role import Log

MAX_TEXT_CHARACTERS = 2_000
"""Most characters of one string in text output."""

WIDTH = 110
"""Most characters of a wrapped line."""

# --------------------------------------------------------------------------------------------- which topics


def list_topics(log: Log) -> list[dict[str, Any]]:
    """Return each topic of the run: its name, its content, and the number of its offsets. No record is read."""
    there = log.transport.admin.topics()  # a log that an earlier release made may lack some
    return [
        {"topic": name, "offsets": num_offsets(log.transport, name), "holds": topic.description}
        for name, topic in TOPICS.items()
        if name in there
    ]


def topics_to_text(run: str, held: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each topic, and how to read one."""
    rows = [("topic", "holds", "offsets"), *((one["topic"], one["holds"], f"{one['offsets']:,}") for one in held)]
    newest = next((one["topic"] for one in held if one["topic"] == "steps" and one["offsets"]), "tasks")
    return "\n".join(
        [
            f"topics of {run}:",
            "",
            *columns(rows, left=2, indent="  "),
            "",
            f"`rftstream inspect RUN {newest} --last 1` shows the newest record of one",
        ]
    )


# --------------------------------------------------------------------------------------------- which records


def select(
    log: Log,
    topic: str,
    *,
    partition: int | None = None,
    start: int | None = None,
    last: int | None = None,
    where: Mapping[str, str] | None = None,
) -> Iterator[Record]:
    """Yield records of a topic up to its current end, by partition and offset; with `last` only the newest ones, by
    time.

    `where`: header -> required value.
    """
    if topic not in TOPICS:
        raise ConfigError(f"topic: unknown {topic!r}; {suggest(topic, list(TOPICS))}")
    ends = log.ends(topic)
    places = _places(topic, ends, partition)
    if start is not None and all(start > ends[place] for place in places):
        raise ConfigError(f"{topic}: got --from {start}, but the topic ends at {max(ends[p] for p in places)}")
    if last is None:
        for place in places:
            yield from _matching(log, place, ends, start or 0, where)
        return
    newest: list[Record] = []
    for place in places:
        newest += _newest(log, place, ends, start or 0, last, where)
    newest.sort(key=lambda record: (record.timestamp_s, record.partition, record.offset))
    yield from newest[max(0, len(newest) - last) :]


def _places(topic: str, ends: Mapping[TopicPartition, int], partition: int | None) -> list[TopicPartition]:
    if partition is None:
        return sorted(ends)
    place = TopicPartition(topic, partition)
    if place not in ends:
        raise ConfigError(f"{topic}: got partition {partition}, expected one of 0 to {len(ends) - 1}")
    return [place]


def _newest(
    log: Log,
    place: TopicPartition,
    ends: Mapping[TopicPartition, int],
    start: int,
    last: int,
    where: Mapping[str, str] | None,
) -> list[Record]:
    """Return the newest records. It searches backwards in growing steps, since offsets have gaps and `where` may match
    rarely."""
    num_back = last
    while True:
        begin = max(start, ends[place] - num_back)
        found: list[Record] = []
        for record in _matching(log, place, ends, begin, where):
            found.append(record)
            if len(found) > 2 * last:
                del found[:-last]
        if len(found) >= last or begin == start:
            return found[max(0, len(found) - last) :]
        num_back *= 8


def _matching(
    log: Log, place: TopicPartition, ends: Mapping[TopicPartition, int], begin: int, where: Mapping[str, str] | None
) -> Iterator[Record]:
    starts = {**ends, place: min(begin, ends[place])}
    for record in log.read(place.topic, start=starts):
        if record.place == place and all(_header(record, name) == value for name, value in (where or {}).items()):
            yield record


def _header(record: Record, name: str) -> str | None:
    value = record.header(name)
    return None if value is None else value.decode("utf-8", "backslashreplace")


# --------------------------------------------------------------------------------------------- as JSON


def record_to_json(record: Record) -> dict[str, Any]:
    """Return an object with place, time, key, headers, and `message` (None for tombstones) or `error` and `value`."""
    shown: dict[str, Any] = {
        **pick(record, "topic partition offset timestamp=timestamp_s"),
        "key": None if record.key is None else _text_or_base64(record.key),
        "headers": {name: _text_or_base64(value) for name, value in record.headers},
        "message": None,
    }
    if record.value is None:
        return {**shown, "tombstone": True}
    try:
        return {**shown, "message": printable(codec.from_record(record))}
    except ContractError as error:
        return {**shown, "error": str(error), "value": as_base64(record.value)}


def _text_or_base64(data: bytes) -> Any:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return as_base64(data)


# --------------------------------------------------------------------------------------------- as text


def record_to_text(record: Record, reader: CompletionReader = PLAIN) -> str:
    """Return a record as text. `reader` shows completions with their special tokens."""
    contract, version = _header(record, "contract") or "?", _header(record, "contract_version") or "?"
    key = "-" if record.key is None else record.key.decode("utf-8", "backslashreplace")
    head = f"{record}  {moment(record.timestamp_s)}  {contract}.v{version}  {key}"
    if record.value is None:
        return f"{head}\n  tombstone"
    try:
        return "\n".join([head, *(f"  {line}" for line in _dataclass_lines(codec.from_record(record), reader))])
    except ContractError as error:
        return f"{head}\n  {size(len(record.value))} that cannot be decoded: {error}"


def _dataclass_lines(part: Any, reader: CompletionReader) -> list[str]:
    """Return the lines of a dataclass: short facts on one line, then each larger part."""
    facts: list[str] = []
    lines: list[str] = []
    for item in dataclasses.fields(part):
        value = getattr(part, item.name)
        if value is None or value == () or value == {} or value == "" or value is False:
            continue
        if isinstance(part, Rollout) and item.name == "turns":
            for turn, pieces in zip(value, reader.turns(value, part.segments, part.calls), strict=True):
                lines += [*_speech(turn.role, pieces, reader), *_beside(turn)]
        elif item.name == "calls" and isinstance(part, Rollout | PartialRollout):
            lines += [f"call {part.ids.rollout_id}/call/{call.number}: {model_call_text(call)}" for call in value]
        elif isinstance(value, Posted):
            lines.append(posted_text(value))
        elif (fact := _fact(item.name, value)) is not None:
            facts.append(fact)
        else:
            lines += _part_lines(item.name, value, reader)
    return [*([" ".join(facts)] if facts else []), *lines]


def _fact(name: str, value: Any) -> str | None:
    """Return `name=value` if it is short enough to share a line."""
    if isinstance(value, RolloutIds):
        return f"rollout={value.rollout_id} sequence={value.sequence} min_version={value.min_version}"
    if isinstance(value, bool):
        return name
    if isinstance(value, (int, float)):
        is_time = name.endswith("_at") or (name == "since" and isinstance(value, float))
        return f"{name}={moment(value) if is_time and value else _exact(value)}"
    if isinstance(value, str) and len(value) <= 60 and "\n" not in value:
        return f"{name}={value}"
    if isinstance(value, bytes):
        return f"{name}=({size(len(value))})"
    if isinstance(value, Mapping) and all(isinstance(one, (int, float)) for one in value.values()) and len(value) <= 4:
        return f"{name}={{{' '.join(f'{key}={_exact(one)}' for key, one in value.items())}}}"
    return None


def _part_lines(name: str, value: Any, reader: CompletionReader) -> list[str]:
    if isinstance(value, str):
        return _speech(name, [(value, False)])
    if isinstance(value, Array):
        return [f"{name}: {value.dtype}{list(value.shape)}"]
    if isinstance(value, Segment):
        return [f"{name}: {_segment_sentence(value)}"]
    if isinstance(value, Sampling):
        return [f"{name}: {_sampling_facts(value)}"]
    if isinstance(value, Turn):
        return [*_speech(value.role, [(value.content, False)]), *_beside(value)]
    if isinstance(value, ChatMessage):
        return _speech(value.role, [(value.content, False)])
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, (ChatMessage, Turn)) for one in value):
        return [line for one in value for line in _part_lines(name, one, reader)]
    if isinstance(value, (list, tuple)) and value and dataclasses.is_dataclass(value[0]):
        return [line for i, one in enumerate(value) for line in _part_lines(f"{name}[{i}]", one, reader)]
    if dataclasses.is_dataclass(value):
        inner = _dataclass_lines(value, reader)
        return [f"{name}: {inner[0]}", *(f"  {line}" for line in inner[1:])] if inner else []
    if isinstance(value, Mapping):
        facts = [f"{key}={_exact(one) if isinstance(one, (int, float)) else _short(one)}" for key, one in value.items()]
        return textwrap.wrap(
            f"{name}: {' '.join(facts)}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    return [f"{name}: {_short(value)}"]


def _speech(who: str, pieces: Pieces, reader: CompletionReader = PLAIN) -> list[str]:
    """Return the text of a speaker, with the name in front and further lines indented."""
    first, *more = reader.text(cut(pieces, MAX_TEXT_CHARACTERS)).split("\n")
    return [f"{who}: {first}", *(f"  {line}" for line in more)]


def _beside(turn: Turn) -> list[str]:
    return [f"  {line}" for line in turn_lines(turn)]


def _segment_sentence(segment: Segment) -> str:
    mask = segment.loss_mask.numpy().astype(bool)
    logprobs = segment.behavior_logprobs.numpy()[mask]
    spans = ", ".join(f"{span.count} from {span.trainer_epoch}/{span.version}" for span in segment.versions)
    mean = f", mean logprob {number(float(logprobs.mean()))}" if len(logprobs) else ""
    return f"{len(mask)} tokens, {int(mask.sum())} sampled{f' ({spans})' if spans else ''}{mean}"


def _sampling_facts(sampling: Sampling) -> str:
    """Return the sampling settings that are always shown, and those that differ from the defaults."""
    usual = Sampling()
    always = ("temperature", "max_tokens")
    values = {item.name: getattr(sampling, item.name) for item in dataclasses.fields(sampling)}
    return " ".join(f"{k}={v}" for k, v in values.items() if k in always or v != getattr(usual, k))


def _exact(value: float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
