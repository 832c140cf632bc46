"""Writes problems of people and programs to a run's `problems`, each once, since its id is derived from its question.

All are checked before the first one is written. They have a producer name of their own, so that of two commands at once
the later fences the earlier. Problems that a killed command has written stay, and the next command finds them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rftstream.config.loader import PLAIN_FILE, demonstrations_source
from rftstream.config.sections import RunConfig, TasksetSection
from rftstream.contracts import codec
from rftstream.contracts.problems import NewProblem, ProblemKind, ProblemMaker, given_problem_id, problem_digest
from rftstream.contracts.tasks import Problem
from rftstream.data.tasksets.open import grows, open_taskset
from rftstream.errors import ConfigError, RewardError
from rftstream.models.folders.folder import for_section, prepare_model
from rftstream.models.rendering import open_renderer
from rftstream.rewards.base import problem_input
from rftstream.rewards.resolve import build_reward
from rftstream.runs.folder import RunFolder, complete_log
from rftstream.runs.writes.additions import Say, adding, progress_sayer
from rftstream.service.records.problem_records import PROBLEMS, problem_records
from rftstream.service.role import Log
from rftstream.transport.base import Transport

OF_PARENTS = ("parent", "kind")
"""Columns about a problem's parent; the other columns are those of tasksets."""

