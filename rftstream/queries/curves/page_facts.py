"""The facts beside the curves on a run's page: its result, its lineage, its non-default settings, and completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from rftstream.algorithms.reward_changes import changes_to_text
from rftstream.config.plain import toml_value
from rftstream.config.secrets import hidden
from rftstream.config.sections import RunConfig
from rftstream.contracts.control import RunFinished, RunManifest
from rftstream.contracts.records import Record
from rftstream.contracts.rollouts import Rollout
from rftstream.contracts.verdicts import Verdict, VerifiedRollout
from rftstream.models.rendering import Pieces
from rftstream.queries.catalog.counts import CatalogCounts
from rftstream.queries.catalog.database import CatalogReader
from rftstream.queries.catalog.finding import FATES, find_group
from rftstream.queries.catalog.moments import Moment
from rftstream.queries.curves.evaluations import newest_and_best, trust_text, without_best
from rftstream.queries.curves.history import History
from rftstream.queries.formatting import duration, number
from rftstream.queries.records.inspect import select
from rftstream.queries.records.rollout_view import ShownRollout, read_rollout
from rftstream.queries.records.shown import CompletionReader, cut
from rftstream.runs.folder import OpenRun
from rftstream.service.control_view import read_manifest
from rftstream.service.role import Log

NUM_SAMPLES = 6
"""Number of samples from the beginning, and as many from the end."""
NUM_SEARCHED = 8 * NUM_SAMPLES
"""Number of records among which they are looked for, at the beginning of each partition and at the end."""
NUM_EXTREME = 3
"""Number of best rollouts in a report, and as many of the worst."""
SHOWN_CHARACTERS = 1_000
"""Most characters of a turn."""
MAX_SAMPLE_TURNS = 12
"""Most turns of a rollout in a report: the first and the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSample:
    rollout_id: str
    version: int
    """The oldest version that sampled a token of it."""
    reward: str
    turns: tuple[tuple[str, Pieces], ...]
    """Speaker and text of each turn."""
    why: str = ""
    """Why it is shown, e.g. `best`; empty if the page says it of all."""


def own_settings(config: RunConfig) -> list[tuple[str, str]]:
    """Return dotted names and values of all settings that are not at their default."""
    return [(name, _text(value)) for name, value in _changed(config, "") if name != "base"]


def differing_settings(configs: Sequence[RunConfig]) -> list[tuple[str, list[str]]]:
    """Return the names of the settings that are not the same in all configs, with the value in each."""
    own = [dict(own_settings(config)) for config in configs]
    found = []
    for name in sorted({name for settings in own for name in settings}):
        if len({settings.get(name) for settings in own}) > 1:
            default = (f"{_text(_value_at(config, name))} (default)".lstrip() for config in configs)
            found.append((name, [settings.get(name, text) for settings, text in zip(own, default, strict=True)]))
    return found


def _text(value: Any) -> str:
    return "" if value is None else hidden(toml_value(value) if isinstance(value, (bool, list, tuple)) else str(value))


def _value_at(value: Any, name: str) -> Any:
    """Return the value with a dotted name below a config; None if there is none."""
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value


def _changed(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(section):
        value, default = getattr(section, field.name), field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if value != default:
            yield from _leaves(value, f"{prefix}{field.name}")


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value):
        yield from _changed(value, f"{name}.")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}")
    elif isinstance(value, (list, tuple)) and any(map(dataclasses.is_dataclass, value)):
        for place, inner in enumerate(value):
            yield from _leaves(inner, f"{name}.{place}")
    else:
        yield name, value


def read_samples(log: Log, reader: CompletionReader) -> list[ShownSample]:
    """Return the first and the last scored rollouts on the log, by version, of different groups if there are enough."""
    first: list[Record] = []
    for place in log.ends("verified"):
        first += islice(log.read("verified", partitions=[place.partition]), NUM_SEARCHED)
    first.sort(key=lambda record: (record.timestamp_s, record.partition, record.offset))
    last = list(select(log, "verified", last=NUM_SEARCHED))
    records = {str(record): record for record in (*_of_many_groups(first), *_of_many_groups(last[::-1]))}
    found = [
        _shown(message.rollout, message.verdict, reader)
        for _, message in log.rule.messages(records.values())
        if isinstance(message, VerifiedRollout) and message.verdict is not None and message.rollout is not None
    ]
    return sorted(found, key=lambda sample: sample.version)


def _of_many_groups(records: Sequence[Record]) -> list[Record]:
    """Return NUM_SAMPLES of the records, with as many groups among them as possible, the first of each."""
    groups: dict[bytes, Record] = {}
    for record in records:
        groups.setdefault(dict(record.headers).get("group_id", b""), record)
    siblings = (record for record in records if record not in groups.values())
    return [*groups.values(), *siblings][:NUM_SAMPLES]


# ------------------------------------------------------------------------------- the facts of a report, from a catalog


