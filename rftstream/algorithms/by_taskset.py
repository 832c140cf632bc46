"""An algorithm for each taskset: a batch mixes tasksets, and each group is trained by the algorithm of its own taskset.

    L = sum over algorithms a of (n_a / n) L_a

L_a is the loss of algorithm a over its own rows alone. n_a / n is its share of the quantity that it normalises by:
tokens of an optimizer step if it averages over tokens, rows if it averages over rows. So each token (or row) of the
batch has the same weight, as if gradients were accumulated over a sub-batch for each algorithm. An algorithm under two
names acts like one algorithm.

Legend: B rows of a micro-batch, T padded tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rftstream.algorithms.base import (
    Algorithm,
    Denominators,
    MicroBatch,
    RefiningAlgorithm,
    Spread,
    TrainingRow,
    spread_needed,
)
from rftstream.algorithms.scored import masked_fraction
from rftstream.config.sections import RunConfig
from rftstream.contracts.batches import Experience, LossKind
from rftstream.core.samples import plain_sum
from rftstream.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

BY = "algorithm"
"""Addition of a row: the number of the row's algorithm."""
NONE = np.zeros(1, np.float32)
LEAST_FIRST: tuple[Spread, ...] = ("none", "batch", "group")
"""Spreads in order of strictness, since a batch is without signal only if each of its algorithms is."""
COUNTS = ("num_", "groups_without_signal")
"""Prefixes of batch metrics that are summed, except `groups_without_signal_share`."""


@dataclass(frozen=True, slots=True)
class TasksetAlgorithm:
    """An algorithm and the tasksets that use it."""

    algorithm: Algorithm
    tasksets: tuple[str, ...]

    @property
    def label(self) -> str:
        """Label of its metrics, as in `kl/LABEL`."""
        return "+".join(self.tasksets) or "experts"


