"""The dialects alone: what is refused and with which sentence, and that an answer sent back is recognized."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rftstream.contracts.assistant import ToolCall
from rftstream.contracts.tasks import ChatMessage
from rftstream.gateway.dialects import DIALECTS, read_call
from rftstream.roles.explorer.model_calls import ModelCall, Refusal, SampledCall, canonical
from tests.suite.each import each
from tests.unit.gateway.answering import said

ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
CHAT, RESPONSES, MESSAGES = (DIALECTS[path] for path in ("chat/completions", "responses", "messages"))
HI: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "responses": {"input": "hi"},
    "anthropic": {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
}
TOOL = {"type": "function", "function": {"name": "add"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def read(dialect: Any, body: Any, **headers: str) -> ModelCall:
    found = read_call(
        dialect, json.dumps(body).encode(), {name.replace("_", "-"): text for name, text in headers.items()}
    )
    assert isinstance(found, ModelCall), found
    return found


def refusal(dialect: Any, **values: Any) -> str:
    found = read_call(dialect, json.dumps({**HI[dialect.name], **values}).encode(), {})
    assert isinstance(found, Refusal) and found.status == 400, found
    return found.sentence


@each(
    ("values", "sentence"),
    [
        ({"n": 5}, "n: each call is one sample of its rollout; expected 1"),
        ({"model": "policy:a b"}, "model: got the role 'a b', expected 1 to 64 letters, digits, '_', '.' or '-'"),
        ({"model": "policy:"}, "model: got the role ''"),
        ({"model": f"policy:{'a' * 65}"}, "model: got the role 'aaa"),
        ({"logprobs": True}, "logprobs: logprobs are not told"),
        ({"top_logprobs": 3}, "top_logprobs: only the sampled token"),
        ({"response_format": {"type": "xml"}}, "response_format: expected the type text, json_object, or json_schema"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex: got it beside response_form",
        ),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "response_format: got it together with tools"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml: unknown; expected one of json, json_object"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs: got a number as regex"),
        ({"stop": ["a"] * 17}, "stop: got a list, expected a string, or at most 16 of them"),
        ({"logit_bias": {"50256": -100}}, "logit_bias: tokens are sampled as the task says"),
        ({"functions": [{"name": "f"}]}, "functions: got the older form"),
        ({"modalities": ["text", "audio"]}, "modalities: the model writes text alone"),
        ({"max_tokens": -3}, "max_tokens: got -3"),
        ({"max_completion_tokens": 0, "max_tokens": 9}, "max_completion_tokens: got 0"),
        ({"messages": []}, "messages: got none"),
        ({"messages": "hi"}, "messages: got a string, expected a list"),
        ({"messages": [1]}, r"messages[0]: got a number, expected an object"),
        ({"messages": [{"role": "critic", "content": ""}]}, "messages[0].role: got 'critic'"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages[0].content[0]: got a part of type 'image_url'",
        ),
        ({"messages": [{"role": "tool", "content": "1"}]}, "messages[0].tool_call_id: got null, expected a string"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function: got"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name: got null"),
    ],
)
def test_chat_refuses(values: dict[str, Any], sentence: str) -> None:
    assert refusal(CHAT, **values).startswith(sentence)


@each(
    ("values", "sentence"),
    [
        ({"previous_response_id": "resp-1"}, "previous_response_id: answers are not kept"),
        ({"background": True}, "background: a call is answered on its own connection"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format: expected the type text"),
        ({"include": ["message.output_text.logprobs"]}, "include: logprobs are not told"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name: got null"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type: got 'computer_call'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]: got a part of type",
        ),
    ],
)
def test_responses_refuses(values: dict[str, Any], sentence: str) -> None:
    assert refusal(RESPONSES, **values).startswith(sentence)


@each(
    ("values", "sentence"),
    [
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format: expected the type text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]: got a part of type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role: got 'tool'"),
        ({"max_tokens": 0}, "max_tokens: got 0, expected a whole number"),
    ],
)
def test_messages_refuses(values: dict[str, Any], sentence: str) -> None:
    assert refusal(MESSAGES, **values).startswith(sentence)


@each("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)
@each(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"hi"',
        b"\xff",
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b"[" * 5000,
        b'{"a":' * 99 + b"1" + b"}" * 99,
    ],
)
def test_what_is_no_request_is_refused_with_a_sentence(dialect: Any, body: bytes) -> None:
    found = read_call(dialect, body, {})
    assert isinstance(found, Refusal) and found.status == 400 and found.sentence.startswith("the body ")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        "messages",
        "input",
        "system",
        "instructions",
        "tools",
        "tool_choice",
        "n",
        "max_tokens",
        "model",
        "stream",
        "text",
    ]
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "tool", "system"]) | JSON,
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]) | JSON,
        **dict.fromkeys(["content", "tool_calls", "name", "arguments", "output", "call_id", "tool_call_id"], JSON),
    },
)


@pytest.mark.slow
@ANY_SPEED
@given(body=st.dictionaries(NAMES, JSON | st.lists(MESSAGE, max_size=3), max_size=5))
def test_whatever_is_sent_is_a_call_or_a_refusal(body: dict[str, Any]) -> None:
    for dialect in DIALECTS.values():
        found = read_call(dialect, json.dumps(body).encode(), {})
        assert isinstance(found, ModelCall) or found.status == 400
        if isinstance(found, ModelCall):
            canonical([found.tools, dict(found.asked)])


def result_of(said_: Any) -> SampledCall:
    return SampledCall(
        call_id="a/0/0/0/0/call/2", created=1, model="m", said=said_, num_prompt_tokens=1, num_sampled_tokens=2
    )


ARGUMENTS = st.dictionaries(st.text(max_size=4), JSON, max_size=3)
CALLS = st.lists(
    st.builds(
        lambda number, name, arguments: ToolCall(
            id=f"call_0_{number}", name=name, arguments=arguments, text=f"<{name}>"
        ),
        st.integers(0, 9),
        st.text(max_size=4),
        st.none() | ARGUMENTS,
    ),
    max_size=3,
)


@pytest.mark.slow
@ANY_SPEED
@given(content=st.text(max_size=20), reasoning=st.text(max_size=5), calls=CALLS)
def test_an_answer_that_is_sent_back_is_recognized(content: str, reasoning: str, calls: list[ToolCall]) -> None:
    """Also after it went through the client's JSON."""
    result = result_of(said(content, reasoning=reasoning, tool_calls=tuple(calls)))
    for dialect in DIALECTS.values():
        answer = json.loads(json.dumps(dialect.answer(result)))
        match dialect.name:
            case "chat":
                body = {"messages": [answer["choices"][0]["message"]]}
            case "responses":
                body = {"input": answer["output"]}
            case _:
                body = {"max_tokens": 1, "messages": [{"role": "assistant", "content": answer["content"]}]}
        (message,) = read(dialect, body).messages
        assert message == dialect.served(answer)
        assert len(message.tool_calls) == sum(bool(call.name) and call.arguments is not None for call in calls)


