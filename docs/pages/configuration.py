"""docs/configuration.md: every section and key of a run file, and the settings of every part."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from msgspec import Meta

from pages.source import field_docs, find_class, first_paragraph, table, tree
from pages.types import in_words, toml
from pages.words import WORDS
from rftstream.algorithms.settings import CriticConfig
from rftstream.config import loader, ranges, registry
from rftstream.config import sections as declared
from rftstream.config.part_specs import OperatorSpec
from rftstream.config.registry import KINDS
from rftstream.config.role_sections import SynthesisServer
from rftstream.contracts.tasks import Sampling
from rftstream.errors import ConfigError
from rftstream.policies.server_updates import UpdateRequest
from rftstream.queries.listing import config_body
from rftstream.rewards.judge_forms import JudgeCriterion

HEAD = ("key", "value", "default", "meaning")
NAMES = {"tasksets": "tasksets.NAME", "evaluations": "evaluations.NAME"}
SUBTABLES: dict[str, dict[str, type]] = {
    "model": {"make": declared.MakeModel, "lora": declared.LoraSection},
    "synthesiser": {"server": SynthesisServer},
}
"""Section -> keys that are tables with keys of their own."""
TABLES = {
    "policy": "policies",
    "taskset": "tasksets.NAME.options",
    "transport": "transport.options",
    "operator": "[pipeline]",
}
"""Kind -> where its parts' settings stand, if not in [<kind>s.<name>]."""
SEVERAL: dict[str, type] = {
    "tasksets": declared.TasksetSection,
    "evaluations": declared.EvaluationSection,
    "stages": declared.StageSection,
}
"""Sections of which a run file may have more than one."""
SHARED = "rftstream.algorithms.settings"
"""Module with the settings that several algorithms have: they stand once, and not with each of them."""
NAMESPACE = {
    "Annotated": Annotated,
    "Literal": Literal,
    "Meta": Meta,
    "Any": Any,
    "CriticConfig": CriticConfig,
    "UpdateRequest": UpdateRequest,
    **{name: getattr(ranges, name) for name in ("AboveZero", "Count", "Fraction", "NotNegative", "Positive")},
    "JudgeCriterion": JudgeCriterion,
}


def sections() -> str:
    return "\n\n".join([*(_section(name, cls) for name, cls in _section_classes()), _pipeline()])


def _pipeline() -> str:
    """The one section that is a list of tables, whose other keys are those of operators."""
    about = _docs(declared.RunConfig)["pipeline"]
    rows = [("`op`", "text", "required", "A built-in operator, or `module:Class` of one's own.")]
    return f"### [[pipeline]]\n\n{about} [Data pipelines](data-pipelines.md) says what they do.\n\n{table(HEAD, rows)}"


def operators() -> str:
    """The built-in operators, with their sides and what they are for."""
    rows = [
        (spec.side, f"[`{name}`](configuration.md#operator-{name})", _purpose(spec.path))
        for name, spec in sorted(registry.table("operator").items(), key=lambda one: (one[1].side != "task", one[0]))
        if isinstance(spec, OperatorSpec)
    ]
    return table(("side", "operator", "what it does"), rows)


def _purpose(path: str) -> str:
    """The first paragraph on a part's module."""
    return first_paragraph(ast.get_docstring(tree(path.partition(":")[0])))


def part_settings() -> str:
    parts = [(kind, _part(kind, name, spec.path)) for kind in KINDS for name, spec in registry.table(kind).items()]
    first = next(number for number, (kind, _) in enumerate(parts) if kind == "algorithm")
    texts = [text for _, text in parts]
    return "\n\n".join([*texts[:first], _shared(), *texts[first:]])


def keys() -> set[str]:
    """Every `section.key`, for the docs that name one."""
    found = set()
    for name, cls in _section_classes():
        section = NAMES.get(name, name)
        found |= {f"{section}.{item.name}" for item in dataclasses.fields(cls)}
        for key, inner in SUBTABLES.get(name, {}).items():
            found |= {f"{section}.{key}.{item.name}" for item in dataclasses.fields(inner)}
    return found


def _section_classes() -> Iterator[tuple[str, type]]:
    hints = declared.RunConfig.__annotations__
    for item in dataclasses.fields(declared.RunConfig):
        if item.name in SEVERAL:
            yield item.name, SEVERAL[item.name]
        elif "Section" in hints[item.name] or item.name == "sampling":
            yield (
                item.name,
                Sampling if item.name == "sampling" else getattr(declared, hints[item.name].removesuffix(" | None")),
            )


