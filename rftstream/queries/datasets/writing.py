"""Writes rollouts of a run as a data set: a folder that `datasets.load_dataset` opens, with a card.

The rows come in the order of the log, partition after partition, so that the same rollouts give the same bytes. The
folder appears as a whole at the end. Before that the run's `control` gets to know who took which rollouts, with the
digest of the rows, by which a data set is known again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rftstream.contracts.control import DatasetExported
from rftstream.data.tasksets.arrow_writer import write_parquet
from rftstream.errors import ConfigError
from rftstream.queries.datasets.forms import FORMS, LEARNED, Row, pair_of
from rftstream.queries.datasets.scorers import (
    BODIES_AT_ONCE,
    Scored,
    is_mixed,
    read_verified,
    rollouts_by_scorer,
    scorers_of_row,
)
from rftstream.queries.plain import Report
from rftstream.runs.folder import OpenRun, naming
from rftstream.runs.writes.requests import say, user_here

ROWS_OF_A_FILE = 50_000
"""Most rows of one file of a data set."""

Tell = Callable[[int, int], None]
"""Called with the rollouts read so far, and with their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The rollouts to write, by their records on `verified`. Shapes: N rollouts."""

    sequences_N: npt.NDArray[np.int64]
    offsets_N: npt.NDArray[np.int64]
    rewards_N: npt.NDArray[np.float64]
    """Reward of each; not a number for none."""

    def only(self, keep: npt.NDArray[Any]) -> Chosen:
        """Return some of them: a mask, or indices."""
        return Chosen(
            sequences_N=self.sequences_N[keep], offsets_N=self.offsets_N[keep], rewards_N=self.rewards_N[keep]
        )

    def best(self, most: int) -> Chosen:
        """Return the `most` best of each group, of those with a reward."""
        scored = self.only(~np.isnan(self.rewards_N))
        order_N = np.lexsort((scored.offsets_N, -scored.rewards_N, scored.sequences_N))
        ranked = scored.only(order_N)
        _, first, counts = np.unique(ranked.sequences_N, return_index=True, return_counts=True)
        ranks_N = np.arange(len(order_N)) - np.repeat(first, counts)
        return ranked.only(ranks_N < most)

    def extremes(self, margin: float) -> Chosen:
        """Return the best and the worst of each group whose rewards are more than `margin` apart, as pairs."""
        scored = self.only(~np.isnan(self.rewards_N))
        ranked = scored.only(np.lexsort((scored.offsets_N, -scored.rewards_N, scored.sequences_N)))
        _, first, counts = np.unique(ranked.sequences_N, return_index=True, return_counts=True)
        last = first + counts - 1
        apart = ranked.rewards_N[first] - ranked.rewards_N[last] > margin
        return ranked.only(np.stack([first[apart], last[apart]], axis=1).reshape(-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Export(Report):
    """A data set that was written. `write_dataset` makes it."""

    JSON = "* scored_by is_mixed"

    run: str
    folder: Path
    files: tuple[Path, ...]
    """The files with the rows."""
    form: str
    filters: Mapping[str, Any]
    """The conditions that the rollouts met, as they were asked for."""
    num_rows: int
    num_alike: int
    """Rows that were left out, since another one teaches the same."""
    num_unreadable: int
    """Rollouts, or pairs, without a record or a text."""
    digest: str
    """`sha256:<hex>` of all rows."""
    by: str
    at: float
    """Time in seconds since 1970."""
    scored: Scored
    """Taskset and scorer with its version -> rollouts in the rows."""

    @property
    def is_mixed(self) -> bool:
        """Whether several versions of a taskset's reward scored its rollouts."""
        return is_mixed(self.scored)

    @property
    def scored_by(self) -> dict[str, int]:
        """Scorer with its version -> rollouts in the rows."""
        return rollouts_by_scorer(self.scored)

    @property
    def scored_text(self) -> str:
        """Which versions of the reward scored the rollouts."""
        return ", ".join(f"{count:,} by {scorer}" for scorer, count in self.scored_by.items()) or "none"

    def to_text(self) -> str:
        """Return what was written, and what was not."""
        left = [f"{self.num_alike:,} alike"] * bool(self.num_alike)
        left += [f"{self.num_unreadable:,} without a text"] * bool(self.num_unreadable)
        lines = [f"{self.folder}: {self.num_rows:,} rows ({self.form}), {self.digest}"]
        lines += [f"  {file}" for file in self.files]
        lines += [f"left out: {', '.join(left)}"] if left else []
        mixed = "; the reward was changed in between, so these do not compare: --scorer newest takes one version"
        return "\n".join([*lines, f"scored: {self.scored_text}{mixed if self.is_mixed else ''}"])


