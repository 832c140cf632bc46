"""When vLLM's engine sleeps and wakes, and takes weights and adapters: the calls that it gets. The engine is a
stand-in."""

import asyncio
import queue
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rftstream.contracts.beside import fill_columns
from rftstream.contracts.token_values import EXPERTS
from rftstream.errors import PolicyError
from rftstream.policies.vllm.engine import Engine
from rftstream.policies.vllm.policy import VllmPolicy
from rftstream.policies.vllm.shared import SharedAdapter, WeightsMirror
from rftstream.weights.snapshot import RawTensor, decode_snapshot
from tests.suite.each import each
from tests.unit import tiny


class Vllm:
    """As much of AsyncLLM as is called. A request ends when it is told to."""

    errored = False
    routed = None
    """Experts that it says a request's tokens took."""

    def __init__(self):
        self.events, self.may_end, self.fails, self.loads = [], {}, None, []
        self.answers = self.right
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
        self.loads.append(args)
        return self.answers(*args)

    @staticmethod
    def right(path, changed):
        """Of two workers."""
        num = len(decode_snapshot(Path(path).read_bytes()))
        return [{"tensors": num, "changed": num if changed is None else len(changed), "given": num}] * 2

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
            finish_reason="length", token_ids=[1], logprobs=SimpleNamespace(logprobs=[-0.5], start_indices=[0]),
            weight_versions=[SimpleNamespace(start=0, end=1, version="1/0")], routed_experts=self.routed,
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


def run(play, *, has_version=True, layers=(), **settings):
    """Play with an engine that has started, with weights of a version unless said otherwise, and return its outcomes
    and what vLLM was told."""

    async def played():
        outcomes = queue.SimpleQueue()
        config = VllmPolicy.Config(sleep_after_s=0.01, **settings)
        engine = Engine(
            config, None, SimpleNamespace(images=None, stop_token_ids={0}), outcomes, None, expert_layers=layers
        )
        engine._engine, engine.started = Vllm(), True
        if has_version:
            engine._weights.has_version.set()
        await play(engine, engine._engine)
        return [outcomes.get_nowait() for _ in range(outcomes.qsize())], engine._engine.events

    return asyncio.run(played())


def mirror():
    return WeightsMirror(dict.fromkeys(("a", "b", "c"), ("F32", (2,))))


def weights(**values):
    return {name: RawTensor("F32", (2,), np.full(2, values.get(name, 0), np.float32)) for name in ("a", "b", "c")}


def shared(**values):
    return mirror().write(weights(**values))


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


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "finish"])
def test_an_engine_sleeps_through_new_weights_and_takes_the_newest_when_it_wakes(in_flight):
    async def play(engine, vllm):
        made = mirror()
        await give(engine, made.write(weights()), "1/0")
        await sampled(engine, vllm, 0)
        await vllm.until("sleep 1 keep")
        await give(engine, made.write(weights(a=1)), "1/1")
        await give(engine, made.write(weights(a=1, c=1)), "1/2")
        assert vllm.events[-1] == "sleep 1 keep"
        await sampled(engine, vllm, 1)
        await vllm.until("sleep 1 keep", times=2)
        assert [changed for _, changed in vllm.loads] == [None, ["a", "c"]]

    _, events = run(play, in_flight=in_flight)
    slept = events.index("sleep 1 keep")
    assert events[slept:] == [
        "sleep 1 keep", "wake", "pause", "rftstream_load", "1/2", "resume", "add r1", "sleep 1 keep"
    ]  # fmt: skip


async def give(engine, version, label):
    """As the policy does."""
    if engine._config.in_flight == "finish":
        engine.load_later(version, label)
        if engine._loading is not None:
            await engine._loading
    else:
        await engine.load(version, label)


async def turns():
    """Let all that can go on go on."""
    for _ in range(50):
        await asyncio.sleep(0)


def test_what_enters_an_engine_that_wakes_waits_while_the_next_version_is_being_written():
    """What it slept through is gone, since a follower has gone on in its memory."""

    async def play(engine, vllm):
        made = mirror()
        await give(engine, made.write(weights()), "1/0")
        await sampled(engine, vllm, 0)
        await vllm.until("sleep 1 keep")
        await give(engine, made.write(weights(a=1)), "1/1")
        newer = made.write(weights(a=2))
        engine.begin("r2", tiny.request(2))
        engine.begin("r1", tiny.request(1))
        await asyncio.sleep(0)
        engine.abort("r2")  # whoever waits for the waking may go
        await vllm.until("wake")
        await turns()
        await engine.rest()  # and the device can be given up all the same
        await engine.rouse()
        await turns()
        assert vllm.events.count("rftstream_load") == 1 and "add r1" not in vllm.events
        await give(engine, newer, "1/2")
        await vllm.until("add r1")
        vllm.may_end["r1"].set()
        await vllm.until("sleep 1 keep", times=3)

    _, events = run(play)
    assert events[events.index("wake") :] == [
        "wake", "sleep 1 keep", "wake", "pause", "rftstream_load", "1/2", "resume", "add r1", "sleep 1 keep"
    ]  # fmt: skip


