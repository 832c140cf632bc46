"""The placement of a run in its folder: which settings were left to rftstream, and on which machine they were decided.

A run keeps its devices. Only on another machine are the settings of `placement.json` decided again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from rftstream.config.placement import SETTINGS, Placement
from rftstream.config.sections import RunConfig
from rftstream.models.machine import read_machine
from rftstream.runs.folder import RunFolder, naming, read_config


def record_placement(placement: Placement, folder: RunFolder) -> None:
    """Write what was decided here, if anything was."""
    if not placement.chosen:
        return
    record = {"machine": placement.machine.to_text(), "chosen": placement.chosen}
    partial = folder.placement_file.with_suffix(f".{os.getpid()}.partial")
    with naming(folder.placement_file):
        partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.replace(folder.placement_file)


def placed_anew(folder: RunFolder, sets: Sequence[str]) -> RunConfig:
    """Return the run's config with `sets`. If this is another machine than that of the last start, the settings that
    were decided there are `auto` again."""
    config = read_config(folder, sets)
    try:
        record = json.loads(folder.placement_file.read_text(encoding="utf-8"))
        before, chosen = str(record["machine"]), list(map(str, record["chosen"]))
    except (OSError, ValueError, KeyError, TypeError):
        return config
    if before == read_machine().to_text():
        return config
    again = [f"{key}={['auto'] if key == 'explorer.devices' else 'auto'}" for key in chosen if key in SETTINGS]
    return read_config(folder, [*again, *sets])


def placement_notes(placement: Placement) -> list[str]:
    """Return the line that a run with GPUs begins with, and what keeps it from using them."""
    trouble = [text for text in placement.warnings() if placement.machine.trouble]
    return [*([placement.to_text()] if placement.machine.gpus else []), *trouble]
