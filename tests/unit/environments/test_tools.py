"""The environment `tools`: calls that fit, calls that do not, and tools that fail, hang or keep something."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftstream.config import loader
from rftstream.config.parts import registry
from rftstream.contracts.assistant import AssistantMessage, ToolCall
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.environments import ENVIRONMENTS
from rftstream.environments.base import Reply
from rftstream.environments.tools import MAX_HANGING, ToolEnvironment
from rftstream.environments.toolset.arguments import Signature
from rftstream.environments.toolset.base import ToolError
from rftstream.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent))
import sample_tools

from tests.suite.each import each

PROBLEM = Problem(
    messages=(ChatMessage(role="user", content="6 * 7?"),), answer="42", info={"table": {"k": "v"}},
)  # fmt: skip


def made(*tools: str, problem: Problem = PROBLEM, **settings: Any) -> ToolEnvironment:
    names = [f"sample_tools:{tool}" if hasattr(sample_tools, tool) else tool for tool in tools or ("calculator",)]
    values = {"tools": names, **settings}
    config = registry.build_config(ToolEnvironment, values, where="environments.tools")
    return ToolEnvironment(config, problem=problem, seed=7)


def said(*calls: ToolCall, finish_reason: str = "stop") -> AssistantMessage:
    return AssistantMessage(content="", tool_calls=calls, finish_reason=finish_reason)


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(id="call_0_0", name=name, arguments=arguments, text="")


def run(steps: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(steps)


async def replies(environment: ToolEnvironment, *turns: AssistantMessage) -> list[Reply]:
    await environment.tools()
    try:
        return [await environment.reply(turn) for turn in turns]
    finally:
        await environment.close()


def told(environment: ToolEnvironment, *calls: ToolCall) -> list[str]:
    """What the model reads after one turn with these calls."""
    (reply,) = run(replies(environment, said(*calls)))
    assert [message.role for message in reply.messages] == ["tool"] * len(calls)
    return [message.content for message in reply.messages]


def test_from_question_to_answer() -> None:
    environment = made()
    assert environment.start() == PROBLEM.messages
    (tool,) = run(environment.tools())
    assert tool["function"]["name"] == "calculator"
    assert tool["function"]["parameters"]["required"] == ["expression"]
    first = run(environment.reply(said(call("calculator", expression="6 * 7"))))
    assert first.messages == (ChatMessage(role="tool", content="42", name="calculator", tool_call_id="call_0_0"),)
    assert (first.done, first.reward) == (False, None)
    last = run(environment.reply(AssistantMessage(content="42")))
    assert last.done
    assert last.metrics == {
        "num_turns": 2, "num_tool_calls": 1, "num_bad_calls": 0, "num_failed_calls": 0, "num_calls_calculator": 1,
    }  # fmt: skip


def test_a_function_of_the_users() -> None:
    environment = made("area")
    (tool,) = run(environment.tools())
    assert tool["function"] == {
        "name": "area",
        "description": "Compute the area of a rectangle. It is exact.",
        "parameters": {
            "type": "object",
            "properties": {
                "width": {"type": "number", "description": "How wide it is, in the unit."},
                "height": {
                    "type": "number", "exclusiveMinimum": 0, "default": 1.0, "description": "How high it is.",
                },
                "unit": {"enum": ["cm", "m"], "default": "m"},
            },
            "required": ["width"],
            "additionalProperties": False,
        },
    }  # fmt: skip
    assert told(made("area"), call("area", width=2, height=1.5), call("area", width=3, unit="cm")) == ["3 m2", "3 cm2"]


def test_problem_and_seed_are_filled_in_and_not_shown() -> None:
    environment = made("look_up")
    (tool,) = run(environment.tools())
    assert list(tool["function"]["parameters"]["properties"]) == ["key"]
    assert told(made("look_up"), call("look_up", key="k")) == ["v 7"]
    assert told(made("look_up"), call("look_up", key="k", seed=1)) == [
        "Error: look_up: unknown argument 'seed'; it takes key"
    ]


def test_what_tools_give_back() -> None:
    answers = told(
        made("slow_echo", "table", "surrogates", "long", "no_plain_value", max_result_chars=20),
        call("slow_echo", text="Grüße"), call("table"), call("surrogates"), call("long"), call("no_plain_value"),
    )  # fmt: skip
    cut = f"{'x' * 20}... (99,980 characters more)"
    assert answers[:4] == ["Grüße", '{"a": [1, 2], "b": n... (4 characters more)', "a?b", cut]
    assert answers[4].startswith("Error: the tool gave")


@each(
    ("wrong", "why"),
    [
        (ToolCall(id="c", name="", arguments=None, text="{", error="the call is not JSON"), "the call is not JSON"),
        (ToolCall(id="c", name="area", arguments=None, text="3"), "the arguments of area are not a JSON object"),
        (call("nobody"), "there is no tool 'nobody'; there are: area"),
        (call(""), "there is no tool ''; there are: area"),
        (call("äreä\u202e\x00"), "there is no tool 'äreä\\u202e\\x00'; there are: area"),
        (call("x" * 10_000_000), f"there is no tool '{'x' * 200}... (9,999,800 characters more)'; there are: area"),
        (call("area"), "area: argument 'width' is missing; it takes width, height, unit"),
        (call("area", width="2"), "area: argument 'width': expected float, got str"),
        (call("area", width=None), "area: argument 'width': expected float, got null"),
        (call("area", width=True), "area: argument 'width': expected float, got bool"),
        (call("area", width=2, height=0), "area: argument 'height': expected float > 0.0"),
        (call("area", width=2, unit="km"), "area: argument 'unit': invalid enum value 'km'"),
        (call("area", width=2, wide=3), "area: unknown argument 'wide'; it takes width, height, unit"),
        (call("area", **{"width": 2, "'; drop": 3}), 'area: unknown argument "\'; drop"; it takes width, height, unit'),
        (call("area", width=[[[]]]), "area: argument 'width': expected float, got array"),
    ],
)
def test_a_bad_call_is_told_or_ends_the_rollout(wrong: ToolCall, why: str) -> None:
    assert told(made("area"), wrong) == [f"Error: {why}"]
    (reply,) = run(replies(made("area", on_bad_call="end"), said(wrong)))
    assert reply.done
    assert reply.messages == ()
    assert reply.metrics["num_bad_calls"] == 1


def test_after_a_bad_call_the_rollout_goes_on() -> None:
    first, second = run(replies(made("area"), said(call("nobody")), said(call("area", width=1))))
    assert [first.metrics["num_bad_calls"], second.metrics["num_bad_calls"]] == [1, 1]
    assert second.messages[0].content == "1 m2"


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.slow
def test_arguments_nested_deeply() -> None:
    assert told(made("area", "Schema"), call("area", width=deep(100_000)), call("by-schema", point=deep(5000)))[0] == (
        "Error: area: argument 'width': expected float, got array"
    )


def test_a_huge_number_as_an_argument() -> None:
    assert told(made("submit", "area"), call("area", width=10**400))[0].startswith("Error: area: ")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(["width", "height", "unit", "", "ä"]), JSON, max_size=4))
def test_any_arguments_are_taken_or_refused(arguments: dict[str, Any]) -> None:
    signature = Signature(sample_tools.area, where="area")
    try:
        checked = signature.check(arguments)
    except ToolError as error:
        assert len(str(error)) < 600
        return
    assert checked.keys() == arguments.keys()
    assert isinstance(checked["width"], float)


def test_tools_that_fail_are_told_of_and_counted() -> None:
    environment = made("fail", "refuse", "leave", "calculator")
    (reply,) = run(
        replies(
            environment,
            said(call("fail", why="broken"), call("refuse"), call("leave"), call("calculator", expression="1/0")),
        )
    )
    assert [message.content for message in reply.messages] == [
        "Error: fail failed: KeyError: 'broken'",
        "Error: not today",
        "Error: SystemExit: bye",
        "Error: division by zero",
    ]
    assert (reply.metrics["num_failed_calls"], reply.metrics["num_bad_calls"]) == (4, 0)


@pytest.fixture
def _released() -> Iterator[None]:
    sample_tools.released.clear()
    yield
    sample_tools.released.set()


@pytest.mark.usefixtures("_released")
def test_tools_that_block_or_hang_are_given_up() -> None:
    environment = made("wait_for_release", "hang", timeout_s=0.01)
    assert told(environment, call("wait_for_release"), call("hang")) == [
        "Error: wait_for_release did not answer within 0.01 s",
        "Error: hang did not answer within 0.01 s",
    ]
    assert told(made("calculator"), call("calculator", expression="1")) == ["1"], "while the first one still blocks"


@pytest.mark.usefixtures("_released")
def test_calls_that_hang_do_not_pile_up() -> None:
    environment = made("wait_for_release", timeout_s=0.001, max_turns=100, max_calls=100)
    answers = told(environment, *[call("wait_for_release")] * (MAX_HANGING + 3))
    assert answers[-1] == f"Error: wait_for_release was not called: {MAX_HANGING} earlier calls still hang"
    sample_tools.released.set()

    async def until_there_is_room() -> str:
        later = made("wait_for_release")
        await later.tools()
        while True:
            reply = await later.reply(said(call("wait_for_release")))
            if reply.done or not reply.messages[0].content.startswith("Error"):
                return reply.messages[0].content if reply.messages else ""
            later = made("wait_for_release")
            await later.tools()

    assert run(until_there_is_room()) == "released"


def test_turns_and_calls_are_bounded() -> None:
    turn = said(call("calculator", expression="1"))
    *before, last = run(replies(made(max_turns=3), turn, turn, turn))
    assert [reply.done for reply in before] == [False, False]
    assert last.done
    assert last.metrics["num_tool_calls"] == 2
    answers = told(made(max_calls=2), *turn.tool_calls * 3)
    assert answers == ["1", "1", "Error: not run: more than 2 calls in one turn"]


def test_calls_of_a_turn_that_was_cut_short_are_not_run() -> None:
    (reply,) = run(replies(made(), said(call("calculator", expression="1"), finish_reason="length")))
    assert reply.done
    assert reply.metrics["num_tool_calls"] == 0


def test_a_tool_may_end_the_rollout_with_a_reward() -> None:
    (reply,) = run(replies(made("submit"), said(call("submit", answer=41), call("submit", answer=42))))
    assert (reply.done, reply.reward, reply.parts) == (True, 1.0, {"right": 1.0})


def test_a_class_keeps_its_state_also_in_another_process() -> None:
    options = {"sample_tools:Notebook": {"limit": 2}}

    async def steps() -> list[str]:
        first = made("Notebook", options=options)
        (tool,) = await first.tools()
        assert tool["function"]["description"] == "Write a note down."
        answers = [await first.reply(said(call("notebook", note="a")))]
        state = first.save()
        assert state is not None
        second = made("Notebook", options=options)
        await second.load(state)
        assert [tool["function"]["name"] for tool in await second.tools()] == ["notebook"]
        answers += [await second.reply(said(call("notebook", note=note))) for note in "bc"]
        assert answers[-1].metrics["num_calls_notebook"] == 3
        return [reply.messages[0].content for reply in answers]

    assert run(steps()) == ["42, a", "42, a, b", "Error: the notebook is full"]


def test_a_state_is_plain_json_or_none() -> None:
    plain, not_plain = made("calculator"), made("NotSaved")
    run(plain.tools())
    run(not_plain.tools())
    assert json.loads(plain.save() or b"")["counts"]["num_turns"] == 0
    assert not_plain.save() is None


def test_a_tool_with_a_schema_of_its_own() -> None:
    answers = told(
        made("Schema"), call("by-schema", point=[1, 2]), call("by-schema", point=[1]), call("by-schema", point=[1, "x"])
    )
    assert answers == [
        "3",
        "Error: by-schema: argument 'point': [1] is too short",
        "Error: by-schema: argument 'point.1': 'x' is not of type 'integer'",
    ]


def test_every_tool_is_closed() -> None:
    sample_tools.Closed.closed = 0
    environment = made("Closed", "calculator")
    run(environment.tools())
    with pytest.raises(OSError, match="could not be closed"):
        run(environment.close())
    assert sample_tools.Closed.closed == 1
    run(made().close())  # of one that never began


def test_tools_that_the_problem_offers_itself_are_not_offered_twice() -> None:
    problem = Problem(messages=PROBLEM.messages, tools=({"type": "function", "function": {"name": "calculator"}},))
    assert run(made(problem=problem).tools()) == []


@each(
    ("tools", "settings", "why"),
    [
        (["claculator"], {}, "unknown tool 'claculator'; known: calculator, python, search, mcp"),
        (["sample_tools:nothing"], {}, "'sample_tools:nothing' cannot be imported: AttributeError"),
        (["no_such_module:f"], {}, "cannot be imported: ModuleNotFoundError"),
        ([":"], {}, "cannot be imported: ValueError"),
        (["sample_tools:not_callable"], {}, "is a int, expected a function or a class"),
        (["sample_tools:no_hint"], {}, "parameter 'key' has no type hint; add one, e.g. key: str"),
        (["sample_tools:any_number"], {}, "parameter \\*keys"),
        (["calculator", "calculator"], {}, "tools has 'calculator' twice"),
        (["search"], {}, "options.search: argument 'corpus' is missing"),
        (["search"], {"search": {"corpus": "c", "corpsu": "d"}}, "options.search: unknown argument 'corpsu'"),
        (["search"], {"search": {"corpus": 3}}, "options.search: argument 'corpus': expected str, got int"),
        (["calculator"], {"search": {"corpus": "c"}}, "'search' is not in tools"),
        (["calculator"], {"calculator": {"x": 1}}, "a function has no settings, got x"),
    ],
)
def test_settings_that_cannot_be(tools: list[str], settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        run(made(*tools, options=settings).tools())


def test_paths_of_its_settings_are_relative_to_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("""
        [run]
        name = "r"
        steps = 1
        [model]
        path = "fake"
        [tasksets.t]
        source = "arithmetic"
        environment = "tools"
        [environments.tools]
        tools = ["search", "mcp"]
        options.search.corpus = "wiki/corpus.jsonl"
        options.mcp.servers.one = { command = ["server"], cwd = "." }
        options.mcp.servers.two = { url = "http://localhost" }
    """)
    config = loader.load([tmp_path / "run.toml"], env={})
    _, options = config.build_part("environment", "tools")
    assert options.options == {
        "search": {"corpus": str(tmp_path / "wiki" / "corpus.jsonl")},
        "mcp": {"servers": {"one": {"command": ["server"], "cwd": str(tmp_path)}, "two": {"url": "http://localhost"}}},
    }
    assert set(ENVIRONMENTS) >= {"single_turn", "tools", "attempts"}
