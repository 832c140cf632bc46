"""When vLLM's engine sleeps and wakes, and takes adapters: the calls that it gets. The engine is a stand-in."""

from __future__ import annotations

import asyncio
import queue
import sys
from types import SimpleNamespace

import pytest

from rftstream.errors import PolicyError
from rftstream.policies.vllm import VllmPolicy
from rftstream.policies.vllm_engine import Engine
from rftstream.policies.vllm_shared import SharedAdapter
from tests.unit import tiny


class Vllm:
    """As much of AsyncLLM as is called. A request ends when it is told to."""

    errored = False

    def __init__(self):
        self.events, self.may_end, self.fails = [], {}, None
        self.changed = asyncio.Condition()

    async def note(self, event):
        async with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    async def until(self, event, times=1):
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(lambda: self.events.count(event) >= times), 30)

    async def sleep(self, level, mode):
        if self.fails:
            raise self.fails
        await self.note(f"sleep {level} {mode}")

    async def wake_up(self):
        await self.note("wake")

    async def pause_generation(self, mode, clear_cache):
        await self.note("pause")

    async def resume_generation(self):
        await self.note("resume")

    async def collective_rpc(self, name, args):
        await self.note(name)

    async def add_lora(self, adapter):
        await self.note(f"adapter {adapter}")
        return adapter.path != "bad"

    async def update_weight_version(self, label):
        await self.note(label)

    async def add_request(self, unique, prompt, params, lora_request=None):
        await self.note(f"add {unique}" if lora_request is None else f"add {unique} with {lora_request}")
        self.may_end[unique] = asyncio.Event()
        return SimpleNamespace(get=lambda: self.answer(unique), request_id=unique)

    async def answer(self, unique):
        await self.may_end[unique].wait()
        output = SimpleNamespace(
            finish_reason="length", token_ids=[1], logprobs=SimpleNamespace(logprobs=[-0.5]),
            weight_versions=[SimpleNamespace(start=0, end=1, version="1/0")],
        )  # fmt: skip
        return SimpleNamespace(outputs=[output])


class Adapter:
    """vLLM's LoRARequest."""

    def __init__(self, name, number, path, load_inplace=False):
        self.name, self.number, self.path, self.inplace = name, number, path, load_inplace

    def __str__(self):
        return f"{self.number} {self.path}{' in place' * self.inplace}"


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    contents = {
        "vllm": {"SamplingParams": dict},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=2)},
        "vllm.inputs.engine": {"tokens_input": lambda ids, cache_salt: ids},
        "vllm.lora.request": {"LoRARequest": Adapter},
    }
    for name, content in contents.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))


def run(play, **settings):
    """Play with an engine that has started, and return its outcomes and what vLLM was told."""

    async def played():
        outcomes = queue.SimpleQueue()
        config = VllmPolicy.Config(sleep_after_s=0.01, **settings)
        engine = Engine(config, None, SimpleNamespace(images=None, stop_token_ids={0}), outcomes, None)
        engine._engine, engine.started = Vllm(), True
        await play(engine, engine._engine)
        return [outcomes.get_nowait() for _ in range(outcomes.qsize())], engine._engine.events

    return asyncio.run(played())


def shared(path="there"):
    return SimpleNamespace(path=path, close=lambda: None)


async def sampled(engine, vllm, number):
    engine.begin(f"r{number}", tiny.request(number))
    await vllm.until(f"add r{number}")
    vllm.may_end[f"r{number}"].set()


def test_an_idle_engine_sleeps_and_wakes_for_a_request():
    async def play(engine, vllm):
        await sampled(engine, vllm, 0)
        await vllm.until("sleep 1 keep")
        await sampled(engine, vllm, 1)
        await vllm.until("sleep 1 keep", times=2)

    outcomes, events = run(play)
    assert events == ["add r0", "sleep 1 keep", "wake", "add r1", "sleep 1 keep"]
    assert [(unique, completion.finish_reason) for unique, completion in outcomes] == [
        ("r0", "length"),
        ("r1", "length"),
    ]


