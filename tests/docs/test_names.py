"""Names in prose are checked like links: what stands in backticks and looks like ours exists in the code."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from pages import configuration

from rftstream.queries.reference import settings
from tests.docs.reading import PAGES, ROOT, code, shown
from tests.suite.each import each

PACKAGE = ROOT / "rftstream"
SOURCES = ("rftstream", "workers", "schemas", "scripts", "benchmarks", "examples", "deploy", "docs/pages",
           "tests/docs/examples", "docker-compose.yml", "Makefile", "pyproject.toml", ".ci")  # fmt: skip
"""Where words of ours stand: code, contracts, examples, and what is deployed."""
OPEN = {"policies", "backends", "algorithms", "rewards", "environments", "trackers", "operators"}
"""Sections of parts, which may be a user's own, and then have their own settings."""
FOREIGN = {
    "docs/agents.md": {"output_type"},
    "docs/algorithms.md": {"group_norm"},
    "docs/coding-agents.md": {"web_search"},
    "docs/coming-from-trinity-rft.md": {"sync_offset", "eval_on_startup", "bench_on_latest_checkpoint"},
    "docs/coming-from-trl.md": {"RewardTrainer", "TrainingArguments"},
    "docs/coming-from-verl.md": {"ppo_trainer"},
    "docs/harbor.md": {"ControlMaster", "ServerAliveInterval", "podPidsLimit"},
    "docs/coming-from.md": {"ppo_trainer"},
    "docs/decisions/0017-kafka-python-and-librdkafka.md": {"BufferError", "txn_requires_abort"},
    "docs/extending.md": {"rftstream/contracts/likes.py", "schemas/golden/like.v1.json"},
    "docs/kafka.md": {"KAFKA_PASSWORD_explorer"},
    "docs/operations.md": {"AbortIncompleteMultipartUpload", "enable_prefix_caching"},
    "docs/scale.md": {"__transaction_state"},
    "docs/vision.md": {"qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_vl"},
}  # fmt: skip
"""Page -> names that look like ours, and are others' or are to be made by the reader."""


@functools.cache
def words() -> frozenset[str]:
    """All words of our sources, and names of attributes in quotes. Counters have the ending that their exporter
    adds."""
    listed = subprocess.run(["git", "ls-files", *SOURCES], capture_output=True, text=True, cwd=ROOT, check=True)
    found: set[str] = set()
    for name in listed.stdout.split():
        if not name.endswith(".md") and "/vendor/" not in name and (ROOT / name).is_file():
            text = (ROOT / name).read_text(encoding="utf-8", errors="ignore")
            found.update(re.findall(r"\w+", text), re.findall(r"\"(rftstream\.\w+)\"", text))
    return frozenset(found | {f"{word}_total" for word in found if word.startswith("rftstream_")})


