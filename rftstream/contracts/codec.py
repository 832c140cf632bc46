"""Message <-> record: msgpack maps on the wire, strict and bounded decoding, headers that tell without the body.

The value of a record is a msgpack map of the message's fields. The modules beside this one declare types and ranges,
which are checked strictly (an int is no str). `checks` has the other conditions. Unknown fields are skipped. Every
fault of foreign bytes is reported as a ContractError, which names the record and the place inside it:

    rollouts[3]@8172 rollout.v1 $.turns[0].content: got int, expected str

`encode` checks a message by the same rules, so that every written message can be read.
"""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

import msgpack  # type: ignore[import-untyped]  # it has no stubs
import msgspec

from rftstream.contracts.checks import first_violation
from rftstream.contracts.limits import LIMITS, find_excess, is_bounded, largest_part, unpack
from rftstream.contracts.message_spec import Facts
from rftstream.contracts.messages import CONTRACTS_ON, MESSAGES, SPEC_OF, Message
from rftstream.contracts.records import Headers, NewRecord, Record
from rftstream.contracts.rules import show
from rftstream.contracts.tasks import ID_HEADERS, RolloutIds
from rftstream.contracts.topics import TOPICS
from rftstream.errors import ContractError, MessageTooLarge

T = TypeVar("T")

_LONGEST_RUN = "r" * 249
"""A run name of the greatest length, for computing the longest record names."""

_LONGEST_HEADERS = 65_536
"""Bytes of key and headers that are not counted exactly if the value leaves at least this much room."""

READABLE_SINCE = "readable_since"
"""Header: the oldest version of the contract whose readers may read the record. If absent, it is the record's own
version."""

_BYTES = (bytes, memoryview)
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
    BufferError,
)
"""Errors of msgpack and msgspec about foreign bytes, or about a message with wrong types."""

_known: dict[type, msgspec.msgpack.Decoder[Any]] = {}
"""Type -> its decoder. Msgspec has inspected these types."""
_one_looks = threading.Lock()
_encoder = msgspec.msgpack.Encoder()
_pack = _encoder.encode


def _decoder_of(cls: type) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of a type. Only one thread at a time lets msgspec inspect a type: msgspec does so once per
    type, and two threads at once crash the process with a segmentation fault (seen with 0.22)."""
    decoder = _known.get(cls)
    if decoder is None:
        with _one_looks:
            decoder = _known[cls] = msgspec.msgpack.Decoder(cls)
    return decoder


# --------------------------------------------------------------------------------------------- bytes


def encode(message: Message) -> bytes:
    """Return the record value. ContractError if the message breaks its contract, so that readers would refuse it.
    MessageTooLarge if it exceeds the limits of readers or of its topic."""
    return encode_once(message)[1]


def encode_once(message: Message) -> tuple[Message, bytes]:
    """Return the message as its readers get it, and its record value, with the errors of `encode`. The arrays of this
    message are views of the value, so that whoever keeps both has the arrays once."""
    cls = type(message)
    spec = SPEC_OF.get(cls)
    if spec is None:
        raise ContractError(f"$: got {cls.__name__}, expected one of the messages")
    most = TOPICS[spec.topic].max_record_bytes
    try:
        value = _pack(message)
        if len(value) > most:
            _refuse_size(len(value), most, message)
        if not is_bounded(value, cls, LIMITS):
            unpack(value, LIMITS)
        sent: Message = _decoder_of(cls).decode(value)
        violation = first_violation(message)
    except _BROKEN as error:
        _refuse(error, _fields_of(message), _label("", spec.contract))
    if violation is not None:
        _refuse_violation(violation, _label("", spec.contract))
    if len(value) > most - _LONGEST_HEADERS:
        record = NewRecord(spec.topic, 0, key_of(message), value, headers_of(message, _LONGEST_RUN, 2**31))
        if record.num_bytes > most:
            _refuse_size(record.num_bytes, most, message)
    return sent, value


def _refuse_size(num_bytes: int, most: int, message: Message) -> NoReturn:
    """Raise the error for a message that no record of its topic can hold."""
    path = largest_part(_fields_of(message))
    text = f"{path}: got {num_bytes} bytes, expected at most {most} with key and headers; most are here"
    raise MessageTooLarge(text, path=path, where=_label("", SPEC_OF[type(message)].contract))


def _fields_of(message: Message) -> Any:
    """Return a message that breaks its contract as plain maps and lists; None if that is impossible."""
    try:
        return msgspec.to_builtins(message, builtin_types=_BYTES)
    except _BROKEN:
        return None


def decode(value: bytes, contract: str, where: str = "") -> Message:
    """Return the message in a record value. `where` names the record in errors, e.g. `rollouts[3]@8172`."""
    spec = MESSAGES.get(contract)
    if spec is None:
        known = ", ".join(MESSAGES)
        raise ContractError(f"$: got the unknown contract {show(contract)}, expected one of {known}", where=where)
    decoder = _decoder_of(spec.type)
    if is_bounded(value, spec.type, LIMITS) and (good := _decode_own(decoder, value)) is not None:
        return good
    fields: Any = None
    try:
        fields = unpack(value, LIMITS)
        message: Message = msgspec.convert(fields, spec.type, builtin_types=_BYTES)
        violation = first_violation(message)
    except _BROKEN as error:
        _refuse(error, fields, _label(where, contract))
    if violation is not None:
        _refuse_violation(violation, _label(where, contract))
    return message


def _decode_own(decoder: msgspec.msgpack.Decoder[Any], value: bytes) -> Message | None:
    """Return the message in a value that `encode` would write identically. This is faster than the bounded decoding of
    any value. The value must be within all limits. None for values of other writers, and for damaged ones."""
    try:
        message: Message = decoder.decode(value)
        if len(value) < _REUSED_FROM:
            is_own = _pack(message) == value
        else:
            _encoder.encode_into(message, again := _reencoded.buffer)
            is_own = again == value
        return message if is_own and first_violation(message) is None else None
    except _BROKEN:
        return None


class _Reencoded(threading.local):
    """A buffer of each thread for what is encoded again to be compared: fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self.buffer = bytearray()


