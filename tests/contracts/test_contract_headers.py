"""What audit and index read without bodies: keys, ids, twins, and what is refused before decoding."""

from __future__ import annotations

import dataclasses
import json

import msgpack  # type: ignore[import-untyped]  # it has no stubs
import pytest

from rftstream.contracts.codec import encode, from_record, headers_of, ids_from_headers, to_record
from rftstream.contracts.feedback import Feedback
from rftstream.contracts.messages import MESSAGES
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.records import Headers, Record
from rftstream.contracts.topics import TOPICS
from rftstream.errors import ContractError
from tests.contracts.samples import COMMON_HEADERS, GOLDEN, IDS, SAMPLES, contract_of, is_newest, record_text
from tests.suite.each import each

IDS_HEADERS = {
    "group_id": "gsm8k/0/17/0", "rollout_id": "gsm8k/0/17/0/3", "sibling": "3", "group_size": "8", "sequence": "17",
    "min_version": "2", "taskset": "gsm8k",
}  # fmt: skip


def texts(headers: Headers) -> dict[str, str]:
    return {name: value.decode("ascii") for name, value in headers}


@each("name", SAMPLES)
def test_key_and_headers_are_the_golden_ones(name: str) -> None:
    golden = (GOLDEN / f"{name}.record.json").read_text(encoding="utf-8")
    if is_newest(name):
        assert record_text(SAMPLES[name]) == golden
    else:  # headers were added since; none was changed or left out
        then, now = json.loads(golden), json.loads(record_text(SAMPLES[name]))
        assert now["key"] == then["key"]
        assert now["headers"].items() >= then["headers"].items()


@each("name", SAMPLES)
def test_headers_that_all_have(name: str) -> None:
    found = texts(headers_of(SAMPLES[name], "a-run", 4))
    contract = contract_of(name)
    version = str(MESSAGES[contract].version)
    common = {"contract": contract, "contract_version": version, "run": "a-run", "writer_epoch": "4"}
    assert {key: found[key] for key in COMMON_HEADERS} == common


@pytest.mark.law("twice")
@each("name", SAMPLES)
def test_twin_headers_are_there(name: str) -> None:
    topic = TOPICS[MESSAGES[contract_of(name)].topic]
    assert set(topic.twin or ()) <= set(texts(headers_of(SAMPLES[name], "run")))


@pytest.mark.law("twice")
def test_late_outcomes_of_a_group_are_no_twins() -> None:
    late = SAMPLES["group_outcome.v1-late"]
    assert isinstance(late, GroupOutcome)
    other = dataclasses.replace(late, rollouts=(dataclasses.replace(late.rollouts[0], rollout_id="gsm8k/0/18/0/6"),))
    first = dataclasses.replace(late, late=False)
    ids = {texts(headers_of(message, "run"))["id"] for message in (late, other, first)}
    assert len(ids) == 3


def test_headers_stay_ascii_and_distinct_for_any_text() -> None:
    feedback = SAMPLES["feedback.v1"]
    assert isinstance(feedback, Feedback)
    ids = [
        texts(headers_of(dataclasses.replace(feedback, feedback_id=text), "run"))["id"]
        for text in ("größe", "grösse", "größe!", "日本")
    ]
    assert len(set(ids)) == 4


def record(headers: Headers, topic: str = "rollouts", value: bytes | None = b"\x80") -> Record:
    return Record(topic, 3, 8172, 0.0, b"key", value, headers)


@pytest.mark.law("conservation")
def test_ids_come_from_headers_alone() -> None:
    headers = headers_of(SAMPLES["rollout.v1"], "run")
    assert ids_from_headers(record(headers, value=b"\xc1")) == IDS
    for missing in IDS_HEADERS:
        assert ids_from_headers(record(tuple(pair for pair in headers if pair[0] != missing))) is None
    for name, wrong in (
        ("sibling", b"8"), ("sibling", b"x"), ("sequence", b"-1"), ("group_size", b""), ("taskset", b"\xff"),
        ("rollout_id", b"other"), ("sequence", b"9" * 5000), ("min_version", b"1.0"),
    ):  # fmt: skip
        changed = tuple((key, wrong if key == name else value) for key, value in headers)
        assert ids_from_headers(record(changed)) is None, (name, wrong)


