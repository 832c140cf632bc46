"""What tests ask of the source files of the package. Each file is parsed and walked once a process."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARY = ("rftstream", "workers", "schemas")


@dataclass(frozen=True)
class Import:
    module: str
    """Ours, in dots."""
    name: str
    """What it imports, with the name taken from it: `from a.b import c` is a.b.c."""
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.name}"


@dataclass(frozen=True)
class Call:
    function: str
    """Its name in dots, as it is written: `torch.load`. Of what is no name it has "…": `….read`."""
    line: int
    keywords: Mapping[str, object]
    """Constants that are passed by name."""


@dataclass(frozen=True)
class Class:
    name: str
    num_methods: int
    at_top: bool


@dataclass(frozen=True)
class Definition:
    """A class or function that stands in no other function."""

    name: str
    """In dots, from the top of the file."""
    line: int
    bases: tuple[str, ...] | None
    """Of a class."""
    documented: bool


@dataclass(frozen=True)
class Source:
    """One file. It keeps what the tests look for and not the tree, which is large."""

    path: Path
    module: str
    """In dots."""
    docstring: str
    lines: tuple[str, ...]
    definitions: tuple[Definition, ...]
    imports: tuple[Import, ...]
    """Those in functions and under TYPE_CHECKING, too."""
    classes: tuple[Class, ...]
    calls: tuple[Call, ...]
    strings: tuple[tuple[int, str], ...]
    """Line and text of each literal."""
    attributes: tuple[tuple[int, str], ...]
    """Line and name of each attribute that is asked for."""
    docstrings: tuple[tuple[int, str], ...]
    """Line and text of each string that is a statement, below the module's own docstring."""
    num_code_lines: int
    """Without blank lines, comments and docstrings."""


def source_files(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def sources(*packages: str) -> Iterable[Source]:
    return (read_source(path) for path in source_files(*(packages or LIBRARY)))


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def read_source(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text, filename=str(path))
    module = dotted(path)
    imports: list[Import] = []
    classes: list[Class] = []
    calls: list[Call] = []
    strings: list[tuple[int, str]] = []
    attributes: list[tuple[int, str]] = []
    docstrings: list[tuple[int, str]] = []
    no_code: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            no_code.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        match node:
            case ast.Expr(value=ast.Constant(value=str(said))) if node is not tree.body[0]:
                docstrings.append((node.lineno, said))
            case ast.Constant(value=str()):
                strings.append((node.lineno, node.value))
            case ast.Attribute():
                attributes.append((node.lineno, node.attr))
            case ast.Call():
                constants = {
                    word.arg: word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)
                }
                calls.append(Call(name_of(node.func), node.lineno, constants))
            case ast.ClassDef():
                num_methods = sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)
                classes.append(Class(node.name, num_methods, node in tree.body))
            case ast.Import():
                imports += (Import(module, alias.name, node.lineno) for alias in node.names)
            case ast.ImportFrom():
                assert not node.level, f"{path}:{node.lineno}: relative import; name the whole module"
                imports += (Import(module, f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
    lines = tuple(text.splitlines())
    is_code = (bool(line.strip()) and not line.lstrip().startswith("#") for line in lines)
    num_code_lines = sum(code and number not in no_code for number, code in enumerate(is_code, 1))
    return Source(
        path, module, ast.get_docstring(tree) or "", lines, tuple(definitions_in(tree.body)), tuple(imports),
        tuple(classes), tuple(calls), tuple(strings), tuple(attributes), tuple(docstrings), num_code_lines,
    )  # fmt: skip


def definitions_in(body: list[ast.stmt], prefix: str = "") -> Iterator[Definition]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            is_class, documented = isinstance(node, ast.ClassDef), ast.get_docstring(node) is not None
            bases = tuple(ast.unparse(base) for base in node.bases) if is_class else None
            yield Definition(f"{prefix}{node.name}", node.lineno, bases, documented)
            if is_class:
                yield from definitions_in(node.body, f"{prefix}{node.name}.")


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{name_of(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "…"


@functools.cache
def all_imports() -> tuple[Import, ...]:
    return tuple(one for source in sources() for one in source.imports)


def lies_in(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)
