"""What is learned of a message that somebody else wrote: what the policy would have sampled after its own prompt."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rftstream.contracts.demonstrations import Demonstration
from rftstream.contracts.tasks import ChatMessage
from rftstream.data.demonstrations.tokens import tokenise
from rftstream.errors import ConfigError
from rftstream.models.rendering import HfRenderer, joined
from tests.unit.models.styled import renderer_of, trained_tokenizer
from tests.unit.models.template_styles import CHAT, STYLES, Style

THOUGHT, NONE = "<think>\nit is 0\n</think>\n\n0", "0"
CALL = ({"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},)


def template(content: str, prompt: str) -> str:
    """A template with what a turn of the assistant says, and what the prompt ends with."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% set content = m.content %}{{ 'A:' ~ " + content + " }}"
        "{% for c in m.tool_calls or [] %}{{ '<tool_call>' ~ c.function.arguments | tojson ~ '</tool_call>' }}"
        "{% endfor %}{{ '<|im_end|>' }}{% else %}{{ 'U:' ~ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'A:" + prompt + "' }}{% endif %}"
    )


DROPS, KEEPS = "content.split('</think>')[-1].lstrip('\n')", "content"
ALWAYS = (
    "('<think>\n' ~ content.split('<think>\n')[-1] if '<think>' in content else '<think>\n\n</think>\n\n' ~ content)"
)
CASES = [
    # how a finished turn is written, what the prompt ends with, the message, what is learned (None: refused)
    ("R1", DROPS, "<think>\n", THOUGHT, "it is 0\n</think>\n\n0"),
    ("R1, no thought", DROPS, "<think>\n", NONE, "\n</think>\n\n0"),
    ("V3.1", DROPS, "<think>", THOUGHT, "it is 0</think>0"),
    ("V3.1, no thought", DROPS, "<think>", NONE, "</think>0"),
    ("V3.1 without thinking", "'</think>' ~ " + DROPS, "</think>", NONE, "0"),
    ("V3.1 without thinking, a thought", "'</think>' ~ " + DROPS, "</think>", THOUGHT, None),
    ("R1 of the first days", DROPS, "", THOUGHT, THOUGHT),
    ("R1 of the first days, no thought", DROPS, "", NONE, "0"),
    ("plain", KEEPS, "", THOUGHT, THOUGHT),
    ("plain, opened", KEEPS, "<think>\n", THOUGHT, "it is 0\n</think>\n\n0"),
    ("plain, opened, no thought", KEEPS, "<think>\n", NONE, "\n</think>\n\n0"),
    ("plain, closed", KEEPS, "<think>\n\n</think>\n\n", NONE, "0"),
    ("plain, closed, a thought", KEEPS, "<think>\n\n</think>\n\n", THOUGHT, None),
    ("the finished turn has the thought", ALWAYS, "<think>\n", THOUGHT, "it is 0\n</think>\n\n0"),
    ("the finished turn has an empty one", ALWAYS, "<think>\n", NONE, "\n</think>\n\n0"),
    ("the finished turn begins it anew", "'<think>\n' ~ content", "<think>\n", THOUGHT, "it is 0\n</think>\n\n0"),
    ("the finished turn never ends it", "'<think>\n' ~ content", "<think>\n", NONE, "\n</think>\n\n0"),
    ("an end in the text", KEEPS, "", "say <|im_end|> to end", None),
    ("an end at the end", KEEPS, "", "0<|im_end|>\n", "0"),
]  # fmt: skip


@pytest.fixture
def style() -> Style:
    return dataclasses.replace(STYLES["chatml"], **CHAT)


def rendered(style: Style, folder: Path, source: str, message: ChatMessage) -> tuple[str, str]:
    """The prompt, and what is learned after it."""
    renderer: HfRenderer = renderer_of(dataclasses.replace(style, source=source), folder, trained_tokenizer())
    asked = ChatMessage(role="user", content="1-1=")
    row = Demonstration(demonstration_id="1", source="x", messages=(asked, message))
    (segment,) = tokenise(row, renderer)[None]
    ids, mask = segment.token_ids.numpy(), segment.loss_mask.numpy()
    prompt = renderer.render([asked])
    assert [*ids[mask == 0]] == [*prompt]
    return joined(renderer.pieces(prompt)), joined(renderer.pieces(ids[mask == 1]))


@pytest.mark.parametrize(
    ("content", "ending", "said", "learned"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_what_is_learned(
    style: Style, tmp_path: Path, content: str, ending: str, said: str, learned: str | None
) -> None:
    source = template(content, ending.replace("\n", "\\n"))
    message = ChatMessage(role="assistant", content=said)
    if learned is None:
        with pytest.raises(ConfigError, match="message 1, the assistant's: it "):
            rendered(style, tmp_path, source, message)
        return
    assert rendered(style, tmp_path, source, message) == (f"U:1-1=A:{ending}", f"{learned}<|im_end|>")


@pytest.mark.parametrize(("said", "thought"), [(THOUGHT, "it is 0"), (NONE, "")])
def test_calls_stay_as_the_template_writes_them(style: Style, tmp_path: Path, said: str, thought: str) -> None:
    message = ChatMessage(role="assistant", content=said, tool_calls=CALL)
    assert rendered(style, tmp_path, template(DROPS, "<think>\\n"), message)[1] == (
        thought + '\n</think>\n\n0<tool_call>{"a": 1}</tool_call><|im_end|>'
    )
