"""The arguments of users' functions, by signature: ours, verl's or TRL's. Sources: see functions.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

from rftstream.rewards.base import RewardInput

OF_ROLES = ("roles", "environment_roles")
"""Passed to who names them: a column of the problem may have the name, too."""
NOT_PASSED = (*OF_ROLES, "num_prompt_messages", "reasoning", "segments", "environment_version")
INPUT_FIELDS = tuple(item.name for item in fields(RewardInput) if item.name not in NOT_PASSED)
OF_TRL_ALONE = frozenset({"trainer_state", "environments"})
OF_TRL = frozenset({"prompts", "completions", "completion_ids", "log_metric", "log_extra"}) | OF_TRL_ALONE

Convention = Literal["ours", "verl", "verl batch", "TRL"]

NAMED_EITHER_WAY = ("prompt", "answer", "data_source")
"""Texts of a problem that a function may also ask for under the name of their column."""


class RewardArguments:
    """Builds the arguments of a user's function from rollouts. `FunctionReward` makes it and calls it.

    `names` are the function's parameters. `columns` maps our names to the source's; the function may use either.
    """

    def __init__(
        self, convention: Convention, names: Sequence[str], options: Mapping[str, Any], columns: Mapping[str, str]
    ) -> None:
        self._convention = convention
        self._names = names
        self._options = options
        self._answer = columns.get("answer", "answer")
        self._aliases = {theirs: ours for ours, theirs in columns.items() if ours in NAMED_EITHER_WAY}

    def for_one(self, item: RewardInput) -> dict[str, Any]:
        """Return the arguments of a function that scores one rollout, with the settings."""
        return self._verl(item) if self._convention == "verl" else self._ours(item)

    def for_list(self, item: RewardInput, conversational: bool) -> dict[str, Any]:
        """Return this rollout's entries in the lists for a function over many rollouts."""
        if self._convention == "verl batch":
            return {f"{name}s": value for name, value in _of_verl(item).items()}
        return self._trl_row(item, conversational)

    def _ours(self, item: RewardInput) -> dict[str, Any]:
        of_roles = {name: getattr(item, name) for name in OF_ROLES if name in self._names}
        known = {**of_roles, **self._columns(item), **self._options}
        known |= {name: getattr(item, name) for name in INPUT_FIELDS}
        return {**known, "completion_ids": item.completion_ids} if "completion_ids" in self._names else known

    def _verl(self, item: RewardInput) -> dict[str, Any]:
        """Return verl's four arguments, the settings, and the columns that the function names.

        As in verl, a function with **kwargs gets no other column.
        """
        columns = self._columns(item)
        named = {name: columns[name] for name in self._names if name in columns}
        return {**named, **self._options, **_of_verl(item)}

    def _columns(self, item: RewardInput) -> dict[str, Any]:
        return {**item.info, **{theirs: getattr(item, ours) for theirs, ours in self._aliases.items()}}

    def _trl_row(self, item: RewardInput, conversational: bool) -> dict[str, Any]:
        """Return every column of the dataset, as TRL does: an answer that is a number there is one. The answer and
        data_source also have our names. A call that could not be read is no tool call, as there."""
        prompt = list(item.messages[: item.num_prompt_messages])
        said = [_with_read_calls(one) for one in item.messages[item.num_prompt_messages :]]
        answer = item.info.get(self._answer, item.answer)
        return {
            "data_source": item.data_source,
            **self._columns(item),
            **dict.fromkeys(("answer", self._answer), answer),
            "prompts": prompt if conversational else item.prompt,
            "completions": said if conversational else item.completion,
            "completion_ids": item.completion_ids,
        }


def _with_read_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without the calls that could not be read."""
    calls = [one for one in message.get("tool_calls", ()) if not isinstance(one["function"]["arguments"], str)]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "tool_calls": calls} if calls else rest


def find_convention(names: Collection[str]) -> Convention:
    """Return the convention of a function, by the names of its parameters."""
    if "solution_strs" in names:
        return "verl batch"
    if "solution_str" in names:
        return "verl"
    if "completion" not in names and not OF_TRL.isdisjoint(names):
        return "TRL"
    return "ours"


def is_conversation(item: RewardInput) -> bool:
    """Return whether the rollout has more than one prompt message and one completion."""
    return item.num_prompt_messages != 1 or len(item.messages) > 2


def _of_verl(item: RewardInput) -> dict[str, Any]:
    """Return verl's four arguments, without those that the problem lacks."""
    four = {
        "data_source": item.data_source,
        "solution_str": item.completion,
        "ground_truth": _ground_truth(item),
        "extra_info": _extra_info(item),
    }
    return {name: value for name, value in four.items() if value is not None}


def _ground_truth(item: RewardInput) -> Any:
    """Return the answer. Without one, return `reward_model.ground_truth`, which verl's own data sets use."""
    nested = item.info.get("reward_model")
    return nested.get("ground_truth") if item.answer is None and isinstance(nested, Mapping) else item.answer


def _extra_info(item: RewardInput) -> dict[str, Any]:
    """Return the column `extra_info`, or else all columns, with the number of turns added as verl does."""
    column = item.info.get("extra_info")
    turns = sum(message.get("role") != "system" for message in item.messages)
    return {**(column if isinstance(column, Mapping) else item.info), "num_turns": turns}
