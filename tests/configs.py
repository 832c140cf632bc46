"""Configs of runs, as short as a test needs them."""

from __future__ import annotations

from typing import Any

from rftstream.config import loader
from rftstream.config.sections import RunConfig


def small_run(**sections: Any) -> RunConfig:
    """Return a run of one step on sums, with these sections beside or in place of what every run file has."""
    return loader.from_dict({
        "run": {"name": "test", "steps": 1}, "model": {"path": "fake"}, "tasksets": {"sums": {"source": "arithmetic"}},
        **sections,
    })  # fmt: skip
