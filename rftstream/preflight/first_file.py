"""A first run file, made from a few answers. `rftstream init` writes it, and it runs without changes.

The problems are read first: a made model needs their characters and lengths, and columns are found by their usual
names. The written file is checked as by `rftstream check`, and removed if it would not run.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import string
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rftstream.config import loader
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import AlgorithmSpec
from rftstream.config.sections import RunConfig, RunSection
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.tasks import Problem
from rftstream.data.tasksets.base import question_hash
from rftstream.errors import ConfigError
from rftstream.models.machine import read_machine
from rftstream.preflight.checks.check import check
from rftstream.preflight.checks.fitting import fitting_sizes
from rftstream.preflight.first_problems import (
    FORMATS,
    MADE,
    SAMPLE,
    FirstFile,
    as_part_name,
    check_given,
    find_columns,
    find_source,
    open_problems,
    read_problems,
    relative_to,
    reward_of_source,
    sample_text,
    without_answer,
)
from rftstream.queries.plain import Report
from rftstream.queries.reference.run_file_schema import FILE_NAME as SCHEMA
from rftstream.queries.reference.run_file_schema import schema_text
from rftstream.queries.reference.source_text import config_fields, evaluate
from rftstream.rewards.base import NAME_ANSWER
from rftstream.rewards.functions import FunctionReward
from rftstream.rewards.resolve import build_reward
from rftstream.runs.modules import find_modules

RUN_FILE = "rftstream.toml"
MOST_CHARACTERS, MOST_CONTEXT = 300, 512
"""Limits for a small made model: beyond them it does not learn in minutes."""
LEAST_DIVIDED, MOST_HELD_OUT = 20, 100
"""Fewest problems for which some are held out, and the most that are held out."""
HELD_OUT_SHARE = 0.1
SMALL_PARAMETERS = 300_000_000
LEARNING_RATE, SMALL_RATE = "lr", "lr = 3e-5                  # so small a model takes more than the usual 1e-6"
"""Key of the line that sets the learning rate of a model with fewer parameters, and the line: the rate with which
examples/smollm2.toml was measured."""
MOST_LEARNED = 40
"""Tokens of a prompt and its answer of which a made model may learn something."""
KNOWS_NOTHING = (
    "model: made here with random weights, it cannot read problems as long as these; name one that can, --model FOLDER"
)
MADE_TURNS = 4
"""Turns in an environment that a made model gets tokens for."""
WITHOUT_ANSWER = 12
"""Characters of a completion that are reckoned with where problems have no answers."""


@dataclass(frozen=True, slots=True)
class WrittenFiles(Report):
    """The files that `write` made."""

    run_file: Path
    files: tuple[Path, ...]
    copied: tuple[Path, ...] = ()
    """The user's modules, copied from the current folder to that of the run file."""
    warnings: tuple[str, ...] = ()
    """Warnings of `check` about the problems."""

    def to_text(self) -> str:
        """Return which files were written, and what to do next."""
        place = self.run_file.parent
        file = self.run_file.name if place.resolve() == Path.cwd() else str(self.run_file)
        argument = "" if file == RUN_FILE else f" {shlex.quote(file)}"
        return "\n".join(
            [
                *(f"wrote {file}" for file in self.files),
                *(f"copied your module to {file}: own modules are looked up in its folder" for file in self.copied),
                *(f"warning: {sentence}" for sentence in self.warnings),
                "",
                f"rftstream check{argument}    looks at everything before it is run",
                f"rftstream run{argument}      runs it, and leaves the model in a folder",
                "rftstream explain trainer.lr    says what a setting means",
            ]
        )


def write(wanted: FirstFile) -> WrittenFiles:
    """Write the run file, its JSON Schema for editors, and a sample of problems if none is named. ConfigError if one of
    these files exists, or if the run would not start; then no file is left."""
    name, environment = wanted.name or _usual_name(wanted.folder), as_part_name(wanted.environment)
    wanted = replace(wanted, name=name, environment=environment)
    registry.convert({"name": wanted.name}, RunSection, where="run")
    check_free(wanted)
    if wanted.answer_format not in FORMATS:
        raise ConfigError(f"--answer-format: got {wanted.answer_format!r}, expected one of {', '.join(FORMATS)}")
    is_new = not wanted.folder.exists()
    wanted.folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    try:
        if not wanted.tasks:
            made.append(_write_new(wanted.folder / SAMPLE, sample_text()))
        text = run_file_text(wanted)
        if not (wanted.folder / SCHEMA).exists():
            made.append(_write_new(wanted.folder / SCHEMA, schema_text()))
        made.append(_write_new(wanted.folder / RUN_FILE, text))
        sizes, warnings = _check_runs(made[-1], wanted)
        if sizes:
            made[-1].write_text(run_file_text(wanted, sizes), encoding="utf-8")
        copied = _copy_modules(wanted.folder)
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):  # somebody has put something there
                wanted.folder.rmdir()
        raise
    return WrittenFiles(wanted.folder / RUN_FILE, tuple(reversed(made)), copied, warnings)


