"""What of the policy vllm can be tested without vllm. The rest is in tests/engines."""

import asyncio
import dataclasses
import errno
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from rftstream.config.sections import LoraSection
from rftstream.contracts.tasks import Sampling
from rftstream.errors import ConfigError
from rftstream.loops import LoopThread
from rftstream.models.vision.image_tokens import ImageTokens
from rftstream.policies.base import EngineLoad, part_seed
from rftstream.policies.vllm import arguments as vllm_arguments
from rftstream.policies.vllm import shared as vllm_shared
from rftstream.policies.vllm.engine import remembers
from rftstream.policies.vllm.load import EngineMeasures
from rftstream.policies.vllm.policy import VllmPolicy
from rftstream.policies.vllm.shared import SharedAdapter, WeightsMirror
from rftstream.policies.vllm.worker import WeightsReceiver, _spare_generators
from rftstream.runs.folder import RunFolder
from rftstream.weights.publisher import publish
from rftstream.weights.shared_memory import SharedTensors, name_prefix
from rftstream.weights.snapshot import RawTensor, decode_snapshot
from rftstream.weights.stores.store import ObjectStore
from tests.configs import small_run
from tests.unit import tiny
from workers import parts

KNOWN = ["model", "tensor_parallel_size", "max_num_seqs", "logprobs_mode", "gpu_memory_utilization", "load_format",
         "mm_processor_kwargs", "enable_lora", "speculative_config"]  # fmt: skip


def spec(device="cpu", lora=None):
    return SimpleNamespace(device=device, threads=3, folder=Path("/models/it"), dtype="bfloat16", lora=lora)


def arguments(device="cpu", context=64, images=None, lora=None, **settings):
    renderer = SimpleNamespace(context=context, images=images)
    return vllm_arguments.engine_arguments(VllmPolicy.Config(**settings), spec(device, lora), renderer, KNOWN)


