"""Damaged, hostile and merely wrong messages: each gives a message or a ContractError with a path, and soon."""

from __future__ import annotations

import functools
import random
import struct
import time
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it has no stubs
import pytest

from rftstream.contracts.arrays import ITEM_BYTES, Array
from rftstream.contracts.codec import decode, encode
from rftstream.contracts.feedback import Feedback
from rftstream.contracts.limits import LIMITS
from rftstream.contracts.messages import MESSAGES
from rftstream.contracts.tasks import Problem, Sampling
from rftstream.contracts.topics import MAX_DEAD_BYTES
from rftstream.contracts.verdicts import Verdict
from rftstream.errors import ContractError
from tests.contracts.samples import SAMPLES, contract_of
from tests.suite.each import each

pytestmark = pytest.mark.law("no-pickle")

NUM_MUTATIONS = 5_000


@functools.cache
def wire(name: str) -> Any:
    """The fields of a sample. Made when asked for: a sample that cannot be encoded fails its tests, not the import."""
    return msgpack.unpackb(encode(SAMPLES[name]))


# ------------------------------------------------------------------------------- thousands at random

BOMBS = (
    b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xde\xff\xff", b"\xdb\x7f\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xc7\x05\x01", b"\xd6\xff\x00\x00\x00\x01", b"\xc1",
)  # fmt: skip
"""Announced lengths without content, extension types, and the byte that means nothing."""

OTHER_TYPES: tuple[Any, ...] = (
    None, True, -1, 0, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf"), "", "text", "\x00", b"", b"bytes", [],
    [[]], [1, "a"], {}, {"a": 1}, {b"k": 1}, "x" * 300,
)  # fmt: skip