def test_a_request_that_waits_for_a_version_wakes_an_engine_that_was_falling_asleep():
    async def play(engine, vllm):
        made = mirror()
        await give(engine, made.write(weights()), "1/0")
        engine._begin_sleep()
        await engine._sleeping
        await engine.load(made.write(weights(a=1)), "1/1")
        newer = made.write(weights(a=2))
        falling, may_sleep = asyncio.Event(), asyncio.Event()
        note = vllm.sleep

        async def slowly(level, mode):
            falling.set()
            await may_sleep.wait()
            await note(level, mode)

        await engine._wake()  # finds nothing to take over
        vllm.sleep = slowly
        engine._begin_sleep()
        await falling.wait()
        engine.begin("r0", tiny.request(0))
        await turns()
        may_sleep.set()
        await vllm.until("wake", times=2)
        await turns()
        assert "add r0" not in vllm.events
        await engine.load(newer, "1/2")
        await vllm.until("add r0")
        vllm.may_end["r0"].set()

    run(play)


def test_with_finish_what_was_changed_before_it_could_be_read_is_not_read():
    async def play(engine, vllm):
        made = mirror()
        await give(engine, made.write(weights()), "1/0")
        engine.begin("r0", tiny.request(0))
        await vllm.until("add r0")
        engine.load_later(made.write(weights(a=1)), "1/1")
        newer = made.write(weights(a=1, b=2))  # while r0 still runs
        engine.begin("r1", tiny.request(1))
        vllm.may_end["r0"].set()
        await engine._loading
        await turns()
        assert vllm.events.count("rftstream_load") == 1
        assert "add r1" not in vllm.events, "it may need a version as new as 1/1"
        engine.load_later(newer, "1/2")
        engine.begin("r2", tiny.request(2))
        for unique in ("r1", "r2"):
            await vllm.until(f"add {unique}")
            vllm.may_end[unique].set()
        assert vllm.loads[-1][1] == ["a", "b"] and "1/1" not in vllm.events
        assert min(map(vllm.events.index, ("add r1", "add r2"))) > vllm.events.index("1/2")

    run(play, in_flight="finish")


@pytest.mark.parametrize("in_flight", ["keep", "finish"])
def test_nothing_is_sampled_before_the_first_version_also_if_it_could_not_be_read(in_flight):
    async def play(engine, vllm):
        made = mirror()
        engine.load_later(made.write(weights()), "1/0")
        newer = made.write(weights(a=1))
        engine.begin("r0", tiny.request(0))
        await engine._loading
        await engine.rest()  # and the device can be given up all the same
        await engine.rouse()
        assert vllm.events == ["sleep 1 keep", "wake"]
        await give(engine, newer, "1/1")
        await vllm.until("add r0")
        vllm.may_end["r0"].set()

    _, events = run(play, has_version=False, in_flight=in_flight)
    assert events[2:7] == ["pause", "rftstream_load", "1/1", "resume", "add r0"]


def test_workers_are_told_what_differs_from_what_they_have():
    async def play(engine, vllm):
        made = mirror()
        for number, values in enumerate(({}, {"a": 1}, {"a": 1}, {"b": 1, "c": 2})):
            await engine.load(made.write(weights(**values)), f"1/{number}")
        other = mirror().write(weights())
        await engine.load(other, "1/4")
        paths = {path for path, _ in vllm.loads[:-1]}
        assert [changed for _, changed in vllm.loads] == [None, ["a"], ["a", "b", "c"], ["a", "b", "c"]]
        assert len(paths) == 1 and vllm.loads[-1][0] == other.memory.path

    _, events = run(play)
    assert [one for one in events if "/" in one] == [f"1/{number}" for number in range(5)]


def disagreeing(path, changed):
    return [{"tensors": 3, "changed": 3, "given": 3}, {"tensors": 3, "changed": 2, "given": 2}]


def dead(path, changed):
    raise RuntimeError("EngineCore died")