_reencoded = _Reencoded()
_REUSED_FROM = 32_768
"""Bytes of a value from which the buffer is used."""


def digest_of_experiences(encoded: Iterable[bytes]) -> str:
    """Return BatchManifest.digest, over the encoded experiences of one share in order."""
    digest = hashlib.sha256()
    for value in encoded:
        digest.update(value)
    return f"sha256:{digest.hexdigest()}"


# --------------------------------------------------------------------------------------------- errors


def _label(where: str, contract: str) -> str:
    label = f"{contract}.v{MESSAGES[contract].version}"
    return f"{where} {label}" if where else label


def _refuse_violation(violation: tuple[str, str], where: str) -> NoReturn:
    path = f"${violation[0]}"
    raise ContractError(f"{path}: {violation[1]}", path=path, where=where)


_PLACE = re.compile(r"( - at `key` in| - at) `([^`]*)`$")
_EXPECTED = re.compile(r"^Expected `(.+?)`(?:, got `(.+)`)?$")
_RANGE = re.compile(r"^Expected `int` (>=|<=) (-?\d+)$")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[\.\.\.\]")
_MISSING = re.compile(r"^Object missing required field `(\w+)`$")
_MSGPACK_ERRORS: dict[type[BaseException], str] = {
    msgpack.StackError: "nested too deep",
    msgpack.FormatError: "got a byte that begins nothing",
    msgpack.ExtraData: "got bytes behind the end of the message",
}
"""Texts for errors that have no text, or one that tells little."""


def _refuse(error: BaseException, fields: Any, where: str) -> NoReturn:
    """Raise one ContractError, of bounded length, for an error of msgspec, msgpack or Python about bad input.

    `fields` is the value to be converted or written, or None if the error came earlier."""
    text = str(error) or type(error).__name__
    path, role = "$", ""
    if type(error) is ValueError and fields is not None and (excess := find_excess(fields, LIMITS)) is not None:
        raise MessageTooLarge(f"{excess[0]}: {excess[1]}", path=excess[0], where=where) from None
    if isinstance(error, msgspec.ValidationError):
        if (place := _PLACE.search(text)) is not None:
            path, text = place[2], text[: place.start()]
            role = " as a key" if "key" in place[1] else ""
        if (limit := _RANGE.match(text)) is not None:
            text = _out_of_range(_values_at(fields, path), limit[1], int(limit[2]))
        elif (types := _EXPECTED.match(text)) is not None:
            text = f"got {types[2] or 'another type'}, expected {types[1]}{role}"
        elif (missing := _MISSING.match(text)) is not None:
            text = f"got no field {missing[1]}, which is required"
        else:
            text = text[:1].lower() + text[1:]
    else:
        text = f"cannot be coded as msgpack: {_MSGPACK_ERRORS.get(type(error), text)}"
    text = text if len(text) <= 200 else text[:197] + "..."
    raise ContractError(f"{path}: {text}", path=path, where=where) from None


