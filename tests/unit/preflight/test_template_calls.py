"""What `check` says of tools, of calls that do not come back, of ends, of texts that become special tokens, and of
prompts without tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rftstream.config.loader import from_dict
from rftstream.preflight.checks.check import check
from tests.unit.models.call_styles import STYLES, CallStyle, renderer_of

PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}, "kind": {"enum": ["a"]}}}
TOOL = {"type": "function", "function": {"name": "store", "parameters": PARAMETERS}}
XML = STYLES["qwen3-coder"]
BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"
STRANGE = (
    "{% for c in m.tool_calls %}{{ '[[' ~ c.function.name ~ ' ' ~ c.function.arguments | tojson ~ ']]' }}{% endfor %}"
)
TRIMMING = XML.calls.replace("(v if v is string else v | tojson)", "(v | trim if v is string else v | tojson)")


def said_of(
    folder: Path, style: CallStyle, row: dict[str, Any], *, template: str | None = None, end: bool = True
) -> Any:
    """The report of a run file over one row, with a model folder of a style."""
    renderer_of(style, folder / "model", template=template)
    if not end:
        (folder / "model" / "tokenizer_config.json").write_text('{"eos_token": null}')
    (folder / "rows.jsonl").write_text(json.dumps({"answer": "1", **row}) + "\n")
    return check(from_dict({
        "run": {"name": "t", "steps": 1}, "model": {"path": "model"}, "base": str(folder),
        "tasksets": {"t": {"source": "jsonl:rows.jsonl"}}, "explorer": {"policy": "fake"},
        "trainer": {"backend": "fake"}, "sampling": {"max_tokens": 4},
    }))  # fmt: skip


ASKED = {"prompt": "keep it", "tools": [TOOL]}
CASES: list[tuple[str, CallStyle, dict[str, Any], dict[str, Any], str]] = [
    ("all is well", XML, ASKED, {}, ""),
    ("Mistral", STYLES["mistral-small-3.2"], ASKED, {}, ""),
    ("a form that nobody reads", CallStyle(calls=STRANGE, tokens=("</s>",), end="</s>"), ASKED, {},
     "tasksets.t: a tool call does not come back as it was made: it is read as an answer; the template writes it as "),
    ("a template that trims", CallStyle(calls=TRIMMING, tokens=XML.tokens, end=XML.end), ASKED, {},
     "its argument 'text' is read as 'two words', expected "),
    ("a template without tools", XML, ASKED, {"template": BARE},
     "tasksets.t: the chat template does not show the tools"),
    ("no tools", XML, {"prompt": "keep it"}, {"template": BARE}, ""),
    ("no end", XML, {"prompt": "keep it"}, {"end": False}, "model: no token ends a turn, since "),
    ("turn marks in a text", XML, {"prompt": "a<|im_end|>\n<|im_start|>system"}, {},
     "tasksets.t: 1 problem with names of special tokens in the text, the first '<|im_end|>' in problem 0; "),
]  # fmt: skip


@pytest.mark.parametrize(
    ("style", "row", "given", "warning"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_what_check_says(
    tmp_path: Path, style: CallStyle, row: dict[str, Any], given: dict[str, Any], warning: str
) -> None:
    report = said_of(tmp_path, style, row, **given)
    assert report.errors == []
    told = [one for one in report.warnings if "segments" not in one]
    assert len(told) == bool(warning), told
    assert warning in "".join(told)


def test_a_prompt_without_tokens_is_refused(tmp_path: Path) -> None:
    report = said_of(tmp_path, XML, {"prompt": ""}, template=BARE)
    assert len(report.errors) == 1
    assert report.errors[0].startswith(
        "tasksets.t: problem 0 (rows.jsonl:1): the prompt has no tokens, expected at least one"
    )
