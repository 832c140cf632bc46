"""Training on rows that begin alike: as trees, which hold such tokens once, beside the same rows packed one after
another. SmolLM2-135M's sizes need no weights for that. A group of 8 answers of 64 tokens to a prompt of 512; an agent
of 8 turns that leaves its path twice, each turn a row that repeats the history before it; and groups of 8 answers of 64
tokens to prompts of 8, where there is next to nothing to share. The sides take turns; processor time, the best of
REPEATS. Beside the first also TRL's GRPOTrainer, if it is installed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks._training import best_steps, make_plan
from benchmarks._trl import TrlStep, installed
from rftstream.algorithms.base import TrainingRow
from rftstream.algorithms.grpo import Grpo
from rftstream.backends.base import OptimizerSettings
from rftstream.backends.torch.backend import TorchBackend
from rftstream.models.spec import ModelSpec

SIBLINGS, AGENT, SHORT = (
    "8 answers of 64 to a prompt of 512 tokens",
    "8 turns of an agent with two forks",
    "4 x 8 answers of 64 to prompts of 8 tokens",
)
TREES, ROWS, TRL = "trees", "packed rows", "TRL's GRPOTrainer"
REPEATS = 2
Texts = Callable[[int], np.ndarray]
"""Makes a text of that many tokens."""
PLAN = make_plan(lr=1e-6, tokens_per_microbatch=2048)


def measure(spec: ModelSpec, folder: str, vocabulary: int) -> list[tuple[str, str, float, float]]:
    """Return for each shape and what trees are compared with: the names, and tokens of the rows per processor second of
    trees and of the other."""
    random = np.random.default_rng(0)

    def texts(length: int) -> np.ndarray:
        return random.integers(0, vocabulary, length)

    shapes = {
        SIBLINGS: _siblings(texts, 1, 512),
        AGENT: _agent(texts),
        SHORT: _siblings(texts, 4, 8),
    }
    grpo = Grpo(Grpo.Config(correction="none"))
    backends = {}
    for name in (TREES, ROWS):
        config = TorchBackend.Config(share_prefixes=name == TREES)
        backends[name] = TorchBackend(config, model=spec, optimizer=OptimizerSettings(), seed=0)
        backends[name].open()
    found = []
    for shape, rows in shapes.items():
        sides: dict[str, Callable[[], float]] = {
            name: lambda one=one, rows=rows: one.update(rows, grpo, PLAN).metrics["grad_norm"]  # type: ignore[misc]
            for name, one in backends.items()
        }
        if shape == SIBLINGS and installed():
            sides[TRL] = TrlStep(spec, rows, rows_at_once=2, lr=PLAN.lr, folder=folder).step
        took_s, norms = best_steps(sides, REPEATS)
        assert max(norms.values()) / min(norms.values()) < 1.02, norms  # a few steps apart, with a tiny learning rate
        num_tokens = sum(len(row.token_ids) for row in rows)
        found += [
            (shape, name, num_tokens / took_s[TREES], num_tokens / took_s[name]) for name in took_s if name != TREES
        ]
    return found


def _siblings(texts: Texts, groups: int, prompt: int) -> list[TrainingRow]:
    rows = []
    for group in range(groups):
        begun = texts(prompt)
        rows += [_row(np.concatenate([begun, texts(64)]), 64, group, one) for one in range(8)]
    return rows


def _agent(texts: Texts) -> list[TrainingRow]:
    """256 tokens of instructions; each turn adds 24 sampled tokens, which no later turn repeats, and 32 that all do."""
    rows: list[TrainingRow] = []

    def go_on(history: np.ndarray, turns: int, forks: tuple[int, ...]) -> None:
        for turn in range(turns):
            rows.append(_row(np.concatenate([history, texts(24)]), 24, 0, len(rows)))
            history = np.concatenate([history, texts(32)])
            if turn in forks:
                go_on(history, 2, ())

    go_on(texts(256), 8, (2, 5))
    return rows


def _row(token_ids: np.ndarray, sampled: int, group: int, number: int) -> TrainingRow:
    mask = (np.arange(len(token_ids)) >= len(token_ids) - sampled).astype(np.float32)
    return TrainingRow(
        token_ids=token_ids.astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=-3 * mask,
        advantages=mask if number % 2 else -mask,
        group=group,
    )
