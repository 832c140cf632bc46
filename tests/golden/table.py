"""A policy that is a table of logits, trained in one process without model, log or backend: milliseconds per step.

Four problems; the answer to each is some tokens and the end. A rollout is paid the share of its places that are right.
Everything is float64 but what messages store, and all chance is seeded, so that the numbers are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rftstream.algorithms.base import Denominators, MicroBatch, TrainingRow
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import AlgorithmSpec
from rftstream.contracts.arrays import Array
from rftstream.contracts.batches import Experience, LossKind
from rftstream.contracts.rollouts import Segment, VersionSpan
from rftstream.contracts.tasks import RolloutIds, Sampling
from rftstream.core.packing import pad_rows

END = 0
TEACHER = 0.9
"""What a teacher, who knows the answers, gives to a right token; it shares the rest evenly."""
ANSWERS = ((1, END), (2, 3, END), (4, 1, 2, END), (3, 3, 1, END))
LONGEST, VOCABULARY, SIBLINGS, PASSES, LR = 4, 5, 8, 2, 0.1


@dataclass(frozen=True)
class Step:
    reward: float
    loss: float
    """Of the first pass."""


def play(algorithm: Any, *, steps: int, seed: int = 0) -> Iterator[Step]:
    """Each batch is sampled from the table of one version before, and trained twice."""
    logits_PTV = torch.zeros((len(ANSWERS), LONGEST, VOCABULARY), dtype=torch.float64, requires_grad=True)
    reference_PTV = logits_PTV.detach().clone()
    values_PT = torch.zeros((len(ANSWERS), LONGEST), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits_PTV, values_PT], lr=LR)
    random, older_PTV = np.random.default_rng(seed), reference_PTV
    for version in range(steps):
        greedy = registry.spec(AlgorithmSpec, algorithm.name).greedy_baseline
        batch = sample(older_PTV, max(version - 1, 0), version, random, greedy=greedy)
        older_PTV = logits_PTV.detach().clone()
        rows, metrics = prepare(algorithm, batch, older_PTV, reference_PTV, values_PT)
        proximal_BT = token_logprobs(older_PTV, rows)
        losses = []
        for _ in range(PASSES):
            reference_BT = token_logprobs(reference_PTV, rows)
            losses.append(step(algorithm, rows, logits_PTV, proximal_BT, reference_BT, values_PT))
            optimizer.step()
            optimizer.zero_grad()
        yield Step(metrics["reward"], losses[0])


def sample(
    logits_PTV: torch.Tensor, sampled_by: int, version: int, random: np.random.Generator, *, greedy: bool = False
) -> list[Experience]:
    """`greedy`: the first sibling of each problem says what is likeliest."""
    logprobs_PTV = logits_PTV.log_softmax(-1).numpy()
    batch = []
    for problem, answer in enumerate(ANSWERS):
        for sibling in range(SIBLINGS):
            tokens: list[int] = []
            while len(tokens) < LONGEST and tokens[-1:] != [END]:
                shares = np.exp(logprobs_PTV[problem, len(tokens)]).cumsum()
                drawn = min(int(np.searchsorted(shares, random.random())), VOCABULARY - 1)
                likeliest = int(logprobs_PTV[problem, len(tokens)].argmax())
                tokens.append(likeliest if greedy and sibling == 0 else drawn)
            right = sum(one == other for one, other in zip(tokens, answer, strict=False))
            logprobs = [logprobs_PTV[problem, place, token] for place, token in enumerate(tokens)]
            segment = Segment(
                token_ids=Array.of([problem, *tokens], "int32"), loss_mask=Array.of([0] + [1] * len(tokens), "uint8"),
                behavior_logprobs=Array.of([0.0, *logprobs], "float32"),
                versions=(VersionSpan(start=1, count=len(tokens), trainer_epoch=1, version=sampled_by),),
            )  # fmt: skip
            group = f"{version}/{problem}"
            ids = RolloutIds(rollout_id=f"{group}/{sibling}", group_id=group, taskset="table", sibling=sibling,
                             group_size=SIBLINGS, sequence=0, min_version=0)  # fmt: skip
            batch.append(Experience(
                ids=ids, batch_sequence=version, share=0, position=len(batch), loss_kind=LossKind.rl,
                segments=(segment,), reward=right / max(len(answer), len(tokens)),
                sampling=Sampling(max_tokens=LONGEST, temperature=0.0 if greedy and sibling == 0 else 1.0),
                additions={"teacher_logprobs": Array.of([0.0, *taught(answer, tokens)], "float32")},
            ))  # fmt: skip
    return batch


def taught(answer: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Logprobs of the teacher, who says the end wherever the answer is over."""
    right = [answer[place] if place < len(answer) else END for place in range(len(tokens))]
    return [float(np.log(TEACHER if one == other else (1 - TEACHER) / (VOCABULARY - 1)))
            for one, other in zip(tokens, right, strict=True)]  # fmt: skip


