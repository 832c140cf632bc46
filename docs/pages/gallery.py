"""docs/examples.md: every run file of examples/, with what its head says: what it learns, how to run it, what was
measured."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pages.markdown import escaped, table
from rftstream.config.parts.reward_uses import reward_names

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Example:
    path: Path
    paragraphs: tuple[str, ...]
    """Of its head: texts as one line, commands as they are, with line breaks."""
    values: dict[str, Any]

    @property
    def learns(self) -> str:
        first = self.paragraphs[0]
        return first.partition(". ")[0].partition(": ")[0].rstrip(".")

    @property
    def algorithms(self) -> str:
        trainer = self.values.get("trainer", {}).get("algorithm", "grpo")
        named = [one.get("algorithm", trainer) for one in self.values.get("stages", ())] or [trainer]
        return ", ".join(f"`{name}`" for name in dict.fromkeys(map(_name, named)))

    @property
    def rewards(self) -> str:
        names = [name for one in self.values.get("tasksets", {}).values() for name in reward_names(one["reward"])]
        return ", ".join(f"`{name}`" for name in dict.fromkeys(names))

    @property
    def model(self) -> str:
        model = self.values["model"]
        return "tiny, made on the spot" if "make" in model else Path(model["path"]).name


FIRST = ("gsm8k-8gpu", "gsm8k", "arithmetic")
"""The last one comes first."""
SYSTEMS = {"trl": "TRL", "verl": "verl"}


def examples() -> list[Example]:
    """The usual tasks first, then those with a made model, which need nothing."""
    found = [_read(path) for path in sorted((ROOT / "examples").glob("*.toml"))]
    rank = {name: -place for place, name in enumerate(FIRST)}
    return sorted(found, key=lambda one: (rank.get(one.path.stem, 1), "make" not in one.values["model"]))


def gallery() -> str:
    rows = [
        (f"[{one.path.stem}](#{one.path.stem})", one.learns, one.model, one.algorithms, one.rewards)
        for one in examples()
    ]
    head = table(("example", "what it shows", "model", "algorithm", "reward"), rows)
    return "\n\n".join([head, *map(_section, examples())])


def _section(example: Example) -> str:
    texts = [
        f"```sh\n{one}\n```" if "\n" in one or one.startswith("rftstream ") else escaped(one)
        for one in example.paragraphs
    ]
    return "\n\n".join([f"## {example.path.stem}", f"[examples/{example.path.name}](../examples/{example.path.name})",
                        *texts, *_elsewhere(example)])  # fmt: skip


def _elsewhere(example: Example) -> list[str]:
    """Return the same training in other systems, as far as examples/elsewhere has it."""
    found = []
    for path in sorted((ROOT / "examples" / "elsewhere").glob(f"{example.path.stem}_*.*")):
        system = SYSTEMS[path.stem.removeprefix(f"{example.path.stem}_")]
        language = {".py": "python", ".sh": "sh"}[path.suffix]
        found.append(f"The same in {system}:\n\n```{language}\n{path.read_text(encoding='utf-8').strip()}\n```")
    return found


def _read(path: Path) -> Example:
    text = path.read_text(encoding="utf-8")
    head: list[str] = []
    for line in text.splitlines():
        if line.startswith("#:schema") or (not head and not line):
            continue
        if not line.startswith("#"):
            break
        head.append(line[1:].removeprefix(" ").rstrip())
    paragraphs = [block.split("\n") for block in "\n".join(head).split("\n\n")]
    shown = tuple(
        "\n".join(line.strip() for line in lines) if lines[0].startswith("  ") else " ".join(lines)
        for lines in paragraphs
    )
    return Example(path, shown, tomllib.loads(text))


def _name(named: Any) -> str:
    return str(named if isinstance(named, str) else named["name"])
