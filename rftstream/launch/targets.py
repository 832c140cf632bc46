"""targets.json in the run folder, logs/targets-NAME.json of `workers`: where Prometheus finds the workers of a live
run (its `file_sd_configs`)."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rftstream.launch.supervisor import Slot

WRITE_EVERY_S = 1.0


class Targets:
    """The file targets.json of a run. A session, or `workers`, makes it, calls `update` often, and `close` at the end.

    A worker that is being restarted keeps its last port, so that Prometheus sees that it is down.
    """

    def __init__(self, file: Path, run: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._run = run
        self._clock = clock
        self._look_at = 0.0
        self._ports: dict[str, int] = {}
        self._known: dict[str, dict[str, object]] = {}
        """Process -> its last known target."""
        self._written: str | None = None

    def update(self, slots: Sequence[Slot]) -> None:
        """Write the file if it is due and has changed."""
        if (now := self._clock()) < self._look_at:
            return
        self._look_at = now + WRITE_EVERY_S
        self._write([group for slot in slots if (group := self._group(slot)) is not None])

    def _write(self, groups: Sequence[dict[str, object]]) -> None:
        text = json.dumps(groups, indent=1) + "\n"
        if text != self._written:
            partial = self._file.with_suffix(f".{os.getpid()}.partial")
            with contextlib.suppress(OSError):  # the disk is full, which others report; the next look writes the file
                partial.write_text(text, encoding="ascii")
                partial.replace(self._file)
                self._written = text

    def close(self, *, failed: bool) -> None:
        """Remove the file, since the ports are gone with the processes. After a failure the file stays, with all
        workers: Prometheus then sees that none answers, and an alert can fire. A session that resumes the run writes
        the file anew."""
        if failed and self._known:
            self._write(list(self._known.values()))
        else:
            self._file.unlink(missing_ok=True)

    def _group(self, slot: Slot) -> dict[str, object] | None:
        if slot.state == "left":
            return None
        with contextlib.suppress(OSError, ValueError):  # the file is missing or incomplete
            text = slot.command.log.with_suffix(".port").read_text(encoding="utf-8")
            self._ports[slot.process] = int(text.partition(" ")[0])
        port = self._ports.get(slot.process)
        if port is None:
            return None
        labels = {"job": slot.role, "instance": slot.process, "run": self._run}
        self._known[slot.process] = {"targets": [f"127.0.0.1:{port}"], "labels": labels}
        return self._known[slot.process]