def choose_samples(run: OpenRun, catalog: CatalogReader, moment: Moment, reader: CompletionReader) -> list[ShownSample]:
    """Return the best and the worst rollouts, of different groups, and some at equal distances through the run."""
    last = catalog.row("SELECT max(sequence) AS last FROM groups WHERE num_scored > 0")
    end = -1 if last is None or last["last"] is None else int(last["last"])
    ordered = "SELECT group_id FROM groups WHERE num_scored > 0 ORDER BY {}, sequence DESC LIMIT :number"
    best = catalog.rows(ordered.format("reward_most DESC"), {"number": NUM_EXTREME})
    worst = catalog.rows(ordered.format("reward_least"), {"number": NUM_EXTREME})
    next_one = "SELECT group_id FROM groups WHERE num_scored > 0 AND sequence >= ? ORDER BY sequence LIMIT 1"
    spread = [catalog.rows(next_one, (end * i // max(1, NUM_SAMPLES - 1),)) for i in range(NUM_SAMPLES)]
    chosen = {"best": best, "worst": worst, "sampled": [row for rows in spread for row in rows]}
    manifest = read_manifest(run.transport)
    partitions = 1 if manifest is None else max(1, manifest.partitions)
    found: dict[str, ShownSample] = {}
    for why, rows in chosen.items():
        for row in rows:
            group = find_group(catalog, moment, row["group_id"])
            scored = [] if group is None else [one for one in group.siblings if one.reward is not None]
            if group is not None and scored:
                place = {"best": -1, "worst": 0}.get(why, len(scored) // 2)
                one = sorted(scored, key=lambda sibling: sibling.reward or 0.0)[place]
                view = read_rollout(run.transport, group, one, reader, num_partitions=partitions)
                found.setdefault(one.rollout_id, _sample(view, why))
    return list(found.values())


def _sample(view: ShownRollout, why: str) -> ShownSample:
    said = [(one.role, cut(one.pieces, SHOWN_CHARACTERS)) for one in (*view.problem, *view.turns)]
    if (left_out := len(said) - MAX_SAMPLE_TURNS) > 0:
        half = MAX_SAMPLE_TURNS // 2
        said[half:-half] = [("", [(f"... {left_out} turns left out", True)])]
    if view.missing:
        said.append(("", [(view.missing, True)]))
    return ShownSample(
        rollout_id=view.row.rollout_id,
        version=min((version for _, version in view.sampled_by), default=0),
        reward=f"reward {number(view.row.reward)}",
        turns=tuple((who, [(hidden(text), special) for text, special in pieces]) for who, pieces in said),
        why=why,
    )


def result_facts(history: History, counts: CatalogCounts, finished: RunFinished | None) -> list[tuple[str, str, str]]:
    """Return name, value and a note of each main number of a run."""
    steps = history.steps
    facts = [("version", f"{history.version:,}", f"ended by: {finished.reason}" if finished else "not finished")]
    if history.rewards():
        first, last, _ = history.reward_ends()
        note = f"mean of the last tenth of the steps; {number(first)} of the first{history.since_change}"
        facts.append(("reward", number(last), note))
    equal = without_best(history.evaluations)
    for name, (newest, best) in newest_and_best(history.evaluations).items():
        note = f"best {number(best.metrics.get('mean'))} at v{best.name.version}"
        note = f"the same for all {equal[name]:,} versions" if name in equal else note
        note += f"; {trust_text(newest)}"
        facts.append((f"evaluation {name}", number(newest.metrics.get("mean")), note))
    facts.append(("rollouts", f"{counts.rollouts.admitted:,}", f"{counts.rollouts.trained:,} trained"))
    if len(steps) > 1:
        seconds = [history.at_work_s(step.recorded_at) for step in (steps[0], steps[-1])]
        facts.append(("time", duration(seconds[1] - seconds[0]), "without pauses" if history.pauses else "of training"))
    return facts


def lineage_facts(manifest: RunManifest | None, history: History, counts: CatalogCounts) -> list[tuple[str, str]]:
    """Return names and values that say what a run was made of, and which version came of it."""
    facts: list[tuple[str, str]] = []
    if manifest is not None:
        began = datetime.fromtimestamp(manifest.created_at, UTC)
        facts += [("run", manifest.run), ("began (UTC)", f"{began:%Y-%m-%d %H:%M}")]
        facts += [("rftstream", manifest.rftstream_version), ("seed", str(manifest.seed))]
        facts += [(f"digest of {name}", digest) for name, digest in sorted(manifest.digests.items())]
        facts += [("reward changed", line) for line in changes_to_text(history.reward_changes)]
        facts += [("settings changed", change.to_text()) for change in history.setting_changes]
        facts += [("differs from the run it was made of", hidden(change)) for change in manifest.changed]
    if (step := history.current) is not None:
        facts.append(("newest version", f"v{step.name.version}, trainer epoch {step.name.trainer_epoch}"))
        if step.weights_digest:
            facts.append(("digest of its weights", step.weights_digest))
    facts.append(("trainers that took over", str(len(history.resumes))))
    for name, one in (("groups", counts.groups), ("rollouts", counts.rollouts)):
        fates = ", ".join(f"{getattr(one, fate):,} {fate}" for fate in FATES if fate != "batched")
        facts.append((name, f"{one.admitted:,} admitted: {fates}"))
    return facts


def _shown(rollout: Rollout, verdict: Verdict, reader: CompletionReader) -> ShownSample:
    versions = [span.version for segment in rollout.segments for span in segment.versions]
    asked = rollout.problem.messages if rollout.problem is not None else ()
    said = zip(rollout.turns, reader.turns(rollout.turns, rollout.segments, rollout.calls), strict=True)
    turns = [
        *((message.role, [(message.content, False)]) for message in asked),
        *((turn.role, pieces) for turn, pieces in said),
    ]
    return ShownSample(
        rollout_id=rollout.ids.rollout_id,
        version=min(versions, default=0),
        reward=f"reward {number(verdict.reward)}",
        turns=tuple((who, cut(pieces, SHOWN_CHARACTERS)) for who, pieces in turns),
    )