_PARENT = re.compile(r"[a-z0-9_-]+/\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemsFile:
    """A file of problems to add, and the name of their maker. The command makes it."""

    source: str
    """`jsonl:PATH` or another source of rows."""
    taskset: str
    """The growing taskset that the problems join."""
    made_by: str
    """Name of the maker."""
    maker: ProblemMaker = ProblemMaker.person
    columns: Mapping[str, str]
    """Our name -> the file's; `parent` and `kind` beside those of tasksets."""
    system: str | None = None


@dataclass(slots=True, kw_only=True)
class AddedProblems:
    """The counts of rows when a file of problems was added. `add_problems` makes and returns it."""

    taskset: str
    rows: int
    new: int = 0
    """Rows that were written, or that would be written in a `dry_run`."""
    known: int = 0
    """Rows that were on the topic already."""
    repeated: int = 0
    """Rows that were left out because they equal an earlier row."""
    dry_run: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the values as a dict for JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to_text(self) -> str:
        """Return the values as text for people."""
        text = f"{self.rows:,} rows: {self.new:,} {'to be added' if self.dry_run else 'added'} to {self.taskset}"
        if self.known:
            text += f"; {self.known:,} there already"
        if self.repeated:
            text += f"; {self.repeated:,} the same as a row before, left out"
        return text


def choose_growing(config: RunConfig, wanted: str | None) -> str:
    """Return the name of the selected growing taskset; without a name, the only one. ConfigError if there is none."""
    growing = [name for name, section in config.tasksets.items() if grows(section.source)]
    known = f"growing tasksets of this run: {', '.join(growing)}" if growing else "this run has no growing taskset"
    if wanted is None and len(growing) == 1:
        return growing[0]
    if wanted is None:
        more = "name one by --taskset" if growing else 'a run file has one by [tasksets.NAME] source = "log:problems"'
        raise ConfigError(f"problems: {known}; {more}")
    if wanted not in growing:
        raise ConfigError(f"problems: {wanted!r} is no taskset that grows; {known}")
    return wanted


def problems_source(text: str) -> str:
    """Return KIND:LOCATION for a user's source. A path alone means JSON lines, unless its ending says otherwise."""
    scheme, _, location = (source := demonstrations_source(text, Path())).partition(":")
    return f"jsonl:{location}" if scheme == PLAIN_FILE else source


def add_problems(
    transport: Transport,
    config: RunConfig,
    folder: RunFolder,
    wanted: ProblemsFile,
    *,
    now: float,
    say: Say,
    dry_run: bool = False,
) -> AddedProblems:
    """Add the rows that are not on the topic yet. ConfigError names the first bad row; then nothing is written."""
    if not dry_run:
        complete_log(transport, config)
    writer = f"{folder.run_id}.problems"
    lost = f"problems: another command began to add some to {folder.run_id} meanwhile"
    with adding(transport, writer, lost=lost, again="add these again", dry_run=dry_run) as additions:
        there = problem_records(Log(transport), bodies=False, settled=True)
        known = {name.decode(errors="replace") for record in there if (name := record.header("id")) is not None}
        added = AddedProblems(taskset=wanted.taskset, rows=0, dry_run=dry_run)
        chosen = list(_choose(_problems_in(wanted, config, folder, added, now, say), known, added))
        records = (codec.to_record(problem, *PROBLEMS, run=folder.run_id) for problem in chosen)
        additions.write(records, progress_sayer(say, len(chosen), "written"))
    return added


def _choose(problems: Iterator[NewProblem], known: set[str], added: AddedProblems) -> Iterator[NewProblem]:
    seen: set[str] = set()
    for problem in problems:
        if problem.problem_id in seen:
            added.repeated += 1
        elif problem.problem_id in known:
            added.known += 1
        else:
            added.new += 1
            yield problem
        seen.add(problem.problem_id)


def _problems_in(
    wanted: ProblemsFile, config: RunConfig, folder: RunFolder, added: AddedProblems, now: float, say: Say
) -> Iterator[NewProblem]:
    """Yield the problems of a file, each checked like the run's own problems."""
    section = config.tasksets[wanted.taskset]
    columns = {name: theirs for name, theirs in wanted.columns.items() if name not in OF_PARENTS}
    taskset = _opened(TasksetSection(source=wanted.source, columns=columns, system=wanted.system), config)
    added.rows = len(taskset)
    spec = for_section(prepare_model(config.model, folder.model, config.run.seed), section)
    renderer = open_renderer(spec)
    context = spec.context if spec.context is not None else renderer.context
    reward = build_reward(section.reward, config, where=f"tasksets.{wanted.taskset}.reward", section=section)
    checks = [check for one in reward.rewards if (check := getattr(one, "check", None)) is not None]
    progress = progress_sayer(say, len(taskset))
    for index in range(len(taskset)):
        progress(index)
        problem = taskset.problem(index)
        where = f"row {index + 1} of {wanted.source}"
        try:
            length = len(renderer.render(problem.messages, problem.tools))
            for check in checks:
                check(problem_input(problem))
        except (ConfigError, RewardError) as error:
            raise ConfigError(f"{where}: {error}") from None
        if context is not None and length >= context and section.too_long == "error":
            raise ConfigError(
                f"{where}: a prompt of {length:,} tokens, expected fewer than the context of {context:,}; shorten it, "
                f"or set tasksets.{wanted.taskset}.too_long to 'skip' or 'truncate'"
            )
        yield _new_problem(problem, wanted, where, now)


def _opened(section: TasksetSection, config: RunConfig) -> Any:
    try:
        return open_taskset("problems", section, config)
    except ConfigError as error:
        text = str(error).removeprefix("tasksets.problems: ")
        raise ConfigError(
            re.sub(r"set columns = \{ (\w+) = \.\.\. \}.*", r"name it by --column \1=NAME", text)
        ) from None


def _new_problem(problem: Problem, wanted: ProblemsFile, where: str, now: float) -> NewProblem:
    """Return the problem of a row, without the columns about its parent."""
    info = dict(problem.info)
    said = {name: info.pop(wanted.columns[name], None) for name in OF_PARENTS if name in wanted.columns}
    parent, kind = said.get("parent"), said.get("kind")
    if parent is not None and (not isinstance(parent, str) or not _PARENT.fullmatch(parent)):
        raise ConfigError(
            f"{where}: got the parent {parent!r}, expected TASKSET/INDEX as `rftstream problems list` has it"
        )
    kinds = [one.value for one in ProblemKind if one is not ProblemKind.given]
    if kind is not None and (parent is None or kind not in kinds):
        raise ConfigError(f"{where}: got the kind {kind!r}, expected one of {', '.join(kinds)}, beside a parent")
    problem = replace(problem, info=info)
    digest = problem_digest(problem)
    return NewProblem(
        problem_id=given_problem_id(wanted.taskset, digest),
        taskset=wanted.taskset,
        problem=problem,
        digest=digest,
        maker=wanted.maker,
        made_by=wanted.made_by,
        kind=ProblemKind.given if parent is None else ProblemKind(kind or ProblemKind.varied),
        parent=parent,
        made_at=now,
    )
