"""A built-in part has everything that docs/extending.md asks for; what it lacks is said with the file or command."""

from __future__ import annotations

import re
from collections.abc import Iterator

import generate

from rftstream.algorithms import ALGORITHMS
from rftstream.metrics import REGISTRY
from rftstream.rewards import REWARDS
from scripts.experiments import NEED_MORE
from tests.docs.reading import ROOT, read
from tests.golden import curves

WITHOUT_PANEL = {
    "rftstream_lost_offsets", "rftstream_wrong_topics", "rftstream_throttled_seconds", "rftstream_device_seconds",
    "rftstream_groups_admitted", "rftstream_problems_drawn", "rftstream_operator_problems",
    "rftstream_operator_groups", "rftstream_synthesised", "rftstream_problems_joined", "rftstream_trained_tokens",
    "rftstream_group_staleness_versions", "rftstream_evaluation",
}  # fmt: skip
"""Metrics for alerts, and for questions that are asked seldom."""


def lacking() -> Iterator[str]:
    docs = ROOT / "docs"
    rewards, algorithms = read(docs / "rewards.md"), read(docs / "algorithms.md")
    yield from (f"docs/rewards.md: no row of the reward `{name}` in the first table; write it" for name in REWARDS
                if f"\n| `{name}` |" not in rewards)  # fmt: skip
    yield from (f"docs/algorithms.md: no row of the algorithm `{name}` in the first table; write it"
                for name in ALGORITHMS if f"\n| [`{name}`](#" not in algorithms)  # fmt: skip
    recorded = {row["algorithm"] for row in curves.RECORDED} | NEED_MORE
    yield from (f"tests/golden/curves.json: no curve of {name}; run python -m tests.golden.curves {name}"
                for name in ALGORITHMS if name not in recorded)  # fmt: skip
    boards = "".join(read(path) for path in sorted((ROOT / "deploy" / "grafana" / "boards").glob("*.py")))
    for metric in REGISTRY.collect():
        is_shown = re.search(rf"\b{metric.name}(_total|_bucket|_sum|_count|_info)?\b", boards) is not None
        if metric.name.startswith("rftstream_") and is_shown == (metric.name in WITHOUT_PANEL):
            yield (
                f"{metric.name}: add a Panel with it in deploy/grafana/boards, or its name to WITHOUT_PANEL in "
                "tests/docs/test_extending.py; one of both"
            )
    stale = [str(file.relative_to(ROOT)) for file, text in generate.wanted_texts() if generate.is_stale(file, text)]
    if stale:
        yield f"out of date: {', '.join(stale)}; run python docs/generate.py"


def test_nothing_lacks_its_page_schema_curve_or_panel() -> None:
    found = list(lacking())
    assert not found, "\n".join(["", *found])
