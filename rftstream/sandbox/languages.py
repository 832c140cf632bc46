"""Languages of programs: how each is compiled and run. Compilers run in the sandbox as well."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rftstream.errors import ConfigError


def _plain_name(name: str) -> Callable[[str], str]:
    return lambda source: name


def _java_name(source: str) -> str:
    """Return the file name that Java requires for a class. The time is linear, even for a hostile text."""
    found = re.search(r"\bpublic\s++(?:final\s++|abstract\s++)*+class\s++(\w{1,60}+)\b", source) or re.search(
        r"\bclass\s++(\w{1,60}+)\b[^{]{0,1000}+\{(?:(?!\bclass\b).)*?\bvoid\s++main\b", source, re.DOTALL
    )
    return f"{found.group(1) if found else 'Main'}.java"


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """A language. In its commands `{file}` is the name of the source, and `{stem}` the name without its extension."""

    name_file: Callable[[str], str]
    """Returns the file name for a program's text."""
    compile: tuple[str, ...] = ()
    """Compile command; empty if the language needs none."""
    run: tuple[str, ...] = ()
    """Command that runs the program; empty for Python, which the warm interpreter runs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    bounds_addresses: bool = True
    """Whether the address space may be limited. Some interpreters reserve more than they use."""


LANGUAGES = {
    "python": Language(name_file=_plain_name("program.py")),
    "c": Language(
        name_file=_plain_name("main.c"), compile=("gcc", "-O2", "-o", "main", "{file}", "-lm"), run=("./main",)
    ),
    "cpp": Language(
        name_file=_plain_name("main.cpp"), compile=("g++", "-O2", "-std=c++17", "-o", "main", "{file}"), run=("./main",)
    ),
    "java": Language(
        name_file=_java_name,
        compile=("javac", "-J-XX:+UseSerialGC", "-J-XX:TieredStopAtLevel=1", "{file}"),
        run=("java", "-XX:+UseSerialGC", "-Xss64m", "-Xshare:auto", "{stem}"),
        bounds_addresses=False,
    ),
    "javascript": Language(
        name_file=_plain_name("main.js"), run=("node", "--stack-size=32000", "{file}"), bounds_addresses=False
    ),
    "bash": Language(name_file=_plain_name("main.sh"), run=("bash", "{file}")),
}
"""Name -> language."""

_ALSO_CALLED = {
    "python": "py python3 py3 pypy pypy3",
    "cpp": "c++ cc cxx c++17 c++20 cpp17",
    "javascript": "node js",
    "bash": "sh shell",
}
ALIASES = {alias: name for name, aliases in _ALSO_CALLED.items() for alias in aliases.split()}


def find_language(name: str) -> Language:
    """Return a language by its name. ConfigError if it is unknown."""
    return LANGUAGES[language_name(name)]


def language_name(name: str) -> str:
    """Return the canonical name of a language, which may have several names. ConfigError if it is unknown."""
    lower = name.strip().lower()
    found = ALIASES.get(lower, lower)
    if found not in LANGUAGES:
        raise ConfigError(f"language: unknown {name!r}; known: {', '.join(sorted(LANGUAGES))}")
    return found