def _out_of_range(values: list[Any], sign: str, limit: int) -> str:
    """Return the text for a number outside of its range, which msgspec does not name."""
    numbers = [value for value in values if type(value) is int]
    found = next((number for number in numbers if (number < limit if sign == ">=" else number > limit)), "another one")
    if sign == ">=":
        return f"got {found}, expected at least {limit}"
    return f"got {found}, expected " + ("less than 2**63" if limit == 2**63 - 1 else f"at most {limit}")


def _values_at(value: Any, path: str) -> list[Any]:
    """Return the values at a path of msgspec's, `$.a[0].b`. `[...]` in it matches any value of a map."""
    values = [value]
    for step in _STEP.finditer(path):
        name, index = step[1], step[2]
        if name is not None:
            values = [inner[name] for inner in values if isinstance(inner, dict) and name in inner]
        elif index is not None:
            values = [
                inner[int(index)] for inner in values if isinstance(inner, list | tuple) and int(index) < len(inner)
            ]
        else:
            values = [item for inner in values if isinstance(inner, dict) for item in inner.values()]
    return values


# --------------------------------------------------------------------------------------------- key and headers


def key_of(message: Message) -> bytes:
    """Return the record key as defined in the table of topics."""
    return SPEC_OF[type(message)].key(message).encode()


def headers_of(message: Message, run: str, writer_epoch: int = 0) -> Headers:
    """Return the headers of the message, in ASCII, from which audit and index read without the body."""
    spec = SPEC_OF[type(message)]
    facts: Facts = {"id": (spec.id or spec.key)(message), **spec.headers(message)}
    since = spec.readable_since if spec.readable_since and spec.skippable(message) else None
    return _first_headers(spec.contract, spec.version, since, run, writer_epoch) + _headers(facts)


@functools.lru_cache(maxsize=1024)
def _first_headers(contract: str, version: int, readable_since: int | None, run: str, writer_epoch: int) -> Headers:
    """Return the headers that all messages of one kind, run and writer share. They come first, since `from_record`
    recognizes them by that."""
    return _headers(
        {
            "contract": contract,
            "contract_version": version,
            READABLE_SINCE: readable_since,
            "run": run,
            "writer_epoch": writer_epoch,
        }
    )


def _headers(facts: Facts) -> Headers:
    return tuple(
        [
            (name, value.encode("ascii", "backslashreplace") if isinstance(value, str) else b"%d" % value)
            for name, value in facts.items()
            if value is not None and value is not False
        ]
    )


def ids_from_headers(record: Record) -> RolloutIds | None:
    """Return the rollout's ids, even if the body cannot be decoded; None if an id is missing or invalid."""
    _decoder_of(RolloutIds)
    try:
        texts = {name: (record.header(name) or b"").decode("ascii") for name in ID_HEADERS}
        numbers = {name: int(texts.pop(name)) for name in ("sibling", "group_size", "sequence", "min_version")}
        ids = msgspec.convert({**texts, **numbers}, RolloutIds)
    except (ValueError, msgspec.ValidationError):
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
    """Return the record of a message. `key` defaults to the key that the topic defines. `value` is the result of
    `encode`, if the caller has it already."""
    spec = SPEC_OF[type(message)]
    if topic != spec.topic:
        raise ContractError(f"$: got {spec.contract}, which the topic does not take", where=topic)
    record = NewRecord(
        topic=topic,
        partition=partition,
        key=key_of(message) if key is None else key,
        value=encode(message) if value is None else value,
        headers=headers_of(message, run, writer_epoch) + extra,
    )
    most = TOPICS[topic].max_record_bytes
    is_short = key is None and not extra and len(record.value or b"") <= most - _LONGEST_HEADERS
    if not is_short and record.num_bytes > most:
        _refuse_size(record.num_bytes, most, message)
    return record