def write_dataset(
    run: OpenRun,
    chosen: Chosen,
    folder: Path,
    form: str,
    *,
    filters: Mapping[str, Any],
    through: tuple[int, ...],
    margin: float = 0.0,
    tell: Tell = lambda done, total: None,
    again: DatasetExported | None = None,
    is_recorded: bool = True,
) -> Export:
    """Write rollouts in one of FORMS, or their groups' extremes as `pairs`. ConfigError if the folder is there already,
    if no rollout is left, or if the rows are not those of `again`. `through`: as in DatasetExported."""
    if folder.exists():
        raise ConfigError(f"{folder}: exists already, and is not written over; name another folder, or remove it")
    chosen = chosen.only(chosen.offsets_N >= 0)
    if form == "pairs":
        chosen = chosen.extremes(margin)
    if not len(chosen.offsets_N):
        raise ConfigError(f"{run.run_id}: no rollout meets these conditions, expected at least one; widen them")
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        with naming(folder), closing(_RowWriter(scratch / "data", form)) as writer:
            for row in _rows(run, chosen, form, tell):
                writer.add(row)
            export = _export(run, folder, form, filters, writer)
            if again is not None and export.digest != again.digest:
                raise ConfigError(
                    f"{run.run_id}: the same conditions give {export.num_rows:,} rows with the digest {export.digest}, "
                    f"expected {again.num_rows:,} with {again.digest}; fates, tags or judgements have changed since"
                )
            (scratch / "README.md").write_text(_card(export, writer.suffix), encoding="utf-8")
            if is_recorded:
                say(run, [_recorded(export, through)])
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return export


def _export(run: OpenRun, folder: Path, form: str, filters: Mapping[str, Any], writer: _RowWriter) -> Export:
    """End the files, and return what was written. ConfigError if that is nothing."""
    digest = writer.end()
    if not writer.num_rows:
        raise ConfigError(f"{run.run_id}: no row is left of {writer.num_unreadable:,}: none has a text")
    return Export(
        run=run.run_id,
        folder=folder,
        form=form,
        filters=filters,
        num_rows=writer.num_rows,
        num_alike=writer.num_alike,
        num_unreadable=writer.num_unreadable,
        digest=digest,
        by=user_here(),
        at=time.time(),
        files=tuple(folder / "data" / name for name in writer.names),
        scored=writer.scored,
    )


def _recorded(export: Export, through: tuple[int, ...]) -> DatasetExported:
    folder = str(export.folder.absolute())
    identity = hashlib.sha256(f"{folder}\0{export.digest}\0{export.at}".encode("utf-8", "surrogatepass"))
    return DatasetExported(
        export_id=identity.hexdigest()[:32],
        digest=export.digest,
        form=export.form,
        filters=dict(export.filters),
        through=through,
        num_rows=export.num_rows,
        folder=folder,
        by=export.by,
        exported_at=export.at,
    )


