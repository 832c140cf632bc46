"""The backend of many processes against the one-process torch backend, on CPUs, over gloo.

What is equal and how closely: losses, norms and metrics to 1e-4 of their size; moments, which hold the gradients, to
1e-4 of the largest of their tensor; weights to 2% of the learning rate for each step, since Adam's steps are all of
about that size, however small the gradient that decides on their direction.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import signal

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from rftstream import plugins
from rftstream.algorithms.grpo import Grpo
from rftstream.backends import deepspeed_wire as wire
from rftstream.backends.base import OptimizerSettings
from rftstream.backends.deepspeed import DeepSpeedBackend, deepspeed_config, even_budget
from rftstream.backends.deepspeed_ranks import Ranks
from rftstream.backends.torch import TorchBackend
from rftstream.errors import BackendError, ConfigError
from tests.unit import tiny

LR = 1e-3
OPTIMIZER = OptimizerSettings(weight_decay=0.1)
GRPO = Grpo(Grpo.Config(entropy_coefficient=0.01))

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("model"))


@pytest.fixture
def opened(spec):
    """Opens backends, and closes them."""
    backends = []

    def make(**config):
        backends.append(make_backend(spec, **config))
        backends[-1].open()
        return backends[-1]

    yield make
    for one in backends:
        one.close()


def make_backend(spec, **config):
    return DeepSpeedBackend(DeepSpeedBackend.Config(**config), model=spec, optimizer=OPTIMIZER, seed=0)


def torch_backend(spec):
    backend = TorchBackend(TorchBackend.Config(), model=spec, optimizer=OPTIMIZER, seed=0)
    backend.open()
    return backend


def plan(**changes):
    return tiny.plan(**{"lr": LR, "tokens_per_microbatch": 30, **changes})


BATCHES = [
    (tiny.rows(seed=1), plan()),
    (tiny.rows(1, seed=2), plan(max_grad_norm=0.0)),  # less than there are ranks
    (tiny.rows(seed=3), plan(minibatches=2, max_grad_norm=0.05)),
]
NUM_STEPS = 4


@pytest.fixture(scope="module")
def expected(spec, tmp_path_factory):
    """Metrics, and files after the last batch."""
    backend = torch_backend(spec)
    return train(backend), saved(backend, tmp_path_factory.mktemp("expected") / "files")


def train(backend):
    return [backend.update(rows, GRPO, how).metrics for rows, how in BATCHES]


def saved(backend, folder):
    folder.mkdir()
    backend.save(folder)
    return {name: load_file(folder / f"{name}.safetensors") for name in ("masters", "optimizer")}


def agree(found, expected):
    """Metrics and files."""
    for ours, theirs in zip(found[0], expected[0], strict=True):
        skip = {"microbatches", "computed_tokens", "tflop", "ranks"}  # idle ranks and smaller micro-batches
        assert {name: value for name, value in ours.items() if name not in skip} == pytest.approx(
            {name: value for name, value in theirs.items() if name not in skip}, rel=1e-4, abs=1e-6
        )
    files_agree(found[1], expected[1], NUM_STEPS)


def files_agree(found, expected, num_steps):
    assert found["optimizer"].keys() == expected["optimizer"].keys()
    for name, theirs in expected["optimizer"].items():
        np.testing.assert_allclose(found["optimizer"][name], theirs, rtol=0, atol=1e-4 * np.abs(theirs).max() + 1e-12)
    assert found["masters"].keys() == expected["masters"].keys()
    for name, theirs in expected["masters"].items():
        np.testing.assert_allclose(found["masters"][name], theirs, rtol=0, atol=0.02 * LR * num_steps)


def bad_rows():
    rows = tiny.rows(seed=2)
    rows[-1] = dataclasses.replace(rows[-1], advantages=np.full_like(rows[-1].advantages, np.nan))
    return rows


def unchanged(found, before):
    return all(np.array_equal(found[file][name], array) for file in before for name, array in before[file].items())


# --------------------------------------------------------------------------------------------- one process


@needs_deepspeed
@pytest.mark.parametrize("config", [
    {"stage": 0}, {"stage": 1}, {"stage": 2, "packing": False}, {"stage": 3},
    {"stage": 3, "offload_optimizer": True, "offload_parameters": True, "gradient_checkpointing": True},
    {"stage": 2, "offload_optimizer": True},
])  # fmt: skip
def test_one_process_gives_what_the_torch_backend_gives(opened, expected, config, tmp_path):
    backend = opened(**config)
    agree((train(backend), saved(backend, tmp_path / "after")), expected)
    before = saved(backend, tmp_path / "before")
    for number, changes in enumerate(({}, {"minibatches": 4}, {"updates_per_batch": 2})):
        update = backend.update(bad_rows(), GRPO, plan(**changes))
        assert update.skipped and not np.isfinite(update.metrics["loss"])
        assert unchanged(saved(backend, tmp_path / f"skipped{number}"), before)
    served = {name: np.frombuffer(one.data, np.float32) for name, one in backend.served_tensors().items()}
    assert all(np.array_equal(served[name], array.ravel()) for name, array in before["masters"].items())
    assert not backend.update(tiny.rows(seed=4), GRPO, plan()).skipped
    assert not unchanged(saved(backend, tmp_path / "trained"), before)


@needs_deepspeed
def test_a_huge_loss_skips_though_its_gradient_is_a_number(opened, tmp_path):
    backend = opened(stage=2)
    before = saved(backend, tmp_path / "before")

    class Infinite(Grpo):
        def loss(self, *args, **settings):
            loss, metrics = super().loss(*args, **settings)
            return loss + float("inf"), metrics

    assert backend.update(tiny.rows(), Infinite(Grpo.Config()), plan()).skipped
    assert unchanged(saved(backend, tmp_path / "after"), before)


# --------------------------------------------------------------------------------------------- two processes


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_two_processes_give_what_one_gives(opened, expected, stage, tmp_path):
    backend = opened(processes=2, stage=stage)
    agree((train(backend), saved(backend, tmp_path / "after")), expected)


@needs_deepspeed
@pytest.mark.slow
def test_two_processes_with_shared_weights_from_start_to_end(spec, opened, expected, tmp_path):
    """One start of processes for all that they can do."""
    backend = opened(processes=2, stage=3)
    agree((train(backend), saved(backend, tmp_path / "after")), expected)
    before = saved(backend, tmp_path / "checkpoint")
    for number, changes in enumerate(({}, {"minibatches": 4})):
        assert backend.update(bad_rows(), GRPO, plan(**changes)).skipped
        assert unchanged(saved(backend, tmp_path / f"skipped{number}"), before)
    alone, whole = opened(stage=0), torch_backend(spec)
    for one in (alone, whole):
        one.load(tmp_path / "checkpoint")
    assert unchanged(saved(alone, tmp_path / "resumed"), before)
    rows = tiny.rows(5, seed=4)
    for found, theirs in zip(backend.logprobs(rows, 20), whole.logprobs(rows, 20), strict=True):
        np.testing.assert_allclose(found, theirs, rtol=1e-4, atol=1e-5)
    kl = Grpo(Grpo.Config(kl_coef=0.1))
    updates = [one.update(rows, kl, plan(updates_per_batch=2)).metrics for one in (backend, alone, whole)]
    for update in updates[:2]:
        assert update["kl"] == pytest.approx(updates[2]["kl"], rel=1e-3)
        assert update["loss"] == pytest.approx(updates[2]["loss"], rel=1e-3, abs=1e-6)
    files = [saved(one, tmp_path / f"end{number}") for number, one in enumerate((backend, alone, whole))]
    for one in files[:2]:
        files_agree(one, files[2], NUM_STEPS + 2)
    (tmp_path / "whole").mkdir()
    whole.save(tmp_path / "whole")
    backend.load(tmp_path / "whole")
    assert unchanged(saved(backend, tmp_path / "back"), files[2])
    os.kill(backend._ranks._processes[1].pid, signal.SIGKILL)
    with pytest.raises(BackendError, match=r"rank 1 of 2 .* ended with signal SIGKILL"):
        backend.update(rows, GRPO, plan())
    with pytest.raises(BackendError):
        backend.update(rows, GRPO, plan())


def test_a_rank_that_hangs_is_named():
    ranks = Ranks(2, threads=1, timeout_s=1.0)
    process = ranks._processes[1]
    try:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(BackendError, match=r"rank 1 of 2 \(process \d+\) has not finished 'gather'.* timeout_s"):
            ranks.call("gather", {"kind": "master", "name": "x"}, lambda: None)
        assert process.poll() == -signal.SIGKILL
    finally:
        ranks.close()
        ranks.wait()


def test_a_rank_that_fails_says_why_and_ends_with_rank_0():
    ranks = Ranks(3, threads=1, timeout_s=100.0)
    first, second = ranks._processes.values()
    try:
        second.stdin.close()  # as if rank 0 had ended
        assert second.wait(timeout=100) == 1
        with pytest.raises(BackendError, match=r"rank 2 of 3 .* ended with exit code 1"):
            ranks.call("gather", {"kind": "master", "name": "x"}, lambda: None)
        assert first.poll() is not None
    finally:
        ranks.close()
        ranks.wait()


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
    built = plugins.build_config(DeepSpeedBackend, options, where="backends.deepspeed")
    assert (built.processes, built.config) == (2, options["config"])
    with pytest.raises(ConfigError, match="did you mean 'processes'"):
        plugins.build_config(DeepSpeedBackend, {"proceses": 2}, where="backends.deepspeed")


def test_without_the_package_it_says_how_to_install_it(spec, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rftstream\[deepspeed\]'"):
        make_backend(spec)


def test_rows_and_algorithms_travel_as_plain_bytes():
    row = dataclasses.replace(tiny.rows(1)[0], temperature=0.7, group=3, additions={"a": np.arange(3.0)})
    back = wire.row_in(wire.unpack(wire.pack(wire.row_out(row))))
    for name in wire.ARRAYS:
        np.testing.assert_array_equal(getattr(back, name), getattr(row, name))
        assert getattr(back, name).dtype == getattr(row, name).dtype
    assert (back.temperature, back.group) == (0.7, 3)
    np.testing.assert_array_equal(back.additions["a"], np.arange(3.0))
    algorithm = wire.algorithm_in(wire.unpack(wire.pack(wire.algorithm_out(GRPO))))
    assert (type(algorithm), algorithm.config, algorithm.needs) == (Grpo, GRPO.config, GRPO.needs)

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
