"""Users' functions as rewards, called by their signature: ours, verl's and TRL's.

The names of the parameters say which signature a function has:

    ours        anything else: `completion`, `answer`, `prompt`, `messages`, `info`, `data_source`, `num_tokens`,
                `truncated`, `completion_ids`, the problem's other columns, `**kwargs` for the rest of them; or a single
                RewardInput
    verl        `solution_str`: (data_source, solution_str, ground_truth, extra_info), by keyword, for one rollout
    verl batch  `solution_strs`: (data_sources, solution_strs, ground_truths, extra_infos), for many
    TRL         `completions`, `prompts`, `completion_ids` (or what else only TRL passes): lists over many rollouts, and
                a list for each column

The settings in `[rewards."module:function"]` are passed as further keyword arguments (verl's `reward_kwargs`). Any
function may be `async`. The calls of an async function for single rollouts run at the same time. All calls of a process
run in one event loop, so an aiohttp or httpx session that a module keeps stays usable (rewards/event_loop.py).

A function returns a number; a dict with `reward` or `score`, whose other numbers become metrics, and maybe `roles`, the
rewards of the agents of one episode; a pair of a number and such a dict; or a Score. A function over lists returns a
list of these. TRL's list may contain None for a rollout to which the reward does not apply.

Sources: verl, verl/workers/reward_manager/{naive,batch}.py, verl/experimental/reward_loop, and docs "Implement Reward
Function for Dataset"; TRL, trl/trainer/grpo_trainer.py `_calculate_rewards` and docs "GRPO Trainer, Using a custom
reward function".
"""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rftstream.contracts.arrays import Array
from rftstream.errors import ConfigError, RewardError
from rftstream.rewards.arguments import INPUT_FIELDS, OF_TRL_ALONE, RewardArguments, find_convention, is_conversation
from rftstream.rewards.base import RewardGroup, RewardInput, Score
from rftstream.rewards.event_loop import caught, run_together
from rftstream.rewards.version import source_version

MAX_NUMBERS = 200
"""The most parts and metrics of one score."""
MAX_DETAIL = 2000
"""The most characters of a score's detail."""

Outcome = Score | None | BaseException
"""The result of a reward for one rollout: a score, an error, or None if the reward does not apply."""


class BatchFailed(RewardError):
    """A call for several rollouts failed as a whole. Each rollout is then tried alone."""


