"""An exporter beside a run that things happen to. It outlives brokers, and says at the end what the audit says."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from rftstream.queries.audits.balance import AuditReport
from tests.e2e.workplace import Process, Workplace
from tests.exporters import read_metrics

WITHIN_S = 300.0


class RigExporter:
    """`rftstream exporter` of one run, as somebody who may only look. The rig starts it once the run is there, and
    again where it was killed together with everything else; `end` comes last."""

    def __init__(self, place: Workplace, run_dir: str, env: Mapping[str, str]) -> None:
        self._place, self._run_dir = place, run_dir
        self._env = {**env, "RFTSTREAM_LOG_USER": "reader"}
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Its process, which is none of the run's."""
        return self._process.pid

    def start_again(self) -> None:
        """Start it if it is dead."""
        if not self._process.alive:
            self._process = self._start()

    def _start(self) -> Process:
        return self._place.start("exporter", self._run_dir, "--port", "0", "--every-s", "0.5", env=self._env)

    def end(self, report: AuditReport) -> None:
        """Wait until it has read the whole log; then it tells what the audit counts. End it."""
        name = self._run_dir.rpartition("/")[2]
        process = self._process

        def address() -> str | None:
            assert process.alive, f"the exporter has ended\n{process.err[-3000:]}"
            found = re.search(r"^http\S+", process.out, re.MULTILINE)
            return found.group() if found else None

        url = self._place.wait_for(address, "the exporter's address", WITHIN_S)
        assert url is not None

        def told() -> dict[str, float] | None:
            assert process.alive, f"the exporter has ended\n{process.err[-3000:]}"
            found = read_metrics(url, name)
            ended = found.get('rftstream_run_state{state="finished"}') == 1
            return found if ended and found.get("rftstream_run_read_ratio") == 1 else None

        found = self._place.wait_for(told, "an exporter that has read the end", WITHIN_S)
        assert found is not None
        assert found["rftstream_run_up"] == 1
        assert found["rftstream_run_version"] == report.version
        assert found["rftstream_run_rollouts_admitted_total"] == report.rollouts.admitted
        assert found["rftstream_run_groups_admitted_total"] == report.groups.admitted
        for result in ("trained", "expired", "filtered", "dead"):
            assert found[f'rftstream_run_rollouts_total{{result="{result}"}}'] == getattr(report.rollouts, result)
        process.send(signal.SIGTERM)
        assert process.finish().code == 0, process.err[-3000:]
