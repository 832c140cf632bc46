"""The built-in environments do what docs/environments.md shows."""

from __future__ import annotations

import asyncio
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rftstream.config.loader import from_dict
from rftstream.contracts.assistant import AssistantMessage, ToolCall
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.data.tasksets.open import open_taskset
from rftstream.environments.base import Reply
from rftstream.sandbox.layers import missing_text
from tests.docs.reading import ROOT, blocks, read

PAGE = ROOT / "docs" / "environments.md"
TEXT = read(PAGE)
EXAMPLES = ROOT / "tests" / "docs" / "examples"


def settings(name: str, *, base: Path = EXAMPLES) -> Any:
    """The config of the first run file on the page that has settings for this environment or tool."""
    found = next(block.text for block in blocks(PAGE, "toml") if name in block.text)
    values = {"model": {"path": "fake"}, "tasksets": {"t": {"source": "arithmetic"}}, **tomllib.loads(found)}
    return from_dict({**values, "run": {"name": "t", "steps": 1}, "base": str(base)})


def made(config: Any, environment: str, problem: Problem) -> Any:
    part, options = config.build_part("environment", environment)
    return part(options, problem=problem, seed=0)


def problem(answer: str | None = None, **info: Any) -> Problem:
    return Problem(messages=(ChatMessage(role="user", content="?"),), answer=answer, info=info)


def table_below(heading: str) -> list[list[str]]:
    """Rows of the last table in the section of a heading, without those on top."""
    section = re.split(r"^##", TEXT.partition(heading)[2], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row] for row in rows if not row[0].startswith("--")][1:]


def call_of(text: str) -> ToolCall:
    """A call as the page writes it: name(key=value, ...)."""
    call: Any = compile(text, "call", "eval", flags=0x400).body  # the syntax tree
    arguments = {keyword.arg: keyword.value.value for keyword in call.keywords}
    return ToolCall(id="call_0_0", name=call.func.id, arguments=arguments, text=text)


async def call(environment: Any, text: str) -> str:
    reply: Reply = await environment.reply(AssistantMessage(content="", tool_calls=(call_of(text),)))
    return reply.messages[0].content


def one_call(config: Any, text: str) -> str:
    async def steps() -> str:
        environment = made(config, "tools", problem())
        await environment.tools()
        try:
            return await call(environment, text)
        finally:
            await environment.close()

    return asyncio.run(steps())


def test_tools_of_ones_own() -> None:
    config = settings("my_tools:opening_hours")
    shown = problem(hours={"bakery": {"saturday": "7 to 14", "sunday": "8 to 11"}})
    rows = table_below("### Tools")
    assert len(rows) == 8

    async def heard(row: list[str]) -> str:
        environment = made(config, "tools", shown)
        assert len(await environment.tools()) == 3
        return await call(environment, row[0])

    assert [asyncio.run(heard(row)) for row in rows] == [row[1] for row in rows]

    async def notes() -> str:
        environment = made(config, "tools", shown)
        await environment.tools()
        await call(environment, 'notebook(note="a")')
        again = made(config, "tools", shown)
        await again.load(environment.save())
        return [await call(again, f'notebook(note="{note}")') for note in "bcd"][-1]

    assert asyncio.run(notes()) == "b\nc\nd"


@pytest.mark.slow
def test_python() -> None:
    if (problem := missing_text()) is not None:
        pytest.skip(problem)
    config = settings("options.python")
    rows = table_below("### Python")
    assert len(rows) == 4
    for text, heard in rows:
        assert one_call(config, text) == heard


def test_search(tmp_path: Path) -> None:
    (file,) = (block for block in blocks(PAGE, "json") if block.kind == "file")
    (tmp_path / file.name).write_text(file.text, encoding="utf-8")
    found = one_call(settings("options.search", base=tmp_path), 'search(query="wooden houses in Bergen")')
    assert found in [block.text.strip() for block in blocks(PAGE, "text")]


@pytest.mark.slow
def test_mcp(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    config = settings("servers.units")
    del config.environments["tools"]["options"]["mcp"]["servers"]["elsewhere"]
    assert one_call(config, "miles(kilometres=42.195)") == "26.22"


def test_rewards_in_each_turn() -> None:
    environment = made(settings("my_hangman:Hangman"), "my_hangman:Hangman", problem("noon"))
    (_, before, *_), *rows = table_below("### An environment of your own")
    assert environment.start()[-1].content == before
    for letter, heard, reward, parts in rows:
        reply = environment.reply(AssistantMessage(content=letter))
        assert (reply.messages[0].content if reply.messages else "(the end)") == heard
        assert reply.reward == float(reward)
        name, value = parts.split()
        assert reply.parts[name] == float(value)
        again = made(settings("my_hangman:Hangman"), "my_hangman:Hangman", problem("noon"))
        again.load(environment.save())
        environment = again
    assert reply.done


def first_problem(config: Any) -> Problem:
    ((name, section),) = config.tasksets.items()
    return open_taskset(name, section, config).problem(0)


def test_attempts() -> None:
    config = settings("[environments.attempts]")
    shown = first_problem(config)
    environment = made(config, "attempts", shown)
    told: Mapping[str, str] = {"a wrong answer": "no idea", "the right answer": str(shown.answer)}
    rows = [row for row in table_below("### Attempts") if row[0] in told]
    assert len(rows) == 2
    for says, heard, reward in rows:
        reply = asyncio.run(environment.reply(AssistantMessage(content=told[says])))
        assert (reply.messages[0].content if reply.messages else "(the end)") == heard
        assert reply.reward == float(reward)


def test_text_game() -> None:
    config = settings('[environments."text_game:TextGame"]', base=ROOT / "examples")
    game = made(config, "text_game:TextGame", first_problem(config))
    (shown,) = (block.text.splitlines() for block in blocks(PAGE, "text") if "> take" in block.text)
    assert game.start()[-1].content.endswith(f"\n\n{shown[0]}")
    for command, heard in zip(shown[1::2], [*shown[2::2], None], strict=True):
        reply = game.reply(AssistantMessage(content=command.removeprefix("> ")))
        assert [message.content for message in reply.messages] == ([heard] if heard else [])
    assert reply.metrics["won"] == 1
    assert reply.metrics["num_moves"] == reply.metrics["least_moves"]