class ByTaskset:
    """Several algorithms as one Algorithm, each for the groups of its own tasksets. `build_algorithm` makes it, and the
    backend calls it."""

    def __init__(self, rest: TasksetAlgorithm, others: Sequence[TasksetAlgorithm]) -> None:
        """`rest` is the algorithm of all other tasksets, and of demonstrations and pairs."""
        self.parts = (rest, *others)
        self._numbers = {name: number for number, part in enumerate(self.parts) for name in part.tasksets}
        self.needs = _union([part.algorithm.needs for part in self.parts])
        self.needs_spread: Spread = min(
            (spread_needed(part.algorithm) for part in self.parts if part.tasksets), key=LEAST_FIRST.index
        )
        if "values" in self.needs:
            raise ConfigError(
                "tasksets: an algorithm with a critic beside another, expected one critic for all rollouts; name it as "
                "trainer.algorithm, and no other"
            )
        if hasattr(rest.algorithm, "held_out"):
            self.held_out = rest.algorithm.held_out

    # ----------------------------------------------------------------------------- rows

    def prepare(
        self, batch: Sequence[Experience], reference_logprobs: Sequence[np.ndarray] | None = None
    ) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
        """Return the rows of all algorithms, one algorithm after the other."""
        rows: list[TrainingRow] = []
        metrics: dict[str, Mapping[str, float]] = {}
        num_groups = 0
        for number, part, experiences in self._split(batch):
            own, values = part.algorithm.prepare(experiences)
            if reference_logprobs is not None and "reference_rewards" in part.algorithm.needs:
                own, values = part.algorithm.prepare(experiences, reference_logprobs[len(rows) : len(rows) + len(own)])
            metrics[part.label] = values
            rows += [
                replace(row, group=num_groups + row.group, additions={**row.additions, BY: _all(row, number)})
                for row in own
            ]
            num_groups = 1 + max((row.group for row in rows), default=-1)
        whole = _of_batch(metrics)
        if "masked_fraction" in whole:
            whole["masked_fraction"] = masked_fraction(
                [row for row in rows if not row.additions.get("expert", NONE).any()]
            )
        return _alike(rows), whole

    def in_order(self, batch: Sequence[Experience]) -> list[Experience]:
        """Return the experiences in the order of their rows."""
        return [one for _, _, own in self._split(batch) for one in own]

    def refine(
        self, rows: Sequence[TrainingRow], row_logprobs: Sequence[np.ndarray]
    ) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
        """Let each algorithm that refines rows refine its own. Other rows are unchanged."""
        refined, metrics = list(rows), dict[str, Mapping[str, float]]()
        for number, part in enumerate(self.parts):
            places = [place for place, row in enumerate(rows) if _number(row) == number]
            if not places or "row_logprobs" not in part.algorithm.needs:
                continue
            own, metrics[part.label] = cast(RefiningAlgorithm, part.algorithm).refine(
                [rows[place] for place in places], [row_logprobs[place] for place in places]
            )
            for place, row in zip(places, own, strict=True):
                refined[place] = row
        return _alike(refined), _of_batch(metrics)

    def _split(self, batch: Sequence[Experience]) -> Iterator[tuple[int, TasksetAlgorithm, list[Experience]]]:
        for number, part in enumerate(self.parts):
            own = [one for one in batch if self._number_of(one) == number]
            if own:
                yield number, part, own

    def _number_of(self, experience: Experience) -> int:
        return 0 if experience.loss_kind is not LossKind.rl else self._numbers.get(experience.ids.taskset, 0)

    # ----------------------------------------------------------------------------- loss

    def loss(
        self, policy_logprobs_BT: Tensor, rows: MicroBatch, denominators: Denominators
    ) -> tuple[Any, dict[str, Any]]:
        """Return the sum of the losses. Each algorithm gets its own rows and the denominators of the whole step."""
        numbers_B = rows.additions[BY][:, 0]
        losses, metrics = [], dict[str, Any]()
        for number in sorted({int(one) for one in numbers_B.tolist()}):
            part, places = self.parts[number], (numbers_B == number).nonzero()[:, 0]
            own = _select(rows, places)
            loss, sums = part.algorithm.loss(
                policy_logprobs_BT[places], own, denominators if number == 0 else _without_demonstrations(denominators)
            )
            losses.append(loss)
            if own.entropy_BT is not None:
                sums = {"entropy": own.entropy_BT.detach().sum(), **sums}
            metrics |= {f"{name}/{part.label}": value for name, value in sums.items()}
            metrics[f"token_share/{part.label}"] = own.loss_mask_BT.sum()
        return sum(losses[1:], losses[0]), metrics

    def summarise(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return each algorithm's metrics over its own tokens, as NAME/LABEL, and their means over tokens, as NAME."""
        rest = dict(means)
        found: dict[str, tuple[float, dict[str, float]]] = {}
        for part in self.parts:
            ending = f"/{part.label}"
            own = {name.removesuffix(ending): rest.pop(name) for name in means if name.endswith(ending)}
            share = own.pop("token_share", 0.0)
            if share:
                values = {name: value if name.startswith("max_") else value / share for name, value in own.items()}
                found[part.label] = share, part.algorithm.summarise(values)
        shares = {f"token_share/{label}": share for label, (share, _) in found.items()}
        named = {f"{name}/{label}": value for label, (_, own) in found.items() for name, value in own.items()}
        return _means(list(found.values())) | rest | shares | named


def build_algorithm(config: RunConfig, where: str = "trainer.algorithm") -> Algorithm:
    """Build the algorithm for all tasksets. Tasksets with the same algorithm and settings share one object. `where` is
    the place in the run file that names the default algorithm."""
    kinds: list[tuple[Any, Any]] = []
    tasksets: list[list[str]] = []
    own = {name: f"tasksets.{name}.algorithm" for name, section in config.tasksets.items() if section.algorithm}
    places: dict[str | None, str] = {None: where, **{name: own.get(name, where) for name in config.tasksets}}
    for name, place in places.items():
        if (kind := config.build_algorithm(place)) not in kinds:
            kinds.append(kind)
            tasksets.append([])
        tasksets[kinds.index(kind)] += [name] if name is not None else []
    built: list[Algorithm] = [part(options) for part, options in kinds]
    if len(built) == 1:
        return built[0]
    rest, *others = [TasksetAlgorithm(one, tuple(names)) for one, names in zip(built, tasksets, strict=True)]
    return ByTaskset(rest, others)


def _union(needs: Sequence[frozenset[str]]) -> frozenset[str]:
    """Return the union of needs. `no_proximal_logprobs` is included only if all algorithms have it."""
    everything = frozenset().union(*needs)
    return (
        everything if all("no_proximal_logprobs" in need for need in needs) else everything - {"no_proximal_logprobs"}
    )


def _alike(rows: Sequence[TrainingRow]) -> tuple[TrainingRow, ...]:
    """Give each row the additions of all rows, with 0 if its algorithm has none, since a micro-batch only contains
    additions that all of its rows have."""
    names = {name for row in rows for name in row.additions}
    return tuple(
        replace(
            row, additions={**{name: _all(row, 0.0) for name in sorted(names - row.additions.keys())}, **row.additions}
        )
        for row in rows
    )


def _number(row: TrainingRow) -> int:
    return int(row.additions[BY][0])


def _all(row: TrainingRow, value: float) -> np.ndarray:
    return np.full(len(row.token_ids), value, np.float32)


def _select(rows: MicroBatch, places: Tensor) -> MicroBatch:
    def some(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: some(one) for name, one in value.items()}
        return None if value is None else value[places]

    return replace(rows, **{field.name: some(getattr(rows, field.name)) for field in fields(rows)})


def _without_demonstrations(denominators: Denominators) -> Denominators:
    """Return the denominators without demonstrations, which another algorithm separates from its rollouts."""
    return replace(
        denominators,
        num_tokens=denominators.num_tokens - denominators.num_demonstration_tokens,
        num_rows=denominators.num_rows - denominators.num_demonstration_rows,
    )


# ----------------------------------------------------------------------------- metrics


def _of_batch(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return each algorithm's metrics of `prepare`, as NAME/LABEL, and those of the whole batch, as NAME: counts are
    summed, spreads are over all rollouts, other metrics are means over rollouts. `reward/LABEL` is computed by the
    buffer."""
    named = {
        f"{name}/{label}": value for label, own in metrics.items() for name, value in own.items() if name != "reward"
    }
    weighed = [(own.get("num_rollouts", 1.0), own) for own in metrics.values()]
    whole = _means(weighed)
    for name in whole:
        values = [(weight, own[name], own) for weight, own in weighed if name in own]
        if name.startswith(COUNTS) and not name.endswith("_share"):
            whole[name] = plain_sum(value for _, value, _ in values)
        elif name.endswith("_std") and (mean := name.removesuffix("_std")) in whole:
            total = plain_sum(weight for weight, _, _ in values) or 1.0
            squares = plain_sum(weight * (value**2 + own[mean] ** 2) for weight, value, own in values) / total
            whole[name] = math.sqrt(max(0.0, squares - whole[mean] ** 2))
    if whole.get("num_groups") and "groups_without_signal" in whole:
        whole["groups_without_signal_share"] = whole["groups_without_signal"] / whole["num_groups"]
    return whole | named


def _means(weighed: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Return the weighted mean of each metric over the algorithms that have it; for maxima the largest."""
    whole = {}
    for name in dict.fromkeys(name for _, own in weighed for name in own):
        values = [(weight, own[name]) for weight, own in weighed if name in own]
        total = plain_sum(weight for weight, _ in values)
        largest = name.startswith("max_") or name.endswith("_max")
        whole[name] = (
            max(value for _, value in values)
            if largest or not total
            else (plain_sum(weight * value for weight, value in values) / total)
        )
    return whole
