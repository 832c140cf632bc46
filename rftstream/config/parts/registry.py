"""The one lookup behind every table of parts: a built-in name, or `module:Thing` of the user's own."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import json
import math
import pkgutil
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rftstream.config import aliases
from rftstream.config.parts.part_specs import PartSpec
from rftstream.errors import ConfigError, RftError

Spec = TypeVar("Spec", bound=PartSpec)

MANY = 12
"""Most names that an error lists in full. With more, it only proposes the nearest."""

_info_of_class = functools.cache(msgspec.inspect.type_info)
"""Cached, since msgspec evaluates every annotation anew, which takes milliseconds for a whole run file."""

_SECTIONS = (msgspec.inspect.DataclassType, msgspec.inspect.StructType)

KINDS = {
    "transport": "rftstream.transport:TRANSPORTS",
    "policy": "rftstream.policies:POLICIES",
    "backend": "rftstream.backends:BACKENDS",
    "algorithm": "rftstream.algorithms:ALGORITHMS",
    "reward": "rftstream.rewards:REWARDS",
    "environment": "rftstream.environments:ENVIRONMENTS",
    "taskset": "rftstream.data.tasksets:TASKSETS",
    "operator": "rftstream.data.operators:OPERATORS",
}
"""Kind -> where its table is."""


def table(kind: str) -> dict[str, PartSpec]:
    """Return the built-in parts of a kind by their names. None of them is imported."""
    return import_path(KINDS[kind], what=kind)  # type: ignore[no-any-return]


def built_in(spec_type: type[Spec]) -> dict[str, Spec]:
    """Return the table of a kind with the type of its records."""
    return table(spec_type.kind)  # type: ignore[return-value]


def spec(spec_type: type[Spec], name: str, *, where: str = "") -> Spec:
    """Return what a part declares. A built-in one is not imported; errors are those of `resolve`."""
    known = built_in(spec_type)
    return known[name] if name in known else _declared(spec_type, resolve(spec_type.kind, name, where=where), name)


def find_spec(spec_type: type[Spec], name: str) -> Spec:
    """Return what a part declares, or the defaults if there is no such part. The code that uses the part reports the
    error."""
    known = built_in(spec_type)
    if name in known:
        return known[name]
    try:
        part = resolve(spec_type.kind, name)
    except RftError:
        return spec_type(name)
    return _declared(spec_type, part, name)


def _declared(spec_type: type[Spec], part: Any, name: str) -> Spec:
    """Return what a user's part declares by its attributes, which may be inherited from a built-in part."""
    records = {record.path: record for record in built_in(spec_type).values()} if spec_type.is_inherited else {}
    bases = (f"{base.__module__}:{base.__qualname__}" for base in getattr(part, "__mro__", ()))
    inherited = next((records[base] for base in bases if base in records), spec_type(name))
    names = [field.name for field in dataclasses.fields(spec_type) if field.name != "path"]
    values = {key: getattr(part, key, getattr(inherited, key)) for key in names}
    return convert({"path": name, **values}, spec_type, where=name)  # type: ignore[no-any-return]


def resolve(kind: str, name: str, *, where: str = "") -> Any:
    """Return the class or function behind `name`. ConfigError names the nearest known name."""
    known = table(kind)
    where = where or kind
    if ":" in name:
        return import_path(name, what=where)
    if name not in known:
        raise ConfigError(f"{where}: unknown {name!r}; {suggest(name, known)} (or 'module:Name' of your own)")
    return import_path(known[name].path, what=where)


def build_config(part: Any, options: Mapping[str, Any] | None, *, where: str) -> Any:
    """Build the part's frozen `Config` from its table in the run file. Unknown keys and bad values are ConfigErrors."""
    config_type = getattr(part, "Config", None)
    if config_type is None:
        if options:
            raise ConfigError(f"{where}: has no options, got {', '.join(sorted(options))}; remove them")
        return None
    return convert(dict(options or {}), config_type, where=where)


def convert(values: Any, target: Any, *, where: str) -> Any:
    """Convert plain values to a dataclass, strictly. Errors name the key as the user wrote it."""
    check_keys(values, target, where)
    check_numbers(values, where)
    try:
        return msgspec.convert(values, target)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `")
        of_names = path.startswith("key` in `")  # the name is wrong, not the values below it
        keys = re.findall(r"\w[\w-]*", path.removeprefix("key` in `").rstrip("`").removeprefix("$"))
        place = ".".join(part for part in (where, *keys) if part)
        if of_names:
            raise ConfigError(_wrong_name(place, text, values, target, keys)) from None
        raise ConfigError(f"{place}: {_explain(text, values, target, keys)}") from None


