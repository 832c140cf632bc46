"""Dead letters, and the groups that died because of them or of failed rollouts.

A letter is a record on `dead` with the id `role/topic/partition/offset`. A group is dead if its outcome says so. It can
be put back as a group with the next attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rftstream.contracts import codec
from rftstream.contracts.control import Request, RequestKind
from rftstream.contracts.dead import DeadDropped, DeadLetter
from rftstream.contracts.ids import next_attempt, split_group_id
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.verdicts import BY_ENVIRONMENT, UnscorableReason
from rftstream.error_kinds import counted_kinds
from rftstream.errors import ConfigError, ContractError
from rftstream.queries.catalog.counts import ErrorKind
from rftstream.queries.catalog.finding import Letter
from rftstream.queries.decoding import decoded
from rftstream.queries.formatting import moment, plural, table
from rftstream.queries.plain import pick
from rftstream.queries.records.inspect import record_to_json, record_to_text
from rftstream.queries.records.shown import PLAIN, CompletionReader
from rftstream.service.reading import each_record
from rftstream.service.records.summaries import begin_with_summary
from rftstream.service.role import Log

State = Literal["dead", "asked", "put_back"]
"""The state of a dead group: untouched, requested to be put back, or put back."""
STATES: dict[State, str] = {"dead": "not put back", "asked": "asked to be put back", "put_back": "put back"}
"""Each state in words."""

NUM_EXAMPLES = 5
NUM_ERRORS = 10
"""Most kinds of errors that are shown to a person."""
_SCORABLE = {b"completed", b"truncated"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadGroup:
    """A group that died. `read_dead` makes it."""

    group_id: str
    reasons: tuple[str, ...]
    """Reasons why its siblings have no reward, each once."""
    num_rollouts: int
    at: float
    state: State


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadView:
    """Dead letters and dead groups, newest first. `read_dead` makes it. Dropped ones are left out unless they are
    requested."""

    letters: tuple[Letter, ...]
    groups: tuple[DeadGroup, ...]
    num_dropped: int

    def find_group(self, group_id: str) -> DeadGroup | None:
        """Return the dead group of this id, or None."""
        return next((group for group in self.groups if group.group_id == group_id), None)


def read_dead(log: Log, *, now: float, with_dropped: bool = False) -> DeadView:
    """Read the dead letters and groups. Bodies are read on `outcomes` and `control` only."""
    dropped, asked = _from_control(log, now)
    letters = {letter.id: letter for letter in read_letters(log)}
    outcomes = _dead_outcomes(log)
    attempts = _attempts(log) if outcomes else set()

    def state(group_id: str) -> State:
        if next_attempt(group_id) in attempts:
            return "put_back"
        return "asked" if group_id in asked else "dead"

    groups = [_group(outcome, state(outcome.group_id)) for outcome in outcomes.values()]
    return DeadView(
        letters=tuple(letter for letter in reversed(letters.values()) if with_dropped or letter.id not in dropped),
        groups=tuple(group for group in reversed(groups) if with_dropped or group.group_id not in dropped),
        num_dropped=len(dropped),
    )


def _dead_outcomes(log: Log) -> dict[str, GroupOutcome]:
    """Return the outcomes of dead groups, by group. If a summary says that there were none before it, only later
    records are read."""
    start = begin_with_summary(log, "outcomes")
    if start.summary is not None and start.summary.outcomes is not None:
        start = begin_with_summary(log, "outcomes", whole=GroupResult.dead in start.summary.outcomes.groups)
    return {
        received.message.group_id: received.message
        for received in log.messages("outcomes", start=start.positions)
        if isinstance(received.message, GroupOutcome)
        and received.message.result is GroupResult.dead
        and not received.message.late
    }


def read_letters(log: Log) -> list[Letter]:
    """Return all letters on `dead`, from their headers, oldest first. Twins are left out."""
    letters: dict[str, Letter] = {}
    for record in log.read("dead", bodies=False):
        letter = _letter(record)
        if letter is not None:
            letters.setdefault(letter.id, letter)
    return list(letters.values())


def error_kinds(letters: Iterable[Letter]) -> list[ErrorKind]:
    """Return the kinds of errors, the most frequent first."""
    found: dict[str, Counter[str]] = {}
    for letter in letters:
        if letter.error:
            found.setdefault(letter.reason, Counter())[letter.error] += 1
    kinds = [
        ErrorKind(reason=reason, error=error, count=count)
        for reason, texts in found.items()
        for error, count in counted_kinds(texts.items())
    ]
    return sorted(kinds, key=lambda kind: -kind.count)


def _from_control(log: Log, now: float) -> tuple[set[str], set[str]]:
    """Return the dropped letters and groups, and the groups with an unanswered request to be put back."""
    dropped: set[str] = set()
    asked: dict[bytes, str] = {}
    for record in log.control():
        key = record.key or b""
        if record.value is None:
            asked.pop(key, None)
            continue
        try:
            message = codec.from_record(record)
        except ContractError:
            continue
        match message:
            case DeadDropped():
                dropped.update(message.letters, message.groups)
            case Request(kind=RequestKind.retry_dead) if message.expires_at > now:
                asked[key] = str(message.arguments.get("group"))
    return dropped, set(asked.values())


def _attempts(log: Log) -> set[str]:
    """Return the groups that are not a first attempt, from `tasks`, or from `outcomes` if their tasks were deleted."""
    groups = {
        record.header("group_id") or b"/0"
        for topic in ("outcomes", "tasks")
        for record in log.read(topic, bodies=False)
    }
    return {group.decode("ascii", "replace") for group in groups if not group.endswith(b"/0")}


def _letter(record: Record) -> Letter | None:
    name = (record.header("id") or b"").decode("ascii", "replace")
    if name.count("/") != 3:
        return None
    role, topic, _, _ = name.split("/")
    reason = (record.header("reason") or b"?").decode("ascii", "replace")
    error = (record.header("error") or b"").decode("ascii", "replace")
    return Letter(
        id=name, role=role, topic=topic, reason=reason, at=record.timestamp_s, offset=record.offset, error=error
    )


def _group(outcome: GroupOutcome, state: State) -> DeadGroup:
    reasons = dict.fromkeys(str(rollout.reason) for rollout in outcome.rollouts if rollout.reason is not None)
    return DeadGroup(
        group_id=outcome.group_id,
        reasons=tuple(reasons),
        num_rollouts=len(outcome.rollouts),
        at=outcome.decided_at,
        state=state,
    )


# --------------------------------------------------------------------------------------------- one letter


def find_letters(
    log: Log, name: str, *, place: tuple[TopicPartition, int] | None = None
) -> list[tuple[DeadLetter, Record]]:
    """Return the letters for the id of a letter, rollout or group, each with its original record. `place`: the place of
    the only one, so that no other record is read."""
    found: dict[str, tuple[DeadLetter, Record]] = {}
    records = log.read("dead") if place is None else each_record(log.transport, place[0], [place[1]])
    for key, letter, original in _dead_letters(records):
        if name in (key, *_owners(original)):
            found.setdefault(key, (letter, original))
    return list(found.values())


def _dead_letters(records: Iterable[Record]) -> Iterator[tuple[str, DeadLetter, Record]]:
    """Yield id, letter and original record of each readable letter."""
    for record in records:
        if (letter := decoded(record, DeadLetter)) is not None:
            yield codec.key_of(letter).decode(), letter, original_of(letter, record.timestamp_s)


def original_of(letter: DeadLetter, timestamp_s: float) -> Record:
    """Return the original record of a letter, unchanged."""
    return Record(letter.topic, letter.partition, letter.offset, timestamp_s, letter.key, letter.value, letter.headers)


def _owners(original: Record) -> tuple[str, str]:
    """Return the rollout and the group of a record, from its headers."""
    rollout, group = (original.header(name) or b"" for name in ("rollout_id", "group_id"))
    return rollout.decode("ascii", "replace"), group.decode("ascii", "replace")


def letter_to_json(letter: DeadLetter, original: Record) -> dict[str, Any]:
    """Return a letter and its record as a dict for JSON."""
    said = pick(letter, "role reason detail tries dead_at")
    return {"id": codec.key_of(letter).decode(), **said, "record": record_to_json(original)}


def letter_to_text(letter: DeadLetter, original: Record, reader: CompletionReader = PLAIN) -> str:
    """Return a letter and its record as text. `reader` shows completions with their special tokens."""
    tried = "tried once" if letter.tries == 1 else f"tried {letter.tries} times"
    lines = [
        f"{codec.key_of(letter).decode()}: {letter.reason}, {tried}, given up {moment(letter.dead_at)}",
        *(f"  {line}" for line in letter.detail.strip().splitlines()),
        record_to_text(original, reader),
    ]
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------- choosing


def groups_to_retry(log: Log, view: DeadView, names: Sequence[str], reason: str | None) -> list[DeadGroup]:
    """Return the groups selected by `names` (of letters, rollouts or groups) or by a reason, else all that are still
    dead.

    ConfigError for a name that belongs to nothing dead.
    """
    if names:
        owners = _groups_of_letters(log, {letter.id for letter in view.letters} & set(names))
        return list({group.group_id: group for name in names for group in [_named(view, name, owners)]}.values())
    dead = [group for group in view.groups if group.state == "dead"]
    if reason is None:
        return dead
    _check_reason(view, reason)
    return [group for group in dead if reason in group.reasons]


def plan_retries(
    log: Log, names: Sequence[str] = (), reason: str | None = None, *, sample: bool = False, now: float
) -> tuple[dict[str, Sequence[str | None]], int]:
    """Return the dead groups selected by names or a reason (else all), each with the places of the rollouts that can be
    scored again; and the number of other groups that were put back before. `sample`: no rollout is scored again, all
    are sampled. What died of its environment's reward is sampled, too: that reward is recorded, and stays as it is."""
    chosen = groups_to_retry(log, read_dead(log, now=now, with_dropped=bool(names)), names, reason)
    groups = [group.group_id for group in chosen if group.state != "put_back"]
    stored: dict[str, Sequence[str | None]] = dict.fromkeys(groups, ())
    if not sample:
        as_before = {letter.id for letter in read_letters(log) if letter.error.startswith(BY_ENVIRONMENT)}
        stored |= stored_rollouts(log, groups, as_before)
    return stored, len(chosen) - len(groups)


