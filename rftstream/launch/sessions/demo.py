"""`rftstream demo`: a run that learns to add, and what its model answers to sums that it was never trained on."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.config.stages import Stages
from rftstream.contracts.versions import EvalResult
from rftstream.models.folders.made import END
from rftstream.preflight.folder_choice import newest_folder, run_state
from rftstream.queries.records.shown import DIM, NOT_DIM
from rftstream.runs.folder import OpenRun, open_run
from rftstream.service.role import Log

RUN_FILE = Path(__file__).with_name("demo.toml")
GOOD_MEAN = 0.9
"""Mean over the problems that are held out from which on the model has learned to add."""
NUM_SHOWN = 6
_WIDTH = 16


def demo_config(run_dir: Path | None, seed: int) -> RunConfig:
    """Return the config of a demo whose run folder is below the current one. A demo that was interrupted goes on."""
    config = loader.load([RUN_FILE], sets=[f"run.seed={seed}"])
    config = loader.replace(config, base=os.getcwd())  # no module beside the run file is the user's own
    newest = newest_folder(config, run_dir)
    is_begun = not newest.is_live() and run_state(config, newest) == "begun"
    return loader.replace(config, run__resume="auto") if is_begun else config


def introduction(config: RunConfig) -> str:
    """Return what the demo is about."""
    num_held = config.evaluations["held-out"].options["size"]
    return (
        "A tiny model with random weights learns to add. It is shown 40 sums, then practises on 65 by reward alone.\n"
        f"{num_held} more are held out: what it answers there it cannot have learned by heart. It takes half a minute."
    )


def learned(run_dir: Path, *, dims: bool = False) -> tuple[str, float]:
    """Return a table of held-out problems with the answers of the first version, of the one before the practice and of
    the last, and the mean of the last."""
    run = open_run(run_dir)
    shown = Stages.of(run.config).all[0].end
    with closing(run.transport):
        found = [one.message for one in Log(run.transport).messages("evals") if isinstance(one.message, EvalResult)]
        results = [found[0], *(one for one in found if one.name.version == shown), found[-1]]
        answers = [_first_answers(run, result) for result in results]
    heads = ["random", "shown", "practised"][-len(results) :]
    lines = [f"{'never trained on':>{_WIDTH}}{''.join(f'{head:>{_WIDTH}}' for head in heads)}"]
    for prompt in list(answers[-1])[:: max(1, len(answers[-1]) // NUM_SHOWN)][:NUM_SHOWN]:
        lines.append(f"{prompt:>{_WIDTH}}{''.join(_right(one[prompt], dims) for one in answers)}")
    means = "".join(f"{result.metrics['mean']:>{_WIDTH}.0%}" for result in results)
    lines.append(f"{'right':>{_WIDTH}}{means}   ({found[0].num_tasks} sums, {found[0].num_samples} samples of each)")
    return "\n".join(lines), found[-1].metrics["mean"]


def _right(answer: str, dims: bool) -> str:
    """Return the answer at the right of its column, the end of the completion dimmed: it is no part of the answer."""
    text = f"{answer:>{_WIDTH}}"
    return text.replace(END, f"{DIM}{END}{NOT_DIM}") if dims else text


def _first_answers(run: OpenRun, result: EvalResult) -> dict[str, str]:
    """Return for each prompt the first completion, and whether it was right."""
    answers: dict[str, str] = {}
    for line in run.store().get(result.generations or "").decode().splitlines():
        sample: dict[str, Any] = json.loads(line)
        said = "".join(turn["shown"] for turn in sample["completion"])
        answers.setdefault(sample["prompt"][-1]["content"], f"{said} {'right' if sample['reward'] else 'wrong'}")
    return answers
