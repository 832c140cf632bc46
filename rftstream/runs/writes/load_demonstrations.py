"""Writes demonstrations to a run's `experts`, each once. The id is derived from the content to learn, and numbers have
no gaps.

They have a producer name of their own, so that two loads at once cannot use the same number: the later fences the
earlier. All are checked before the first one is written. Demonstrations that a killed load has written stay, and the
next load continues after them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from rftstream.config.sections import DemonstrationsSection, RunConfig, name_of_part
from rftstream.config.stages import FROM_DEMONSTRATIONS, Stages, loss_kinds, taken_kinds
from rftstream.contracts import codec
from rftstream.contracts.batches import LossKind
from rftstream.contracts.demonstrations import Demonstration
from rftstream.contracts.records import NewRecord
from rftstream.contracts.tasks import ChatMessage
from rftstream.data.demonstrations.rows import Demonstrations
from rftstream.data.demonstrations.tokens import Sides, kind_of, length_of, tokenise
from rftstream.data.tasksets.base import question_hash
from rftstream.errors import ConfigError
from rftstream.models.folders.folder import prepare_model
from rftstream.models.rendering import Renderer, open_renderer
from rftstream.models.spec import ModelSpec
from rftstream.runs.folder import RunFolder
from rftstream.runs.writes.additions import Say, adding, progress_sayer
from rftstream.service.role import Log
from rftstream.transport.base import Transport

FROM_RUN = "run:"
"""Begin of a source that is another run. `queries.datasets.taking` writes a data set of it."""


def dataset_of(folder: Path, source: str, section: DemonstrationsSection) -> Path:
    """Return the place below `folder` of the rollouts that a source `run:` brings."""
    digest = hashlib.sha256(json.dumps([source, section.options], sort_keys=True).encode()).hexdigest()
    return folder / f"{Path(source.removeprefix(FROM_RUN)).stem}-{digest[:8]}"


def _with_datasets(section: DemonstrationsSection, folder: Path) -> DemonstrationsSection:
    """Return the section with data sets below `folder` in place of runs."""
    if not any(source.startswith(FROM_RUN) for source in section.sources):
        return section
    sources = (
        f"hf:{dataset_of(folder, source, section)}" if source.startswith(FROM_RUN) else source
        for source in section.sources
    )
    return replace(section, source=tuple(sources), options={})


@dataclass(slots=True, kw_only=True)
class Loaded:
    """The counts of rows when demonstrations were loaded. `load_demonstrations` and `look_at_demonstrations` make and
    return it."""

    rows: int
    new: int = 0
    """Rows that were written, or that would be written in a `dry_run`."""
    known: int = 0
    """Rows that were on the topic already."""
    repeated: int = 0
    """Rows that were left out because they equal an earlier row."""
    too_long: int = 0
    """Rows that were left out because they are longer than the context."""
    total: int = 0
    """Demonstrations on the topic now."""
    tokens: int = 0
    """Tokens of the new rows that are trained on in one pass."""
    longest: int = 0
    """Tokens of the longest new row."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Kinds of the new rows: chats and pairs."""
    dry_run: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the values as a dict for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    def to_text(self) -> str:
        """Return the values as text for people."""
        kinds = " and ".join(f"{count:,} {kind}" for kind, count in self.kinds.items()) or "nothing"
        verb = "to be loaded" if self.dry_run else "loaded"
        text = (
            f"{self.rows:,} rows: {kinds} {verb}, {self.tokens:,} tokens to learn, the longest {self.longest:,} tokens"
        )
        if self.known:
            text += f"; {self.known:,} there already"
        if self.repeated:
            text += f"; {self.repeated:,} the same as a row before, left out"
        if self.too_long:
            text += f"; {self.too_long:,} longer than the context left out"
        return f"{text}\n{self.total:,} on `experts` {'then' if self.dry_run else 'now'}"


def check_demonstrations(config: RunConfig) -> None:
    """Check that the algorithms can learn from the run's data. ConfigError if they cannot."""
    for where, named in config.algorithms_named().items():
        own = name_of_part(named, where)
        if where.startswith("tasksets.") and LossKind.rl not in loss_kinds(own, where):
            raise ConfigError(f"{where}: {own!r} learns nothing from rollouts, expected one that does")
    if config.stages:
        _check_stages(config)
        return
    name, kinds, experts = config.trainer.algorithm, taken_kinds(config), config.experts
    from_demonstrations = kinds & FROM_DEMONSTRATIONS
    if experts is None:
        if LossKind.rl not in kinds:
            raise ConfigError(
                f"trainer.algorithm: {name!r} learns from demonstrations, but there are none; name some by "
                "experts.source"
            )
        return
    if not from_demonstrations:
        raise ConfigError(
            f"experts: trainer.algorithm {name!r} takes none, expected mix or chord beside tasksets, sft or dpo alone; "
            "or take them out (--set experts=unset)"
        )
    if config.tasksets and LossKind.rl not in kinds:
        raise ConfigError(
            f"tasksets: trainer.algorithm {name!r} learns nothing from rollouts, expected none; take them out, or "
            "train by mix or chord"
        )
    if config.without_tasks and LossKind.rl in kinds:
        raise ConfigError(
            f"trainer.algorithm: {name!r} learns from rollouts, too, but there are no tasksets; add one, or train by "
            "sft or dpo"
        )


