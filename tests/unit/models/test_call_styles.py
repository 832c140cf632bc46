"""Tool calls of every family come back as its template writes them, and with the ids that the model wrote."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.tasks import ChatMessage
from rftstream.models.calls.families import FAMILIES, SAME, families_of
from rftstream.models.rendering import HfRenderer, joined
from rftstream.preflight.checks.templates import lost_call
from tests.suite.each import each
from tests.unit.models.call_styles import STYLES, renderer_of

TYPES = {"text": "string", "count": "integer", "flag": "boolean", "items": "array"}
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {
        "type": "object", "properties": {key: {"type": kind} for key, kind in TYPES.items()}}}}
    for name in ("store", "look")
)  # fmt: skip
ASKED = ChatMessage(role="user", content="keep it")
CALLS = [
    ("store", {"text": "\n    return x\n\n", "count": 7, "flag": False, "items": [1, 2]}),
    ("look", {"text": '12 "quoted" \\d {a} <b> ü中🙂'}),
    ("look", {"text": " a\n", "items": []}),
    ("store", {}),
]  # fmt: skip
WITH_THE_PACKAGE_ALONE = {"gpt-oss", "gemma4", "inkling"}


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HfRenderer]:
    pytest.importorskip("renderers")
    folder = tmp_path_factory.mktemp("styles")
    return {name: renderer_of(style, folder / name.replace(" ", "-")) for name, style in STYLES.items()}


def come_back(renderer: HfRenderer, name: str) -> None:
    calls = CALLS[:1] if STYLES[name].is_single else CALLS
    theirs = [
        f"functions.{tool}:{place}" if "kimi" in name else f"Xy12ab34{place}" for place, (tool, _) in enumerate(calls)
    ]
    said = ChatMessage(role="assistant", content="", tool_calls=tuple(
        {"id": call_id, "type": "function", "function": {"name": tool, "arguments": given}}
        for call_id, (tool, given) in zip(theirs, calls, strict=True)
    ))  # fmt: skip
    prompt, tokens = renderer.render_turn([ASKED, said], TOOLS)
    found = renderer.parse(prompt, tokens, tools=TOOLS, finish_reason="stop", turn=0)
    assert [(call.name, call.error, json.dumps(call.arguments, sort_keys=True)) for call in found.tool_calls] == [
        (tool, None, json.dumps(given, sort_keys=True)) for tool, given in calls
    ]
    assert found.content == ""
    ids = [call.id for call in found.tool_calls]
    if STYLES[name].keeps_ids:
        assert ids == theirs
        again = renderer.as_chat_message(found, tokens)
        assert [call["id"] for call in again.tool_calls] == ids
        assert joined(renderer.pieces(renderer.render_turn([ASKED, again], TOOLS)[1])) == joined(
            renderer.pieces(tokens)
        )
    else:
        assert ids == [f"call_0_{index}" for index in range(len(calls))]


@each("name", STYLES)
def test_calls_come_back(renderers: dict[str, HfRenderer], name: str) -> None:
    if STYLES[name].families:
        assert renderers[name].family is not None or name == "llama-3"
    come_back(renderers[name], name)
    assert lost_call(renderers[name], [ASKED], TOOLS) is None


@pytest.mark.parametrize("name", sorted(STYLES.keys() - WITH_THE_PACKAGE_ALONE))
def test_calls_come_back_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    renderer = renderer_of(STYLES[name], tmp_path)
    come_back(renderer, name)
    assert renderer.family is None


def test_every_family_of_the_package_has_a_style() -> None:
    pytest.importorskip("renderers")
    from renderers import configs

    covered = {family for style in STYLES.values() for family in style.families}
    assert covered == {*configs._CONFIG_BY_NAME} - {"auto", "custom", "default"}
    assert covered == {*FAMILIES, *SAME, "llama-3"}
    assert {*SAME.values()} <= {*FAMILIES}


def test_families_are_told_apart(renderers: dict[str, HfRenderer]) -> None:
    for name, style in STYLES.items():
        family = renderers[name].family
        known = {SAME.get(one, one) for one in style.families} - {"llama-3"}
        assert family is None if not known else family is not None and family.name in known, (
            name, families_of(style.calls + style.signs), family,
        )  # fmt: skip
