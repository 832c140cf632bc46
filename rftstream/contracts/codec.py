"""Message <-> record: msgpack maps on the wire, strict and bounded decoding, headers that tell without the body.

The value of a record is a msgpack map of the message's fields. The types are those of the modules beside this one and
are held to strictly (an int is no str); `rules.py` says what else must hold. Fields that a reader does not know are
skipped. Everything that can be wrong with bytes from outside comes out as a ContractError that names the record and
the place inside it, and as nothing else:

    rollouts[3]@8172 rollout.v1 $.turns[0].content: got int, expected str

`encode` holds a message to the same rules, so that nothing is written that no reader could read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import msgpack  # type: ignore[import-untyped]  # it has no stubs
import msgspec

from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.control import Claim, Request, RunFinished, RunManifest, RunState, TasksEnded, Trimmed
from rftstream.contracts.dead import DeadDropped, DeadLetter
from rftstream.contracts.demonstrations import Demonstration
from rftstream.contracts.feedback import Feedback
from rftstream.contracts.messages import MESSAGES, Message
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.records import Headers, NewRecord, Record
from rftstream.contracts.rollouts import PartialRollout, Rollout, RolloutStatus
from rftstream.contracts.rules import MAX_ITEMS, first_violation, show
from rftstream.contracts.tasks import RolloutIds, Task
from rftstream.contracts.topics import MAX_DEAD_BYTES, TOPICS
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.contracts.versions import EvalResult, StepRecord, WeightsAnnounced
from rftstream.error_kinds import last_line
from rftstream.errors import ContractError

VERSIONS: dict[str, int] = {
    **dict.fromkeys(MESSAGES, 1),
    "batch_manifest": 2,
    "demonstration": 2,
    "group_outcome": 2,
    "partial_rollout": 2,
    "run_manifest": 2,
    "step_record": 2,
    "tasks_ended": 2,
    "weights_announced": 3,
}
"""Contract -> the newest version that this code writes and reads; all versions up to it can be read."""

CONTRACTS: dict[type, str] = {cls: contract for contract, cls in MESSAGES.items()}
"""Type of a message -> its contract."""

MAX_TOTAL_ITEMS = 1_000_000
"""The most items that all lists and maps of one message may have together."""

_COUNTED_FROM_BYTES = 65_536
"""A value below this size cannot hold enough to be worth counting."""

MAX_ERROR = 300
"""The most characters of the header `error`."""

_BYTES = (bytes,)
_BROKEN = (
    msgspec.MsgspecError,
    msgpack.UnpackException,
    ValueError,
    TypeError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    MemoryError,
)
"""What msgpack and msgspec raise over foreign bytes, or over a message of wrong types."""


# --------------------------------------------------------------------------------------------- bytes


def encode(message: Message) -> bytes:
    """Return the record value. ContractError if the message breaks its contract, so that no reader would take it."""
    cls = type(message)
    contract = CONTRACTS.get(cls)
    if contract is None:
        raise ContractError(f"$: got {cls.__name__}, expected one of the messages")
    try:
        fields = msgspec.to_builtins(message, builtin_types=_BYTES)
        value: bytes = msgpack.packb(fields)
        msgspec.convert(fields, cls, builtin_types=_BYTES)
        violation = first_violation(message)
    except _BROKEN as error:
        _refuse(error, _label("", contract))
    if violation is not None:
        _refuse_violation(violation, _label("", contract))
    return value


def decode(value: bytes, contract: str, where: str = "") -> Message:
    """Return the message in a record value. `where` names the record in errors, e.g. `rollouts[3]@8172`."""
    cls = MESSAGES.get(contract)
    if cls is None:
        known = ", ".join(MESSAGES)
        raise ContractError(f"$: got the unknown contract {show(contract)}, expected one of {known}", where=where)
    try:
        message: Message = msgspec.convert(_unpack(value), cls, builtin_types=_BYTES)
        violation = first_violation(message)
    except _BROKEN as error:
        _refuse(error, _label(where, contract))
    if violation is not None:
        _refuse_violation(violation, _label(where, contract))
    return message


def digest_of_experiences(encoded: Iterable[bytes]) -> str:
    """Return BatchManifest.digest, over the encoded experiences of one share in order."""
    digest = hashlib.sha256()
    for value in encoded:
        digest.update(value)
    return f"sha256:{digest.hexdigest()}"


def _unpack(value: bytes) -> Any:
    """Unpack within bounds, which are checked before anything is built: the number of bytes, and each length they
    announce.

    Depth is bounded by msgpack's own stack (1,024), below that by the types and `rules.MAX_DEPTH`."""
    num_bytes = len(value)
    if num_bytes > MAX_DEAD_BYTES:
        raise ValueError(f"{num_bytes} bytes exceed the limit of {MAX_DEAD_BYTES}")
    max_items = min(num_bytes, MAX_ITEMS)
    count = _counter() if num_bytes > _COUNTED_FROM_BYTES else None
    return msgpack.unpackb(
        value,
        raw=False,
        strict_map_key=True,
        max_str_len=num_bytes,
        max_bin_len=num_bytes,
        max_array_len=max_items,
        max_map_len=max_items,
        max_ext_len=0,
        list_hook=count,
        object_hook=count,
    )