def test_an_engine_that_is_sampling_stays_awake():
    async def play(engine, vllm):
        engine.begin("r1", tiny.request(1))
        await sampled(engine, vllm, 0)
        await vllm.until("add r1")
        engine._begin_sleep()  # as the timer would
        await engine._sleeping
        assert not engine._asleep
        vllm.may_end["r1"].set()
        await vllm.until("sleep 1 keep")

    assert run(play)[1].count("sleep 1 keep") == 1


@pytest.mark.parametrize("in_flight", ["keep", "finish"])
def test_weights_wake_an_engine_which_sleeps_again_behind_them(in_flight):
    async def play(engine, vllm):
        await sampled(engine, vllm, 0)
        await vllm.until("sleep 1 keep")
        if in_flight == "finish":
            engine.load_later(shared(), "1/1")
        else:
            await engine.load(shared(), "1/1")
        await vllm.until("sleep 1 keep", times=2)

    _, events = run(play, in_flight=in_flight)
    assert events[1:] == ["sleep 1 keep", "wake", "pause", "rftstream_load", "1/1", "resume", "sleep 1 keep"]


def test_an_engine_that_cannot_fall_asleep_is_a_policy_error():
    async def play(engine, vllm):
        vllm.fails = RuntimeError("no sleep")
        engine._begin_sleep()
        await engine._sleeping

    [error], _ = run(play)
    assert isinstance(error, PolicyError) and "did not fall asleep: RuntimeError: no sleep" in str(error)


def test_an_adapter_takes_the_place_of_the_one_before_and_requests_name_it():
    async def play(engine, vllm):
        for number in (1, 2):
            adapter = SharedAdapter.__new__(SharedAdapter)
            adapter.path = f"a{number}"
            await engine.load(adapter, f"1/{number}")
        engine.begin("r0", tiny.request(0))
        await vllm.until("add r0 with 1 a2")
        vllm.may_end["r0"].set()
        adapter.path = "bad"
        with pytest.raises(PolicyError, match=r"taking over weights 1/3 failed: .*did not take the adapter"):
            await engine.load(adapter, "1/3")

    _, events = run(play)
    assert [one for one in events if one != "sleep 1 keep" and one != "wake"][:9] == [
        "pause", "adapter 1 a1 in place", "1/1", "resume", "pause", "adapter 1 a2 in place", "1/2", "resume",
        "add r0 with 1 a2",
    ]  # fmt: skip


def test_an_engine_rests_in_the_middle_of_a_request_and_nothing_enters():
    async def play(engine, vllm):
        engine.begin("r0", tiny.request(0))
        await vllm.until("add r0")
        await engine.rest()
        engine.begin("r1", tiny.request(1))
        loading = asyncio.create_task(engine.load(shared(), "1/5"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert vllm.events == ["add r0", "sleep 1 keep"]
        await engine.rouse()
        await loading
        await vllm.until("add r1")
        for unique in ("r0", "r1"):
            vllm.may_end[unique].set()
        await vllm.until("sleep 1 keep", times=2)  # idle again

    _, events = run(play)
    assert events[:3] == ["add r0", "sleep 1 keep", "wake"]
    assert events.count("wake") == 1


def test_an_engine_that_sleeps_already_rests_as_it_is():
    async def play(engine, vllm):
        await sampled(engine, vllm, 0)
        await vllm.until("sleep 1 keep")
        await engine.rest()
        await engine.rouse()

    assert run(play)[1][:3] == ["add r0", "sleep 1 keep", "wake"]


def test_an_engine_that_cannot_rest_says_so():
    async def play(engine, vllm):
        vllm.fails = RuntimeError("no memory")
        with pytest.raises(PolicyError, match=r"did not fall asleep: .*no memory"):
            await engine.rest()

    run(play)
