"""What `make curves` measures on scripts/sums.toml: how every algorithm learns, what staleness costs, and what
it saves to train on groups once more.

An experiment is that run file with some settings changed, and has a name that says which: `algorithms/gspo`,
`staleness/8/plain`, `reuse/replay`. To add one: a line in a table here.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rftstream.algorithms

ROOT = Path(__file__).resolve().parent.parent
RUN_FILE = ROOT / "scripts" / "sums.toml"
MEASURED = ROOT / "docs" / "measured" / "curves.json"
"""One row for each experiment and seed that came to its end."""
EVALUATION = "sums"
SEEDS = range(3)
CHANCE, LEARNED = 0.2, 0.8
"""An algorithm learns here if it comes from below the one to above the other, in evaluations."""

NEED_MORE = {"opd", "sft", "dpo", "reward_model", "mix", "chord"}
"""Algorithms that learn from more than rewards: a teacher, demonstrations, pairs. They are not measured here."""
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "dr_grpo": {"row_tokens": 3},
    "dapo": {"overlong_penalty": 0.5, "buffer.zero_variance": "replace", "run.steps": 200},
    "remax": {"run.steps": 500},
    "ppo": {"critic.lr": 4e-3},
    "gigpo": {"turn_weight": 0.0},
    "topr": {"baseline": 0.1},
    "opmd": {"run.steps": 400},
}
"""Settings of an algorithm where its defaults are for other rewards, lengths or models: answers of 3 tokens at most,
rewards of 0 and 1, one turn, a critic that begins from nothing. A key that begins with a section of the run file is
that section's."""
ALGORITHMS = {name: OWN_SETTINGS.get(name, {}) for name in rftstream.algorithms.ALGORITHMS if name not in NEED_MORE}
"""Algorithms that are measured, all that learn from rewards alone, with their own settings."""

STALENESS = (0, 2, 8, 16)
LOSSES: dict[str, dict[str, Any]] = {
    "plain": {"ratio_from": "behavior", "correction": "none"},
    "decoupled": {"correction": "clamp"},
}
"""PPO's clip around who sampled; or around the policy before the batch, weighted by how far that is from who did."""
FOR_STALENESS: dict[str, Any] = {
    "run.steps": 160,
    "feeder.groups_per_batch": 16,
    "feeder.group_size": 16,
    "trainer.minibatches": 4,
    "trainer.lr": 1e-3,
    "algorithms.grpo.clip_low": 0.05,
    "algorithms.grpo.clip_high": 0.05,
    "algorithms.grpo.entropy_coefficient": 0.08,
    "evaluations.sums.every": 20,
    "evaluations.sums.sampling.temperature": 0.0,
    "evaluations.sums.n": 1,
    "evaluations.sums.k": [1],
}
"""Of both losses. A narrow clip and several steps a batch: the clip decides how far a batch moves the policy, from who
sampled it, perhaps many versions ago, or from the policy before the batch. Groups of 16 and a bonus of entropy, since
it is chance otherwise, and not staleness, which of the 25 sums a policy gives up for good: four points each."""
FOR_REUSE: dict[str, Any] = {
    "run.steps": 140,
    "feeder.groups_per_batch": 16,
    "trainer.lr_schedule": "constant",
    "trainer.lr": 1e-3,
    "evaluations.sums.every": 4,
}
_REPLAY = {"op": "replay", "per_batch": 16, "max_uses": 2, "cool_down": 0, "max_staleness": 8, "decay": 1.0}
REUSE: dict[str, dict[str, Any]] = {
    "none": {"pipeline": []},
    "updates": {"pipeline": [], "trainer.updates_per_batch": 2},
    "replay": {"pipeline": [_REPLAY]},
    "steps": {"pipeline": [_REPLAY], "trainer.minibatches": 2},
    "priority": {"pipeline": [{"op": "priority", "by": "spread"}, _REPLAY]},
}
"""Each group once; each batch twice, at once; as many groups of earlier batches beside the new ones, in one optimizer
step or in two; those with a large spread of rewards more often."""
SECTIONS = ("run", "buffer", "trainer")
IRRELEVANT = ("explorer", "verifier", "transport")
"""Sections of the run file that change how fast a run is, and not what it learns from."""


@dataclass(frozen=True, slots=True)
class Experiment:
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key of the run file -> value."""

    def sets(self, seed: int) -> list[str]:
        """Values of --set."""
        return [f"{key}={_toml(value)}" for key, value in {"run.seed": seed, **self.settings}.items()]

    @property
    def digest(self) -> str:
        """Of everything that it learns from: another one where a setting or the run file has changed."""
        values = tomllib.loads(RUN_FILE.read_text(encoding="utf-8"))
        kept = {section: values[section] for section in values if section not in IRRELEVANT}
        text = json.dumps([kept, dict(self.settings)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def _toml(value: Any) -> str:
    """Return the value as TOML writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(one)}' for key, one in value.items())}}}"
    return json.dumps(value)


def own_settings(algorithm: str, options: Mapping[str, Any]) -> dict[str, Any]:
    def whole(key: str) -> str:
        return key if key.partition(".")[0] in SECTIONS else f"algorithms.{algorithm}.{key}"

    return {"trainer.algorithm": algorithm, **{whole(key): options[key] for key in options}}


EXPERIMENTS: tuple[Experiment, ...] = (
    *(Experiment(f"algorithms/{name}", own_settings(name, options)) for name, options in ALGORITHMS.items()),
    *(
        Experiment(
            f"staleness/{eta}/{loss}",
            {"feeder.max_staleness": eta, **FOR_STALENESS, **own_settings("grpo", options)},
        )
        for eta in STALENESS
        for loss, options in LOSSES.items()
    ),
    *(Experiment(f"reuse/{name}", {**FOR_REUSE, **options}) for name, options in REUSE.items()),
)


def names() -> list[str]:
    """What can be picked: experiments, and what several of them begin with."""
    found = dict.fromkeys(
        "/".join(parts[:length])
        for one in EXPERIMENTS
        for parts in [one.name.split("/")]
        for length in range(1, len(parts) + 1)
    )
    return list(found)


def select(picks: Sequence[str]) -> list[Experiment]:
    """Those with one of these names, or below one."""
    return [one for one in EXPERIMENTS if any(f"{one.name}/".startswith(f"{pick}/") for pick in picks)]


def read_rows(measured: Path) -> list[dict[str, Any]]:
    return json.loads(measured.read_text(encoding="utf-8")) if measured.is_file() else []


def find_row(rows: Sequence[dict[str, Any]], experiment: Experiment, seed: int) -> dict[str, Any] | None:
    """Of the experiment as it is now."""
    wanted = {"name": experiment.name, "seed": seed, "of": experiment.digest}
    return next((row for row in rows if wanted.items() <= row.items()), None)


def write_row(measured: Path, row: dict[str, Any]) -> None:
    """In the place of an older one; one line each, in the order of the experiments."""
    order = {one.name: place for place, one in enumerate(EXPERIMENTS)}
    others = [one for one in read_rows(measured) if (one["name"], one["seed"]) != (row["name"], row["seed"])]
    rows = sorted([*others, row], key=lambda one: (order.get(one["name"], len(order)), one["name"], one["seed"]))
    lines = ",\n".join(f"  {json.dumps(one)}" for one in rows)
    measured.parent.mkdir(parents=True, exist_ok=True)
    new = measured.with_name(f"{measured.name}.{os.getpid()}")
    new.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    new.replace(measured)