def _counter() -> Callable[[Any], Any]:
    """Return a function that counts items. Eight million empty lists fit into a record, and take fifty times its size
    in memory."""
    total = 0

    def count(container: Any) -> Any:
        nonlocal total
        total += len(container) + 1
        if total > MAX_TOTAL_ITEMS:
            raise ValueError(f"the items of all lists and maps exceed the limit of {MAX_TOTAL_ITEMS}")
        return container

    return count


# --------------------------------------------------------------------------------------------- errors


def _label(where: str, contract: str) -> str:
    label = f"{contract}.v{VERSIONS[contract]}"
    return f"{where} {label}" if where else label


def _refuse_violation(violation: tuple[str, str], where: str) -> NoReturn:
    path = f"${violation[0]}"
    raise ContractError(f"{path}: {violation[1]}", path=path, where=where)


_PLACE = re.compile(r"( - at `key` in| - at) `([^`]*)`$")
_EXPECTED = re.compile(r"^Expected `(.+?)`(?:, got `(.+)`)?$")
_MISSING = re.compile(r"^Object missing required field `(\w+)`$")
_MSGPACK_ERRORS: dict[type[BaseException], str] = {
    msgpack.StackError: "nested too deep",
    msgpack.FormatError: "got a byte that begins nothing",
    msgpack.ExtraData: "got bytes behind the end of the message",
}
"""Words for errors that come without a text, or with one that tells little."""


def _refuse(error: BaseException, where: str) -> NoReturn:
    """Raise one ContractError, of bounded length, for what msgspec, msgpack and Python say about bad input."""
    text = str(error) or type(error).__name__
    path, role = "$", ""
    if isinstance(error, msgspec.ValidationError):
        if (place := _PLACE.search(text)) is not None:
            path, text = place[2], text[: place.start()]
            role = " as a key" if "key" in place[1] else ""
        if (types := _EXPECTED.match(text)) is not None:
            text = f"got {types[2] or 'another type'}, expected {types[1]}{role}"
        elif (missing := _MISSING.match(text)) is not None:
            text = f"got no field {missing[1]}, which is required"
        else:
            text = text[:1].lower() + text[1:]
    else:
        text = f"cannot be coded as msgpack: {_MSGPACK_ERRORS.get(type(error), text)}"
    text = text if len(text) <= 200 else text[:197] + "..."
    raise ContractError(f"{path}: {text}", path=path, where=where) from None


# --------------------------------------------------------------------------------------------- names


def _version_of(message: WeightsAnnounced | StepRecord | EvalResult) -> str:
    return f"{message.name.version}/{message.name.trainer_epoch}"


def _outcome_id(outcome: GroupOutcome) -> str:
    late = ",".join(rollout.rollout_id for rollout in outcome.rollouts)
    return f"{outcome.group_id}#late/{late}" if outcome.late else outcome.group_id


