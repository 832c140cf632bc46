"""From the rows of a file to demonstrations and preference pairs, in the forms that people have them in.

messages                      a chat (also `conversations`, as ShareGPT has it): every turn of the assistant
prompt, completion            texts or messages; what is to be said is the completion (also `response`)
prompt, chosen, rejected      a preference pair; without a prompt, what both chats, or both texts, begin with
schema_version, steps         an agent's trajectory in Harbor's format (ATIF)

These are the dataset types of TRL. Its unpaired preferences (`label`) and labelled steps have no algorithm here.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import TasksetSpec
from rftstream.config.sections import DemonstrationsSection
from rftstream.contracts.demonstrations import Demonstration, Preference
from rftstream.contracts.tasks import ChatMessage
from rftstream.data.demonstrations.atif import chat_of, is_trajectory
from rftstream.data.tasksets.columns import (
    MAX_PROBLEM_BYTES,
    Plain,
    plain_value,
    read_chat,
    read_template_kwargs,
    read_tools,
    with_system,
)
from rftstream.data.tasksets.fields import look_up
from rftstream.data.tasksets.rows import JsonLines, RowReader
from rftstream.errors import ConfigError

TEMPLATE_KWARGS = "chat_template_kwargs"
OUR_COLUMNS = (
    *("messages", "prompt", "completion", "chosen", "rejected", "system", "tools", TEMPLATE_KWARGS, "weight"),
)
ALSO = {"messages": ("conversations",), "completion": ("response",)}
"""Our name -> other accepted names of the same column."""
SHARE_GPT = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}

Chat = tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class RowPlace:
    """The source of a demonstration, for error messages."""

    where: str
    demonstration: Demonstration


class Demonstrations:
    """The demonstrations in files, folders or datasets, by number. Every row is checked when its file is opened."""

    def __init__(self, section: DemonstrationsSection) -> None:
        """Open the sources in `section`. ConfigError names the file and line of the first invalid row."""
        self._sources = []
        for source in section.sources:
            reader = DemonstrationColumns(section.columns, system=section.system, source=_name(source))
            self._sources.append((reader, _open(source, section, reader)))

    def __len__(self) -> int:
        return sum(len(rows) for _, rows in self._sources)

    def __getitem__(self, index: int) -> RowPlace:
        if not 0 <= index < len(self):
            raise IndexError(index)
        for reader, rows in self._sources:
            if index < len(rows):
                where = rows.where(index)
                return RowPlace(where, reader.demonstration(rows.row(index), where))
            index -= len(rows)
        raise AssertionError("it lies below the sum of them")


class DemonstrationColumns(RowReader):
    """Maps a source's columns to the parts of a demonstration. `Demonstrations` makes it; the source of rows calls it
    as a RowReader."""

    def __init__(self, columns: Mapping[str, str], *, system: str | None, source: str) -> None:
        for key in columns:
            if key not in OUR_COLUMNS:
                raise ConfigError(f"columns.{key}: unknown; {registry.suggest(key, list(OUR_COLUMNS))}")
        self._paths = {
            name: (columns[name],) if name in columns else (name, *ALSO.get(name, ())) for name in OUR_COLUMNS
        }
        self._mapped = columns
        self._system = system
        self._source = source

    # what a reader of rows asks

    def check_names(self, names: Sequence[str], where: str) -> None:
        """Raise ConfigError for a mapped column that is not among these."""
        for ours, path in self._mapped.items():
            if path not in names and path.partition(".")[0] not in names:
                raise ConfigError(
                    f"{where}: no column {path!r}; found {', '.join(names)}; set columns = {{ {ours} = ... }}"
                )

    def check(self, row: Mapping[str, Any], where: str, num_bytes: int = 0) -> None:
        """Raise ConfigError if the row is no demonstration."""
        self.demonstration(row, where)

    # what it makes of a row

    def demonstration(self, row: Mapping[str, Any], where: str) -> Demonstration:
        """Return the demonstration in a row. ConfigError if the row is neither a pair nor a chat with something to
        learn from."""
        if is_trajectory(row):
            row = chat_of(row, where)
        preference: Preference | None = None
        messages: Chat = ()
        chosen, rejected = self._value(row, "chosen"), self._value(row, "rejected")
        if chosen is not None and rejected is not None:
            preference = self._preference(row, chosen, rejected, where)
        else:
            messages = self._chat(row, where)
        plain = Plain(where)
        weight, tools = self._weight(row, where), read_tools(self._value(row, "tools"), where)
        kwargs = read_template_kwargs(self._value(row, TEMPLATE_KWARGS), where)
        ours = {path.partition(".")[0] for paths in self._paths.values() for path in paths}
        info = {name: plain(value, 1) for name, value in row.items() if name not in ours}
        if tools:
            info["tools"] = list(tools)
        if kwargs:
            info[TEMPLATE_KWARGS] = kwargs
        made = Demonstration(
            demonstration_id=_identity([messages, preference, weight, tools, *([kwargs] if kwargs else [])]),
            source=self._source,
            messages=messages,
            preference=preference,
            weight=weight,
            info=info,
        )
        plain(msgspec.to_builtins([messages, preference]), 1)
        if plain.num_bytes > MAX_PROBLEM_BYTES:
            raise ConfigError(f"{where}: {plain.num_bytes:,} bytes, expected at most {MAX_PROBLEM_BYTES:,}; shorten it")
        return made

    def _value(self, row: Mapping[str, Any], ours: str) -> Any:
        for path in self._paths[ours]:
            found, value, _ = look_up(row, path)
            if found and value is not None:
                return plain_value(row, value)
        return None

    def _chat(self, row: Mapping[str, Any], where: str) -> Chat:
        chat = self._value(row, "messages")
        if chat is not None:
            messages = read_chat(_plain_roles(chat), where, what="chat")
        else:
            prompt, completion = self._value(row, "prompt"), self._value(row, "completion")
            if prompt is None or completion is None:
                raise ConfigError(
                    f"{where}: found the columns {', '.join(row)}, expected messages, or prompt and completion, or "
                    "chosen and rejected; set columns = { messages = ... }"
                )
            if isinstance(row.get("label"), bool):
                raise ConfigError(
                    f"{where}: found prompt, completion and a label (unpaired preferences), which no algorithm here "
                    "learns from, expected chosen and rejected; or keep the good rows, without the column label"
                )
            messages = (*read_chat(prompt, where), *_answer(completion, where, "completion"))
        if not any(message.role == "assistant" for message in messages):
            roles = ", ".join(dict.fromkeys(message.role for message in messages))
            raise ConfigError(f"{where}: a chat of {roles}, expected a turn of the assistant to learn from")
        return self._with_system(messages, row, where)

    def _preference(self, row: Mapping[str, Any], chosen: Any, rejected: Any, where: str) -> Preference:
        prompt = self._value(row, "prompt")
        if prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
            prompt, chosen, rejected = _split_texts(chosen, rejected, where)
        better, worse = _answer(chosen, where, "chosen"), _answer(rejected, where, "rejected")
        if better[0].role == "assistant" and prompt is not None:
            before = read_chat(_plain_roles(prompt), where)
        else:  # whole chats
            shared = 0
            while shared < min(len(better), len(worse)) and better[shared] == worse[shared]:
                shared += 1
            before, better, worse = better[:shared], better[shared:], worse[shared:]
            if not before:
                raise ConfigError(f"{where}: chosen and rejected begin with different messages, expected a prompt")
            said = read_chat(_plain_roles(prompt), where) if isinstance(prompt, list) and prompt else before
            if said[0].role == "system" != before[0].role:  # they were cut at the user's message
                before = (said[0], *before)
        for name, answer in (("chosen", better), ("rejected", worse)):
            if not any(message.role == "assistant" for message in answer):
                raise ConfigError(f"{where}: {name} has no turn of the assistant of its own, expected one to compare")
        if better == worse:
            raise ConfigError(f"{where}: chosen and rejected are the same, expected two answers to compare")
        return Preference(prompt=self._with_system(before, row, where), chosen=better, rejected=worse)

    def _with_system(self, messages: Chat, row: Mapping[str, Any], where: str) -> Chat:
        system = self._value(row, "system")
        return with_system(messages, self._system if system is None else system, where)

    def _weight(self, row: Mapping[str, Any], where: str) -> float:
        weight = self._value(row, "weight")
        weight = 1.0 if weight is None else weight
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= sys.float_info.max:
            raise ConfigError(f"{where}: the weight is {weight!r}, expected a number of at least 0")
        return float(weight)


def _split_texts(chosen: str, rejected: str, where: str) -> tuple[str, str, str]:
    """Return the words that both texts begin with, and the rest of each."""
    places = enumerate(zip(chosen, rejected, strict=False))
    shared = chosen[: next((place for place, (one, other) in places if one != other), min(len(chosen), len(rejected)))]
    words = re.match(r"(.*\S)(?=\s)", shared, re.DOTALL)
    prompt = words[0] if words else "" if shared.isascii() else shared  # not every script has spaces
    if not prompt.strip():
        raise ConfigError(
            f"{where}: found chosen and rejected as texts that begin differently, expected a column prompt, or the "
            "prompt at the beginning of both; set columns = { prompt = ... }"
        )
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]


def _answer(value: Any, where: str, what: str) -> Chat:
    return read_chat(_plain_roles(value), where, what=what, role="assistant")


def _plain_roles(chat: Any) -> Any:
    """Return ShareGPT's messages with our names, and any other value unchanged."""
    if not isinstance(chat, list) or not all(
        isinstance(one, dict) and "from" in one and "value" in one for one in chat
    ):
        return chat
    return [
        {
            "role": SHARE_GPT.get(one["from"], one["from"]) if isinstance(one["from"], str) else None,
            "content": one["value"],
        }
        for one in chat
    ]


def _identity(learned: list[Any]) -> str:
    """Return an id made from everything that is learned from a demonstration. It does not depend on the demonstration's
    place."""
    text = json.dumps(msgspec.to_builtins(learned), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


# ------------------------------------------------------------------------------------------------ sources


def _name(source: str) -> str:
    return source.rstrip("/").rpartition("/")[2].rpartition(":")[2]


def _open(source: str, section: DemonstrationsSection, reader: DemonstrationColumns) -> Any:
    from rftstream.data.tasksets.hf import open_data

    scheme, _, location = source.partition(":")
    spec = registry.built_in(TasksetSpec).get(scheme)
    if section.options and not (spec is not None and spec.chooses_rows):
        raise ConfigError(f"experts.options: {', '.join(section.options)}: only a source hf: has options; remove them")
    if spec is not None and spec.has_rows:
        taskset = registry.resolve("taskset", scheme, where="experts.source")
        return taskset.open_rows(
            registry.build_config(taskset, section.options, where="experts.options"), location, reader
        )
    path = Path(location)
    if path.suffix in (".json", ".csv", ".tsv", ".arrow"):
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; expected chats or pairs")
        return open_data([path], reader, location)
    return JsonLines(path, reader)
