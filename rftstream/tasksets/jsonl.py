"""JSON lines: one problem a line. The file is read once, line by line; only the lines' offsets are kept."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from rftstream import plugins
from rftstream.errors import ConfigError
from rftstream.messages import ChatMessage, Problem

OUR_COLUMNS = ("prompt", "messages", "answer", "system", "data_source")


class JsonlTaskset:
    """`columns` maps our names to the file's. `prompt` is a text or a list of {role, content}; what is not mapped to
    one of ours goes into the problem's `info`."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        pass

    def __init__(self, config: Config, *, location: str, columns: Mapping[str, str], system: str | None) -> None:
        for key in columns:
            if key not in OUR_COLUMNS:
                raise ConfigError(f"columns.{key}: unknown; {plugins.suggest(key, list(OUR_COLUMNS))}")
        self._path = Path(location)
        self._required = set(columns) or {"prompt"}
        if not self._required & {"prompt", "messages"}:
            self._required.add("prompt")
        self._columns = {name: columns.get(name, name) for name in OUR_COLUMNS}
        self._system = system
        self._offsets = array("q")
        self._lines = array("q")
        with self._open() as file:
            self._content_digest = self._scan(file)
            self._state = _state(file)

    @property
    def digest(self) -> str:
        text = json.dumps([self._content_digest, self._columns, self._system], sort_keys=True)
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    def __len__(self) -> int:
        return len(self._offsets)

    def problem(self, index: int) -> Problem:
        if not 0 <= index < len(self._offsets):
            raise ConfigError(f"{self._path}: problem {index}, expected below {len(self._offsets)}")
        with self._open() as file:
            if _state(file) != self._state:
                raise ConfigError(f"{self._path}: changed since the run began with it; restore it, or start a new run")
            file.seek(self._offsets[index])
            return self._parse(file.readline(), self._lines[index])

    def _open(self) -> BinaryIO:
        try:
            return open(self._path, "rb")
        except OSError as error:
            text = "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror)
            raise ConfigError(f"{self._path}: {text}; expected a file of JSON lines") from None

    def _scan(self, file: BinaryIO) -> str:
        """Checks every line, keeps where it begins, and returns the file's digest."""
        sha256 = hashlib.sha256()
        offset = 0
        for number, line in enumerate(file, start=1):
            sha256.update(line)
            if line.strip():
                self._parse(line, number)
                self._offsets.append(offset)
                self._lines.append(number)
            offset += len(line)
        if not self._offsets:
            raise ConfigError(f"{self._path}: is empty, expected one JSON object a line")
        return sha256.hexdigest()

    def _parse(self, line: bytes, number: int) -> Problem:
        where = f"{self._path}:{number}"
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}; expected one object a line") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: found a {_kind(row)}, expected an object")
        for ours in sorted(self._required):
            if self._columns[ours] not in row:
                raise ConfigError(
                    f"{where}: no column {self._columns[ours]!r}; found {', '.join(row)}; "
                    f"set columns = {{ {ours} = ... }} to the right one"
                )
        return self._problem(row, where)

    def _problem(self, row: dict[str, Any], where: str) -> Problem:
        values = {ours: row.pop(theirs, None) for ours, theirs in self._columns.items()}
        chat = values["messages"] if values["messages"] is not None else values["prompt"]
        messages = self._messages(chat, where)
        system = values["system"] if values["system"] is not None else self._system
        if system is not None and messages[0].role != "system":
            messages = (ChatMessage(role="system", content=str(system)), *messages)
        return Problem(
            messages=messages,
            answer=_answer(values["answer"]),
            info=row,
            data_source=str(values["data_source"] or self._path.stem),
        )

    def _messages(self, chat: Any, where: str) -> tuple[ChatMessage, ...]:
        if isinstance(chat, str):
            return (ChatMessage(role="user", content=chat),)
        if not isinstance(chat, list) or not chat:
            raise ConfigError(f"{where}: the prompt is a {_kind(chat)}, expected a text or a list of messages")
        for place, message in enumerate(chat):
            keys = ("role", "content")
            if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in keys):
                raise ConfigError(f"{where}: message {place} of the prompt, expected {{role, content}} as texts")
        return tuple(ChatMessage(role=message["role"], content=message["content"]) for message in chat)


def _state(file: BinaryIO) -> tuple[int, int]:
    """What changes when somebody writes to the file."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _answer(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__).removeprefix("an ")