class FunctionReward:
    """A user's function as a Reward. `rewards.resolve` makes it; a CompositeReward calls `score_all`.

    `columns` maps our names to the source's; the function may name a column either way. `conversational`: whether the
    taskset's prompts are lists of messages; TRL's functions then get messages, otherwise texts. As in TRL, the dataset
    decides this. A problem with more than one user message is always a conversation.
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
        self._conversational = conversational
        self.version = source_version(function, options, name=where)
        parameters = list(inspect.signature(function).parameters.values())
        named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        required = [p.name for p in named if p.default is p.empty]
        self._takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._only = required[0] if len(required) == 1 else None
        self._names = [p.name for p in named]
        self.required = set(required)
        self._positional = [p.name for p in named if p.kind is p.POSITIONAL_ONLY]
        self.convention = find_convention(self._names)
        self._arguments = RewardArguments(self.convention, self._names, self._options, columns or {})
        self._over_lists = self.convention in ("verl batch", "TRL")
        calls: Any = function
        asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(calls.__call__)
        self.batched = self._over_lists or asynchronous
        # A function of ours that takes the whole rollout, or a group of them, names it as it likes.
        of_fields = {*self._names[:1], self._only or self._names[0]} <= set(INPUT_FIELDS) if self._names else False
        self.reads_tokens = "completion_ids" in self._names or not (
            self.convention.startswith("verl") or (self.convention == "ours" and of_fields)
        )
        unknown = set(options) - set(self._names)
        if unknown and not self._takes_rest:
            raise ConfigError(f"{where}: takes no {', '.join(sorted(unknown))}; it takes {', '.join(self._names)}")
        if self.convention == "TRL" and (lacking := (self.required & OF_TRL_ALONE) - set(options)):
            raise ConfigError(
                f"{where}: needs {', '.join(sorted(lacking))}, which only TRL's trainer has; give it a default, "
                'or let the environment give the reward (reward = "environment")'
            )

    def __call__(self, item: RewardInput) -> Score:
        outcome = self.score_all([item])[0]
        if outcome is None:
            raise RewardError(f"{self.name}: returned None, so it does not apply to this rollout")
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def score_all(self, items: Sequence[RewardInput]) -> list[Outcome]:
        """Return for each item its score or its error."""
        if not self._over_lists:
            return self._one_by_one(items)
        forms = [self._conversational or is_conversation(item) for item in items]
        outcomes: list[Outcome] = [None] * len(items)
        for form in sorted(set(forms)):
            places = [place for place, its_form in enumerate(forms) if its_form == form]
            for place, outcome in zip(places, self._together([items[i] for i in places], form), strict=True):
                outcomes[place] = outcome
        return outcomes

    def score_group(self, group: RewardGroup) -> list[Outcome]:
        """Return for each sibling its score or its error, from one call: over lists, or with the group itself."""
        if self._over_lists:
            return self.score_all(group.siblings)
        values = self._function(group, **self._options)
        if inspect.isawaitable(values):
            values = run_together([values])[0]
            if isinstance(values, BaseException):
                raise values
        return [self._outcome(value) for value in self._list_of(values, len(group.siblings))]

    @property
    def gets_texts(self) -> bool:
        """Return whether the function has TRL's signature and gets single-message prompts as texts."""
        return self.convention == "TRL" and not self._conversational

    def check(self, item: RewardInput) -> None:
        """Raise RewardError if the problem lacks a column that the function names."""
        known = (
            self._arguments.for_list(item, self._conversational) if self._over_lists else self._arguments.for_one(item)
        )
        if not self._takes_item(known):
            self._check_there(known)

    # ------------------------------------------------------------------------------------------ for one rollout

    def _one_by_one(self, items: Sequence[RewardInput]) -> list[Outcome]:
        values: list[Any] = [caught(self._call, item) for item in items]
        if any(map(inspect.isawaitable, values)):
            if isinstance(together := caught(run_together, values), BaseException):
                together = self._failed_together(together, len(values))
            values = together
        return [self._outcome(value) for value in values]

    def _call(self, item: RewardInput) -> Any:
        known = self._arguments.for_one(item)
        if self._takes_item(known):
            return self._function(item, **self._options)
        self._check_there(known)
        return self._apply(known)

    def _takes_item(self, known: Mapping[str, Any]) -> bool:
        return self.convention == "ours" and self._only is not None and self._only not in known

    # ------------------------------------------------------------------------------------------ for many

    def _together(self, items: Sequence[RewardInput], conversational: bool) -> list[Outcome]:
        """Call the function once, for all items that have the columns that it needs."""
        rows = [self._arguments.for_list(item, conversational) for item in items]
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
        values = caught(self._listed, {**known, **self._options}, len(rows))
        if isinstance(values, BaseException):
            error = self._hinted(values) if self._expects_messages(values, known) else values
            return self._failed_together(error, len(rows))
        return [self._outcome(value, log.metrics(place)) for place, value in enumerate(values)]

    def _listed(self, known: dict[str, Any], count: int) -> list[Any]:
        values = self._apply(known)
        if inspect.isawaitable(values):
            (values,) = run_together([values])
            if isinstance(values, BaseException):
                raise values
        return self._list_of(values, count)

    def _failed_together(self, error: BaseException, count: int) -> list[Outcome]:
        return [error if count == 1 else BatchFailed(f"{self.name}: {error!r}")] * count

    def _expects_messages(self, error: BaseException, known: Mapping[str, Any]) -> bool:
        """Return whether the function may have failed because it got texts, not messages."""
        prompts = known.get("prompts") or [None]
        return isinstance(error, TypeError | AttributeError) and isinstance(prompts[0], str)

    def _hinted(self, error: BaseException) -> RewardError:
        hinted = RewardError(
            f"{self.name}: {type(error).__name__}: {error}; prompts and completions reach it as texts; if it expects "
            'messages, set columns = { messages = "prompt" } in the taskset, with the name of the column'
        )
        hinted.__cause__ = error
        return hinted

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
            near = difflib.get_close_matches(min(missing), list(known), n=1)
            raise RewardError(
                f"{self.name}: needs {', '.join(sorted(missing))}, but the problem has only "
                f"{', '.join(sorted(known))}; {f'did you mean {near[0]}' if near else 'is the column in the taskset'}?"
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


def to_score(value: Any, *, where: str, key: str | None = None) -> Score:
    """Return a reward's result as a Score. RewardError unless the reward, its parts and its metrics are finite numbers.

    `key` names the reward in a dict; by default it is `reward`, else `score`. Error messages begin with `where`.
    """
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        score = Score(reward=value[0], metrics=_numbers_in(value[1]))
    elif isinstance(value, Score):
        score = value
    elif isinstance(value, Mapping):
        expected = key or "reward"
        key = key or ("reward" if "reward" in value else "score")
        if key not in value:
            raise RewardError(f"{where}: returned a dict with {_some(value)}, expected {expected!r} in it")
        roles = value["roles"] if isinstance(value.get("roles"), Mapping) else {}
        measured = _numbers_in({k: v for k, v in value.items() if k != key})
        detail = value["detail"] if isinstance(value.get("detail"), str) else ""
        score = Score(reward=value[key], metrics=measured, roles=roles, detail=detail)
    else:
        score = Score(reward=value)
    if not (score.parts or score.metrics or score.additions or score.roles or score.detail):
        return Score(reward=_finite(score.reward, f"{where}: reward"))
    if len(score.parts) + len(score.metrics) + len(score.roles) > MAX_NUMBERS:
        raise RewardError(f"{where}: returned more than {MAX_NUMBERS} parts, roles and metrics; return fewer")
    return Score(
        reward=_finite(score.reward, f"{where}: reward"),
        parts={str(name)[:200]: _finite(one, f"{where}: part {name!r}") for name, one in score.parts.items()},
        metrics={str(name)[:200]: _finite(one, f"{where}: metric {name!r}") for name, one in score.metrics.items()},
        additions={
            str(name)[:200]: _array(one, f"{where}: addition {name!r}") for name, one in score.additions.items()
        },
        roles={
            str(name)[:200]: None if one is None else _finite(one, f"{where}: role {name!r}")
            for name, one in score.roles.items()
        },
        detail=str(score.detail).encode(errors="backslashreplace").decode()[:MAX_DETAIL],
    )


class _Log:
    """Collects a function's calls of TRL's `log_metric(name, value)` and `log_extra(column, values)`.

    A metric becomes the mean of its calls. The numbers of a column become metrics of each rollout.
    """

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


def _numbers_in(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in values.items() if isinstance(_plain(value), numbers.Real)}


def _plain(value: Any) -> Any:
    """Return the number in a numpy or torch scalar, and any other value unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _some(value: Mapping[Any, Any]) -> list[str]:
    return sorted(str(key)[:100] for key in value)[:20]


def _finite(value: Any, where: str) -> float:
    plain = _plain(value)
    if not isinstance(plain, numbers.Real):
        found = repr(value) if value is None or isinstance(value, str) else type(value).__name__
        raise RewardError(f"{where}: got {found:.100}, expected a number")
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