def from_record(record: Record) -> Message:
    """Return the message of a record. ContractError names `topic[partition]@offset` and the contract."""
    contract = _accepted_contract(record)
    if record.value is None:
        where = _label(str(record), contract)
        raise ContractError("$: got no value (a tombstone, or read without bodies)", where=where)
    try:
        return decode(record.value, contract)
    except ContractError:
        # The text that names the record is only made now, since nearly all records are valid.
        return decode(record.value, contract, str(record))


def read_parts(record: Record, parts: type[T]) -> T | None:
    """Return some fields of a record's message, in a type that names no others; None if they cannot be read. Whether
    the message keeps the rules of its contract is not asked."""
    try:
        contract = _accepted_contract(record)
        if record.value is None or not is_bounded(record.value, MESSAGES[contract].type, LIMITS):
            return None
        found: T = _decoder_of(parts).decode(record.value)
        return found
    except (ContractError, *_BROKEN):
        return None


def _accepted_contract(record: Record) -> str:
    contract = _accepted.get((record.topic, record.headers[:3]))
    if contract is None:
        contract = _contract_of(record, str(record))
        _accept(record, contract)
    return contract


_accepted: dict[tuple[str, Headers], str] = {}
"""Topic and first three headers of an accepted record -> its contract. Records with the same first three headers are
accepted without further checks."""

_MAX_ACCEPTED = 1024
_DECIDING = ("contract", "contract_version", READABLE_SINCE)
"""The headers that decide whether a record is accepted."""


def _accept(record: Record, contract: str) -> None:
    """Remember an accepted record by its first three headers, if these are the deciding ones or only the last of these
    is missing."""
    first = record.headers[:3]
    names = tuple(name for name, _ in first)
    ours = names[:2] == _DECIDING[:2] and names[2:] in ((), ("run",)) and record.header(READABLE_SINCE) is None
    decided = names == _DECIDING or ours
    if decided and len(_accepted) < _MAX_ACCEPTED:
        _accepted[record.topic, first] = contract


def is_foreign(record: Record) -> bool:
    """Return whether the topic does not take the record. Such a record is of another program, and readers skip it."""
    contract = record.header("contract")
    return contract is None or contract.decode("ascii", "replace") not in CONTRACTS_ON.get(record.topic, ())


def _contract_of(record: Record, where: str) -> str:
    """Return the contract that the headers name. ContractError if the topic does not take it, or if the record has a
    later version that readers of this version may not read according to its writer."""
    contract = _text_header(record, "contract", where)
    allowed = CONTRACTS_ON.get(record.topic, ())
    if contract not in allowed:
        expected = " or ".join(allowed) or "no message: the topic is not in the table"
        _refuse_header("contract", f"got {show(contract)}, expected {expected}", where)
    known = MESSAGES[contract].version
    version = _number_header(record, "contract_version", f"got {contract}.v", known, where)
    if version > known:
        readable = record.header(READABLE_SINCE)
        if readable is None or _number_header(record, READABLE_SINCE, "got ", known, where) > known:
            text = f"got {contract}.v{version}, expected at most v{known}; a later release of rftstream wrote it"
            _refuse_header("contract_version", f"{text}: update this one", where)
    return contract


def _number_header(record: Record, name: str, found: str, known: int, where: str) -> int:
    text = _text_header(record, name, where)
    if not text.isdigit() or len(text) > 9 or int(text) == 0:
        _refuse_header(name, f"{found}{text[:9]}, expected 1 to {known}", where)
    return int(text)


def _text_header(record: Record, name: str, where: str) -> str:
    value = record.header(name)
    if value is None or not value.isascii():
        _refuse_header(name, f"got {show(value)}, expected ASCII text", where)
    return value.decode("ascii")


def _refuse_header(name: str, text: str, where: str) -> NoReturn:
    path = f"headers.{name}"
    raise ContractError(f"{path}: {text}", path=path, where=where)
