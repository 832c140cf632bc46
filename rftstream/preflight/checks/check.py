"""`rftstream check`: everything about a run file that can be found out without starting the run.

It builds each part's Config, opens every taskset, starts its environment, renders prompts, builds rewards, and
estimates what the run will need. All errors are collected, so that one report shows them all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rftstream.config.colocation import check_colocation
from rftstream.config.data_pipelines.pipelines import operator_places
from rftstream.config.loader import sampling_for
from rftstream.config.parts import registry
from rftstream.config.parts.reward_uses import reward_formula, reward_uses
from rftstream.config.sections import EvaluationSection, RunConfig, TasksetSection, name_of_part
from rftstream.config.stages import Stages
from rftstream.contracts.tasks import Problem
from rftstream.data.operators.problems import skipped_problems
from rftstream.data.tasksets.base import Taskset, question_hash
from rftstream.data.tasksets.open import grows, open_taskset
from rftstream.errors import ConfigError, RftError
from rftstream.models.chat_template import GIVEN
from rftstream.models.classifiers import HeldClassifier
from rftstream.models.folders.folder import FAKE, for_section, prepare_model
from rftstream.models.folders.special_tokens import SPECIAL_NAMES
from rftstream.models.vision.image_tokens import images_of
from rftstream.preflight.checks.advice import find_warnings
from rftstream.preflight.checks.check_demonstrations import demonstrations_line
from rftstream.preflight.checks.check_environments import Beginning, begin_once
from rftstream.preflight.checks.check_report import CheckReport, PartLine, TasksetLine
from rftstream.preflight.checks.check_resources import disk_of, look_at_topics, memory_of
from rftstream.preflight.checks.check_rewards import (
    check_columns,
    check_given,
    doubts_about_length,
    doubts_about_room,
    is_given,
    problem_name,
)
from rftstream.preflight.checks.dependencies import isolations, reward_server_warnings, sandbox_warnings
from rftstream.preflight.checks.plays import as_seen, doubts_about_rewards
from rftstream.preflight.checks.reference_scores import MAX_SCORED, score_references
from rftstream.preflight.checks.rendering import Rendering
from rftstream.preflight.checks.templates import doubts_about_tools, first_break
from rftstream.preflight.estimate import estimate_seconds
from rftstream.preflight.memory import memory_warnings
from rftstream.preflight.plan import Purpose, plan
from rftstream.preflight.readiness import check_computed
from rftstream.queries.formatting import plural
from rftstream.rewards.resolve import build_reward
from rftstream.roles.explorer.concurrency import concurrency_controller
from rftstream.runs.making.init_from import is_unfetched

RENDERED_PROMPTS = 1_000
"""Prompts of each taskset that are always rendered. Further prompts are rendered if their bytes may make them too long,
or if they have a new character, which the tokenizer may not know."""

TEMPLATE_TOKENS = 32
"""Upper bound for the tokens that a chat template adds per message, beside those that it adds to an empty one. With it,
a prompt's bytes bound its tokens."""

NO_STOP = (
    "model: no token ends a turn, since neither its tokenizer nor its generation_config.json names one, so that every "
    "completion goes on to max_tokens; set eos_token_id in generation_config.json"
)


