"""The backend of many processes against the one-process torch backend, on CPUs, over gloo.

What is equal and how closely is said in with_ranks.py.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

import numpy as np
import psutil
import pytest
import torch
from safetensors.numpy import load_file
from torch.distributed import distributed_c10d

from rftstream.algorithms.by_taskset import ByTaskset, TasksetAlgorithm
from rftstream.algorithms.clips import Rloo
from rftstream.algorithms.grpo import Grpo
from rftstream.algorithms.mix import Mix
from rftstream.backends.deepspeed import rank, rank_processes, wire
from rftstream.backends.deepspeed.backend import DeepSpeedBackend
from rftstream.backends.deepspeed.rank_processes import RankPlace, Ranks
from rftstream.backends.deepspeed.settings import deepspeed_config, even_budget
from rftstream.config.parts import registry
from rftstream.config.sections import LoraSection
from rftstream.contracts.beside import uniform, wire_columns
from rftstream.errors import BackendError, ConfigError
from tests.unit import tiny
from tests.unit.backends.kept_ranks import TIMEOUT_S
from tests.unit.backends.with_ranks import (
    BATCHES,
    GRPO,
    KL,
    NUM_STEPS,
    agree,
    files_agree,
    make_backend,
    plan,
    saved,
    skips_what_is_no_number,
    torch_backend,
    train,
    unchanged,
    values_agree,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def opened(spec, open_kept):
    return lambda model=spec, **config: open_kept(make_backend(model, **config))


@pytest.fixture(scope="module")
def expected(spec, tmp_path_factory):
    """Metrics, and files after the last batch."""
    backend = torch_backend(spec)
    return train(backend), saved(backend, tmp_path_factory.mktemp("expected") / "files")


# --------------------------------------------------------------------------------------------- one process


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", [
    {"stage": 0},
    {"stage": 1, "offload_optimizer": True},
    {"stage": 2, "packing": False},
    {"stage": 3, "offload_optimizer": True, "offload_parameters": True, "gradient_checkpointing": True},
])  # fmt: skip
def test_one_process_gives_what_the_torch_backend_gives(opened, expected, config, tmp_path):
    backend = opened(**config)
    agree((train(backend), saved(backend, tmp_path / "after")), expected)
    before = skips_what_is_no_number(backend, GRPO, tmp_path, {}, {"minibatches": 4}, {"updates_per_batch": 2})
    served = {name: np.frombuffer(one.data, np.float32) for name, one in backend.served_tensors().items()}
    assert all(np.array_equal(served[name], array.ravel()) for name, array in before["masters"].items())
    assert not backend.update(tiny.rows(seed=4), GRPO, plan()).skipped
    assert not unchanged(saved(backend, tmp_path / "trained"), before)


def test_a_huge_loss_skips_though_its_gradient_is_a_number(opened, tmp_path):
    backend = opened(stage=2)
    before = saved(backend, tmp_path / "before")

    class Infinite(Grpo):
        def loss(self, *args, **settings):
            loss, metrics = super().loss(*args, **settings)
            return loss + float("inf"), metrics

    assert backend.update(tiny.rows(), Infinite(Grpo.Config()), plan()).skipped
    assert unchanged(saved(backend, tmp_path / "after"), before)


def test_all_groups_have_the_time_limit(opened):
    """Rank 0 waits no longer than that for one whose host is cut off; DeepSpeed's groups had half an hour."""
    opened(stage=1, timeout_s=TIMEOUT_S + 1)
    groups = [group._get_backend(torch.device("cpu")) for group in distributed_c10d._world.pg_map]
    assert len(groups) > 1, "the default one, and some of DeepSpeed"
    assert {group.options._timeout for group in groups} == {timedelta(seconds=TIMEOUT_S + 1)}


# --------------------------------------------------------------------------------------------- two processes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_processes_give_what_one_gives(opened, expected, stage, tmp_path):
    backend = opened(processes=2, stage=stage)
    agree((train(backend), saved(backend, tmp_path / "after")), expected)
    skips_what_is_no_number(backend, GRPO, tmp_path, {}, {"minibatches": 4})


