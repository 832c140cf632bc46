"""Checks whether the problems of a taskset have the fields that its reward needs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from textwrap import shorten

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import EnvironmentSpec, RewardSpec
from rftstream.config.parts.reward_uses import reward_uses
from rftstream.config.sections import EvaluationSection, TasksetSection, name_of_part
from rftstream.contracts.tasks import Problem
from rftstream.data.tasksets.base import Taskset
from rftstream.errors import ConfigError, RewardError
from rftstream.models.rendering import Renderer
from rftstream.rewards.base import NAME_ANSWER, Reward, RewardInput, Score, problem_input
from rftstream.rewards.composite import CompositeReward
from rftstream.rewards.event_loop import caught
from rftstream.rewards.functions import FunctionReward

LOOKED_AT = 1_000
"""Problems of each taskset that are checked, from the first on."""
MAX_REFERENCES = 3
"""Most right answers of a problem that are tried. Some data sets have hundreds, in several versions of a language."""
MAX_NAMED = 5
"""Most problems that are named whose right answers do not pass."""
NO_ANSWERS = ("", "nan", "<na>")
"""Answers, in small letters, that stand for none; pandas writes the latter two."""
REFERENCES_S = 30.0
"""Seconds after which the right answers of further problems are not scored."""


def check_given(place: str, section: TasksetSection | EvaluationSection) -> None:
    """Raise ConfigError if the reward is the one that the environment gives, and this environment never gives one."""
    environment = name_of_part(section.environment, f"{place}.environment")
    if is_given(section) and not registry.find_spec(EnvironmentSpec, environment).gives_reward:
        raise ConfigError(
            f"{place}.reward: 'environment' takes what the environment gives, and {environment!r} never gives "
            "a reward: no rollout could be scored; name another reward, or an environment that gives one"
        )


def is_given(section: TasksetSection | EvaluationSection) -> bool:
    """Return whether the reward is, or contains, the one that the environment gives."""
    uses = reward_uses(section.reward, "reward")
    return any(registry.find_spec(RewardSpec, use.name).takes_given and use.use != "check" for use in uses)


def check_columns(place: str, reward: CompositeReward, taskset: Taskset, indices: Iterable[int]) -> list[str]:
    """Return doubtful findings about the problems `indices`, in sentences that begin with `place` (tasksets.NAME).
    ConfigError if the reward can score none of these problems."""
    looked_at = list(islice(indices, LOOKED_AT))
    problems = [taskset.problem(index) for index in looked_at]

    def called(number: int) -> str:
        return problem_name(taskset, looked_at[number])

    column = getattr(taskset, "chat_column", lambda: None)()  # the user's own tasksets need not know their columns
    return [
        sentence
        for one in reward.rewards
        for sentence in (
            *_doubts(place, one, problems, called),
            *_doubts_about_form(place, one, column),
            *_doubts_of_reward(place, one, problems),
            *_doubts_about_references(place, one, problems, called),
        )
    ]


def problem_name(taskset: Taskset | None, index: int) -> str:
    """Return the number of a problem, with the file's line or row where it comes from one: `skip` and `shuffle_seed`
    make these differ."""
    where = getattr(taskset, "where", None)
    return f"problem {index}" if where is None else f"problem {index} ({where(index)})"


def check_needs(place: str, reward: CompositeReward, problems: Sequence[Problem]) -> None:
    """Raise ConfigError if the reward can score none of these problems, since they lack a field that it needs."""
    for one in reward.rewards:
        list(_doubts(place, one, problems, partial(problem_name, None)))


def doubts_about_length(place: str, reward: CompositeReward, max_tokens: int) -> list[str]:
    """Return a sentence for each reward that cannot read a completion of up to `max_tokens` tokens."""
    contexts = [context for one in reward.rewards if (context := getattr(one, "context", None)) is not None]
    return [
        f"{place}.reward: reads conversations of up to {context:,} tokens, and completions alone may have "
        f"{max_tokens:,} (sampling.max_tokens): longer ones will have no reward; see its too_long, or lower max_tokens"
        for context in contexts
        if context <= max_tokens
    ]


def doubts_about_room(place: str, problems: Sequence[Problem], renderer: Renderer, max_tokens: int) -> list[str]:
    """Return sentences if answers that are right as they stand are longer than a completion may be, or have characters
    that the model cannot say."""
    answers = [problem.answer for problem in problems if problem.answer is not None]
    lengths, unsayable = [], []
    for answer in answers:
        try:
            lengths.append(len(renderer.encode(answer)))
        except ConfigError as error:
            unsayable.append((answer, error))
    found = []
    if unsayable:
        answer, refused = unsayable[0]
        found.append(
            f"{place}: the model cannot say the answers of {len(unsayable):,} of {len(answers):,} problems tried, such "
            f"as {shorten(answer, 40, placeholder='...')!r}, and gets nothing for them unless another form is right, "
            f"too: {refused}"
        )
    if longer := [length for length in lengths if length > max_tokens]:
        found.append(
            f"{place}: the answers of {len(longer):,} of {len(answers):,} problems tried have more tokens, up to "
            f"{max(longer):,}, than a completion may have ({max_tokens:,}, sampling.max_tokens): raise it, unless "
            "shorter ones are right, too"
        )
    return found


def _doubts_about_form(place: str, reward: Reward, column: str | None) -> Iterator[str]:
    """Yield a doubt if one of TRL's functions may get texts instead of messages, or the reverse. In TRL they get the
    dataset's own form; here the name of the column decides the form."""
    if isinstance(reward, FunctionReward) and reward.gets_texts and column is not None:
        yield (
            f"{place}.reward: {reward.name} has the signature of TRL's rewards, and the column {column!r} holds "
            "messages, but prompts and completions reach it as texts; if it expects messages, as with TRL, set "
            f'columns = {{ messages = "{column}" }}'
        )