@pytest.mark.parametrize(
    ("device", "known", "said"),
    [
        ("cuda", [*KNOWN, "enable_return_routed_experts"], None),
        ("cuda", KNOWN, "the installed vLLM has no argument enable_return_routed_experts; install a later one"),
        ("cpu", [*KNOWN, "enable_return_routed_experts"], "vLLM's build for CPUs cannot say which experts"),
    ],
)
def test_an_engine_says_which_experts_tokens_take_or_is_refused(monkeypatch, tmp_path, device, known, said):
    """By `check`, from the source of the package, and when the engine starts."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text("\n".join(f"{name}: bool = False" for name in known))
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    renderer = SimpleNamespace(context=64, images=None)
    for ask in (
        lambda: VllmPolicy.require_experts([device]),
        lambda: vllm_arguments.engine_arguments(
            VllmPolicy.Config(), spec(device), renderer, known, records_experts=True
        )["enable_return_routed_experts"],
    ):
        if said is None:
            assert ask() in (None, True)
        else:
            with pytest.raises(ConfigError, match=f"^trainer.routing: {said}.*use policy 'hf', or set 'own'"):
                ask()
    environment = vllm_arguments.engine_environment(VllmPolicy.Config(), spec(device), records_experts=True)
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run = small_run(
        run={"name": "it", "steps": 1}, tasksets={"it": {"source": "arithmetic"}}, explorer={"policy": "vllm"},
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"policy vllm: the package vllm is not installed; `rftstream doctor"):
        run.build_part("policy", "vllm")


def test_arguments_of_the_engine_pass_through_but_for_those_that_have_a_setting():
    given = arguments("cuda", engine={"tensor_parallel_size": 2}, batch_size=7)
    assert given["tensor_parallel_size"] == 2 and given["max_num_seqs"] == 7 and given["max_model_len"] == 64
    assert given["logprobs_mode"] == "processed_logprobs" and given["enable_sleep_mode"] is False
    assert "kv_cache_memory_bytes" not in given and "max_model_len" not in arguments("cuda", context=None)
    assert arguments("cpu")["kv_cache_memory_bytes"] == 1 << 30
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    assert arguments("cuda", engine={"speculative_config": drafts})["speculative_config"] == drafts
    with pytest.raises(ConfigError, match=r"policies\.vllm\.engine\.speculative_config: on a CPU .*leave it to GPUs"):
        arguments("cpu", engine={"speculative_config": drafts})
    assert "kv_cache_memory_bytes" not in arguments("cpu", engine={"gpu_memory_utilization": 0.5})
    with pytest.raises(ConfigError, match=r"policies\.vllm\.engine\.tensor_paralel_size: unknown .*did you mean 'ten"):
        arguments(engine={"tensor_paralel_size": 2})
    with pytest.raises(ConfigError, match=r"policies\.vllm\.engine\.model: .*set model\.path instead"):
        arguments(engine={"model": "other"})
    with pytest.raises(ConfigError, match=r"engine\.logprobs_mode: got 'raw_logprobs', .*leave it out"):
        arguments(engine={"logprobs_mode": "raw_logprobs"})


def test_an_engine_that_is_shown_images_begins_without_weights_and_sees_the_trainers_pixels():
    tokens = ImageTokens(token_id=1, per_image=16, never_sampled=(1,))
    given = arguments(images=tokens)
    assert given["mm_processor_kwargs"] == {"backend": "pil"} and given["mm_processor_cache_gb"] == 0
    assert given["load_format"] == "dummy" and "load_format" not in arguments()
    assert arguments(images=tokens, engine={"load_format": "auto"})["load_format"] == "auto"
    with pytest.raises(ConfigError, match=r"engine\.mm_processor_kwargs: got .*leave it out"):
        arguments(images=tokens, engine={"mm_processor_kwargs": {}})


def test_adapters_are_applied_where_vllm_can():
    def given(device="cuda", rank=9, **settings):
        made = arguments(device, lora=LoraSection(rank=rank), **settings)
        return (made["max_loras"], made["max_lora_rank"]) if made.get("enable_lora") else None

    tokens = ImageTokens(token_id=1, per_image=16, never_sampled=(1,))
    assert given() == (1, 16) and given(rank=8) == (1, 8) and given(rank=512) == (1, 512)
    assert given("cpu") is None and given("cpu", adapters="apply") == (1, 16)
    assert given(adapters="merge") is None and "enable_lora" not in arguments("cuda", adapters="apply")
    cases = [
        ({"images": tokens}, "this model is shown images"),
        ({"rank": 513}, r"model\.lora\.rank is 513, vLLM takes up to 512"),
        ({"engine": {"load_format": "dummy"}}, "does not have the weights"),
    ]
    for case, why in cases:
        assert given(**case) is None and given("cpu", **case) is None
        with pytest.raises(ConfigError, match=rf"policies\.vllm\.adapters: got 'apply', but .*{why}.*; set 'merge'"):
            given(**case, adapters="apply")
    with pytest.raises(ConfigError, match=r"engine\.enable_lora: .*set policies\.vllm\.adapters instead"):
        arguments(engine={"enable_lora": True})


def test_adapters_are_shared_as_a_folder_of_peft_until_they_are_closed(tmp_path):
    made = dataclasses.replace(tiny.make(tmp_path), lora=LoraSection(rank=2, alpha=4.0))
    tensors = {
        f"base_model.model.model.layers.0.mlp.up_proj.lora_{side}.weight": RawTensor("F32", shape, bytes(4 * 64))
        for side, shape in (("A", (2, 32)), ("B", (32, 2)))
    }
    shared = SharedAdapter(made, tensors)
    settings = json.loads((Path(shared.path) / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (2, 4.0)
    found = decode_snapshot((Path(shared.path) / "adapter_model.safetensors").read_bytes())
    assert {name: one.shape for name, one in found.items()} == {name: one.shape for name, one in tensors.items()}
    shared.close()
    assert not Path(shared.path).exists()


def test_adapters_lie_elsewhere_where_memory_is_full_and_those_of_the_dead_are_removed(monkeypatch, tmp_path):
    made = dataclasses.replace(tiny.make(tmp_path), lora=LoraSection(rank=2, alpha=4.0))
    memory, written = tmp_path / "memory", []
    memory.mkdir()
    monkeypatch.setattr(vllm_shared, "MEMORY", memory)
    of_mine = name_prefix("adapter")
    left, living, elsewhere = (
        f"{of_mine}999999999-a",
        f"{of_mine}{os.getpid()}-b",
        "rftstream-adapter-1-999999999-c",
    )
    for name in (left, living, elsewhere):
        (memory / name).mkdir()

    def full(folder, spec, tensors):
        written.append(folder)
        (folder / "adapter_config.json").write_text("{}")
        if folder.is_relative_to(memory):
            raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(vllm_shared, "write_adapter", full)
    shared = SharedAdapter(made, {})
    assert sorted(one.name for one in memory.iterdir()) == sorted([living, elsewhere])
    assert [str(one) for one in written[1:]] == [shared.path]
    shared.close()


def test_placeholders_have_no_probability_and_the_engine_needs_torchvision(monkeypatch, tmp_path):
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY=2))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    assert vllm_arguments.sampling_params(tiny.request(0), [0], [1, 2])["logit_bias"] == {1: -math.inf, 2: -math.inf}
    assert vllm_arguments.sampling_params(tiny.request(0), [0], ())["logit_bias"] is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="shown images: the package torchvision is not installed"):
        VllmPolicy.require_images(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl", "video_token_id": 5}')
    with pytest.raises(ConfigError, match=r"models of type 'qwen2_vl' read videos, too.*use policy 'hf'"):
        VllmPolicy.require_images(tmp_path)


def test_the_engine_says_how_busy_it_is(monkeypatch):
    assert arguments()["disable_log_stats"] and not arguments(says_load=True)["disable_log_stats"]
    now = iter([10.0, 10.5, 11.0, 21.0, 22.0])
    monkeypatch.setattr("rftstream.policies.vllm.load.time.monotonic", lambda: next(now))
    measures = EngineMeasures()
    loggers = [measures.logger(None, engine) for engine in (0, 1)]
    scheduler = SimpleNamespace(num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.5)
    iteration = SimpleNamespace(num_generation_tokens=30, num_preempted_reqs=1)
    loggers[0].record(scheduler, iteration, None, engine_idx=0)
    loggers[1].record(scheduler, iteration)
    loggers[0].record(None, None)
    assert measures.load == EngineLoad(num_tokens=60, busy_s=1.0, num_waiting=4, num_refused=2, memory=0.4)
    idle = SimpleNamespace(num_running_reqs=0, num_waiting_reqs=0, kv_cache_usage=0.1)
    for logger in loggers:  # a pause counts for a second at most, and without requests nothing does
        logger.record(idle, None, mm_cache_stats=None)
    assert (measures.load.busy_s, measures.load.num_waiting, measures.load.memory) == (3.0, 0, 0.0)


@pytest.mark.parametrize(("device", "visible", "expected"), [
    ("cuda", None, None), ("cuda:1", None, "1"), ("cuda:1", "4,5", "5"), ("cuda:0,1", "4,5,6", "4,5"),
    ("cuda:1", "GPU-a,GPU-b", "GPU-b"),
])  # fmt: skip
def test_the_device_says_which_gpus_the_engine_sees(monkeypatch, device, visible, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    made = vllm_arguments.engine_environment(VllmPolicy.Config(), spec(device))
    assert made.get("CUDA_VISIBLE_DEVICES") == expected


def test_a_device_that_is_not_visible_is_an_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigError, match=r"device 'cuda:2', expected numbers below 2"):
        vllm_arguments.engine_environment(VllmPolicy.Config(), spec("cuda:2"))


def test_the_environment_is_what_is_given_before_what_is_there_before_defaults(monkeypatch):
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = vllm_arguments.engine_environment(
        VllmPolicy.Config(environment={"VLLM_CPU_OMP_THREADS_BIND": "0-1"}), spec()
    )
    assert made["VLLM_NO_USAGE_STATS"] == "1" and made["VLLM_LOGGING_LEVEL"] == "INFO"
    assert made["VLLM_CPU_OMP_THREADS_BIND"] == "0-1" and made["OMP_NUM_THREADS"] == "3"


def test_who_goes_on_draws_other_numbers():
    request = tiny.request(0)
    seeds = {part_seed(one) for one in (request, tiny.request(1), dataclasses.replace(request, num_sampled=1))}
    assert len(seeds) == 3 and all(0 <= one < 1 << 63 for one in seeds)
    assert remembers(Sampling(stop=("x",))) and remembers(Sampling(presence_penalty=0.1)) and not remembers(Sampling())


def test_weights_that_nobody_follows_are_written_where_the_engine_reads_and_only_what_changed():
    values = np.arange(6, dtype=np.float32)
    mirror = WeightsMirror({"a.weight": ("F32", (2, 3)), "b.weight": ("F32", (2, 3))})

    def written(**scales):
        return mirror.write({f"{key}.weight": RawTensor("F32", (2, 3), values * by) for key, by in scales.items()})

    first, second = written(a=1, b=1), written(a=1, b=2)
    read = subprocess.run(["cat", second.memory.path], stdout=subprocess.PIPE, check=True).stdout
    assert bytes(decode_snapshot(read)["b.weight"].data) == (values * 2).tobytes()
    assert second.memory.path == first.memory.path and second.changed_since(first.marks) == ["b.weight"]
    with first.reading() as is_current:
        assert not is_current
    mirror.close()
    assert not Path(second.memory.path).exists()


class Worker(WeightsReceiver):
    """As much of vLLM's as is used."""

    def __init__(self, model):
        self.model, self.taken = model, {}

    def get_model(self):
        return self.model

    def reload_weights(self, weights_iterator):
        self.taken = {name: tensor.clone() for name, tensor in weights_iterator}
        with torch.no_grad():
            self.model.embed.weight.copy_(self.taken["embed.weight"])


