"""`make curves`: runs the examples to their ends and draws docs/pictures from what they leave.

A run that was stopped goes on, and a finished one is only drawn again, so ctrl-C loses nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rftstream import config
from rftstream.errors import ConfigError
from rftstream.modelfolder import CONVERTED
from rftstream.plugins import suggest
from rftstream.runtime.runs import find_run

ROOT = Path(__file__).parent.parent
EXAMPLES = ("arithmetic", "smollm2")
"""Run file examples/<name>.toml, picture docs/pictures/<name>.png."""


def main(only: Sequence[str]) -> int:
    if unknown := [name for name in only if name not in EXAMPLES]:
        print(f"curves: unknown {unknown[0]!r}; {suggest(unknown[0], EXAMPLES)}", file=sys.stderr)
        return 2
    for name in only or EXAMPLES:
        run_file = ROOT / "examples" / f"{name}.toml"
        if code := _finish(run_file) or _draw(run_file, ROOT / "docs" / "pictures" / f"{name}.png"):
            return code
    return 0


def _finish(run_file: Path) -> int:
    """Until the run has a model; the exit code of the command that failed."""
    try:
        folder = find_run(run_file)
    except ConfigError:  # there is none yet
        model = Path(config.load([run_file]).model.path or "")
        if (kind := CONVERTED.get(model.name)) and (code := _rftstream("convert", kind, model)):
            return code
        return _rftstream("run", run_file)
    return 0 if folder.final.is_dir() else _rftstream("resume", folder.path)


def _draw(run_file: Path, picture: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        if not (code := _rftstream("plot", run_file, "--out", folder)):
            shutil.copyfile(Path(folder) / "by_step.png", picture)
    return code


def _rftstream(*arguments: str | Path) -> int:
    print("$ rftstream", *arguments, flush=True)
    return subprocess.call([sys.executable, "-m", "rftstream", *map(str, arguments)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
