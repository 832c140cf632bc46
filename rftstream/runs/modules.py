"""The user's modules that a run uses: their places, whether one hides another, and their changes.

They are found without being imported. Modules that they import from the same folders are included, since a change there
changes a reward, too. `modules.json` in the run folder holds their digests from the last start, so that `resume` can
report that a reward has changed since it scored rollouts. Without that file, nothing is reported.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from rftstream.config.parts.own_code import MOST, imported_names, is_below, module_spec
from rftstream.config.parts.part_names import named_parts
from rftstream.config.sections import RunConfig
from rftstream.runs.folder import RunFolder, naming, shown_path


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModule:
    """A user's module that a run file names, or that such a module imports. `find_modules` makes it."""

    name: str
    file: Path
    digest: str
    """SHA-256 of its source, as hex digits."""
    hides: Path | None
    """Another file of the same name, beside the run file or in the current folder, that differs from this one."""

    @property
    def warning(self) -> str | None:
        """Return a warning if the module hides another one, else None."""
        if self.hides is None:
            return None
        return (
            f"{self.name}: taken from {shown_path(self.file)}; {shown_path(self.hides)} has other code, which is not "
            "used; remove or rename one of them"
        )


def find_modules(config: RunConfig) -> list[OwnModule]:
    """Return the modules that the run file names, with the modules that they import from its folder or the current one.
    A missing module is left out; its import will give the error."""
    base = Path(config.base).resolve()
    roots = (base, Path.cwd().resolve())
    found: dict[str, OwnModule] = {}
    wanted = [name.partition(":")[0] for _, _, name in named_parts(config) if ":" in name]
    while wanted and len(found) < MOST:
        name = wanted.pop(0)
        spec = None if name in found or name.partition(".")[0] == "rftstream" else module_spec(name, None)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        file = Path(spec.origin).resolve()
        try:
            source = file.read_bytes()
        except OSError:
            continue
        others = [
            Path(one.origin).resolve() for root in roots if (one := module_spec(name, [str(root)])) and one.origin
        ]
        digest = hashlib.sha256(source).hexdigest()
        hides = next((other for other in others if other != file and not _is_copy(source, other)), None)
        found[name] = OwnModule(name=name, file=file, digest=digest, hides=hides)
        if is_below(file, roots):
            package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
            wanted += [one for one in imported_names(source, package) if _is_own(one, roots)]
    return [found[name] for name in sorted(found)]


def write_modules(config: RunConfig, folder: RunFolder) -> None:
    """Write the modules' digests beside the run's config, whole or not at all."""
    modules = {module.name: {"file": str(module.file), "sha256": module.digest} for module in find_modules(config)}
    partial = folder.modules_file.with_suffix(f".{os.getpid()}.partial")
    with naming(folder.modules_file):
        partial.write_text(json.dumps(modules, indent=1) + "\n", encoding="utf-8")
    partial.replace(folder.modules_file)


def changes_of_modules(config: RunConfig, folder: RunFolder) -> list[str]:
    """Return a line for each module that has changed since the last start of the run; none if the run recorded no
    digests."""
    try:
        before = json.loads(folder.modules_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    lines = []
    for module in find_modules(config):
        then = before.get(module.name) if isinstance(before, dict) else None
        if not isinstance(then, dict):
            continue
        if then.get("sha256") != module.digest:
            moved = "" if then.get("file") == str(module.file) else f", before it was {then.get('file')}"
            lines.append(
                f"changed: the code of {module.name} in {shown_path(module.file)}{moved}; it is taken from now on, "
                "and what is there was made by the code before"
            )
        elif then.get("file") != str(module.file):
            lines.append(f"changed: {module.name} is taken from {shown_path(module.file)}, with the same code")
    return lines


def edited_modules(folder: RunFolder) -> list[str]:
    """Return a line for each module whose file has other code by now than at the newest start of the run."""
    try:
        recorded = json.loads(folder.modules_file.read_text(encoding="utf-8"))
        files = {name: (Path(one["file"]), one["sha256"]) for name, one in recorded.items()}
        edited = [name for name, (file, then) in files.items() if hashlib.sha256(file.read_bytes()).hexdigest() != then]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
    return [
        f"{name} in {shown_path(files[name][0])}, since the run was started: ctrl-C and `rftstream resume` take it; "
        "until then only a scoring process that is replaced does"
        for name in edited
    ]


def other_code(before: RunFolder, after: RunFolder) -> list[str]:
    """Return a line for each module, such as a reward's, whose code differs between the last starts of two runs."""
    then, now = (_recorded(folder) for folder in (before, after))
    return [
        f"code of {name} {then[name][:8]} -> {now[name][:8]}"
        for name in then
        if now.get(name, then[name]) != then[name]
    ]


def _recorded(folder: RunFolder) -> dict[str, str]:
    """Return module -> digest at the last start; empty if the run recorded none."""
    try:
        found = json.loads(folder.modules_file.read_text(encoding="utf-8"))
        return {name: str(one["sha256"]) for name, one in found.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


# ------------------------------------------------------------------------------------------------ finding


def _is_copy(source: bytes, there: Path) -> bool:
    try:
        return there.read_bytes() == source
    except OSError:
        return False


def _is_own(name: str, roots: tuple[Path, ...]) -> bool:
    spec = module_spec(name, None)
    return spec is not None and spec.origin is not None and is_below(Path(spec.origin).resolve(), roots)
