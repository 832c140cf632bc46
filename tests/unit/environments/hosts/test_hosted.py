"""An environment in a host: what goes in comes out, and whatever its code does stays in its host."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rftstream.environments.base import Reply
from rftstream.environments.hosted import HostedEnvironment
from rftstream.environments.hosts import host
from rftstream.environments.hosts import pool as pools
from rftstream.environments.hosts.pool import pool_of
from rftstream.errors import ConfigError, HostedCodeError, HostError, HostStartTimeout, HostTimeout
from rftstream.process_state import is_alive
from tests.unit.environments.hosts.conftest import Made
from tests.unit.environments.hosts.scene import CALL, PROBLEM, say
from tests.waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]  # each starts an interpreter


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def told(reply: Reply) -> Any:
    """Return what `Told.answer` said."""
    return json.loads(reply.messages[0].content)


async def ask(environment: HostedEnvironment, *words: str) -> list[Reply]:
    """Start the environment, say the words, close it, and return the replies."""
    await environment.start()
    replies = [await environment.reply(say(word)) for word in words]
    await environment.close()
    return replies


def hosts_of(environment: HostedEnvironment) -> tuple[Any, ...]:
    return environment._pool.hosts


def test_what_goes_in_comes_out(make: Made) -> None:
    environment = make(seed=7, options={"a": [1, {"b": None}]})

    async def play() -> Reply:
        first = await environment.start()
        assert [(one.role, one.content) for one in first] == [("user", "Begin."), ("user", "seed 7")]
        tools = await environment.tools()
        assert tools[0]["function"]["name"] == "add"
        reply = await environment.reply(say("see", reasoning="hm", tool_calls=(CALL,), finish_reason="length"))
        assert environment.save() is None
        await environment.close()
        return reply

    seen = told(run(play()))
    assert seen["config"] == {"a": [1, {"b": None}]}
    assert seen["problem"] == {
        "messages": [{"role": "user", "content": "Begin."}], "answer": "42", "tools": [], "info": {"level": 3},
        "data_source": "made",
    }  # fmt: skip
    assert seen["said"] == {
        "content": "see", "text": "see", "reasoning": "hm", "finish_reason": "length",
        "tool_calls": [{"id": "call_0_0", "name": "add", "arguments": {"a": 1, "deep": [True, None]},
                        "text": '{"a": 1}', "error": None}],
    }  # fmt: skip


def test_the_host_knows_nothing_of_ours(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    seen = told(run(ask(make(), "where"))[0])
    assert "PYTHONPATH" not in seen["variables"]
    assert not [one for one in seen["modules"] if one.partition(".")[0] in ("rftstream", "msgspec", "numpy")]
    assert not [one for one in seen["path"] if one.endswith("environments/hosts")]
    assert seen["session"] == seen["pid"] != os.getsid(0)
    assert seen["stdin"] == ""
    assert len(seen["argv"]) == 1


def test_the_runner_is_understood_by_older_interpreters() -> None:
    source = (Path(pools.__file__).parent / "runner.py").read_text()
    ast.parse(source, feature_version=(3, 9))
    imported = {
        name.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for name in node.names
    }
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names


def test_what_is_printed_is_kept_apart(make: Made, tmp_path: Path) -> None:
    replies = run(ask(make(log_folder=str(tmp_path / "logs")), "printed", "say still here"))
    assert [reply.messages[0].content for reply in replies] == ["said", "still here"]
    [log] = (tmp_path / "logs").iterdir()
    wait_until(lambda: b"echoed" in log.read_bytes())
    assert log.read_bytes().splitlines() == [b"printed", b"written\xff", b"\0\1\2\3 to stderr", b"echoed"]


def test_a_log_is_bounded(make: Made, tmp_path: Path) -> None:
    run(ask(make(log_folder=str(tmp_path)), "printed_much 3000", "say x"))
    logs = [path for path in tmp_path.iterdir() if path.name.startswith("host")]
    assert len(logs) == 2
    assert all(0 < path.stat().st_size <= 1 << 20 for path in logs)


def test_stderr_gets_a_bounded_part(make: Made, capfd: pytest.CaptureFixture[str]) -> None:
    run(ask(make(), "printed_much 3000", "say x"))
    pools.close_pools()
    text = capfd.readouterr().err
    assert text.startswith("[host-")
    assert text.endswith("prints too much; the rest is not kept\n")
    assert len(text) < 1_100_000


def test_a_fork_that_returns_does_not_answer(make: Made) -> None:
    replies = run(ask(make(), "forked", "forked", "say x"))
    assert [reply.messages[0].content for reply in replies] == ["once", "once", "x"]


def test_descriptors_are_not_inherited(make: Made) -> None:
    """The child has its three, and the one with which it lists them."""
    assert len(json.loads(told(run(ask(make(), "descriptors"))[0]))) == 4


def test_a_large_state(make: Made) -> None:
    """It goes along with each answer, and is too large for a record: the explorer stores it as an object."""
    environment = make("Counter", seed=10, options={"state_bytes": 20_000_000})
    (reply,) = run(ask(environment, "go on"))
    assert reply.messages[0].content == "11"
    state = environment.save()
    assert isinstance(state, bytes)
    assert len(state) > 20_000_000


async def test_large_answers(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MAX_FRAME_BYTES", 16 << 20)
    environment = make()
    await environment.start()
    assert len((await environment.reply(say("large 10000000"))).messages[0].content) == 10_000_000
    with pytest.raises(HostedCodeError, match=r"got \d+ bytes, expected at most 16777216"):
        await environment.reply(say("large 20000000"))
    with pytest.raises(HostError, match=r"a request of \d+ bytes"):
        await environment.reply(say("x" * 20_000_000))
    assert (await environment.reply(say("say still here"))).messages[0].content == "still here"
    await environment.close()


def test_rewards_that_are_not_finite_pass(make: Made) -> None:
    words = ["nan", "inf", "10**400"]
    replies = run(ask(make(), *(f"returned dict(done=False, reward=float({word!r}))" for word in words[:2]),
                      "returned dict(done=False, reward=10**400, parts=dict(a=True))"))  # fmt: skip
    assert math.isnan(replies[0].reward)
    assert [reply.reward for reply in replies[1:]] == [math.inf, math.inf]
    assert replies[2].parts == {"a": 1.0}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("raised ValueError('line 1\\nline 2')", r"^ValueError: line 1\nline 2$"),
        ("raised SystemExit(3)", "^SystemExit: 3$"),
        ("raised KeyboardInterrupt()", "^KeyboardInterrupt$"),
        ("raised type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()", "Odd: <exception str"),
        ("raised ValueError('x' * 10**7)", "^ValueError: x{100}"),
        ("stopped_loop", "SystemExit: 3"),
        ("nothing_of_this_name", "AttributeError: 'Told' object has no attribute"),
        ("returned 5", "reply: got 5, expected a dict"),
        ("returned object()", "object is not plain data"),
        ("returned dict(done=False, messages=[b'x'])", "bytes is not plain data"),
        ("returned dict(done=1)", "got 1 as 'done', expected true or false"),
        ("returned dict(done=False, rewards=1.0)", "unknown key 'rewards'; known: done, messages, reward"),
        ("returned dict(done=False, reward='1')", "reply.reward: got '1', expected a number"),
        ("returned dict(done=False, messages=[dict(content='x')])", "role"),
        ("returned (lambda d: d.update(done=d) or d)({})", "ValueError: Circular reference"),
    ],
)
async def test_what_the_code_raises_is_told(make: Made, words: str, expected: str) -> None:
    environment = make()
    await environment.start()
    with pytest.raises(HostedCodeError, match=expected) as caught:
        await environment.reply(say(words))
    assert len(str(caught.value)) < 3000
    assert (await environment.reply(say("say still here"))).messages[0].content == "still here"
    await environment.close()


def test_half_a_surrogate_pair(make: Made) -> None:
    reply = run(ask(make(), r"returned dict(done=False, messages=['a\ud800b'])"))[0]
    assert reply.messages[0].content.encode().startswith(b"a")


@pytest.mark.parametrize("words", ["garbage", "closed_all"])
async def test_code_that_meddles_with_the_pipes_loses_its_host(make: Made, words: str) -> None:
    environment = make()
    await environment.start()
    with pytest.raises(HostError) as failed:
        await asyncio.gather(*(environment.reply(say(word)) for word in (words, "say x")))
    assert not isinstance(failed.value, HostTimeout), "nobody waits for a host that cannot answer"
    await environment.close()
    assert (await ask(make(), "say another"))[0].messages[0].content == "another"


@pytest.mark.parametrize("words", ["hung", "hung_with_the_lock"])
async def test_a_call_that_hangs(make: Made, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "STUCK_S", 0.05)
    environment, neighbour = make(), make()
    await environment.start()
    [host] = hosts_of(environment)
    environment._config = dataclasses.replace(environment._config, timeout_s=0.5)
    with pytest.raises(HostTimeout, match=r"no answer to 'reply' within 0\.5 s"):
        await environment.reply(say(words))
    assert issubclass(HostTimeout, TimeoutError)
    if words == "hung":
        assert (await ask(neighbour, "say x"))[0].messages[0].content == "x"
    await environment.close()
    await asyncio.to_thread(wait_until, lambda: host.end is not None)
    assert not is_alive(host.pid)


async def test_a_call_that_its_caller_gives_up(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "STUCK_S", 0.05)
    environment = make()
    await environment.start()
    [host] = hosts_of(environment)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(environment.reply(say("hung")), 0.1)
    await environment.close()
    await asyncio.to_thread(wait_until, lambda: host.end is not None)


async def test_a_host_that_dies(make: Made) -> None:
    environment, neighbour = make(), make()
    await environment.start()
    await neighbour.start()
    with pytest.raises(HostError, match="ended with SIGKILL"):
        await environment.reply(say("died"))
    with pytest.raises(HostError, match="ended with SIGKILL"):
        await neighbour.reply(say("say x"))
    for one in (environment, neighbour):
        await one.close()
    with pytest.raises(HostError, match="exit code 7; the last that it printed: about to leave"):
        await ask(make(), "left")
    assert (await ask(make(), "say x"))[0].messages[0].content == "x"


async def test_one_with_a_state_goes_on_in_another_host(make: Made, tmp_path: Path) -> None:
    environment = make("Counter", seed=10, options={"mark": str(tmp_path / "mark")})
    await environment.start()
    await environment.reply(say("x"))
    [host] = hosts_of(environment)
    os.kill(host.pid, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: host.end is not None)
    reply = await environment.reply(say("x"))
    assert (reply.messages[0].content, reply.reward) == ("12", 0.5)
    assert (await environment.reply(say("die once"))).messages[0].content == "13"
    state = environment.save()
    assert state is not None
    await environment.close()
    other = make("Counter")
    await other.load(state)
    assert (await other.reply(say("end"))).messages[0].content == "14"
    assert other.save() is None
    await other.close()
    twice = make("Counter")
    await twice.start()
    with pytest.raises(HostError, match="exit code 1"):
        await twice.reply(say("die"))
    await twice.close()


async def test_an_import_that_takes_long_has_a_limit_of_its_own(foreign: Path, make: Made, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    wait = f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\n"
    foreign.write_text(wait + foreign.read_text())
    late = make("Told", timeout_s=0.1, start_timeout_s=0.3)
    with pytest.raises(HostStartTimeout, match=r"not imported within 0.3 s \(start_timeout_s\)"):
        await late.start()
    gate.touch()
    patient = make("Told", timeout_s=300.0, start_timeout_s=300.0)
    assert [message.content for message in await patient.start()] == ["Begin.", "seed 0"]
    (host,) = hosts_of(patient)
    assert host is hosts_of(late)[0], "what the first one began is not begun again"
    await patient.close()


def test_a_host_that_dies_at_the_start_is_replaced_once(make: Made, tmp_path: Path) -> None:
    environment = make("Counter", options={"dies_at_start": str(tmp_path / "mark")})
    assert run(ask(environment, "x"))[0].messages[0].content == "1"


@pytest.mark.parametrize(
    ("settings", "error", "expected"),
    [
        ({"options": {"start": 5}}, HostedCodeError, "start: got 5, expected a list"),
        ({"options": {"start": [{"x": 1}]}}, HostedCodeError, "unknown key 'x'"),
        ({"options": {"start": None}}, HostedCodeError, "got None"),
        ({"python": "no_such_python"}, ConfigError, "got 'no_such_python', expected an interpreter"),
        ({"python": "/nowhere/bin/python"}, ConfigError, "got '/nowhere/bin/python', expected an interpreter"),
        ({"python": "/"}, ConfigError, "expected an interpreter"),
        ({"python": "false"}, HostError, "exit code 1"),
        ({"python": "true"}, HostError, "exit code 0"),
    ],
)
def test_a_start_or_an_interpreter_that_is_none(
    make: Made, settings: dict[str, Any], error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=expected):
        run(ask(make(**settings)))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("no_such_module:Game", r"importing 'no_such_module' failed: ModuleNotFoundError: No module named"),
        ("json:Game", "module 'json' has no 'Game'"),
        ("no/such/file.py:Game", "there is no file 'no/such/file.py'"),
        ("broken.py:Game", "importing .* failed: SyntaxError: "),
        ("leaving.py:Game", "importing .* failed: SystemExit: 4"),
        ("Game", "expected module:Thing, file.py:Thing, or one of gymnasium, openenv, ors, textarena, textarena_s"),
        ("", "target: missing"),
    ],
)
def test_a_target_that_cannot_be_imported(
    foreign: Path, target: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (foreign.parent / "broken.py").write_text("class Game(:\n")
    (foreign.parent / "leaving.py").write_text("import sys\nsys.exit(4)\n")
    monkeypatch.chdir(foreign.parent)
    with pytest.raises(ConfigError, match=expected):
        run(ask(HostedEnvironment(HostedEnvironment.Config(target=target), problem=PROBLEM, seed=0)))


def test_modules_beside_the_run_file_are_found(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(foreign.parent))
    (foreign.parent / "deep").mkdir()
    (foreign.parent / "deep" / "inner.py").write_text("from foreign import Told")
    config = HostedEnvironment.Config(target="foreign:Told")
    assert run(ask(HostedEnvironment(config, problem=PROBLEM, seed=0), "say x"))[0].messages[0].content == "x"
    config = HostedEnvironment.Config(target="inner:Told", path=("deep",))
    monkeypatch.chdir(foreign.parent)
    assert run(ask(HostedEnvironment(config, problem=PROBLEM, seed=0), "say x"))[0].messages[0].content == "x"


async def test_many_at_once(make: Made) -> None:
    environments = [make(seed=number, processes=3) for number in range(60)]

    async def one(number: int) -> None:
        environment = environments[number]
        assert (await environment.start())[1].content == f"seed {number}"
        for turn in range(5):
            text = f"say {number} {turn}"
            assert (await environment.reply(say(text))).messages[0].content == text.removeprefix("say ")

    await asyncio.gather(*(one(number) for number in range(60)))
    assert sorted(len(host.keys) for host in hosts_of(environments[0])) == [20, 20, 20]
    await asyncio.gather(*(environment.close() for environment in environments))
    assert [len(host.keys) for host in hosts_of(environments[0])] == [0, 0, 0]


async def test_async_methods_share_an_event_loop(make: Made, tmp_path: Path) -> None:
    options = {"closed": str(tmp_path / "closed")}
    pair = [make("Async", options=options) for _ in range(2)]
    for one in pair:
        await one.start()
    await asyncio.gather(*(one.reply(say("meet")) for one in pair))
    for one in pair:
        await one.close()
    assert (tmp_path / "closed").read_text() == "closed closed "


def test_closing_the_hosts_closes_their_environments(make: Made, tmp_path: Path) -> None:
    run(make("Async", options={"closed": str(tmp_path / "closed")}).start())
    pools.close_pools()
    assert (tmp_path / "closed").read_text() == "closed "


async def test_an_idle_host_is_ended_and_started_again(make: Made) -> None:
    environment = make(idle_timeout_s=0.05)
    await environment.start()
    [host] = hosts_of(environment)
    await environment.close()
    await asyncio.to_thread(wait_until, lambda: host.end is not None)
    assert hosts_of(environment) == ()
    assert (await ask(make(idle_timeout_s=0.05), "say x"))[0].messages[0].content == "x"


def test_equal_settings_share_hosts(make: Made) -> None:
    assert make()._pool is make(options={"other": 1}, timeout_s=5.0)._pool
    assert make()._pool is not make(processes=2)._pool


@pytest.mark.parametrize("victim", ["nobody", "runner", "guard"])
def test_children_do_not_outlive_their_host(make: Made, victim: str) -> None:
    async def play() -> tuple[list[int], Any]:
        environment = make()
        await environment.start()
        where = told(await environment.reply(say("where")))
        return told(await environment.reply(say("children"))), where

    children, where = run(play())
    assert all(is_alive(pid) for pid in children)
    if victim == "nobody":
        pools.close_pools()
    else:
        os.kill(where["pid"] if victim == "runner" else where["parent"], signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in [*children, where["pid"], where["parent"]]))


EXPLORER = """
import asyncio, sys
sys.path[:0] = [{root!r}]
from rftstream.environments.hosted import HostedEnvironment
from tests.unit.environments.hosts.scene import PROBLEM, say

async def main():
    config = HostedEnvironment.Config(target={target!r})
    environment = HostedEnvironment(config, problem=PROBLEM, seed=0)
    await environment.start()
    for words in ("where", "children"):
        print((await environment.reply(say(words))).messages[0].content, flush=True)
    await environment.reply(say("hung"))

asyncio.run(main())
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_explorer(foreign: Path, signal_number: int) -> None:
    root = str(Path(pools.__file__).parents[3])
    code = EXPLORER.format(root=root, target=f"{foreign}:Told")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root) as explorer:
        assert explorer.stdout
        where, children = (json.loads(explorer.stdout.readline()) for _ in range(2))
        assert all(is_alive(pid) for pid in children)
        explorer.send_signal(signal_number)
    wait_until(lambda: not any(is_alive(pid) for pid in [*children, where["pid"], where["parent"]]))


def test_closed_pools_are_made_anew(make: Made) -> None:
    environment = make()
    run(ask(environment, "say x"))
    pools.close_pools()
    assert pool_of(environment._config.hosts()) is not environment._pool
