"""`make curves ONLY=trl`: two examples with `rftstream run`, then with TRL's GRPOTrainer.

Model, tasks and their order, reward, group and batch size, sampling, loss, optimizer, learning rate, steps, seed and
dtypes are the same: both read them from the run file. What is not: rftstream samples and trains beside each other, in
processes of one thread each, on rollouts up to a version old, and keeps log, weights and checkpoints; TRL is one
process that samples (`generate` of transformers) and trains in turn, and saves nothing. It has as many threads as torch
takes by itself, and in a run of its own one, where the model is so small that this may be faster.

Time counts from the start of the command, without evaluations: rftstream's are done when the run has ended
(`rftstream evaluate`), TRL's between two steps, for which its clock stands still. A version counts when it could be
used: of rftstream when its weights are in the store, of TRL after its step. Of a side that was stopped there is no
time: it begins anew. One that came to its end is only read again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftstream import __version__
from rftstream.config import loader
from rftstream.contracts.versions import WeightsAnnounced
from rftstream.models.folders.folder import CONVERTED
from rftstream.queries.curves.history import read_history
from rftstream.runs.folder import open_run
from rftstream.service.role import Log
from scripts.experiments import ROOT, Experiment
from scripts.trl_side import EVALUATIONS, Look

NAME = "trl"
MEASURED = ROOT / "docs" / "measured" / "trl.json"
"""One row for each comparison, side and seed that came to its end."""
PICTURES = ROOT / "docs" / "pictures"
SIDES = ("rftstream", "trl", "trl-1-thread")
"""In the order of their colours."""


@dataclass(frozen=True, slots=True)
class Comparison:
    name: str
    run_file: Path
    evaluation: str
    """Of the run file; its reward is the curve."""
    settings: Mapping[str, Any]
    """Of both: what is changed in the run file."""
    target: float
    """Of the reward of evaluations."""
    sides: tuple[str, ...]
    seeds: int
    """So many of those that are asked for."""
    ours: Mapping[str, Any]
    """What is changed of ours alone, so that both do the same."""

    @property
    def picture(self) -> Path:
        return PICTURES / f"{self.name}.png"

    def settings_of(self, side: str) -> Mapping[str, Any]:
        return {**self.settings, **(self.ours if side == "rftstream" else {})}

    def digest(self, side: str) -> str:
        """Of everything that it does: another one where a setting or the run file has changed."""
        values = tomllib.loads(self.run_file.read_text(encoding="utf-8"))
        return hashlib.sha256(json.dumps([values, self.settings_of(side)], sort_keys=True).encode()).hexdigest()[:8]


TRLS_EPS = {"algorithms.grpo.advantage_eps": 1e-4}
OURS = {"evaluator.count": 0}
"""Nothing is evaluated meanwhile."""
WITHOUT_WARMUP = {**OURS, "trainer.warmup_steps": 0}
"""As TRL: its schedule `constant` has no warm-up, whatever `warmup_steps` says."""

ARITHMETIC = Comparison(
    "trl",
    ROOT / "scripts" / "sums.toml",
    "sums",
    {
        "evaluations.sums.every": 10,
        "evaluations.sums.n": 1,
        "evaluations.sums.k": [1],
        "evaluations.sums.sampling.temperature": 0.0,
        **TRLS_EPS,
    },
    target=0.8,
    sides=("rftstream", "trl", "trl-1-thread"),
    seeds=3,
    ours=OURS,
)
SMOLLM2 = Comparison(
    "trl-smollm2",
    ROOT / "examples" / "smollm2.toml",
    "chain_sum",
    {
        "run.steps": 40,
        "evaluations.chain_sum.every": 5,
        "evaluations.chain_sum.sampling.temperature": 1.0,
        "buffer.zero_variance": "keep",
        **TRLS_EPS,
    },
    target=0.3,
    sides=("rftstream", "trl"),
    seeds=3,
    ours=WITHOUT_WARMUP,
)
LONG = Comparison(
    "trl-long",
    SMOLLM2.run_file,
    SMOLLM2.evaluation,
    {
        **SMOLLM2.settings,
        "model.context": 192,
        "sampling.max_tokens": 128,
        "run.steps": 20,
        "evaluations.chain_sum.every": 2,
        "evaluations.chain_sum.num_tasks": 64,
    },
    target=0.4,
    sides=("rftstream", "trl"),
    seeds=3,
    ours=WITHOUT_WARMUP,
)
"""Most answers are short and some are long, as where models reason."""
COMPARISONS = (ARITHMETIC, SMOLLM2, LONG)

Rows = Sequence[Mapping[str, Any]]
Call = Callable[[Sequence[str]], int]
"""Arguments of python -> exit code."""


def why_not() -> str | None:
    """What is missing."""
    try:
        importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        return "trl: not installed, expected version 1.16; scripts/setup developer installs it"
    return None


def select(picks: Sequence[str]) -> list[Comparison]:
    """Those with one of these names; `trl` is all of them."""
    return [one for one in COMPARISONS if {one.name, NAME} & set(picks)]


def measure(
    chosen: Sequence[Comparison],
    seeds: Sequence[int],
    *,
    missing: bool = False,
    runs: Path,
    measured: Path = MEASURED,
    call: Call | None = None,
) -> int:
    """All sides of a seed before the next one. The exit code of the side that failed."""
    for one in chosen:
        if code := _get_model(one, call or _python):
            return code
        for seed in seeds[: one.seeds]:
            for side in one.sides:
                if missing and find_row(read_rows(measured), one, side, seed):
                    continue
                folder = runs / f"{one.name}-{side}-seed{seed}-{one.digest(side)}"
                if code := _see_to_its_end(one, side, seed, folder, call or _python):
                    print(
                        f"curves: {one.name}: {side}, seed {seed}: failed with exit code {code}; see {folder}",
                        file=sys.stderr,
                    )
                    return code
                row = json.loads((folder / "row.json").read_text(encoding="utf-8"))
                write_row(measured, row)
                print(f"{one.name}: {side}, seed {seed}: {sentence(row, one.target)}", flush=True)
    return 0


def _get_model(one: Comparison, call: Call) -> int:
    """Where the run file has one of those that `rftstream convert` makes."""
    model = Path(loader.load([one.run_file]).model.path or "")
    kind = CONVERTED.get(model.name)
    return 0 if kind is None or model.is_dir() else call(["-m", "rftstream", "convert", kind, str(model)])


def _see_to_its_end(one: Comparison, side: str, seed: int, folder: Path, call: Call) -> int:
    """Until the folder has its row."""
    if (folder / "row.json").is_file():
        return 0
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    load, started_at = os.getloadavg()[0], time.time()
    if code := call(command(one, side, seed, folder / "run")):
        return code
    ended_at = time.time()
    if side == "rftstream" and (code := call(["-m", "rftstream", "evaluate", str(folder / "run")])):
        return code
    curve = read_curve(one, side, folder / "run", started_at)
    row = {
        "name": one.name,
        "side": side,
        "seed": seed,
        "of": one.digest(side),
        "curve": curve,
        "seconds": round(ended_at - started_at, 1),
        "by": versions(side),
        "cores": os.cpu_count(),
        "load_before": round(load, 1),
    }
    (folder / "row.json").write_text(json.dumps(row), encoding="utf-8")
    return 0


def command(one: Comparison, side: str, seed: int, folder: Path) -> list[str]:
    file = str(one.run_file)
    sets = [argument for text in Experiment(NAME, one.settings_of(side)).sets(seed) for argument in ("--set", text)]
    if side == "rftstream":
        return ["-m", "rftstream", "run", file, "--run-dir", str(folder), *sets, "--progress", "plain"]
    threads = ("--threads", "1") if side == "trl-1-thread" else ()
    return ["-m", "scripts.trl_side", file, str(folder), "--evaluation", one.evaluation, *threads, *sets]


def _python(arguments: Sequence[str]) -> int:
    print("$ python", *arguments, flush=True)
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # as many as they take
    return subprocess.call([sys.executable, *arguments], cwd=ROOT, env=env)


def versions(side: str) -> str:
    names = ("torch", "transformers") if side == "rftstream" else ("trl", "torch", "transformers")
    found = [f"{name} {importlib.metadata.version(name)}" for name in names]
    return ", ".join([f"rftstream {__version__}", *found] if side == "rftstream" else found)


# --------------------------------------------------------------------------------------------- curves


def read_curve(one: Comparison, side: str, folder: Path, started_at: float) -> list[list[float]]:
    """[version, seconds, mean reward] of each evaluation."""
    if side != "rftstream":
        lines = (folder / EVALUATIONS).read_text(encoding="utf-8").splitlines()
        return own_seconds([Look(**json.loads(line)) for line in lines], started_at)
    run = open_run(folder)
    try:
        return own_seconds(looks_of(Log(run.transport), one.evaluation), started_at)
    finally:
        run.transport.close()


def looks_of(log: Log, evaluation: str) -> list[Look]:
    """When a version was in the store. Nothing stands still for its evaluation."""
    announced = {
        message.name: message.announced_at
        for _, message in log.in_force("weights")
        if isinstance(message, WeightsAnnounced)
    }
    return [
        Look(one.name.version, announced[one.name], 0.0, one.metrics["mean"])
        for one in read_history(log).evaluations
        if one.evaluation == evaluation
    ]


def own_seconds(looks: Sequence[Look], started_at: float) -> list[list[float]]:
    curve, stood_still_s = [], 0.0
    for look in looks:
        curve.append([look.version, round(look.at - started_at - stood_still_s, 2), round(look.mean, 4)])
        stood_still_s += look.took_s
    return curve


def reached(row: Mapping[str, Any], target: float) -> tuple[int, float] | None:
    """Version and seconds of the first evaluation that has it."""
    return next(((int(version), seconds) for version, seconds, mean in row["curve"] if mean >= target), None)


def sentence(row: Mapping[str, Any], target: float) -> str:
    found, (version, seconds, mean) = reached(row, target), row["curve"][-1]
    first = f"{target} after {found[1]:.0f} s at version {found[0]}" if found else f"never at {target}"
    return f"{first}; {mean:.2f} after {seconds:.0f} s at version {version:.0f}"


# --------------------------------------------------------------------------------------------- rows


def read_rows(measured: Path = MEASURED) -> list[dict[str, Any]]:
    return json.loads(measured.read_text(encoding="utf-8")) if measured.is_file() else []


def find_row(rows: Rows, one: Comparison, side: str, seed: int) -> Mapping[str, Any] | None:
    """Of both as they are now."""
    wanted = {"name": one.name, "side": side, "seed": seed, "of": one.digest(side)}
    return next((row for row in rows if wanted.items() <= row.items()), None)


def write_row(measured: Path, row: Mapping[str, Any]) -> None:
    """In the place of an older one; one line each."""

    def key(one: Mapping[str, Any]) -> tuple[str, int, int]:
        return one["name"], one["seed"], SIDES.index(one["side"])

    rows = sorted([*(one for one in read_rows(measured) if key(one) != key(row)), row], key=key)
    measured.parent.mkdir(parents=True, exist_ok=True)
    new = measured.with_name(f"{measured.name}.{os.getpid()}")
    new.write_text("[\n" + ",\n".join(f"  {json.dumps(one)}" for one in rows) + "\n]\n", encoding="utf-8")
    new.replace(measured)


# --------------------------------------------------------------------------------------------- picture


def draw(one: Comparison, rows: Rows, picture: Path | None = None) -> None:
    """Reward of evaluations over seconds and over versions; a line for each seed of the sides as they are now."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from rftstream.queries.curves.panels import COLORS, INK

    figure = Figure(figsize=(11, 3.6), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    for ax, column, label in zip(figure.subplots(1, 2, sharey=True), (1, 0), ("seconds", "steps"), strict=True):
        for side in one.sides:
            found = [row for seed in sorted({row["seed"] for row in rows}) if (row := find_row(rows, one, side, seed))]
            for number, row in enumerate(found):
                ax.plot(
                    [look[column] for look in row["curve"]],
                    [look[2] for look in row["curve"]],
                    linewidth=1.6,
                    color=COLORS[SIDES.index(side)],
                    label="_" if number else side,
                )
        ax.axhline(one.target, color=INK, linewidth=0.8, linestyle=(0, (2, 3)))
        ax.set(xlabel=label, ylim=(0, 1.02), xlim=(0, None))
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#e8e8e8", linewidth=0.8)
    figure.axes[0].set_ylabel("reward of evaluations")
    figure.axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(picture or one.picture)
