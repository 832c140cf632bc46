"""Run a program that a policy wrote, and judge its output: `run_program`, `run_function` and `run_check`.

All three return a ProgramResult and raise nothing for a program's behaviour. A caller's mistake (an unknown language,
values that are no plain data) is a ConfigError. Any number of threads may call them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rftstream.errors import ConfigError
from rftstream.sandbox.base import (
    BoxFile,
    BoxRefused,
    Job,
    JobEnd,
    Limits,
    Outcome,
    SandboxBackend,
    SandboxError,
)
from rftstream.sandbox.compare import same_text, same_value, shown, text_difference
from rftstream.sandbox.inside import plain
from rftstream.sandbox.languages import Language, find_language
from rftstream.sandbox.local import default_backend

TRIES = 2
"""Number of tries of a program if its sandbox fails or the machine is too busy."""
MAX_DETAIL = 2000
COMPILE_LIMITS = Limits(wall_s=30.0, cpu_s=30.0, memory_bytes=1 << 30, disk_bytes=256 << 20)

_STOPPED = {
    "wall": "it took longer than {0.wall_s:g} s",
    "cpu": "it used more than {0.cpu_s:g} s of processor time",
    "memory": "it used more than {0.memory_bytes:,} bytes of memory",
    "output": "it wrote more than {0.output_bytes:,} bytes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnd:
    """The result of one function call."""

    passed: bool | None
    """Whether the value is the expected one; None if nothing was expected."""
    value: Any = None
    """The returned plain value; None if there is none."""
    error: str = ""
    """Why there is no value: the exception, or that the time was up. Empty if there is a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """The result of a program. `run_program`, `run_function` and `run_check` return it."""

    outcome: Outcome
    reason: str = ""
    """Why the program did not pass: wrong, crash, compile, wall, cpu, memory, output. If unscorable: sandbox, overload,
    test."""
    detail: str = ""
    """The reason in words, for people."""
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    """Exit status, or the negative number of the signal that ended the program. It proves nothing: programs choose
    their status."""
    calls: tuple[CallEnd, ...] = ()
    """Results of the function calls: one for each call, even if the program died in between."""
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def passed(self) -> bool:
        """Return whether the program passed."""
        return self.outcome is Outcome.passed


def run_program(
    source: str,
    *,
    language: str = "python",
    stdin: str | bytes = "",
    expected: str | None = None,
    tolerance: float = 0.0,
    limits: Limits | None = None,
    backend: SandboxBackend | None = None,
) -> ProgramResult:
    """Run a whole program, and compare its output.

    The program passes if it ends with status 0 and its stdout is `expected`. Without `expected` nothing is judged: a
    program that ends with status 0 is then `finished`, which does not count as passed.
    """
    test = (stdin, expected)
    return run_tests(source, [test], language=language, tolerance=tolerance, limits=limits, backend=backend)[0]


def run_tests(
    source: str,
    tests: Sequence[tuple[str | bytes, str | None]],
    *,
    language: str = "python",
    tolerance: float = 0.0,
    prelude: str = "",
    limits: Limits | None = None,
    backend: SandboxBackend | None = None,
    stop_early: bool = False,
    keep_output: bool = True,
) -> list[ProgramResult]:
    """Run a program on each pair of stdin and expected stdout, each time in a fresh sandbox. The program is compiled
    once.

    `prelude`: trusted text that runs before a Python program in its module, such as imports. `stop_early`: the list
    ends with the first test that does not pass. Without `keep_output` the results contain no output, so that many tests
    need no more memory than one."""
    spoken, limits = find_language(language), limits or Limits()
    try:
        backend = backend or default_backend()
    except SandboxError as error:
        return [_unscorable("sandbox", str(error)) for _ in tests]
    files, failed = _compiled(source, spoken, backend)
    if failed is not None:
        return [failed for _ in tests]
    results: list[ProgramResult] = []
    for stdin, expected in tests:
        data = stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else stdin
        job = replace(_program(source, spoken, data, limits), prelude=prelude)
        result = _tried(
            partial(_run, backend, job, files),
            partial(_judged, expected=expected, tolerance=tolerance, limits=limits),
        )
        results.append(result if keep_output else replace(result, stdout="", stderr=""))
        if stop_early and result.outcome not in (Outcome.passed, Outcome.finished):
            break
    return results


def run_function(
    source: str,
    function: str,
    calls: Sequence[Sequence[Any]],
    *,
    expected: Sequence[Any] | None = None,
    tolerance: float = 0.0,
    prelude: str = "",
    limits: Limits | None = None,
    backend: SandboxBackend | None = None,
) -> ProgramResult:
    """Call a function of a Python program, or a method of its class Solution, once for each list of arguments.

    The program passes if each call returns the value of `expected` at its place. Arguments and values are plain data:
    None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict. A call that returns any other value
    fails. The program's output is ignored. Without `expected` nothing is judged: the program is `finished` if each call
    returned.
    """
    limits = limits or Limits()
    if expected is not None and len(expected) != len(calls):
        raise ConfigError(f"run_function: got {len(expected)} expected values for {len(calls)} calls")
    try:
        encoded = tuple(plain.encode(list(arguments)).decode() for arguments in calls)
    except plain.NotPlain as error:
        raise ConfigError(f"run_function: arguments: {error}") from None
    try:
        backend = backend or default_backend()
    except SandboxError as error:
        return _unscorable("sandbox", str(error))
    job = Job(mode="calls", source=source, function=function, calls=encoded, prelude=prelude, limits=limits)
    return _tried(
        lambda: _run(backend, job, ()), lambda end: _judged_calls(end, len(calls), expected, tolerance, limits)
    )


