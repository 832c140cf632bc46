"""Another release of rftstream for tests: a copy of this tree, a minor version on, whose contracts have gained a field.

Its workers run from the copy by PYTHONPATH; those of this tree are the release before."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from rftstream.contracts.messages import MESSAGES

ROOT = Path(__file__).parents[1]
PACKAGES = ("rftstream", "workers", "schemas")
VERSION = "0.99.0"

NOTE = "of the later release"
"""What the later release writes into the field that it has more."""

CHANGED = {
    "rollout": "rollouts", "partial_rollout": "rollouts", "verified_rollout": "verdicts", "experience": "batches",
    "step_record": "versions",
}  # fmt: skip
"""Contracts that have gained the field `note` -> their modules. A verified rollout has it in the rollout."""

FIELD = '''{before}
    note: str = ""
    """Who wrote it."""
'''


def later_release(folder: Path, *, skippable: bool = True) -> dict[str, str]:
    """Make the release below this folder; return the environment in which `rftstream` is it. `skippable` says whether
    the readers of this release may skip the field that is new."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package)
    _change(folder, "rftstream/version.py", r'__version__ = ".*"', f'__version__ = "{VERSION}"')
    for file, last_line in (
        ("rollouts", '    """Model calls of an agent in order; empty for an environment\'s rollout."""'),
        ("rollouts", '    """Reference to a large saved state of the environment, as an object that is stored before '
                     'this record."""'),
        ("batches", '    """0 in the batch of its group; else the number of the use, as `BatchReuse` has it."""'),
        ("versions", '    """Set on resumed records: what the bits of the weights depend on (versions of libraries, '
                     'threads, device, cpu)."""'),
    ):  # fmt: skip
        _change(folder, f"rftstream/contracts/{file}.py", re.escape(last_line), FIELD.format(before=last_line))
    for contract, file in CHANGED.items():
        known = MESSAGES[contract].version
        since = f" readable_since={MESSAGES[contract].readable_since or known}," if skippable else ""
        _change(
            folder, f"rftstream/contracts/{file}.py",
            rf'@message\((\n    )?"{contract}",\s+version={known},(\s+readable_since=\d+,)?',
            f'@message("{contract}", version={known + 1},{since}',
        )  # fmt: skip
    writes = f'note="{NOTE}",'
    _change(
        folder, "rftstream/roles/explorer/fit_to_record.py", r"(def rollout_of\(.*?return Rollout\(\n)",
        rf"\1        {writes}\n",
    )  # fmt: skip
    _change(
        folder, "rftstream/roles/buffer/experiences.py", r"(return Experience\(\n)", r"\1        note=rollout.note,\n"
    )
    _change(folder, "rftstream/roles/trainer/update_cycle.py", r"(return StepRecord\(\n)", rf"\1            {writes}\n")
    return {"PYTHONPATH": str(folder)}


def _change(folder: Path, name: str, pattern: str, new: str) -> None:
    """AssertionError if the file is not as this expects it any more: change it here, too."""
    path = folder / name
    text, count = re.subn(pattern, new, path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert count == 1, f"{name}: {count} places are like {pattern!r}, expected one"
    path.write_text(text, encoding="utf-8")