@pytest.mark.law("replay")
def test_a_checkpoint_goes_on_with_another_stage_and_number_of_processes(spec, opened, tmp_path):
    """And in the torch backend, and back; what an algorithm may need of a backend is there in each."""
    rows, twice = tiny.rows(5, seed=4), plan(updates_per_batch=2)
    train(whole := torch_backend(spec))
    start, end = saved(whole, tmp_path / "start"), tmp_path / "end"
    logprobs = whole.logprobs(rows, 20) + whole.reference_logprobs(rows, 20)
    metrics = whole.update(rows, KL, twice).metrics
    expected = saved(whole, end)
    for config in {"processes": 2, "stage": 3}, {"processes": 2, "stage": 2}, {"stage": 0}, {"stage": 1}:
        backend = opened(**config)
        backend.load(tmp_path / "start")
        assert unchanged(saved(backend, tmp_path / f"loaded {config}"), start)
        values_agree(backend.logprobs(rows, 20) + backend.reference_logprobs(rows, 20), logprobs)
        update = backend.update(rows, KL, twice)
        for name in ("kl", "loss", "grad_norm", "num_tokens"):
            assert update.metrics[name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-6)
        files_agree(saved(backend, tmp_path / f"after {config}"), expected, NUM_STEPS + 2)
        backend.load(end)
        assert unchanged(saved(backend, tmp_path / f"back {config}"), expected)


@dataclasses.dataclass(frozen=True)
class FailsElsewhere:
    """An algorithm that rank 1 cannot compute with."""

    config: None = None
    needs: frozenset[str] = frozenset()

    def loss(self, policy_logprobs_BT, rows, denominators):
        if os.environ["RANK"] == "1":
            raise ValueError("of rank 1")
        return policy_logprobs_BT.sum() * 0, {}

    def summarise(self, means):
        return dict(means)


def test_the_error_of_a_rank_is_the_error_of_the_trainer(opened):
    """Though rank 0 only sees that its neighbour is gone."""
    backend = opened(processes=2, stage=2)
    with pytest.raises(BackendError, match=r"rank 1 of 2 \(.*\) failed in 'update': ValueError: of rank 1$"):
        backend.update(tiny.rows(), FailsElsewhere(), plan())
    with pytest.raises(BackendError, match="start again"):
        backend.update(tiny.rows(), FailsElsewhere(), plan())


def test_mini_batches_of_several_kinds_are_those_of_the_torch_backend(opened, spec):
    """Rollouts and demonstrations, dealt out alike by all ranks: a lone demonstration and a lone group, too."""
    how = plan(minibatches=3)
    algorithm = Mix(Mix.Config(mu=0.4))
    rows = [
        dataclasses.replace(row, stratum="sft" if expert else "rl", group=number if expert else row.group,
                            additions={name: np.full(len(row.token_ids), value, np.float32)
                                       for name, value in (("expert", float(expert)), ("mu", 0.4))})
        for number, row in enumerate(tiny.rows(11, seed=6))
        for expert in (number > 6,)
    ]  # fmt: skip
    theirs = torch_backend(spec).update(rows, algorithm, how).metrics
    ours = opened(processes=2, stage=2).update(rows, algorithm, how).metrics
    assert theirs["optimizer_steps"] == 3
    for name in ("loss", "grad_norm", "num_tokens", "optimizer_steps", "expert_nll", "policy_loss"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


# --------------------------------------------------------------------------------------------- adapters


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """Of one layer: ZeRO 3 gathers the parts of each adapter by itself."""
    pytest.importorskip("peft")
    made = tiny.make(tmp_path_factory.mktemp("adapted"), layers=1)
    return dataclasses.replace(made, lora=LoraSection(rank=4, alpha=8.0))


def without_adapters(spec):
    return dataclasses.replace(spec, lora=None)


def files_of(folder):
    return {str(path.relative_to(folder)): load_file(path) for path in folder.rglob("*.safetensors")}


def exported(backend, folder):
    folder.mkdir()
    backend.export(folder)
    return files_of(folder)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", [
    {"stage": 0},
    {"stage": 1, "offload_optimizer": True},
    {"stage": 2, "processes": 2},
    {"stage": 3, "processes": 2, "offload_parameters": True, "gradient_checkpointing": True},
])  # fmt: skip
def test_adapters_are_trained_as_the_torch_backend_trains_them(adapted, opened, config, tmp_path):
    """Published, skipped and exported, too; their reference is the model without them."""
    whole, backend = torch_backend(adapted), opened(adapted, **config)
    assert tiny.state(backend) == tiny.state(whole)  # drawn alike
    expected = train(whole, KL), saved(whole, tmp_path / "expected")
    agree((train(backend, KL), saved(backend, tmp_path / "after")), expected)
    before = skips_what_is_no_number(backend, KL, tmp_path, {}, {"minibatches": 4})
    assert all(".lora_" in name for name in before["masters"])
    served = {name: np.frombuffer(one.data, np.float32) for name, one in backend.served_tensors().items()}
    assert served.keys() == before["masters"].keys()
    assert all(np.array_equal(served[name], array.ravel()) for name, array in before["masters"].items())
    version_0 = torch_backend(without_adapters(adapted)).logprobs(tiny.rows(5), 20)
    values_agree(backend.reference_logprobs(tiny.rows(5), 20), version_0)
    whole.load(tmp_path / "before")
    merged = exported(whole, tmp_path / "theirs")
    assert merged.keys() == {"model.safetensors", "adapter/adapter_model.safetensors"}
    assert unchanged(exported(backend, tmp_path / "ours"), merged)


