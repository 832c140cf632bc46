"""Completions taken apart without the help of a library: every form, every way to write it wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftstream.contracts.assistant import AssistantMessage
from rftstream.models.calls.tool_calls import chat_message, parse_text
from rftstream.models.fake_renderer import FakeRenderer
from tests.suite.each import each

TOOLS = ({"type": "function", "function": {"name": "f"}},)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abü<", max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def parsed(text: str, *, finish_reason: str = "stop", tools: Any = TOOLS, in_thought: bool = False) -> AssistantMessage:
    return parse_text(text, text=text, tools=tools, finish_reason=finish_reason, turn=2, in_thought=in_thought)


def body(arguments: Any, name: str = "f", key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


FORMS = (
    "<tool_call>\n{}\n</tool_call>", "<tool_call>{}</tool_call>", "[TOOL_CALLS][{}]", "[TOOL_CALLS] {}",
    "<|python_tag|>{}", "{}", "  {}\n", "```json\n{}\n```", "```\n{}\n```",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@given(arguments=st.dictionaries(st.text("abü", max_size=3), VALUES, max_size=4))
def test_arguments_keep_their_types(form: str, arguments: dict[str, Any]) -> None:
    written = form.replace("{}", body(arguments))
    if "```" in form and "```" in body(arguments):
        return
    said = parsed(written)
    (call,) = said.tool_calls
    assert (call.id, call.name, call.error) == ("call_2_0", "f", None)
    assert json.dumps(call.arguments) == json.dumps(arguments)
    assert said.content == ""
    assert said.text == written


OTHERS = (
    "<tool_call><function=f><parameter=a>{}</parameter></function></tool_call>", "<tool_call><function={}",
    "<tool_call>f<arg_key>{}</arg_key><arg_value>{}</arg_value></tool_call>", "<minimax:tool_call><invoke name=\"{}",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "[f(a={})]", "[{}(a=1)]", "<|tool_call_start|>[f({})]",
    "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>", "<|tools_prefix|>[{{}: {}}]",
    "[TOOL_CALLS]f[CALL_ID]{}[ARGS]{}",
)  # fmt: skip


@given(st.text(), st.sampled_from(["stop", "length", "repetition"]), st.booleans())
def test_nothing_raises(text: str, finish_reason: str, in_thought: bool) -> None:
    for form in ("{}", *FORMS, "<tool_call>{", "<think>{}", '{"name": "f", "arguments": {}}', '{"name": {}', *OTHERS):
        said = parsed(form.replace("{}", text), finish_reason=finish_reason, in_thought=in_thought)
        for call in said.tool_calls:
            assert (call.arguments is None) == (call.error is not None)
        chat_message(said, shows_calls=True)
        (said.content + said.reasoning).encode(errors="strict" if text.isascii() else "replace")


@each(
    ("text", "name", "error"),
    [
        ("<tool_call>{}</tool_call>", "", 'The tool call has no "name"'),
        ("<tool_call>[]</tool_call>", "", "The tool call is a list, expected a JSON object"),
        ("<tool_call>{'name': 'f'}</tool_call>", "", "not valid JSON: Expecting property name"),
        (f"<tool_call>{body({})[:-1]}</tool_call>", "f", "not valid JSON: Expecting ',' delimiter"),
        (f"<tool_call>{body({})} and more</tool_call>", "f", "not valid JSON: text follows the JSON object"),
        (f"<tool_call>{body({})}", "f", "The tool call has no end: </tool_call> is missing"),
        (f"<tool_call>{body('x')}</tool_call>", "f", "The arguments of the tool call are a string, expected a JSON"),
        (f"<tool_call>{body(None)}</tool_call>", "f", "The arguments of the tool call are null"),
        (f"<tool_call>{body([1])}</tool_call>", "f", "The arguments of the tool call are a list"),
        (f"<tool_call>{body({}, name=7)}</tool_call>", "", 'The tool call has no "name"'),  # type: ignore[arg-type]
        (body({"x": 1e400}).replace("Infinity", "1e400"), "f", "the number 1e400 is too large"),
        (body({"x": float("nan")}), "f", "NaN is no JSON value"),
        (body({"x": 1}).replace("1", "9" * 5000), "f", "Exceeds the limit"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', "f", "a character that JSON does not have"),
        ('{"name": "f", oops', "f", "not valid JSON"),
        ("```json\n" + body({})[:-2] + "\n```", "f", "not valid JSON"),
        ('[TOOL_CALLS]f[ARGS]{"x": ', "f", "not valid JSON"),
        ("<|python_tag|>print(1)", "", "not valid JSON: Expecting value"),
        ("<tool_call>" + "[" * 100_000, "", "</tool_call> is missing"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "", "not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(text: str, name: str, error: str) -> None:
    (call,) = parsed(text).tool_calls
    assert call.arguments is None
    assert call.name == name
    assert error in (call.error or "")
    assert call.text == text


def test_a_call_that_was_cut_off() -> None:
    for text in ('<tool_call>{"name": "f", "argum', '{"name": "f", "arguments": {"x": ', '```json\n{"name": "f", "a'):
        (call,) = parsed(text, finish_reason="length").tool_calls
        assert (call.name, call.arguments) == ("f", None)
        assert "The tool call was cut off before its end" in (call.error or "")


def test_several_calls_with_text_around() -> None:
    said = parsed(f"I look. <tool_call>{body({'a': 1})}</tool_call>\n<tool_call>x</tool_call> Then.")
    assert said.content == "I look. \n Then."
    assert [(call.id, call.name, call.arguments) for call in said.tool_calls] == [
        ("call_2_0", "f", {"a": 1}), ("call_2_1", "", None)
    ]  # fmt: skip
    bare = parsed(f"{body({}, key='parameters')}; {body({'b': 2}, name='g')}")
    assert [(call.name, call.arguments) for call in bare.tool_calls] == [("f", {}), ("g", {"b": 2})]
    mistral = parsed('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}')
    assert [(call.name, call.arguments) for call in mistral.tool_calls] == [("f", {"a": 1}), ("g", {})]


def test_a_mark_inside_of_an_argument_ends_nothing() -> None:
    (call,) = parsed(f"<tool_call>{body({'a': '</tool_call> <tool_call>'})}</tool_call>").tool_calls
    assert call.arguments == {"a": "</tool_call> <tool_call>"}


@each("text", ['{"answer": 3}', "[1, 2]", "```json\n{}\n```", "```python\nf()\n```", "{x", "2 { 3"])
def test_what_is_no_call_is_text(text: str) -> None:
    said = parsed(text)
    assert (said.content, said.tool_calls) == (text, ())


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@each(
    ("text", "schema", "value"),
    [
        ("\n a\n\n", {"type": "string"}, " a\n"), ("\n12\n", {"type": "string"}, "12"), ("", {"type": "string"}, ""),
        ("\n\n", {"type": "string"}, ""), ("\nnull\n", {"type": "string"}, "null"),
        ("\n12\n", {"type": "integer"}, 12), ("\n12\n", OPTIONAL, "12"), ("\nnull\n", OPTIONAL, None),
        ("\nNone\n", OPTIONAL, None), ("\nTrue\n", {"type": "boolean"}, True), ("\nfalse\n", {}, False),
        ("\n[1]\n", {"type": ["array", "string"]}, [1]), ("\n{x}\n", {"type": "object"}, "{x}"),
        ("\n\"a\"\n", None, '"a"'), ("\n1 2\n", None, "1 2"), ("\n1e999\n", None, "1e999"),
        ("\n3\n", {"enum": ["3", "4"]}, "3"), ("\n3\n", {"enum": [3, 4]}, 3),
    ],
)  # fmt: skip
def test_texts_between_tags(text: str, schema: Any, value: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    written = f"<tool_call>\n<function=f>\n<parameter=a>{text}</parameter>\n</function>\n</tool_call>"
    (call,) = parsed(written, tools=(tool,)).tool_calls
    assert (call.error, call.arguments) == (None, {"a": value})
    assert type((call.arguments or {})["a"]) is type(value)


@each(
    ("text", "calls"),
    [
        ('[f(a="x", b=[1, {"c": true}], c=None)]', [("f", {"a": "x", "b": [1, {"c": True}], "c": None})]),
        ("[f(), g.h(a=-1.5)]", [("f", {}), ("g.h", {"a": -1.5})]),
        ("<|python_tag|>[f(a='\\d')]", [("f", {"a": "\\d"})]),
        ("<|tool_call|>[]", [("", None)]),
        ("[f(a=", [("f", None)]),
        ("[f(a=g())]", [("f", None)]),
        ("[f(1)]", [("f", None)]),
        ("[f(" + "[" * 100_000, [("f", None)]),
        ("[g(1)]", []),
        ("[g(a=", []),
        ("[a link](f(a=1))", []),
        ("f(a=1)", []),
    ],
)
def test_calls_as_python(text: str, calls: list[tuple[str, Any]]) -> None:
    said = parsed(text)
    assert [(call.name, call.arguments) for call in said.tool_calls] == calls
    assert said.content == ("" if calls else text)


@each(("ids", "kept"), [
    (["Xy12ab34c", "functions.f:1"], ["Xy12ab34c", "functions.f:1"]), (["a", "a"], ["a", "call_2_1"]),
    (["", None], ["call_2_0", "call_2_1"]), ([7, "x" * 129], ["call_2_0", "call_2_1"]),
])  # fmt: skip
def test_ids_are_those_that_the_model_wrote(ids: list[Any], kept: list[str]) -> None:
    calls = [{"name": "f", "arguments": {}, "id": one} for one in ids]
    said = parsed(f"[TOOL_CALLS]{json.dumps(calls)}")
    assert [call.id for call in said.tool_calls] == kept
    assert [call["id"] for call in chat_message(said, shows_calls=True).tool_calls] == kept


def test_without_tools_there_are_no_calls() -> None:
    text = f"<tool_call>{body({})}</tool_call>"
    assert (parsed(text, tools=()).content, parsed(text, tools=()).tool_calls) == (text, ())


@each(
    ("text", "in_thought", "reasoning", "content"),
    [
        ("<think>\n2+2\n</think>\n\n4", False, "2+2", "4"),
        ("2+2\n</think>\n\n4", True, "2+2", "4"),
        ("<think>again</think>4", True, "again", "4"),
        ("<think>2+2", False, "2+2", ""),
        ("2+2", True, "2+2", ""),
        ("4 <think>x</think>", False, "", "4 <think>x</think>"),
        ("x</think>4", False, "", "x</think>4"),
        ("[THINK]2+2[/THINK]4", False, "2+2", "4"),
        ("2+2[/THINK]4", True, "2+2", "4"),
        ("<think></think>  4 ", False, "", "  4 "),
    ],
)
def test_reasoning(text: str, in_thought: bool, reasoning: str, content: str) -> None:
    said = parsed(text, in_thought=in_thought)
    assert (said.reasoning, said.content) == (reasoning, content)


def test_calls_inside_of_reasoning_do_not_count() -> None:
    call = f"<tool_call>{body({})}</tool_call>"
    assert parsed(f"<think>{call}").tool_calls == ()
    said = parsed(f"<think>{call}</think>{call}")
    assert (said.reasoning, len(said.tool_calls), said.content) == (call, 1, "")


def test_the_message_for_later_prompts() -> None:
    good, bad = f"<tool_call>{body({'a': True})}</tool_call>", "<tool_call>x</tool_call>"
    message = chat_message(parsed(f"<think>t</think>c{good}"), shows_calls=True)
    assert message.content == "<think>\nt\n</think>\n\nc"
    assert message.tool_calls == (
        {"id": "call_2_0", "type": "function", "function": {"name": "f", "arguments": {"a": True}}},
    )
    assert chat_message(parsed(f"c{good}"), shows_calls=False).content == f"c\n{good}"
    mixed = chat_message(parsed(f"c{good}{bad}"), shows_calls=True)
    assert (mixed.content, mixed.tool_calls) == (f"c\n{good}\n{bad}", ())


def test_the_fake_renderer_reads_them_too() -> None:
    renderer = FakeRenderer()
    said = renderer.parse(b"<think>\n", [*b"t</think>4", 0], tools=TOOLS, finish_reason="stop", turn=0)
    assert (said.reasoning, said.content, said.text) == ("t", "4", "t</think>4")