def test_a_call_that_could_not_be_read_is_text() -> None:
    broken = ToolCall(id="call_0_0", name="add", arguments=None, text="<tool_call>{add", error="no JSON")
    for dialect in DIALECTS.values():
        message = dialect.served(dialect.answer(result_of(said("so: ", tool_calls=(broken,)))))
        assert message == ChatMessage(role="assistant", content="so: <tool_call>{add")


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)
def test_the_same_answer_gives_the_same_stream(dialect: Any) -> None:
    answer = dialect.answer(result_of(said("hi", reasoning="so")))
    again = json.loads(json.dumps(answer))
    assert dialect.events(answer, include_usage=True) == dialect.events(again, include_usage=True)


@pytest.mark.law("twice")
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)
def test_requests_are_told_apart_by_all_that_they_ask_for(dialect: Any) -> None:
    body = HI[dialect.name]
    same = [read(dialect, body), read(dialect, {**body, "stream": True}), read(dialect, dict(reversed(body.items())))]
    assert len({call.digest for call in same}) == 1 and same[1].stream
    others = [read(dialect, {**body, "temperature": 0.5}), read(dialect, {**body, "model": "m"})]
    assert len({call.digest for call in (same[0], *others)}) == 3


def test_retries_and_names_of_requests_are_read_from_headers() -> None:
    call = read(CHAT, HI["chat"], idempotency_key="k-1", x_stainless_retry_count="2")
    assert (call.idempotency_key, call.is_retry) == ("k-1", True)
    assert not read(CHAT, HI["chat"], x_stainless_retry_count="0").is_retry
    found = read_call(CHAT, json.dumps(HI["chat"]).encode(), {"idempotency-key": "k" * 300})
    assert isinstance(found, Refusal) and found.sentence.startswith("idempotency-key: got 300 characters")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT_FORM = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
