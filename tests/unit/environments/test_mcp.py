"""Tools of MCP servers: over stdio and HTTP, of one rollout and shared, and servers that fail, hang or die.

Two tests talk to servers that the package `mcp` runs, which takes seconds to import. The others have one that starts at
once, and that speaks an older version of the protocol.
"""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rftstream.contracts.assistant import AssistantMessage, ToolCall
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.environments.tools import ToolEnvironment
from rftstream.environments.toolset.base import ToolError
from rftstream.environments.toolset.mcp import close_shared
from rftstream.errors import ConfigError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.anyio,
    pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="the package mcp is not installed"),
]

SERVER = str(Path(__file__).with_name("notes_server.py"))
STDIO = {"command": [sys.executable, "-I", "-S", str(Path(__file__).with_name("older_notes_server.py"))]}
PROBLEM = Problem(messages=(ChatMessage(role="user", content="?"),))


def made(*, timeout_s: float = 300.0, **servers: dict[str, Any]) -> ToolEnvironment:
    patient = {name: {"start_timeout_s": 300.0, **server} for name, server in servers.items()}
    config = ToolEnvironment.Config(
        tools=("mcp",), options={"mcp": {"servers": patient}} if servers else {}, timeout_s=timeout_s, max_turns=100
    )
    return ToolEnvironment(config, problem=PROBLEM, seed=0)


async def ask(environment: ToolEnvironment, name: str, /, **arguments: Any) -> str:
    call = ToolCall(id="call_0_0", name=name, arguments=arguments, text="")
    reply = await environment.reply(AssistantMessage(content="", tool_calls=(call,)))
    return reply.messages[0].content


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_shared()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, SERVER, "http"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
        finally:
            process.kill()


def is_gone(pid: int) -> bool:
    try:
        psutil.Process(pid).wait(300)
    except psutil.NoSuchProcess:
        return True
    return not psutil.pid_exists(pid)


def test_over_stdio_from_start_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_TEST_TOKEN", "secret")
    monkeypatch.setenv("MCP_TEST_OTHER", "not for servers")
    environment = made(notes={"command": [sys.executable, SERVER], "env": {"TOKEN": "env:MCP_TEST_TOKEN"}})

    async def steps() -> list[int]:
        tools = {tool["function"]["name"]: tool["function"] for tool in await environment.tools()}
        assert set(tools) == {"add", "note", "fail", "pids", "variable"}
        assert tools["add"]["description"] == "Add two numbers."
        assert tools["add"]["parameters"]["required"] == ["a", "b"]
        assert await ask(environment, "add", a=1, b=2) == "3"
        assert await ask(environment, "add", a="x", b=2) == "Error: add: argument 'a': 'x' is not of type 'integer'"
        assert (await ask(environment, "fail")).startswith("Error: ")
        assert await ask(environment, "variable", name="TOKEN") == "secret"
        assert await ask(environment, "variable", name="MCP_TEST_OTHER") == "unset"
        assert await ask(environment, "note", text="a") == "a"
        pids = [int(pid) for pid in (await ask(environment, "pids")).split()]
        assert environment.save() is None
        await environment.close()
        return pids

    server, child = asyncio.run(steps())
    assert is_gone(server), "the server outlives its rollout"
    assert is_gone(child), "what the server has started outlives it"


