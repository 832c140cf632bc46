"""From a row to a problem: the meaning of a source's columns, and the columns that are passed to the reward.

A column is named by its name, or by the path of a field in it: `reward_model.ground_truth`, `messages.0.content`.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rftstream.config.parts import registry
from rftstream.contracts.limits import LIMITS, find_excess
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.contracts.topics import MAX_RECORD_BYTES
from rftstream.data.tasksets.fields import a_kind, fill_template, look_up, template_columns
from rftstream.data.tasksets.images import check_images, text_of_part, with_images
from rftstream.errors import ConfigError
from rftstream.models.chat_template import with_thinking

USUAL_COLUMNS = {
    "prompt": ("prompt", "question", "problem", "query", "instruction", "input"),
    "answer": ("answer", "solution", "target", "output", "label", "ground_truth", "response"),
}
"""Our name -> usual names of columns, the likeliest first."""
OUR_COLUMNS = ("prompt", "messages", "answer", "system", "tools", "data_source", "images")
NAMED_ONLY = ("images",)
"""Columns that are used only if the section names them: many files have pictures beside texts that do not need them."""
CHATS = ("prompt", "messages")
"""Columns that may contain the prompt. Unless a column is named, the first of them is used; the other often contains
the solution."""

REASONING = ("reasoning_content", "thinking")
"""Fields of a message with the model's thoughts; they become the beginning of its content."""

