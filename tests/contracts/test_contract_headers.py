"""What audit and index read without bodies: keys, ids, twins, and what is refused before decoding."""

from __future__ import annotations

import dataclasses

import pytest

from rftstream.contracts.codec import VERSIONS, encode, from_record, headers_of, ids_from_headers, key_of, to_record
from rftstream.contracts.feedback import Feedback
from rftstream.contracts.messages import MESSAGES
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.records import Headers, Record
from rftstream.contracts.topics import TOPICS
from rftstream.errors import ContractError
from tests.contracts.samples import IDS, SAMPLES, contract_of

DROPPED = "dropped/a57a50ac5669bbc4452f2a9ebf93a79b"
KEYS_AND_IDS = {
    "task.v1": ("gsm8k/0/17/0/3", "gsm8k/0/17/0/3"),
    "rollout.v1": ("gsm8k/0/17/0/3", "gsm8k/0/17/0/3"),
    "partial_rollout.v1": ("gsm8k/0/17/0/3#1", "gsm8k/0/17/0/3"),
    "partial_rollout.v2": ("gsm8k/0/17/0/3#2", "gsm8k/0/17/0/3"),
    "verified_rollout.v1": ("gsm8k/0/17/0/3", "gsm8k/0/17/0/3"),
    "verified_rollout.v1-undecodable": ("gsm8k/0/17/0/3", "gsm8k/0/17/0/3"),
    "demonstration.v1": ("gpt-traces/17", "gpt-traces/17"),
    "demonstration.v1-preference": ("pairs/3", "pairs/3"),
    "demonstration.v2": ("1f5ad3f4a98fd3b5a3c9a3b84e34a6f1", "1f5ad3f4a98fd3b5a3c9a3b84e34a6f1"),
    "batch_manifest.v2": ("4", "manifest"),
    "tasks_ended.v2": ("end", "end"),
    "feedback.v1": ("web/ada/gsm8k/0/17/0/3", "web/ada/gsm8k/0/17/0/3"),
    "experience.v1": ("3", "gsm8k/0/17/0/3"),
    "experience.v1-expert": ("3", "experts/0/2/0/0#chosen"),
    "batch_manifest.v1": ("3", "manifest"),
    "group_outcome.v1": ("gsm8k/0/17/0", "gsm8k/0/17/0"),
    "group_outcome.v1-late": ("gsm8k/0/18/0", "gsm8k/0/18/0#late/gsm8k/0/18/0/7"),
    "group_outcome.v2": ("gsm8k/0/19/0", "gsm8k/0/19/0"),
    "weights_announced.v1": ("SmolLM2-135M-Instruct/4/2", "SmolLM2-135M-Instruct/4/2"),
    "weights_announced.v1-anchor": ("SmolLM2-135M-Instruct/3/2", "SmolLM2-135M-Instruct/3/2"),
    "weights_announced.v2": ("SmolLM2-135M-Instruct/4/2", "SmolLM2-135M-Instruct/4/2"),
    "weights_announced.v3": ("SmolLM2-135M-Instruct/4/2", "SmolLM2-135M-Instruct/4/2"),
    "step_record.v1": ("4/2", "4/2"),
    "step_record.v1-resumed": ("3/2", "3/2"),
    "step_record.v2": ("3/2", "3/2"),
    "eval_result.v1": ("held-out/4/2", "held-out/4/2"),
    "run_manifest.v1": ("manifest", "manifest"),
    "run_manifest.v2": ("manifest", "manifest"),
    "claim.v1": ("claim/trainer", "claim/trainer"),
    "run_state.v1": ("state", "state"),
    "tasks_ended.v1": ("end", "end"),
    "run_finished.v1": ("finished", "finished"),
    "request.v1": ("request/retry-1", "request/retry-1"),
    "dead_letter.v1": ("verifier/rollouts/1/8172", "verifier/rollouts/1/8172"),
    "dead_dropped.v1": (DROPPED, DROPPED),
    "trimmed.v1": ("trimmed", "trimmed"),
}

IDS_HEADERS = {
    "group_id": "gsm8k/0/17/0", "rollout_id": "gsm8k/0/17/0/3", "sibling": "3", "group_size": "8", "sequence": "17",
    "min_version": "2", "taskset": "gsm8k",
}  # fmt: skip

