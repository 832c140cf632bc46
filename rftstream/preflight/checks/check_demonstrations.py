"""What `check` says of the demonstrations of a run file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rftstream.config.sections import RunConfig
from rftstream.config.stages import taken_kinds
from rftstream.contracts.rollouts import Segment
from rftstream.models.spec import ModelSpec
from rftstream.queries.datasets.taking import take_rollouts
from rftstream.runs.writes.load_demonstrations import Loaded, check_demonstrations, look_at_demonstrations

Show = Callable[[Sequence[int]], str]
"""Function that returns the text of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationsLine:
    """The report's line about the demonstrations of a run file. `demonstrations_line` makes it."""

    source: str
    loaded: Loaded
    first: dict[str, list[tuple[bool, str]]]
    """Side -> the parts of the first demonstration, each with its text and whether it is learned."""
    asked: set[int]
    """Hashes of the questions that are answered."""

    def to_json(self) -> dict[str, Any]:
        """Return the line as plain values."""
        names = ("learned", "text")
        first = {side: [dict(zip(names, part, strict=True)) for part in parts] for side, parts in self.first.items()}
        return {"source": self.source, **self.loaded.to_json(), "first": first}

    def to_lines(self) -> list[str]:
        """Return the line as text, with the learned parts in brackets."""
        found, *_ = self.loaded.to_text().partition("\n")
        lines = [f"experts: {self.source}", f"  {found}", "  the first one, what is learned in brackets:"]
        for side, parts in self.first.items():
            text = " ".join(f"[{text!r}]" if learned else repr(text) for learned, text in parts)
            lines.append(f"    {side}: {text}" if side else f"    {text}")
        return lines


def demonstrations_line(config: RunConfig, spec: ModelSpec | None, show: Show) -> DemonstrationsLine | None:
    """Return the findings on the demonstrations, or None if the run file names none. ConfigError names the first bad
    row, or says that the algorithm cannot learn from this data."""
    check_demonstrations(config)
    section = config.experts
    if section is None or section.source is None or spec is None:
        return None
    with tempfile.TemporaryDirectory() as place:
        take_rollouts(config, section, Path(place), is_recorded=False)
        loaded, sides, asked = look_at_demonstrations(section, spec, taken_kinds(config), Path(place))
    first = {
        side or "": [part for segment in segments for part in _parts(segment, show)] for side, segments in sides.items()
    }
    return DemonstrationsLine(source=", ".join(section.sources), loaded=loaded, first=first, asked=asked)


def _parts(segment: Segment, show: Show) -> list[tuple[bool, str]]:
    pairs = zip(segment.loss_mask.numpy().tolist(), segment.token_ids.numpy().tolist(), strict=True)
    runs = groupby(pairs, lambda pair: pair[0])
    return [(bool(learned), show([token for _, token in some])) for learned, some in runs]