def reasons_to_text(view: DeadView) -> str:
    """Return what the dead letters and groups died of, as a sentence without a full stop."""
    counts = Counter(letter.reason for letter in view.letters)
    counts.update({name: 0 for group in view.groups for name in group.reasons})
    groups = Counter(name for group in view.groups for name in group.reasons)
    found = [f"{name} ({plural(counts[name], 'letter')}, {plural(groups[name], 'group')})" for name in counts]
    return f"what is dead here died of {', '.join(found)}" if found else "nothing is dead here"


def _check_reason(view: DeadView, reason: str) -> None:
    """Raise ConfigError for a reason that nothing here has, and that no rollout can have."""
    here = {letter.reason for letter in view.letters} | {name for group in view.groups for name in group.reasons}
    if reason not in here and reason not in [str(one) for one in UnscorableReason]:
        raise ConfigError(f"--reason {reason}: there is no such reason; {reasons_to_text(view)}")


def _groups_of_letters(log: Log, names: Collection[str]) -> dict[str, str]:
    """Return letter -> group of its original record."""
    found: dict[str, str] = {}
    for key, _, original in _dead_letters(log.read("dead") if names else ()):
        if key in names:
            found.setdefault(key, _owners(original)[1])
    return found


def _named(view: DeadView, name: str, owners: Mapping[str, str]) -> DeadGroup:
    for candidate in [owners[name]] if name in owners else [name, name.rpartition("/")[0]]:
        if (group := view.find_group(candidate)) is not None:
            return group
    raise ConfigError(
        f"{name}: no dead group has it, expected the id of a dead letter, or of a rollout or group whose outcome is "
        "dead (a dead sibling of a batched group stays dead); `rftstream dead list RUN` shows them"
    )