FACTS = {
    "task.v1": IDS_HEADERS,
    "rollout.v1": {**IDS_HEADERS, "status": "truncated", "num_tokens": "7"},
    "partial_rollout.v1": {**IDS_HEADERS, "piece": "1", "num_tokens": "7"},
    "partial_rollout.v2": {**IDS_HEADERS, "piece": "2", "num_tokens": "2", "explorer": "explorer-1"},
    "verified_rollout.v1": {**IDS_HEADERS, "status": "truncated", "num_tokens": "7"},
    "verified_rollout.v1-undecodable": {
        **IDS_HEADERS, "status": "undecodable", "num_tokens": "0", "reason": "undecodable",
    },
    "feedback.v1": {"rollout_id": "gsm8k/0/17/0/3"},
    "experience.v1": {**IDS_HEADERS, "num_tokens": "7", "batch_sequence": "3", "share": "1"},
    "batch_manifest.v2": {"batch_sequence": "4", "share": "0", "count": "2", "total_experts": "9"},
    "demonstration.v1": {"number": "0"},
    "demonstration.v1-preference": {"number": "0"},
    "demonstration.v2": {"number": "17"},
    "batch_manifest.v1": {"batch_sequence": "3", "share": "1", "count": "2", "last": "1"},
    "group_outcome.v1": {
        "group_id": "gsm8k/0/17/0", "taskset": "gsm8k", "sequence": "17", "result": "batched", "reason": "complete",
        "batch_sequence": "3",
    },
    "group_outcome.v1-late": {
        "group_id": "gsm8k/0/18/0", "taskset": "gsm8k", "sequence": "18", "result": "expired", "reason": "deadline",
        "late": "1",
    },
    "weights_announced.v3": {"version": "4", "trainer_epoch": "2"},
    "weights_announced.v1": {"version": "4", "trainer_epoch": "2"},
    "step_record.v1": {
        "version": "4", "trainer_epoch": "2", "batch_sequence": "3", "trained_groups": "16", "skipped": "1",
    },
    "step_record.v1-resumed": {"version": "3", "trainer_epoch": "2", "trained_groups": "12", "resumed": "1"},
    "step_record.v2": {"version": "3", "trainer_epoch": "2", "trained_groups": "12", "resumed": "1"},
    "eval_result.v1": {"version": "4", "trainer_epoch": "2"},
    "dead_letter.v1": {"role": "verifier", "reason": "undecodable", "error": "$.ids: got int, expected object"},
}  # fmt: skip


def texts(headers: Headers) -> dict[str, str]:
    return {name: value.decode("ascii") for name, value in headers}


@pytest.mark.parametrize("name", SAMPLES)
def test_keys_and_ids(name: str) -> None:
    key, own_id = KEYS_AND_IDS[name]
    assert key_of(SAMPLES[name]) == key.encode()
    assert texts(headers_of(SAMPLES[name], "run"))["id"] == own_id


@pytest.mark.parametrize("name", FACTS)
def test_headers_beside_those_that_all_have(name: str) -> None:
    found = texts(headers_of(SAMPLES[name], "a-run", 4))
    contract = contract_of(name)
    common = {"contract": contract, "contract_version": str(VERSIONS[contract]), "run": "a-run", "writer_epoch": "4"}
    assert {key: found.pop(key) for key in common} == common
    del found["id"]
    assert found == FACTS[name]


def test_topics_name_every_contract_once_and_only_known_ones() -> None:
    assert sorted(contract for topic in TOPICS.values() for contract in topic.messages) == sorted(MESSAGES)
    assert all(name == topic.name for name, topic in TOPICS.items())


@pytest.mark.parametrize("name", SAMPLES)
def test_twin_headers_are_there(name: str) -> None:
    (topic,) = (topic for topic in TOPICS.values() if contract_of(name) in topic.messages)
    assert set(topic.twin or ()) <= set(texts(headers_of(SAMPLES[name], "run")))


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


@pytest.mark.parametrize(
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
            (("contract", b"rollout"), ("contract_version", b"2")), "rollouts",
            "rollouts[3]@8172 headers.contract_version: got rollout.v2, expected at most v1; update rftstream",
        ),
        (
            (("contract", b"rollout"), ("contract_version", b"one")), "rollouts",
            "rollouts[3]@8172 headers.contract_version: got rollout.vone, expected at most v1; update rftstream",
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


def test_tombstones_are_no_messages() -> None:
    headers = headers_of(SAMPLES["partial_rollout.v1"], "run")
    with pytest.raises(ContractError, match="tombstone"):
        from_record(record(headers, "partials", None))


def test_messages_are_written_to_their_topic_only() -> None:
    with pytest.raises(ContractError, match=r"tasks .*rollout"):
        to_record(SAMPLES["rollout.v1"], "tasks", 0, run="run")


def test_every_contract_has_a_version() -> None:
    assert VERSIONS.keys() == MESSAGES.keys()
    assert all(encode(message) for message in SAMPLES.values())
