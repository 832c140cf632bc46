"""Users' functions as rewards, called by their signature: ours, verl's and TRL's.

Which of them it is, the names of the parameters say:

    ours        anything else: `completion`, `answer`, `prompt`, `messages`, `info`, `data_source`, `num_tokens`,
                `truncated`, `completion_ids`, the problem's other columns, `**kwargs` for the rest of them; or a single
                RewardInput
    verl        `solution_str`: (data_source, solution_str, ground_truth, extra_info), by keyword, for one rollout
    verl batch  `solution_strs`: (data_sources, solution_strs, ground_truths, extra_infos), for many
    TRL         `completions`, `prompts`, `completion_ids` (or what else only TRL passes): lists over many rollouts, and
                a list for each column

The settings in `[rewards."module:function"]` are passed as further keyword arguments (verl's `reward_kwargs`). Any of
them may be `async`; the calls of an async one for single rollouts run together.

It returns a number; a dict with `reward` or `score` whose other numbers become metrics; a pair of a number and such a
dict; or a Score. Those over lists return a list of these, and TRL's may hold None: the reward does not apply to that
rollout.

Sources: verl, verl/workers/reward_manager/{naive,batch}.py, verl/experimental/reward_loop, and docs "Implement Reward
Function for Dataset"; TRL, trl/trainer/grpo_trainer.py `_calculate_rewards` and docs "GRPO Trainer, Using a custom
reward function".
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

import numpy as np

from rftstream.contracts.arrays import Array
from rftstream.errors import ConfigError, RewardError
from rftstream.rewards.base import RewardInput, Score
from rftstream.rewards.version import source_version

MAX_NUMBERS = 200
"""The most parts and metrics of one score."""

NOT_PASSED = ("num_prompt_messages", "segments")
INPUT_FIELDS = tuple(item.name for item in fields(RewardInput) if item.name not in NOT_PASSED)
OF_TRL_ALONE = frozenset({"trainer_state", "environments"})
OF_TRL = frozenset({"prompts", "completions", "completion_ids", "log_metric", "log_extra"}) | OF_TRL_ALONE

Convention = Literal["ours", "verl", "verl batch", "TRL"]
Outcome = Score | None | BaseException
"""What a reward makes of one rollout: a score, an error, or None where the reward does not apply."""


class BatchFailed(RewardError):
    """The call for several rollouts failed as a whole: each of them is to be tried alone."""


class FunctionReward:
    """A user's function as a Reward.

    `columns`: our names -> the source's; the function may name a column either way. `conversational`: the taskset's
    prompts are lists of messages, so TRL's functions get messages, else texts. As in TRL, this is a matter of the
    dataset; a problem that is more than one user message is a conversation in any case.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: Mapping[str, Any],
        *,
        where: str,
        columns: Mapping[str, str] | None = None,
        conversational: bool = False,
    ) -> None:
        self.name = where
        self._function = function
        self._options = dict(options)
        self._aliases = {theirs: ours for ours, theirs in (columns or {}).items() if ours in ("answer", "data_source")}
        self._conversational = conversational
        self.version = source_version(function, options)
        parameters = list(inspect.signature(function).parameters.values())
        named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        required = [p.name for p in named if p.default is p.empty]
        self._takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._only = required[0] if len(required) == 1 else None
        self._names = [p.name for p in named]
        self.required = set(required)
        self._positional = [p.name for p in named if p.kind is p.POSITIONAL_ONLY]
        self.convention = find_convention(self._names)
        self._over_lists = self.convention in ("verl batch", "TRL")
        calls: Any = function
        asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(calls.__call__)
        self.batched = self._over_lists or asynchronous
        unknown = set(options) - set(self._names)
        if unknown and not self._takes_rest:
            raise ConfigError(f"{where}: takes no {', '.join(sorted(unknown))}; it takes {', '.join(self._names)}")
        if self.convention == "TRL" and (lacking := (self.required & OF_TRL_ALONE) - set(options)):
            raise ConfigError(
                f"{where}: needs {', '.join(sorted(lacking))}, which only TRL's trainer has; give it a default"
            )

    def __call__(self, item: RewardInput) -> Score:
        outcome = self.score_all([item])[0]
        if outcome is None:
            raise RewardError(f"{self.name}: returned None, so it does not apply to this rollout")
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def score_all(self, items: Sequence[RewardInput]) -> list[Outcome]:
        """Return for each item its score, or what went wrong with it."""
        if not self._over_lists:
            return self._one_by_one(items)
        forms = [self._conversational or _is_conversation(item) for item in items]
        outcomes: list[Outcome] = [None] * len(items)
        for form in sorted(set(forms)):
            places = [place for place, one in enumerate(forms) if one == form]
            for place, outcome in zip(places, self._together([items[i] for i in places], form), strict=True):
                outcomes[place] = outcome
        return outcomes

    @property
    def gets_texts(self) -> bool:
        """Return whether it has TRL's signature and is given texts for prompts of a single message."""
        return self.convention == "TRL" and not self._conversational

    def check(self, item: RewardInput) -> None:
        """Raise RewardError if the problem lacks a column that the function names."""
        known = self._row(item, self._conversational) if self._over_lists else self._one(item)
        if not self._takes_item(known):
            self._check_there(known)

    # ------------------------------------------------------------------------------------------ for one rollout

    def _one_by_one(self, items: Sequence[RewardInput]) -> list[Outcome]:
        values: list[Any] = []
        for item in items:
            try:
                values.append(self._call(item))
            except (Exception, SystemExit) as error:
                values.append(error)
        if any(map(inspect.isawaitable, values)):
            values = asyncio.run(_await_all(values))
        return [self._outcome(value) for value in values]

    def _call(self, item: RewardInput) -> Any:
        known = self._one(item)
        if self._takes_item(known):
            return self._function(item, **self._options)
        self._check_there(known)
        return self._apply(known)

    def _takes_item(self, known: Mapping[str, Any]) -> bool:
        return self.convention == "ours" and self._only is not None and self._only not in known

    def _one(self, item: RewardInput) -> dict[str, Any]:
        return self._verl(item) if self.convention == "verl" else self._ours(item)

    def _ours(self, item: RewardInput) -> dict[str, Any]:
        known = {**self._columns(item), **self._options, **{name: getattr(item, name) for name in INPUT_FIELDS}}
        return {**known, "completion_ids": item.completion_ids} if "completion_ids" in self._names else known

    def _verl(self, item: RewardInput) -> dict[str, Any]:
        """verl passes these four and the settings, and nothing else to a function that takes **kwargs."""
        columns = self._columns(item)
        named = {name: columns[name] for name in self._names if name in columns}
        four = {
            "data_source": item.data_source,
            "solution_str": item.completion,
            "ground_truth": _ground_truth(item),
            "extra_info": _extra_info(item),
        }
        return {**named, **self._options, **{name: value for name, value in four.items() if value is not None}}

    def _columns(self, item: RewardInput) -> dict[str, Any]:
        return {**item.info, **{theirs: getattr(item, ours) for theirs, ours in self._aliases.items()}}

    # ------------------------------------------------------------------------------------------ for many

    def _together(self, items: Sequence[RewardInput], conversational: bool) -> list[Outcome]:
        """One call for all that have what the function needs."""
        rows = [self._row(item, conversational) for item in items]
        outcomes: list[Outcome] = [None] * len(rows)
        places = []
        for place, row in enumerate(rows):
            try:
                self._check_there(row)
                places.append(place)
            except RewardError as error:
                outcomes[place] = error
        if places:
            for place, outcome in zip(places, self._call_with([rows[i] for i in places]), strict=True):
                outcomes[place] = outcome
        return outcomes

    def _call_with(self, rows: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        names = dict.fromkeys(name for row in rows for name in row)
        known: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
        log = _Log(len(rows))
        if self.convention == "TRL":
            known |= {"log_metric": log.metric, "log_extra": log.extra}
        try:
            values = self._apply({**known, **self._options})
            if inspect.isawaitable(values):
                values = asyncio.run(_await(values))
            values = self._list_of(values, len(rows))
        except (Exception, SystemExit) as error:
            if self._expects_messages(error, known):
                error = self._hinted(error)
            return [error if len(rows) == 1 else BatchFailed(f"{self.name}: {error!r}")] * len(rows)
        return [self._outcome(value, log.metrics(place)) for place, value in enumerate(values)]

    def _expects_messages(self, error: BaseException, known: Mapping[str, Any]) -> bool:
        """Whether it may have failed because it was given texts."""
        prompts = known.get("prompts") or [None]
        return isinstance(error, TypeError | AttributeError) and isinstance(prompts[0], str)

    def _hinted(self, error: BaseException) -> RewardError:
        hinted = RewardError(
            f"{self.name}: {type(error).__name__}: {error}; prompts and completions reach it as texts; if it expects "
            'messages, set columns = { messages = "prompt" } in the taskset, with the name of the column'
        )
        hinted.__cause__ = error
        return hinted

    def _row(self, item: RewardInput, conversational: bool) -> dict[str, Any]:
        return self._verl_row(item) if self.convention == "verl batch" else self._trl_row(item, conversational)

    def _trl_row(self, item: RewardInput, conversational: bool) -> dict[str, Any]:
        """TRL passes every column of the dataset; answer and data_source go by our names, too."""
        prompt = list(item.messages[: item.num_prompt_messages])
        said = list(item.messages[item.num_prompt_messages :])
        return {
            "answer": item.answer,
            "data_source": item.data_source,
            **self._columns(item),
            "prompts": prompt if conversational else item.prompt,
            "completions": said if conversational else item.completion,
            "completion_ids": item.completion_ids,
        }

    def _verl_row(self, item: RewardInput) -> dict[str, Any]:
        row = {
            "data_sources": item.data_source,
            "solution_strs": item.completion,
            "ground_truths": _ground_truth(item),
            "extra_infos": _extra_info(item),
        }
        return {name: value for name, value in row.items() if value is not None}

    def _list_of(self, values: Any, count: int) -> list[Any]:
        if hasattr(values, "tolist"):  # an array of numpy or torch
            values = values.tolist()
        if not isinstance(values, list | tuple):
            raise RewardError(f"{self.name}: returned {type(values).__name__}, expected a list of {count} numbers")
        if len(values) != count:
            raise RewardError(f"{self.name}: returned {len(values)} values for {count} rollouts, expected {count}")
        return list(values)

    # ------------------------------------------------------------------------------------------ both

    def _check_there(self, known: Mapping[str, Any]) -> None:
        passed = _Log.NAMES if self.convention == "TRL" else ()
        if missing := self.required - known.keys() - self._options.keys() - set(passed):
            raise RewardError(
                f"{self.name}: needs {', '.join(sorted(missing))}, but the problem has only "
                f"{', '.join(sorted(known))}; is the column in the taskset?"
            )

    def _apply(self, known: dict[str, Any]) -> Any:
        positional = [known.pop(name) for name in self._positional if name in known]
        return self._function(*positional, **{k: v for k, v in known.items() if self._takes_rest or k in self._names})

    def _outcome(self, value: Any, metrics: Mapping[str, float] | None = None) -> Outcome:
        if isinstance(value, BaseException) or (value is None and self.convention == "TRL"):
            return value
        try:
            score = to_score(value, where=self.name, key="score" if self.convention.startswith("verl") else None)
            if not metrics:
                return score
            return to_score(replace(score, metrics={**metrics, **score.metrics}), where=self.name)
        except RewardError as error:
            return error


def find_convention(names: Collection[str]) -> Convention:
    """Return whose signature it is, by the names of its parameters."""
    if "solution_strs" in names:
        return "verl batch"
    if "solution_str" in names:
        return "verl"
    if "completion" not in names and not OF_TRL.isdisjoint(names):
        return "TRL"
    return "ours"


def to_score(value: Any, *, where: str, key: str | None = None) -> Score:
    """Return what a reward returned as a Score. RewardError unless it is a finite number with finite parts and metrics.

    `key` is where a dict has the reward; default: `reward`, else `score`."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        score = Score(reward=value[0], metrics=_numbers_in(value[1]))
    elif isinstance(value, Score):
        score = value
    elif isinstance(value, Mapping):
        expected = key or "reward"
        key = key or ("reward" if "reward" in value else "score")
        if key not in value:
            raise RewardError(f"{where}: returned a dict with {_some(value)}, expected {expected!r} in it")
        score = Score(reward=value[key], metrics=_numbers_in({k: v for k, v in value.items() if k != key}))
    else:
        score = Score(reward=value)
    if len(score.parts) + len(score.metrics) > MAX_NUMBERS:
        raise RewardError(f"{where}: returned more than {MAX_NUMBERS} parts and metrics; return fewer")
    return Score(
        reward=_finite(score.reward, f"{where}: reward"),
        parts={str(name)[:200]: _finite(one, f"{where}: part {name!r}") for name, one in score.parts.items()},
        metrics={str(name)[:200]: _finite(one, f"{where}: metric {name!r}") for name, one in score.metrics.items()},
        additions={
            str(name)[:200]: _array(one, f"{where}: addition {name!r}") for name, one in score.additions.items()
        },
    )


class _Log:
    """TRL's `log_metric(name, value)`, of which the mean over its calls counts, and `log_extra(column, values)`: the
    numbers in them become metrics."""

    NAMES = ("log_metric", "log_extra")

    def __init__(self, count: int) -> None:
        self._scalars: dict[str, list[float]] = {}
        self._columns: list[dict[str, Any]] = [{} for _ in range(count)]

    def metric(self, name: str, value: Any) -> None:
        self._scalars.setdefault(name, []).append(float(value))

    def extra(self, column: str, values: Sequence[Any]) -> None:
        for metrics, value in zip(self._columns, values, strict=False):
            metrics.update(_numbers_in({column: value}))

    def metrics(self, place: int) -> dict[str, Any]:
        means = {name: sum(values) / len(values) for name, values in self._scalars.items()}
        return {**means, **self._columns[place]}


async def _await(value: Awaitable[Any]) -> Any:
    return await value


async def _await_all(values: Sequence[Any]) -> list[Any]:
    """Awaits them at the same time; what one raises is its value."""

    async def one(value: Any) -> Any:
        try:
            return await value if inspect.isawaitable(value) else value
        except (Exception, SystemExit) as error:
            return error

    return await asyncio.gather(*map(one, values))


def _is_conversation(item: RewardInput) -> bool:
    return item.num_prompt_messages != 1 or len(item.messages) > 2


def _ground_truth(item: RewardInput) -> Any:
    """The answer, or where verl's own data sets have it: the column `reward_model`."""
    nested = item.info.get("reward_model")
    return nested.get("ground_truth") if item.answer is None and isinstance(nested, Mapping) else item.answer


def _extra_info(item: RewardInput) -> dict[str, Any]:
    """The column of that name, else all columns; with the number of turns, as verl adds it."""
    column = item.info.get("extra_info")
    turns = sum(message.get("role") != "system" for message in item.messages)
    return {**(column if isinstance(column, Mapping) else item.info), "num_turns": turns}


def _numbers_in(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in values.items() if isinstance(_plain(value), numbers.Real)}


def _plain(value: Any) -> Any:
    """The number in a scalar of numpy or torch; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _some(value: Mapping[Any, Any]) -> list[str]:
    return sorted(str(key)[:100] for key in value)[:20]


def _finite(value: Any, where: str) -> float:
    plain = _plain(value)
    if not isinstance(plain, numbers.Real):
        raise RewardError(f"{where}: got {type(value).__name__}, expected a number")
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{where}: got {number}, expected a finite number")
    return number


def _array(value: Any, where: str) -> Array:
    if not isinstance(value, Array):
        raise RewardError(f"{where}: got {type(value).__name__}, expected a rftstream.contracts.arrays.Array")
    try:
        numbers_found = value.numpy()
    except (TypeError, ValueError) as error:
        raise RewardError(f"{where}: its bytes are not {value.dtype} {list(value.shape)}: {error}") from None
    if numbers_found.dtype.kind == "f" and not np.isfinite(numbers_found).all():
        raise RewardError(f"{where}: holds a number that is not finite, expected finite ones")
    return value