def to_drop(view: DeadView, names: Sequence[str], reason: str | None) -> tuple[list[str], list[str]]:
    """Return the letters and groups selected by names or a reason, else all. ConfigError for a name that is not
    listed."""
    letters, groups = {letter.id: letter for letter in view.letters}, {group.group_id: group for group in view.groups}
    if names:
        if unknown := [name for name in names if name not in letters and name not in groups]:
            raise ConfigError(
                f"{unknown[0]}: not listed, expected the id of a dead letter or a dead group; "
                "`rftstream dead list RUN` shows them"
            )
        return [name for name in names if name in letters], [name for name in names if name in groups]
    if reason is not None:
        _check_reason(view, reason)
    return (
        [name for name, letter in letters.items() if reason in (None, letter.reason)],
        [name for name, group in groups.items() if reason is None or reason in group.reasons],
    )


def stored_rollouts(log: Log, groups: Collection[str], but: Collection[str] = ()) -> dict[str, list[str | None]]:
    """Return, for each group, the places of its siblings' rollouts; None for siblings that have nothing to score, or
    whose letter `but` names."""
    chosen = {group.encode() for group in groups}
    places: dict[str, dict[int, str]] = {group: {} for group in groups}
    for record in log.read("rollouts", bodies=False):
        group = record.header("group_id")
        sibling = record.number("sibling")
        if group in chosen and sibling is not None and record.header("status") in _SCORABLE:
            if f"verifier/rollouts/{record.partition}/{record.offset}" in but:
                continue
            places[record.text("group_id")].setdefault(sibling, str(record))
    return {group: [found.get(i) for i in range(max(found, default=-1) + 1)] for group, found in places.items()}


# --------------------------------------------------------------------------------------------- the list


