"""The findings of `check`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rftstream.config.stages import Stage
from rftstream.contracts.batches import LossKind
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.models.classifiers import HeldClassifier
from rftstream.models.spec import ModelSpec
from rftstream.preflight.checks.check_demonstrations import DemonstrationsLine
from rftstream.preflight.checks.plays import Play, SeenPlay, play_lines, reply_text
from rftstream.preflight.checks.reference_scores import ReferenceScores
from rftstream.preflight.estimate import DiskEstimate
from rftstream.preflight.memory import MemoryEstimate, memory_lines, place_line
from rftstream.queries.formatting import columns, duration, image_text, plural, size
from rftstream.queries.plain import Report, pick
from rftstream.queries.records.shown import LINE_END
from rftstream.runs.modules import OwnModule


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLine:
    """A part that the run file selects, with its settings."""

    kind: str
    name: str
    settings: str
    """The part's Config, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(Report):
    """A rendered prompt."""

    JSON = "messages=messages_to_json num_tokens token_ids pieces"

    messages: tuple[ChatMessage, ...]
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    text: str
    """Text of each token."""

    @property
    def num_tokens(self) -> int:
        """Number of the prompt's tokens."""
        return len(self.token_ids)

    def messages_to_json(self) -> list[dict[str, Any]]:
        """Return the messages with their roles."""
        return [pick(message, "role content") for message in self.messages]


@dataclass(slots=True, kw_only=True)
class TasksetLine(Report):
    """The report's line about a taskset or an evaluation. `check` makes and fills it."""

    JSON = (
        "name kind source reward problems trained=trained_to_json grows longest_prompt=longest num_rendered too_long "
        "first_prompt=first tools earlier_turns=turns environment_reply=replied plays seen scores"
    )

    name: str
    source: str
    kind: str
    """Either taskset or evaluation."""
    reward: str
    problems: int = 0
    """Number of problems in one pass; for an evaluation, the number that is used."""
    asked: list[tuple[int, int | None]] | None = None
    """Hashes of the problems' questions, if the run file has evaluations, each with one of what the environment may
    hide of the problem; None where there is one turn."""
    trained: int = 0
    """Number of an evaluation's problems that are also trained on."""
    grows: bool = False
    """Whether problems join during the run. Then there are none to check before it."""
    longest: int = 0
    """Tokens of the longest rendered prompt, of those that are not left out."""
    num_rendered: int = 0
    """Number of rendered prompts: all, or the first ones and those that may have a problem."""
    skipped: frozenset[int] = frozenset()
    """Problems that operators leave out in every pass."""
    too_long: int = 0
    """Number of prompts that leave no room for a completion."""
    too_long_means: str = ""
    """Treatment of these prompts: left out, or cut from the left."""
    unknown: list[int] = field(default_factory=list)
    """Problems whose rendered prompt has characters that the tokenizer does not know. For each such character at least
    the first problem is listed."""
    controls: list[tuple[int, str]] = field(default_factory=list)
    """Problems with the name of a special token in their text, each with the first such name."""
    first: Prompt | None = None
    first_problem: Problem | None = None
    tools: tuple[str, ...] = ()
    """Names of the tools that the first problem and the environment offer."""
    turns: str | None = None
    """Turn at which the chat template starts a new segment, and why. None if it never does."""
    one_turn: bool = False
    """Whether rollouts have one turn, so that `turns` does not matter."""
    advice: list[str] = field(default_factory=list)
    """Sentences about the template and the reward."""
    held: list[HeldClassifier] = field(default_factory=list)
    """Reward models that each scoring process holds."""
    plays: list[Play] = field(default_factory=list)
    """Replies of the environment to the first problem's answer, and to wrong ones."""
    is_given: bool = False
    """Whether the environment gives the reward."""
    seen: SeenPlay | None = None
    """A play as the model sees it. None if the environment replies nothing."""
    scores: ReferenceScores | None = None
    """Rewards of the problems' answers and of empty ones."""

    @property
    def replied(self) -> str:
        """Return the environment's first reply, in words; empty if it was not asked."""
        replies = self.plays[0].replies if self.plays else ()
        return reply_text(replies[0]) if replies else ""

    def trained_to_json(self) -> int | None:
        """Return the number of an evaluation's problems that are also trained on."""
        return self.trained if self.kind == "evaluation" else None

    @property
    def place(self) -> str:
        """Return the section of the run file, such as `tasksets.sums`."""
        return f"{self.kind}s.{self.name}"

    @property
    def kept(self) -> Sequence[int]:
        """Return the problems that operators do not leave out; all, if nothing is left."""
        return [index for index in range(self.problems) if index not in self.skipped] or range(self.problems)