def flip(rng: random.Random, value: bytes) -> bytes:
    damaged = bytearray(value)
    for _ in range(rng.randint(1, 8)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def truncate(rng: random.Random, value: bytes) -> bytes:
    return value[: rng.randrange(len(value))]


def insert(rng: random.Random, value: bytes) -> bytes:
    at = rng.randint(0, len(value))
    return value[:at] + rng.randbytes(rng.randint(1, 9)) + value[at:]


def duplicate(rng: random.Random, value: bytes) -> bytes:
    start, end = sorted(rng.randint(0, len(value)) for _ in range(2))
    return value[:end] + value[start:end] + value[end:]


def bomb(rng: random.Random, value: bytes) -> bytes:
    at = rng.randrange(len(value))
    return value[:at] + rng.choice(BOMBS) + value[at + rng.randint(0, 5) :]


def nest(rng: random.Random, value: bytes) -> bytes:
    at = rng.randrange(len(value))
    return value[:at] + rng.choice((b"\x91", b"\x81\xa1a")) * rng.choice((3, 40, 900, 5000)) + value[at:]


def noise(rng: random.Random, value: bytes) -> bytes:
    return rng.randbytes(rng.randint(0, 200))


def swap_type(rng: random.Random, name: str) -> bytes:
    """Well-formed, but somewhere in the message stands something of another type."""
    return msgpack.packb(_swapped(rng, wire(name)))  # type: ignore[no-any-return]


def _swapped(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        chosen = rng.choice(list(value))
        if rng.random() < 0.1:
            return {key: item for key, item in value.items() if key != chosen}
        return {key: _swapped(rng, item) if key == chosen else item for key, item in value.items()}
    if isinstance(value, list) and value and rng.random() < 0.9:
        chosen = rng.randrange(len(value))
        return [_swapped(rng, item) if i == chosen else item for i, item in enumerate(value)]
    return rng.choice(OTHER_TYPES)


MUTATIONS = (flip, truncate, insert, duplicate, bomb, nest, noise)


def damage(seed: int, num: int) -> None:
    rng = random.Random(seed)
    names = list(SAMPLES)
    values = {name: encode(message) for name, message in SAMPLES.items()}
    refused = 0
    for _ in range(num):
        name = rng.choice(names)
        mutation = rng.choice((*MUTATIONS, None))
        value = swap_type(rng, name) if mutation is None else mutation(rng, values[name])
        began = time.process_time()
        try:
            again = decode(value, contract_of(name), "t[0]@1")
        except ContractError as error:
            refused += 1
            assert error.path.startswith("$")
            assert error.where == f"t[0]@1 {contract_of(name)}.v{MESSAGES[contract_of(name)].version}"
            assert str(error).startswith(f"{error.where} {error.path}: ")
            assert len(str(error)) < 600
        else:
            assert decode(encode(again), contract_of(name)) is not None, "what can be read can be written"
        assert time.process_time() - began < 60, "damage that makes decoding slow: a quiet machine takes under 0.1 s"
    assert refused > num // 2


def test_damage_gives_a_message_or_a_contract_error() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    damage(seed, NUM_MUTATIONS)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(50))
def test_much_damage_gives_a_message_or_a_contract_error(seed: int) -> None:
    damage(seed, 4 * NUM_MUTATIONS)


def test_what_another_writer_wrote_is_the_same_message() -> None:
    """Its fields stand in another order: such a value does not take the short way of our own."""
    for name, sample in SAMPLES.items():
        other = msgpack.packb(dict(reversed(wire(name).items())))
        assert decode(other, contract_of(name)) == sample


def test_a_damaged_name_takes_no_field_out_of_a_message() -> None:
    """No reader knows the field by it, and it need not be there; but a name is text at least."""
    name = next(name for name in SAMPLES if name.startswith("rollout."))
    damaged = encode(SAMPLES[name]).replace(b"posted", b"post\xff\xff")
    with pytest.raises(ContractError):
        decode(damaged, contract_of(name))


# ------------------------------------------------------------------------------- the errors, word for word


def changed(name: str, path: str, value: Any) -> bytes:
    """The wire form of a sample with one place of it replaced; a path is written `a.0.b`."""
    fields = msgpack.unpackb(encode(SAMPLES[name]))
    *way, last = (int(step) if step.isdigit() else step for step in path.split("."))
    place = fields
    for step in way:
        place = place[step]
    place[last] = value
    return msgpack.packb(fields)  # type: ignore[no-any-return]


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


HUGE = 2**63 - 1

WRONG: list[tuple[str, str, Any, str]] = [
    # types
    ("rollout.v1", "turns.0.content", 7, "$.turns[0].content: got int, expected str"),
    ("rollout.v1", "turns.0.num_tokens", "7", "$.turns[0].num_tokens: got str, expected int"),
    ("rollout.v1", "turns.0.num_tokens", True, "$.turns[0].num_tokens: got bool, expected int"),
    ("rollout.v1", "turns.0.num_tokens", 7.0, "$.turns[0].num_tokens: got float, expected int"),
    ("rollout.v1", "ids", None, "$.ids: got null, expected object"),
    ("rollout.v1", "segments.0.token_ids.data", "text", "$.segments[0].token_ids.data: got str, expected bytes"),
    ("rollout.v1", "turns.0.content", b"x", "$.turns[0].content: got bytes, expected str"),
    ("rollout.v1", "status", "asleep", "$.status: invalid enum value 'asleep'"),
    ("rollout.v1", "metrics", {"turns": "two"}, "$.metrics[...]: got str, expected float"),
    ("rollout.v1", "metrics", {b"turns": 2.0}, "$.metrics: got bytes, expected str as a key"),
    # arrays
    (
        "rollout.v1", "segments.0.token_ids.dtype", "complex64",
        "$.segments[0].token_ids.dtype: got 'complex64', expected int32",
    ),
    (
        "verified_rollout.v1", "verdict.additions.teacher_logprobs.dtype", "object",
        "$.verdict.additions['teacher_logprobs'].dtype: got 'object', expected one of " + ", ".join(ITEM_BYTES),
    ),
    (
        "verified_rollout.v1", "verdict.additions.served_bits.shape", [1, 3],
        "$.verdict.additions['served_bits'].data: got 4 bytes, expected 6 for bfloat16 [1, 3]",
    ),
    (
        "verified_rollout.v1", "verdict.additions.served_bits.shape", [-1, -2],
        "$.verdict.additions['served_bits'].shape: got the length -1, expected none below 0",
    ),
    (
        "verified_rollout.v1", "verdict.additions.served_bits.shape", [1, 1, 2, 1, 1],
        "$.verdict.additions['served_bits'].shape: got 5 dimensions, expected at most 4",
    ),
    (
        "verified_rollout.v1", "verdict.additions.served_bits.shape", [HUGE, HUGE],
        f"$.verdict.additions['served_bits'].data: got 4 bytes, expected {2 * HUGE**2} for bfloat16 [{HUGE}, {HUGE}]",
    ),
    # segments
    (
        "rollout.v1", "segments.0.loss_mask", {"dtype": "uint8", "shape": [2], "data": b"\0\1"},
        "$.segments[0].loss_mask.shape: got [2], expected one dimension, as long as token_ids",
    ),
    (
        "rollout.v1", "segments.0.loss_mask.data", b"\2" * 11,
        "$.segments[0].loss_mask.data: got other values, expected only 0 and 1",
    ),
    (
        "rollout.v1", "segments.0.versions.1.start", 6,
        "$.segments[0].versions[1].start: got 6, expected at least 7, the end of the span before",
    ),
    ("rollout.v1", "segments.0.versions.0.count", 0, "$.segments[0].versions[0].count: got 0, expected at least 1"),
    (
        "rollout.v1", "segments.0.versions.2.count", 3,
        "$.segments[0].versions: got spans up to position 12, expected at most 11, the tokens of the segment",
    ),
    # ids
    ("task.v1", "ids.sibling", 8, "$.ids.rollout_id: got 'gsm8k/0/17/0/3', expected group_id/sibling"),
    ("task.v1", "ids.group_size", 3, "$.ids.sibling: got 3, expected less than the group_size 3"),
    ("task.v1", "ids.sequence", -1, "$.ids.sequence: got -1, expected at least 0"),
    ("task.v1", "ids.taskset", "GSM8K", "$.ids.taskset: got 'GSM8K', expected only a-z, 0-9, _ and -"),
    ("task.v1", "seed", 2**63, f"$.seed: got {2**63}, expected less than 2**63"),
    # numbers
    ("verified_rollout.v1", "verdict.reward", float("nan"), "$.verdict.reward: got nan, expected a finite number"),
    (
        "verified_rollout.v1", "verdict.parts", {"math": float("inf")},
        "$.verdict.parts['math']: got inf, expected a finite number",
    ),
    ("feedback.v1", "reward", float("-inf"), "$.reward: got -inf, expected a finite number"),
    ("rollout.v1", "sampling.max_tokens", -5, "$.sampling.max_tokens: got -5, expected at least 0"),
    ("rollout.v1", "num_tokens", -1, "$.num_tokens: got -1, expected at least 0"),
    # this or that
    (
        "verified_rollout.v1", "verdict", None,
        "$.reason: got no beside no verdict, expected exactly one of reason and verdict",
    ),
    (
        "verified_rollout.v1", "reason", "timeout",
        "$.reason: got a beside a verdict, expected exactly one of reason and verdict",
    ),
    (
        "verified_rollout.v1", "rollout", None,
        "$.rollout: got no, expected none exactly when the reason is undecodable",
    ),
    (
        "group_outcome.v1", "batch_sequence", None,
        "$.batch_sequence: got no with result batched, expected one exactly for batched groups",
    ),
    (
        "demonstration.v1", "messages", [],
        "$.preference: got no beside 0 messages, expected exactly one of chat and preference pair",
    ),
    ("feedback.v2", "correction", None, "$.correction: got none in a correction, expected one"),
    ("feedback.v2", "annotator", "ada", "$.annotator: got 'ada', expected 32 hex digits"),
    ("feedback.v2", "sequence", None, "$.sequence: got none, expected that of the rollouts' group"),
    (
        "feedback.v2", "question_id", "label/gsm8k/0/17/0/3",
        "$.question_id: got 'label/gsm8k/0/17/0/3', expected kind/group_id/siblings",
    ),
    ("feedback.v2-pair", "order", [1], "$.order: got [1], expected each index of the rollouts once"),
    ("experience.v1", "pair", "other", "$.pair: got 'other', expected chosen, rejected or none"),
    ("batch_manifest.v1", "share", 2, "$.share: got 2, expected less than the num_shares 2"),
    ("weights_announced.v1", "parent", None, "$.parent: got no with kind delta, expected one exactly for a delta"),
    ("step_record.v1", "positions", [4, -1], "$.positions[1]: got -1, expected at least 0"),
    # plain values
    (
        "task.v1", "problem.info", {"picture": b"png"},
        "$.problem.info['picture']: got bytes, expected a plain value (none, bool, int, float, str, list, map)",
    ),
    ("task.v1", "problem.info", {"a": {b"k": 1}}, "$.problem.info['a']: got a key of type bytes, expected str"),
    (
        "task.v1", "problem.info", {"deep": nested(32)},
        f"$.problem.info['deep']{'[0]' * 31}: got more than 32 levels of lists and maps, expected at most that",
    ),
]  # fmt: skip


@each(("name", "path", "value", "text"), WRONG)
def test_errors_name_the_place_and_both_sides(name: str, path: str, value: Any, text: str) -> None:
    with pytest.raises(ContractError) as caught:
        decode(changed(name, path, value), contract_of(name), "verified[3]@8172")
    assert str(caught.value) == f"verified[3]@8172 {contract_of(name)}.v{MESSAGES[contract_of(name)].version} {text}"
    assert caught.value.path == text.partition(": got")[0].partition(": invalid")[0]


@pytest.mark.law("bounded")
def test_information_may_be_deep_up_to_the_limit() -> None:
    assert decode(changed("task.v1", "problem.info", {"deep": nested(31)}), "task") is not None


def test_metrics_may_hold_a_nan() -> None:
    assert decode(changed("step_record.v1", "metrics", {"loss": float("nan")}), "step_record") is not None


# ------------------------------------------------------------------------------- limits


@each(
    "value",
    [
        b"", b"\xc1", b"\xc0", b"\x90", b"\x01", b"\xa3abc",
        b"\x80\x80", b"\x81\x01\x02", b"\x81\xc4\x01a\x01", b"\x81\xa1\xff\x01", b"\x81\xa1a\xd6\xff\0\0\0\1",
        b"\x81\xa1a\xc7\x00\x05", b"\x81\xa1a\xd4\x05\x00", b"\x81\xa1a" + b"\x91" * 1_000_000,
        b"\x81\xa1a\xdd\x00\x01\x00\x01" + b"\xc0" * 65_537, b"\x81\xa1a" + b"\xdd\xff\xff\xff\xff" * 1000,
        b"\x81\xa1a" + b"\xdc\xff\xff" * 2_000_000,
    ],
    ids=range(17),
)  # fmt: skip
def test_what_is_no_message_at_all(value: bytes) -> None:
    with pytest.raises(ContractError) as caught:
        decode(value, "run_state")
    assert caught.value.path == "$"


@each(
    ("value", "text"),
    [
        (b"\x81\xa1a" + b"\x91" * 2000, "cannot be coded as msgpack: nested too deep"),
        (b"\xc1", "cannot be coded as msgpack: got a byte that begins nothing"),
        (b"\x80\x80", "cannot be coded as msgpack: got bytes behind the end of the message"),
        (b"\x81\xa1a", "cannot be coded as msgpack: Unpack failed: incomplete input"),
    ],
)
def test_msgpack_errors_are_readable(value: bytes, text: str) -> None:
    with pytest.raises(ContractError) as caught:
        decode(value, "run_state", "control[0]@7")
    assert str(caught.value) == f"control[0]@7 run_state.v1 $: {text}"


@pytest.mark.law("bounded")
def test_records_over_the_limit_are_not_even_looked_at() -> None:
    with pytest.raises(ContractError, match="bytes exceed the limit"):
        decode(b"\x80" + bytes(MAX_DEAD_BYTES), "run_state")


@pytest.mark.slow
@pytest.mark.law("bounded")
def test_many_small_things_are_counted_together() -> None:
    """Lists of empty lists: eight times the length of the longest list, each of it allowed."""
    inner = struct.pack(">BH", 0xDC, LIMITS.items - 1) + b"\x90" * (LIMITS.items - 1)
    value = b"\x83" + b"".join(msgpack.packb(name) for name in ("state", "running", "by", "x", "more"))
    value += struct.pack(">BH", 0xDC, 20) + inner * 20
    with pytest.raises(ContractError, match="items of all lists and maps exceed the limit"):
        decode(value, "run_state")


def test_an_unknown_contract_is_refused() -> None:
    with pytest.raises(ContractError, match="unknown contract 'gossip'"):
        decode(b"\x80", "gossip")


# ------------------------------------------------------------------------------- what encode refuses

LOOP: dict[str, Any] = {}
LOOP["self"] = LOOP


@each(
    "info",
    [LOOP, {"a": {1, 2}}, {"a": object()}, {"a": 2**64}, {"a": "\ud800"}, {1: "a"}, {"a": nested(40)}, {"a": b"x"},
     {"a": [0] * 70_000}],
    ids=["loop", "set", "object", "huge", "surrogate", "key", "deep", "bytes", "long"],
)  # fmt: skip
def test_encode_refuses_what_no_reader_would_take(info: Any) -> None:
    task = SAMPLES["task.v1"]
    with pytest.raises(ContractError, match=r"^task\.v5 \$"):
        encode(type(task)(**{**fields_of(task), "problem": Problem(messages=(), info=info)}))


def fields_of(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__slots__}


def test_encode_holds_to_types() -> None:
    reward: Any = "0.5"
    with pytest.raises(ContractError, match=r"^feedback\.v2 \$\.reward: got str, expected float"):
        encode(Feedback(feedback_id="f", rollout_id="r", source="s", reward=reward))
    wrong: Any = Sampling()
    with pytest.raises(ContractError, match="Sampling"):
        encode(wrong)


@pytest.mark.parametrize("data", [bytearray(4), memoryview(bytearray(4)).toreadonly(), memoryview(bytes(8))[::2]])
def test_arrays_of_the_wrong_kind_of_bytes_are_refused(data: Any) -> None:
    additions = {"a": Array(dtype="int32", shape=(1,), data=data)}
    verdict = Verdict(reward=0.0, scorer="s", scorer_version="1", additions=additions)
    verified = SAMPLES["verified_rollout.v1"]
    with pytest.raises(ContractError, match=r"expected bytes|not C-contiguous"):
        encode(type(verified)(**{**fields_of(verified), "verdict": verdict}))