def _check_stages(config: RunConfig) -> None:
    stages = Stages.of(config).all
    for stage in stages:
        if stage.takes_rollouts and not config.tasksets:
            raise ConfigError(
                f"stages.{stage.number} ({stage.name}): learns from rollouts, but there are no tasksets; add one"
            )
        if stage.kind is not None and config.experts is None:
            raise ConfigError(
                f"stages.{stage.number} ({stage.name}): learns from demonstrations, but there are none; "
                "name some by experts.source"
            )
    if config.tasksets and not any(stage.takes_rollouts for stage in stages):
        raise ConfigError("tasksets: no stage learns from rollouts, expected one that does, or no tasksets")
    if config.experts is not None and not any(stage.kind is not None for stage in stages):
        raise ConfigError("experts: no stage takes any, expected one with sft, dpo, mix or chord, or no [experts]")


def look_at_demonstrations(
    section: DemonstrationsSection, spec: ModelSpec, kinds: frozenset[LossKind], datasets: Path = Path()
) -> tuple[Loaded, Sides, set[int]]:
    """Return what a load into a new run would find, the tokens of the first row, and the hash of each question that is
    answered. ConfigError names the first bad row. `datasets`: the folder of what was taken from other runs."""
    rows, renderer = Demonstrations(_with_datasets(section, datasets)), open_renderer(spec)
    loaded = Loaded(rows=len(rows), dry_run=True)
    context = spec.context if spec.context is not None else renderer.context
    _choose(rows, set(), loaded, section, renderer, context, kinds, lambda count: None)
    loaded.total = loaded.new
    asked = {question_hash(_question(rows[index].demonstration)) for index in range(len(rows))}
    return loaded, tokenise(rows[0].demonstration, renderer), asked


def _question(one: Demonstration) -> Iterator[ChatMessage]:
    """Return what the first answer replies to."""
    messages = one.messages if one.preference is None else one.preference.prompt
    return takewhile(lambda message: message.role != "assistant", messages)


def load_demonstrations(
    transport: Transport,
    config: RunConfig,
    folder: RunFolder,
    section: DemonstrationsSection,
    *,
    say: Say,
    dry_run: bool = False,
    datasets: Path | None = None,
) -> Loaded:
    """Load the rows of `section.source` that are not on the topic yet. ConfigError names the first bad row; then
    nothing is written. `datasets`: the folder of what was taken from other runs, by default the run's own."""
    rows = Demonstrations(_with_datasets(section, datasets or folder.demonstrations))
    spec = prepare_model(config.model, folder.model, config.run.seed)
    renderer = open_renderer(spec)
    writer, lost = f"{folder.run_id}.experts", f"experts: another load into {folder.run_id} began meanwhile"
    with adding(transport, writer, lost=lost, again="load again", dry_run=dry_run) as additions:
        there = Log(transport).read("experts", bodies=False, settled=True)
        known = {name for record in there if (name := record.header("id")) is not None}  # others are not ours
        loaded = Loaded(rows=len(rows), total=len(known), dry_run=dry_run)
        context = spec.context if spec.context is not None else renderer.context
        progress = progress_sayer(say, len(rows))
        chosen = _choose(rows, known, loaded, section, renderer, context, taken_kinds(config), progress)
        records = _records(rows, chosen, loaded.total, folder.run_id, config.transport.partitions)
        additions.write(records, progress_sayer(say, len(chosen), "written"))
    loaded.total += loaded.new
    return loaded


def _choose(
    rows: Demonstrations,
    known: set[bytes],
    loaded: Loaded,
    section: DemonstrationsSection,
    renderer: Renderer,
    context: int | None,
    kinds: frozenset[LossKind],
    progress: Callable[[int], None],
) -> list[int]:
    """Yield the new rows."""
    chosen: list[int] = []
    seen: set[bytes] = set()
    for index in range(len(rows)):
        progress(index)
        place = rows[index]
        one, where = place.demonstration, place.where
        identity = one.demonstration_id.encode()
        if identity in seen:
            loaded.repeated += 1
            continue
        if identity in known:
            loaded.known += 1
            continue
        kind = kind_of(one)
        if kinds & FROM_DEMONSTRATIONS and kind not in kinds:
            found, expected = ("a chat", "a pair") if kind is LossKind.sft else ("a pair", "a chat")
            raise ConfigError(
                f"{where}: {found}, expected {expected}, as the run's algorithm takes; load another file, or train by "
                f"{'sft' if kind is LossKind.sft else 'dpo'}"
            )
        try:
            sides = tokenise(one, renderer)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if context is not None and (length := length_of(sides)) > context:
            if section.too_long == "error":
                raise ConfigError(
                    f"{where}: {length:,} tokens, expected at most the context of {context:,}; shorten it, raise "
                    'model.context, or leave such ones out with experts.too_long = "skip"'
                )
            loaded.too_long += 1
            continue
        seen.add(identity)
        chosen.append(index)
        loaded.new += 1
        loaded.longest = max(loaded.longest, length_of(sides))
        loaded.tokens += sum(segment.loss_mask.num_ones for segments in sides.values() for segment in segments)
        name = "chats" if kind is LossKind.sft else "pairs"
        loaded.kinds[name] = loaded.kinds.get(name, 0) + 1
    return chosen


def _records(rows: Demonstrations, chosen: list[int], total: int, run_id: str, partitions: int) -> Iterator[NewRecord]:
    for number, index in enumerate(chosen, total):
        one = replace(rows[index].demonstration, number=number)
        yield codec.to_record(one, "experts", number % partitions, run=run_id)
