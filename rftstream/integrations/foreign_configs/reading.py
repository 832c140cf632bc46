"""Reads files of settings into flat dicts of dotted names: YAML and TOML; and the tree of a script in Python.

Several files of one system are one config; a setting that two of them give differently is an error.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rftstream.config import toml_files
from rftstream.errors import ConfigError

NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
INTERPOLATION = re.compile(r"\$\{(?:(?P<kind>oc\.\w+):)?(?P<name>[\w.]+)(?:,\s*(?P<default>[^{}]*))?\}")
MAGIC = re.compile(r"^([ \t]*)((?:\w+ *= *)?[!%](?!=).*(?:(?<=\\)\n.*)*|\?.*|[\w.]+\?{1,2} *)$", re.MULTILINE)
"""A line of a notebook that is no Python: a command of the shell or of IPython."""
OTHER_CELL = re.compile(r"\s*%%(?!capture\b|time\b|timeit\b|prun\b)")
"""The beginning of a cell that is no Python."""
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.BitOr: operator.or_,
}
COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.eq, ast.IsNot: operator.ne,
    ast.In: lambda one, all_: one in all_, ast.NotIn: lambda one, all_: one not in all_,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def tables_of(system: str) -> dict[str, Any]:
    """Return what the names of another system mean here: the tables of its file beside this module."""
    return toml_files.read_toml(Path(__file__).with_name(f"{system}.toml"))


def lifted(settings: dict[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Return TRL's settings with those that stand in a table for the model or for sampling under their own names."""
    for table in ("model_init_kwargs", "generation_kwargs"):
        if isinstance(inner := settings.get(table), dict):
            own = {name: value for name, value in inner.items() if name in known}
            ends = {f"{table}.{name}": value for name, value in inner.items() if name in ("stop", "stop_strings")}
            rest = {name: one for name, one in inner.items() if name not in own and f"{table}.{name}" not in ends}
            settings = {**settings, **own, **ends, table: rest}
    return settings


def read_text(path: Path) -> str:
    """Return the text of a file. ConfigError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: {found}; expected a config as UTF-8") from None


def read_python(path: Path) -> tuple[str, ast.Module]:
    """Return the text of a script, or of the code in a notebook, and its tree. ConfigError if it is not Python."""
    text = read_text(path)
    try:
        if path.suffix == ".ipynb":
            cells = ("".join(one["source"]) for one in json.loads(text)["cells"] if one["cell_type"] == "code")
            text = "\n".join(one for one in cells if not OTHER_CELL.match(one))
        try:
            return text, ast.parse(text, path.name)
        except SyntaxError:
            if not MAGIC.search(text):
                raise
            text = MAGIC.sub(r"\1pass", text)  # where it was a block's only statement, one stays
            return text, ast.parse(text, path.name)
    except (SyntaxError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: not Python: {error}; name a training script, or TRL's YAML config") from None


def read_yaml(path: Path, *, nested: bool = False) -> dict[str, Any]:
    """Return the settings of a YAML file under dotted names, or `nested` as they are. ConfigError if it is no
    mapping."""
    import yaml  # type: ignore[import-untyped]

    try:
        values = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: not YAML: {error}; name the config that the system itself reads") from None
    if not isinstance(values, dict):
        found = "empty" if values is None else f"a {type(values).__name__}"
        raise ConfigError(f"{path}: its YAML is {found}, expected a mapping of settings; is it the right file?")
    return {name: _number(value) for name, value in (values if nested else flat(values)).items()}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under dotted names. Lists are values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def merged(files: Sequence[tuple[Path, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the settings of all files. ConfigError if two files give a setting different values."""
    found: dict[str, Any] = {}
    sources: dict[str, Path] = {}
    for path, values in files:
        for name, value in values.items():
            if name in found and found[name] != value:
                raise ConfigError(
                    f"{name}: {sources[name]} says {found[name]!r} and {path} says {value!r}; expected files of one "
                    "run: remove one of the two"
                )
            found[name], sources[name] = value, path
    return found


def interpolated(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the `${other.setting}` of OmegaConf filled in, as far as they are known, and defaults of
    environment variables."""

    def value_of(match: re.Match[str]) -> Any:
        kind, name, default = match["kind"], match["name"], match["default"]
        if kind == "oc.env":
            return "~" if name == "HOME" else match[0] if default is None else parse_value(default)
        found = given.get(name, defaults.get(name, match[0] if default is None else parse_value(default)))
        return (
            INTERPOLATION.sub(lambda one: str(value_of(one)), found)
            if isinstance(found, str) and found != match[0]
            else found
        )

    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(one) for one in value]
        if not isinstance(value, str):
            return value
        whole = INTERPOLATION.fullmatch(value)
        return value_of(whole) if whole else INTERPOLATION.sub(lambda one: str(value_of(one)), value)

    return {name: filled(value) for name, value in given.items()}


def parse_value(text: str) -> Any:
    """Return the value of an override. Text that is not YAML is returned as a string."""
    import yaml

    if text.startswith("{"):  # hydra's mappings need no space
        text = re.sub(r"(\w):(?=[^\s/])", r"\1: ", text)
    try:
        return _number(yaml.safe_load(text))
    except yaml.YAMLError:
        return text


def arithmetic(node: ast.expr) -> Any:
    """Return the value of an expression of constants, sums, products and so on. ValueError for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -arithmetic(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](arithmetic(node.left), arithmetic(node.right))
    raise ValueError(ast.unparse(node))


def _number(value: Any) -> Any:
    """Return `1e-6` as a number, in mappings, too. YAML 1.1 reads it as a string."""
    if isinstance(value, dict):
        return {name: _number(one) for name, one in value.items()}
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value