MAX_DEPTH = 24
"""Deepest nesting of lists and objects in a row. A record has further levels around them."""
MAX_PROBLEM_BYTES = MAX_RECORD_BYTES // 2
"""Largest size of a problem, in bytes; its rollouts need the rest of a record."""
PROBLEM_LIMITS = replace(LIMITS, total_items=LIMITS.total_items // 2)
"""Limits on the content of a problem. The rest of a record's limits is for the problem's rollouts."""


class TableRow(dict[str, Any]):
    """A row of a table with a fixed schema."""


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """Settings of every source with columns."""

    answer_after: str | None = None
    """Text in the answer's column after whose last occurrence the answer begins: "####" for GSM8K."""
    template: str | None = None
    """Text of the prompt: `{column}` stands for the value of a column, and a list for its lines."""
    keep: tuple[str, ...] | None = None
    """Columns that are passed to the reward beside the mapped ones; default: all. Leave out long ones, since every
    rollout carries them."""
    skip: Annotated[int, Meta(ge=0)] = 0
    """Number of first rows that are left out: `size = 80` here and `skip = 80` there have no problem in common."""
    size: Annotated[int, Meta(ge=1)] | None = None
    """Largest number of rows that are used; default: all."""
    shuffle_seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """Seed of a shuffled order, in which `skip` and `size` count. Default: the order of the file, whose first rows may
    all be of one kind."""
    image_folder: str | None = None
    """Folder of images: paths are relative to it, and must be inside it. It is relative to the data file's folder,
    which is the default."""


class Columns:
    """The mapping from one source's rows to problems. A taskset over rows makes it, and calls it for each problem.

    `columns` are the section's: our name -> the source's column or path.
    """

    def __init__(
        self,
        columns: Mapping[str, str],
        *,
        system: str | None,
        config: TableConfig,
        data_source: str,
        folder: Path = Path(),
    ) -> None:
        """`folder`: the folder of the data file."""
        for key in columns:
            if key not in OUR_COLUMNS:
                raise ConfigError(f"columns.{key}: unknown; {registry.suggest(key, list(OUR_COLUMNS))}")
        self._paths = {
            name: columns.get(name, name) for name in OUR_COLUMNS if name in columns or name not in NAMED_ONLY
        }
        self._image_folder = folder / (config.image_folder or "")
        self._mapped = tuple(name for name in OUR_COLUMNS if name in columns)
        chats = [name for name in CHATS if name in columns]
        self._chats = chats or list(CHATS)
        self._system = system
        self._config = config
        self._data_source = data_source

    @property
    def identity(self) -> list[Any]:
        """Return all settings that affect the problems made from the rows."""
        template = [] if self._config.template is None else [self._config.template]
        return [self._paths, self._system, self._config.answer_after, self._config.keep, *template]

    def wanted(self, names: Sequence[str]) -> list[str]:
        """Return the file's columns that have to be read."""
        if self._config.keep is None:
            return list(names)
        paths = [*self._paths.values(), *template_columns(self._config.template or "")]
        ours = set(paths) | {path.partition(".")[0] for path in paths}
        return [name for name in names if name in ours or name in self._config.keep]

    def check_names(self, names: Sequence[str], where: str) -> None:
        """Raise ConfigError for a mapped column that is not among these."""
        for ours in self._mapped:
            path = self._paths[ours]
            if path not in names and path.partition(".")[0] not in names:
                raise ConfigError(_missing(where, path, ours, names))
        if self._config.template is not None:
            return
        if not any(self._paths[name] in names for name in CHATS) and not set(CHATS) & set(self._mapped):
            raise ConfigError(_missing(where, "prompt", "prompt", names))

    def check_kept(self, names: Sequence[str], where: str) -> None:
        """Raise ConfigError if a column in `keep` is missing. `names`: the columns of a file, or of its first row."""
        for name in self._config.keep or ():
            if name not in names:
                raise ConfigError(f"{where}: no column {name!r} to keep; {found_columns('', name, names)}")

    def check(self, row: Mapping[str, Any], where: str, num_bytes: int = 0) -> None:
        """Raise ConfigError for rows that `problem` refuses, as far as a quick check can tell; large rows are checked
        fully."""
        messages = self._messages(row, where)
        if "images" in self._paths:
            check_images(messages, self._value(row, "images", where), self._image_folder, where)
        if num_bytes >= LIMITS.items:
            self._problem(row, messages, where)
        else:
            self._answer(row, where)
            self._tools(row, where)

    def problem(self, row: Mapping[str, Any], where: str) -> Problem:
        """Return the problem in a row. ConfigError, which names `where`, if there is none."""
        messages = self._messages(row, where)
        if "images" in self._paths:
            messages = with_images(messages, self._value(row, "images", where), self._image_folder, where)
        return self._problem(row, messages, where)

    def _problem(self, row: Mapping[str, Any], messages: tuple[ChatMessage, ...], where: str) -> Problem:
        plain = Plain(where)
        problem = Problem(
            messages=messages,
            answer=self._answer(row, where),
            tools=self._tools(row, where),
            info={name: plain(value, 1) for name, value in row.items() if self._goes_on(name, value)},
            data_source=str(self._value(row, "data_source", where) or self._data_source),
        )
        for message in messages:
            plain(message.content, 1)
            plain(message.tool_calls, 1)
        plain((problem.answer, problem.tools), 0)
        advice = 'leave columns out with options = { keep = ["..."] }, or the row'
        if plain.num_bytes > MAX_PROBLEM_BYTES:
            raise ConfigError(
                f"{where}: a problem of {plain.num_bytes:,} bytes, expected at most {MAX_PROBLEM_BYTES:,}; {advice}"
            )
        if plain.num_items + len(messages) >= LIMITS.items:
            excess = find_excess(msgspec.to_builtins(problem), PROBLEM_LIMITS)
            if excess is not None:
                raise ConfigError(f"{where}: {excess[0].removeprefix('$.info.')}: {excess[1]}; {advice}")
        return problem

    def chat_path(self, names: Sequence[str]) -> str:
        """Return the path of the prompt in a file with these columns."""
        paths = [self._paths[name] for name in self._chats]
        return next((path for path in paths if path in names or path.partition(".")[0] in names), paths[-1])

    def chat_column(self, row: Mapping[str, Any]) -> str | None:
        """Return the prompt's column if the prompt is a list of messages, or None if it is a text."""
        for name in self._chats:
            found, value, _ = look_up(row, self._paths[name])
            if found and value is not None:
                return self._paths[name] if isinstance(value, list) else None
        return None

    # ------------------------------------------------------------------------------------------ fields

    def _goes_on(self, name: str, value: Any) -> bool:
        """Return whether a column is part of `info`. An answer that is no text is: TRL's rewards get it as it is."""
        if name == self._paths["answer"] and self._config.answer_after is None and self._config.keep is None:
            return not isinstance(value, (str, type(None)))
        return name not in self._paths.values() and (self._config.keep is None or name in self._config.keep)

    def _value(self, row: Mapping[str, Any], ours: str, where: str) -> Any:
        """Return the value of a column. None if the column is missing and the section does not name it."""
        path = self._paths[ours]
        found, value, names = look_up(row, path)
        if not found and ours in self._mapped:
            raise ConfigError(_missing(where, path, ours, names))
        return value

    def _messages(self, row: Mapping[str, Any], where: str) -> tuple[ChatMessage, ...]:
        messages = read_chat(self._chat(row, where), where, images="images" in self._paths)
        system = self._value(row, "system", where)
        return with_system(messages, self._system if system is None else system, where)

    def _chat(self, row: Mapping[str, Any], where: str) -> Any:
        if self._config.template is not None:
            return fill_template(self._config.template, row, where)
        for name in self._chats:
            if (chat := plain_value(row, self._value(row, name, where))) is not None:
                return chat
        if not any(look_up(row, self._paths[name])[0] for name in self._chats):
            raise ConfigError(_missing(where, "prompt", "prompt", list(row)))
        return None

    def _answer(self, row: Mapping[str, Any], where: str) -> str | None:
        value = self._value(row, "answer", where)
        if value is None:
            return None
        text = value if isinstance(value, str) else json.dumps(Plain(where)(value, 1), ensure_ascii=False)
        marker = self._config.answer_after
        if marker is None:
            return text
        if marker not in text:
            raise ConfigError(f"{where}: the answer {text[:80]!r} has no {marker!r}, expected what answer_after says")
        return text.rpartition(marker)[2].strip()

    def _tools(self, row: Mapping[str, Any], where: str) -> tuple[dict[str, Any], ...]:
        return read_tools(plain_value(row, self._value(row, "tools", where)), where)


# ------------------------------------------------------------------------------------------------ chats


def read_chat(
    chat: Any, where: str, *, what: str = "prompt", role: str = "user", images: bool = False
) -> tuple[ChatMessage, ...]:
    """Read a text, which becomes a message of `role`, or a list of messages. `what` names it in errors. `images`:
    whether contents may contain image parts."""
    if isinstance(chat, str):
        return (ChatMessage(role=role, content=chat),)
    if not isinstance(chat, list) or not chat:
        found = "an empty list" if chat == [] else a_kind(chat)
        leave = "; fill it, or leave the row out" if chat is None else ""
        raise ConfigError(f"{where}: the {what} is {found}, expected a text or a list of messages{leave}")
    return tuple(
        _message(one, f"{where}: message {place} of the {what}", images=images) for place, one in enumerate(chat)
    )


def with_system(messages: tuple[ChatMessage, ...], system: Any, where: str) -> tuple[ChatMessage, ...]:
    """Return the chat with a system prompt in front. `system`: None for no prompt; a chat with its own system prompt
    keeps it. ConfigError if the prompt is not a text."""
    if system is None or messages[0].role == "system":
        return messages
    if not isinstance(system, str):
        raise ConfigError(f"{where}: the system prompt is {a_kind(system)}, expected a text")
    return (ChatMessage(role="system", content=system), *messages)


def read_template_kwargs(values: Any, where: str) -> dict[str, Any]:
    """Read a row's own values for the chat template, as an object or as JSON."""
    if isinstance(values, str):
        values = _from_json(values, f"{where}: chat_template_kwargs is a text that is not JSON", "an object")
    if not isinstance(values or {}, dict):
        raise ConfigError(f"{where}: chat_template_kwargs is {a_kind(values)}, expected an object")
    plain: dict[str, Any] = Plain(where)(values or {}, 1)
    return plain


def read_tools(tools: Any, where: str) -> tuple[dict[str, Any], ...]:
    """Read a list of functions, as objects or as JSON."""
    if isinstance(tools, str):
        tools = _from_json(tools, f"{where}: the tools are a text that is not JSON", "a list of functions")
    if tools is None or tools == []:
        return ()
    if not isinstance(tools, list):
        raise ConfigError(f"{where}: the tools are {a_kind(tools)}, expected a list of functions")
    tools = [
        _from_json(tool, f"{where}: tool {i} is a text that is not JSON", "an object")
        if isinstance(tool, str)
        else tool
        for i, tool in enumerate(tools)
    ]
    for place, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise ConfigError(f"{where}: tool {place} is {a_kind(tool)}, expected an object with its JSON schema")
    plain = Plain(where)
    return tuple(plain(tool, 1) for tool in tools)


def _message(message: Any, where: str, *, images: bool) -> ChatMessage:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ConfigError(f"{where}, expected {{role, content}} as texts")
    calls = message.get("tool_calls") or []
    if isinstance(calls, str):
        calls = _from_json(calls, f"{where}: tool_calls is a text that is not JSON", "a list of calls")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ConfigError(f"{where}: tool_calls, expected a list of objects")
    plain = Plain(where)
    reasoning = next((text for name in REASONING if (text := _text_or_none(message, name, where))), "")
    content = _content(message.get("content"), bool(calls or reasoning), where, images=images)
    return ChatMessage(
        role=message["role"],
        content=with_thinking(reasoning, content),
        name=_text_or_none(message, "name", where),
        tool_calls=tuple(plain(_call(call), 1) for call in calls),
        tool_call_id=_text_or_none(message, "tool_call_id", where),
    )


def _content(content: Any, may_be_empty: bool, where: str, *, images: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_empty:
        return ""
    if isinstance(content, list) and content:  # in parts, the form of APIs
        texts = [text_of_part(one, images=images) for one in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(text for text in texts if text)
        raise ConfigError(
            f"{where}: its content has parts other than text, which are not supported; images stand in a column of "
            "their own: set columns.images"
        )
    raise ConfigError(f"{where}, expected {{role, content}} as texts")


def _text_or_none(message: Mapping[str, Any], key: str, where: str) -> str | None:
    value = message.get(key)
    if value is None or isinstance(value, str):
        return value
    raise ConfigError(f"{where}: {key} is {a_kind(value)}, expected a text")


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call without null fields. Nulls among its arguments are kept, since the model wrote them."""
    found = {name: value for name, value in call.items() if value is not None}
    if isinstance(function := found.get("function"), Mapping):
        found["function"] = {name: value for name, value in function.items() if value is not None}
    return found


def plain_value(row: Mapping[str, Any], value: Any) -> Any:
    """Return a value of a row as its writer gave it. Tables with a fixed schema add the fields of all other rows to
    every object, as nulls, and templates would print them; in JSON, nulls are intended."""
    return without_nulls(value) if isinstance(row, TableRow) else value


def without_nulls(value: Any) -> Any:
    """Return the value without nulls."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------------ values


class Plain:
    """Converts values to the plain values that messages can carry. A value without such a form becomes text. Values and
    bytes are counted on the way."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.num_bytes = 0
        self.num_items = 0

    def __call__(self, value: Any, depth: int) -> Any:
        self.num_items += 1
        if depth > MAX_DEPTH:
            raise ConfigError(f"{self._where}: more than {MAX_DEPTH} levels of lists and objects; flatten them")
        if value is None or isinstance(value, (bool, float)):
            self.num_bytes += 9
            return value
        if isinstance(value, int):
            self.num_bytes += 9
            return value if -(2**63) <= value < 2**63 else str(value)
        if isinstance(value, Mapping):
            return {self._text(str(name)): self(one, depth + 1) for name, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self(one, depth + 1) for one in value]
        return self._text(_as_text(value))

    def _text(self, text: str) -> str:
        self.num_bytes += len(text.encode("utf-8", "surrogatepass"))
        return text


def _as_text(value: Any) -> str:
    match value:
        case str():
            return value
        case bytes():
            try:
                return value.decode("utf-8")
            except UnicodeDecodeError:
                return base64.b64encode(value).decode()
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal():
            return format(value, "f")
        case _:
            return str(value)


def _from_json(text: str, where: str, expected: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise ConfigError(f"{where} ({error}), expected {expected}") from None


def _missing(where: str, path: str, ours: str, names: Sequence[str]) -> str:
    found = found_columns(ours, path, names)
    return f"{where}: no column {path!r}; {found}; set columns = {{ {ours} = ... }} to the right one"


def found_columns(ours: str, name: str, names: Sequence[str]) -> str:
    """Return `found a, b, c; did you mean 'b'?`. It proposes a usual name of our column, else a similar name, and none
    that is usual for another of our columns."""
    others = {one for key, usual in USUAL_COLUMNS.items() if key != ours for one in usual}
    near = next((repr(one) for one in USUAL_COLUMNS.get(ours, ()) if one in names), None)
    said = f"did you mean {near}?" if near else ""
    if not near and (similar := [one for one in names if ours not in USUAL_COLUMNS or one not in others]):
        said = registry.suggest(name.rpartition(".")[2], similar).rpartition("; ")[2]
        said = said if said.startswith("did you mean") else ""
    shown = ", ".join(names) if names else "none"
    return f"found {shown}; {said}" if said else f"found {shown}"