def _wrong_name(place: str, text: str, values: Any, target: Any, keys: list[str]) -> str:
    """Say which section has a wrong name, for tables whose names users choose."""
    wanted: Any = _type_info(target)
    for key in keys:
        values, wanted = values[key], _fields(wanted)[key]
    pattern = re.search(r"matching regex '(.*)'", text)
    wrong = next((name for name in values if pattern and not re.search(pattern[1], name)), "")
    return f'{place}."{wrong}": got {wrong!r} as the name of a section, expected {_form(wanted.key_type, text)}'


def _holds_sections(wanted: Any) -> bool:
    item = getattr(wanted, "item_type", None)
    return isinstance(item, msgspec.inspect.DictType | msgspec.inspect.AnyType) or _dataclass_info(item) is not None


def _form(wanted: Any, text: str) -> str:
    """Return the form that a text must have. Some fields have it in words."""
    kinds = wanted.types if isinstance(wanted, msgspec.inspect.UnionType) else (wanted,)
    for kind in kinds:
        if isinstance(kind, msgspec.inspect.Metadata) and "description" in (kind.extra_json_schema or {}):
            return str((kind.extra_json_schema or {})["description"])
    pattern = re.search(r"matching regex '(.*)'", text)
    return f"text of the form {pattern[1] if pattern else text}"


def _explain(text: str, values: Any, target: Any, keys: list[str]) -> str:
    """Return what was found and what was expected, in terms of the run file."""
    wanted: Any = _type_info(target)
    found = values
    for key in keys:
        inner = getattr(wanted, "value_type", getattr(wanted, "item_type", wanted))
        wanted = _fields(wanted).get(key, wanted) if _dataclass_info(wanted) else inner
        if isinstance(found, dict):
            found = found.get(key, found)
        elif isinstance(found, list) and key.isdigit():
            found = found[int(key)]
    plain = wanted.type if isinstance(wanted, msgspec.inspect.Metadata) else wanted
    kinds = plain.types if isinstance(plain, msgspec.inspect.UnionType) else (plain,)
    choices = [str(value) for kind in kinds if isinstance(kind, msgspec.inspect.LiteralType) for value in kind.values]
    if choices and (len(kinds) == 1 or isinstance(found, str)):
        return f"got {found!r}; {suggest(str(found), choices)}"
    if "matching regex '" in text:
        return f"got {found!r}, expected {_form(wanted, text)}"
    expected = re.sub(r"^Expected ", "", text).partition(", got")[0]
    if text.startswith("Object missing required field"):
        return f"missing {text.rpartition(' ')[2].strip('`')!r}; it has no default"
    if isinstance(found, dict) and expected.startswith("`array") and _holds_sections(plain):
        return f"got a section, expected a list; of sections each begins with two brackets, [[{'.'.join(keys)}]]"
    expected = re.sub(r"`(.+?)`", lambda types: _types_in_words(types[1], choices), expected)
    expected = re.sub(r"(\d)\.0\b", r"\1", expected)
    if expected == IN_TOML["array"] and isinstance(found, str):
        expected += f", as in {json.dumps([found], ensure_ascii=False)}"
    shown = str(found).lower() if isinstance(found, bool) else repr(found)
    return f"got {shown}, expected {expected[:1].lower() + expected[1:]}"


IN_TOML = {
    "object": "a section", "array": "a list", "str": "text", "int": "a whole number", "float": "a number",
    "bool": "true or false",
}  # fmt: skip
"""msgspec's name of a type -> its name for users of TOML."""


def _types_in_words(types: str, choices: list[str]) -> str:
    """Return `a whole number or 'auto'` for `int | str | null`, of which the texts are these choices, if any."""
    words = [IN_TOML.get(name, name) for name in types.split(" | ") if name != "null"]
    texts = [f"'{choice}'" for choice in choices] or ["text"]
    return " or ".join(word for one in words for word in (texts if one == "text" else [one]))


def check_keys(values: Any, target: Any, where: str, root: Any = None) -> None:
    """Raise ConfigError for keys that no dataclass along the path has. `root` is another place where they may
    belong."""
    root = target if root is None else root
    for key, value, inner in _pairs(values, target):
        place = f"{where}.{key}" if where else key
        if inner is None:
            if where:
                raise ConfigError(f"{place}: unknown key; {_suggest_key(key, target, root)}")
            raise ConfigError(f"{place}: unknown section; {_suggest_section(key, target)}")
        check_keys(value, inner, place, root)


