"""Named points at which a process can be made to die or to stop, as if from outside. Only tests use them. A point
without a fault costs one check of a variable.

RFTSTREAM_FAULTS="trainer:after_commit:3,explorer:in_commit:1:stop" in the environment of `rftstream run` says what
happens. The first trainer that comes to its third `after_commit` kills itself. The first explorer that comes to its
first `in_commit` stops itself until somebody sends SIGCONT. Each fault happens once in a run, even if its process is
started again: it leaves a file in logs/faults/ of the run folder.

before_start, after_start       before and after a producer starts
before_commit                   nothing is sent yet
in_commit                       all is sent, nothing is committed; on the embedded log the write lock is held
after_commit                    committed, and the caller has not heard of it
object_written                  weights are in the store, but not announced
before_checkpoints              before each file of a checkpoint and before its manifest
checkpoint_files_written        the checkpoint's files are there, its manifest is not
checkpoint_manifest_written     the checkpoint is complete, and the older ones are still there
call_received                   a new call of an agent is to be sampled, and nothing of it is on the log
call_sampled                    a call has its tokens and its answer, and is not on the log
call_committed                  a call is on the log, and its agent has no answer yet
call_answered                   the agent has the answer of a call
trim_said                       the log says what is deleted, and all of it is still there
trim_log_done                   records are deleted, checkpoints not yet

For the points of calls, the number is the call's in its rollout: "explorer:call_committed:3" kills the first explorer
that has the third call of any rollout on the log.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

from rftstream.errors import ConfigError

VARIABLE = "RFTSTREAM_FAULTS"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
POINTS = (
    "before_start",
    "after_start",
    "before_commit",
    "in_commit",
    "after_commit",
    "object_written",
    "before_checkpoints",
    "checkpoint_files_written",
    "checkpoint_manifest_written",
    "call_received",
    "call_sampled",
    "call_committed",
    "call_answered",
    "trim_said",
    "trim_log_done",
)

_armed: _Armed | None = None


def at(point: str, number: int | None = None) -> None:
    """Report that the process is at this point. `number` counts the times; None: one more than before. If a fault is
    due here, the process dies or stops."""
    if _armed is not None:
        _armed(point, number)


def arm(role: str, done: Path) -> None:
    """Read the faults of this role from the environment and turn them on. Each fault leaves a file in the folder
    `done`.

    ConfigError if the text cannot be read.
    """
    global _armed
    text = os.environ.get(VARIABLE, "")
    own = [fault for fault in map(_parse, filter(None, text.split(","))) if fault[0] == role]
    _armed = _Armed(own, done) if own else None


class _Armed:
    def __init__(self, faults: list[tuple[str, str, int, str]], done: Path) -> None:
        self._faults = faults
        self._done = done
        self._passed: Counter[str] = Counter()

    def __call__(self, point: str, number: int | None) -> None:
        self._passed[point] = self._passed[point] + 1 if number is None else number
        for role, where, occurrence, action in self._faults:
            if (where, occurrence) == (point, self._passed[point]) and self._first(f"{role}.{where}.{occurrence}"):
                os.kill(os.getpid(), SIGNALS[action])

    def _first(self, name: str) -> bool:
        self._done.mkdir(parents=True, exist_ok=True)
        try:
            with (self._done / name).open("x", encoding="ascii") as file:
                file.write(f"{os.getpid()}\n")
        except FileExistsError:
            return False
        return True


def _parse(text: str) -> tuple[str, str, int, str]:
    role, point, occurrence, action = (*text.split(":"), "kill")[:4] if text.count(":") in (2, 3) else ("",) * 4
    if point not in POINTS or action not in SIGNALS or not occurrence.isdecimal():
        raise ConfigError(
            f"{VARIABLE}: got {text!r}, expected ROLE:POINT:N or ROLE:POINT:N:ACTION; points: {', '.join(POINTS)}; "
            f"actions: {', '.join(SIGNALS)}"
        )
    return role, point, int(occurrence), action
