"""The line of a user's code that raised an error: `check` names it, since the error's text alone seldom tells."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
LIBRARIES = tuple(Path(sysconfig.get_path(one)) for one in ("stdlib", "purelib", "platlib"))


def raised_at(error: BaseException) -> str:
    """Return the line that raised the error, the user's if there is one: `rewards.py:3, in score`. Lines of rftstream
    that checked a returned value are skipped."""
    frames = [
        frame
        for frame in traceback.extract_tb((error.__cause__ or error).__traceback__)
        if PACKAGE not in Path(frame.filename).parents and not frame.filename.startswith("<")
    ]
    own = [one for one in frames if not any(root in Path(one.filename).parents for root in LIBRARIES)]
    last = (own or frames)[-1:]
    return "".join(f"{Path(one.filename).name}:{one.lineno}, in {one.name}" for one in last)
