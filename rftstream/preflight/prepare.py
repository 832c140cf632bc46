"""`data prepare`: applies the operators of the task side once to whole tasksets, and writes files that are tasksets
again.

The folder appears whole or not at all: everything is written beside it, read again and compared, and then renamed.
After a kill, the next call starts again. Problems are read and written one by one, and only an 8-byte number of each is
kept.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from rftstream.config.data_pipelines.pipelines import operator_places
from rftstream.config.loader import to_dict
from rftstream.config.sections import RunConfig, TasksetSection
from rftstream.contracts.tasks import Problem
from rftstream.data.operators.base import Draw
from rftstream.data.operators.counts import SKIP, PipelineCounts, draws, name_apart
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.pipeline import TaskPipeline
from rftstream.data.operators.problems import all_problems
from rftstream.data.tasksets.arrow_writer import write_parquet
from rftstream.data.tasksets.base import Taskset
from rftstream.data.tasksets.columns import OUR_COLUMNS
from rftstream.data.tasksets.open import grows, open_taskset
from rftstream.errors import ConfigError
from rftstream.preflight.new_folder import existing_report, new_folder, publish, sha256_of
from rftstream.queries.plain import chat_row
from rftstream.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The result of preparing tasksets. `prepare` makes it; a command prints it."""

    out: Path
    report: dict[str, Any]
    """Report as it stands in the folder."""
    is_new: bool
    """False if the folder existed already, made from the same data with the same settings."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dict for JSON, with the folder."""
        return {"out": str(self.out), "new": self.is_new, **self.report}

    def to_text(self) -> str:
        """Return the report as text for people."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if not self.is_new:
            yield f"{self.out}: is there already, made of the same data by the same operators; nothing is written"
        for name, one in self.report["tasksets"].items():
            yield f"{name}: {one['in']:,} problems, {one['out']:,} stay: {self.out / one['file']} ({one['sha256']})"
            for operator in one["operators"]:
                for reason in operator["reasons"]:
                    yield f"  {operator['operator']} {reason['action']} {reason['reason']}".rstrip() + (
                        f"  {reason['count']:,}"
                    )
            if one["not_written"]:
                yield (
                    f"  {one['not_written']:,} have another group size or sampling now, which no taskset holds; leave "
                    "these operators in the run file"
                )
        yield "in a run file:"
        for name, one in self.report["tasksets"].items():
            yield f'[tasksets.{name}]\nsource = "{one["source"]}"'


class OperatorFailed(ConfigError):
    """An operator raised an exception, or returned an invalid answer. The text names the operator, the problem and the
    fault."""


def prepare(config: RunConfig, out: Path, *, parquet: bool = False, names: tuple[str, ...] = ()) -> Prepared:
    """Apply the operators of the task side to the tasksets of a config (`names`: only these), and write the results
    into the folder `out`, as JSON lines or as Parquet.

    ConfigError if a taskset cannot be read or written, if an operator fails, if no problem of a taskset is left, or if
    `out` has other content. Then nothing is written.
    """
    chosen = _chosen(config, names)
    config = replace(config, tasksets=chosen)
    if not any(place.side == "task" for place in operator_places(config)):
        raise ConfigError(
            "pipeline: found no operators of the task side, expected [[pipeline]] or [[tasksets.NAME.pipeline]]"
        )
    tasksets = {name: open_taskset(name, section, config) for name, section in chosen.items()}
    pipeline = TaskPipeline.of(config, all_problems(config, tasksets))
    name_apart(pipeline.operators)
    out = Path(os.path.abspath(out))
    with new_folder(out) as folder:
        settings = _settings(config, parquet, tasksets)
        names_of_files = [name + (".parquet" if parquet else ".jsonl") for name in chosen]
        if (report := existing_report(out, settings, names_of_files)) is not None:
            return Prepared(out=out, report=report, is_new=False)
        written = {
            name: _write_taskset(config, name, taskset, pipeline, folder, parquet, out)
            for name, taskset in tasksets.items()
        }
        files = {one["file"]: one["sha256"] for one in written.values()}
        report = {"rftstream": __version__, "settings": settings, "tasksets": written, "files": files}
        publish(folder, out, report)
    return Prepared(out=out, report=report, is_new=True)


def _chosen(config: RunConfig, names: tuple[str, ...]) -> dict[str, TasksetSection]:
    for name in names:
        if name not in config.tasksets:
            raise ConfigError(f"--taskset {name}: unknown; known: {', '.join(config.tasksets) or 'none'}")
    if not config.tasksets:
        raise ConfigError("tasksets: none given, expected one at least")
    chosen = {name: section for name, section in config.tasksets.items() if not names or name in names}
    if not (there := {name: section for name, section in chosen.items() if not grows(section.source)}):
        raise ConfigError("tasksets: found only some that grow, expected one that has problems before a run")
    return there


def _settings(config: RunConfig, parquet: bool, tasksets: Mapping[str, Taskset]) -> dict[str, Any]:
    """Return everything that the output depends on, as plain values."""
    sections = to_dict(config)["tasksets"]
    return {
        "as_parquet": parquet,
        "seed": config.run.seed,
        "operators": [
            {"op": place.name, "where": place.where, **place.settings}
            for place in operator_places(config)
            if place.side == "task"
        ],
        "tasksets": {
            name: {"source": sections[name]["source"], "digest": taskset.digest} for name, taskset in tasksets.items()
        },
    }


# ------------------------------------------------------------------------------------------ a taskset


def _write_taskset(
    config: RunConfig, name: str, taskset: Taskset, pipeline: TaskPipeline, folder: Path, parquet: bool, out: Path
) -> dict[str, Any]:
    """Write the remaining problems of a taskset, and return its part of the report."""
    counts = PipelineCounts(pipeline.operators.get(name, ()))
    lines = folder / f"{name}.jsonl"
    kept = array("Q")
    """A digest of each written problem, in order."""
    not_written = 0
    with lines.open("wb") as file:
        for draw in draws(config, name, taskset, range(len(taskset))):
            result = pipeline.decide(draw, _NO_FACTS)
            counts.task(result, {"problem": draw.index})
            if counts.failures:
                raise OperatorFailed(f"tasksets.{name}: problem {draw.index}: {counts.failures[0]}; nothing is written")
            if result.skipped is not None:
                continue
            not_written += _is_sampled_otherwise(draw, result.draw)
            problem = result.draw.problem
            file.write(_encode(row_of(problem, f"tasksets.{name}: problem {draw.index}")) + b"\n")
            kept.append(_digest(problem))
        file.flush()
        os.fsync(file.fileno())
    if not kept:
        raise ConfigError(f"tasksets.{name}: nothing is left of {len(taskset):,} problems: {_why(counts)}")
    path = lines
    if parquet:
        path = folder / f"{name}.parquet"
        write_parquet(lines, path)
        lines.unlink()
    scheme = path.suffix.removeprefix(".")
    again = _read_again(config, name, f"{scheme}:{path}", kept)
    return {
        "source": f"{scheme}:{out / path.name}",
        "file": path.name,
        "from": config.tasksets[name].source,
        "in": counts.num_in,
        "out": counts.num_out,
        "digest_in": taskset.digest,
        "digest_out": again.digest,
        "sha256": sha256_of(path),
        "not_written": not_written,
        "operators": [count.to_json(examples=False) for count in counts.counts],
    }


_NO_FACTS = Facts()


def _is_sampled_otherwise(before: Draw, after: Draw) -> bool:
    return (before.sampling, before.group_size) != (after.sampling, after.group_size)


def _why(counts: PipelineCounts) -> str:
    reasons = [
        f"{count.label} ({reason}) {effect.count:,}"
        for count in counts.counts
        for (action, reason), effect in count.effects.items()
        if action == SKIP
    ]
    return ", ".join(reasons) + "; let the operators keep more"


def row_of(problem: Problem, where: str) -> dict[str, Any]:
    """Return the row that a taskset reads as this problem. ConfigError if there is none."""
    if any(message.media for message in problem.messages):
        raise ConfigError(f"{where}: has images, which are not written; expected texts")
    if taken := sorted(set(problem.info) & set(OUR_COLUMNS)):
        raise ConfigError(
            f"{where}: a column {taken[0]!r} goes on to the reward, and would be read as {taken[0]} in what is "
            'written; leave it out with options = { keep = ["..."] }'
        )
    row: dict[str, Any] = {"messages": [chat_row(message) for message in problem.messages]}
    if problem.answer is not None:
        row["answer"] = problem.answer
    if problem.tools:
        row["tools"] = list(problem.tools)
    return {**row, "data_source": problem.data_source, **problem.info}


def _read_again(config: RunConfig, name: str, source: str, kept: array[int]) -> Taskset:
    """Open the written file and compare it, problem by problem. ConfigError if it differs."""
    section = replace(config.tasksets[name], source=source, columns={}, options={}, system=None)
    taskset = open_taskset(name, section, config)
    if len(taskset) != len(kept):
        raise ConfigError(f"tasksets.{name}: wrote {len(kept):,} problems and read {len(taskset):,} again")
    for index, digest in enumerate(kept):
        if _digest(taskset.problem(index)) != digest:
            raise ConfigError(
                f"tasksets.{name}: problem {index} of those that stay is read otherwise than it was written, because "
                "its columns have no such form there; write JSON lines, or leave columns out with "
                'options = { keep = ["..."] }'
            )
    return taskset


def _digest(problem: Problem) -> int:
    return int.from_bytes(hashlib.blake2b(_encode(row_of(problem, "")), digest_size=8).digest(), "little")


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")