def check(config: RunConfig, doing: Callable[[str], None] = lambda phase: None) -> CheckReport:
    """Check a run file, and return the findings. Errors in the file are findings, and nothing is raised for them.
    `doing` is called with the name of each phase before it begins."""
    report = CheckReport(run=config.run.name)
    collect = _Collector(report.errors)
    with collect("stages"):
        report.stages = list(Stages.of(config).all) if config.stages else []
    sections: list[tuple[str, TasksetSection | EvaluationSection]]
    sections = [*config.tasksets.items(), *config.evaluations.items()]
    with tempfile.TemporaryDirectory(prefix="rftstream-check-") as scratch:
        doing("devices, parts and places")
        planned = plan(config, Purpose.report, scratch=Path(scratch))
        config, report.devices = planned.config, planned.placement.to_text()
        report.parts = list(_parts(config))
        with collect("trainer.colocate"):
            check_colocation(config)
        with collect("explorer.max_concurrent"):
            concurrency_controller(config.explorer)
        report.modules = list(planned.modules)
        report.errors += [problem.found for problem in planned.problems]
        rendering = None
        skipped, fault = _skipped(config)
        doing("the model's tokenizer and template")
        with suppress(RftError) if is_unfetched(config, Path(scratch) / "model") else collect("model"):
            report.model = prepare_model(config.model, Path(scratch) / "model", config.run.seed, weights=False)
            rendering = Rendering.of(report.model)
            report.context = rendering.context
            if not rendering.renderer.stop_token_ids:
                report.warnings.append(NO_STOP)
            report.warnings += check_computed(config, report.model)
        for name, section in sections:
            doing(f"the {_kind_of(section)} {name}: its problems, environment and reward")
            report.tasksets.append(_taskset(config, name, section, rendering, collect, skipped))
        if fault is not None and not report.errors:
            with collect("pipeline"):
                raise fault
        with collect("experts"):
            report.demonstrations = demonstrations_line(
                config, report.model, rendering.text if rendering is not None else str
            )
        shown_questions = set() if report.demonstrations is None else report.demonstrations.asked
        trained: dict[int, set[int | None]] = {question: {None} for question in shown_questions}
        for question, hidden in (one for line in report.tasksets if line.kind == "taskset" for one in line.asked or ()):
            trained.setdefault(question, set()).add(hidden)
        for line in report.tasksets:
            if line.kind == "evaluation":
                line.trained = sum(
                    question in trained and (hidden is None or not trained[question].isdisjoint({None, hidden}))
                    for question, hidden in line.asked or ()
                )
        doing("memory, disk and time")
        with collect("disk"):
            report.disk = disk_of(config, report)
            report.about_s = None if report.disk is None or isolations(config) else estimate_seconds(report.disk)
        with collect("memory"):
            report.memory = memory_of(config, report)
    report.warnings += find_warnings(
        config, {line.place: line for line in report.tasksets}, report.disk, report.context
    )
    report.warnings += planned.placement.warnings()
    report.warnings += planned.notes
    report.warnings += memory_warnings(report.memory)
    report.warnings += sandbox_warnings(config)
    report.warnings += reward_server_warnings(config)
    if not any(error.startswith("transport") for error in report.errors):
        doing("the log")
        problems, report.no_answer = look_at_topics(config)
        report.errors += problems
        report.warnings += [report.no_answer] if report.no_answer else []
    report.warnings += dict.fromkeys(sentence for line in report.tasksets for sentence in line.advice)
    shown = "" if report.demonstrations is None else "leave them out of the demonstrations, "
    report.warnings += [
        f"{line.place}: {line.trained:,} of its {line.problems:,} problems are trained on, too, so it is not held out: "
        f"{shown}divide the source (options.skip, options.size), no repeats ([[pipeline]] op = 'dedupe'), or rename it"
        for line in report.tasksets
        if line.trained and "held" in line.name
    ]
    return report


def _skipped(config: RunConfig) -> tuple[Mapping[str, frozenset[int]], Exception | None]:
    """Return the problems that no operator lets through, and why that is not known. A part or taskset that cannot be
    used is reported in its own place."""
    try:
        return skipped_problems(config), None
    except Exception as error:  # own modules may raise anything
        return {}, error


class _Collector:
    """Turns errors inside `with collect(where):` into lines of the report.

    If the same error comes with and without its section, the line with the section stays.
    """

    def __init__(self, errors: list[str]) -> None:
        self._errors = errors

    @contextmanager
    def __call__(self, where: str) -> Iterator[None]:
        try:
            yield
        except RftError as error:
            text = str(error)
            if not any(known.endswith(text) for known in self._errors):
                self._errors[:] = [*(known for known in self._errors if not text.endswith(known)), text]
        except Exception as error:  # own modules may raise anything
            self._errors.append(f"{where}: {type(error).__name__}: {error}")


