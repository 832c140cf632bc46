"""What samples of several messages are made of: ids, problems, turns, segments."""

from __future__ import annotations

import dataclasses
from typing import Any

from rftstream.contracts.arrays import Array
from rftstream.contracts.assistant import ToolCall
from rftstream.contracts.batches import Experience, LossKind
from rftstream.contracts.rollouts import (
    AgentCall,
    ImageSpan,
    Posted,
    Rollout,
    RolloutStatus,
    Segment,
    Turn,
    VersionSpan,
)
from rftstream.contracts.tasks import ChatMessage, Media, Problem, RolloutIds, Sampling
from rftstream.contracts.verdicts import Verdict
from rftstream.contracts.versions import VersionName

ANNOTATOR = "3b1f" * 8
PAIR = "pair/gsm8k/0/17/0/1+3"

IDS = RolloutIds(
    rollout_id="gsm8k/0/17/0/3", group_id="gsm8k/0/17/0", taskset="gsm8k", sibling=3, group_size=8, sequence=17,
    min_version=2,
)  # fmt: skip
CHART = Media(url="s3://runs/media/chart-17.png", digest="sha256:" + "5e" * 32, kind="image/png")
SEEN = Media(
    url="store:media/5e/" + "5e" * 32, digest="sha256:" + "5e" * 32, kind="image/png", num_bytes=3217, width=32,
    height=24,
)  # fmt: skip
ROUTING = Media(url="file://media/routing-17-3.bin", digest="sha256:" + "a7" * 32, kind="application/octet-stream")
CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {"name": "calculate", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}
CALL: dict[str, Any] = {"id": "call-1", "type": "function", "function": {"name": "calculate", "arguments": "48/2"}}
PROBLEM = Problem(
    messages=(
        ChatMessage(role="system", content="Think step by step, then give the answer after ####."),
        ChatMessage(
            role="user", content="Natalia sold 48 clips in April, half as many in May. How many?", media=(CHART,),
            name="natalia",
        ),
        ChatMessage(role="assistant", content="", tool_calls=(CALL,)),
        ChatMessage(role="tool", content="24", name="calculate", tool_call_id="call-1"),
    ),
    answer="72",
    tools=(CALCULATOR,),
    info={"level": 1, "tags": ["sum", "half"], "ratio": 0.5, "checked": True, "note": None, "größe": {"a": -1}},
    data_source="gsm8k/train",
)  # fmt: skip
SAMPLING = Sampling(
    temperature=0.7, top_p=0.95, top_k=50, min_p=0.02, presence_penalty=0.1, frequency_penalty=0.2,
    repetition_penalty=1.05, min_tokens=2, max_tokens=512, stop=("</answer>", "\n\n\n"),
)  # fmt: skip
TURNS = (
    Turn(role="assistant", content="48 / 2 = 24, so 48 + 24 =", num_tokens=5, finish_reason="stop"),
    Turn(role="tool", content="72"),
    Turn(role="assistant", content="#### 72", num_tokens=2, finish_reason="length"),
)
SEGMENTS = (
    Segment(
        token_ids=Array.of([1, 504, 2232, 338, 49, 151, 28, 216, 34, 36, 2], "int32"),
        behavior_logprobs=Array.of([0, 0, 0, -0.25, -1.5, -0.125, -2, -0.5, 0, -0.75, -0.0625], "float32"),
        loss_mask=Array.of([0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1], "uint8"),
        versions=(
            VersionSpan(start=3, count=4, trainer_epoch=1, version=2),
            VersionSpan(start=7, count=1, trainer_epoch=1, version=3),
            VersionSpan(start=9, count=2, trainer_epoch=2, version=3),
        ),
    ),
)
SEEN_PROBLEM = dataclasses.replace(
    PROBLEM, messages=(PROBLEM.messages[0], dataclasses.replace(PROBLEM.messages[1], media=(SEEN,)))
)
SEEN_SEGMENTS = (dataclasses.replace(SEGMENTS[0], images=(ImageSpan(start=1, count=2, image=SEEN),)),)
ROLLOUT = Rollout(
    ids=IDS, status=RolloutStatus.truncated, problem=PROBLEM, turns=TURNS, segments=SEGMENTS, num_tokens=7,
    sampling=SAMPLING, error="the calculator timed out once", metrics={"tool_calls": 1.0, "turns": 2.0},
    attachments={"moe_routing": ROUTING}, started_at=1767225600.25, finished_at=1767225611.5,
)  # fmt: skip
CALLING_TURNS = (
    Turn(
        role="assistant", content="<think>halve it</think><tool_call>{...}</tool_call><tool_call>{</tool_call>",
        num_tokens=5, finish_reason="stop", reasoning="halve it", reward=0.25,
        tool_calls=(
            ToolCall(id="call_0_0", name="calculate", arguments={"text": "48/2", "digits": 2}, text="{...}"),
            ToolCall(id="call_0_1", name="", arguments=None, text="{", error="the call is no JSON: it ends early"),
        ),
    ),
    *TURNS[1:],
)  # fmt: skip
POSTED = Posted(reward=1.25, parts={"right": 1.0, "polite": 0.25}, source="agent", error="one of its parts was late")
MODEL_CALL = AgentCall(
    number=2, dialect="anthropic", request_digest="sha256:" + "1a" * 32, tools_digest="sha256:" + "2b" * 32, segment=1,
    start=3, count=4, finish_reason="length", opened="branch", idempotency_digest="sha256:" + "3c" * 32,
    asked={"temperature": 0.2, "stop_sequences": ["END"]}, started_at=1767225600.5, finished_at=1767225601.25,
)  # fmt: skip
POSTED_ROLLOUT = dataclasses.replace(ROLLOUT, turns=CALLING_TURNS, posted=POSTED, calls=(MODEL_CALL,))
REACHED = dataclasses.replace(
    POSTED, reward=0.0, parts={}, reached=(ChatMessage(role="user", content="Make 12 of 3 and 4."),)
)
VERDICT = Verdict(
    reward=0.9, scorer="math+format", scorer_version="1.0.2:9f2c", parts={"math": 1.0, "format": 0.5},
    metrics={"answer_found": 1.0},
    additions={
        "teacher_logprobs": Array.of([0, 0, 0, -0.5, -1, -0.25, -1, -0.5, 0, -0.5, 0], "float32"),
        "served_bits": Array(dtype="bfloat16", shape=(1, 2), data=b"\x80\x3f\x00\xbf"),
    },
)  # fmt: skip
STEP = VersionName(trainer_epoch=2, version=4)
EXPERIENCE = Experience(
    ids=IDS, batch_sequence=3, share=1, position=5, loss_kind=LossKind.rl, segments=SEGMENTS, reward=0.9,
    sampling=SAMPLING, truncated=True, parts={"math": 1.0, "format": 0.5}, metrics={"turns": 2.0},
    additions=VERDICT.additions, attachments={"moe_routing": ROUTING}, weight=0.5,
)  # fmt: skip
EXPERT = Experience(
    ids=RolloutIds(
        rollout_id="experts/0/2/0/0", group_id="experts/0/2/0", taskset="experts", sibling=0, group_size=1, sequence=0,
        min_version=0,
    ),
    batch_sequence=3, share=1, position=6, loss_kind=LossKind.dpo, segments=(), reward=None, sampling=Sampling(),
    expert=True, pair="chosen",
)  # fmt: skip
EXPERIENCES_DIGEST = "sha256:372cbb64b6af5f0a1a390b4620eacc6fe03ce76378000de2bc791a3ea8057f5e"
"""Of EXPERIENCE and EXPERT as version 1 of the contract encoded them."""
QUESTION = (ChatMessage(role="user", content="What is 2 + 2?"),)
REWORDED = Problem(
    messages=(ChatMessage(role="user", content="In April 48 clips were sold, in May half of that. How many in all?"),),
    answer="72",
)
