"""A backend without a model: it trains `fakemodel`, in microseconds per row, and needs numpy only."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta

from rftstream.algorithms.base import Algorithm, TrainingRow
from rftstream.backends.base import OptimizerSettings, Update, UpdatePlan
from rftstream.backends.stopping import UpdateStop
from rftstream.core.samples import plain_sum
from rftstream.errors import ConfigError
from rftstream.models.folders.folder import copy_companions
from rftstream.models.spec import ModelSpec
from rftstream.policies import fake_model
from rftstream.weights.snapshot import RawTensor, write_snapshot

STATE_FILE = "fake.json"


class FakeBackend:
    """A backend for tests and simulations, as `Backend` describes it. Its model is one number, the skill, plus filler
    elements that depend on everything that was trained."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        start_skill: float = -1.0
        """Skill of version 0. At -1 about a quarter of the sums are answered correctly."""
        skill_rate: float = 0.25
        """Learning rate of the skill. The run's own lr is for real models."""
        elements: Annotated[int, Meta(ge=8)] = 64
        """Number of filler elements. One eighth of them changes with each batch."""
        fillers: Annotated[int, Meta(ge=1)] = 1
        """Number of tensors in which they lie."""
        nan_at: tuple[int, ...] = ()
        """Batches, counted from 0 since version 0, that give a NaN."""
        step_s: Annotated[float, Meta(ge=0)] = 0.0
        """Seconds that a batch takes."""

    def __init__(self, config: Config, *, model: ModelSpec, optimizer: OptimizerSettings, seed: int) -> None:
        self._config, self._spec, self._seed = config, model, seed
        self.stopping = UpdateStop()
        self.is_on_device = False
        """Whether a backend with a real device would hold its memory now."""

    def open(self) -> None:
        """Make version 0 from the seed and `start_skill`."""
        self.is_on_device = True
        self._num_batches = 0
        self._skill = self._config.start_skill
        self._chain = hashlib.sha256(f"fake {self._seed}".encode()).digest()
        self._filler = np.zeros(self._config.elements, dtype=np.float32)
        self._change_filler(self._config.elements)

    def update(self, rows: Sequence[TrainingRow], algorithm: Algorithm, plan: UpdatePlan) -> Update:
        """Raise or lower the skill by one policy gradient step. ConfigError if the algorithm needs reference or row
        logprobs."""
        if lacking := [name for name in sorted(algorithm.needs) if name.startswith(("reference_", "row_"))]:
            raise ConfigError(f"backend fake: the algorithm needs {', '.join(lacking)}, which it can't give")
        self.is_on_device = True
        self.stopping.sleep(self._config.step_s)
        self._num_batches += 1
        num_tokens = float(sum(row.loss_mask.sum() for row in rows))
        if self._num_batches - 1 in self._config.nan_at:
            return Update(metrics={"loss": math.nan, "grad_norm": math.nan, "num_tokens": num_tokens}, skipped=True)
        gradient = self._gradient(rows)
        self._skill = float(np.float32(self._skill + self._config.skill_rate * gradient))
        total = hashlib.sha256(self._chain)
        for row in rows:
            for array in (row.token_ids, row.loss_mask, row.behavior_logprobs, row.advantages):
                total.update(np.ascontiguousarray(array).tobytes())
        self._chain = total.digest()
        self._change_filler(self._config.elements // 8)
        return Update(
            metrics={"loss": -gradient, "grad_norm": abs(gradient), "num_tokens": num_tokens, "skill": self._skill}
        )

    def logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        """Return the same logprob for every unmasked token: log sigmoid(skill)."""
        logprob = -math.log1p(math.exp(-self._skill))
        return [np.where(row.loss_mask > 0, np.float32(logprob), np.float32(0)) for row in rows]

    def reference_logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        """Raise ConfigError: this backend has no reference."""
        raise ConfigError("backend fake: has no reference model; use the backend torch")

    def served_tensors(self) -> Mapping[str, RawTensor]:
        """Return the skill and the filler in the served dtype."""
        skill = np.asarray([self._skill], dtype=np.float32)
        names = [fake_model.FILLER, *(f"{fake_model.FILLER}.{number}" for number in range(1, self._config.fillers))]
        fillers = zip(names, np.array_split(self._filler, len(names)), strict=True)
        return {
            **{name: fake_model.serve(filler, self._spec.dtype) for name, filler in fillers},
            fake_model.SKILL: fake_model.serve(skill, self._spec.dtype),
        }

    def save(self, folder: Path) -> None:
        """Write all state into `fake.json`. JSON keeps the numbers exactly."""
        state = {
            "backend": "fake",
            "num_batches": self._num_batches,
            "skill": self._skill,
            "chain": self._chain.hex(),
            "filler": self._filler.tolist(),
        }
        (folder / STATE_FILE).write_text(json.dumps(state) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. ConfigError if there is no `fake.json`."""
        self.is_on_device = True
        try:
            state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{folder}: has no {STATE_FILE}, expected a checkpoint of the fake backend") from None
        self._num_batches, self._skill = state["num_batches"], state["skill"]
        self._chain, self._filler = bytes.fromhex(state["chain"]), np.asarray(state["filler"], dtype=np.float32)

    def export(self, folder: Path) -> None:
        """Write `model.safetensors` and a minimal `config.json`."""
        with (folder / "model.safetensors").open("wb") as file:
            write_snapshot(file, self.served_tensors(), {"format": "np"})
        copy_companions(self._spec, folder)

    def leave_device(self) -> None:
        """Note that a device would be free now."""
        self.is_on_device = False

    def close(self) -> None:
        """Do nothing: the backend holds no device and no process."""

    def _gradient(self, rows: Sequence[TrainingRow]) -> float:
        """Return the REINFORCE gradient: the mean of A (right - p) over rows with sampled tokens."""
        terms = [self._term(row) for row in rows if row.loss_mask.any()]
        return plain_sum(terms) / len(terms) if terms else 0.0

    def _term(self, row: TrainingRow) -> float:
        sampled_T = row.loss_mask > 0
        first = int(sampled_T.argmax())
        advantage = float(row.advantages[first])
        if row.token_ids.max(initial=0) > 255:  # other ids than bytes: only the reward knows
            return max(advantage, 0.0) * 0.5
        prompt = row.token_ids[:first].astype(np.uint8).tobytes().decode(errors="replace")
        said = row.token_ids[sampled_T].astype(np.uint8)
        text = said[said > 0].tobytes().decode(errors="replace")
        answer = fake_model.solve(prompt)
        right = advantage > 0 if answer is None else text.strip() == answer
        return advantage * (float(right) - fake_model.right_probability(self._skill, prompt))

    def _change_filler(self, count: int) -> None:
        """Set `count` filler elements to new values. A hash chain gives places and values; the values are exact in
        every served dtype."""
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(self._chain[:16], "little")))
        places = generator.choice(len(self._filler), size=count, replace=False)
        self._filler[places] = generator.integers(-128, 128, size=count) / np.float32(128)
