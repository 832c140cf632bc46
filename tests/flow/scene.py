"""What the tests of the roles put on the log, in the place of the roles that they do not start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts import codec, ids
from rftstream.contracts.arrays import Array
from rftstream.contracts.batches import BatchManifest, Experience, LossKind
from rftstream.contracts.control import DesiredState, Request, RequestKind, RunState
from rftstream.contracts.messages import Message
from rftstream.contracts.outcomes import GroupOutcome, GroupResult, RolloutSummary
from rftstream.contracts.rollouts import Posted, Rollout, RolloutStatus, Segment, Turn, VersionSpan
from rftstream.contracts.tasks import ChatMessage, Problem, RolloutIds, Sampling, Task
from rftstream.contracts.verdicts import UnscorableReason, Verdict, VerifiedRollout
from rftstream.contracts.versions import StepRecord, VersionName
from rftstream.policies import fake_model
from rftstream.testing import MemoryRun
from rftstream.weights.publisher import publish

BASE: dict[str, Any] = {
    "run": {"name": "flow", "steps": 100},
    "model": {"path": "fake", "dtype": "float32"},
    "tasksets": {"sums": {"source": "arithmetic"}},
    "feeder": {"groups_per_batch": 2, "group_size": 2, "max_staleness": 1},
    "explorer": {"policy": "fake"},
    "trainer": {"backend": "fake"},
    "transport": {"partitions": 3},
}


def make_config(**settings: Any) -> RunConfig:
    """BASE with `section__key=value` changed."""
    return loader.replace(loader.from_dict(BASE), **settings)


class Scene(MemoryRun):
    """A run whose other roles are played by the test. Sequences stand for groups: group n has the sequence n."""

    def __init__(self, folder: Path, *, manifest: bool = True, groups: Iterable[int] = (), **settings: Any) -> None:
        """`groups`: these are admitted, and weights of version 0 are announced."""
        super().__init__(make_config(**settings), folder=folder)
        self.trained: dict[int, int] = {0: 0}
        """Groups trained by each version; filled by `step`."""
        self.total_groups = 0
        """In all batches; filled by `batch`."""
        if manifest:
            self.put_manifest()
        if groups:
            self.announce(0)
            self.admit(*groups)

    @property
    def group_size(self) -> int:
        return self.config.feeder.group_size

    # ------------------------------------------------------------------------------------------ ids

    def siblings(self, sequence: int, *, min_version: int = 0, size: int | None = None) -> tuple[RolloutIds, ...]:
        group = ids.group_id("sums", 0, sequence, 0)
        count = self.group_size if size is None else size
        return tuple(
            RolloutIds(rollout_id=ids.rollout_id(group, sibling), group_id=group, taskset="sums", sibling=sibling,
                       group_size=count, sequence=sequence, min_version=min_version)
            for sibling in range(count)
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------ feeder, trainer

    def admit(
        self,
        *sequences: int,
        min_version: int = 0,
        prompt: str = "1+2=",
        answer: str | None = "3",
        environment: str = "single_turn",
        sampling: Sampling | None = None,
    ) -> list[Task]:
        tasks = [
            Task(ids=one, problem=problem(prompt, answer), sampling=sampling or self.config.sampling,
                 seed=ids.derive_seed(0, one.rollout_id), environment=environment)
            for sequence in sequences for one in self.siblings(sequence, min_version=min_version)
        ]  # fmt: skip
        self.put("tasks", *tasks)
        return tasks

    def step(self, version: int, *, epoch: int = 1, trained: int | None = None, resumed: bool = False) -> None:
        """A StepRecord; by default each step trains a batch of the size that the run file says."""
        if trained is None:
            trained = self.trained.get(version, version * self.config.feeder.groups_per_batch)
        self.trained[version] = trained
        self.put("steps", StepRecord(
            name=VersionName(trainer_epoch=epoch, version=version), batch_sequence=None if resumed else version - 1,
            positions=(0,) * self.config.trainer.shares, trained_groups=trained, trained_rollouts=0,
            weights_digest=None, metrics={}, resumed=resumed,
        ))  # fmt: skip

    def announce(self, version: int, *, epoch: int = 1, resumed: bool = False, skill: float = 0.0) -> VersionName:
        """Weights for the fake policy, in the store and on `weights`."""
        name = VersionName(trainer_epoch=epoch, version=version)
        tensors = {
            fake_model.SKILL: fake_model.serve(np.asarray([skill], np.float32), "float32"),
            fake_model.FILLER: fake_model.serve(np.zeros(8, np.float32), "float32"),
        }
        self.put("weights", publish(self.store, tensors, name, "fake", "float32", resumed=resumed))
        return name

    def decide(self, sequence: int, result: GroupResult, *, late: bool = False, batch: int | None = None) -> None:
        siblings = self.siblings(sequence)[-1:] if late else self.siblings(sequence)
        self.put("outcomes", GroupOutcome(
            group_id=siblings[0].group_id, taskset="sums", sequence=sequence, result=result, reason="test", late=late,
            batch_sequence=batch, group_size=self.group_size,
            rollouts=tuple(RolloutSummary(rollout_id=one.rollout_id, num_tokens=1, status=RolloutStatus.completed,
                                          reward=1.0) for one in siblings),
        ))  # fmt: skip

    def ask(self, state: DesiredState) -> None:
        self.put("control", RunState(state=state, by="test"))

    def request_evaluation(self, request_id: str, **arguments: Any) -> None:
        self.put("control", Request(request_id=request_id, kind=RequestKind.evaluate, arguments=arguments,
                                    expires_at=self.clock.now() + 60))  # fmt: skip

    # ------------------------------------------------------------------------------------------ buffer

    def batch(
        self,
        number: int,
        *,
        rewards: Sequence[float] = (0.0, 1.0),
        groups: int | None = None,
        last: bool = False,
        reward: float | None = None,
        metrics: Mapping[str, float] | None = None,
        scorer: str = "exact 1",
    ) -> None:
        """Batch `number` of groups that all have these rewards, by this scorer; `reward`: the metric of the manifest;
        `metrics`: more of them."""
        shares = self.config.trainer.shares
        count = self.config.feeder.groups_per_batch if groups is None else groups
        self.total_groups += count
        messages: list[Message] = []
        for share in range(shares):
            mine = [number * 1000 + one for one in range(count) if one * shares // count == share]
            experiences = [
                Experience(ids=ids_of, batch_sequence=number, share=share, position=0, loss_kind=LossKind.rl,
                           segments=(segment(3, number, seed=sequence),), reward=rewards[ids_of.sibling],
                           sampling=self.config.sampling)
                for sequence in mine for ids_of in self.siblings(sequence, size=len(rewards))
            ]  # fmt: skip
            experiences = [replace(one, position=place) for place, one in enumerate(experiences)]
            messages += experiences
            messages.append(BatchManifest(
                batch_sequence=number, share=share, num_shares=shares, count=len(experiences),
                digest=codec.digest_of_experiences(map(codec.encode, experiences)),
                groups=tuple(dict.fromkeys(one.ids.group_id for one in experiences)), num_groups=count,
                total_groups=self.total_groups, last=last, admitted=self.total_groups if last else None,
                metrics={"reward": sum(rewards) / len(rewards) if reward is None else reward, **(metrics or {})},
                scorers={experiences[0].ids.taskset: scorer} if experiences else {},
            ))  # fmt: skip
        self.put("batches", *messages)

    # ------------------------------------------------------------------------------------------ explorer, verifier

    def rollout(
        self,
        one: RolloutIds,
        *,
        version: int = 0,
        num_tokens: int = 2,
        text: str = "3",
        status: RolloutStatus = RolloutStatus.completed,
    ) -> Rollout:
        sampled = status in (RolloutStatus.completed, RolloutStatus.truncated)
        said = Turn(role="assistant", content=text, num_tokens=num_tokens, finish_reason="stop")
        return Rollout(
            ids=one, status=status, problem=problem() if status is not RolloutStatus.undecodable else None,
            turns=(said,) if sampled else (),
            segments=(segment(num_tokens, version, seed=one.sequence),) if sampled else (),
            num_tokens=num_tokens if sampled else 0, sampling=self.config.sampling,
            error=None if sampled else "so it is said",
        )  # fmt: skip

    def verified(
        self, one: RolloutIds, reward: float | UnscorableReason | None, *, version: int = 0, num_tokens: int = 2
    ) -> VerifiedRollout:
        """`reward`: a number, or why there is none."""
        verdict, reason = None, UnscorableReason.timeout
        if isinstance(reward, float):
            verdict = Verdict(reward=reward, scorer="exact", scorer_version="1")
        elif reward is not None:
            reason = reward
        return VerifiedRollout(
            ids=one,
            rollout=self.rollout(one, version=version, num_tokens=num_tokens),
            verdict=verdict,
            reason=None if verdict is not None else reason,
        )

    def verify(
        self,
        sequence: int,
        rewards: Sequence[float | UnscorableReason | None] = (0.0, 1.0),
        *,
        version: int = 0,
        only: Sequence[int] | None = None,
        num_tokens: int = 2,
    ) -> None:
        """The group's records on `verified`; `only` some of its siblings."""
        siblings = self.siblings(sequence, size=len(rewards) if only is None else None)
        chosen = range(len(siblings)) if only is None else only
        self.put("verified", *(
            self.verified(siblings[number], reward, version=version, num_tokens=num_tokens)
            for number, reward in zip(chosen, rewards, strict=True)
        ))  # fmt: skip