def test_a_tied_head_is_prepared_anew():
    """Of weights that two layers share, vLLM prepares only the first one's kernel."""
    model = torch.nn.Module()
    model.embed, model.head, model.other = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3), torch.nn.Linear(2, 2)
    model.head.weight = model.embed.weight
    prepared = []
    for layer in (model.embed, model.head, model.other):
        layer.cpu_linear = layer.quant_method = SimpleNamespace(process_weights_after_loading=prepared.append)
    worker = Worker(model)
    mirror = WeightsMirror({"embed.weight": ("F32", (3, 2))})
    shared = mirror.write({"embed.weight": RawTensor("F32", (3, 2), np.full(6, 7, np.float32).tobytes())})
    worker.rftstream_load(shared.memory.path)
    mirror.close()
    assert worker.taken["embed.weight"].tolist() == model.head.weight.tolist() == [[7, 7]] * 3
    assert prepared == [model.head]


def test_generators_of_tokens_that_are_thrown_away_are_not_set_back():
    seen = []
    runner = SimpleNamespace(input_batch=SimpleNamespace(generators={0: "a", 2: "c"}),
                             discard_request_mask=SimpleNamespace(np=np.asarray([True, True, False])))  # fmt: skip
    runner._bookkeeping_sync = lambda *given: seen.append((given, dict(runner.input_batch.generators))) or "done"
    _spare_generators(runner)
    assert runner._bookkeeping_sync(1, 2) == "done"
    assert seen == [((1, 2), {2: "c"})] and runner.input_batch.generators == {0: "a", 2: "c"}