def prepare(
    algorithm: Any,
    batch: list[Experience],
    logits_PTV: torch.Tensor,
    reference_PTV: torch.Tensor,
    values_PT: torch.Tensor,
) -> tuple[Sequence[TrainingRow], dict[str, float]]:
    """As the trainer does."""
    rows, metrics = algorithm.prepare(batch)
    if "reference_rewards" in algorithm.needs:
        rows, metrics = algorithm.prepare(batch, row_logprobs(reference_PTV, rows))
    if "row_logprobs" in algorithm.needs:
        rows, more = algorithm.refine(rows, row_logprobs(logits_PTV, rows))
        metrics |= more
    if "values" in algorithm.needs:
        rows, more = algorithm.estimate(rows, by_row(token_values(values_PT, rows), rows))
        metrics |= more
    return rows, metrics


def step(
    algorithm: Any, rows: Sequence[TrainingRow], logits_PTV: torch.Tensor, proximal_BT: torch.Tensor,
    reference_BT: torch.Tensor, values_PT: torch.Tensor,
) -> float:  # fmt: skip
    """Gradients of one pass, in two micro-batches; the loss."""
    mask_BT = padded([row.loss_mask for row in rows])
    denominators = Denominators(num_tokens=float(mask_BT.sum()), num_rows=float(len(rows)))
    policy_BT, total = token_logprobs(logits_PTV, rows), 0.0
    entropy_PT = -(logits_PTV.softmax(-1) * logits_PTV.log_softmax(-1)).sum(-1)
    entropy_BT = torch.nn.functional.pad(entropy_PT[[int(row.token_ids[0]) for row in rows]], (1, 0))
    for part in (slice(None, None, 2), slice(1, None, 2)):
        chosen = rows[part]
        micro = MicroBatch(
            loss_mask_BT=mask_BT[part],
            behavior_logprobs_BT=padded([row.behavior_logprobs for row in rows])[part],
            advantages_BT=padded([row.advantages for row in rows])[part],
            additions={name: padded([row.additions[name] for row in rows])[part] for name in chosen[0].additions},
            entropy_BT=entropy_BT[part][:, : mask_BT.shape[1]],
            proximal_logprobs_BT=proximal_BT[part],
            reference_logprobs_BT=reference_BT[part],
        )
        loss, _ = algorithm.loss(policy_BT[part], micro, denominators)
        loss.backward(retain_graph=True)
        total += float(loss.detach())
        if "values" in algorithm.needs:
            algorithm.value_loss(token_values(values_PT, rows)[part], micro, denominators)[0].backward()
    return total


def token_logprobs(logits_PTV: torch.Tensor, rows: Sequence[TrainingRow]) -> torch.Tensor:
    """Of each row's tokens [B, T], 0 for the problem and padding."""
    problems_B = [int(row.token_ids[0]) for row in rows]
    tokens_BT = torch.from_numpy(pad_rows([row.token_ids[1:] for row in rows], fill=-1).astype(np.int64))
    logprobs_BTV = logits_PTV.log_softmax(-1)[problems_B, : tokens_BT.shape[1]]
    found_BT = logprobs_BTV.gather(2, tokens_BT.clamp(min=0)[..., None])[..., 0]
    return torch.nn.functional.pad(torch.where(tokens_BT >= 0, found_BT, 0.0), (1, 0))


def row_logprobs(logits_PTV: torch.Tensor, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
    return by_row(token_logprobs(logits_PTV, rows), rows)


def token_values(values_PT: torch.Tensor, rows: Sequence[TrainingRow]) -> torch.Tensor:
    """Before each of a row's tokens [B, T]: a critic that knows problem and place, and not what was said."""
    longest = max(len(row.token_ids) for row in rows)
    return torch.nn.functional.pad(values_PT[[int(row.token_ids[0]) for row in rows]], (1, 0))[:, :longest]


def by_row(found_BT: torch.Tensor, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
    table_BT = found_BT.detach().numpy().astype(np.float32)
    return [found[: len(row.token_ids)] for found, row in zip(table_BT, rows, strict=True)]


def padded(arrays: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(pad_rows(arrays).astype(np.float64))