def playing(
    folder: Path,
    environment: str,
    settings: Mapping[str, Any],
    *,
    every_s: float = 0.5,
    rate: float = 30.0,
    **more: Any,
) -> Scene:
    """Group 0 in this environment, with turns of 30 tokens, a second each. Pieces are saved every so many seconds."""
    scene = Scene(
        folder, policies__fake={"tokens_per_s": rate, "mean_tokens": 30.0, "sigma": 0.0},
        explorer__partial_every_s=every_s, environments={environment: settings}, transport__partitions=1, **more,
    )  # fmt: skip
    scene.announce(0)
    scene.admit(0, environment=environment)
    return scene


def problem(prompt: str = "1+2=", answer: str | None = "3") -> Problem:
    return Problem(messages=(ChatMessage(role="user", content=prompt),), answer=answer)


def segment(num_tokens: int, version: int, *, seed: int = 0) -> Segment:
    """Four prompt tokens, then the sampled ones."""
    mask = [0] * 4 + [1] * num_tokens
    return Segment(
        token_ids=Array.of([*b"1+2=", *((seed + place) % 200 + 1 for place in range(num_tokens))], "int32"),
        behavior_logprobs=Array.of([-0.25 * sampled for sampled in mask], "float32"),
        loss_mask=Array.of(mask, "uint8"),
        versions=(VersionSpan(start=4, count=num_tokens, trainer_epoch=1, version=version),) if num_tokens else (),
    )


def without_version(posted: Posted | None) -> Posted | None:
    """Return a given reward without the digest of what gave it, which is there."""
    assert posted is not None and len(posted.version) == 12
    return replace(posted, version="")