ENGINE = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
print(worker.pid, flush=True)
worker.wait()
"""
WORKER = """
import sys, time
from rftstream.policies.vllm.worker import WeightsReceiver
WeightsReceiver()._end_with(int(sys.argv[1]))
print("watching", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_the_engine_ends_with_its_client():
    client = subprocess.Popen(["sleep", "600"])
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, WORKER, str(client.pid)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert engine.stdout is not None
        worker = psutil.Process(int(engine.stdout.readline()))
        assert engine.stdout.readline() == "watching\n" and engine.poll() is None
        client.kill()
        client.wait()
        assert engine.wait(60) == -signal.SIGKILL
        worker.wait(60)
    finally:
        for process in (client, engine):
            process.kill()
            process.wait()
        engine.stdout.close()


def test_the_loop_thread_calls_in_order_and_cancels_what_is_left():
    loop, told = LoopThread("it"), []

    async def forever():
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            told.append("cancelled")
            raise

    async def value():
        asyncio.get_running_loop().create_task(forever())
        await asyncio.sleep(0)
        return len(told)

    loop.soon(told.append, 1)
    assert loop.call(value()) == 1
    loop.close()
    loop.close()
    assert told == [1, "cancelled"] and loop.closed


@pytest.mark.parametrize(("policy", "lora", "is_shared"), [
    ("vllm", None, True), ("vllm", LoraSection(rank=2), False), ("hf", None, False)
])  # fmt: skip
def test_weights_are_followed_where_the_engine_reads_them(tmp_path, policy, lora, is_shared):
    context = SimpleNamespace(simulated=False, folder=RunFolder(tmp_path))
    made = SimpleNamespace(name="m", lora=lora, threads=1)
    store = ObjectStore("file://weights", base=tmp_path)
    told = publish(store, {"w": RawTensor("F32", (2,), bytes(8))}, tiny.name(0), "m", "float32")
    follower = parts.follower(context, policy, made, store)
    assert isinstance(follower.fetch(told), SharedTensors) is is_shared