def check_model(wanted: FirstFile) -> None:
    """Raise ConfigError if the model is a folder that is not there, or too small for the problems."""
    if wanted.model == MADE:
        _made_model(read_problems(wanted), wanted)
    else:
        _model_path(wanted)


def usual_reward(wanted: FirstFile) -> str:
    """Return the reward that is chosen by the form of the answers."""
    return reward_of_source(wanted, find_source(wanted) if wanted.tasks else "", read_problems(wanted))


def held_out_count(wanted: FirstFile) -> int:
    """Return how many problems would be held out; 0 if they cannot be divided."""
    return _num_held_out(wanted, find_source(wanted), read_problems(wanted)) if wanted.tasks else 0


def run_file_text(wanted: FirstFile, sizes: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return the text of the run file. The problems are opened to read their fields. `sizes` are sections with settings
    that fit the machine."""
    source = find_source(wanted)
    columns = find_columns(wanted, source)
    problems = open_problems(wanted, source, columns)
    reward = wanted.reward or reward_of_source(wanted, source, problems)
    check_given(wanted, source, reward)
    name = "sums" if not wanted.tasks else _taskset_name(source)
    is_made = wanted.model == MADE
    _, system, pattern = FORMATS[wanted.answer_format]
    asked = [f"system = {_text(system)}"] if system else []
    steps = wanted.steps or (250 if is_made else 100)
    evaluated = ["sampling = { temperature = 1.0 }"] if is_made else []
    section = partial(_section, source, columns, wanted.environment, reward)
    paragraphs = [
        [f"#:schema ./{SCHEMA}"],
        ["# Made by `rftstream init`. `rftstream explain KEY` says what a setting means, e.g. trainer.lr."],
        ["[run]", f"name = {_text(wanted.name)}", f"steps = {steps}"],
        _made_model(problems, wanted) if is_made else ["[model]", f"path = {_text(_model_path(wanted))}"],
    ]
    if count := _num_held_out(wanted, source, problems):
        shuffled = "shuffle_seed = 0, " if "shuffle_seed" in _options(source) else ""
        paragraphs += [
            [*section(f"tasksets.{name}", options=f"{shuffled}skip = {count}"), *asked],
            [
                *section("evaluations.held-out", options=f"{shuffled}size = {count}"),
                *asked,
                "every = 20",
                *evaluated,
            ],
        ]
        if _repeats(problems, count):
            why = "# some stand there twice: so none is both trained on and held out"
            paragraphs.append(
                ["[[pipeline]]", 'op = "dedupe"             ' + why, "similarity = 1            # equal prompts"]
            )
    else:
        paragraphs.append([*section(f"tasksets.{name}"), *asked])
    if not wanted.tasks:
        head, *rest = section(f"evaluations.{name}")
        about = "# the sums that are trained on: so small a model learns each by heart"
        paragraphs.append([f"{head}  {about}", *rest, "every = 50", "n = 4", "k = [1, 4]", *evaluated])
    if reward == "exact" and pattern:
        paragraphs.append(["[rewards.exact]", f"extract = {_text(pattern)}"])
    paragraphs += _training(wanted, problems, sizes)
    if wanted.servers:
        paragraphs.append(["[transport]", 'kind = "kafka"', f"servers = {_text(wanted.servers)}", "partitions = 8"])
        paragraphs.append(["# [weights]                # where hosts share no folder", '# store = "s3://BUCKET/{run}"'])
    return "\n\n".join("\n".join(lines) for lines in paragraphs) + "\n"


def _num_held_out(wanted: FirstFile, source: str, problems: Sequence[Problem]) -> int:
    """Return how many of the problems are evaluated and not trained on: a tenth, if the source can be split and has
    enough."""
    divides = bool(wanted.tasks) and {"skip", "size"} <= _options(source) and len(problems) >= LEAST_DIVIDED
    if not divides:
        return 0
    if wanted.held_out is not None:
        return round(len(problems) * wanted.held_out)
    return min(MOST_HELD_OUT, int(len(problems) * HELD_OUT_SHARE))


def _repeats(problems: Sequence[Problem], held_out: int) -> bool:
    """Return whether prompts come again, and most of the problems are left without these. If few are left, problems
    with one prompt differ in something else."""
    different = len({question_hash(problem.messages) for problem in problems})
    return different < len(problems) and different - held_out >= len(problems) / 2


def _options(source: str) -> set[str]:
    """Return the names of the settings that the source has."""
    spec = registry.table("taskset").get(source.partition(":")[0])
    return set() if spec is None else {field.name for field in config_fields(spec.path)}


def _section(
    source: str, columns: Mapping[str, str], environment: str, reward: str, key: str, *, options: str = ""
) -> list[str]:
    given = ", ".join(f"{ours} = {_text(theirs)}" for ours, theirs in columns.items())
    return [
        f"[{key}]",
        f"source = {_text(source)}",
        *([f"columns = {{ {given} }}"] if columns else []),
        *([f"environment = {_text(environment)}"] if environment else []),
        f"reward = {_text(reward)}",
        *([f"options = {{ {options} }}"] if options else []),
    ]


def _made_model(problems: Sequence[Problem], wanted: FirstFile) -> list[str]:
    """Return the section of a model that has a token for every character of the problems; beside an environment, whose
    replies nobody knows, for all of ASCII."""
    replies = [string.digits + string.ascii_letters + string.punctuation + " \n"] if wanted.environment else []
    texts = [*map(_prompt, problems), *(problem.answer or "" for problem in problems), *replies]
    characters = "".join(sorted(set("".join(texts))))
    longest = max((len(_prompt(problem)) for problem in problems), default=0)
    context = max(longest + _most_tokens(problems), MOST_CONTEXT if wanted.environment else 0)
    has_images = any(message.media for problem in problems for message in problem.messages)
    if len(characters) > MOST_CHARACTERS or context > MOST_CONTEXT or has_images:
        raise ConfigError(
            f"--model: these problems have {len(characters):,} different characters, up to {context:,} characters with "
            f"their answers{', and images' if has_images else ''}: too much for a small "
            f"made model (at most {MOST_CHARACTERS} and {MOST_CONTEXT}, and text alone); name a model: "
            "--model FOLDER-OR-NAME"
        )
    return [
        "[model]",
        'dtype = "float32"',
        "",
        "[model.make]               # a small model with random weights and one token per character; instead of it:",
        f'{f"characters = {_text(characters)}":<26} # [model] path = "a/Hugging/Face/folder"',
        f"context = {context}",
    ]


def _training(wanted: FirstFile, problems: Sequence[Problem], sizes: Mapping[str, Any]) -> list[list[str]]:
    if wanted.model == MADE:
        return [
            [
                "[sampling]",
                f"max_tokens = {_most_tokens(problems) * (MADE_TURNS if wanted.environment else 1)}",
                "temperature = 1.4          # explores more than evaluations, which sample at 1",
            ],
            [*_feeder(32), "max_staleness = 1          # versions between sampling and training"],
            ["[explorer]", "max_concurrent = 512"],
            [
                "[trainer]",
                f"algorithm = {_text(wanted.algorithm)}",
                "lr = 1.5e-3",
                'lr_schedule = "cosine"',
                "adam_betas = [0.9, 0.99]",
            ],
            *_algorithm_section(wanted.algorithm),
        ]
    return [
        ["[sampling]", "max_tokens = 512           # of a whole answer"],
        _feeder(8),
        [
            "[trainer]",
            f"algorithm = {_text(wanted.algorithm)}",
            sizes.get(LEARNING_RATE, "lr = 1e-6"),
            *_device("device", wanted.device),
            *_sized(sizes.get(RoleName.trainer, {})),
        ],
        *(
            [["[explorer]", *_device("devices", wanted.device), *_sized(sizes.get(RoleName.explorer, {}))]]
            if wanted.device or RoleName.explorer in sizes
            else []
        ),
        *([["[backends.torch]", *_sized(sizes["backends"]["torch"])]] if "backends" in sizes else []),
        *([["[weights]", *_sized(sizes["weights"])]] if "weights" in sizes else []),
    ]


def _sized(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {json.dumps(value)}   # fits this machine" for key, value in settings.items()]


def _device(key: str, device: str) -> list[str]:
    value = f"[{_text(device)}]" if key == "devices" else _text(device)
    return [f"{key} = {value}"] if device else []


def _algorithm_section(algorithm: str) -> list[list[str]]:
    """Return the section of the algorithm. Its settings keep samples of an older version from pushing a token down
    twice, and keep right answers of the greatest allowed length from counting as too long."""
    spec = registry.table("algorithm").get(algorithm)
    known = {} if spec is None else {one.name: one for one in config_fields(spec.path)}
    lines = []
    # With greedy answers as the baseline, the mask would drop a third of the tokens, and less would be learned.
    if "sequence_mask" in known and not (isinstance(spec, AlgorithmSpec) and spec.greedy_baseline):
        about = "# what is wrong and has become unlikelier since it was sampled is not pushed down again"
        lines.append(f"sequence_mask = 1e-4       {about}")
    share = known.get("overlong_share")
    if share is not None and share.default is not None and evaluate(share.default, share.module):
        lines.append("overlong_share = 0.0       # right answers are as long as max_tokens allows")
    return [[f"[algorithms.{algorithm}]", *lines]] if lines else []


def _feeder(groups: int) -> list[str]:
    return [
        "[feeder]",
        f"groups_per_batch = {groups:<6}  # problems in a batch",
        "group_size = 8             # rollouts of each",
    ]


def _prompt(problem: Problem) -> str:
    return "".join(message.content for message in problem.messages)


def _most_tokens(problems: Sequence[Problem]) -> int:
    """Return the tokens that a made model gets: for the longest answer, its end, and a quarter more."""
    longest = max(len(problem.answer or "") for problem in problems) or WITHOUT_ANSWER
    return longest + 1 + longest // 4


def _taskset_name(source: str) -> str:
    scheme, _, place = source.partition(":")
    return re.sub(r"[^a-z0-9_-]+", "-", (Path(place).stem or scheme).lower()).strip("-") or "tasks"


# ---------------------------------------------------------------------------------------------------------- files


def _usual_name(folder: Path) -> str:
    return re.sub(r"[^a-z0-9_-]+", "-", folder.resolve().name.lower()).strip("-_") or "first"


def _model_path(wanted: FirstFile) -> str:
    """Return a folder relative to the run file, or a name on the hub unchanged."""
    path = Path(wanted.model).expanduser()
    if path.is_dir():
        return relative_to(path, wanted.folder)
    if wanted.model.startswith((".", "/", "~")):
        raise ConfigError(f"--model: {wanted.model}: no such folder, expected a Hugging Face model folder or a name")
    return wanted.model


def check_free(wanted: FirstFile) -> None:
    """Raise ConfigError if a file that would be written exists."""
    for name in (RUN_FILE, *([] if wanted.tasks else [SAMPLE])):
        path = wanted.folder / name
        if path.exists():
            hint = f"name it with --tasks {path}" if name == SAMPLE else f"`rftstream check {path}` looks at it"
            raise ConfigError(f"{path}: exists already, and is not written over; {hint}, or name another folder")


def _write_new(path: Path, text: str) -> Path:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    return path


def _check_runs(run_file: Path, wanted: FirstFile) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Check the file as `rftstream check` does, except the broker, which may not be running yet. Return the sizes that
    fit this machine, by section, none for a made model; and the warnings about the problems."""
    config = loader.load([run_file], env={})
    report = check(loader.replace(config, transport__kind="embedded", transport__servers=None))
    if not report.ok:
        found = "; ".join(_told_once(report.errors)).replace(
            NAME_ANSWER, "say which column has it, --column answer=NAME"
        )
        raise ConfigError(f"nothing is written, since it would not run: {found}")
    _check_answers(wanted, config)
    warnings = _told_once(one for one in report.warnings if one.startswith(("tasksets.", "evaluations.")))
    if config.model.make is not None:
        return {}, (*warnings, KNOWS_NOTHING) if config.model.make.context > MOST_LEARNED else warnings
    sizes = fitting_sizes(read_machine(), config, report)
    is_small = report.disk is not None and 0 < (report.disk.parameters or 0) < SMALL_PARAMETERS
    return {**sizes, LEARNING_RATE: SMALL_RATE} if is_small else sizes, warnings


def _told_once(sentences: Iterable[str]) -> tuple[str, ...]:
    """Return the sentences, without those of an evaluation that are true of the taskset, too."""
    said: dict[str, str] = {}
    for one in sorted(sentences, key=lambda one: one.startswith("evaluations.")):
        said.setdefault(re.sub(r"^(tasksets|evaluations)\.[^.:]+[.:]|\d+", "", one), one)
    return tuple(said.values())


def _check_answers(wanted: FirstFile, config: RunConfig) -> None:
    """Raise ConfigError if the reward is a function of the answer, and no column is known to be the answer."""
    if columns := without_answer(wanted):
        section = next(iter(config.tasksets.values()))
        for one in build_reward(section.reward, config, section=section).rewards:
            if isinstance(one, FunctionReward) and "answer" in one.required:
                raise ConfigError(
                    f"--tasks: {wanted.tasks}: found the columns {', '.join(columns)}, and none that is called like an "
                    f"answer, which {one.name} takes; say which it is, --column answer=NAME"
                )


def _copy_modules(folder: Path) -> tuple[Path, ...]:
    """Copy the user's modules from the current folder beside the run file, so that it runs from any folder. Return the
    copies. Packages are left where they are, since a part of one may need the rest."""
    here, folder = Path.cwd().resolve(), folder.resolve()
    modules = find_modules(loader.load([folder / RUN_FILE], env={}))
    found = [module.file for module in modules if module.file.is_relative_to(here) and module.file.parent != folder]
    if any(file.parent != here for file in found):
        return ()
    return tuple(Path(shutil.copyfile(file, folder / file.name)) for file in found if not (folder / file.name).exists())


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