KILLED = """
import asyncio
from tests.unit.environments.test_mcp import STDIO, ask, made

async def steps():
    environments = [made(notes={**STDIO, "shared": shared}) for shared in (False, True)]
    for environment in environments:
        await environment.tools()
    print(*[await ask(environment, "pids") for environment in environments], flush=True)
    await asyncio.sleep(600)

asyncio.run(steps())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only there everything of a server is found")
@pytest.mark.parametrize("victim", ["explorer", "guard"])
def test_no_server_outlives_a_kill(victim: str) -> None:
    """Neither that of one rollout nor one that is shared."""
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        own, own_child, shared, shared_child = map(int, process.stdout.readline().split())
        try:
            guards = [guard for server in (own, shared) if (guard := psutil.Process(server).parent()) is not None]
            assert [guard.ppid() for guard in guards] == [process.pid, process.pid]
            for killed in [process] if victim == "explorer" else guards:
                killed.kill()
            assert is_gone(own) and is_gone(shared), "a server outlives a SIGKILL"
            if victim == "explorer":
                assert all(is_gone(pid) for pid in (own_child, shared_child, *(guard.pid for guard in guards)))
            else:
                for child in (own_child, shared_child):
                    psutil.Process(child).kill()
        finally:
            process.kill()


async def test_a_call_that_takes_too_long_does_not_hold_up_the_others() -> None:
    patient, hasty = (made(notes={**STDIO, "shared": True}, timeout_s=timeout_s) for timeout_s in (300.0, 0.2))
    for environment in (patient, hasty):
        await environment.tools()
    assert await ask(patient, "note", text="a") == "a"
    assert await ask(hasty, "hang") == "Error: hang did not answer within 0.2 s"
    assert await ask(patient, "note", text="b") == "a, b"


async def test_a_server_that_dies_is_an_error_of_the_call() -> None:
    environment = made(notes=STDIO)
    await environment.tools()
    assert await ask(environment, "die") == "Error: die failed: its server has ended"
    assert await ask(environment, "add", a=1, b=2) == "Error: add failed: its server has ended"
    await environment.close()


def test_rollouts_have_servers_of_their_own_or_share_one() -> None:
    async def noted(shared: bool) -> list[str]:
        heard = []
        for text in "ab":
            environment = made(notes={**STDIO, "shared": shared, "tools": ["note", "die"], "prefix": "my_"})
            assert [tool["function"]["name"] for tool in await environment.tools()] == ["my_note", "my_die"]
            heard.append(await ask(environment, "my_note", text=text))
            assert (environment.save() is None) == (not shared)
            await environment.close()
        return heard

    assert asyncio.run(noted(shared=False)) == ["a", "b"]
    assert asyncio.run(noted(shared=True)) == ["a", "a, b"]


async def test_a_shared_server_that_died_is_started_again_for_the_next_rollout() -> None:
    first, second = made(notes={**STDIO, "shared": True}), made(notes={**STDIO, "shared": True})
    await first.tools()
    assert await ask(first, "die") == "Error: die failed: its server has ended"
    await second.tools()
    assert await ask(second, "note", text="c") == "c"


async def test_over_http(url: str) -> None:
    environment = made(notes={"url": url, "headers": {"X-Test": "1"}})
    await environment.tools()
    assert await ask(environment, "add", a=20, b=22) == "42"
    assert (await ask(environment, "fail")).startswith("Error: ")
    await environment.close()


async def test_a_rollout_that_goes_on_elsewhere_connects_again(url: str) -> None:
    first, second = (made(notes={"url": url, "shared": True}) for _ in range(2))
    await first.tools()
    await ask(first, "add", a=1, b=2)
    await second.load(first.save() or b"")
    assert await ask(second, "add", a=3, b=4) == "7"


@pytest.mark.parametrize(
    ("servers", "error", "why"),
    [
        ({"one": {"command": ["/no/such/program"]}}, ToolError, "servers.one: cannot be used: FileNotFoundError"),
        (
            {"one": {"command": [sys.executable, "-c", "raise SystemExit(3)"]}},
            ToolError, "servers.one: cannot be used: .*Connection closed",
        ),
        ({"one": {"url": "http://127.0.0.1:1/mcp"}}, ToolError, "servers.one: cannot be used: ConnectError"),
        (
            {"one": {"command": ["cat"], "env": {"X": "env:MCP_TEST_NOT_SET"}}},
            ToolError, "MCP_TEST_NOT_SET is not set",
        ),
        (
            {"one": {"command": [sys.executable, "-c", "import time; time.sleep(600)"], "start_timeout_s": 0.2}},
            ToolError, "servers.one: did not list its tools within 0.2 s",
        ),
        ({}, ConfigError, "argument 'servers' is missing"),
        ({"one": {}}, ConfigError, "servers.one: expected either a command or a url"),
        ({"one": {**STDIO, "url": "http://x"}}, ConfigError, "servers.one: expected either a command or a url"),
        ({"one": {"comand": ["x"]}}, ConfigError, "argument 'servers.*unknown argument 'comand'"),
        ({"one": {**STDIO, "tools": ["sub"]}}, ConfigError, "one.tools: 'sub' is not there; it has add, note"),
        ({"one": STDIO, "two": STDIO}, ConfigError, "two tools are called 'add'"),
    ],
)  # fmt: skip
async def test_what_does_not_start_fails_the_rollout_and_what_cannot_be_ends_the_run(
    servers: dict[str, Any], error: type[Exception], why: str
) -> None:
    environment = made(**servers)
    with pytest.raises(error, match=why):
        await environment.tools()
    await environment.close()
