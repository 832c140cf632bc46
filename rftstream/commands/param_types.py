"""Types of arguments whose values a shell can complete: runs, run files, topics, roles, kinds.

Everything here is quick and imports nothing heavy, since a shell waits for the answer at every Tab.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

KINDS = (
    "transports",
    "policies",
    "backends",
    "algorithms",
    "rewards",
    "environments",
    "tasksets",
    "operators",
    "benchmarks",
    "runs",
)


class AnyPath(click.Path):
    """The path of a file or a folder. An empty path is refused: it often comes from a shell variable that is not set,
    and would mean the current folder."""

    def __init__(self, *, file_okay: bool = True, dir_okay: bool = True) -> None:
        super().__init__(path_type=Path, file_okay=file_okay, dir_okay=dir_okay)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Fail if the text is empty."""
        if value == "":
            self.fail(
                "got nothing, expected a path ('.' for this folder); is a variable of the shell not set?", param, ctx
            )
        return super().convert(value, param, ctx)


class VersionNumber(click.types.StringParamType):
    """The number of a version, or `best`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or the word. Fail for anything else."""
        if value == "best" or isinstance(value, int):
            return value
        if not value.isdecimal():
            self.fail(f"got {value!r}, expected the number of a version, or best", param, ctx)
        return int(value)


class RunPath(AnyPath):
    """The path of a run folder or a run file."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the run folders and run files that begin with the typed text."""
        return [*_items(_run_folders(incomplete)), *_run_files(incomplete)]


class RunFile(AnyPath):
    """The path of a run file."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the run files that begin with the typed text."""
        return _run_files(incomplete)


class Word(click.types.StringParamType):
    """One of a few words. Any text is accepted here: the code that uses the value refuses a wrong word, and names the
    nearest."""

    name = "word"

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = words

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return the words to choose from."""
        return f"One of: {', '.join(self.words)}"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the words that begin with the typed text."""
        return _items(_beginning(self.words, incomplete))


def complete_topic(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the topics that begin with the typed text."""
    from rftstream.contracts.topics import TOPICS

    return _beginning(TOPICS, incomplete)


def complete_reward(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the built-in rewards that begin with the typed text."""
    return _parts("reward", incomplete)


def complete_environment(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the built-in environments that begin with the typed text."""
    return _parts("environment", incomplete)


def complete_algorithm(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the built-in algorithms that begin with the typed text."""
    return _parts("algorithm", incomplete)


def _parts(kind: str, incomplete: str) -> list[str]:
    from rftstream.config.parts import registry

    return _beginning(registry.table(kind), incomplete)


def complete_key(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the sections, parts and settings that begin with the typed text."""
    from rftstream.queries.reference.setting_completion import complete_explained

    return [CompletionItem(value, help=about) for value, about in complete_explained(incomplete)]


def complete_assignment(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the settings that begin with the typed text, each with `=`. After the `=`, return the possible values."""
    from rftstream.queries.reference.setting_completion import complete_set

    return [CompletionItem(value, help=about) for value, about in complete_set(incomplete, _named_files(ctx.obj or ()))]


def _named_files(words: Iterable[str]) -> list[Path]:
    """Return the run files among the words of a command, and the run files inside run folders among them."""
    paths = [Path(word) for word in words if not word.startswith("-")]
    runs = {path for path in paths if (path / "run.lock").is_file()}
    return [path / "config.toml" if path in runs else path for path in paths if path in runs or path.suffix == ".toml"]


def _beginning(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _items(paths: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(path) for path in paths]


def _run_folders(incomplete: str) -> Iterator[str]:
    """Yield the run folders that begin with the typed text. Those in ./runs are also found by name alone."""
    head, slash, tail = incomplete.rpartition("/")
    places = [head + slash] if slash else ["", "runs/"]
    for place in places:
        for path in _listed(Path(place or ".")):
            if path.name.startswith(tail) and (path / "config.toml").is_file() and (path / "run.lock").is_file():
                yield f"{place}{path.name}"


def _run_files(incomplete: str) -> list[CompletionItem]:
    """Return the TOML files that begin with the typed text. The shell completes folders, so that the user can descend
    into them."""
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
