"""Chooses the rollouts that leave a run as a data set, by conditions that the run's log then remembers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from rftstream.config.parts import registry
from rftstream.contracts.control import DatasetExported
from rftstream.errors import ConfigError
from rftstream.queries.catalog.columns import read_columns
from rftstream.queries.catalog.finding import GroupFilter
from rftstream.queries.catalog.listing import RolloutFilter
from rftstream.queries.catalog.run_index import RunIndex
from rftstream.queries.datasets.exports import find_exports
from rftstream.queries.datasets.scorers import NEWEST, newest_scorers, offsets_of, only_scored_by
from rftstream.queries.datasets.writing import Chosen, Export, Tell, write_dataset
from rftstream.runs.notes import RunNotes


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The rollouts to write, and their form. Also the settings in `[experts.options]` of a source `run:`."""

    form: Literal["sft", "pairs", "openai", "atif", "parquet"] = "sft"
    text: str = ""
    fate: Literal["", "trained", "pending", "expired", "filtered", "dead"] = ""
    status: str = ""
    tool: str = ""
    reward_from: float | None = None
    reward_to: float | None = None
    tokens_from: float | None = None
    tokens_to: float | None = None
    version_from: float | None = None
    version_to: float | None = None
    taskset: str = ""
    problem: int | None = None
    batch: int | None = None
    scorer: str = ""
    """Only those that this version of the reward scored: `newest`, or the beginning of its digest."""
    best: Annotated[int, Meta(ge=1)] | None = None
    """Only so many of each group, by reward."""
    margin: float = 0.0
    """Least distance of the two rewards of a pair."""
    tag: str = ""
    """Only rollouts, or groups, with this tag."""
    limit: int | None = None
    """Only so many, in this order."""
    order: Literal["newest", "oldest", "best", "worst", "longest", "shortest"] = "newest"

    @classmethod
    def of(cls, values: Mapping[str, Any], *, where: str) -> Conditions:
        """Return the conditions with these values. ConfigError for one that there is not."""
        made: Conditions = registry.convert(dict(values), cls, where=where)
        return made

    def asked(self) -> dict[str, Any]:
        """Return what differs from the defaults, without the form: the filter that is recorded."""
        return {
            one.name: value
            for one in fields(self)
            if one.name != "form" and (value := getattr(self, one.name)) != one.default
        }

    def rollouts(self) -> RolloutFilter:
        """Return what the index can be asked."""
        return RolloutFilter(
            text=self.text,
            fate=self.fate,
            status=self.status,
            tool=self.tool,
            reward=(self.reward_from, self.reward_to),
            tokens=(self.tokens_from, self.tokens_to),
            version=(self.version_from, self.version_to),
            groups=GroupFilter(taskset=self.taskset, problem=self.problem, batch=self.batch),
        )


def export_rollouts(
    index: RunIndex,
    wanted: Conditions,
    folder: Path,
    *,
    again: DatasetExported | None = None,
    tell: Tell = lambda done, total: None,
    is_recorded: bool = True,
) -> Export:
    """Write the rollouts that meet the conditions as a data set. ConfigError if there is none, or if the folder exists.

    `again`: the data set is this one once more, so only rollouts that were there then are taken, and ConfigError says
    if the rows differ. `is_recorded`: the run's log gets to know of it."""
    run, asked = index.run, wanted.rollouts()
    if wanted.taskset and wanted.taskset not in run.config.tasksets:
        raise ConfigError(
            f"taskset: unknown {wanted.taskset!r}; {registry.suggest(wanted.taskset, run.config.tasksets)}"
        )
    texts = bool(asked.text or asked.tool) or asked.version != (None, None)
    ends = sorted(run.transport.admin.end_offsets("verified").items())
    through = tuple(end for _, end in ends) if again is None else again.through
    names = ("reward", "verified_offset", "verified_at")
    newest: dict[str, str] = {}
    with index.catalog(texts=texts) as opened:
        found: dict[str, Any] = {}
        if opened is not None:
            found = dict(read_columns(*opened, asked, order=wanted.order, names=names))
            if wanted.scorer == NEWEST:
                newest = newest_scorers(run, dict(read_columns(*opened, RolloutFilter(), names=names)), through)
    if not len(found.get("sequence", ())):
        raise ConfigError(f"{run.run_id}: no rollout meets these conditions, expected at least one; widen them")
    offsets_N = offsets_of(found)
    chosen = Chosen(sequences_N=found["sequence"], offsets_N=offsets_N, rewards_N=found["reward"])
    keep_N = offsets_N < np.asarray(through)[chosen.sequences_N % len(through)]
    if wanted.scorer:
        keep_N &= only_scored_by(run, wanted.scorer, found, newest)
    if wanted.limit is not None:
        keep_N &= np.cumsum(keep_N) <= wanted.limit
    if wanted.tag:
        targets = {note.target for note in RunNotes(run.folder).notes(tag=wanted.tag)}
        groups = found["group_id"].words
        ids = zip(found["group_id"].codes.tolist(), found["sibling"].tolist(), strict=True)
        keep_N &= np.asarray([bool({groups[code], f"{groups[code]}/{sibling}"} & targets) for code, sibling in ids])
    chosen = chosen.only(keep_N)
    if wanted.best is not None and wanted.form != "pairs":
        chosen = chosen.best(wanted.best)
    return write_dataset(
        run,
        chosen,
        folder,
        wanted.form,
        filters=wanted.asked(),
        through=through,
        margin=wanted.margin,
        tell=tell,
        again=again,
        is_recorded=is_recorded,
    )


def export_again(index: RunIndex, name: str, folder: Path, *, tell: Tell = lambda done, total: None) -> Export:
    """Write a data set once more. `name`: its digest, or its folder. ConfigError if the rows are not the same."""
    before = find_exports(index.run, name)[-1]
    wanted = Conditions.of({**before.filters, "form": before.form}, where=name)
    return export_rollouts(index, wanted, folder, again=before, tell=tell)
