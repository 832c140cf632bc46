"""Evaluates versions of a run on request: with the run's evaluator if it is alive, else in this process.

In this process means: the process claims the role, as any worker does, for as long as there is work. So two processes
that start at once do not do the same work twice, and the log is the same either way. An evaluation with a result is not
repeated, and the id of a request follows from its content. So the same command, repeated after an interruption, does
the rest.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

from rftstream.clock import SystemClock
from rftstream.config.parts import registry
from rftstream.config.sections import RunConfig
from rftstream.contracts import codec
from rftstream.contracts.control import Request, RequestKind
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.versions import EvalResult, WeightsAnnounced
from rftstream.errors import ConfigError, RftError, TakenOver
from rftstream.roles.evaluator import EVALUATOR
from rftstream.roles.evaluator.due import EvalResults
from rftstream.runs.delete import is_claimant_alive
from rftstream.runs.folder import OpenRun
from rftstream.runs.published import Published, read_published
from rftstream.runs.services import LOOK_S, SAY_S, Say, build_service, drive, role_context
from rftstream.runs.writes import requests
from rftstream.service.control_view import read_control
from rftstream.service.reading import read_to_ends
from rftstream.service.role import FOREVER, Log
from rftstream.service.service import Service
from rftstream.transport.base import Reader

Versions = Sequence[int] | Literal["all"]
"""Versions to evaluate. An empty sequence means the newest; `all` means every version that the store can still make."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A result that `evaluate` yields, new or found on the log."""

    result: EvalResult
    new: bool
    """False if the result was already on the log."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """An evaluation of a version that has no result yet, or that is to be repeated."""

    evaluation: str
    announced: WeightsAnnounced
    request_id: str
    again: bool

    def is_met_by(self, result: EvalResult) -> bool:
        same = (result.evaluation, result.name.version) == (self.evaluation, self.announced.name.version)
        return same and (not self.again or result.request_id == self.request_id)

    @property
    def arguments(self) -> dict[str, Any]:
        again = {"again": True} if self.again else {}
        return {"version": self.announced.name.version, "evaluation": self.evaluation, **again}

    def __str__(self) -> str:
        return f"{self.evaluation} of version {self.announced.name.version}"


def evaluate(
    run: OpenRun,
    *,
    evaluation: str | None = None,
    versions: Versions = (),
    again: bool = False,
    here: bool = False,
    timeout_s: float = 3600.0,
    say: Say = lambda text: None,
) -> Generator[Evaluated]:
    """Yield the requested results: first those on the log, then new ones as they come.

    If neither evaluation nor versions are named, and no evaluator is alive, all due evaluations are done. `again`
    repeats evaluations that have a result. `here` does the work in this process even if the log names an evaluator on
    another host, whose state cannot be seen from here. `timeout_s` is the time between two answers of another process.
    Own modules must be importable by now (preflight.plan). ConfigError for an evaluation or version that the run does
    not have; RftError if an evaluation got no result.
    """
    names = chosen_evaluations(run.config, evaluation, who=run.run_id)
    evaluators = None if here else _evaluator_alive(run)
    # The reader is made before the log is read.
    with closing(run.transport.reader(run.transport.admin.end_offsets("evals"))) as reader:
        if evaluation is None and not versions and evaluators is None:
            say("no evaluator is alive: evaluating here what is due")
            yield from _work(run, reader, None, say)
            return
        results, wanted = _sorted_out(run, names, versions, again)
        yield from (Evaluated(result, new=False) for result in results)
        if not wanted:
            return
        _ask(run, wanted, timeout_s, requests.user_here())
        if evaluators is not None:
            say(f"asked {evaluators} for {_listed(wanted)}")
            yield from _await(run, reader, wanted, timeout_s, say)
        if wanted:
            say("no evaluator is alive: evaluating here")
            yield from _work(run, reader, wanted, say)
        if wanted:
            raise RftError(
                f"{run.run_id}: no result for {_listed(wanted)}; the weights were deleted meanwhile or are damaged: "
                "see the lines above and `rftstream weights verify`"
            )


def ask_evaluations(
    run: OpenRun,
    *,
    evaluation: str | None = None,
    versions: Versions = (),
    again: bool = False,
    within_s: float = 3600.0,
    by: str,
) -> tuple[int, int]:
    """Send requests to the run's evaluator without waiting. Return the number of requested evaluations, and the number
    that have a result already. ConfigError if no evaluator is alive, and as in `evaluate`."""
    names = chosen_evaluations(run.config, evaluation, who=run.run_id)
    if _evaluator_alive(run) is None:
        raise ConfigError(
            f"{run.run_id}: no evaluator is alive, expected one that can be asked; `rftstream evaluate` does the work "
            "itself"
        )
    results, wanted = _sorted_out(run, names, versions, again)
    if wanted:
        _ask(run, wanted, within_s, by)
    return len(wanted), len(results)


def parse_versions(text: str) -> list[int] | Literal["all"]:
    """Return the versions that a text names, e.g. `0,40,200` or `all`. ConfigError if it names none."""
    if text == "all":
        return "all"
    versions = [version.strip() for version in text.split(",")]
    if not all(version.isdecimal() and version.isascii() and len(version) < 16 for version in versions):
        raise ConfigError(f"got {text[:100]!r}, expected numbers with commas between them, e.g. 0,40,200, or all")
    return [int(version) for version in versions]


def chosen_evaluations(config: RunConfig, evaluation: str | None, *, who: str) -> tuple[str, ...]:
    """Return the names of the selected evaluations. ConfigError if there are none, or not this one."""
    known = config.evaluations
    if not known:
        raise ConfigError(f"{who}: its run file has no evaluations; add [evaluations.NAME]")
    if evaluation is not None and evaluation not in known:
        raise ConfigError(f"--evaluation: unknown {evaluation!r}; {registry.suggest(evaluation, known)}")
    return (evaluation,) if evaluation is not None else tuple(known)


def _sorted_out(
    run: OpenRun, names: Sequence[str], versions: Versions, again: bool
) -> tuple[list[EvalResult], list[_Wanted]]:
    """Return the results on the log, and the evaluations still to do, both in the order of versions."""
    published, results = read_published(run), EvalResults()
    for received in Log(run.transport).messages("evals"):
        if isinstance(received.message, EvalResult):
            results.note(received.message)
    on_log: list[EvalResult] = []
    wanted: list[_Wanted] = []
    for announced in _announced(published, versions):
        for name in names:
            found = None if again else results.find(name, announced.name, published.follower)
            if found is not None:
                on_log.append(found)
            else:
                wanted.append(_Wanted(name, announced, _request_id(name, announced, again), again))
    if wanted:  # their weights must still exist
        published.choose([one.announced.name.version for one in wanted], where="--versions")
    return on_log, wanted


def _announced(published: Published, versions: Versions) -> list[WeightsAnnounced]:
    """Return the announcements in force of the selected versions, oldest first."""
    if versions == "all":
        return list(published.follower.available())
    if not versions:
        return published.choose([], where="--versions")
    in_force = {one.name.version: one for one in published.follower.in_force()}
    if unknown := [version for version in versions if version not in in_force]:
        published.choose(unknown, where="--versions")  # says what there is
    return [in_force[version] for version in sorted(set(versions))]


def _request_id(name: str, announced: WeightsAnnounced, again: bool) -> str:
    """Return the id of a request. The same request always has the same id, and a repeated evaluation has a new one."""
    of = f"{name}-{announced.name.trainer_epoch}-{announced.name.version}"
    return f"{of}-{time.time_ns()}" if again else of


def _evaluator_alive(run: OpenRun) -> str | None:
    """Return in words which evaluator would answer a request, or None if there is none."""
    if run.config.evaluator.count and run.folder.is_live():
        return "the run's evaluator"
    control = read_control(run.transport)
    claim = control.claims.get(EVALUATOR.name)
    if claim is None or (control.finished is not None and claim.host != socket.gethostname()):
        return None  # an evaluator leaves a finished run once its work is done
    alive = is_claimant_alive(claim)
    if alive is False or (alive and claim.pid == os.getpid()):  # the claim of an earlier evaluation in this process
        return None
    unseen = "" if alive else " (cannot be seen from here; if it is gone, give --here)"
    return f"{claim.process}, process {claim.pid} on {claim.host}{unseen}"


def _ask(run: OpenRun, wanted: Sequence[_Wanted], timeout_s: float, by: str) -> None:
    """Write all requests in one transaction."""
    kind, expires_at = RequestKind.evaluate, time.time() + timeout_s * len(wanted)
    requests.say(
        run,
        [
            Request(request_id=one.request_id, kind=kind, expires_at=expires_at, by=by, arguments=one.arguments)
            for one in wanted
        ],
    )


def _taken(records: Sequence[Record], wanted: list[_Wanted] | None) -> Iterator[Evaluated]:
    """Yield the new results, and remove them from `wanted`. If `wanted` is None, yield all results."""
    for record in records:
        message = None if record.value is None else codec.from_record(record)
        if not isinstance(message, EvalResult):
            continue
        met = [one for one in wanted or () if one.is_met_by(message)]
        if wanted is not None:
            wanted[:] = [one for one in wanted if one not in met]
        if met or wanted is None:
            yield Evaluated(message, new=True)


def _listed(wanted: Sequence[_Wanted]) -> str:
    shown = ", ".join(map(str, wanted[:4]))
    return shown if len(wanted) <= 4 else f"{shown} and {len(wanted) - 4} more"


# --------------------------------------------------------------------------------------------- by another process


def _await(run: OpenRun, reader: Reader, wanted: list[_Wanted], timeout_s: float, say: Say) -> Iterator[Evaluated]:
    """Yield results until `wanted` is empty. Stop if no evaluator is alive to do the work."""
    heard = looked = time.monotonic()
    due_s = SAY_S
    while wanted:
        for one in _taken(reader.poll(), wanted):
            heard, due_s = time.monotonic(), SAY_S
            yield one
        now = time.monotonic()
        if wanted and now - heard > timeout_s:
            raise RftError(
                f"evaluator: no result for {_listed(wanted)} within {timeout_s:g} s; look at its log, or "
                "give --timeout, or --here once it is gone"
            )
        if wanted and now - looked >= SAY_S:
            looked = now
            if _evaluator_alive(run) is None:
                return
            _check_held(run, wanted)
            if now - heard >= due_s:
                due_s *= 2
                say(f"waiting for {_listed(wanted)}: {now - heard:.0f} s of {timeout_s:g}")
        if wanted:
            run.transport.wait([reader], LOOK_S)


def _check_held(run: OpenRun, wanted: Sequence[_Wanted]) -> None:
    """Raise an error for a version that was deleted before the evaluator reached it."""
    held = {one.name for one in read_published(run).follower.available()}
    if gone := [one for one in wanted if one.announced.name not in held]:
        raise RftError(
            f"{run.run_id}: no result for {_listed(gone)}: the run has deleted the weights meanwhile; "
            "weights.keep says how many stay, and the same command shows what was evaluated"
        )


# --------------------------------------------------------------------------------------------- in this process


def _work(run: OpenRun, reader: Reader, wanted: list[_Wanted] | None, say: Say) -> Iterator[Evaluated]:
    """Act as the run's evaluator, and yield the results. Stop when `wanted` is empty; if it is None, when no work is
    left."""
    context = role_context(
        config=run.config,
        folder=run.folder,
        transport=run.transport,
        clock=SystemClock(),
        process=f"evaluate-{os.getpid()}",
    )
    service = build_service(EVALUATOR.name, context)
    if wanted is not None:
        service.step.answer_only([one.request_id for one in wanted])  # type: ignore[attr-defined]  # the evaluator's
    ends = {**run.transport.admin.end_offsets("weights"), **run.transport.admin.end_offsets("control")}
    try:
        with closing(drive(service, say, progress_of)) as slices:
            for _ in slices:
                yield from _taken(reader.poll(), wanted)
                if wanted == [] or _is_idle(service, ends):
                    break
    except TakenOver as error:
        raise TakenOver(f"{error}; it does what is left") from None
    for records in read_to_ends(run.transport, reader, run.transport.admin.end_offsets("evals")):
        yield from _taken(records, wanted)


def progress_of(service: Service) -> str:
    """Return in words what an evaluator is working on; empty between two evaluations."""
    health = service.health()
    if health.get("evaluating") is None:
        return ""
    return (
        f"evaluating {health['evaluation']} of version {health['evaluating']}: "
        f"{health['samples_done']} of {health['samples']} samples"
    )


def _is_idle(service: Service, ends: dict[TopicPartition, int]) -> bool:
    """Return whether the evaluator has read everything that was there at its start, and has no work left."""
    step = service.step  # type: ignore[attr-defined]  # it is a single role's
    sources = service.sources()
    if service.health().get("epoch") is None or not sources:
        return False
    seen = all(sources[0].position(place) >= end for place, end in ends.items())
    return seen and step.idle_s() == FOREVER