@dataclass(slots=True, kw_only=True)
class CheckReport(Report):
    """All findings of `check`. `check` makes, fills and returns it; the command shows it."""

    JSON = (
        "ok run devices parts modules=modules_to_json model=model_to_json tasksets stages=stages_to_json "
        "experts=demonstrations disk memory about_s no_answer warnings errors"
    )

    run: str
    devices: str = ""
    """Devices and engine of the roles, as one line."""
    parts: list[PartLine] = field(default_factory=list)
    modules: list[OwnModule] = field(default_factory=list)
    """User's modules that the run file names, or that these modules import."""
    model: ModelSpec | None = None
    context: int | None = None
    tasksets: list[TasksetLine] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    demonstrations: DemonstrationsLine | None = None
    disk: DiskEstimate | None = None
    memory: MemoryEstimate | None = None
    about_s: float | None = None
    """Seconds that the run will take here, roughly; None if that cannot be told."""
    no_answer: str = ""
    """Why nobody answers at the log's address; empty if somebody does, or nobody has to."""
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return whether nothing prevents a start."""
        return not self.errors

    def modules_to_json(self) -> list[dict[str, Any]]:
        """Return the user's own modules with their digests."""
        return [pick(module, "name file sha256=digest") for module in self.modules]

    def model_to_json(self) -> dict[str, Any] | None:
        """Return the description of the model, or None if the model cannot be read."""
        if self.model is None:
            return None
        parameters = self.disk.parameters if self.disk else None
        return {**pick(self.model, "name dtype"), "context": self.context, "parameters": parameters}

    def stages_to_json(self) -> list[dict[str, Any]]:
        """Return the stages with the data that they train on."""
        words = "name first end rollouts=takes_rollouts experts=kind lr=trainer.lr"
        return [pick(stage, words) for stage in self.stages]

    def to_text(self) -> str:
        """Return the report as lines for a person."""
        return "\n".join(_text(self))

    def to_short_text(self) -> str:
        """Return about ten lines: what people look at before they start."""
        return "\n".join(_short_text(self))


SHOWN_CHARACTERS = 100
"""Most characters of a prompt or a demonstration in the short report."""


def _short_text(report: CheckReport) -> list[str]:
    names = ", ".join(dict.fromkeys(part.name for part in report.parts))
    lines = [f"{report.run}: {names}", f"devices: {report.devices}"]
    if report.model is not None:
        lines.append(_model_line(report))
    for line in report.tasksets:
        lines += _short_taskset_lines(line)
    if report.demonstrations is not None:
        found = report.demonstrations.to_lines()
        lines += [_abridged(line) if line.startswith("    ") else line for line in found]
    room = [] if report.memory is None else [place_line(report.memory, place) for place in report.memory.places]
    if report.disk is not None:
        room.append(_disk_line(report.disk))
        if report.disk.rollouts is not None:
            took = (
                "`rftstream try` measures the speed" if report.about_s is None else f"about {duration(report.about_s)}"
            )
            filtered = ", beside those of groups that are filtered" if report.disk.filters else ""
            room.append(f"time: {report.disk.rollouts:,} rollouts{filtered}, {took}")
    return [
        *lines,
        *room,
        *_ending(report),
        *([] if report.errors else ["-v shows every part, the tokens, and who needs what"]),
    ]


def _short_taskset_lines(line: TasksetLine) -> list[str]:
    """Return what the model sees, what the environment says, and what the reward gives."""
    head, *_ = _taskset_lines(line)
    return [head, *_seen_lines(line)]


def _abridged(text: str) -> str:
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def _seen_lines(line: TasksetLine) -> list[str]:
    if line.first is None or line.kind == "evaluation":
        return []
    text = _abridged(line.first.text.replace("\n", LINE_END))
    lines = [f"  the model sees, {plural(line.first.num_tokens, 'token')}: {text}"]
    lines += play_lines(line.plays, line.seen, is_given=line.is_given)
    if line.scores is not None:
        lines.append(f"  reward: {line.scores.to_text()}")
    return lines


def _text(report: CheckReport) -> list[str]:
    parts = [(part.kind, part.name, part.settings) for part in report.parts]
    lines = [report.run, f"devices: {report.devices}", "", *columns(parts, left=3, indent="  ")]
    if report.modules:
        lines += [
            "",
            "own modules:",
            *columns([(module.name, module.file) for module in report.modules], left=2, indent="  "),
        ]
    if report.model is not None:
        lines += ["", _model_line(report)]
    for line in report.tasksets:
        lines += ["", *_taskset_lines(line), *_seen_lines(line)]
    if report.stages:
        lines += ["", "stages:", *columns([_stage_row(stage) for stage in report.stages], left=4, indent="  ")]
    if report.demonstrations is not None:
        lines += ["", *report.demonstrations.to_lines()]
    if report.disk is not None:
        lines += ["", *_disk_lines(report.disk)]
    if report.memory is not None:
        lines += ["", *memory_lines(report.memory)]
    return [*lines, *_ending(report)]


def _model_line(report: CheckReport) -> str:
    assert report.model is not None
    context = "unbounded" if report.context is None else f"{report.context:,} tokens"
    parameters = f"{report.disk.parameters:,} parameters, " if report.disk and report.disk.parameters else ""
    return f"model {report.model.name}: {parameters}{report.model.dtype}, context {context}"