def _rows(run: OpenRun, chosen: Chosen, form: str, tell: Tell) -> Iterator[Row | None]:
    """Yield a row for each rollout, or for each two of `pairs`; None for one that cannot be made."""
    make = None if form == "pairs" else FORMS[form]
    step, partitions_N = 1 if make else 2, chosen.sequences_N % run.config.transport.partitions
    done = 0
    for partition in np.unique(partitions_N):
        offsets = chosen.offsets_N[partitions_N == partition].reshape(-1, step)
        offsets = offsets[np.argsort(offsets.min(axis=1), kind="stable")]
        for begin in range(0, len(offsets), BODIES_AT_ONCE):
            wanted = offsets[begin : begin + BODIES_AT_ONCE]
            found = read_verified(run, int(partition), wanted)
            for one in wanted.tolist():
                records = [found.get(offset) for offset in one]
                if make is None:
                    yield pair_of(records[0], records[1]) if records[0] and records[1] else None
                else:
                    rollout = None if records[0] is None else records[0].rollout
                    yield make(records[0], rollout) if records[0] and rollout and rollout.turns else None
            done += wanted.size
            tell(done, len(chosen.offsets_N))


class _RowWriter:
    """Writes rows as files of JSON lines, or of Parquet. `write_dataset` makes it, and calls `end` behind the rows."""

    def __init__(self, folder: Path, form: str) -> None:
        folder.mkdir(parents=True)
        self._folder, self._learned, self._is_parquet = folder, LEARNED.get(form, ()), form == "parquet"
        self._seen: set[bytes] = set()
        self._digest = hashlib.sha256()
        self._file: Any = None
        self.names: list[str] = []
        self.scored: Scored = Counter()
        self.suffix = "parquet" if self._is_parquet else "jsonl"
        self.num_rows = self.num_alike = self.num_unreadable = 0

    def add(self, row: Row | None) -> None:
        """Write a row, unless an earlier one teaches the same."""
        if row is None:
            self.num_unreadable += 1
            return
        if self._learned:
            taught = json.dumps([row.get(name) for name in self._learned], sort_keys=True)
            key = hashlib.blake2b(taught.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if key in self._seen:
                self.num_alike += 1
                return
            self._seen.add(key)
        if self.num_rows % ROWS_OF_A_FILE == 0:
            self._end_file()
            stem = f"train-{self.num_rows // ROWS_OF_A_FILE:05}"
            self.names.append(f"{stem}.{self.suffix}")
            self._file = (self._folder / f"{stem}.jsonl").open("wb")
        line = json.dumps(row).encode() + b"\n"
        self._digest.update(line)
        self._file.write(line)
        self.scored.update(scorers_of_row(row))
        self.num_rows += 1

    def _end_file(self) -> None:
        if self._file is None:
            return
        self._file.close()
        if self._is_parquet:
            lines = Path(self._file.name)
            write_parquet(lines, lines.with_suffix(".parquet"))
            lines.unlink()

    def end(self) -> str:
        """End the last file, and return the digest of all rows."""
        self._end_file()
        return f"sha256:{self._digest.hexdigest()}"

    def close(self) -> None:
        """Close the file, also after an error."""
        if self._file is not None:
            self._file.close()


def said_of(filters: Mapping[str, Any]) -> str:
    """Return conditions as text."""
    shown = ((name, f"{value:g}" if isinstance(value, float) else value) for name, value in filters.items())
    return ", ".join(f"{name} = {value}" for name, value in shown) or "all"


def _card(export: Export, suffix: str) -> str:
    """Return the card of a data set, as the Hugging Face hub shows it."""
    return f"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.{suffix}
tags:
- rftstream
- {export.form}
---
# Rollouts of {export.run}

{export.num_rows:,} rows in the form `{export.form}`, of the rollouts with: {said_of(export.filters)}.
Rewards: {export.scored_text}{", versions that do not compare" if export.is_mixed else ""}.

`rollout_id` names the rollout that a row is of: `rftstream trace RUN ROLLOUT_ID` shows where it came from and which
versions learned from it. Digest of the rows: `{export.digest}`.
"""