@each(
    ("headers", "topic", "text"),
    [
        ((), "rollouts", "rollouts[3]@8172 headers.contract: got None, expected ASCII text"),
        (
            (("contract", b"task"), ("contract_version", b"1")), "rollouts",
            "rollouts[3]@8172 headers.contract: got 'task', expected rollout",
        ),
        (
            (("contract", b"gossip"), ("contract_version", b"1")), "batches",
            "batches[3]@8172 headers.contract: got 'gossip', expected experience or batch_manifest",
        ),
        (
            (("contract", b"rollout"), ("contract_version", b"1")), "elsewhere",
            "elsewhere[3]@8172 headers.contract: got 'rollout', expected no message: the topic is not in the table",
        ),
        (
            (("contract", b"rollout"), ("contract_version", b"one")), "rollouts",
            "rollouts[3]@8172 headers.contract_version: got rollout.vone, expected 1 to 8",
        ),
        (
            (("contract", b"rollout"),), "rollouts",
            "rollouts[3]@8172 headers.contract_version: got None, expected ASCII text",
        ),
    ],
)  # fmt: skip
def test_records_that_do_not_belong_are_refused_by_their_headers(headers: Headers, topic: str, text: str) -> None:
    with pytest.raises(ContractError) as caught:
        from_record(record(headers, topic))
    assert str(caught.value) == text
    assert caught.value.path.startswith("headers.contract")
    assert caught.value.where == f"{topic}[3]@8172"


def newer(version: int, *more: tuple[str, bytes], value: bytes | None = None) -> Record:
    """A rollout as a later release writes it, with a field that nobody knows here."""
    fields = msgpack.unpackb(encode(SAMPLES["rollout.v8"])) | {"made_up_later": "a value"}
    headers = (("contract", b"rollout"), ("contract_version", b"%d" % version), *more)
    return record(headers, value=msgpack.packb(fields) if value is None else value)


def test_a_record_of_a_later_version_is_read_if_its_writer_says_so() -> None:
    known = MESSAGES["rollout"].version
    for since in (1, known):
        read = from_record(newer(known + 3, ("readable_since", b"%d" % since)))
        assert read == SAMPLES[f"rollout.v{known}"], "what is not known is skipped"


@pytest.mark.parametrize("more", [(), (("readable_since", b"9"),)], ids=["not-said", "of-the-next"])
def test_a_record_of_a_later_version_is_not_read_unless_its_writer_says_so(more: tuple[tuple[str, bytes], ...]) -> None:
    assert MESSAGES["rollout"].version == 8
    with pytest.raises(ContractError) as caught:
        from_record(newer(9, *more))
    assert str(caught.value) == (
        "rollouts[3]@8172 headers.contract_version: got rollout.v9, expected at most v8; a later release of rftstream "
        "wrote it: update this one"
    )


@each("since", [b"", b"0", b"x", b"-1", b"1.0", b"9" * 12, b"\xff"])
def test_nonsense_about_readers_is_damage(since: bytes) -> None:
    with pytest.raises(ContractError, match=r"headers\.readable_since: got "):
        from_record(newer(9, ("readable_since", since)))


@each("contract", ("rollout", "partial_rollout", "verified_rollout", "experience", "group_outcome"))
def test_a_writer_says_which_readers_may_skip_what_was_added(contract: str) -> None:
    """Roles must be known by who reads them; a rollout without any is readable as before."""
    version, since = MESSAGES[contract].version, MESSAGES[contract].readable_since
    with_roles, without = (SAMPLES[f"{contract}.v{number}"] for number in (version, since))
    assert "readable_since" not in texts(headers_of(with_roles, "run")), "a reader must know this version"
    written = texts(headers_of(without, "run"))
    assert (written["contract_version"], written["readable_since"]) == (str(version), str(since))


def test_specs_name_no_reader_that_cannot_be() -> None:
    for spec in MESSAGES.values():
        assert spec.readable_since is None or 1 <= spec.readable_since < spec.version, spec.contract


def test_tombstones_are_no_messages() -> None:
    headers = headers_of(SAMPLES["partial_rollout.v1"], "run")
    with pytest.raises(ContractError, match="tombstone"):
        from_record(record(headers, "partials", None))


def test_messages_are_written_to_their_topic_only() -> None:
    with pytest.raises(ContractError, match=r"tasks .*rollout"):
        to_record(SAMPLES["rollout.v1"], "tasks", 0, run="run")
