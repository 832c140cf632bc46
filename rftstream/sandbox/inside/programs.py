"""How a process becomes a program. This module only passes values in and out; another one compares them.

A frame on the program's channel is four bytes of length and a body. The body's first byte is its type:

    from a program    V value, R what it raised, T its time for one call is up, N its value is no plain data,
                      L it cannot be loaded
    to a program      C a call: (name, arguments, keywords)
    from a test       P it passed, F it failed, with the reason, B the test itself cannot begin, with the reason

A program may write anything to its channel. That has the same effect as returning it.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import io
import json
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn

from rftstream.sandbox.inside import plain
from rftstream.sandbox.inside.confine import HOME, IGNORED

CHANNEL, VERDICT = 3, 4
"""Descriptors: of the channel for plain values, and of the judge to which a test reports."""
MAX_TEXT, MAX_LINE = 2000, 400


class CallTimeout(BaseException):
    """The processor time of one call is used up."""


class CandidateGone(BaseException):
    """The program that a test calls has ended, or sends no valid frames."""


def become(job: dict[str, Any]) -> NoReturn:
    """Carry out the job, and end the process."""
    code = 1
    try:
        if job["mode"] == "command":
            _execute(job)
        _open_streams()
        _set_aside()
        code = MODES[job["mode"]](job)
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException:
        _show_error()
    finally:
        code = _finish(code)
        os._exit(code)


def _execute(job: dict[str, Any]) -> NoReturn:
    argv = job["argv"]
    for number in IGNORED:
        signal.signal(number, signal.SIG_DFL)
    environment = {**os.environ, **job["environment"]}
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _open_streams() -> None:
    stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115  # for the whole process
    stdout = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8", errors="surrogateescape"
    )
    stderr = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(2, "w", closefd=False)),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )
    sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = stdout  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = stderr  # type: ignore[misc]


def _set_aside() -> None:
    """Prepare the interpreter for a program: its own folder on the path, none of our modules, and no limit on the
    digits of integers."""
    sys.set_int_max_str_digits(0)
    sys.path[:] = [HOME, *(one for one in sys.path if one != "/sandbox")]
    for name in [module for module in sys.modules if module.partition(".")[0] == "rftstream"]:
        del sys.modules[name]


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1


def _show_error() -> None:
    try:
        traceback.print_exc(limit=-20)
    except BaseException:
        os.write(2, b"an error that cannot be shown\n")


def _finish(code: int) -> int:
    """End as an interpreter does: threads, then exit functions, then unwritten output."""
    for step in (threading._shutdown, atexit._run_exitfuncs, _flush_stdout, _flush_stderr):  # type: ignore[attr-defined]
        try:
            step()
        except BaseException:
            code = code or 120
    return code


def _flush_stdout() -> None:
    if sys.stdout is not None and not getattr(sys.stdout, "closed", False):  # a program may close or replace it
        sys.stdout.flush()


def _flush_stderr() -> None:
    if sys.stderr is not None and not getattr(sys.stderr, "closed", False):
        sys.stderr.flush()


def _load(job: dict[str, Any], name: str) -> None:
    """Run a program's text in a module of this name, after the prelude."""
    source = job["source"]
    module = types.ModuleType(name)
    module.__dict__["__file__"] = f"{HOME}/program.py"
    globals_ = module.__dict__
    sys.modules[name] = module
    with open(f"{HOME}/program.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(source)  # tracebacks, `inspect` and child processes read it
    _prelude(job, globals_)
    exec(compile(source.removeprefix("\ufeff"), "program.py", "exec", dont_inherit=True), globals_)


def _prelude(job: dict[str, Any], globals_: dict[str, Any]) -> None:
    """Run the prelude of a program or a test. It cannot define the requested function, which the program has to
    define."""
    with contextlib.suppress(BaseException):
        exec(compile(job["prelude"], "prelude.py", "exec", dont_inherit=True), globals_)
    globals_.pop(job["function"].rpartition(".")[2], None)


# ------------------------------------------------------------------------------------------------ a whole program


def _script(job: dict[str, Any]) -> int:
    sys.argv = ["program.py", *job["argv"]]
    _load(job, "__main__")
    return 0


# ------------------------------------------------------------------------------------------------ functions


def _calls(job: dict[str, Any]) -> int:
    answer = _FunctionServer(job["call_s"])
    if (found := answer.load(job)) is None:
        return 1
    for arguments in job["calls"]:
        answer.call(found, job["function"], tuple(plain.decode(arguments.encode())), {})
    return 0


def _serve(job: dict[str, Any]) -> int:
    answer = _FunctionServer(job["call_s"])
    if (found := answer.load(job)) is None:
        return 1
    while (body := _read_frame(CHANNEL)) is not None:
        name, arguments, keywords = plain.decode(body[1:])
        answer.call(found, name, arguments, keywords)
    return 0


class _FunctionServer:
    """Calls functions of a program, and writes the result of each call to the channel."""

    def __init__(self, call_s: float) -> None:
        self._call_s = call_s

    def load(self, job: dict[str, Any]) -> types.ModuleType | None:
        """Run the program's text. Return its module; if that fails, report the failure and return None."""
        try:
            _load(job, "program")
        except BaseException as error:
            _write_frame(CHANNEL, b"L" + _described(error))
            return None
        return sys.modules["program"]

    def call(self, module: types.ModuleType, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Call a function by name."""
        try:
            signal.signal(signal.SIGPROF, _time_is_up)
            signal.setitimer(signal.ITIMER_PROF, self._call_s)
            try:
                value = _function(module, name)(*arguments, **keywords)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            body = b"V" + plain.encode(value)
        except CallTimeout:
            body = b"T"
        except plain.NotPlain as error:
            body = b"N" + str(error).encode()[:MAX_TEXT]
        except BaseException as error:
            body = b"R" + _described(error)
        _write_frame(CHANNEL, body)


def _time_is_up(number: int, frame: object) -> NoReturn:
    raise CallTimeout


def _function(module: types.ModuleType, name: str) -> Callable[..., Any]:
    """Return a function of the program, or a method of its class Solution, which such tests use."""
    found: Callable[..., Any] | None = module.__dict__.get(name)
    if found is None and "Solution" in module.__dict__:
        found = getattr(module.__dict__["Solution"](), name, None)
    if not callable(found):
        raise NameError(f"name {name!r} is not defined, or is no function")
    return found


def _described(error: BaseException) -> bytes:
    try:
        names = [one.__name__ for one in type(error).__mro__][:20]
        text = str(error)[:MAX_TEXT]
    except BaseException:
        names, text = ["Exception"], "an error that cannot be shown"
    return json.dumps([names, text]).encode()


# ------------------------------------------------------------------------------------------------ tests that assert


def _check(job: dict[str, Any]) -> int:
    """Run a test whose candidate is in another sandbox, and send the verdict to the judge."""
    candidate = Candidate(job["function"])
    globals_: dict[str, Any] = {"__name__": "__test__", "__builtins__": builtins}
    _prelude(job, globals_)
    try:
        exec(compile(job["context"], "context.py", "exec", dont_inherit=True), globals_)
        test = compile(job["test"], "test.py", "exec", dont_inherit=True)
    except BaseException as error:
        _write_frame(VERDICT, b"B" + _last_lines(error))
        return 0
    globals_[job["function"].rpartition(".")[2]] = candidate
    globals_["candidate"] = candidate
    try:
        exec(test, globals_)
        if callable(globals_.get("check")):
            globals_["check"](candidate)
    except CandidateGone as error:
        body = b"E" + f"the program has ended before its test: {error}".encode()
    except BaseException as error:
        own = not candidate.was_called or (isinstance(error, NameError | ImportError) and not _came_through(error))
        body = b"B" + _last_lines(error) if own else b"F" + _failure(error, job["test"], candidate)
    else:
        body = b"P" if candidate.was_called else b"B" + b"it does not call the function"
    _write_frame(VERDICT, body)
    return 0


def _came_through(error: BaseException) -> bool:
    """Return whether an error came from a call of the candidate."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is Candidate.__call__.__code__ for frame, _ in frames)


def _failure(error: BaseException, test: str, candidate: Candidate) -> bytes:
    """Return the line of the test that raised, what it raised, and the last call of the function."""
    frames = traceback.walk_tb(error.__traceback__)
    numbers = [number for frame, number in frames if frame.f_code.co_filename == "test.py"]
    lines = test.split("\n")[numbers[-1] - 1 :] if numbers else []
    raised = "".join(traceback.format_exception_only(error)).strip()
    said = [*(line.strip()[:MAX_LINE] for line in lines[:1]), raised[:MAX_LINE], candidate.last_call()]
    return ": ".join(said).encode(errors="replace")[:MAX_TEXT]


def _last_lines(error: BaseException) -> bytes:
    return "".join(traceback.format_exception(error, limit=-1)).encode(errors="replace")[-MAX_TEXT:]


class Candidate:
    """Stands for a function in another sandbox. Only plain values are exchanged, so no hostile object comes here."""

    was_called = False

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self._given: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self._gave: tuple[Any, ...] = ()

    def last_call(self) -> str:
        """Return the last call with what it gave, for people."""
        arguments, keywords = self._given
        try:
            given = ", ".join([*map(repr, arguments), *(f"{name}={one!r}" for name, one in keywords.items())])
            gave = repr(self._gave[0])[:MAX_LINE] if self._gave else "no value"
            return f"the last call {self.__name__}({given[:MAX_LINE]}) gave {gave}"
        except ValueError:
            return "the last call cannot be shown"

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the function. Its exception is raised here as the nearest built-in one."""
        self.was_called = True
        self._given, self._gave = (arguments, keywords), ()
        try:
            call = b"C" + plain.encode((self.__name__, arguments, keywords))
        except plain.NotPlain as error:
            raise CandidateGone(str(error)) from None
        body = None
        with contextlib.suppress(OSError):
            with contextlib.suppress(OSError):  # a program that has ended takes no call, but has said why
                _write_frame(CHANNEL, call)
            body = _read_frame(CHANNEL)
        if body is None or body[:1] in (b"L", b"T"):
            raise CandidateGone(_shown(body))
        if body[:1] == b"V":
            try:
                value = plain.decode(body[1:])
            except plain.NotPlain as error:
                raise CandidateGone(str(error)) from None
            self._gave = (value,)
            return value
        raise _as_builtin(body)


def _shown(body: bytes | None) -> str:
    if body is None:
        return "no answer"
    if body[:1] == b"T":
        return "the time for one call is up"
    try:
        names, text = json.loads(body[1:])
        return f"{names[0]}: {text}"
    except Exception:  # the program may have written anything
        return body[1:].decode(errors="replace")


def _as_builtin(body: bytes) -> Exception:
    if body[:1] == b"N":
        return TypeError(body[1:].decode(errors="replace"))
    try:
        names, text = json.loads(body[1:])
        for name in names:
            kind = getattr(builtins, str(name), None)
            if kind in (StopIteration, StopAsyncIteration):
                break  # it would end the test's own loops before they have compared everything
            if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
                return kind(str(text))  # UnicodeDecodeError and others need more than a text
    except Exception:
        raise CandidateGone("an answer that is no frame") from None
    return RuntimeError(str(text))


def _read_frame(descriptor: int, most: int = 64 << 20) -> bytes | None:
    """Return the next frame, or None at the end of the stream and for invalid data."""
    length = int.from_bytes(_read(descriptor, 4), "little")
    if not 0 < length <= most:
        return None
    body = _read(descriptor, length)
    return body if len(body) == length else None


def _read(descriptor: int, length: int) -> bytes:
    data = bytearray()
    while len(data) < length and (part := os.read(descriptor, length - len(data))):
        data += part
    return bytes(data)


def _write_frame(descriptor: int, body: bytes) -> None:
    data = memoryview(len(body).to_bytes(4, "little") + body)
    while data:
        data = data[os.write(descriptor, data) :]


MODES: dict[str, Callable[[dict[str, Any]], int]] = {
    "script": _script,
    "calls": _calls,
    "serve": _serve,
    "check": _check,
}
"""Name of a mode -> the function that runs it and returns its exit code."""
