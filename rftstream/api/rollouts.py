"""The rollouts of a run: a table by the run's index, with bodies from the log only where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from markupsafe import Markup

import rftstream.studio
from rftstream.api.tables import Table, check_word, pages
from rftstream.contracts.ids import split_group_id
from rftstream.contracts.records import TopicPartition
from rftstream.errors import ConfigError
from rftstream.queries.catalog.finding import GroupFilter, RolloutRow, find_batch, find_group
from rftstream.queries.catalog.listing import Cursor, RolloutFilter, find_rollouts
from rftstream.queries.catalog.run_index import Page, RunIndex
from rftstream.queries.records.body_columns import BODIES, body_values
from rftstream.queries.records.group_view import NO_ADVANTAGES, GroupAdvantages, compute_advantages
from rftstream.queries.records.rollout_view import ShownRollout, TokenRow, list_tokens, read_rollout
from rftstream.queries.records.shown import open_reader
from rftstream.service.reading import read_many
from rftstream.studio.rendering import render
from rftstream.studio.token_colors import COLORINGS, color_tokens

if TYPE_CHECKING:
    from rftstream.queries.datasets.writing import Export

PAGE = 500
"""Rollouts of one question to the index."""
FINAL = ("reward", "sampled_at", "verified_at", "decided_at", "rollout_offset")
"""Numbers that the columns of final rollouts have."""
TEXTS = ("version",)
"""Columns that the index knows once it has read what every rollout said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRollout:
    """A rollout of a run, as the run's index knows it. Its record is read when `body` or `tokens` asks for it."""

    rollout_id: str
    group_id: str
    taskset: str
    problem: int
    sibling: int
    batch: int | None
    fate: str
    """pending, batched, trained, expired, filtered or dead."""
    status: str | None
    """How sampling ended; None before its end."""
    num_tokens: int | None
    """Sampled tokens."""
    unscored: str | None
    """Why it has no reward."""
    rejected: str | None
    """`operator: reason` if an operator left it out of its group's batch."""
    late: bool
    """Whether it came after its group was decided."""
    reward: float | None
    """Reward. None: not scored, or the group is not decided yet."""
    sampled_at: float | None
    """Time in seconds since 1970, as all times."""
    verified_at: float | None
    index: RunIndex = field(repr=False, compare=False)

    def body(self) -> ShownRollout:
        """Read its record: the messages and turns, the verdict with its parts, and where all of it is on the log."""
        return self._read()[0]

    def tokens(self, segment: int = 0) -> list[TokenRow]:
        """Return the tokens of a segment, each with its logprob, the version that sampled it, and its advantage, which
        is computed as the trainer did."""
        view, advantages = self._read(advantages=True)
        segments = () if view.rollout is None else view.rollout.segments
        if not 0 <= segment < len(segments):
            raise ConfigError(f"{self.rollout_id}: segment {segment}: expected one of its {len(segments)}, from 0 on")
        own = advantages.by_rollout.get(self.rollout_id, ())
        fits = segment < len(own) and len(own[segment]) == segments[segment].token_ids.shape[0]
        reader = open_reader(self.index.run, dims=False)
        return list_tokens(segments[segment], reader, own[segment].tolist() if fits else None)

    def show(self, color: str = "logprob", segment: int = 0) -> RolloutHTML:
        """Return it as HTML for a notebook, with its tokens coloured by logprob, version, mask or advantage."""
        check_word(f"{self.rollout_id}: color", color, COLORINGS)
        view, advantages = self._read(advantages=True)
        has_tokens = view.rollout is not None and bool(view.rollout.segments)
        text = render(
            "notebook_rollout.html",
            row=self,
            view=view,
            tokens=color_tokens(self.tokens(segment) if has_tokens else (), color),
            segment=segment,
            coloring=color,
            how=advantages.how,
            styles=_styles(),
        )
        return RolloutHTML(text)

    def _repr_html_(self) -> str:
        return self.show()._repr_html_()

    def _read(self, *, advantages: bool = False) -> tuple[ShownRollout, GroupAdvantages]:
        run = self.index.run
        with self.index.catalog() as opened:
            group = None if opened is None else find_group(*opened, self.group_id)
            if opened is None or group is None:
                raise ConfigError(f"{self.rollout_id}: the run {run.run_id} has no such rollout any more")
            shares = [] if group.batch is None else find_batch(*opened, group.batch)
        partitions, reader = run.config.transport.partitions, open_reader(run, dims=False)
        view = read_rollout(run.transport, group, group.siblings[self.sibling], reader, num_partitions=partitions)
        wanted = advantages and group.batch is not None
        found = compute_advantages(run.transport, run.config, group, shares) if wanted else NO_ADVANTAGES
        return view, found


