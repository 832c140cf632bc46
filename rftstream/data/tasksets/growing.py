"""Tasksets that grow during the run: `source = "log:problems"`. Their problems are on the topic `problems`.

The n-th problem of a taskset on the topic has the index n. A record that repeats an earlier one, by its id or by its
text, has no index. So all readers of the same records know the same problems.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rftstream.contracts.messages import Message
from rftstream.contracts.problems import NewProblem
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.data.tasksets.base import Taskset
from rftstream.errors import ConfigError

HELD_PROBLEMS = 1024
"""Problems of each growing taskset that are kept in memory. The others are read again from the log."""

FetchProblem = Callable[[int], NewProblem]
"""Reads the problem at an offset of `problems` again."""


def _cannot_read(offset: int) -> NewProblem:
    raise ConfigError(f"problem at offset {offset} of `problems`: this taskset is not connected to a log")


class GrowingTaskset:
    """Problems that people, agents or a model add to the run. `open_taskset` makes it, without problems.

    The owner of the log makes one GrowingTasksets from all of them and passes it the records of `problems`. Then the
    problems are found by their index, as in any other taskset."""

    grows = True
    """Whether its length changes."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[tasksets.NAME.options]`: none."""

    def __init__(self, config: Config, *, location: str, columns: Mapping[str, str], system: str | None) -> None:
        if location != "problems":
            raise ConfigError(f'log: got the topic {location!r}, expected source = "log:problems"')
        if columns:
            raise ConfigError(
                f"columns: got {', '.join(columns)}, expected none; `rftstream problems add` maps columns"
            )
        self._system = () if system is None else (ChatMessage(role="system", content=system),)
        self._offsets = array("q")
        self._known: set[bytes] = set()
        """Short digests of ids and texts, to detect repetitions."""
        self._held: OrderedDict[int, Problem] = OrderedDict()
        self._fetch: FetchProblem = _cannot_read

    @property
    def digest(self) -> str:
        """Return a digest of the common properties of all its problems. The problems themselves are on the log."""
        text = "\0".join(["log:problems 1", *(message.content for message in self._system)])
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    def __len__(self) -> int:
        """Return the number of problems known so far."""
        return len(self._offsets)

    def problem(self, index: int) -> Problem:
        """Return the problem with this index. ConfigError if there is none yet."""
        if not 0 <= index < len(self):
            raise ConfigError(f"problem {index}: expected below {len(self)}, as many as there are by now")
        if (held := self._held.get(index)) is not None:
            self._held.move_to_end(index)
            return held
        return self._hold(index, self._fetch(self._offsets[index]))

    def index_at(self, offset: int) -> int | None:
        """Return the index of the problem at an offset of `problems`. None if that record is not a problem of this
        taskset, or repeats an earlier one."""
        index = bisect_left(self._offsets, offset)
        return index if index < len(self) and self._offsets[index] == offset else None

    def has_digest(self, digest: str) -> bool:
        """Return whether there is a problem with this digest of text and answer (`problem_digest`)."""
        return _short(digest) in self._known

    def read_from(self, fetch: FetchProblem) -> None:
        """Use `fetch` to read problems that are no longer in memory."""
        self._fetch = fetch

    def forget(self) -> None:
        """Forget all problems."""
        self._offsets = array("q")
        self._known.clear()
        self._held.clear()

    def absorb(self, new: NewProblem, offset: int) -> int | None:
        """Add the next problem of this taskset, and return its index. None if it repeats an earlier one."""
        names = {_short(new.problem_id), _short(new.digest)}
        if names & self._known:
            return None
        self._known |= names
        self._offsets.append(offset)
        self._hold(len(self) - 1, new)
        return len(self) - 1

    def _hold(self, index: int, new: NewProblem) -> Problem:
        messages = new.problem.messages
        has_system = bool(messages) and messages[0].role == "system"
        problem = new.problem
        if self._system and not has_system:
            problem = replace(problem, messages=(*self._system, *messages))
        self._held[index] = problem
        if len(self._held) > HELD_PROBLEMS:
            self._held.popitem(last=False)
        return problem


class GrowingTasksets:
    """All growing tasksets of a run at one position of the log. Feeder, synthesiser and the recomputation of draws each
    make one, and call `absorb` for each record of `problems`, in order. It is falsy if there are no such tasksets."""

    def __init__(self, tasksets: Mapping[str, Taskset], fetch: FetchProblem = _cannot_read) -> None:
        """`tasksets`: all tasksets of the run; those that do not grow are ignored."""
        self.tasksets = {name: one for name, one in tasksets.items() if isinstance(one, GrowingTaskset)}
        for taskset in self.tasksets.values():
            taskset.read_from(fetch)
        self.end = 0
        """The offset of `problems` below which all records are known."""

    def __bool__(self) -> bool:
        return bool(self.tasksets)

    @property
    def known_end(self) -> int | None:
        """The same offset in the form that tasks record; None if there are no such tasksets."""
        return self.end if self.tasksets else None

    def fresh(self) -> None:
        """Forget all problems, because the topic is read again from its beginning."""
        for taskset in self.tasksets.values():
            taskset.forget()
        self.end = 0

    def absorb(self, message: Message | None, offset: int) -> None:
        """Process the next record. A record that is no problem of these tasksets only moves the end."""
        if isinstance(message, NewProblem) and (taskset := self.tasksets.get(message.taskset)) is not None:
            taskset.absorb(message, offset)
        self.end = offset + 1


def _short(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).digest()
