"""Exact tokens over turns: random histories under templates in the styles of families, and what breaks a segment."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.tasks import ChatMessage
from rftstream.errors import ConfigError
from rftstream.models.fake_renderer import FakeRenderer
from rftstream.models.rendering import HfRenderer, Renderer, joined, open_renderer
from rftstream.models.splice import MARK, BreakReason, Continuation, Conversation, difference
from tests.unit import tiny
from tests.unit.models.styled import TOOLS, History, oracle, renderer_of, smollm2_tokenizer, trained_tokenizer
from tests.unit.models.template_styles import STYLES

BREAKING = ("moving", "counted")
"""Styles whose every turn begins a new segment."""
SLOW_HISTORIES = int(os.environ.get("HISTORIES", "2000"))


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HfRenderer]:
    folder: Path = tmp_path_factory.mktemp("styles")
    return {name: renderer_of(style, folder / name, trained_tokenizer()) for name, style in STYLES.items()}


def played(name: str, renderer: HfRenderer, seeds: range) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in seeds:
        try:
            total += History(name, renderer, seed).play()
        except AssertionError as error:
            raise AssertionError(f"{name}, seed {seed}: {error}") from error
    return total


@pytest.mark.sampled(8)
@pytest.mark.slow
@pytest.mark.parametrize("name", STYLES)
def test_random_histories(renderers: dict[str, HfRenderer], name: str) -> None:
    found = played(name, renderers[name], range(25))
    assert (found["goes on"] == 0) == (name in BREAKING), found


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", STYLES)
def test_many_histories_with_the_tokenizer_of_a_real_model(name: str, tmp_path: Path) -> None:
    """All styles together play SLOW_HISTORIES."""
    pytest.importorskip("gguf")
    renderer = renderer_of(STYLES[name], tmp_path, smollm2_tokenizer())
    found = played(name, renderer, range(1000, 1000 + -(-SLOW_HISTORIES // len(STYLES))))
    assert (found["goes on"] == 0) == (name in BREAKING), found


# --------------------------------------------------------------------------------------------- a few by hand


def user(content: str) -> ChatMessage:
    return ChatMessage(role="user", content=content)


def of(*messages: ChatMessage, tools: tuple[dict[str, Any], ...] = ()) -> Conversation:
    return Conversation(messages=messages, tools=tools)


def said_by(renderer: Renderer, known: Sequence[int], text: str, turn: int = 0) -> tuple[list[int], ChatMessage]:
    tokens = list(renderer.encode(text))
    parsed = renderer.parse(known, tokens, tools=TOOLS, finish_reason="stop", turn=turn)
    return tokens, renderer.as_chat_message(parsed, tokens)


def test_thoughts_stay_where_the_template_drops_them(renderers: dict[str, HfRenderer]) -> None:
    """Two tool turns and a new question, after which the template would write all of it without thoughts."""
    renderer = renderers["qwen3"]
    before = of(user("q"), tools=TOOLS)
    known = list(renderer.render(before.messages, before.tools))
    expected = joined(renderer.pieces(known))
    call = '<tool_call>\n{"name": "look", "arguments": {"flag": true}}\n</tool_call>'
    for turn, (text, reply) in enumerate([
        (f"<think>\na\n</think>\n\n{call}<|im_end|>", ChatMessage(role="tool", content="r", name="look")),
        ("<think>\nb\n</think>\n\nanswer<|im_end|>", user("next")),
    ]):  # fmt: skip
        tokens, message = said_by(renderer, known, text, turn)
        now = of(*before.messages, message, reply, tools=TOOLS)
        found = renderer.continue_prompt([*known, *tokens], len(tokens), before, now)
        assert found.break_reason is None
        known += [*tokens, *found.token_ids]
        shown = "<tool_response>\nr\n</tool_response>" if reply.role == "tool" else ""
        expected += f"{text}\n<|im_start|>user\n{shown or reply.content}<|im_end|>\n<|im_start|>assistant\n"
        before = now
    assert joined(renderer.pieces(known)) == expected
    assert "<think>" not in oracle("qwen3").render(before.messages, before.tools)


def test_a_turn_that_was_cut_gets_its_end_unsampled(renderers: dict[str, HfRenderer]) -> None:
    renderer = renderers["chatml"]
    before = of(user("q"))
    known = [*renderer.render(before.messages), *(tokens := renderer.encode("half a"))]
    now = of(*before.messages, ChatMessage(role="assistant", content="half a"), user("go on"))
    found = renderer.continue_prompt(known, len(tokens), before, now)
    assert joined(renderer.pieces(found.token_ids)).startswith("<|im_end|>\n<|im_start|>user\ngo on")


def test_why_a_segment_ends(renderers: dict[str, HfRenderer]) -> None:
    def reason(style: str, before: Conversation, now: Conversation, text: str = "a<|im_end|>") -> BreakReason | None:
        renderer = renderers[style]
        tokens = renderer.encode(text)
        known = [*renderer.render(before.messages, before.tools), *tokens]
        return renderer.continue_prompt(known, len(tokens), before, now).break_reason

    q, a, b = user("q"), ChatMessage(role="assistant", content="a"), user("b")
    assert reason("chatml", of(q), of(q, a, b)) is None
    assert reason("chatml", of(q), of(b, a, b)) is BreakReason.rewritten
    assert reason("chatml", of(q), of(q)) is BreakReason.rewritten
    assert reason("chatml", of(q), of(q, b)) is BreakReason.rewritten
    assert reason("chatml", of(q), of(q, a, b, tools=TOOLS)) is BreakReason.tools_changed
    assert reason("chatml", of(q), of(q, a, b), "a<|endoftext|>") is BreakReason.other_stop
    assert reason("shouted", of(q), of(q, a, b)) is BreakReason.turn_hidden
    assert reason("counted", of(q), of(q, a, b)) is BreakReason.template_changes_history
    assert reason("chatml", of(q), of(q, a, user(f"{MARK} is said"))) is BreakReason.turn_hidden
    assert reason("made", of(q), of(q, a, user("er")), "th") is BreakReason.pieces_merge


def test_true_is_not_one(renderers: dict[str, HfRenderer]) -> None:
    def asked(value: Any) -> ChatMessage:
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"flag": value}}}
        return ChatMessage(role="assistant", content="", tool_calls=(call,))

    before = (user("q"), asked(True), ChatMessage(role="tool", content="r"))
    after = (ChatMessage(role="assistant", content="a"), user("b"))
    assert difference(of(*before), of(*before, *after)) is None
    assert difference(of(*before), of(user("q"), asked(True), before[2], *after)) is None
    assert difference(of(*before), of(user("q"), asked(1), before[2], *after)) is BreakReason.rewritten


def test_a_character_without_a_token_is_said_as_in_a_prompt(tmp_path: Path) -> None:
    renderer = open_renderer(tiny.make(tmp_path))
    before, answer = of(user("1+2=")), ChatMessage(role="assistant", content="3")
    known = [*renderer.render(before.messages), *renderer.encode("3<eos>")]
    found = renderer.continue_prompt(known, 2, before, of(*before.messages, answer, user("4+5=")))
    assert found == Continuation(token_ids=renderer.encode("4+5="))
    with pytest.raises(ConfigError, match="has no token for 'w'"):
        renderer.continue_prompt(known, 2, before, of(*before.messages, answer, user("w")))


def test_the_fake_renderer_goes_on_behind_its_end_token() -> None:
    renderer = FakeRenderer()
    before = of(user("1+2="), tools=TOOLS)
    known = [*renderer.render(before.messages), *b'{"name": "look", "arguments": {"flag": true}}', 0]
    said = renderer.parse(known[:4], known[4:], tools=TOOLS, finish_reason="stop", turn=3)
    assert [(call.id, call.name, call.arguments) for call in said.tool_calls] == [("call_3_0", "look", {"flag": True})]
    message = renderer.as_chat_message(said, known[4:])
    now = of(*before.messages, message, user("ü"), user("7"), tools=TOOLS)
    found = renderer.continue_prompt(known, len(known) - 4, before, now)
    assert found.token_ids == tuple("\nü\n7".encode())
    assert renderer.decode([*known, *found.token_ids]) == f"1+2={message.content}\nü\n7"
    assert renderer.continue_prompt(known, 4, before, of(*now.messages)).break_reason is BreakReason.tools_changed
