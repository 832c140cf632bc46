"""Records as text and as JSON: everything is shown, nothing is fatal."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import pytest

from rftstream.contracts.arrays import Array
from rftstream.contracts.messages import MESSAGES
from rftstream.contracts.records import NewRecord, Record
from rftstream.contracts.versions import StepRecord, VersionName
from rftstream.errors import ConfigError
from rftstream.queries.plain import printable
from rftstream.queries.records.inspect import record_to_json, record_to_text, select
from rftstream.service.role import Log
from rftstream.transport.memory.transport import MemoryLog
from tests.contracts.samples import SAMPLES, contract_of
from tests.unit.synthetic import SyntheticLog, rollout


class Clock:
    """A second later with every look."""

    def __init__(self) -> None:
        self.time = 1_700_000_000.0

    def __call__(self) -> float:
        self.time += 1.0
        return self.time


@pytest.fixture
def log() -> SyntheticLog:
    return SyntheticLog(MemoryLog(Clock()).connect())


def records(log: SyntheticLog, topic: str, **which: Any) -> list[Record]:
    return list(select(Log(log.transport), topic, **which))


def names(found: list[Record]) -> list[str]:
    return [(record.header("rollout_id") or b"").decode().removeprefix("sums/0/") for record in found]


# --------------------------------------------------------------------------------------------- which records


def test_all_of_a_topic_by_partition(log: SyntheticLog) -> None:
    log.sample(0, 1, 2)
    assert names(records(log, "rollouts")) == ["0/0/0", "0/0/1", "2/0/0", "2/0/1", "1/0/0", "1/0/1"]
    assert names(records(log, "rollouts", partition=1)) == ["1/0/0", "1/0/1"]
    assert names(records(log, "rollouts", partition=0, start=3)) == ["2/0/1"]
    assert names(records(log, "rollouts", start=3)) == ["2/0/1"], "the other partition ends before"


def test_the_newest_over_all_partitions(log: SyntheticLog) -> None:
    log.sample(0, 1, 2, 3)
    assert names(records(log, "rollouts", last=3)) == ["2/0/1", "3/0/0", "3/0/1"]
    assert names(records(log, "rollouts", last=100))[-1] == "3/0/1"
    assert len(records(log, "rollouts", last=100)) == 8


def test_the_newest_where_offsets_have_gaps(log: SyntheticLog) -> None:
    for i in range(40):
        log.put_raw(NewRecord("partials", 0, b"state" if i % 4 else f"request/{i}".encode(), b"x"))
    log.transport.admin.compact("partials")
    left = records(log, "partials")
    assert len(left) == 11
    assert [r.offset for r in records(log, "partials", last=5)] == [r.offset for r in left[-5:]]


def test_where_matches_headers(log: SyntheticLog) -> None:
    log.sample(0, 1, 2)
    assert names(records(log, "rollouts", where={"group_id": "sums/0/2/0"})) == ["2/0/0", "2/0/1"]
    assert names(records(log, "rollouts", where={"sibling": "1"}, last=2)) == ["1/0/1", "2/0/1"]
    assert records(log, "rollouts", where={"nothing": "1"}) == []


@pytest.mark.parametrize(
    ("topic", "which", "text"),
    [
        ("rolouts", {}, "did you mean 'rollouts'"),
        ("rollouts", {"partition": 2}, "got partition 2, expected one of 0 to 1"),
        ("rollouts", {"start": 9}, "got --from 9, but the topic ends at 2"),
    ],
)
def test_what_is_not_there_is_named(log: SyntheticLog, topic: str, which: dict[str, int], text: str) -> None:
    log.sample(0)
    with pytest.raises(ConfigError, match=text):
        records(log, topic, **which)


# --------------------------------------------------------------------------------------------- as JSON


def test_a_rollout_with_its_arrays(log: SyntheticLog) -> None:
    log.put("rollouts", rollout(log.siblings(0)[1], num_tokens=2, version=7))
    shown = json.loads(json.dumps(record_to_json(records(log, "rollouts")[0])))
    assert {name: shown[name] for name in ("topic", "partition", "offset", "key", "timestamp")} == {
        "topic": "rollouts", "partition": 0, "offset": 0, "key": "sums/0/0/0/1", "timestamp": 1_700_000_001.0,
    }  # fmt: skip
    assert shown["headers"]["num_tokens"] == "2"
    segment = shown["message"]["segments"][0]
    assert segment["token_ids"] == {"dtype": "int32", "shape": [5], "values": [0, 1, 2, 3, 4]}
    assert segment["behavior_logprobs"]["values"] == [0.0, 0.0, 0.0, -0.5, -0.5]
    assert segment["versions"] == [{"start": 3, "count": 2, "trainer_epoch": 1, "version": 7}]


def test_tombstones_and_damage(log: SyntheticLog) -> None:
    contract = (("contract", b"rollout"), ("contract_version", b"1"), ("odd", b"\xff"))
    log.put_raw(NewRecord("control", 0, b"finished", None), NewRecord("rollouts", 0, b"\xfe", b"\xc1", contract))
    assert record_to_json(records(log, "control")[0])["tombstone"] is True
    assert "tombstone" in record_to_text(records(log, "control")[0])
    damaged = records(log, "rollouts")[0]
    shown = record_to_json(damaged)
    assert shown["message"] is None
    assert shown["error"].startswith("rollouts[0]@0 rollout.v8 $")
    assert shown["value"] == {"base64": base64.b64encode(b"\xc1").decode()}
    assert shown["key"] == {"base64": base64.b64encode(b"\xfe").decode()}
    assert shown["headers"]["odd"] == {"base64": base64.b64encode(b"\xff").decode()}
    assert "1 B that cannot be decoded: rollouts[0]@0 rollout.v8 $" in record_to_text(damaged)


def test_values_that_json_lacks() -> None:
    assert printable({"a": math.inf, "b": (math.nan, b"\x00"), "c": None}) == {
        "a": "inf", "b": ["nan", {"base64": "AA=="}], "c": None,
    }  # fmt: skip
    bits = Array(dtype="bfloat16", shape=(1, 2), data=b"\x80\x3f\x00\xc0")
    assert printable(bits) == {"dtype": "bfloat16", "shape": [1, 2], "values": [[1.0, -2.0]]}
    assert printable(Array.of([[True]], "bool"))["values"] == [[True]]


@pytest.mark.parametrize("sample", SAMPLES)
def test_every_message_has_a_text_and_a_json(log: SyntheticLog, sample: str) -> None:
    topic = MESSAGES[contract_of(sample)].topic
    log.put(topic, SAMPLES[sample], partition=0)
    record = records(log, topic)[0]
    json.dumps(record_to_json(record), allow_nan=False)
    lines = record_to_text(record).split("\n")
    assert lines[0].startswith(f"{topic}[0]@0  2023-")
    assert "cannot be decoded" not in "".join(lines)


# --------------------------------------------------------------------------------------------- as text


def test_a_rollout_to_be_read(log: SyntheticLog) -> None:
    log.put("rollouts", rollout(log.siblings(0)[0], num_tokens=2, version=7))
    lines = record_to_text(records(log, "rollouts")[0]).split("\n")
    assert lines[0].endswith("rollout.v8  sums/0/0/0/0")
    assert "    user: 1+2=" in lines
    assert "  assistant: 3" in lines
    assert "  segments[0]: 5 tokens, 2 sampled (2 from 1/7), mean logprob -0.500" in lines


def test_long_texts_and_many_metrics_are_bounded(log: SyntheticLog) -> None:
    log.put("steps", StepRecord(
        name=VersionName(trainer_epoch=1, version=1), batch_sequence=0, positions=(0,), trained_groups=1,
        trained_rollouts=1, weights_digest=None, metrics={f"metric{i}": i / 3 for i in range(50)},
    ))  # fmt: skip
    assert all(len(line) < 130 for line in record_to_text(records(log, "steps")[0]).split("\n"))


def test_turns_with_calls_and_rewards_and_model_calls_of_agents(log: SyntheticLog) -> None:
    log.put("rollouts", SAMPLES["rollout.v2"], partition=0)
    text = record_to_text(records(log, "rollouts")[0])
    assert '    calls calculate(text="48/2", digits=2)\n' in text
    assert "    calls unknown, which cannot be read: the call is no JSON: it ends early\n" in text
    assert "    reward 0.25\n" in text
    assert "  agent gave reward 1.25: right 1, polite 0.25 (one of its parts was late)\n" in text
    rollout_id = SAMPLES["rollout.v2"].ids.rollout_id
    assert (
        f"  call {rollout_id}/call/2: anthropic, 4 tokens at 3 of segment 1, which it begins (branch), ended by length"
        in text
    )