def view_to_json(log: Log, view: DeadView, *, num_examples: int = NUM_EXAMPLES) -> dict[str, Any]:
    """Return the view as a dict for JSON."""
    details = _details(log, view.letters[:num_examples])
    return {
        "letters": [
            {"reason": reason, "role": role, "topic": topic, "count": count, "newest_at": newest}
            for (reason, role, topic), count, newest in _kinds(view.letters)
        ],
        "errors": error_kinds(reversed(view.letters)),
        "groups": [
            {"reason": reason, **{state: counts[state] for state in STATES}}
            for reason, counts in _group_reasons(view.groups).items()
        ],
        "num_letters": len(view.letters),
        "num_groups": dict(Counter(group.state for group in view.groups)),
        "num_problems": _num_problems(view.groups),
        "newest": [
            {"id": letter.id, "reason": letter.reason, "at": letter.at, **details.get(letter.id, {})}
            for letter in view.letters[:num_examples]
        ],
        "num_dropped": view.num_dropped,
    }


def view_to_text(log: Log, view: DeadView, *, num_examples: int = NUM_EXAMPLES) -> str:
    """Return the view as text for people."""
    if not view.letters and not view.groups:
        return "nothing is dead" + (f" ({plural(view.num_dropped, 'record')} dropped)" if view.num_dropped else "")
    states = Counter(group.state for group in view.groups)
    counts = ", ".join(f"{states[state]:,} {words}" for state, words in STATES.items() if states[state])
    of = f" of {plural(_num_problems(view.groups), 'problem')}: {counts}" if view.groups else ""
    lines = [
        f"{plural(len(view.letters), 'dead letter')}, {plural(len(view.groups), 'dead group')}{of}",
    ]
    if view.letters:
        rows = [(*kind, moment(newest), f"{count:,}") for kind, count, newest in _kinds(view.letters)]
        lines += table(("letters", "role", "topic", "newest", "count"), rows, left=4)
        lines += _error_lines(error_kinds(reversed(view.letters)))
    if view.groups:
        counted = _group_reasons(view.groups)
        kinds = [(name, *(f"{c[state]:,}" for state in STATES)) for name, c in counted.items()]
        lines += table(("groups", *STATES.values()), kinds)
    details = _details(log, view.letters[:num_examples])
    for letter in view.letters[:num_examples]:
        detail = details.get(letter.id, {})
        lines += [
            "",
            f"{letter.id}  {letter.reason}  {detail.get('rollout_id') or ''}".rstrip(),
            f"  {str(detail.get('detail', '')).strip().rpartition(chr(10))[2]}",
        ]
    if view.num_dropped:
        lines += ["", f"{plural(view.num_dropped, 'record')} dropped"]
    return "\n".join(lines)


def _error_lines(kinds: Sequence[ErrorKind]) -> list[str]:
    rows = [
        ("died of", "count", "error"),
        *((kind.reason, f"{kind.count:,}", kind.error) for kind in kinds[:NUM_ERRORS]),
    ]
    more = [f"and {plural(len(kinds) - NUM_ERRORS, 'other error')}"] if len(kinds) > NUM_ERRORS else []
    return ["", *(f"{reason:<15}  {count:>7}  {error}" for reason, count, error in rows), *more] if kinds else []


def _kinds(letters: Iterable[Letter]) -> list[tuple[tuple[str, str, str], int, float]]:
    """Return (reason, role, topic), the number of letters, and the newest one; the most frequent first."""
    counts: Counter[tuple[str, str, str]] = Counter()
    newest: dict[tuple[str, str, str], float] = {}
    for letter in letters:
        kind = letter.reason, letter.role, letter.topic
        counts[kind] += 1
        newest[kind] = max(newest.get(kind, 0.0), letter.at)
    return [(kind, count, newest[kind]) for kind, count in counts.most_common()]


def _group_reasons(groups: Iterable[DeadGroup]) -> Mapping[str, Counter[str]]:
    """Count groups by the reasons of their siblings, as given in the outcome."""
    counts: dict[str, Counter[str]] = {}
    for group in groups:
        counts.setdefault(", ".join(sorted(group.reasons)) or "?", Counter())[group.state] += 1
    return dict(sorted(counts.items(), key=lambda one: -one[1].total()))


def _num_problems(groups: Iterable[DeadGroup]) -> int:
    return len({split[::2] for group in groups if (split := split_group_id(group.group_id)) is not None})


def _details(log: Log, letters: Sequence[Letter]) -> dict[str, dict[str, Any]]:
    """Return, for a few letters, the data that only their bodies have."""
    wanted = {letter.offset for letter in letters}
    details: dict[str, dict[str, Any]] = {}
    if not wanted:
        return details
    records = log.read("dead", start={TopicPartition("dead", 0): min(wanted)})
    for key, letter, original in _dead_letters(record for record in records if record.offset in wanted):
        rollout, group = _owners(original)
        details[key] = {**pick(letter, "detail tries"), "rollout_id": rollout or None, "group_id": group or None}
    return details