@dataclass(frozen=True, slots=True)
class RolloutHTML:
    """A rollout as a notebook shows it. `RunRollout.show` makes it."""

    text: str

    def _repr_html_(self) -> str:
        return self.text


COLUMNS = tuple(one.name for one in fields(RunRollout) if one.name != "index")


@cache
def _styles() -> Markup:
    """Return the colours of tokens from the studio's own style, for this part of a page alone."""
    css = (Path(rftstream.studio.__file__).parent / "static" / "studio.css").read_text(encoding="utf-8")
    rules = "\n".join(line for line in css.splitlines() if line.startswith(".t."))
    given = "--faint: #777; --accent: #06c; color-scheme: light; background: white; color: #111; padding: .5em"
    return Markup(
        f".rftstream {{ {given} }}\n.rftstream .t {{ font-style: normal }}\n{rules.replace('.t.', '.rftstream .t.')}"
    )


class _Placed(Protocol):
    """Something that knows the group of a rollout: a row of a list, or the group itself."""

    @property
    def group_id(self) -> str: ...

    @property
    def batch(self) -> int | None: ...


def rollout_of_row(row: RolloutRow, index: RunIndex, place: _Placed) -> RunRollout:
    """Return the rollout of a row of the index."""
    taskset, _, problem, _ = split_group_id(place.group_id) or ("", 0, 0, 0)
    known: dict[str, Any] = {name: getattr(row, name) for name in COLUMNS if hasattr(row, name)}
    return RunRollout(
        **known, group_id=place.group_id, batch=place.batch, taskset=taskset, problem=problem, index=index
    )


