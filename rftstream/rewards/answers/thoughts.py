"""Leaves out what a model thought before its answer."""

from __future__ import annotations

import re

_END = re.compile(r"</(?:think|thinking|thought|reasoning)>|◁/think▷", re.IGNORECASE)
_BEGIN = re.compile(r"^\s*(?:<(?:think|thinking|thought|reasoning)>|◁think▷)", re.IGNORECASE | re.MULTILINE)


def after_thoughts(completion: str) -> str:
    """Return what stands after the last thought. A thought that is not finished has no answer after it: empty."""
    ends = list(_END.finditer(completion))
    text = completion[ends[-1].end() :] if ends else completion
    return "" if _BEGIN.search(text) else text