def run_check(
    source: str,
    test: str,
    entry_point: str,
    *,
    context: str = "",
    prelude: str = "",
    limits: Limits | None = None,
    backend: SandboxBackend | None = None,
) -> ProgramResult:
    """Run a test with assertions, such as HumanEval's, on a function of a Python program.

    The test runs in its own sandbox. There `candidate` and the name of the entry point stand for the function, whose
    arguments and results are plain data. If the test defines `check`, it is called with the candidate. `context` is
    trusted text that runs before the test, such as the prompt, to define names that the test uses. `prelude` runs
    before the program and before the context. The program passes if the test raises nothing. The result is unscorable
    if the context raises, or if the test is invalid Python, lacks a name or a module, or never calls the function.
    """
    limits = limits or Limits()
    try:
        backend = backend or default_backend()
    except SandboxError as error:
        return _unscorable("sandbox", str(error))
    job = Job(
        mode="check", source=source, function=entry_point, test=test, context=context, prelude=prelude, limits=limits
    )
    return _tried(lambda: _run(backend, job, ()), lambda end: _judged_check(end, limits))


# ------------------------------------------------------------------------------------------------ running


def _run(backend: SandboxBackend, job: Job, files: Sequence[BoxFile]) -> JobEnd:
    with contextlib.closing(backend.create(disk_bytes=job.limits.disk_bytes)) as box:
        if files:
            box.put(files)
        return box.run(job)


def _tried(run: Callable[[], JobEnd], judge: Callable[[JobEnd], ProgramResult]) -> ProgramResult:
    """Run and judge. If the sandbox fails, or the machine is too busy, try again."""
    result = _unscorable("sandbox", "not tried")
    for _ in range(TRIES):
        try:
            end = run()
        except BoxRefused as error:  # by the compiled program
            return _failed(ProgramResult(outcome=Outcome.failed), "compile", str(error))
        except (SandboxError, OSError, RuntimeError, MemoryError) as error:  # when threads or descriptors run out
            result = _unscorable("sandbox", str(error) or type(error).__name__)
            continue
        if end.exit_code is None and end.stopped is None:
            result = _unscorable("sandbox", "sandbox: how the program ended is not known")
            continue
        if end.stopped != "overload":
            return judge(end)
        detail = f"others had the processor for {end.delay_s:.1f} of {end.wall_s:.1f} s"
        result = replace(_base(end), outcome=Outcome.unscorable, reason="overload", detail=detail)
    return result


def _program(source: str, spoken: Language, stdin: bytes, limits: Limits) -> Job:
    if not spoken.run:
        return Job(mode="script", source=source, stdin=stdin, limits=limits)
    return Job(
        mode="command", argv=_filled(spoken.run, source, spoken), environment=spoken.environment, stdin=stdin,
        limits=limits, bounds_addresses=spoken.bounds_addresses,
    )  # fmt: skip


def _filled(command: Sequence[str], source: str, spoken: Language) -> tuple[str, ...]:
    file = spoken.name_file(source)
    return tuple(part.format(file=file, stem=file.rpartition(".")[0]) for part in command)


def _compiled(source: str, spoken: Language, backend: SandboxBackend) -> tuple[Sequence[BoxFile], ProgramResult | None]:
    """Return the files that a program needs, or its result if it cannot be compiled."""
    if not spoken.run:
        return (), None
    file = BoxFile(name=spoken.name_file(source), data=source.encode("utf-8", "surrogatepass"))
    if not spoken.compile:
        return (file,), None
    argv = _filled(spoken.compile, source, spoken)
    job = Job(mode="command", argv=argv, limits=COMPILE_LIMITS, bounds_addresses=spoken.bounds_addresses)
    made: list[BoxFile] = []

    def compile_it() -> JobEnd:
        made.clear()
        with contextlib.closing(backend.create(disk_bytes=job.limits.disk_bytes)) as box:
            box.put([file])
            end = box.run(job)
            if end.exit_code == 0 and end.stopped is None:
                made.extend(one for one in box.get() if one.name != file.name)
            return end

    result = _tried(compile_it, lambda end: _judged(end, None, 0.0, COMPILE_LIMITS))
    if result.outcome is Outcome.finished:
        return made, None
    if result.outcome is Outcome.failed:
        result = replace(result, reason="compile", detail=f"it cannot be compiled: {result.stderr or result.detail}")
    return (), result


# ------------------------------------------------------------------------------------------------ judging


