"""Modules that a user's module imports from its own folder: a change there changes what it does, too. They are found
without being imported."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

MOST = 200
"""Most modules that are looked at; a reward has fewer."""

_NOT_OWN = ("site-packages", "dist-packages")


def imported_sources(name: str, file: Path) -> list[bytes]:
    """Return the sources of the modules that this one imports from the folder that holds it or its package, directly or
    not, ordered by name. None of an installed package and of rftstream itself."""
    root = file.parent
    for _ in range(name.count(".") + (file.name == "__init__.py")):
        root = root.parent
    if name.partition(".")[0] == "rftstream" or not is_below(file, (root,)):
        return []
    found: dict[Path, tuple[str, bytes]] = {}
    wanted = [(name, file)]
    while wanted and len(found) < MOST:
        name, file = wanted.pop(0)
        if file in found:
            continue
        try:
            source = file.read_bytes()
        except OSError:
            continue
        found[file] = name, source
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for one in imported_names(source, package):
            spec = module_spec(one, [str(root)])
            if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
                wanted.append((one, Path(spec.origin)))
    return [source for _, source in sorted([*found.values()][1:])]


def named_sources(named: str, folders: Sequence[str]) -> list[bytes]:
    """Return the sources of the user's code that `module:Thing` or `file.py:Thing` names: of its module, and of what
    that imports from its own folder. The code need not be importable here. It is looked up in the folders, then as
    imports are; none is found of rftstream itself."""
    module, _, _ = named.rpartition(":")
    if not module or module.partition(".")[0] == "rftstream":
        return []
    places = [*folders, *sys.path]
    if module.endswith(".py"):
        files = [Path(folder) / Path(module).expanduser() for folder in places]
        file, module = next((one for one in files if one.is_file()), files[0]), Path(module).stem
    else:
        spec = module_spec(module, places)
        file = Path((spec and spec.origin) or "")
    try:
        return [file.read_bytes(), *imported_sources(module, file)]
    except OSError:
        return []


def module_spec(name: str, path: list[str] | None) -> ModuleSpec | None:
    """Return where a module is, in these folders (None: in all), without importing its package."""
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        try:
            spec = PathFinder.find_spec(".".join(parts[:number]), path)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def is_below(file: Path, roots: tuple[Path, ...]) -> bool:
    """Return whether a file lies in one of the folders, and in no folder of installed packages."""
    return any(file.is_relative_to(root) for root in roots) and not any(part in _NOT_OWN for part in file.parts)


@functools.lru_cache(maxsize=1024)
def imported_names(source: bytes, package: str) -> tuple[str, ...]:
    """Return the names of modules that a source imports, and names that may be modules of a package."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*(above if package else []), *([node.module] if node.module else [])])
            if module:
                found.append(module)
            found += [f"{module}.{name.name}" if module else name.name for name in node.names]
    return tuple(found)