# --------------------------------------------------------------------------------------------- parts


def _parts(config: RunConfig) -> Iterator[PartLine]:
    """Yield each selected part with its settings. A part that cannot be used is left out, and reported as an error."""
    names = [
        ("policy", config.explorer.policy),
        ("policy", config.evaluator.policy or config.explorer.policy),
        ("backend", config.trainer.backend),
    ]
    yield PartLine(kind="transport", name=config.transport.kind, settings="")
    for kind, name in dict.fromkeys(names):
        with suppress(RftError):
            yield PartLine(kind=kind, name=name, settings=_settings(config.build_part(kind, name)[1]))
    yield from dict.fromkeys(_environments(config))
    for place in operator_places(config):
        with suppress(RftError):
            options = place.build_config()[1]
            yield PartLine(kind=f"operator {place.where}", name=place.name, settings=_settings(options))
    for where, named in config.algorithms_named().items():
        with suppress(RftError):
            options = config.build_algorithm(where)[1]
            kind = "algorithm" if where == "trainer.algorithm" else f"algorithm of {where.removesuffix('.algorithm')}"
            yield PartLine(kind=kind, name=name_of_part(named, where), settings=_settings(options))


def _environments(config: RunConfig) -> Iterator[PartLine]:
    """Yield the environment of each taskset and evaluation. Environments with settings of their own name their taskset
    or evaluation."""
    for where, named in config.environments_named().items():
        kind = "environment" if isinstance(named, str) else f"environment of {where.removesuffix('.environment')}"
        with suppress(RftError):
            options = config.build_environment(where)[1]
            yield PartLine(kind=kind, name=name_of_part(named, where), settings=_settings(options))


def _settings(options: Any) -> str:
    """Return `a=1, b=2` for `Config(a=1, b=2)`."""
    return "" if options is None else repr(options).partition("(")[2].removesuffix(")")


# --------------------------------------------------------------------------------------------- tasksets


def _kind_of(section: TasksetSection | EvaluationSection) -> str:
    """Return what a section defines: a taskset or an evaluation."""
    return "taskset" if isinstance(section, TasksetSection) else "evaluation"


