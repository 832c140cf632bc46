"""Reads the state of a run's workers from their `/health`: those on this machine, and those that let others ask."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftstream.config.sections import RunConfig
from rftstream.http.address import split_url
from rftstream.http.client import HttpClient, RequestFailed
from rftstream.queries.formatting import duration, moment, plural, size, table
from rftstream.roles import role_specs
from rftstream.runs.folder import OpenRun, RunFolder
from rftstream.service.control_view import ControlView
from rftstream.service.role_spec import RoleKind

HEALTH_TIMEOUT_S = 2.0
"""Seconds after which a worker counts as silent: on busy cores one is nothing. One that is gone refuses at once."""
FOR_ALL = "all"
"""Third word of a port file: other hosts can reach the port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker's answer. `ask_workers` makes it."""

    process: str
    port: int | None
    """None for a worker that the run's session starts, and that has no port yet."""
    host: str
    """Host of the worker."""
    health: Mapping[str, Any] | None
    """Answer of /health; None without an answer."""
    asked: bool = True
    """False for a worker on another host that only its own host can ask, and for one without a port."""
    gone: bool = False
    """Whether nobody is at its port on this machine: it was killed, and has not been started again."""
    held_at: str = ""
    """Another host, where the role of a worker without a port has been taken over; "" if it was not."""

    @property
    def role(self) -> str:
        """Return the role that its name begins with."""
        return self.process.partition("-")[0]

    @property
    def reachable(self) -> bool:
        """Whether the worker answered."""
        return self.health is not None


def ask_workers(folder: RunFolder) -> tuple[WorkerStatus, ...]:
    """Return all workers of the run that have a port. They are asked in parallel; the call waits for the slowest
    answer."""
    files = sorted(folder.logs.glob("*.port")) if folder.logs.is_dir() else []
    if not files:
        return ()
    with ThreadPoolExecutor(max_workers=min(32, len(files))) as pool:
        return tuple(worker for worker in pool.map(_ask, files) if worker is not None)


def ask_workers_of(run: OpenRun, control: ControlView, *, live: bool) -> tuple[WorkerStatus, ...]:
    """Return all workers of the run that have a port, and those that its session here starts and that have none yet."""
    found = ask_workers(run.folder)
    if not live or control.finished is not None or control.ended is not None:  # workers leave at the end
        return found
    known, host = {worker.process for worker in found}, socket.gethostname()
    expected = (f"{role}-{index}" for role, count in expected_workers(run.config).items() for index in range(count))
    away = {role: claim.host for role, claim in control.claims.items() if claim.host not in ("", host)}
    starting = [
        WorkerStatus(
            process=process,
            port=None,
            host=host,
            health=None,
            asked=False,
            held_at=away.get(process.partition("-")[0], ""),
        )
        for process in expected
        if process not in known
    ]
    return tuple(sorted((*found, *starting), key=lambda worker: worker.process))


def expected_workers(config: RunConfig) -> dict[str, int]:
    """Return role -> number of workers that `run` starts."""
    return {spec.name: spec.count(config) for spec in role_specs()}