def _ending(report: CheckReport) -> list[str]:
    """Return the warnings, and whether the run could start."""
    lines = ["", "warnings:", *(f"  {sentence}" for sentence in report.warnings)] if report.warnings else []
    if not report.errors:
        ready = (
            "the run file is right, but the log does not answer: not ready to run"
            if report.no_answer
            else "ready to run"
        )
        return [*lines, "", ready]
    found = plural(len(report.errors), "error")
    return [*lines, "", f"not ready, {found}:", *(f"  {error}" for error in report.errors)]


def _stage_row(stage: Stage) -> tuple[str, ...]:
    taken = ["rollouts"] if stage.takes_rollouts else []
    if stage.kind is not None:
        what = "pairs" if stage.kind is LossKind.dpo else "demonstrations"
        taken.append(
            f"{stage.demonstration_ratio:g} {what} for each"
            if taken
            else f"{stage.demonstrations_per_batch:,} {what} a batch"
        )
    steps = plural(stage.steps or 0, "step")
    return f"stages.{stage.number}", stage.name, f"{steps}, versions {stage.first:,} to {stage.end:,}", ", ".join(taken)


def _taskset_lines(line: TasksetLine) -> list[str]:
    count = "problems join it while the run goes on, " if line.grows else f"{plural(line.problems, 'problem')}, "
    if line.skipped:
        count += f"{len(line.skipped):,} of them left out by the pipeline, "
    opened = count if line.grows or line.problems else ""  # the error tells of one that does not open
    head = f"{line.kind} {line.name}: {line.source}, {opened}reward {line.reward}"
    if line.trained:
        head += f"; {'all' if line.trained >= line.problems else f'{line.trained:,}'} of them are trained on, too"
    if line.first is None:
        return [head]
    which = "prompt" if line.num_rendered == line.problems else f"of {line.num_rendered:,} rendered prompts"
    lines = [head, f"  longest {which} {plural(line.longest, 'token')}"]
    if line.too_long and line.too_long_means:
        lines[-1] += f"; {plural(line.too_long, 'prompt')} longer than the context, {line.too_long_means}"
    if line.tools:
        lines.append(f"  tools: {', '.join(line.tools)}")
    lines.append(f"  first prompt, {plural(len(line.first.token_ids), 'token')}:")
    for message in line.first.messages:
        first, *more = message.content.split("\n")
        lines += [f"    {message.role}: {first}", *(f"      {text}" for text in more)]
        lines += [f"      {image_text(image)}" for image in message.media]
    lines += _token_lines(line.first)
    if line.turns is not None and line.one_turn:
        lines.append(
            "  note: with several turns the chat template would break rollouts into segments; here they have one turn"
        )
    return lines


TOKENS_WIDTH = 100


def _token_lines(prompt: Prompt) -> list[str]:
    """Return `[1] 'text'` for each token, wrapped."""
    lines, row = [], "   "
    for token, piece in zip(prompt.token_ids, prompt.pieces, strict=True):
        shown = f" [{token}]{piece!r}"
        if len(row) + len(shown) > TOKENS_WIDTH:
            lines.append(row)
            row = "   "
        row += shown
    return [*lines, row]


def _disk_line(disk: DiskEstimate) -> str:
    more = ""
    doubled = size(disk.total_bytes + (disk.log_bytes or 0))
    if disk.filters and doubled != size(disk.total_bytes):
        more = f", without groups that {' and '.join(disk.filters)} may filter: where half of all are, {doubled}"
    return f"disk: up to {size(disk.total_bytes)} of {size(disk.free_bytes)} free{more}"


def _delta_rows(disk: DiskEstimate, elsewhere: str) -> list[tuple[str, str, str]]:
    if not disk.deltas:  # weights.anchor_every = 1: snapshots alone
        return []
    what = f"{disk.deltas} of some {size(disk.delta_bytes)}, by the learning rate and the dtype{elsewhere}"
    return [("deltas", size(disk.delta_bytes * disk.deltas), what)]


def _disk_lines(disk: DiskEstimate) -> list[str]:
    log = "unknown length" if disk.log_bytes is None else size(disk.log_bytes)
    rollouts = "" if disk.rollouts is None else f"{disk.rollouts:,} rollouts of "
    saved = f", {size(disk.saved_bytes)} of it to go on from" if disk.saved_bytes else ""
    elsewhere = "" if disk.store_is_local else " (in the object store, not on this disk)"
    return [
        _disk_line(disk),
        *columns(
            [
                ("log", log, f"{rollouts}{size(disk.bytes_per_rollout)} each, at the greatest length{saved}"),
                *([("journal", size(disk.journal_bytes), "newest records, once more")] if disk.journal_bytes else []),
                (
                    "weights",
                    size(disk.snapshot_bytes * disk.snapshots),
                    f"{disk.snapshots} snapshots of {size(disk.snapshot_bytes)}{elsewhere}",
                ),
                *_delta_rows(disk, elsewhere),
                (
                    "checkpoints",
                    size(disk.checkpoint_bytes * disk.checkpoints),
                    f"{disk.checkpoints} of {size(disk.checkpoint_bytes)}: float32 masters and moments{elsewhere}",
                ),
                ("final", size(disk.snapshot_bytes), "the trained model"),
            ],
            left=3,
            indent="  ",
        ),
    ]
