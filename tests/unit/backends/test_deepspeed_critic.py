"""The critic of the backend of many processes against that of the one-process torch backend.

What is equal and how closely is said in with_ranks.py; values are equal to 1e-4 of their size.
"""

import dataclasses

import numpy as np
import pytest

from rftstream.algorithms.ppo import Ppo
from rftstream.algorithms.settings import CriticConfig
from rftstream.errors import BackendError, ConfigError
from tests.unit import tiny
from tests.unit.backends.test_critic import estimated, reward_model
from tests.unit.backends.with_ranks import (
    LR,
    files_agree,
    make_backend,
    metrics_agree,
    plan,
    saved,
    torch_backend,
    unchanged,
    values_agree,
)

PPO = Ppo(Ppo.Config(critic=CriticConfig(lr=LR, max_grad_norm=0.05, value_clip=0.2)))
FILES = ("masters", "optimizer", "critic", "critic_optimizer")
BATCHES = ({"seed": 1}, {"seed": 2, "minibatches": 2, "updates_per_batch": 2}, {"seed": 3, "trains_policy": False})
NUM_STEPS = 6
EVERY = [
    *((stage, 2) for stage in range(4)),
    (2, 1),
    *(pytest.param(stage, 1, marks=pytest.mark.long) for stage in (0, 1, 3)),
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(spec, tmp_path_factory):
    """A reward model, so that values and the gradients of the trunk are not 0 from the first step on."""
    made = tmp_path_factory.mktemp("reward") / "model"
    reward_model(made, spec)
    return made


@pytest.fixture
def opened(spec, folder, open_kept):
    """Opens one backend after another."""

    def make(where=folder, *, critic=PPO.critic, **config):
        backend = make_backend(spec, **config)
        if critic is not None:
            backend.hold_critic(critic, where)
        return open_kept(backend)

    return make


def trained(backend, seed, **changes):
    return backend.update(estimated(backend, PPO, seed), PPO, plan(**changes))


def course(backend):
    """Values before the first batch, and metrics of all batches."""
    values = backend.values(tiny.rows(seed=9), 20)
    return values, [trained(backend, **batch).metrics for batch in BATCHES]


@pytest.fixture(scope="module")
def expected(spec, folder, tmp_path_factory):
    """What the torch backend makes of the batches, where its files lie, and a batch after them."""
    backend, place = torch_backend(spec, critic=(PPO.critic, folder)), tmp_path_factory.mktemp("expected") / "files"
    found = course(backend)
    files = saved(backend, place, FILES)
    then = trained(backend, 5).metrics
    return found, files, place, (then, saved(backend, place.parent / "then", FILES))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("stage", "processes"), EVERY)
def test_it_learns_what_that_of_the_torch_backend_learns(opened, expected, stage, processes, tmp_path):
    """And says the same; in a warm-up alone; and goes on from the files of the torch backend."""
    (values, metrics), files, place, (then, files_then) = expected
    backend = opened(stage=stage, processes=processes)
    ours, our_metrics = course(backend)
    values_agree(ours, values)
    metrics_agree(our_metrics, metrics)
    files_agree(saved(backend, tmp_path / "after", FILES), files, NUM_STEPS)
    backend.load(place)
    assert unchanged(saved(backend, tmp_path / "loaded", FILES), files)
    metrics_agree([trained(backend, 5).metrics], [then])
    files_agree(saved(backend, tmp_path / "then", FILES), files_then, NUM_STEPS + 1)


@pytest.mark.parametrize(("stage", "processes", "odd"), [
    (0, 1, "advantages"),
    (3, 2, "returns"),
    *(pytest.param(2, 2, odd, marks=pytest.mark.long) for odd in ("advantages", "returns")),
])  # fmt: skip
def test_a_nan_leaves_both_as_they_were(opened, stage, processes, odd, tmp_path):
    backend = opened(stage=stage, processes=processes)
    trained(backend, 1)
    before = saved(backend, tmp_path / "before", FILES)
    for number, changes in enumerate(({}, {"minibatches": 2, "updates_per_batch": 2})):
        rows = list(estimated(backend, PPO, 2))
        bad = np.full_like(rows[-1].advantages, np.nan)
        if odd == "returns":
            rows[-1] = dataclasses.replace(rows[-1], additions={**rows[-1].additions, "returns": bad})
        else:
            rows[-1] = dataclasses.replace(rows[-1], advantages=bad)
        update = backend.update(rows, PPO, plan(**changes))
        assert update.skipped
        assert np.isnan(update.metrics["value_loss" if odd == "returns" else "loss"])
        assert unchanged(saved(backend, tmp_path / f"skipped{number}", FILES), before)
    assert not trained(backend, 3).skipped


@pytest.mark.heavy("each death is followed by ranks that import DeepSpeed anew")
def test_killed_ranks_are_followed_by_others_that_go_on(spec, folder, opened, kept, expected, tmp_path):
    """As a run does: a checkpoint, kill -9 of a rank in the next batch, and then the same batch from the checkpoint."""
    *_, place, (then, files_then) = expected
    backend = opened(stage=3, processes=2)
    backend.load(place)
    process = kept()._processes[1]
    rows = estimated(backend, PPO, 5)
    process.kill()
    process.wait()
    with pytest.raises(BackendError, match=r"rank 1 of 2 \(process \d+\) ended with signal SIGKILL"):
        backend.update(rows, PPO, plan())
    successor = opened(stage=1, processes=2)
    successor.load(place)
    metrics_agree([trained(successor, 5).metrics], [then])
    after = saved(successor, tmp_path / "after", FILES)
    files_agree(after, files_then, NUM_STEPS + 1)
    whole = torch_backend(spec, critic=(PPO.critic, folder))
    whole.load(tmp_path / "after")
    assert unchanged(saved(whole, tmp_path / "through torch", FILES), after)


@pytest.mark.long
@pytest.mark.parametrize("config", [
    {"stage": 2, "offload_optimizer": True, "packing": False},
    {"stage": 3, "offload_optimizer": True, "offload_parameters": True, "gradient_checkpointing": True},
])  # fmt: skip
def test_offloading_and_recomputing_change_nothing(opened, expected, config, tmp_path):
    (values, metrics), files, *_ = expected
    ours, our_metrics = course(backend := opened(**config))
    values_agree(ours, values)
    metrics_agree(our_metrics, metrics)
    files_agree(saved(backend, tmp_path / "after", FILES), files, NUM_STEPS)


def test_a_checkpoint_without_a_critic_begins_it_anew(opened, expected, tmp_path, caplog):
    without = tmp_path / "without"
    without.mkdir()
    opened(stage=0, critic=None).save(without)
    backend = opened(stage=2)
    fresh = saved(backend, tmp_path / "fresh", FILES)
    trained(backend, 1)
    backend.load(without)
    assert unchanged(saved(backend, tmp_path / "loaded", FILES), fresh)
    assert "has no critic; it begins anew" in caplog.text


def test_what_has_no_critic_cannot_train_one(opened, spec, tmp_path):
    with pytest.raises(ConfigError, match="backend deepspeed: the algorithm needs values"):
        opened(stage=0, critic=None).update(tiny.rows(), PPO, plan())
    reward_model(tmp_path / "reward", spec, vocabulary=5)
    with pytest.raises(ConfigError, match="knows 5 tokens, expected the 17 of the policy"):
        opened(tmp_path / "reward", stage=0)
