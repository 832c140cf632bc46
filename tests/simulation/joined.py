"""Loops of users on a run's log, played: a sampler and a training loop, each in the place of the role's engine. They do
what users do: they load weights late, hand in nonsense, are interrupted, stand still and leave."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from rftstream.algorithms.base import Algorithm, TrainingRow
from rftstream.backends.base import OptimizerSettings
from rftstream.backends.fake import STATE_FILE, FakeBackend
from rftstream.backends.joined import JoinedBackend, TrainerDesk
from rftstream.backends.joined_state import write_state
from rftstream.backends.joined_weights import FakeWeights
from rftstream.clock import Clock
from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.rollouts import VersionSpan
from rftstream.contracts.versions import VersionName
from rftstream.desk import AnswerRefused
from rftstream.joined.explorer import JoinedExplorer, SampleTask
from rftstream.joined.trainer import JoinedTrainer, TrainingBatch
from rftstream.models.rendering import Renderer
from rftstream.models.spec import ModelSpec
from rftstream.policies.base import Completion, SampleRequest
from rftstream.policies.fake import FakePolicy
from rftstream.policies.joined import JoinedPolicy, SamplerDesk
from rftstream.weights.snapshot import RawTensor
from rftstream.weights.tensors import as_tensor

SAMPLER, TRAINER = f"{__name__}:PlayedSampler", f"{__name__}:PlayedBackend"

BAD_SHARE = 0.05
"""Of the hand-ins that are nonsense, and of the slices in which the loop is interrupted."""
LEAVES_SHARE = 0.01
"""Of the batches before which the loop leaves."""


def with_joined(config: RunConfig) -> RunConfig:
    """Return the run with loops of users in the places of sampler and training loop."""
    fakes = {SAMPLER: config.policies.get("fake", {})}
    backends = {TRAINER: config.backends.get("fake", {})}
    return loader.replace(
        config,
        explorer__policy=SAMPLER,
        explorer__max_concurrent=config.explorer.first_concurrent,  # loops do not say how busy they are
        trainer__backend=TRAINER,
        policies={**config.policies, **fakes},
        backends={**config.backends, **backends},
    )


class PlayedSampler(JoinedPolicy):
    """A joined sampler's policy, which plays the loop whenever the explorer calls."""

    Config = FakePolicy.Config  # type: ignore[assignment,misc]
    is_joined = False  # it has a desk of its own
    wait_s = 0.0

    def __init__(self, config: FakePolicy.Config, *, model: ModelSpec, renderer: Renderer, clock: Clock) -> None:
        desk = SamplerDesk(folders=False)
        super().__init__(
            JoinedPolicy.Config(), model=model, renderer=renderer, clock=clock, max_concurrent=64, desk=desk
        )
        self._engine = FakePolicy(config, model=model, renderer=renderer, clock=clock)
        self._me = JoinedExplorer(desk)
        self._tasks: dict[str, SampleTask] = {}
        """By the engine's request ids."""
        self._newest: tuple[Mapping[str, RawTensor], VersionName] | None = None
        self._random = Random(f"loop {clock.now()}")
        self._save_share = self._random.choice([0.1, 1.0])
        """Of the looks at a task, those after which the loop saves what there is of it."""
        self._most, self._idle_share, self._interrupted_share = self._random.choice(
            [(4, 0.3, BAD_SHARE), (64, 0.0, 0.0)]
        )
        """How many tasks it takes at once, and how often it stands still and is interrupted: others are in a hurry."""
        self._number = 0

    def load(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        self._newest = {key: RawTensor(one.dtype, one.shape, bytes(one.data)) for key, one in tensors.items()}, name
        super().load(tensors, name)

    def submit(self, request: SampleRequest) -> None:
        self._play()
        super().submit(request)

    def so_far(self, request_id: str) -> Completion | None:
        self._play()
        return super().so_far(request_id)

    def step(self) -> list[Completion]:
        self._play()
        return super().step()

    def idle_s(self) -> float:
        return min(self._engine.idle_s(), 0.05) if self.num_active else super().idle_s()

    # ------------------------------------------------------------------------------------------ the loop

    def _play(self) -> None:
        random = self._random
        if random.random() < self._idle_share:
            return
        self._load_some_time()
        if random.random() < self._interrupted_share:  # ctrl-C, and the cell again
            for key in self._tasks:
                self._engine.abort(key)
            self._tasks.clear()
            self._me.tasks()
        if most := random.randint(0, self._most):
            for task in self._me.take(most, wait_s=0):
                self._begin(task)
        for completion in self._engine.step():
            self._finish(self._tasks.pop(completion.request_id), completion)
        for key, task in list(self._tasks.items()):
            if task.is_lost:
                del self._tasks[key]
                self._engine.abort(key)
            elif random.random() < self._save_share and (so_far := self._engine.so_far(key)) is not None:
                self._me.save(task, **_given(so_far))

    def _load_some_time(self) -> None:
        if self._newest is not None and self._engine.version != self._newest[1] and self._random.random() < 0.5:
            self._engine.load(*self._newest)

    def _begin(self, task: SampleTask) -> None:
        version = self._engine.version
        if version is None or version.version < task.min_version:
            assert self._newest is not None
            self._engine.load(*self._newest)
        self._number += 1
        key = f"{self._number}"
        self._tasks[key] = task
        request = task._request
        self._engine.submit(
            SampleRequest(
                request_id=key, token_ids=tuple(task.prompt_ids), sampling=request.sampling, seed=request.seed,
                max_tokens=task.max_tokens, num_sampled=task.num_sampled,
            )
        )  # fmt: skip

    def _finish(self, task: SampleTask, completion: Completion) -> None:
        if completion.finish_reason == "error":
            self._me.fail(task, completion.error or "")
            return
        given = _given(completion)
        if self._random.random() < BAD_SHARE and not task.is_lost:
            wrong: dict[str, Any] = self._random.choice([
                {"tokens": [*given["tokens"][:-1], 100_000]}, {"logprobs": [0.5] * len(given["tokens"])},
                {"version": 10_000}, {"logprobs": given["logprobs"][1:]},
            ])  # fmt: skip
            _refused(lambda: self._me.finish(task, **{**given, **wrong}))
        if self._me.finish(task, finish_reason=completion.finish_reason, **given) and self._random.random() < BAD_SHARE:
            _refused(lambda: self._me.finish(task, **given))


def _given(completion: Completion) -> dict[str, Any]:
    versions: list[int] = []
    for span in cast(Sequence[VersionSpan], completion.versions):
        versions += [span.version] * span.count
    return {"tokens": completion.token_ids, "logprobs": completion.behavior_logprobs, "version": versions}


def _refused(hand_in: Callable[[], object]) -> None:
    try:
        hand_in()
    except AnswerRefused:
        return
    raise AssertionError("nonsense was taken")


# ----------------------------------------------------------------------------------------------- training


class PlayedBackend(JoinedBackend):
    """A joined training loop's backend, which plays the loop whenever the trainer would wait for it."""

    Config = FakeBackend.Config  # type: ignore[assignment,misc]
    is_joined = False

    def __init__(
        self, config: FakeBackend.Config, *, model: ModelSpec, optimizer: OptimizerSettings, seed: int
    ) -> None:
        desk = PlayedTrainerDesk()
        desk.weights = FakeWeights(model, seed, config)
        super().__init__(JoinedBackend.Config(), model=model, optimizer=optimizer, seed=seed, desk=desk)
        desk.loop = PlayedLoop(desk, FakeBackend(config, model=model, optimizer=optimizer, seed=seed))
        self._engine, self._loop = desk.loop.engine, desk.loop
        self.is_on_device = False

    def save(self, folder: Path) -> None:
        """Take the loop's state at once: nobody waits here, and a loop that is asked later has trained on."""
        super().save(folder)
        write_state(folder, self._loop.state())

    def complete(self, folder: Path) -> None:
        return

    def logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        """Return what runs with held-out demonstrations ask for, which users' loops cannot have."""
        self._loop.load()
        return self._engine.logprobs(rows, tokens_per_microbatch)


class PlayedTrainerDesk(TrainerDesk):
    """A desk on which nobody waits: the loop is played until what is waited for is true."""

    loop: PlayedLoop

    def wait(self, until: Callable[[], object]) -> None:
        for _ in range(20):
            if until():
                return
            self.loop.play()
        raise AssertionError("the loop does not get on")


class PlayedTrainer(JoinedTrainer):
    """A loop that does not wait for the log, which goes on only when it returns."""

    def _settle(self, batch: TrainingBatch) -> None:
        return


_LUCK: dict[str, Random] = {}
"""Folder of a run -> the luck of its training loops, one after the other."""


class PlayedLoop:
    """A training loop of a user's own, with the backend `fake` as its model and optimizer."""

    def __init__(self, desk: TrainerDesk, engine: FakeBackend) -> None:
        self._desk, self.engine, self._me = desk, engine, PlayedTrainer(desk)
        self._random = _LUCK.setdefault(str(engine._spec.folder), Random(0))

    def play(self) -> None:
        """Do what a loop does next."""
        me, desk = self._me, self._desk
        if desk.generation != me._generation:
            self.load()
        else:
            batch = next(me.batches())
            if self._random.random() < LEAVES_SHARE:
                desk.leave()
            else:
                self._train(batch)

    def _train(self, batch: TrainingBatch) -> None:
        algorithm = cast(Algorithm, SimpleNamespace(needs=frozenset()))
        update = self.engine.update(batch.rows, algorithm, batch._work.plan)
        if update.skipped:
            self._me.skip(batch, metrics=update.metrics)
            return
        weights = {name: as_tensor(one) for name, one in self.engine.served_tensors().items()}
        if self._random.random() < BAD_SHARE:
            name = next(iter(weights))
            nan = weights[name] * float("nan")
            for wrong in ({"x": nan}, {**weights, name: weights[name][:0]}, {**weights, name: nan}):
                _refused(lambda wrong=wrong: self._me.step(batch, weights=wrong))  # type: ignore[misc]
        self._me.step(batch, weights=weights, metrics=update.metrics)
        _refused(lambda: self._me.step(batch, weights=weights))

    def load(self) -> None:
        """Load the state to go on from, unless the loop has it."""
        if self._desk.generation == self._me._generation:
            return
        self._me.state()
        self.engine.open()
        if (kept := self._me.kept) is not None:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / STATE_FILE).write_text(kept["fake"])
                self.engine.load(Path(folder))

    def state(self) -> dict[str, Any]:
        self.load()
        with tempfile.TemporaryDirectory() as folder:
            self.engine.save(Path(folder))
            return {"fake": (Path(folder) / STATE_FILE).read_text()}
