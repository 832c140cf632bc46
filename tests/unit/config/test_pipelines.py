"""What the run file says of operators, and what of it a run keeps."""

from __future__ import annotations

from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.runs.manifest import check_same_run, make_manifest


def test_a_run_keeps_its_operators() -> None:
    """Otherwise nobody could say any more which decision was made by which of them."""

    def make(**changed: Any) -> RunConfig:
        return loader.from_dict({
            "run": {"name": "x", "steps": 1},
            "model": {"path": "fake"},
            "tasksets": {"sums": {"source": "arithmetic", "pipeline": [{"op": "solve_rate", "explore": 0.1}]}},
            "pipeline": [{"op": "length", "max_characters": 9}],
            **changed,
        })  # fmt: skip

    manifest = make_manifest(make(), "x", {}, 0.0)
    check_same_run(manifest, make(), {})
    for changed, sentence in (
        ({"pipeline": []}, r"found pipeline\.0\.max_characters 9 -> unset; pipeline\.0\.op 'length'"),
        (
            {"tasksets": {"sums": {"source": "arithmetic", "pipeline": [{"op": "solve_rate", "explore": 0.2}]}}},
            r"found tasksets\.sums\.pipeline\.0\.explore 0\.1 -> 0\.2; take back the change",
        ),
        ({"buffer": {"min_siblings": 3}}, r"found buffer\.min_siblings \d -> 3"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            check_same_run(manifest, make(**changed), {})
    without = make_manifest(make(pipeline=[], tasksets={"sums": {"source": "arithmetic"}}), "x", {}, 0.0)
    check_same_run(
        without, make(pipeline=[], tasksets={"sums": {"source": "arithmetic"}}, buffer={"min_siblings": 3}), {}
    )
    with pytest.raises(ConfigError, match="a run keeps its operators"):
        check_same_run(without, make(), {})
