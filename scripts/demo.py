"""`make demo`: runs examples/arithmetic.toml and shows what was learned: the same sums, before and after."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import rftstream
from rftstream.commands.options import can_dim
from rftstream.contracts.versions import EvalResult
from rftstream.errors import RftError
from rftstream.models.folders.made import END
from rftstream.queries.records.shown import DIM, NOT_DIM
from rftstream.runs.folder import OpenRun, open_run
from rftstream.service.role import Log

RUN_FILE = Path(__file__).parent.parent / "examples" / "arithmetic.toml"
NUM_SHOWN = 6


def main() -> int:
    print(f"$ rftstream run {_shown(RUN_FILE)}", flush=True)
    result = rftstream.run(RUN_FILE)
    print(f"\n{result.summary()}")
    if result.exit_code or result.final is None:
        print(f"demo: {result.error or f'the run ended early: {result.reason}'}", file=sys.stderr)
        return result.exit_code or 1
    run = open_run(result.run_dir)
    try:
        print(f"\n{learned(run)}")
    finally:
        run.transport.close()
    print(f"\n{next_commands(result.run_dir)}")
    return 0


def learned(run: OpenRun) -> str:
    results: list[EvalResult] = [
        received.message
        for received in Log(run.transport).messages("evals")
        if isinstance(received.message, EvalResult)
    ]
    first, last = results[0], results[-1]
    before, after = (_first_answers(run, result) for result in (first, last))
    lines = [f"{'':10}{f'version {first.name.version}':>16}{f'version {last.name.version}':>16}"]
    for prompt in list(after)[:: max(1, len(after) // NUM_SHOWN)][:NUM_SHOWN]:
        lines.append(f"{prompt:>10}{_right(before[prompt])}{_right(after[prompt])}")
    means = "".join(f"{result.metrics['mean']:>15.0%} " for result in (first, last))
    return "\n".join([*lines, f"{'right':>10}{means}   ({first.num_tasks} sums, {first.num_samples} samples of each)"])


def _right(answer: str) -> str:
    """At the right of its column; the end of a completion, a token that is no part of the answer, is dimmed."""
    text = f"{answer:>16}"
    return text.replace(END, f"{DIM}{END}{NOT_DIM}") if can_dim() else text


def _first_answers(run: OpenRun, result: EvalResult) -> dict[str, str]:
    """Prompt -> all that the model sampled for it first, and whether that was right."""
    answers: dict[str, str] = {}
    for line in run.store().get(result.generations or "").decode().splitlines():
        sample: dict[str, Any] = json.loads(line)
        said = "".join(turn["shown"] for turn in sample["completion"])
        verdict = "right" if sample["reward"] else "wrong"
        answers.setdefault(sample["prompt"][-1]["content"], f"{said} {verdict}")
    return answers


def next_commands(run_dir: Path) -> str:
    command, folder = _shown(Path(sys.executable).with_name("rftstream")), _shown(run_dir)
    return "\n".join(
        [
            "Go on with:",
            f"  {command} audit {folder}    what became of every rollout",
            f"  {command} plot {folder}     reward, lengths, staleness, loss as pictures",
            f"  {command} resume {folder} --set run.steps=300    some more training",
        ]
    )


def _shown(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RftError as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