def _doubts(place: str, reward: Reward, problems: Sequence[Problem], called: Callable[[int], str]) -> Iterator[str]:
    lacks = {index: lack for index, problem in enumerate(problems) if (lack := _lack(reward, problem)) is not None}
    if lacks:
        first, lack = next(iter(lacks.items()))
        has = f"beside the prompt it has {_columns(problems[first])}"
        if len(lacks) == len(problems):
            raise ConfigError(f"{place}.reward: {lack} So it is with all {len(problems):,} looked at; {has}")
        yield (
            f"{place}.reward: {lack} So it is with {len(lacks):,} of {len(problems):,} looked at, whose rollouts will "
            f"have no reward; the first is {called(first)}, {has}"
        )
    elif _takes_answer(reward, problems[0]):
        name = getattr(reward, "name", "the reward")
        without = [index for index, one in enumerate(problems) if (one.answer or "").strip().lower() in NO_ANSWERS]
        if len(without) == len(problems):
            yield (
                f"{place}.reward: {name} takes `answer`, which is {problems[0].answer!r} in all "
                f"{len(problems):,} problems looked at; {NAME_ANSWER}; beside the prompt "
                f"the first has {_columns(problems[0])}"
            )
        elif without:
            yield (
                f"{place}: {len(without):,} of {len(problems):,} rows have no answer, the first is "
                f"{called(without[0])}; {name} gets {problems[without[0]].answer!r} for them: fill the column in, or "
                f"leave these rows out (of training by {_skipping(problems[one] for one in without)})"
            )


def _skipping(problems: Iterable[Problem]) -> str:
    """Return the operator that skips the answers of these problems, as it stands in a run file."""
    answers = {(one.answer or "").strip() for one in problems}
    rule = r"need = '\S'" if answers == {""} else rf"skip = '^\s*({'|'.join(sorted(answers))})\s*$'"
    return f"[[pipeline]] op = 'regex', field = 'answer', {rule}"


def _takes_answer(reward: Reward, problem: Problem) -> bool:
    """Return whether the reward is a function of the answer, or refuses this problem where it has none."""
    if isinstance(reward, FunctionReward):
        return "answer" in reward.required
    return _lack(reward, replace(problem, answer=None)) is not None


def _has_answer(problem: Problem) -> bool:
    return problem.answer is not None


def _doubts_of_reward(place: str, reward: Reward, problems: Sequence[Problem]) -> Iterator[str]:
    """Yield the reward's own doubts about the problems that have the needed fields."""
    if (doubts := getattr(reward, "doubts", None)) is not None:
        items = [problem_input(problem) for problem in problems if _lack(reward, problem) is None]
        yield from (f"{place}.reward: {sentence}" for sentence in doubts(items))


def _doubts_about_references(
    place: str, reward: Reward, problems: Sequence[Problem], called: Callable[[int], str]
) -> Iterator[str]:
    """Yield a doubt if problems have right answers that the reward does not accept."""
    if (references := getattr(reward, "references", None)) is None:
        return
    items = {index: problem_input(problem) for index, problem in enumerate(problems) if _lack(reward, problem) is None}
    brought = {index: found for index, item in items.items() if (found := references(item)[:MAX_REFERENCES])}
    until = time.monotonic() + REFERENCES_S

    def tried(index: int) -> tuple[int, str | None] | None:
        if time.monotonic() > until:
            return None
        return index, _reference_failure(reward, items[index], brought[index])

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        ran = [one for one in threads.map(tried, brought) if one is not None]
    failed = [(index, why) for index, why in ran if why is not None]
    if failed:
        first, why = failed[0]
        others = ", ".join(str(index) for index, _ in failed[1:MAX_NAMED])
        more = ", ..." if len(failed) > MAX_NAMED else ""
        yield (
            f"{place}.reward: the problem's own solution does not pass in {len(failed):,} of {len(ran):,} problems "
            f"tried; the first is {called(first)}: {why}{f'; then {others}{more}' if others else ''}; are its tests, "
            "its language and the limits as they should be?"
        )


def _reference_failure(reward: Reward, item: RewardInput, completions: Sequence[str]) -> str | None:
    """Return why no completion gets the reward 1, or None if one does."""
    why = ""
    for completion in completions:
        score = caught(reward, replace(item, completion=completion))
        if isinstance(score, BaseException):
            why = why or str(score)
        elif not isinstance(score, Score) or score.reward >= 1:
            return None
        else:
            reasons = [name for name, value in score.metrics.items() if value and name.startswith(("failed_", "no_"))]
            why = why or f"reward {score.reward:g} ({', '.join(reasons)}): {score.detail}".rstrip(": ")
    return why


def _lack(reward: Reward, problem: Problem) -> str | None:
    check = getattr(reward, "check", None)
    try:
        if check is not None:
            check(problem_input(problem))
    except RewardError as error:
        return str(error) if str(error).endswith("?") else f"{error}."
    return None


def _columns(problem: Problem) -> str:
    """Return the names of the problem's columns and of the fields inside them, as `columns` would name them."""
    names = ["answer"] if _has_answer(problem) else []
    for name, value in problem.info.items():
        names += [f"{name}.{field}" for field in value] if isinstance(value, Mapping) and value else [name]
    return ", ".join(names) if names else "nothing"
