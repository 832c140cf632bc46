"""A sandbox for programs that a policy wrote, for rewards and for tools. See docs/sandbox.md.

    from rftstream.sandbox import run_program, run_function, run_check
    run_program("print(int(input()) + 1)", stdin="1", expected="2").outcome     # passed

A back end is any class that implements `base.SandboxBackend`. To add a language, add a line to `languages.LANGUAGES`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rftstream.sandbox.run import run_check, run_function, run_program

__all__ = ["run_check", "run_function", "run_program"]


def __getattr__(name: str) -> Any:
    """Return one of the three functions. Each is imported when it is first used."""
    if name in ("run_program", "run_function", "run_check"):
        from rftstream.sandbox import run

        return getattr(run, name)
    raise AttributeError(f"module 'rftstream.sandbox' has no attribute {name!r}")
