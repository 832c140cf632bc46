"""The policy's Python programs, run in the sandbox. No state is kept between calls."""

from __future__ import annotations

import functools
from typing import Annotated, Literal

from msgspec import Meta

from rftstream.config.secrets import reveal
from rftstream.environments.toolset.base import ToolBroken
from rftstream.errors import ConfigError
from rftstream.sandbox.base import MIB, Isolation, Limits, Outcome, SandboxBackend, SandboxError
from rftstream.sandbox.layers import missing_text
from rftstream.sandbox.local import default_backend
from rftstream.sandbox.remote import RemoteBackend
from rftstream.sandbox.run import ProgramResult, run_program

WHERE = "environments.tools.options.python"

_RUN = """
import ast, linecache, sys, traceback
name = "program"
linecache.cache[name] = (len(code), None, code.splitlines(True), name)
try:
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    space = {"__name__": "__main__"}
    exec(compile(tree, name, "exec"), space)
    value = None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), space)
    if value is not None:
        print(repr(value))
except SystemExit:
    raise
except BaseException as error:
    sys.stdout.flush()
    frames = error.__traceback__.tb_next
    if isinstance(error, SyntaxError) and error.filename == name:
        frames = None
    traceback.print_exception(type(error), error, frames)
    sys.exit(1)
"""
"""Runs the text `code` as a module, and prints the value of its last line, if that is an expression."""


class Python:
    """Run a Python program."""

    tool_name = "python"

    def __init__(
        self,
        *,
        wall_s: Annotated[float, Meta(gt=0)] = 5.0,
        cpu_s: Annotated[float, Meta(gt=0)] = 5.0,
        memory_mib: Annotated[int, Meta(ge=32)] = 256,
        disk_mib: Annotated[int, Meta(ge=1)] = 16,
        output_kib: Annotated[int, Meta(ge=1)] = 256,
        processes: Annotated[int, Meta(ge=1)] = 16,
        sandbox_url: str = "",
        auth_token: str = "",
        isolation: Literal["full", "shared_user"] = "full",
        wait_s: Annotated[float, Meta(gt=0)] = 60.0,
    ) -> None:
        self._limits = Limits(
            wall_s=wall_s, cpu_s=cpu_s, memory_bytes=memory_mib * MIB, disk_bytes=disk_mib * MIB,
            output_bytes=output_kib << 10, processes=processes,
        )  # fmt: skip
        self._server, self._isolation = None, Isolation(isolation)
        if sandbox_url:
            self._server = _server(sandbox_url, reveal({"auth_token": auth_token}, where=WHERE)["auth_token"], wait_s)
        elif (problem := missing_text(self._isolation)) is not None:
            raise ConfigError(f"{WHERE}: {problem}")

    def __call__(self, code: str) -> str:
        """Run a Python program. Return what it prints, and the value of its last line.

        Args:
            code: The program. Nothing is kept from earlier calls.
        """
        source = f"code = {code!r}\n{_RUN}"
        try:
            result = run_program(source, limits=self._limits, backend=self._server or default_backend(self._isolation))
        except SandboxError as error:
            raise ToolBroken(f"python: {error}") from None
        if result.outcome is Outcome.unscorable:
            raise ToolBroken(f"python: {result.reason}: {result.detail}")
        return _said(result)


@functools.cache
def _server(url: str, token: str, wait_s: float) -> SandboxBackend:
    """Return the back end of a server. All rollouts of this process share its connections."""
    return RemoteBackend(url, token=token, wait_s=wait_s)


def _said(result: ProgramResult) -> str:
    """Return the text for the model: the program's output, and the reason if it did not end by itself."""
    parts = [result.stdout.rstrip("\n")]
    if result.outcome is Outcome.failed:
        parts.append(result.stderr.strip("\n"))
        if result.reason != "crash" or not result.stderr.strip():
            parts.append("Error: " + result.detail.strip(" :\n"))
    return "\n".join(part for part in parts if part) or "(no output)"
