"""A joined training loop on two processes: what each of them gets, hands in and is told."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rftstream.backends.base import OptimizerSettings
from rftstream.backends.joined import JoinedBackend, LoopLeft, TrainerDesk
from rftstream.backends.joined_state import read_state
from rftstream.errors import ConfigError, TakenOver
from rftstream.joined.ranks import RankTrainer, check_alone
from rftstream.joined.trainer import JoinedTrainer, StateOutdated
from rftstream.models.folders.folder import FAKE
from rftstream.models.spec import ModelSpec
from tests.suite.each import each

NUM_RANKS = 2


def play_role(desk: TrainerDesk, folder: Path) -> None:
    """Three batches, with a checkpoint after each; then another trainer takes over."""
    model = ModelSpec(name=FAKE, folder=folder, dtype="bfloat16", context=None)
    backend = JoinedBackend(JoinedBackend.Config(), model=model, optimizer=OptimizerSettings(), seed=0, desk=desk)
    backend.open()
    backend.served_tensors()
    desk.version = 0
    algorithm: Any = None
    plan: Any = None
    try:
        for number in range(3):
            backend.begin_batch(number, ())
            backend.update((), algorithm, plan)
            (kept := folder / f"{number}").mkdir(exist_ok=True)
            backend.save(kept)
            backend.complete(kept)
            with desk.changed:
                desk.version = number + 1
                desk.notify()
    except LoopLeft:
        return
    desk.end(TakenOver("another trainer has the role"))


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def work_as_rank(rank: int, folder: Path, what: Callable[[int, JoinedTrainer], Any]) -> Any:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store-{what.__name__}", rank=rank, world_size=NUM_RANKS
    )
    group = dist.group.WORLD
    assert group is not None

    def join() -> JoinedTrainer:
        desk = TrainerDesk()
        threading.Thread(target=play_role, args=(desk, folder), daemon=True).start()
        return JoinedTrainer(desk)

    found = what(rank, RankTrainer(group, join))
    dist.destroy_process_group()
    return found


def train(rank: int, me: JoinedTrainer) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    found: list[Any] = [told(lambda: next(me.batches())), me.kept, me.model_folder.name]
    state = me.state()
    shards = {name: distribute_tensor(one.float(), mesh, [Shard(0)]) for name, one in state.items()}
    batches = me.batches()
    batch = next(batches)
    found += [told(lambda: me.step(batch, weights=shards if rank else state)), told(lambda: next(batches))]
    for batch in me.batches():
        shards = {name: one + (batch.version + 1) for name, one in shards.items()}
        if batch.version == 1:
            me.skip(batch)
        else:
            me.step(batch, weights=shards, metrics={"loss": torch.tensor(1.0)})
        found.append((batch.version, me.checkpoint_due))
        me.checkpoint({"model": shards, "optimizer": {"state": [{"step": batch.version}]}})
        if batch.version == 2:
            break
    found.append(told(lambda: next(me.batches())))
    return found, {name: one.tolist() for name, one in state.items()}


def stop(rank: int, me: JoinedTrainer) -> Any:
    me.state()
    if rank:
        me.stop()
    with me:
        return [batch.version for batch in me.batches()][1:], me.has_ended


@pytest.mark.slow
def test_ranks_train_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with ProcessPoolExecutor(NUM_RANKS, mp_context=multiprocessing.get_context("spawn")) as pool:

        def on_all_ranks(what: Callable[[int, JoinedTrainer], Any]) -> list[Any]:
            return [one.result() for one in [pool.submit(work_as_rank, rank, tmp_path, what) for rank in range(2)]]

        trained, stopped = on_all_ranks(train), on_all_ranks(stop)
    assert stopped == [([], True)] * 2, "any rank can stop all"
    (found, state), (other, same) = trained
    assert (found, state) == (other, same)
    outdated, kept, name, refused, unanswered, *rest, taken_over = found
    assert outdated.startswith(StateOutdated.__name__) and kept is None and name == tmp_path.name
    assert "rank 1 has" in refused and "expected the same on all ranks" in refused
    assert "batch 0: no answer" in unanswered
    assert rest == [(0, True), (1, True), (2, True)]
    assert taken_over == "TakenOver: another trainer has the role"
    last = read_state(tmp_path / "2")
    assert last is not None and last["optimizer"] == {"state": [{"step": 2}]}
    for key, values in state.items():
        assert last["model"][key].tolist() == pytest.approx([one + 6 for one in values])


@each("environment, is_alone", [({}, True), ({"RANK": "0", "WORLD_SIZE": "2"}, True), ({"RANK": "1"}, False)])
def test_a_rank_does_not_join_by_itself(
    environment: dict[str, str], is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if is_alone:
        check_alone()
    else:
        with pytest.raises(ConfigError, match="rank 1 of 1 joins as a trainer of its own, expected rank 0 alone"):
            check_alone()