@pytest.mark.parametrize("stage", [0, 3])
def test_matrices_with_adapters_are_held_in_what_they_are_computed_in(adapted, opened, stage, tmp_path):
    """One batch: after it a weight that is a little different may be rounded to another bfloat16."""
    whole, backend = torch_backend(adapted, autocast="bfloat16"), opened(adapted, stage=stage, autocast="bfloat16")
    held = {one.dtype for name, one in backend._rank._model.named_parameters() if ".base_layer." in name}
    assert held == {torch.bfloat16}
    rows, how = BATCHES[0]
    metrics = whole.update(rows, KL, how).metrics
    assert backend.update(rows, KL, how).metrics["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)
    files_agree(saved(backend, tmp_path / "ours"), saved(whole, tmp_path / "theirs"), 1)


def test_a_checkpoint_of_adapters_goes_on_with_another_stage_and_number_of_processes(adapted, opened, tmp_path):
    rows, twice = tiny.rows(5, seed=4), plan(updates_per_batch=2)
    train(whole := torch_backend(adapted))
    start = saved(whole, tmp_path / "start")
    whole.update(rows, KL, twice)
    expected = saved(whole, tmp_path / "end")
    for config in {"processes": 2, "stage": 3}, {"stage": 1}:
        backend = opened(adapted, **config)
        backend.load(tmp_path / "start")
        assert unchanged(saved(backend, tmp_path / f"loaded {config}"), start)
        backend.update(rows, KL, twice)
        files_agree(saved(backend, tmp_path / f"after {config}"), expected, NUM_STEPS + 2)
        whole.load(tmp_path / f"after {config}")  # and back


def test_a_checkpoint_of_a_whole_model_is_not_one_of_its_adapters(adapted, opened, tmp_path):
    saved(torch_backend(without_adapters(adapted)), tmp_path / "whole")
    with pytest.raises(ConfigError, match="of another model"):
        opened(adapted, stage=0).load(tmp_path / "whole")


# --------------------------------------------------------------------------------------------- a renewed reference


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "config"), [
    ("whole", {"stage": 0}), ("whole", {"stage": 1, "offload_optimizer": True}), ("adapters", {"stage": 3}),
    ("whole", {"stage": 3, "processes": 2}), ("adapters", {"stage": 2, "processes": 2}),
])  # fmt: skip
def test_a_renewed_reference_is_the_policy_of_that_version_from_then_on(
    spec, adapted, opened, kind, config, tmp_path
):  # fmt: skip
    """And what is trained beside it, saved, loaded by the torch backend and back is as that makes it."""
    model, rows = adapted if kind == "adapters" else spec, tiny.rows(5, seed=4)
    whole, backend = torch_backend(model), opened(model, **config)
    begun = backend.reference_logprobs(rows, 20)
    early = saved(backend, tmp_path / "early")
    for one in whole, backend:
        one.update(BATCHES[0][0], KL, BATCHES[0][1])
        one.renew_reference()
    then = backend.logprobs(rows, 20)
    for ours, theirs in zip(backend.reference_logprobs(rows, 20), then, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    before = saved(backend, tmp_path / "before")
    assert all(map(np.array_equal, backend.reference_logprobs(rows, 20), then))
    assert unchanged(saved(backend, tmp_path / "again"), before)  # nothing of it stays with the policy
    reference = load_file(tmp_path / "before" / "reference.safetensors")
    assert unchanged({"masters": reference}, {"masters": before["masters"]})
    metrics = [one.update(BATCHES[2][0], KL, BATCHES[2][1]).metrics for one in (whole, backend)]
    for name in ("kl", "loss", "grad_norm"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-3, abs=1e-6)
    after = saved(backend, tmp_path / "after")
    files_agree(after, saved(whole, tmp_path / "expected"), 3)
    assert unchanged({"masters": load_file(tmp_path / "after" / "reference.safetensors")}, {"masters": reference})
    assert np.abs(np.concatenate(backend.logprobs(rows, 20)) - np.concatenate(then)).max() > 1e-4
    whole.load(tmp_path / "after")
    saved(whole, tmp_path / "through torch")
    backend.load(tmp_path / "early")
    assert all(map(np.array_equal, backend.reference_logprobs(rows, 20), begun))
    assert unchanged(saved(backend, tmp_path / "version 0"), early)
    assert not (tmp_path / "version 0" / "reference.safetensors").exists()
    backend.load(tmp_path / "through torch")
    assert unchanged(saved(backend, tmp_path / "back"), after)
    for ours, theirs in zip(backend.reference_logprobs(rows, 20), then, strict=True):
        np.testing.assert_array_equal(ours, theirs)


# --------------------------------------------------------------------------------------------- ranks


def test_a_rank_that_hangs_is_named():
    ranks = Ranks(2, threads=1, timeout_s=1.0)
    process = ranks._processes[1]
    try:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(
            BackendError, match=r"rank 1 of 2 \(process \d+\): not done with 'leave' within 1 s.*timeout_s"
        ):
            ranks.call("leave", {}, lambda: None)
        assert process.poll() == -signal.SIGKILL
    finally:
        ranks.end()


def test_a_rank_that_dies_is_named(monkeypatch):
    monkeypatch.setattr(rank_processes, "ABANDON_S", 1e6)  # else this process would end
    ranks = Ranks(3, threads=1, timeout_s=TIMEOUT_S)
    first, second = ranks._processes.values()
    try:
        second.kill()
        second.wait()
        with pytest.raises(BackendError, match=r"rank 2 of 3 \(process \d+\) ended with signal SIGKILL"):
            ranks.call("leave", {}, lambda: None)
        assert first.poll() is not None
    finally:
        ranks.end()


def test_a_rank_of_a_launcher_says_what_it_failed_by(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = RankPlace(rank=0, size=2, local_rank=0, host="127.0.0.1", port=listening.getsockname()[1])
    for name, value in place.environment().items():
        monkeypatch.setenv(name, value)
    ranks = Ranks(1, threads=1, timeout_s=TIMEOUT_S)
    assert ranks.place == place and not ranks._processes
    command = [sys.executable, "-m", "rftstream.backends.deepspeed.rank"]
    other = subprocess.Popen(command, env={**os.environ, "RANK": "1"})
    try:
        with pytest.raises(BackendError, match=r"rank 1 of 2 failed in 'fly': AttributeError"):
            ranks.call("fly", {}, lambda: None)
        assert other.wait() == 1
    finally:
        other.kill()
        other.wait()


def test_ranks_end_with_rank_0(monkeypatch):
    monkeypatch.setattr(rank_processes, "ABANDON_S", 1e6)
    ranks = Ranks(2, threads=1, timeout_s=TIMEOUT_S)
    process = ranks._processes[1]
    try:
        while len(psutil.Process(process.pid).net_connections("inet")) < 4:  # it listens to all that rank 0 may say
            assert process.poll() is None
            time.sleep(0.05)
        del ranks.store
        assert process.wait() in (1, -signal.SIGABRT)  # threads of torch may still run when it ends with the error
    finally:
        ranks.end()


def test_only_the_first_of_a_launcher_is_a_trainer(spec, monkeypatch):
    for name, value in RankPlace(rank=1, size=2, local_rank=1, host="127.0.0.1", port=9).environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"found a trainer that is rank 1 .*deepspeed\.rank worker"):
        make_backend(spec).open()


def test_a_launcher_is_missed():
    with pytest.raises(SystemExit, match="expected those of a launcher"):
        rank.main()


@pytest.mark.parametrize(("error", "so"), [
    (RuntimeError("[/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711"), True),
    (torch.distributed.DistBackendError("NCCL error"), True), (torch.distributed.DistStoreError("timed out"), True),
    (RuntimeError("shapes cannot be multiplied"), False), (torch.OutOfMemoryError("gloo"), False),
    (ConfigError("gloo"), False),
])  # fmt: skip
def test_what_is_the_fault_of_others(error, so):
    assert rank_processes.is_of_others(error) is so


# --------------------------------------------------------------------------------------------- settings and bytes


@pytest.mark.parametrize(("config", "text"), [
    ({"config": {"train_batch_size": 8}}, "config.train_batch_size.*feeder.groups_per_batch"),
    ({"config": {"gradient_clipping": 1.0}}, "trainer.max_grad_norm"),
    ({"config": {"zero_optimization": {"stage": 1}}}, "backends.deepspeed.stage"),
    ({"config": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}}, "nvme"),
    ({"stage": 2, "offload_parameters": True}, "needs stage 3, got 2"),
    ({"stage": 0, "offload_optimizer": True}, "at least 1, got 0"),
])  # fmt: skip
def test_settings_that_are_made_elsewhere_are_refused(config, text):
    with pytest.raises(ConfigError, match=text):
        deepspeed_config(DeepSpeedBackend.Config(**config))