FORM = {"type": "json_schema", "schema": SCHEMA}
ADD = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
HONOURED: dict[str, dict[str, tuple[Any, Callable[[ModelCall], Any], Any]]] = {
    "chat": {
        "model": ("m", lambda call: call.model, "m"),
        "messages": ([{"role": "user", "content": "so"}], lambda call: call.messages[0].content, "so"),
        "tools": ([TOOL], lambda call: [one["function"]["name"] for one in call.tools], ["add"]),
        "tool_choice": ("none", lambda call: call.tools, ()),
        "stream": (True, lambda call: call.stream, True),
        "stream_options": ({"include_usage": True}, lambda call: call.include_usage, True),
        "max_completion_tokens": (5, lambda call: call.max_tokens, 5),
        "max_tokens": (6, lambda call: call.max_tokens, 6),
        "stop": ("END", lambda call: call.stop, ("END",)),
        "response_format": (CHAT_FORM, lambda call: call.constraint.value, SCHEMA),
        "structured_outputs": ({"choice": ["a", "b"]}, lambda call: call.constraint.value, ["a", "b"]),
        "guided_json": (SCHEMA, lambda call: call.constraint.kind, "json"),
        "guided_regex": ("a+", lambda call: call.constraint.value, "a+"),
        "guided_choice": (["a"], lambda call: call.constraint.kind, "choice"),
        "guided_grammar": ('root ::= "a"', lambda call: call.constraint.kind, "grammar"),
    },
    "responses": {
        "model": ("m", lambda call: call.model, "m"),
        "input": ([{"role": "user", "content": "so"}], lambda call: call.messages[0].content, "so"),
        "instructions": ("be short", lambda call: call.messages[0].role, "system"),
        "tools": ([{"type": "function", "name": "add"}], lambda call: len(call.tools), 1),
        "tool_choice": ("none", lambda call: call.tools, ()),
        "stream": (True, lambda call: call.stream, True),
        "max_output_tokens": (5, lambda call: call.max_tokens, 5),
        "text.format": ({"format": FORM}, lambda call: call.constraint.value, SCHEMA),
    },
    "anthropic": {
        "model": ("m", lambda call: call.model, "m"),
        "messages": ([{"role": "user", "content": "so"}], lambda call: call.messages[0].content, "so"),
        "system": ("be short", lambda call: call.messages[0].role, "system"),
        "tools": ([ADD], lambda call: len(call.tools), 1),
        "tool_choice": ({"type": "none"}, lambda call: call.tools, ()),
        "stream": (True, lambda call: call.stream, True),
        "max_tokens": (5, lambda call: call.max_tokens, 5),
        "stop_sequences": (["END"], lambda call: call.stop, ("END",)),
        "output_config.format": ({"format": FORM}, lambda call: call.constraint.value, SCHEMA),
        "output_format": (FORM, lambda call: call.constraint.value, SCHEMA),
    },
}
"""Dialect -> a setting that is honoured -> a value, and what of the call shows that it is."""


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)
def test_each_setting_is_honoured_or_recorded_or_refused_as_its_table_says(dialect: Any) -> None:
    assert HONOURED[dialect.name].keys() == {name for name, one in dialect.settings.items() if one.fate == "honoured"}
    plain = read(dialect, HI[dialect.name])
    for name, setting in dialect.settings.items():
        top = name.partition(".")[0]
        if setting.fate == "refused":
            assert refusal(dialect, **{name: "x"}) == f"{name}: {setting.note}"
            for value in (None, *setting.passes):
                read(dialect, {**HI[dialect.name], name: value})
            continue
        value, shown, expected = HONOURED[dialect.name].get(name, ("x", None, None))
        call = read(dialect, {**HI[dialect.name], top: value})
        assert (top in call.asked) == setting.is_recorded and call.asked.get(top, value) == value
        if shown is not None:
            assert shown(call) == expected, name
        else:
            assert replace(call, asked={}, digest="") == replace(plain, asked={}, digest=""), name
    assert read(dialect, {**HI[dialect.name], "new_in_2030": 1}).asked["new_in_2030"] == 1


def test_tools_that_the_model_cannot_call_are_left_out_and_recorded() -> None:
    """Those of a server's own, and those whose form the model would have to know."""
    spawn = {"type": "function", "name": "spawn", "parameters": {"type": "object"}}
    space = {"type": "namespace", "name": "agents", "tools": [spawn, {"type": "custom", "name": "c"}]}
    cases: list[tuple[Any, list[Any], list[str], list[str]]] = [
        (CHAT, [TOOL, {"type": "custom", "custom": {"name": "c"}}], ["add"], ["custom"]),
        (RESPONSES, [{"type": "web_search"}, space, spawn], ["agents.spawn", "spawn"], ["agents.custom", "web_search"]),
        (MESSAGES, [ADD, {"type": "bash_20250124", "name": "bash"}], ["add"], ["bash_20250124"]),
    ]
    for dialect, tools, shown, others in cases:
        call = read(dialect, {**HI[dialect.name], "tools": tools})
        assert [one["function"]["name"] for one in call.tools] == shown
        assert call.asked["tools left out"] == others
    called = ToolCall(id="c", name="agents.spawn", arguments={}, text="")
    answer = RESPONSES.answer(result_of(said(tool_calls=(called,))))
    item = answer["output"][0]
    assert (item["name"], item["namespace"]) == ("spawn", "agents")
    (message,) = read(RESPONSES, {"input": [item]}).messages
    assert message == RESPONSES.served(answer) and message.tool_calls[0]["function"]["name"] == "agents.spawn"


