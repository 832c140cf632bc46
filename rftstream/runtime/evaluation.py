"""Evaluating a version when somebody asks: by the run's evaluator if one is alive, else here.

Here means: this process takes the role for as long as there is something to do, as any worker would, by a claim. So
two that are started at once do not do the same work twice, and what the log says is the same either way.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rftstream import codec, plugins
from rftstream.clock import SystemClock
from rftstream.errors import ConfigError, RftError, TakenOver
from rftstream.messages import EvalResult, Request, RequestKind, WeightsAnnounced
from rftstream.runtime.deletion import is_alive
from rftstream.runtime.observer import read_control
from rftstream.runtime.published import read_published
from rftstream.runtime.role import FOREVER
from rftstream.runtime.runs import OpenRun
from rftstream.runtime.service import Service, begin_positions, build_service
from rftstream.transport.base import Reader, TopicPartition

LOOK_S = 0.25
SAY_S = 5.0
EVALS = TopicPartition("evals", 0)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for. Without a request only what is due anyway."""

    evaluations: tuple[str, ...]
    request: Request | None


def evaluate(
    run: OpenRun,
    *,
    evaluation: str | None = None,
    version: int | None = None,
    here: bool = False,
    timeout_s: float = 3600.0,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[EvalResult]:
    """Results as they come: of the request, and of what is still due where the work is done here.

    Own modules must be importable by now (host.prepare_process). `here`: also if the log names an evaluator on another
    host, whom nobody can see from here. ConfigError for what the run does not have."""
    evaluators = not here and _evaluator_alive(run)
    wanted = _wanted(run, evaluation, version, needed=bool(evaluators), timeout_s=timeout_s)
    reader = run.transport.reader(run.transport.admin.end_offsets("evals"))
    try:
        if wanted.request is not None:
            _put(run, wanted.request)
        if evaluators and wanted.request is not None:
            say(f"asked {evaluators}")
            missing = set(wanted.evaluations)
            yield from _await(run, wanted.request.request_id, missing, reader, timeout_s, say)
            if not missing:
                return
        say("no evaluator is alive: evaluating here")
        yield from _work(run, reader, say)
    finally:
        reader.close()


def _wanted(run: OpenRun, evaluation: str | None, version: int | None, *, needed: bool, timeout_s: float) -> Wanted:
    known = run.config.evaluations
    if not known:
        raise ConfigError(f"{run.run_id}: its run file has no evaluations; add [evaluations.NAME] and `resume`")
    if evaluation is not None and evaluation not in known:
        raise ConfigError(f"--evaluation: unknown {evaluation!r}; {plugins.suggest(evaluation, known)}")
    announced = _announced(run, version)
    names = (evaluation,) if evaluation is not None else tuple(known)
    asked = evaluation is not None or version is not None
    if not (asked or needed):
        return Wanted(names, None)
    arguments: dict[str, object] = {"version": announced.name.version}
    if evaluation is not None:
        arguments["evaluation"] = evaluation
    request = Request(
        request_id=f"{socket.gethostname().partition('.')[0]}-{os.getpid()}-{time.time_ns()}",
        kind=RequestKind.evaluate, arguments=arguments, expires_at=time.time() + timeout_s,
    )  # fmt: skip
    return Wanted(names, request)


def _announced(run: OpenRun, version: int | None) -> WeightsAnnounced:
    """The version in force that is meant, with its weights still in the store."""
    published = read_published(run)
    if version is None:
        return published.follower.in_force()[-1]
    return published.choose([version], where="--version")[0]


def _evaluator_alive(run: OpenRun) -> str | None:
    """Who would answer a request, in words; None if nobody does."""
    if run.config.evaluator.count and run.folder.is_live():
        return "the run's evaluator"
    control = read_control(run.transport)
    claim = control.claims.get("evaluator")
    if claim is None or (control.finished is not None and claim.host != socket.gethostname()):
        return None  # it leaves a finished run once it is done
    alive = is_alive(claim)
    if alive is False or (alive and claim.pid == os.getpid()):  # our own, of an evaluation before
        return None
    unseen = "" if alive else " (cannot be seen from here; if it is gone, give --here)"
    return f"{claim.process}, process {claim.pid} on {claim.host}{unseen}"


def _put(run: OpenRun, request: Request) -> None:
    producer = run.transport.producer(f"{run.run_id}.user.{socket.gethostname()}.{os.getpid()}")
    producer.start()
    producer.commit([codec.to_record(request, "control", 0, run=run.run_id)])
    producer.close()


def _news(reader: Reader) -> list[EvalResult]:
    messages = [codec.from_record(record) for record in reader.poll() if record.value is not None]
    return [one for one in messages if isinstance(one, EvalResult)]


# --------------------------------------------------------------------------------------------- by another process


def _await(
    run: OpenRun, request_id: str, missing: set[str], reader: Reader, timeout_s: float, say: Callable[[str], None]
) -> Iterator[EvalResult]:
    """Until nothing is missing, or nobody is alive any more who would do it."""
    began = said = time.monotonic()
    while missing:
        for result in _news(reader):
            if result.request_id == request_id:
                missing.discard(result.evaluation)
                yield result
        now = time.monotonic()
        if now - began > timeout_s:
            raise RftError(
                f"evaluator: no result for {', '.join(sorted(missing))} within {timeout_s:g} s; look at its log, or "
                "give --timeout, or --here once it is gone"
            )
        if missing and now - said >= SAY_S:
            said = now
            if not _evaluator_alive(run):
                return
            say(f"waiting for {', '.join(sorted(missing))}: {now - began:.0f} s of {timeout_s:g}")
        if missing:
            run.transport.wait([reader], LOOK_S)


# --------------------------------------------------------------------------------------------- in this process


def _work(run: OpenRun, reader: Reader, say: Callable[[str], None]) -> Iterator[EvalResult]:
    service = build_service("evaluator", config=run.config, folder=run.folder, transport=run.transport,
                            clock=SystemClock(), process=f"evaluate-{os.getpid()}")  # fmt: skip
    ends = {**run.transport.admin.end_offsets("weights"), **run.transport.admin.end_offsets("control")}
    evals = begin_positions(run.transport, ("evals",))
    try:
        service.start()
        said = time.monotonic()
        while not (service.done or _is_idle(service, ends)):
            idle_s = service.tick()
            yield from _news(reader)
            if time.monotonic() - said >= SAY_S:
                said = time.monotonic()
                say(f"evaluating version {service.health().get('evaluating')}")
            if idle_s > 0 and not service.done:
                run.transport.wait(service.sources(), min(idle_s, LOOK_S))
    except TakenOver as error:
        raise TakenOver(f"{error}; it does what is left") from None
    finally:
        service.close()
    while reader.position(EVALS) < run.transport.admin.end_offsets("evals").get(EVALS, evals[EVALS]):
        yield from _news(reader)
        run.transport.wait([reader], 0.0)


def _is_idle(service: Service, ends: dict[TopicPartition, int]) -> bool:
    """It has seen all that was there when it began, and nothing of it is left to do."""
    step = service.step  # type: ignore[attr-defined]  # it is a single role's
    sources = service.sources()
    if service.health().get("epoch") is None or not sources:
        return False
    seen = all(sources[0].position(place) >= end for place, end in ends.items())
    return seen and step.idle_s() == FOREVER
