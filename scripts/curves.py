"""`make curves`: runs the examples and draws docs/pictures from what they leave; runs the experiments and writes
docs/measured/curves.json, of which the tables of docs/algorithms.md are made; and does one of them with TRL as well.

    python -m scripts.curves                          everything: the examples an hour, the experiments hours
    python -m scripts.curves arithmetic               an example
    python -m scripts.curves algorithms/gspo staleness/8 --seeds 0:1
    python -m scripts.curves algorithms --missing     what has no row in docs/measured/curves.json yet
    python -m scripts.curves trl                      beside TRL, which is needed for it: scripts/side_by_side.py

A run that was stopped goes on, and a finished one is only read again, so ctrl-C loses nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rftstream.config import loader
from rftstream.config.parts.registry import suggest
from rftstream.contracts.versions import EvalResult
from rftstream.errors import ConfigError
from rftstream.models.folders.folder import CONVERTED
from rftstream.queries.curves.history import History, read_history
from rftstream.runs.folder import OpenRun, RunFolder, find_run, open_run
from rftstream.service.control_view import read_control
from rftstream.service.role import Log
from scripts import experiments, side_by_side
from scripts.experiments import (
    EVALUATION,
    EXPERIMENTS,
    LEARNED,
    MEASURED,
    ROOT,
    RUN_FILE,
    SEEDS,
    Experiment,
    find_row,
    read_rows,
    write_row,
)

EXAMPLES = ("arithmetic", "smollm2", "word_problems")
"""Run file examples/<name>.toml, picture docs/pictures/<name>.png."""
RUNS = ROOT / "runs" / "curves"

Call = Callable[..., int]
"""Arguments of `rftstream` -> its exit code."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="make curves", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", metavar="NAME", help="an example, an experiment, or what several begin with")
    parser.add_argument("--seeds", type=_seeds, default=SEEDS, metavar="A:B", help="of experiments; default: 0:3")
    parser.add_argument("--missing", action="store_true", help="only what was not measured yet")
    given = parser.parse_args(arguments)
    known = [*EXAMPLES, *experiments.names(), *(one.name for one in side_by_side.COMPARISONS)]
    if unknown := [name for name in given.only if name not in known]:
        print(f"curves: unknown {unknown[0]!r}; {suggest(unknown[0], known)}", file=sys.stderr)
        return 2
    beside = side_by_side.select(given.only or [side_by_side.NAME])
    if beside and (lacking := side_by_side.why_not()):
        print(f"curves: {lacking}", file=sys.stderr)
        if given.only:
            return 2
        beside = []
    for name in [name for name in EXAMPLES if name in (given.only or EXAMPLES)]:
        run_file = ROOT / "examples" / f"{name}.toml"
        if code := _finish(run_file) or _draw(run_file, ROOT / "docs" / "pictures" / f"{name}.png"):
            return code
    chosen = experiments.select(given.only) if given.only else list(EXPERIMENTS)
    failed = measure(chosen, given.seeds, missing=given.missing) if chosen else 0
    if beside:
        failed = side_by_side.measure(beside, given.seeds, missing=given.missing, runs=RUNS) or failed
        for one in beside:
            side_by_side.draw(one, side_by_side.read_rows())
    return failed


def _seeds(text: str) -> range:
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected A:B with A below B, such as 0:3")
    return range(int(first), int(end))


# --------------------------------------------------------------------------------------------- examples


def _finish(run_file: Path) -> int:
    """Until the run has a model; the exit code of the command that failed."""
    try:
        folder, _ = find_run(run_file)
    except ConfigError:  # there is none yet
        model = Path(loader.load([run_file]).model.path or "")
        if (kind := CONVERTED.get(model.name)) and (code := _rftstream("convert", kind, model)):
            return code
        return _rftstream("run", run_file)
    return 0 if folder.final.is_dir() else _rftstream("resume", folder.path)


