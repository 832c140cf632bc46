"""Benchmarks by name: the run files in `rftstream/benchmarks`, each with an evaluation of its own name.

To add one, put a run file there: its first comments say what it is, the protocol, and where numbers are published.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from rftstream.config.parts import registry
from rftstream.config.sections import EvaluationSection
from rftstream.config.toml_files import read_toml
from rftstream.errors import ConfigError
from rftstream.queries.formatting import columns
from rftstream.queries.plain import Report
from rftstream.runs.writes.add_problems import problems_source

FOLDER = Path(str(files("rftstream"))) / "benchmarks"
BASE = "base"
"""The file that makes a benchmark a whole run file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark(Report):
    """A benchmark. `list_benchmarks` makes it."""

    name: str
    about: str
    protocol: str
    published: str
    """Where numbers are published, and how these were measured."""
    source: str
    reward: str


def list_benchmarks() -> list[Benchmark]:
    """Return all benchmarks, by name."""
    return [_read(path) for path in sorted(FOLDER.glob("*.toml")) if path.stem != BASE]


def _read(path: Path) -> Benchmark:
    said = re.findall(r"^# (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    section = read_toml(path)["evaluations"][path.stem]
    return Benchmark(
        name=path.stem,
        about=said[0],
        protocol=said[1].removeprefix("Protocol: "),
        published=said[2].removeprefix("Published: "),
        source=section["source"],
        reward=section["reward"],
    )


def benchmark_files(names: Sequence[str], run_file: Path | None) -> list[Path]:
    """Return the run files of some benchmarks: those of a user's run file, or alone. ConfigError for an unknown one."""
    known = [one.name for one in list_benchmarks()]
    for name in names:
        if name not in known:
            raise ConfigError(f"--benchmark: unknown {name!r}; {registry.suggest(name, known)}")
    base = FOLDER / f"{BASE}.toml" if run_file is None else run_file
    return [base, *(FOLDER / f"{name}.toml" for name in names)]


def with_data(section: EvaluationSection, data: Path) -> EvaluationSection:
    """Return a benchmark's section with a copy of its data: a folder as the hub has it, or one file."""
    kept = dict(section.options)
    if not data.is_dir():
        kept = {key: value for key, value in kept.items() if key not in ("subset", "split", "revision")}
    return replace(section, source=problems_source(str(data.absolute())), options=kept)


def benchmarks_to_text(benchmarks: Iterable[Benchmark]) -> str:
    """Return the benchmarks as text for people."""
    lines = ["benchmarks: rftstream evaluate --model MODEL --benchmark NAME"]
    for one in benchmarks:
        rows = [
            ("protocol", one.protocol),
            ("published", one.published),
            ("data", f"{one.source}, reward {one.reward}"),
        ]
        lines += ["", f"{one.name}: {one.about}", *columns(rows, left=2, indent="  ")]
    return "\n".join(
        [*lines, "", "The data comes from the hub, once, or from a copy of yours: --data FOLDER, or a file"]
    )
