"""Finds the part of a completion that contains its answer: after its reasoning, and inside `<answer>` if there is
one."""

from __future__ import annotations

import json
import re

from rftstream.rewards.answers.clean import without_hidden

_END = re.compile(r"</(?:think|thinking|thought|reasoning)>|◁/think▷", re.IGNORECASE)
_BEGIN = re.compile(r"^[^\S\n]*(?:<(?:think|thinking|thought|reasoning)>|◁think▷)", re.IGNORECASE | re.MULTILINE)
_TAG = re.compile(r"</?answer>", re.IGNORECASE)
_KEYS = ("answer", "final_answer", "result")
_MAX_JSON = 2000


def after_thoughts(completion: str) -> str:
    """Return the text after the last reasoning block. If a block is not closed, there is no answer, and the result is
    empty."""
    last = None
    for match in _END.finditer(completion):
        last = match
    text = completion[last.end() :] if last is not None else completion
    return "" if _BEGIN.search(text) else text


def without_reasoning(completion: str, reasoning: str) -> str:
    """Return the text after the reasoning at the beginning of a completion, with or without an opening mark. The
    closing mark stays."""
    if not reasoning:
        return completion
    opened = _BEGIN.match(completion.strip())
    return completion.strip()[opened.end() if opened else 0 :].strip().removeprefix(reasoning)


def final_part(completion: str) -> str:
    """Return the part of a completion that contains its answer: the last `<answer>`, else everything after its
    reasoning. If that part is a JSON object with an answer, only that answer is returned."""
    text = without_hidden(after_thoughts(completion)).strip()
    opened = [match for match in _TAG.finditer(text) if match[0][1] != "/"]
    if opened:
        begin = opened[-1].end()
        end = _TAG.search(text, begin)
        text = text[begin : end.start() if end else len(text)].strip()
    return _in_json(text)


def _in_json(text: str) -> str:
    bare = re.sub(r"^```(?:json)?\s*|\s*```$", "", text) if len(text) <= _MAX_JSON else ""
    if not bare.startswith("{") or not bare.endswith("}"):
        return text
    try:
        value = json.loads(bare)
    except (ValueError, RecursionError):
        return text
    found = next((value[key] for key in _KEYS if key in value), None)
    return str(found) if isinstance(found, str | int | float) and not isinstance(found, bool) else text