def test_parts_of_text_stand_on_lines_of_their_own() -> None:
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": texts}
    for dialect, body, place in (
        (CHAT, {"messages": [{"role": "user", "content": texts}]}, 0),
        (RESPONSES, {"input": [{"role": "user", "content": texts}]}, 0),
        (MESSAGES, {"system": texts, "messages": [{"role": "user", "content": [result]}]}, 0),
        (MESSAGES, {"messages": [{"role": "user", "content": [result, *texts]}]}, 1),
    ):
        assert read(dialect, body).messages[place].content == "a\nb"


def test_a_reference_to_an_item_is_the_item() -> None:
    """Vercel's AI SDK sends no item again that an answer has had."""
    answer = RESPONSES.answer(
        result_of(said("so", reasoning="hm", tool_calls=(ToolCall(id="c", name="add", arguments={"a": 1}, text=""),)))
    )
    output = {"type": "function_call_output", "call_id": "c", "output": "2"}
    references = [{"type": "item_reference", "id": item["id"]} for item in answer["output"]]
    whole = read(RESPONSES, {"instructions": "be short", "input": [*answer["output"], output]})
    call = read(RESPONSES, {"instructions": "be short", "input": [*references, output]})
    assert call.messages == () and call.unresolved is not None
    known = {"a/0/0/0/0/call/2": json.dumps(answer).encode()}
    assert len(references) == 3 and call.unresolved(known.get) == whole.messages
    refused = call.unresolved(lambda call_id: None)
    assert (
        isinstance(refused, Refusal) and refused.status == 400 and refused.sentence.startswith("input[0].id: got 'rs-")
    )


def test_an_answer_ends_before_the_agents_stop_string() -> None:
    result = replace(result_of(said("a b END c", finish_reason="stop")), stop=("x", "END", "c"))
    chat, message = CHAT.answer(result), MESSAGES.answer(result)
    assert (chat["choices"][0]["message"]["content"], chat["choices"][0]["finish_reason"]) == ("a b ", "stop")
    assert (message["content"][0]["text"], message["stop_reason"]) == ("a b ", "stop_sequence")
    assert message["stop_sequence"] == "END"
    assert b'"stop_sequence":"END"' in b"".join(MESSAGES.events(message, include_usage=True))


def test_thinking_is_signed_and_text_has_no_citations() -> None:
    """Clients take an unsigned block for text of the model's, and a list that is null for a broken answer."""
    answer = MESSAGES.answer(result_of(said("hi", reasoning="so")))
    thinking, text = answer["content"]
    assert thinking["signature"] and set(text) == {"type", "text"}
    stream = b"".join(MESSAGES.events(answer, include_usage=True))
    assert b'"type":"signature_delta","signature":"a/0/0/0/0/call/2"' in stream


def test_arguments_that_are_too_deep_stay_text() -> None:
    """Whoever writes them as JSON again would get no further than Python's stack."""
    for depth, kind in ((20, dict), (900, str)):
        text = '{"a": ' + "[" * depth + "]" * depth + "}"
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": text}}
        history = [*HI["chat"]["messages"], {"role": "assistant", "tool_calls": [call]}]
        found = read(CHAT, {"messages": [*history, {"role": "user", "content": "go on"}]})
        assert isinstance(found.messages[1].tool_calls[0]["function"]["arguments"], kind)
        assert canonical(found.messages[1].tool_calls)


def test_large_settings_are_recorded_as_their_size() -> None:
    call = read(CHAT, {**HI["chat"], "metadata": {"a": "b" * 5000}, "user": "me"})
    assert call.asked == {"metadata": "(5008 bytes)", "user": "me"}


@each("dialect", (CHAT, RESPONSES, MESSAGES))
def test_a_role_is_in_the_name_of_the_model(dialect: Any) -> None:
    for model, role in (
        ("policy:solver", "solver"),
        (f"policy:{'a' * 64}", "a" * 64),
        ("policy", ""),
        ("llama3:8b", ""),
        ("my-policy:x", ""),
    ):
        call = read(dialect, {**HI[dialect.name], "model": model})
        assert (call.model, call.role) == (model, role), "any other name is the policy"
