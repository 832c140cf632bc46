"""What words on the command line can be: runs, run files, topics, roles, kinds, for shells to complete.

Quick, and without heavy imports: a shell waits for it at every Tab.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

KINDS = ("transports", "policies", "backends", "algorithms", "rewards", "environments", "tasksets", "runs")


class AnyPath(click.Path):
    """Of a file or a folder. An empty one, as of a shell variable that is not set, would mean the folder one is in."""

    def __init__(self, *, file_okay: bool = True) -> None:
        super().__init__(path_type=Path, file_okay=file_okay)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail(
                "got nothing, expected a path ('.' for this folder); is a variable of the shell not set?", param, ctx
            )
        return super().convert(value, param, ctx)


class RunPath(AnyPath):
    """A run folder or a run file."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [*_items(_run_folders(incomplete)), *_run_files(incomplete)]


class RunFile(AnyPath):
    """A run file."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return _run_files(incomplete)


class Word(click.types.StringParamType):
    """One of a few words. A wrong one is left to who uses it, since that error names the nearest."""

    name = "word"

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = words

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"One of: {', '.join(self.words)}"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return _items(_beginning(self.words, incomplete))


def complete_topic(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from rftstream.contracts.topics import TOPICS

    return _beginning(TOPICS, incomplete)


def _beginning(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _items(paths: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(path) for path in paths]


def _run_folders(incomplete: str) -> Iterator[str]:
    """Run folders that begin so; by their name alone, those in ./runs, too."""
    head, slash, tail = incomplete.rpartition("/")
    places = [head + slash] if slash else ["", "runs/"]
    for place in places:
        for path in _listed(Path(place or ".")):
            if path.name.startswith(tail) and (path / "config.toml").is_file() and (path / "run.lock").is_file():
                yield f"{place}{path.name}"


def _run_files(incomplete: str) -> list[CompletionItem]:
    """TOML files; folders are left to the shell, so that one can go down into them."""
    head, slash, tail = incomplete.rpartition("/")
    place = head + slash
    files = [
        f"{place}{path.name}"
        for path in _listed(Path(place or "."))
        if path.suffix == ".toml" and path.name.startswith(tail)
    ]
    return [*_items(files), CompletionItem(incomplete, type="dir")]


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
