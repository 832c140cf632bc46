"""Plays sums of two digits in one process, without the log: policy -> exact reward -> algorithm -> backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from rftstream.algorithms.base import Algorithm, CriticAlgorithm
from rftstream.backends.base import UpdatePlan
from rftstream.contracts.arrays import Array
from rftstream.contracts.batches import Experience, LossKind
from rftstream.contracts.ids import derive_seed
from rftstream.contracts.rollouts import Segment
from rftstream.contracts.tasks import ChatMessage, RolloutIds, Sampling
from rftstream.contracts.versions import VersionName
from rftstream.policies.base import Completion, SampleRequest

PLAN = UpdatePlan(lr=1e-3, minibatches=1, updates_per_batch=1, max_grad_norm=1.0, tokens_per_microbatch=16384)
SAMPLING = Sampling(max_tokens=3)


@dataclass(frozen=True)
class Step:
    reward: float
    metrics: dict[str, float]


def play(
    policy: Any, backend: Any, algorithm: Algorithm, renderer: Any, *, steps: int, groups: int = 32, siblings: int = 8,
    sampling: Sampling = SAMPLING, seed: int = 0, top: int = 5, **plan: Any,
) -> Iterator[Step]:  # fmt: skip
    """One step after the other, each trained on what was sampled just before."""
    for version in range(steps):
        policy.load(backend.served_tensors(), VersionName(trainer_epoch=1, version=version))
        batch = sample(policy, renderer, version, groups=groups, siblings=siblings, sampling=sampling, seed=seed,
                       top=top)  # fmt: skip
        yield train(backend, algorithm, batch, **plan)


def train(backend: Any, algorithm: Algorithm, batch: list[Experience], **plan: Any) -> Step:
    rows, metrics = algorithm.prepare(batch)
    if "values" in algorithm.needs:
        rows, more = cast(CriticAlgorithm, algorithm).estimate(rows, backend.values(rows, PLAN.tokens_per_microbatch))
        metrics |= more
    update = backend.update(rows, algorithm, dataclasses.replace(PLAN, **plan))
    return Step(metrics["reward"], {**metrics, **update.metrics})


def sample(
    policy: Any, renderer: Any, version: int, *, groups: int = 32, siblings: int = 8, sampling: Sampling = SAMPLING,
    seed: int = 0, top: int = 5,
) -> list[Experience]:  # fmt: skip
    """`groups` sums of two numbers below `top`, `siblings` times each, with an exact reward."""
    requests: dict[str, tuple[SampleRequest, str, int]] = {}
    for group in range(groups):
        left, right = (derive_seed(seed, side, version, group) % top for side in ("left", "right"))
        prompt = renderer.render([ChatMessage(role="user", content=f"{left}+{right}=")])
        for sibling in range(siblings):
            name = f"{version}/{group}/{sibling}"
            request = SampleRequest(
                request_id=name, token_ids=prompt, sampling=sampling, seed=derive_seed(seed, name),
                max_tokens=sampling.max_tokens,
            )  # fmt: skip
            requests[name] = (request, str(left + right), sibling)
            policy.submit(request)
    completions = drain(policy)
    return [
        experience(
            request, completions[name], float(renderer.decode(completions[name].token_ids) == answer),
            group=name.rpartition("/")[0], sibling=sibling, size=siblings,
        )
        for name, (request, answer, sibling) in requests.items()
    ]  # fmt: skip


def drain(policy: Any) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    while policy.num_active:
        done.update((one.request_id, one) for one in policy.step())
    return done


def experience(
    request: SampleRequest, completion: Completion, reward: float, *, group: str, sibling: int = 0, size: int = 1
) -> Experience:
    prompt, sampled = list(request.token_ids), len(completion.token_ids)
    segment = Segment(
        token_ids=Array.of([*prompt, *completion.token_ids], "int32"),
        behavior_logprobs=Array.of(np.concatenate([np.zeros(len(prompt)), completion.behavior_logprobs]), "float32"),
        loss_mask=Array.of([0] * len(prompt) + [1] * sampled, "uint8"),
        versions=completion.versions,
    )
    ids = RolloutIds(
        rollout_id=f"{group}/{sibling}", group_id=group, taskset="sums", sibling=sibling, group_size=size, sequence=0,
        min_version=0,
    )  # fmt: skip
    return Experience(
        ids=ids, batch_sequence=0, share=0, position=0, loss_kind=LossKind.rl, segments=(segment,), reward=reward,
        sampling=request.sampling,
    )  # fmt: skip