def _section(name: str, cls: type) -> str:
    section = NAMES.get(name, name)
    rows = [_row(item, cls, section) for item in dataclasses.fields(cls) if (name, item.name) not in _subtable_keys()]
    found = find_class(tree(cls.__module__).body, cls.__name__)
    about = ast.get_docstring(found) if found is not None and cls is not Sampling else None
    heading = f"[[{section}]]" if name == "stages" else f"[{section}]"
    text = f"### {heading}\n\n" + (f"{' '.join(about.split())}\n\n" if about else "") + table(HEAD, rows)
    for key, inner in SUBTABLES.get(name, {}).items():
        about = first_paragraph(inner.__doc__)
        inner_rows = [_row(item, inner, f"{name}.{key}") for item in dataclasses.fields(inner)]
        text += f"\n\n### [{name}.{key}]\n\n{about}\n\n{table(HEAD, inner_rows)}"
    return text


def _subtable_keys() -> set[tuple[str, str]]:
    return {(section, key) for section, inner in SUBTABLES.items() for key in inner}


def _row(item: Any, cls: type, section: str) -> tuple[str, str, str, str]:
    hints = _hints(cls)
    kind = hints[item.name]
    words = _sampling_range(item.name) or in_words(kind) if cls is Sampling else in_words(kind)
    if item.default is not dataclasses.MISSING:
        default = f"`{toml(item.default)}`" if item.default is not None else "unset"
    elif item.default_factory is not dataclasses.MISSING:
        default = f"`{toml(item.default_factory())}`"
    else:
        default = "required"
    return f"`{item.name}`", words, default, _docs(cls).get(item.name) or _word(f"{section}.{item.name}")


def _word(key: str) -> str:
    if key not in WORDS:
        raise LookupError(f"{key}: has no line under it in the code; write one, or a meaning in docs/pages/words.py")
    return WORDS[key]


def _hints(cls: type) -> dict[str, Any]:
    import typing

    return typing.get_type_hints(cls, include_extras=True)


def _docs(cls: type) -> dict[str, str]:
    docs: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        found = None if one is object else find_class(tree(one.__module__).body, one.__name__)
        docs |= field_docs(found.body) if found else {}
    return docs


def _sampling_range(name: str) -> str | None:
    """What `config.check_sampling` says that it expects, asked with a value that is wrong for every setting."""
    for wrong in (-1, 0, 2):
        settings = dataclasses.replace(Sampling(), **{name: wrong}) if name != "stop" else Sampling()
        try:
            loader.check_sampling(settings, where="sampling")
        except ConfigError as error:
            expected = str(error).partition("expected ")[2].removesuffix(" (0 is off)")
            if str(error).startswith(f"sampling.{name}:"):
                kind = "integer" if isinstance(getattr(Sampling(), name), int) else "number"
                return f"{kind} {expected}"
    return None


def _shared() -> str:
    """Of algorithms; a class inherits from those before it, and shows only what it adds."""
    texts = []
    for node in (node for node in tree(SHARED).body if isinstance(node, ast.ClassDef)):
        texts.append(f"{ast.get_docstring(node)}\n\n{table(HEAD, list(_part_rows(node.body, node.name)))}")
    return "### settings that algorithms share\n\n" + "\n\n".join(texts)


def _inherits(where: str) -> list[str]:
    """Whose settings an algorithm shares, in words."""
    config_class = registry.import_path(where, what="docs").Config
    shared = [cls for cls in config_class.__mro__ if cls.__module__ == SHARED]
    return [(cls.__doc__ or "").partition(":")[0].rstrip(".").replace("Of", "of") for cls in reversed(shared)]


def _part(kind: str, name: str, where: str) -> str:
    module, _, thing = where.partition(":")
    source = tree(module)
    found = find_class(source.body, thing)
    about = first_paragraph(ast.get_docstring(source))
    if kind == "algorithm":
        own = find_class(found.body, "Config") if found else None
        rows = list(_part_rows(own.body if own else [], name))
        text = f"### algorithm `{name}`\n\n{about}\n\nIn `[algorithms.{name}]`: "
        text += f"the settings {', '.join(_inherits(where))}"
        return f"{text}; and\n\n{table(HEAD, rows)}" if rows else f"{text}."
    place = TABLES.get(kind, f"{kind}s")
    place = f"{place}.{name}" if kind not in ("taskset", "transport", "operator") else place
    rows = list(_part_rows(config_body(source, found), name))
    head = f"### {kind} `{name}`\n\n{about}"
    return f"{head}\n\nIn `[{place}]`:\n\n{table(HEAD, rows)}" if rows else f"{head} No settings."


def _part_rows(body: list[ast.stmt], part: str) -> Iterator[tuple[str, str, str, str]]:
    docs = field_docs(body)
    for item in body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        kind = eval(ast.unparse(item.annotation), dict(NAMESPACE))  # our own sources
        default = "required"
        if item.value is not None:
            text = ast.unparse(item.value)
            factory = text.startswith("field(")
            value = {} if factory else eval(text, dict(NAMESPACE))
            default = "unset" if value is None else f"`{toml(value)}`"
        yield (
            f"`{item.target.id}`",
            in_words(kind),
            default,
            docs.get(item.target.id) or _word(f"{part}.{item.target.id}"),
        )
