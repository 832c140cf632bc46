"""TensorBoard's event files: a scalar for each metric of each step in force (`train/...`) and evaluation (`eval/...`).

A file begins with a session start at step 0. If a trainer went back, it has another one at the first retrained step. At
a session start TensorBoard drops its data from that step on
(tensorboard/backend/event_processing/event_accumulator.py). Files of earlier starts stay, since an open TensorBoard
would get stuck at a deleted file.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.errors import importing
from rftstream.trackers.served import News


class TensorBoard:
    """The event file of one start of the run, as `Tracker` describes it. `open_trackers` makes it."""

    shows_samples = False

    def __init__(self, folder: Path) -> None:
        with importing("trackers.tensorboard", "tensorboard", install="rftstream[tensorboard]"):
            from tensorboard.compat.proto import event_pb2, summary_pb2  # type: ignore[import-untyped]
            from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]
        self._events, self._summaries = event_pb2, summary_pb2
        self._version = 0
        """Newest written version."""
        self._evaluated: dict[str, int] = {}
        """Evaluation -> its newest written version."""
        folder.mkdir(parents=True, exist_ok=True)
        self._writer: Any = EventFileWriter(str(folder))
        self._start(0)

    def update(self, news: Sequence[News]) -> None:
        """Write the steps and evaluations. If a trainer went back, start a session there first, so that TensorBoard
        drops its old steps."""
        steps: dict[int, StepRecord] = {}
        results: dict[tuple[str, int], EvalResult] = {}
        for one in news:
            version = one.name.version
            if isinstance(one, EvalResult):
                results[one.evaluation, version] = one
            elif isinstance(one, StepRecord):
                steps = {known: step for known, step in steps.items() if known < version} | {version: one}
        if steps and min(steps) <= self._version:
            self._go_back(min(steps))
        for version, step in sorted(steps.items()):
            self._write("train", version, step.recorded_at, step.metrics)
            self._version = version
        for (evaluation, version), result in sorted(results.items()):
            if version > self._evaluated.get(evaluation, -1):  # an older one is replaced at the next start
                self._write(f"eval/{evaluation}", version, result.evaluated_at, result.metrics)
                self._evaluated[evaluation] = version
        if news:
            self._writer.flush()

    def close(self, *, ended: bool) -> None:
        """Close the file."""
        self._writer.close()

    def _go_back(self, version: int) -> None:
        self._start(version)
        self._evaluated = {evaluation: min(newest, version - 1) for evaluation, newest in self._evaluated.items()}

    def _start(self, step: int) -> None:
        session = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, session_log=session))

    def _write(self, prefix: str, version: int, at: float, metrics: Mapping[str, float]) -> None:
        values = [
            self._summaries.Summary.Value(tag=f"{prefix}/{name}", simple_value=value) for name, value in metrics.items()
        ]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=at, step=version, summary=summary))