@functools.cache
def module_names(path: Path) -> dict[str, set[str]]:
    """Name at the top of a module -> names in its body."""
    names: dict[str, set[str]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        inner = {name for one in getattr(node, "body", ()) for name in _defined(one)} if _is_class(node) else set()
        names |= dict.fromkeys(_defined(node), inner)
    return names


def _is_class(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef)


def _defined(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.Assign(targets=targets):
            yield from (one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
            yield from (one.asname or one.name for one in aliases)
        case ast.If(body=body):
            yield from (name for one in body for name in _defined(one))


def leads_somewhere(dotted: str) -> bool:
    """Whether a dotted name is a module, or a name in a module or in a class of it."""
    parts = dotted.removeprefix("rftstream.").split(".")
    place = PACKAGE
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        place /= f"{parts.pop(0)}.py"
    elif (place / "__init__.py").is_file():
        place /= "__init__.py"
    if not parts:
        return True
    names = module_names(place) if place.suffix == ".py" else {}
    return parts[0] in names and (len(parts) == 1 or parts[1] in names[parts[0]] or not names[parts[0]])


@functools.cache
def known_settings() -> frozenset[str]:
    parts = {f"{section.key}.{setting.name}" for section in settings.parts() for setting in section.settings}
    return frozenset({name.lower() for name in configuration.keys() | parts})


@functools.cache
def sections() -> set[str]:
    return {key.split(".")[0] for key in known_settings()}


def is_setting(dotted: str) -> bool:
    first, *rest = dotted.split(".")
    known = known_settings()
    if first in OPEN and rest and rest[0] not in {one.split(".")[1] for one in known if one.startswith(f"{first}.")}:
        return True  # of a part that somebody else has written
    named = dotted.lower()
    if first in ("tasksets", "evaluations") and rest:
        named = ".".join([first, "name", *rest[1:]]).lower()
    return any(one == named or one.startswith(f"{named}.") or _is_under(named, one) for one in known)


def _is_under(named: str, key: str) -> bool:
    """`transport.options.linger_ms` is in the table `transport.options`."""
    return key.count(".") > 0 and named.startswith(f"{key}.")


ROOMS = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()} - {"__init__", "__pycache__"}
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"build", "runs", "models", "shared"}
ENDINGS = ("py", "toml", "jsonl", "json", "md", "sh", "yml", "yaml", "js", "css", "html", "sql", "svg", "png", "c")
FILES = tuple(f".{ending}" for ending in ENDINGS)


def missing(page: Path) -> list[str]:
    found = []
    foreign = FOREIGN.get(shown(page), set())
    for text in code(page):
        if text in foreign or "NAME" in re.split(r"[./]", text.removesuffix(".py")) or "/test_NAME" in text:
            continue
        path = re.fullmatch(r"((?:\.\./|\./)*)([\w-]+)/([\w./-]+\.(\w+))(?::\d+)?", text)
        if path is not None and path[2] in FOLDERS | ROOMS and path[4] in ENDINGS:
            places = (ROOT / path[2] / path[3], PACKAGE / path[2] / path[3], page.parent / text)
            if not any(place.exists() for place in places):
                found.append(text)
            continue
        dotted = re.fullmatch(r"([a-z_]+(?:\.\w+)+)(?:\(\)| ?= ?.+)?", text)
        if (
            dotted is not None
            and dotted[1].split(".")[0] in ROOMS | sections() | {"rftstream"}
            and not dotted[1].endswith(FILES)
        ):
            if not leads_somewhere(dotted[1]) and not is_setting(dotted[1]) and dotted[1] not in words():
                found.append(text)
            continue
        if re.fullmatch(r"[A-Za-z_][\w.]*(?:\(\))?", text):
            looks = [
                word for word in re.findall(r"\w+", text) if "_" in word.strip("_") or re.search("[a-z][A-Z]", word)
            ]
            found += [text for word in looks if word not in words() | foreign and not _has_place(word)]
    return found


def _has_place(word: str) -> bool:
    """`num_calls_NAME`: a word of ours with a place for another one, as docs write it."""
    stem = re.sub(r"_?[A-Z]{3,}$", "", word)
    return stem != word and stem != "" and any(one.startswith(stem) for one in words())


@each("page", PAGES, ids=shown)
def test_names_in_prose_exist(page: Path) -> None:
    found = missing(page)
    assert not found, (
        f"{shown(page)}: our code has no {', '.join(found)}; correct the names, or, where they are others', "
        "put them into FOREIGN in tests/docs/test_names.py"
    )


def test_what_looks_like_ours_is_looked_up() -> None:
    assert leads_somewhere("core.masks.apply_mask") and leads_somewhere("rftstream.testing.Simulation")
    assert not leads_somewhere("core.masks.keep") and not leads_somewhere(
        "rftstream.testing.simulation.Simulation.walk"
    )
    assert is_setting("trainer.lr") and is_setting("transport.options.linger_ms")
    assert not is_setting("trainer.learning") and not is_setting("policies.vllm.nothing")


def test_the_rooms_of_the_architecture_are_all_there_are() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("| room | contents |")[2].partition("\n\n")[0]
    told = {name for row in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()} <= told