def check_numbers(values: Any, where: str) -> None:
    """Raise ConfigError for numbers that no setting can have. TOML has nan and inf, and Python's integers have any
    size, but no record of the log can hold them."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            check_numbers(value, f"{where}.{key}" if where else str(key))
    elif isinstance(values, (list, tuple)):
        for number, value in enumerate(values):
            check_numbers(value, f"{where}.{number}")
    elif isinstance(values, float) and not math.isfinite(values):
        raise ConfigError(f"{where}: got {values}, expected a finite number")
    elif isinstance(values, int) and not -(2**63) <= values < 2**63:
        raise ConfigError(f"{where}: got {values}, expected a whole number of at most 64 bits")


def near_file(path: Path) -> str:
    """Return `; did you mean train.jsonl?` if a file beside a missing one has a similar name, or the command of
    `write_train.py` that writes it; else nothing."""
    if path.exists() or not path.parent.is_dir():
        return ""
    if (writer := path.with_name(f"write_{path.stem}.py")).is_file():
        return f"; `python {shlex.quote(str(writer))}` writes it"
    beside = [one.name for one in path.parent.iterdir()]
    near = [
        one
        for one in difflib.get_close_matches(path.name, beside)
        if difflib.get_close_matches(path.stem, [Path(one).stem])  # the same ending alone is not similar
    ]
    return f"; did you mean {near[0]}?" if near else ""


def suggest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """Return the known names and the nearest one: `known: a, b, c; did you mean 'b'?`."""
    spelt = {one.lower(): one for one in known}
    near = [spelt[match] for match in difflib.get_close_matches(name.lower(), list(spelt), n=3)]
    near.sort(key=lambda one: sorted(one) != sorted(name))  # swapped letters are the likeliest typing error
    text = "known: " + ", ".join(sorted(known)) if known else "none are known"
    if not near:
        return text
    return f"did you mean {near[0]!r}?" if len(known) > MANY else f"{text}; did you mean {near[0]!r}?"


def _suggest_key(key: str, target: Any, root: Any) -> str:
    """Propose a key by its meaning in other tools, in this section or another, else by its spelling."""
    known, meant = _fields(target), _meant(key, root)
    here = dict.fromkeys(one.rpartition(".")[2] for one in meant)
    if here and all(one in known for one in here):
        return f"did you mean {' or '.join(map(repr, here))}?"
    if meant and not difflib.get_close_matches(key, list(known), n=1, cutoff=0.9):
        return f"did you mean {' or '.join(meant)}?"
    return suggest(key, known)


def _suggest_section(key: str, target: Any) -> str:
    """Propose a section that has a setting of this name, else the section with a similar spelling."""
    places = _meant(key, target)
    return f"did you mean {' or '.join(places)}?" if places else suggest(key, _fields(target))


def _meant(key: str, root: Any) -> list[str]:
    """Return settings with this name in other sections, and settings with this name in other tools."""
    places = [f"{section}.{key}" for section, inner in _fields(root).items() if key in _fields(inner)]
    return places + list(aliases.SETTINGS.get(key.lower().replace("-", "_"), ()))


def _fields(target: Any) -> dict[str, Any]:
    info = _dataclass_info(target)
    return {field.encode_name: field.type for field in info.fields} if info else {}


def _dataclass_info(target: Any) -> Any:
    info: Any = _type_info(target)
    if isinstance(info, msgspec.inspect.Metadata):
        info = info.type
    if isinstance(info, msgspec.inspect.UnionType):
        info = next((one for one in info.types if isinstance(one, _SECTIONS)), None)
    return info if isinstance(info, _SECTIONS) else None


def _type_info(target: Any) -> msgspec.inspect.Type:
    return target if isinstance(target, msgspec.inspect.Type) else _info_of_class(target)


def _pairs(values: Any, target: Any) -> list[tuple[str, Any, Any]]:
    info = _dataclass_info(target)
    if info is not None and isinstance(values, dict):
        known = {field.encode_name: field.type for field in info.fields}
        return [(key, value, known.get(key)) for key, value in values.items()]
    plain = _type_info(target)
    if isinstance(plain, msgspec.inspect.DictType) and isinstance(values, dict):
        return [(key, value, plain.value_type) for key, value in values.items()]
    if isinstance(plain, msgspec.inspect.VarTupleType) and isinstance(values, list):
        return [(str(number), value, plain.item_type) for number, value in enumerate(values)]
    return []


def import_path(path: str, *, what: str) -> Any:
    """Import the object that `module:Thing` names. ConfigError if it is not there, or if its module fails. `what` names
    the object in errors."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        near = difflib.get_close_matches(error.name or "", [one.name for one in pkgutil.iter_modules()], 1, 0.8)
        where = f"did you mean {near[0]}?" if near else "is it installed, beside the run file, or in this folder?"
        if module_name.endswith(".py"):
            where = f"a module has no ending: {module_name.removesuffix('.py')}:{name}"
        raise ConfigError(f"{what}: cannot import {path!r}: no module named {error.name!r}; {where}") from None
    except (RftError, MemoryError):
        raise
    except Exception as error:  # the user's code may raise anything, and another try would not help
        raise ConfigError(f"{what}: importing {path!r} failed: {type(error).__name__}: {error}; mend it") from error
    try:
        return getattr(module, name)
    except AttributeError:
        there = [one for one, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
        raise ConfigError(f"{what}: module {module_name!r} has no {name!r}; {suggest(name, there)}") from None