_KEYS: dict[type, Callable[[Any], str]] = {
    Task: lambda m: m.ids.rollout_id,
    Rollout: lambda m: m.ids.rollout_id,
    PartialRollout: lambda m: f"{m.ids.rollout_id}#{m.piece}",
    VerifiedRollout: lambda m: m.ids.rollout_id,
    Demonstration: lambda m: m.demonstration_id,
    Feedback: lambda m: m.feedback_id,
    Experience: lambda m: f"{m.batch_sequence}",
    BatchManifest: lambda m: f"{m.batch_sequence}",
    GroupOutcome: lambda m: m.group_id,
    WeightsAnnounced: lambda m: f"{m.model}/{_version_of(m)}",
    StepRecord: lambda m: _version_of(m),
    EvalResult: lambda m: f"{m.evaluation}/{_version_of(m)}",
    RunManifest: lambda m: "manifest",
    Claim: lambda m: f"claim/{m.role}",
    RunState: lambda m: "state",
    TasksEnded: lambda m: "end",
    RunFinished: lambda m: "finished",
    Request: lambda m: f"request/{m.request_id}",
    DeadLetter: lambda m: f"{m.role}/{m.topic}/{m.partition}/{m.offset}",
    DeadDropped: lambda m: f"dropped/{_digest(*m.letters, '', *m.groups)}",
    Trimmed: lambda m: "trimmed",
}
"""Type of a message -> its record key, as the table of topics names it."""

_IDS: dict[type, Callable[[Any], str]] = {
    **_KEYS,
    PartialRollout: lambda m: m.ids.rollout_id,
    Experience: lambda m: f"{m.ids.rollout_id}#{m.pair}" if m.pair else m.ids.rollout_id,
    BatchManifest: lambda m: "manifest",
    GroupOutcome: _outcome_id,
}
"""Type of a message -> its own id, for the header `id`. It is the key, except where several records share a key."""


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def key_of(message: Message) -> bytes:
    """Return the record key, as the table of topics names it."""
    return _KEYS[type(message)](message).encode()


# --------------------------------------------------------------------------------------------- headers

Facts = dict[str, str | int | bool | None]
"""Header -> value. None and False are left out, and True is written as 1."""


def _rollout_facts(ids: RolloutIds) -> Facts:
    return {name: getattr(ids, name) for name in _ID_HEADERS}


def _verified_facts(verified: VerifiedRollout) -> Facts:
    rollout = verified.rollout
    return {
        "status": RolloutStatus.undecodable if rollout is None else rollout.status,
        "num_tokens": 0 if rollout is None else rollout.num_tokens,
        "reason": verified.reason,
    }


def _experience_facts(experience: Experience) -> Facts:
    return {
        "num_tokens": sum(segment.loss_mask.data.count(1) for segment in experience.segments),
        "batch_sequence": experience.batch_sequence,
        "share": experience.share,
        "expert": experience.expert,
    }


def _manifest_facts(manifest: BatchManifest) -> Facts:
    names = ("batch_sequence", "share", "count", "last")
    return {**{name: getattr(manifest, name) for name in names}, "total_experts": manifest.total_experts or None}


def _outcome_facts(outcome: GroupOutcome) -> Facts:
    names = ("group_id", "taskset", "sequence", "result", "reason", "batch_sequence", "late")
    return {name: getattr(outcome, name) for name in names}


def _version_facts(message: WeightsAnnounced | StepRecord | EvalResult) -> Facts:
    return {"version": message.name.version, "trainer_epoch": message.name.trainer_epoch}


def _step_facts(step: StepRecord) -> Facts:
    names = ("batch_sequence", "trained_groups", "resumed", "skipped")
    return {**_version_facts(step), **{name: getattr(step, name) for name in names}}


_ID_HEADERS = ("group_id", "rollout_id", "sibling", "group_size", "sequence", "min_version", "taskset")

_FACTS: dict[type, Callable[[Any], Facts]] = {
    Rollout: lambda m: {"status": m.status, "num_tokens": m.num_tokens},
    PartialRollout: lambda m: {"piece": m.piece, "num_tokens": m.num_tokens, "explorer": m.explorer or None},
    VerifiedRollout: _verified_facts,
    Demonstration: lambda m: {"number": m.number},
    Feedback: lambda m: {"rollout_id": m.rollout_id},
    Experience: _experience_facts,
    BatchManifest: _manifest_facts,
    GroupOutcome: _outcome_facts,
    WeightsAnnounced: _version_facts,
    StepRecord: _step_facts,
    EvalResult: _version_facts,
    DeadLetter: lambda m: {"role": m.role, "reason": m.reason, "error": last_line(m.detail)[:MAX_ERROR] or None},
}
"""Type of a message -> headers beside those that all have and those of its rollout ids."""