def _unscorable(reason: str, detail: str) -> ProgramResult:
    return ProgramResult(outcome=Outcome.unscorable, reason=reason, detail=detail[:MAX_DETAIL])


def _base(end: JobEnd) -> ProgramResult:
    return ProgramResult(
        outcome=Outcome.failed,
        stdout=end.stdout.decode("utf-8", "replace"),
        stderr=end.stderr.decode("utf-8", "replace"),
        exit_code=end.exit_code,
        wall_s=end.wall_s,
        cpu_s=end.cpu_s,
    )


def _failed(base: ProgramResult, reason: str, detail: str) -> ProgramResult:
    return replace(base, outcome=Outcome.failed, reason=reason, detail=detail[-MAX_DETAIL:])


def _broken(end: JobEnd, base: ProgramResult, limits: Limits) -> ProgramResult | None:
    """Return the result of a program that did not end by itself with status 0; None if it did."""
    if end.stopped is not None:
        return _failed(base, end.stopped, _STOPPED.get(end.stopped, end.stopped).format(limits))
    if end.exit_code != 0:
        how = (
            f"signal {-end.exit_code}" if end.exit_code is not None and end.exit_code < 0 else f"status {end.exit_code}"
        )
        return _failed(base, "crash", f"it ended with {how}: {base.stderr.strip()[-MAX_DETAIL // 2 :]}")
    return None


def _judged(end: JobEnd, expected: str | None, tolerance: float, limits: Limits) -> ProgramResult:
    base = _base(end)
    if (broken := _broken(end, base, limits)) is not None:
        return broken
    if expected is None:
        return replace(base, outcome=Outcome.finished)
    if same_text(base.stdout, expected, tolerance=tolerance):
        return replace(base, outcome=Outcome.passed)
    return _failed(base, "wrong", text_difference(base.stdout, expected, tolerance=tolerance))


def _judged_calls(
    end: JobEnd, num_calls: int, expected: Sequence[Any] | None, tolerance: float, limits: Limits
) -> ProgramResult:
    base = _base(end)
    broken = _broken(end, base, limits)
    load_error = next((_raised(frame[1:]) for frame in end.frames if frame[:1] == b"L"), None)
    lost = load_error or (broken.detail if broken else "the program ended before this call")
    calls = []
    for place in range(num_calls):
        frame = end.frames[place] if place < len(end.frames) else b""
        wanted = None if expected is None else (expected[place],)
        calls.append(_judged_call(frame, wanted, tolerance, lost))
    base = replace(base, calls=tuple(calls))
    bad = next((call for call in calls if call.error or call.passed is False), None)
    if end.stopped is not None:
        return _failed(base, end.stopped, _STOPPED.get(end.stopped, end.stopped).format(limits))
    if bad is None:
        return replace(base, outcome=Outcome.finished if expected is None else Outcome.passed)
    place = calls.index(bad)
    if bad.error:
        is_up = place < len(end.frames) and end.frames[place][:1] == b"T"
        return _failed(base, "cpu" if is_up else "crash", bad.error)
    return _failed(base, "wrong", f"call {place}: got {shown(bad.value)}")


def _judged_call(frame: bytes, wanted: tuple[Any] | None, tolerance: float, lost: str) -> CallEnd:
    passed = None if wanted is None else False
    match frame[:1]:
        case b"V":
            try:
                value = plain.decode(frame[1:])
            except plain.NotPlain as error:
                return CallEnd(passed=passed, error=str(error))
            return CallEnd(
                passed=None if wanted is None else same_value(value, wanted[0], tolerance=tolerance), value=value
            )
        case b"R":
            return CallEnd(passed=passed, error=_raised(frame[1:]))
        case b"N":
            return CallEnd(passed=passed, error=frame[1:MAX_DETAIL].decode("utf-8", "replace"))
        case b"T":
            return CallEnd(passed=passed, error="the time for one call is up")
    return CallEnd(passed=passed, error=lost)


def _raised(body: bytes) -> str:
    try:
        names, text = json.loads(body[: 1 << 16])
        return f"{str(names[0])[:100]}: {str(text)[:MAX_DETAIL]}"
    except (ValueError, TypeError, LookupError, RecursionError):
        return "an error that cannot be read"


def _judged_check(end: JobEnd, limits: Limits) -> ProgramResult:
    base = _base(end)
    if end.verdict == b"P":
        return replace(base, outcome=Outcome.passed)
    if end.verdict is not None and end.verdict[:1] == b"B":
        return _unscorable("test", f"the test cannot begin: {end.verdict[1:].decode('utf-8', 'replace').strip()}")
    if end.stopped is not None:
        return _failed(base, end.stopped, _STOPPED.get(end.stopped, end.stopped).format(limits))
    if end.verdict is not None and end.verdict[:1] == b"F":
        return _failed(base, "wrong", end.verdict[1:].decode("utf-8", "replace").strip())
    if end.verdict is not None and end.verdict[:1] == b"E":
        return _failed(base, "crash", end.verdict[1:].decode("utf-8", "replace").strip())
    return _failed(base, "crash", f"the test did not end: {base.stderr.strip()[-MAX_DETAIL // 2 :]}")