def _ask(file: Path) -> WorkerStatus | None:
    try:
        words = file.read_text(encoding="utf-8").split()
        port, host = int(words[0]), words[1] if words[1:] else socket.gethostname()
    except (OSError, ValueError, IndexError):
        return None
    is_here = host == socket.gethostname()
    if not is_here and words[2:] != [FOR_ALL]:
        return WorkerStatus(process=file.stem, port=port, host=host, health=None, asked=False)
    health: dict[str, Any] | None = None
    gone = False
    address = split_url(f"http://{'127.0.0.1' if is_here else host}:{port}")
    if address is not None:
        client = HttpClient(address, max_bytes=1 << 20)
        try:
            with contextlib.suppress(ValueError), contextlib.closing(client):  # not our process
                answer = client.ask("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
                health = json.loads(answer.body)  # 503: the worker reports itself as stuck
        except RequestFailed as error:
            gone = is_here and not (error.timed_out or error.was_sent)
    if not isinstance(health, dict) or health.get("process", file.stem) != file.stem:
        health = None
    return WorkerStatus(process=file.stem, port=port, host=host, health=health, gone=gone)


# ------------------------------------------------------------------------------------------------- answers as text


FieldText = Callable[[Any], str]


def _of(thing: str, after: str = "") -> FieldText:
    return lambda count: f"{plural(count, thing)}{after}"


FIELD_TEXTS: dict[str, FieldText] = {
    "version": lambda version: "no weights yet" if version is None else f"version {version:,}",
    # explorers and verifiers
    "in_hand": _of("record", " in hand"),
    "partitions": lambda count: f"reads {plural(count, 'partition')}",
    "sampling": lambda count: f"samples {plural(count, 'rollout')}",
    "max_concurrent": lambda count: f"up to {count:,} at once",
    "waiting": _of("rollout", " waiting"),
    "engine": lambda state: f"engine {state}",
    "scoring": lambda count: f"scores {plural(count, 'rollout')}",
    # feeder
    "admitted": _of("group", " admitted"),
    # buffer
    "open_groups": _of("group", " open"),
    "ready_groups": _of("group", " ready"),
    "decided_groups": _of("group", " decided lately"),
    "next_batch": lambda number: f"batch {number:,} is next",
    "body_bytes": lambda count: f"{size(count)} of bodies held",
    "experts": _of("demonstration"),
    "experts_taken": lambda count: f"{count:,} of them taken",
    "experts_pass": lambda number: f"in pass {number:,}",
    # trainer
    "saved": lambda version: f"checkpoint of version {version:,}" if version else "no checkpoint yet",
    "batches_ready": lambda count: f"{count:,} batch{'' if count == 1 else 'es'} ready",
    "device": str,
    # evaluator
    "evaluating": lambda version: "nothing to evaluate" if version is None else f"evaluates version {version:,}",
    "evaluation": lambda name: f"on {name}",
    "samples_done": lambda count: f"{count:,} samples done",
    "samples": lambda count: f"of {count:,}",
    # synthesiser
    "making": _of("problem", " in the making"),
}
"""Field -> text for its value, in this order."""

UNUSUAL_TEXTS: dict[str, FieldText] = {
    "joined": lambda joined: "a loop of its user's own (rftstream.join)",
    "paused": _of("rollout", " set aside"),
    "weights_refused": lambda count: f"{plural(count, 'time')} weights were refused",
    "rejected": _of("group", " not trained on"),
    "left_out": _of("problem", " left out, too long"),
    "retries": _of("dead group", " to be put back"),
    "experts_dead": _of("demonstration", " of no use"),
    "problems_joined": _of("problem", " joined"),
    "waits_for_problems": lambda names: f"waits for new problems of {' and '.join(names)}",
    "problems_admitted": lambda count: f"{count:,} admitted",
    "problems_rejected": lambda count: f"{count:,} rejected",
    "rejects_most": str,
    "waits_for": lambda what: f"waits for {what}",
    "throttled_s": lambda seconds: f"{duration(seconds)} of waits for quotas of the Kafka brokers",
    "failures_in_a_row": lambda count: f"{plural(count, 'failure')} in a row",
    "failure": str,
}
"""Field -> text for its value. A field that is 0 is left out."""

SHOWN_ELSEWHERE = {"ok", "silent_s", "role", "process", "epoch", "state", "last_progress_at"}

QUIET_S = 30.0
"""Seconds without progress after which a worker is reported as idle."""


def claims_table(control: ControlView, signs: Mapping[str, float], now: float) -> list[str]:
    """Return who holds the single roles as a table for people. `signs`: `newest_signs`."""
    headings = ("role", "epoch", "process", "host", "pid", "since", *(("last record",) if signs else ()))
    rows = []
    for claim in control.claims.values():
        sign = f"{duration(max(0.0, now - signs[claim.role]))} ago" if claim.role in signs else ""
        row = (claim.role, claim.epoch, claim.process, claim.host, claim.pid, moment(claim.claimed_at), sign)
        rows.append(row[: len(headings)])
    return table(headings, rows, left=len(headings), indent="  ")


def workers_table(workers: Sequence[WorkerStatus], heard: Mapping[str, Sequence[str]] | None, now: float) -> list[str]:
    """Return process, port and state of each worker, and of those that only the log knows, as a table for people.
    `heard`: role -> workers whose heartbeats the log gets; None if it was not asked."""
    rows = [(worker.process, str(worker.port or ""), worker_sentence(worker, now, heard)) for worker in workers]
    known = {worker.process for worker in workers}
    for role, names in (heard or {}).items():
        unknown = (name for name in names if name.partition(" at ")[0] not in known)
        rows += [(name, "", f"one of the {role}s that the log hears") for name in unknown]
    return table(("worker", "port", "at work"), rows, left=3, indent="  ")


def worker_sentence(worker: WorkerStatus, now: float, heard: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return `health_sentence` for a worker, or that it starts, or that it is on another host, and whether the log
    hears it there."""
    if worker.port is None:
        return f"not at work here: {worker.held_at} has the role" if worker.held_at else "starting"
    if worker.gone:
        return "gone: it was killed, and is not started again so far"
    if worker.asked:
        return health_sentence(worker.health, now)
    said, role = f"on {worker.host}, which is not asked from here", worker.role
    if heard is None or role not in {spec.name for spec in role_specs() if spec.kind is RoleKind.concurrent}:
        return said
    is_heard = any(name.partition(" at ")[0] == worker.process for name in heard.get(role, ()))
    return f"{said}; the log {'hears it' if is_heard else 'does not hear it'}"


def health_sentence(health: Mapping[str, Any] | None, now: float) -> str:
    """Return whether a worker is alive and working, and its work in progress. `health` is None without an answer."""
    if health is None:
        return "does not answer"
    if "process" not in health:  # it answers before it has opened the log and loaded a model
        return f"loading for {duration(health.get('silent_s', 0.0))}"
    state = health.get("state")
    said = [str(state)] if state not in (None, "running") else []
    said += [text(health[name]) for name, text in FIELD_TEXTS.items() if name in health]
    said += [text(health[name]) for name, text in UNUSUAL_TEXTS.items() if health.get(name)]
    known = {*FIELD_TEXTS, *UNUSUAL_TEXTS, *SHOWN_ELSEWHERE}
    said += [f"{name.replace('_', ' ')} {value}" for name, value in health.items() if name not in known]
    at = health.get("last_progress_at")
    if isinstance(at, int | float) and now - at >= QUIET_S:
        said.append(f"nothing done for {duration(now - at)}")
    text = ", ".join(said) or "running"
    if health.get("ok", True):
        return text
    return f"STUCK: its loop has not come round for {duration(health.get('silent_s', 0.0))}; {text}"
