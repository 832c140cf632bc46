"""The tool `python`: programs of the policy in the sandbox."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.assistant import AssistantMessage, ToolCall
from rftstream.environments.tools import ToolEnvironment
from rftstream.environments.toolset.base import ToolBroken
from rftstream.environments.toolset.python import Python
from rftstream.errors import ConfigError
from rftstream.sandbox import layers
from tests.suite.each import each
from tests.unit.environments.test_tools import PROBLEM

pytestmark = pytest.mark.skipif(layers.missing_text() is not None, reason="this machine has no sandbox")

QUICK = {"wall_s": 30.0, "cpu_s": 30.0}


@each(
    ("code", "answer"),
    [
        ("6 * 7", "42"),
        ("x = 6\nprint('x is', x)\nx * 7", "x is 6\n42"),
        ("x = 1", "(no output)"),
        ("'a\\nb'", "'a\\nb'"),
        ("print('a')", "a"),
        ("import sys; sys.exit()", "(no output)"),
        ("if __name__ == '__main__':\n    print(1)", "1"),
        ('"""quotes\n\'\'\' \\" \\\\"""', "'quotes\\n\\'\\'\\' \" \\\\'"),
    ],
)
def test_what_is_printed_and_the_last_value(code: str, answer: str) -> None:
    assert Python(**QUICK)(code) == answer


@each(
    ("code", "begin", "end"),
    [
        ("def f(n):\n    return 1 / n\nprint('so far')\nf(0)", "so far\nTraceback (most recent call last):\n"
         '  File "program", line 4, in <module>\n    f(0)\n',
         "ZeroDivisionError: division by zero"),
        ("print(", '  File "program", line 1\n    print(\n', "SyntaxError: '(' was never closed"),
        ("(" * 100_000, '  File "program", line 1\n', "too many nested parentheses"),
        ("-" * 100_000 + "1", "", "Error"),
        ("\0", "", "null bytes"),
        ("import os; os._exit(3)", "Error: it ended with status 3", ""),
        ("open('/etc/shadow').read()", "Traceback", "No such file or directory: '/etc/shadow'"),
    ],
)  # fmt: skip
def test_what_is_told_of_errors(code: str, begin: str, end: str) -> None:
    said = Python(**QUICK)(code)
    assert said.startswith(begin)
    assert end in said.splitlines()[-1], said[-300:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "code", "reason"),
    [
        ({"wall_s": 0.3}, "print('before', flush=True)\nimport time; time.sleep(1000)", "it took longer than 0.3 s"),
        ({"cpu_s": 0.5}, "print('before', flush=True)\nwhile True: pass", "it used more than 0.5 s of processor time"),
        ({"output_kib": 1}, "print('before')\nwhile True: print('x')", "it wrote more than 1,024 bytes"),
    ],
)
def test_limits(settings: dict[str, Any], code: str, reason: str) -> None:
    said = Python(**{**QUICK, **settings})(code)
    assert said.startswith("before")
    assert said.endswith(f"Error: {reason}")


def test_nothing_is_kept_between_calls() -> None:
    tool = Python(**QUICK)
    assert tool("x = 1\nopen('/tmp/f', 'w').write('x')") == "1"
    assert "NameError" in tool("x")
    assert "FileNotFoundError" in tool("open('/tmp/f')")


def test_a_server_that_is_down_fails_the_rollout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    tool = Python(sandbox_url=f"http://127.0.0.1:{port}")
    with pytest.raises(ToolBroken, match="python: sandbox: "):
        tool("1")
    options = {"python": {"sandbox_url": f"http://127.0.0.1:{port}"}}
    environment = ToolEnvironment(
        ToolEnvironment.Config(tools=("python",), options=options), problem=PROBLEM, seed=0
    )  # fmt: skip
    call = ToolCall(id="call_0_0", name="python", arguments={"code": "1"}, text="")

    async def play() -> None:
        await environment.tools()
        await environment.reply(AssistantMessage(content="", tool_calls=(call,)))

    with pytest.raises(ToolBroken):
        asyncio.run(play())


def test_a_machine_without_a_sandbox_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    layers.find_layers.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"options\.python: sandbox: bubblewrap: not found"):
            Python()
    finally:
        monkeypatch.undo()
        layers.find_layers.cache_clear()