def _draw(run_file: Path, picture: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        if not (code := _rftstream("plot", run_file, "--out", folder)):
            shutil.copyfile(Path(folder) / "by_step.png", picture)
    return code


# --------------------------------------------------------------------------------------------- experiments


def measure(
    chosen: Sequence[Experiment],
    seeds: Sequence[int],
    *,
    missing: bool = False,
    runs: Path = RUNS,
    measured: Path = MEASURED,
    call: Call | None = None,
) -> int:
    """One seed of all before the next one of any. One that fails is told, and the others are measured all the same."""
    failed = 0
    for seed in seeds:
        for experiment in chosen:
            if missing and find_row(read_rows(measured), experiment, seed):
                continue
            folder = folder_of(experiment, seed, runs)
            code = _see_to_its_end(experiment, seed, folder, call or _rftstream)
            if (row := _read(experiment, seed, folder)) is None:
                if not code:
                    print(f"curves: {folder.path} was stopped; the same command goes on with it", file=sys.stderr)
                    return 1
                print(
                    f"curves: {experiment.name}, seed {seed}: failed with exit code {code}; see {folder.path}",
                    file=sys.stderr,
                )
                failed = code
                continue
            write_row(measured, row)
            print(f"{experiment.name}, seed {seed}: {_sentence(row)}", flush=True)
    print(f"written to {os.path.relpath(measured)}; python docs/generate.py puts it into docs/algorithms.md")
    return failed


def folder_of(experiment: Experiment, seed: int, runs: Path) -> RunFolder:
    """Another one where what is measured has changed: no old run is taken for a new one, or gone on with."""
    return RunFolder(runs / f"{experiment.name.replace('/', '-')}-seed{seed}-{experiment.digest}")


def _see_to_its_end(experiment: Experiment, seed: int, folder: RunFolder, call: Call) -> int:
    if folder.final.is_dir():
        return 0
    if folder.exists():
        return call("resume", folder.path, "--progress", "plain")
    sets = [argument for one in experiment.sets(seed) for argument in ("--set", one)]
    return call("run", RUN_FILE, "--run-dir", folder.path, *sets, "--progress", "plain")


def _read(experiment: Experiment, seed: int, folder: RunFolder) -> dict[str, Any] | None:
    """Of a run that has come to its end, what its log says."""
    if not folder.exists():
        return None
    run = open_run(folder.path)
    try:
        return row_of(experiment, seed, run)
    finally:
        run.transport.close()


def row_of(experiment: Experiment, seed: int, run: OpenRun) -> dict[str, Any] | None:
    history = read_history(Log(run.transport))
    if read_control(run.transport).finished is None or history.version < (run.config.steps or 1):
        return None
    return {"name": experiment.name, "seed": seed, "of": experiment.digest, **facts(history)}


def facts(history: History) -> dict[str, Any]:
    """`held_out`: mean reward of the first and the last version that were evaluated. `reward`: of samples, in the first
    and the last tenth of steps. `staleness`: mean and largest, in versions. `seconds` from the first step to the last;
    none of a run that was stopped meanwhile. `learned`: version and rollouts of the first evaluation that is above
    LEARNED; a group that is used once more counts once."""
    results = [one for one in history.evaluations if one.evaluation == EVALUATION]
    rewards, tenth = history.rewards(), max(1, len(history.steps) // 10)
    stale = [step.metrics["staleness_mean"] for step in history.steps if "staleness_mean" in step.metrics]
    oldest = [step.metrics["staleness_max"] for step in history.steps if "staleness_max" in step.metrics]
    took_s = history.steps[-1].recorded_at - history.steps[0].recorded_at
    return {
        "versions": [results[0].name.version, results[-1].name.version],
        "held_out": [round(one.metrics["mean"], 4) for one in (results[0], results[-1])],
        "reward": [round(_mean(some), 4) for some in (rewards[:tenth], rewards[-tenth:])],
        "staleness": [round(_mean(stale), 2), max(oldest)],
        "seconds": None if history.resumes else round(took_s, 1),
        "learned": next(([*_place(history, one)] for one in results if one.metrics["mean"] > LEARNED), None),
    }


def _place(history: History, result: EvalResult) -> tuple[int, int]:
    """The version that was evaluated, and the rollouts that it was trained on."""
    version = result.name.version
    trained = {step.name.version: step.trained_rollouts for step in history.steps}
    return version, trained.get(version, 0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _sentence(row: dict[str, Any]) -> str:
    first, last = row["held_out"]
    return f"evaluation {first:.2f} -> {last:.2f}, staleness {row['staleness'][0]:g}"


def _rftstream(*arguments: str | Path) -> int:
    print("$ rftstream", *arguments, flush=True)
    return subprocess.call([sys.executable, "-m", "rftstream", *map(str, arguments)])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("curves: stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