@dataclass(frozen=True, kw_only=True)
class RolloutTable(Table[RunRollout]):
    """The rollouts of a run. Frames can have the columns prompt, completion, messages, token_ids, logprobs, loss_mask
    and segment_lengths, too, which are read from the log."""

    index: RunIndex
    wanted: RolloutFilter
    order: str
    texts: bool
    """Whether the filter asks what was said."""

    def count(self) -> int:
        """Count the rollouts, by the index alone."""
        with self.index.catalog(texts=self.texts) as opened:
            return 0 if opened is None else len(self._columns(opened, ())["sequence"])

    def export(
        self,
        folder: str | Path,
        form: str = "sft",
        *,
        best: int | None = None,
        margin: float = 0.0,
        tag: str = "",
        scorer: str = "",
        tell: Callable[[int, int], None] | None = None,
    ) -> Export:
        """Write these rollouts as a data set that `datasets.load_dataset` opens, as `rftstream export` does.

        `form`: sft, pairs, openai, atif or parquet. `best`: only so many of each group, by reward. `margin`: least
        distance of the rewards of a pair. `tag`: only rollouts, or groups, with this tag. `scorer`: only
        those of this version of the reward: newest, or the beginning of its digest. `tell` is called with the number of
        those written and of all. ConfigError if the folder is there already, or if there is no such rollout. The run's
        log gets to know of it.
        """
        from rftstream.queries.datasets.choosing import Conditions, export_rollouts

        values = {
            "form": form,
            "best": best,
            "margin": margin,
            "tag": tag,
            "scorer": scorer,
            "limit": self.limit,
            "order": self.order,
        }
        wanted = Conditions.of({**_asked_for(self.wanted), **values}, where="rollouts")
        return export_rollouts(self.index, wanted, Path(folder), tell=tell or _tell_nobody)

    def _columns(self, opened: Page, names: Sequence[str], since: int = 0) -> dict[str, Any]:
        from rftstream.queries.catalog.columns import read_columns

        return dict(read_columns(*opened, self.wanted, order=self.order, limit=self.limit, names=names, since=since))

    def _arrow(self, columns: Sequence[str] | None, *, plain: bool = False) -> Any:
        chosen = self._chosen(columns, (*COLUMNS, "decided_at", *TEXTS, *BODIES) if columns is not None else COLUMNS)
        with self._importing("pyarrow"):
            from rftstream.api import frames
        with self.index.catalog(texts=self.texts or "version" in chosen) as opened:
            if opened is None:
                return frames.table_of_rows([], self._chosen, chosen)
            known = self._known(opened, chosen)
        bodies = [name for name in chosen if name in BODIES]
        return frames.chosen_columns(known, self._bodies(known, bodies) if bodies else {}, chosen, plain)

    def _known(self, opened: Page, names: Sequence[str]) -> Any:
        """Return a table of what the index knows: of all rollouts by columns, else by its rows."""
        from rftstream.api import final_rows, frames

        if self.wanted != RolloutFilter() or self.order != "newest" or "version" in names:
            return frames.rollout_table(self._columns(opened, (*names, "rollout_offset")))
        folder = self.index.folder
        final = final_rows.read_final(folder, *opened)
        since = 0 if final is None else final_rows.last_sequence(final) + 1
        fresh = frames.rollout_table(self._columns(opened, FINAL, since))
        table = fresh if final is None else frames.joined(fresh, final)
        if self.limit is None:
            final_rows.keep_final(folder, *opened, table, 0 if final is None else final.num_rows)
            return table
        return table.slice(0, self.limit)

    def _bodies(self, known: Any, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return columns of the bodies of rollouts, in the order of their rows; they are read one partition after the
        other."""
        run = self.index.run
        offsets = known["rollout_offset"].to_pylist()
        places: dict[int, dict[int, int]] = {}
        for i, sequence in enumerate(known["sequence"].to_pylist()):
            if offsets[i] is not None:
                places.setdefault(sequence % run.config.transport.partitions, {})[int(offsets[i])] = i
        columns: dict[str, list[Any]] = {name: [None] * len(offsets) for name in names}
        for partition, where in sorted(places.items()):
            for record in read_many(run.transport, TopicPartition("rollouts", partition), where):
                if (values := body_values(record, names)) is not None:
                    row = where[record.offset]
                    for column, value in zip(columns.values(), values, strict=True):
                        column[row] = value
        return columns


def _tell_nobody(done: int, total: int) -> None:
    return


def _asked_for(wanted: RolloutFilter) -> dict[str, Any]:
    """Return the conditions of a filter, by the names that a user gives them."""
    found: dict[str, Any] = {}
    for one in (*fields(RolloutFilter), *fields(GroupFilter)):
        value = getattr(wanted if hasattr(wanted, one.name) else wanted.groups, one.name)
        if isinstance(value, tuple):
            found |= {f"{one.name}_{end}": limit for end, limit in zip(("from", "to"), value, strict=True)}
        elif one.name != "groups":
            found[one.name] = value
    return {name: value for name, value in found.items() if value not in (None, "") and value is not False}


def rollout_table(index: RunIndex, wanted: RolloutFilter, order: str) -> RolloutTable:
    """Return the table of a run's rollouts."""
    texts = bool(wanted.text or wanted.tool) or wanted.version != (None, None)

    def read(limit: int | None) -> Iterator[RunRollout]:
        def page(after: Cursor | None, size: int) -> tuple[list[RunRollout], Cursor | None]:
            with index.catalog(texts=texts, fresh=after is None) as opened:
                if opened is None:
                    return [], None
                found = find_rollouts(*opened, wanted, order=order, after=after, limit=size)
            return [rollout_of_row(one.row, index, one) for one in found.rollouts], found.after

        return pages(page, PAGE if limit is None else min(limit, PAGE))

    def to_row(one: RunRollout) -> dict[str, Any]:
        return {name: getattr(one, name) for name in COLUMNS}

    return RolloutTable(
        name="rollouts",
        read=read,
        to_row=to_row,
        columns=COLUMNS,
        index=index,
        wanted=wanted,
        order=order,
        texts=texts,
    )