def headers_of(message: Message, run: str, writer_epoch: int = 0) -> Headers:
    """Return what audit and index can read of the message without its body, in ASCII."""
    cls = type(message)
    contract = CONTRACTS[cls]
    facts: Facts = {
        "contract": contract,
        "contract_version": VERSIONS[contract],
        "run": run,
        "writer_epoch": writer_epoch,
        "id": _IDS[cls](message),
    }
    if isinstance(message, Task | Rollout | PartialRollout | VerifiedRollout | Experience):
        facts |= _rollout_facts(message.ids)
    if cls in _FACTS:
        facts |= _FACTS[cls](message)
    return tuple((name, _header(value)) for name, value in facts.items() if value is not None and value is not False)


def _header(value: str | int) -> bytes:
    text = value if isinstance(value, str) else str(int(value))
    return text.encode("ascii", "backslashreplace")


def ids_from_headers(record: Record) -> RolloutIds | None:
    """Return the rollout's ids, also when the body cannot be decoded; None if one is missing or makes no sense."""
    try:
        texts = {name: (record.header(name) or b"").decode("ascii") for name in _ID_HEADERS}
        numbers = {name: int(texts.pop(name)) for name in ("sibling", "group_size", "sequence", "min_version")}
        ids = RolloutIds(**texts, **numbers)  # type: ignore[arg-type]  # the names sort strings from ints
    except ValueError:
        return None
    return None if first_violation(ids) is not None else ids


# --------------------------------------------------------------------------------------------- records


def to_record(
    message: Message,
    topic: str,
    partition: int,
    key: bytes | None = None,
    *,
    run: str,
    writer_epoch: int = 0,
    extra: Headers = (),
    value: bytes | None = None,
) -> NewRecord:
    """Return the record of a message. `key` is the one that the topic asks for unless it is given. `value` is what
    `encode` made of the message, where the caller has it already."""
    contract = CONTRACTS[type(message)]
    if topic not in TOPICS or contract not in TOPICS[topic].messages:
        raise ContractError(f"$: got {contract}, which the topic does not take", where=topic)
    return NewRecord(
        topic=topic,
        partition=partition,
        key=key_of(message) if key is None else key,
        value=encode(message) if value is None else value,
        headers=headers_of(message, run, writer_epoch) + extra,
    )


def from_record(record: Record) -> Message:
    """Return the message of a record. ContractError names `topic[partition]@offset` and the contract."""
    where = str(record)
    contract = _contract_of(record, where)
    if record.value is None:
        raise ContractError("$: got no value (a tombstone, or read without bodies)", where=_label(where, contract))
    return decode(record.value, contract, where)


def is_foreign(record: Record) -> bool:
    """Return whether the record is no message that its topic takes. Such a record is somebody else's, and is passed
    over."""
    topic = TOPICS.get(record.topic)
    contract = record.header("contract")
    return topic is None or contract is None or contract.decode("ascii", "replace") not in topic.messages


def _contract_of(record: Record, where: str) -> str:
    """Return the contract that the headers name. ContractError if the topic does not take it, or its version is unknown
    here."""
    contract = _text_header(record, "contract", where)
    topic = TOPICS.get(record.topic)
    allowed = topic.messages if topic is not None else ()
    if contract not in allowed:
        expected = " or ".join(allowed) or "no message: the topic is not in the table"
        _refuse_header("contract", f"got {show(contract)}, expected {expected}", where)
    version = _text_header(record, "contract_version", where)
    if not version.isdigit() or not 1 <= int(version[:9]) <= VERSIONS[contract]:
        text = f"got {contract}.v{version[:9]}, expected at most v{VERSIONS[contract]}; update rftstream"
        _refuse_header("contract_version", text, where)
    return contract


def _text_header(record: Record, name: str, where: str) -> str:
    value = record.header(name)
    if value is None or not value.isascii():
        _refuse_header(name, f"got {show(value)}, expected ASCII text", where)
    return value.decode("ascii")


def _refuse_header(name: str, text: str, where: str) -> NoReturn:
    path = f"headers.{name}"
    raise ContractError(f"{path}: {text}", path=path, where=where)