def test_other_settings_are_merged():
    given = {
        "zero_optimization": {"overlap_comm": True, "offload_optimizer": {"pin_memory": True}},
        "dump_state": False,
    }
    made = deepspeed_config(DeepSpeedBackend.Config(stage=3, offload_optimizer=True, config=given))
    assert made["zero_optimization"] == {
        "stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }  # fmt: skip
    assert made["dump_state"] is False


def test_the_run_files_table_is_checked():
    options = {"processes": 2, "config": {"zero_optimization": {"overlap_comm": True}}}
    built = registry.build_config(DeepSpeedBackend, options, where="backends.deepspeed")
    assert (built.processes, built.config) == (2, options["config"])
    with pytest.raises(ConfigError, match="did you mean 'processes'"):
        registry.build_config(DeepSpeedBackend, {"proceses": 2}, where="backends.deepspeed")


def test_without_the_package_it_says_how_to_install_it(spec, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="rftstream doctor --install deepspeed"):
        make_backend(spec)


@pytest.mark.law("no-pickle")
def test_rows_and_algorithms_travel_as_plain_bytes():
    row = dataclasses.replace(tiny.rows(1)[0], temperature=0.7, group=3, additions={"a": np.arange(3.0)})
    row = dataclasses.replace(row, beside={"experts": uniform(np.ones((len(row.token_ids), 2, 2), np.uint8))})
    (back,) = wire.rows_in(wire.unpack(wire.pack([row])))
    for name in ("token_ids", "loss_mask", "behavior_logprobs", "advantages"):
        np.testing.assert_array_equal(getattr(back, name), getattr(row, name))
        assert getattr(back, name).dtype == getattr(row, name).dtype
    assert (back.temperature, back.group) == (0.7, 3)
    assert wire_columns(back.beside) == wire_columns(row.beside) != {}
    np.testing.assert_array_equal(back.additions["a"], np.arange(3.0))
    algorithm = wire.algorithm_in(wire.unpack(wire.pack(wire.algorithm_out(GRPO))))
    assert (type(algorithm), algorithm.config, algorithm.needs) == (Grpo, GRPO.config, GRPO.needs)
    mixed = ByTaskset(TasksetAlgorithm(GRPO, ("sums",)), [TasksetAlgorithm(Rloo(Rloo.Config()), ("maze", "facts"))])
    back = wire.algorithm_in(wire.unpack(wire.pack(wire.algorithm_out(mixed))))
    assert [(type(one.algorithm), one.algorithm.config, one.tasksets) for one in back.parts] == [
        (Grpo, GRPO.config, ("sums",)), (Rloo, Rloo.Config(), ("maze", "facts")),
    ]  # fmt: skip
    assert back.needs == mixed.needs

    class Local(Grpo):
        pass

    with pytest.raises(ConfigError, match="put the class into a module"):
        wire.algorithm_out(Local(Grpo.Config()))


def test_ranks_get_about_as_much_to_do():
    rows = tiny.rows(40)
    total = sum(len(row.token_ids) for row in rows if row.loss_mask.any())
    assert even_budget(rows, plan(tokens_per_microbatch=10_000), 1) == 10_000
    assert total / 4 <= even_budget(rows, plan(tokens_per_microbatch=10_000), 4) < total / 4 + 14
    assert even_budget(rows, plan(tokens_per_microbatch=20), 4) == 20
    assert even_budget([], plan(), 2) >= 1


def test_torch_is_not_asked_for_more_than_it_has(spec):
    found = torch.cuda.device_count()
    backend = make_backend(dataclasses.replace(spec, device="cuda"), processes=found + 1)
    with pytest.raises(ConfigError, match=f"there are {found} GPUs"):
        backend.open()
