"""An Arrow file beside the index: the columns of the rollouts whose fate is final, for frames of all rollouts.

    RUN/index/rollouts.arrow

The index has rows, since what it knows of a rollout changes until its group is decided and trained. A frame reads the
file by columns, as it would read Parquet, and only newer rollouts from the index. The file can be deleted at any time.
One that is damaged, of another run or at odds with the index is not used.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rftstream.queries.catalog.database import CatalogReader
from rftstream.queries.catalog.moments import Moment

FILE = "rollouts.arrow"
FORMAT = b"1"
LEAST = 10_000
"""Fewest rollouts that are added at once. A file is written as a whole, so it also grows by a quarter at least."""

_FIRST_OPEN = (
    "SELECT min(sequence) AS sequence FROM (SELECT min(sequence) AS sequence FROM groups WHERE decided_at IS NULL"
    " UNION ALL SELECT min(sequence) FROM groups WHERE decided_at IS NOT NULL AND num_named < group_size"
    " UNION ALL SELECT min(sequence) FROM groups WHERE batch >= :version)"
)
"""The first group whose rollouts may still change: undecided, not named as a whole, or not trained yet."""


def read_final(folder: Path, catalog: CatalogReader, moment: Moment) -> Any | None:
    """Return the file's table, newest first; None if there is none for this catalog."""
    try:
        with pa.memory_map(str(folder / FILE)) as source:
            table = pa.ipc.open_file(source).read_all()
        told = table.schema.metadata or {}
        fits = told.get(b"about") == _about(catalog) and int(told[b"version"]) <= moment.version
        return table if fits and _newest(table) == _known(catalog, int(table["sequence"][0].as_py())) else None
    except (OSError, pa.ArrowInvalid, LookupError, ValueError):
        return None


def keep_final(folder: Path, catalog: CatalogReader, moment: Moment, table: Any, before: int) -> None:
    """Write those rollouts of all, newest first, that are final. `before`: how many of them the file has already."""
    least = before + max(LEAST, before // 4)
    if table.num_rows < least:
        return
    row = catalog.row(_FIRST_OPEN, {"version": moment.version})
    first = None if row is None else row["sequence"]
    num_open = 0 if first is None else int((table["sequence"].to_numpy() >= first).sum())
    final = table.slice(num_open)
    if final.num_rows < least:
        return
    told = {b"about": _about(catalog), b"version": str(moment.version).encode()}
    final = final.unify_dictionaries().combine_chunks().replace_schema_metadata(told)
    partial = folder / f"{FILE}.{os.getpid()}.partial"
    with contextlib.suppress(OSError):  # a full or read-only disk: the index answers alone
        try:
            with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, final.schema) as writer:
                writer.write_table(final)
            partial.replace(folder / FILE)
        finally:
            partial.unlink(missing_ok=True)


def last_sequence(table: Any) -> int:
    """Return the newest sequence of a table; -1 of an empty one."""
    return int(np.max(table["sequence"].to_numpy(), initial=-1))


def _about(catalog: CatalogReader) -> bytes:
    """Return what identifies the run and the form of the file."""
    row = catalog.row("SELECT value FROM facts WHERE name = 'run'")
    return FORMAT + (b"" if row is None else str(row["value"]).encode())


def _newest(table: Any) -> tuple[str, int]:
    return table["rollout_id"][0].as_py(), int(table["rollout_offset"][0].as_py() or -1)


def _known(catalog: CatalogReader, sequence: int) -> tuple[str, int] | None:
    """Return the newest rollout of a group, as the catalog has it."""
    row = catalog.row(
        "SELECT group_id || '/' || sibling AS id, coalesce(rollout_offset, -1) AS place FROM rollouts JOIN groups"
        " USING (sequence) WHERE sequence = ? ORDER BY sibling DESC LIMIT 1",
        (sequence,),
    )
    return None if row is None else (row["id"], row["place"])
