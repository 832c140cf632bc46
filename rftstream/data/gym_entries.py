"""Entries of reasoning-gym: their form as plain values that any encoding keeps, and the scoring of answers.

The taskset makes problems from them, the reward scores completions, and the environment `attempts` scores each attempt.
"""

from __future__ import annotations

import importlib
import re
import threading
import warnings
from collections.abc import Mapping
from typing import Any

from rftstream.errors import ConfigError

KEYS = ("dataset", "config", "entry")
"""Keys in the `info` of a problem from reasoning-gym."""


class EntryScorer:
    """Scores answers with the task of an entry. A reward or an environment makes one; it caches the tasks that it
    creates. Threads may share it."""

    def __init__(self) -> None:
        """ImportError if reasoning-gym is not installed."""
        self._create = import_reasoning_gym().create_dataset
        self._datasets: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __call__(self, answer: str, info: Mapping[str, Any]) -> float:
        """Return the task's score of an answer, usually between 0 and 1. `info`: the problem's, with all of KEYS."""
        dataset = self._dataset(info["dataset"], info["config"])
        return float(dataset.score_answer(answer, unpack_value(info["entry"])))

    def _dataset(self, name: str, settings: Any) -> Any:
        key = f"{name} {settings!r}"
        with self._lock:
            if key not in self._datasets:
                self._datasets[key] = self._create(name, **unpack_value(settings))
            return self._datasets[key]


def find_answer(completion: str, tag: str | None) -> tuple[str, bool]:
    """Return the content of the last <tag>...</tag>, else the whole text, and whether the tag was found. If `tag` is
    None, the whole text counts as tagged."""
    if tag is None:
        return completion.strip(), True
    found = re.findall(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", completion, re.DOTALL)
    return (str(found[-1]).strip(), True) if found else (completion.strip(), False)


def pack_value(value: Any) -> Any:
    """Return a reasoning-gym value as plain values that survive any encoding. Tuples, and dicts with keys that are not
    texts, are marked."""
    if value is None or isinstance(value, (bool, str)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else {"!int": str(value)}
    if isinstance(value, list):
        return [pack_value(one) for one in value]
    if isinstance(value, tuple):
        return {"!tuple": [pack_value(one) for one in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("!") for key in value):
            return {str(key): pack_value(one) for key, one in value.items()}
        return {"!dict": [[pack_value(key), pack_value(one)] for key, one in value.items()]}
    if hasattr(value, "item"):  # a number of numpy
        return pack_value(value.item())
    raise ConfigError(f"reasoning_gym: found a {type(value).__name__}, expected plain values; take another task")


def unpack_value(value: Any) -> Any:
    """Return the value that `pack_value` was given."""
    if isinstance(value, list):
        return [unpack_value(one) for one in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key == "!tuple":
            return tuple(unpack_value(one) for one in inner)
        if key == "!dict":
            return {unpack_value(name): unpack_value(one) for name, one in inner}
        if key == "!int":
            return int(inner)
    return {key: unpack_value(one) for key, one in value.items()}


def import_reasoning_gym() -> Any:
    """Import the package, which takes some seconds. ImportError if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a package that it uses
        return importlib.import_module("reasoning_gym")
