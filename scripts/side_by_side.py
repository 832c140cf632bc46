"""`make curves ONLY=trl`: examples/arithmetic.toml with `rftstream run`, then with TRL's GRPOTrainer.

Model, tasks and their order, reward, group and batch size, sampling, loss, optimizer, learning rate, steps, seed and
dtype are the same: both read them from the run file. What is not: rftstream samples and trains beside each other, in
processes of one thread each, on rollouts up to a version old, evaluates beside that, and keeps log, weights and
checkpoints; TRL is one process that samples (`generate` of transformers), trains and evaluates in turn, and saves
nothing. It runs twice: with as many threads as torch takes by itself, and with one, which may be faster for a model so
small.

Time counts from the start of the command. Of rftstream until the evaluation is done, so that all it costs counts; of
TRL until the evaluation begins, without the evaluations before. Of a side that was stopped there is no time: it begins
anew. One that came to its end is only read again.
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
from pathlib import Path
from typing import Any

from rftstream import __version__
from rftstream.runtime.role import Log
from rftstream.runtime.runs import open_run
from rftstream.views.history import History, read_history
from scripts.experiments import EVALUATION, ROOT, RUN_FILE, Experiment
from scripts.trl_side import EVALUATIONS, Look

NAME = "trl"
SIDES = ("rftstream", "trl", "trl-1-thread")
MEASURED = ROOT / "docs" / "measured" / "trl.json"
"""One row for each side and seed that came to its end."""
PICTURE = ROOT / "docs" / "pictures" / "trl.png"
TARGET = 0.8
"""Of the held-out reward."""

SETTINGS: dict[str, Any] = {
    f"evaluations.{EVALUATION}.every": 10,
    f"evaluations.{EVALUATION}.n": 1,
    f"evaluations.{EVALUATION}.k": [1],
    f"evaluations.{EVALUATION}.sampling.temperature": 0.0,
    "algorithms.grpo.advantage_eps": 1e-4,  # TRL's
}
"""Of both: what is changed in the run file."""

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


def digest() -> str:
    """Of everything that either side does: another one where a setting or the run file has changed."""
    values = tomllib.loads(RUN_FILE.read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps([values, SETTINGS], sort_keys=True).encode()).hexdigest()[:8]


def measure(
    seeds: Sequence[int], *, missing: bool = False, runs: Path, measured: Path = MEASURED, call: Call | None = None
) -> int:
    """All sides of a seed before the next one. The exit code of the side that failed."""
    for seed in seeds:
        for side in SIDES:
            if missing and find_row(read_rows(measured), side, seed):
                continue
            folder = runs / f"{NAME}-{side}-seed{seed}-{digest()}"
            if code := _see_to_its_end(side, seed, folder, call or _python):
                print(f"curves: {NAME}: {side}, seed {seed}: failed with exit code {code}; see {folder}",
                      file=sys.stderr)  # fmt: skip
                return code
            row = json.loads((folder / "row.json").read_text(encoding="utf-8"))
            write_row(measured, row)
            print(f"{NAME}: {side}, seed {seed}: {sentence(row)}", flush=True)
    return 0


def _see_to_its_end(side: str, seed: int, folder: Path, call: Call) -> int:
    """Until the folder has its row."""
    if (folder / "row.json").is_file():
        return 0
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    load, started_at = os.getloadavg()[0], time.time()
    if code := call(command(side, seed, folder / "run")):
        return code
    ended_at, curve = time.time(), read_curve(side, folder / "run", started_at)
    row = {
        "side": side, "seed": seed, "of": digest(), "curve": curve, "seconds": round(ended_at - started_at, 1),
        "by": versions(side), "cores": os.cpu_count(), "load_before": round(load, 1),
    }  # fmt: skip
    (folder / "row.json").write_text(json.dumps(row), encoding="utf-8")
    return 0


def command(side: str, seed: int, folder: Path) -> list[str]:
    sets = [argument for one in Experiment(NAME, SETTINGS).sets(seed) for argument in ("--set", one)]
    if side == "rftstream":
        return ["-m", "rftstream", "run", str(RUN_FILE), "--run-dir", str(folder), *sets, "--progress", "plain"]
    return ["-m", "scripts.trl_side", str(folder), *(("--threads", "1") if side == "trl-1-thread" else ()), *sets]


def _python(arguments: Sequence[str]) -> int:
    print("$ python", *arguments, flush=True)
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # as many as they take
    return subprocess.call([sys.executable, *arguments], cwd=ROOT, env=env)


def versions(side: str) -> str:
    names = ("torch", "transformers") if side == "rftstream" else ("trl", "torch", "transformers")
    found = [f"{name} {importlib.metadata.version(name)}" for name in names]
    return ", ".join([f"rftstream {__version__}", *found] if side == "rftstream" else found)


# --------------------------------------------------------------------------------------------- curves


def read_curve(side: str, folder: Path, started_at: float) -> list[list[float]]:
    """[version, seconds, mean reward] of each evaluation."""
    if side != "rftstream":
        lines = (folder / EVALUATIONS).read_text(encoding="utf-8").splitlines()
        return own_seconds([Look(**json.loads(line)) for line in lines], started_at)
    run = open_run(folder)
    try:
        return own_seconds(looks_of(read_history(Log(run.transport))), started_at)
    finally:
        run.transport.close()


def looks_of(history: History) -> list[Look]:
    """Nothing stands still for them."""
    return [
        Look(one.name.version, one.evaluated_at, 0.0, one.metrics["mean"])
        for one in history.evaluations if one.evaluation == EVALUATION
    ]  # fmt: skip


def own_seconds(looks: Sequence[Look], started_at: float) -> list[list[float]]:
    curve, stood_still_s = [], 0.0
    for look in looks:
        curve.append([look.version, round(look.at - started_at - stood_still_s, 2), round(look.mean, 4)])
        stood_still_s += look.took_s
    return curve


def reached(row: Mapping[str, Any], target: float = TARGET) -> tuple[int, float] | None:
    """Version and seconds of the first evaluation that has it."""
    return next(((int(version), seconds) for version, seconds, mean in row["curve"] if mean >= target), None)


def sentence(row: Mapping[str, Any]) -> str:
    found, (version, seconds, mean) = reached(row), row["curve"][-1]
    first = f"{TARGET} after {found[1]:.0f} s at version {found[0]}" if found else f"never at {TARGET}"
    return f"{first}; {mean:.2f} after {seconds:.0f} s at version {version:.0f}"


# --------------------------------------------------------------------------------------------- rows


def read_rows(measured: Path = MEASURED) -> list[dict[str, Any]]:
    return json.loads(measured.read_text(encoding="utf-8")) if measured.is_file() else []


def find_row(rows: Rows, side: str, seed: int) -> Mapping[str, Any] | None:
    """Of both as they are now."""
    wanted = {"side": side, "seed": seed, "of": digest()}
    return next((row for row in rows if wanted.items() <= row.items()), None)


def write_row(measured: Path, row: Mapping[str, Any]) -> None:
    """In the place of an older one; one line each."""
    others = [one for one in read_rows(measured) if (one["side"], one["seed"]) != (row["side"], row["seed"])]
    rows = sorted([*others, row], key=lambda one: (one["seed"], SIDES.index(one["side"])))
    measured.parent.mkdir(parents=True, exist_ok=True)
    new = measured.with_name(f"{measured.name}.{os.getpid()}")
    new.write_text("[\n" + ",\n".join(f"  {json.dumps(one)}" for one in rows) + "\n]\n", encoding="utf-8")
    new.replace(measured)


# --------------------------------------------------------------------------------------------- picture


def draw(rows: Rows, picture: Path = PICTURE) -> None:
    """Held-out reward over seconds and over versions; a line for each seed of the sides as they are now."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from rftstream.views.panels import COLORS, INK

    rows = [row for row in rows if row["of"] == digest()]
    figure = Figure(figsize=(11, 3.6), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    for ax, column, label in zip(figure.subplots(1, 2, sharey=True), (1, 0), ("seconds", "steps"), strict=True):
        for row in sorted(rows, key=lambda one: one["seed"]):
            first = find_row(rows, row["side"], min(one["seed"] for one in rows if one["side"] == row["side"])) is row
            ax.plot([one[column] for one in row["curve"]], [one[2] for one in row["curve"]], linewidth=1.6,
                    color=COLORS[SIDES.index(row["side"])], label=row["side"] if first else "_")  # fmt: skip
        ax.axhline(TARGET, color=INK, linewidth=0.8, linestyle=(0, (2, 3)))
        ax.set(xlabel=label, ylim=(0, 1.02), xlim=(0, None))
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#e8e8e8", linewidth=0.8)
    figure.axes[0].set_ylabel("held-out reward, greedy")
    figure.axes[0].legend(frameon=False, loc="upper left")
    figure.savefig(picture)
