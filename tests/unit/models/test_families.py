"""Families that `renderers` knows: which template is which, and what is said of calls that it cannot read.

That good calls are read is in the random histories of test_splice."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.assistant import AssistantMessage
from rftstream.models.calls.families import families_of
from rftstream.models.rendering import HfRenderer
from tests.suite.each import each
from tests.unit.models.styled import TOOLS, renderer_of, trained_tokenizer
from tests.unit.models.template_styles import STYLES


def test_families_are_known_by_their_templates() -> None:
    found = {name: (families_of(style.source) or [None])[0] for name, style in STYLES.items()}
    known = {name: family for name, family in found.items() if family is not None}
    assert known == {
        "qwen3": "qwen3", "qwen3 without thinking": "qwen3", "opened thought": "qwen3", "qwen3.5": "qwen3.5",
        "deepseek": "deepseek-r1", "glm": "glm-4.5", "harmony": "gpt-oss",
    }  # fmt: skip


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HfRenderer]:
    pytest.importorskip("renderers")
    folder: Path = tmp_path_factory.mktemp("styles")
    names = ("qwen3", "qwen3.5", "glm", "deepseek", "harmony")
    return {name: renderer_of(STYLES[name], folder / name, trained_tokenizer()) for name in names}


def parsed(renderer: HfRenderer, text: str, finish_reason: str = "stop", tools: Any = TOOLS) -> AssistantMessage:
    prompt = renderer.encode("<|start|>assistant")
    return renderer.parse(prompt, renderer.encode(text), tools=tools, finish_reason=finish_reason, turn=1)


@each(
    ("name", "text", "error"),
    [
        ("qwen3", "<tool_call>{x}</tool_call><|im_end|>", "not valid JSON"),
        ("qwen3", '<tool_call>{"name": "look", "arguments": "x"}</tool_call><|im_end|>', "are a string"),
        ("qwen3", '<tool_call>{"name": "look", "argu', "cut off before its end"),
        ("qwen3", '<tool_call>{"name": "look", "arguments": {"a": NaN}}</tool_call><|im_end|>', "JSON does not have"),
        ("qwen3.5", "<tool_call>\nlook\n</tool_call><|im_end|>", "does not have the form"),
        ("qwen3.5", "<tool_call>\n<function=look>\n<parameter=fl", "cut off before its end"),
        ("glm", "<tool_call>look\n<arg_key>flag", "cut off before its end"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{x}\n```"
         "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>", "not valid JSON"),
        ("harmony", " to=functions.look<|channel|>commentary json<|message|>{x<|call|>", "not valid JSON"),
    ],
)  # fmt: skip
def test_calls_that_cannot_be_read_say_why(renderers: dict[str, HfRenderer], name: str, text: str, error: str) -> None:
    (call,) = parsed(renderers[name], text).tool_calls
    assert call.arguments is None
    assert error in (call.error or "")
    assert call.text


def test_text_in_tags_needs_no_type(renderers: dict[str, HfRenderer]) -> None:
    text = "<tool_call>\n<function=other>\n<parameter=a>\nso {\n</parameter>\n</function>\n</tool_call><|im_end|>"
    (call,) = parsed(renderers["qwen3.5"], text).tool_calls
    assert (call.name, call.arguments, call.error) == ("other", {"a": "so {"}, None)


def test_without_tools_there_are_no_calls(renderers: dict[str, HfRenderer]) -> None:
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    said = parsed(renderers["qwen3"], f"{text}<|im_end|>", tools=())
    assert (said.content, said.tool_calls) == (text, ())


def test_without_the_package_the_fallback_reads_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    renderer = renderer_of(STYLES["qwen3"], tmp_path, trained_tokenizer())
    said = parsed(
        renderer, '<think>\nt\n</think>\n\n<tool_call>{"name": "look", "arguments": {}}</tool_call><|im_end|>'
    )
    assert (said.reasoning, [call.name for call in said.tool_calls]) == ("t", ["look"])