@each(("answers", "why"), [
    (disagreeing, r"'changed': 2.*expected 3 tensors, 3 changed"), (dead, "EngineCore died"),
    (lambda path, changed: [], r"its workers read \[\]"),
])  # fmt: skip
@each("in_flight", ["keep", "finish"])
def test_weights_that_not_all_workers_took_end_the_engine(in_flight, answers, why):
    """Nothing is sampled any more, and whoever changes the memory does not wait for it."""

    async def play(engine, vllm):
        made = mirror()
        await give(engine, made.write(weights()), "1/0")
        vllm.answers = answers
        if in_flight == "keep":
            with pytest.raises(PolicyError, match=why):
                await engine.load(made.write(weights(a=1, b=1, c=1)), "1/1")
        else:
            await give(engine, made.write(weights(a=1, b=1, c=1)), "1/1")
        vllm.answers = vllm.right
        newer = made.write(weights(a=2))
        engine.begin("r0", tiny.request(0))
        while "r0" in engine._running:
            await asyncio.sleep(0)
        if in_flight == "keep":
            with pytest.raises(PolicyError, match="cannot go on"):
                await engine.load(newer, "1/2")
        assert engine._weights.label == "1/0"

    errors, events = run(play, in_flight=in_flight)
    assert "1/1" not in events and events.count("resume") == 1 and not any("add" in one for one in events)
    assert errors and all(isinstance(one, PolicyError) for one in errors)
    if in_flight == "finish":
        assert re.search(f"taking over weights 1/1 failed: .*{why}", str(errors[0]))


def test_weights_are_not_changed_while_workers_read_them():
    async def play(engine, vllm):
        made = mirror()
        version, reading, may_end = made.write(weights(a=1)), asyncio.Event(), asyncio.Event()

        async def slow(name, args):
            reading.set()
            await may_end.wait()
            assert np.frombuffer(decode_snapshot(Path(args[0]).read_bytes())["a"].data, np.float32)[0] == 1
            return vllm.right(*args)

        vllm.collective_rpc = slow
        loading = asyncio.create_task(engine.load(version, "1/1"))
        await reading.wait()
        writing = asyncio.create_task(asyncio.to_thread(made.write, weights(a=2)))
        done, _ = await asyncio.wait([writing], timeout=0.1)
        assert not done
        may_end.set()
        await loading
        assert (await writing).changed_since(version.marks) == ["a"]

    run(play)


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


def test_with_finish_what_was_put_to_rest_in_its_middle_ends_with_its_own_weights():
    async def play(engine, vllm):
        made = mirror()
        await give(engine, made.write(weights()), "1/0")
        engine.begin("r0", tiny.request(0))
        await vllm.until("add r0")
        await engine.rest()
        engine.load_later(made.write(weights(a=1)), "1/1")
        await turns()
        await engine.rouse()
        engine.begin("r1", tiny.request(1))
        await turns()
        assert "1/1" not in vllm.events and "add r1" not in vllm.events
        vllm.may_end["r0"].set()
        await vllm.until("add r1")
        assert "1/1" in vllm.events
        vllm.may_end["r1"].set()

    run(play, in_flight="finish")


def test_with_finish_nothing_is_waited_for_where_no_version_waits_any_more():
    async def play(engine, vllm):
        engine.begin("r0", tiny.request(0))
        await vllm.until("add r0")
        engine.load_later(shared(), "1/1")
        engine._weights.drop()  # as by an exchange that came first
        engine.begin("r1", tiny.request(1))
        await vllm.until("add r1")  # while r0 runs
        for unique in ("r0", "r1"):
            vllm.may_end[unique].set()

    run(play, in_flight="finish")


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


def test_experts_of_mixture_layers_stand_beside_the_tokens_that_their_passes_led_to():
    """Four prompt tokens and one sampled: four passes. The first of three layers is dense."""

    async def play(engine, vllm):
        vllm.routed = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
        vllm.routed[:, 0] = 0
        await sampled(engine, vllm, 0)
        await vllm.until("sleep 1 keep")
        vllm.routed = None
        await sampled(engine, vllm, 1)
        await vllm.until("sleep 1 keep", times=2)

    (_, first), (_, second) = run(play, layers=(1, 2))[0]
    assert second.beside == {}
    column = fill_columns({}, 5, first.beside)[EXPERTS]
    assert (column.counts_T.tolist(), column.values.dtype) == ([0, 4, 4, 4, 4], np.uint8)
    assert column.values.reshape(4, 4).tolist() == [[first, *range(first + 1, first + 4)] for first in (2, 8, 14, 20)]
    assert run(play)[0][0][1].beside == {}, "nobody asked"