def _taskset(
    config: RunConfig,
    name: str,
    section: TasksetSection | EvaluationSection,
    rendering: Rendering | None,
    collect: _Collector,
    skipped: Mapping[str, frozenset[int]],
) -> TasksetLine:
    kind = _kind_of(section)
    line = TasksetLine(
        name=name, source=section.source, kind=kind, reward=reward_formula(reward_uses(section.reward, name))
    )
    line.asked = [] if config.evaluations else None
    reward = None
    with collect(f"{line.place}.reward"):
        check_given(line.place, section)
        reward = build_reward(section.reward, config, where=f"{line.place}.reward", section=section)
        found = (getattr(one, "held", None) for one in reward.rewards)
        line.held += [one for one in found if isinstance(one, HeldClassifier)]
    with collect(line.place):
        taskset = open_taskset(name, section, config)
        line.grows = grows(section.source)
        if line.grows:
            return line
        line.problems = len(taskset)
        if isinstance(section, EvaluationSection) and section.num_tasks is not None:
            line.problems = min(len(taskset), section.num_tasks)
        line.skipped = skipped.get(name, frozenset()) if kind == "taskset" else frozenset()
        if 0 < line.problems == len(line.skipped):
            line.advice.append(f"{line.place}: the pipeline leaves all of its {line.problems:,} problems out")
        line.first_problem = problem = taskset.problem(0)
        others = [taskset.problem(index) for index in range(1, min(line.problems, MAX_SCORED))]
        begun = begin_once(config, section.environment, problem, f"{line.place}.environment", others)
        line.plays, line.is_given = list(begun.plays), is_given(section)
        line.advice += begun.doubts
        if line.is_given:
            line.advice += doubts_about_rewards(f"{line.place}.environment", line.plays)
        line.tools = tuple(str(tool.get("function", tool).get("name")) for tool in begun.tools)
        if rendering is not None:
            if (own := for_section(rendering.spec, section)) is not rendering.spec:
                rendering = Rendering.of(own)
            with _problem(line.place, taskset, 0):
                line.first = rendering.prompt(begun.messages, begun.tools)
                _refuse_empty(line.first.token_ids)
            _see_longest(line, begun, rendering)
            line.one_turn = begun.has_one_turn
            line.turns = first_break(rendering.renderer, begun.messages, begun.tools)
            line.advice += _template_advice(line, rendering, section)
            if begun.tools and rendering.spec.name != FAKE:
                is_shown = config.experts is not None and config.experts.source is not None
                doubts = doubts_about_tools(rendering.renderer, begun.messages, begun.tools, is_shown=is_shown)
                line.advice += [f"{line.place}: {doubt}" for doubt in doubts]
            too_long = section.too_long if isinstance(section, TasksetSection) else "truncate"
            _measure(line, taskset, rendering, begun.tools[len(problem.tools) :], too_long)
            line.advice += _control_advice(line)
    if reward is not None and line.first_problem is not None:
        with collect(f"{line.place}.reward"):
            line.advice += check_columns(line.place, reward, taskset, line.kept)
            most = sampling_for(config, section.sampling, where=f"{line.place}.sampling").max_tokens
            line.advice += doubts_about_length(line.place, reward, most)
            if kind == "taskset":
                kept = line.kept
                tried = min(MAX_SCORED, len(kept))  # from all of the data: kinds of problems often lie together
                problems = [taskset.problem(kept[one * len(kept) // tried]) for one in range(tried)]
                line.scores = score_references(reward, section.reward, problems)
                if line.scores is not None and line.scores.always_fails:
                    raise ConfigError(f"{line.place}.reward: {' '.join(line.scores.doubts())}")
                if line.scores is not None:
                    line.advice += [f"{line.place}.reward: {doubt}" for doubt in line.scores.doubts()]
                    if line.scores.reference and not line.scores.less and rendering is not None:
                        line.advice += doubts_about_room(line.place, problems, rendering.renderer, most)
    return line


def _see_longest(line: TasksetLine, begun: Beginning, rendering: Rendering) -> None:
    """Render the longest play as the model will see it, and compare it with the context."""
    answered = [play for play in begun.plays if any(not reply.done for reply in play.replies)]
    if not answered:
        return
    play = max(answered, key=lambda play: play.num_turns)
    try:
        seen = line.seen = as_seen(rendering.renderer, begun.messages, begun.tools, play)
    except ConfigError as error:
        line.advice.append(f"{line.place}.environment: what it replies cannot be rendered: {error}")
        return
    if rendering.context is not None and seen.num_tokens >= rendering.context:
        line.advice.append(
            f"{line.place}.environment: {plural(seen.num_turns, 'turn')} of it have {seen.num_tokens:,} tokens, and "
            f"the context is {rendering.context:,}: rollouts will be cut off; raise model.context, or let it say less"
        )


def _measure(
    line: TasksetLine, taskset: Taskset, rendering: Rendering, tools: Sequence[Mapping[str, Any]], too_long: str
) -> None:
    """Look at every problem. Render the first ones, all that may be too long, and those with new characters. `tools`
    are the tools that the environment offers beside a problem's own."""
    line.too_long_means = {"skip": "left out", "truncate": "cut from the left"}.get(too_long, "")
    context, added = rendering.context, rendering.added(tools)
    characters: set[str] = set()
    as_given = None if line.first_problem is None else line.first_problem.messages
    is_as_given = line.first is not None and line.first.messages == as_given
    for index in range(line.problems):
        problem = taskset.problem(index)
        if line.asked is not None and index not in line.skipped:
            hidden = None if line.one_turn else hash((problem.answer, repr(problem.info)))
            line.asked.append((question_hash(problem.messages), hidden))
        bound = added + sum(len(message.content.encode()) + TEMPLATE_TOKENS for message in problem.messages)
        if (shown := len(images_of(problem.messages))) and (tokens := rendering.renderer.images) is not None:
            bound += sum(map(tokens.count, images_of(problem.messages)))
        brings_new = rendering.is_closed and _brings_new(characters, problem)
        is_seen = not shown or rendering.renderer.images is not None
        short = (
            (context is None or bound < context) and is_seen and any(message.content for message in problem.messages)
        )
        if (name := rendering.control_in(problem)) is not None:
            line.controls.append((index, name))
        if index >= RENDERED_PROMPTS and not problem.tools and short and not brings_new:
            continue
        with _problem(line.place, taskset, index):
            token_ids = rendering.renderer.render(problem.messages, (*problem.tools, *tools))
            if is_as_given:
                _refuse_empty(token_ids)
        length = len(token_ids)
        line.num_rendered += 1
        if rendering.unknown in token_ids:
            line.unknown.append(index)
        if context is None or length < context or too_long == "truncate":
            line.longest = max(line.longest, length)
        if context is None or length < context:
            continue
        line.too_long += 1
        if too_long == "error":
            raise ConfigError(
                f"{line.place}: {problem_name(taskset, index)} has a prompt of {length} tokens, expected fewer than "
                f"the context of {context}; shorten it, raise model.context, or set too_long to 'skip' or 'truncate'"
            )
    if line.too_long == line.problems and too_long == "skip":
        raise ConfigError(f"{line.place}: every prompt is longer than the context of {context}, so nothing is left")


def _refuse_empty(token_ids: Sequence[int]) -> None:
    if not token_ids:
        raise ConfigError(
            "the prompt has no tokens, expected at least one to sample after; leave the row out, or use a chat "
            "template that writes something around a message"
        )


@contextmanager
def _problem(place: str, taskset: Taskset, index: int) -> Iterator[None]:
    """Name the problem in errors of rendering it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}: {problem_name(taskset, index)}: {error}") from None


def _brings_new(known: set[str], problem: Problem) -> bool:
    """Return whether the problem has unknown characters, and add them to the known ones."""
    new = [message.content for message in problem.messages if not known.issuperset(message.content)]
    known.update(*new)
    return bool(new)


def _control_advice(line: TasksetLine) -> Iterator[str]:
    if line.controls:
        index, name = line.controls[0]
        yield (
            f"{line.place}: {plural(len(line.controls), 'problem')} with names of special tokens in the text, the "
            f"first {name!r} in problem {index}; they become these tokens, as in transformers, so that a text may end "
            "a turn or begin another one; take them out where nobody means them"
        )


def _template_advice(
    line: TasksetLine, rendering: Rendering, section: TasksetSection | EvaluationSection
) -> Iterator[str]:
    renderer, outside = rendering.renderer, {*GIVEN, *SPECIAL_NAMES, "raise_exception", "strftime_now"}
    for name in rendering.spec.chat_template_kwargs:
        if name not in renderer.names:
            place = line.place if name in section.chat_template_kwargs else "model"
            known = registry.suggest(name, sorted(renderer.names - outside))
            yield f"{place}.chat_template_kwargs.{name}: the template does not use it; {known}"
    if line.first is not None and line.first.messages[-1].role == "assistant":
        yield (
            f"{line.place}: the first prompt ends with a turn of the assistant; if that is the solution, name what "
            'comes before it, e.g. columns = { prompt = "messages.0.content" }'
        )
    if renderer.dated:
        yield (
            f"{line.place}: the chat template puts the date in, so that a problem has another prompt tomorrow; give it "
            "a fixed one in chat_template_kwargs, if it takes one, or use another template"
        )
    if line.turns is not None and not line.one_turn:
        yield (
            f"{line.place}: the chat template breaks rollouts of several turns into segments: {line.turns}. Each "
            "segment has its whole prompt, which is computed anew; use another template (model.chat_template), or see "
            "'Exact tokens over turns' in docs/environments.md"
        )
