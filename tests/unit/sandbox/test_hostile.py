"""The corpus: no escape, no faked pass, no hang, and the sandbox goes on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rftstream.sandbox import run_check, run_function, run_program
from rftstream.sandbox.base import Limits, Outcome
from rftstream.sandbox.local import LocalBackend
from rftstream.sandbox.run import ProgramResult
from tests.suite.each import each
from tests.unit.sandbox.corpus import ATTACKS, EXPECTED, HONEST, HOSTILE_FUNCTIONS, PROBES

QUICK = Limits(wall_s=1.5, cpu_s=1.0, call_s=0.5, memory_bytes=256 << 20, disk_bytes=16 << 20)
"""For what is to fail. There is time to reach the limits of memory, disk and processes before those of time."""
ROOMY = Limits(wall_s=120.0)
CHECK = "def check(candidate):\n    assert all(map(lambda pair: candidate(pair[0]) == pair[1], [(41, 42)]))\n"


@pytest.fixture(scope="module")
def backend() -> Iterator[LocalBackend]:
    made = LocalBackend(slots=2)
    yield made
    made.close()


def verdict(run: Callable[..., ProgramResult], *arguments: Any, **settings: Any) -> ProgramResult:
    """Run it until it has a verdict: there is none while this machine is too busy."""
    while (result := run(*arguments, **settings)).reason == "overload":
        pass
    return result


@pytest.mark.sampled(14)
@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_fails(backend: LocalBackend, name: str) -> None:
    result = verdict(run_program, ATTACKS[name], stdin="41", expected=EXPECTED, limits=QUICK, backend=backend)
    assert result.outcome is Outcome.failed, result
    assert run_program("print(42)", expected="42", limits=ROOMY, backend=backend).passed


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBES)
def test_a_probe_reaches_nothing(
    backend: LocalBackend, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFTSTREAM_PROBE", "1")
    secret = tmp_path / "secret"
    secret.write_text("x", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as named:
        named.bind("\0rftstream-probe")
        named.listen()
        source = PROBES[name].replace("PORT", str(server.getsockname()[1])).replace("SECRET", str(secret))
        for _ in range(3):  # one after the other in the same places
            result = run_program(source, limits=ROOMY, backend=backend)
            assert result.outcome is Outcome.finished, result
            assert set(result.stdout.split()) == {"no"}, result.stdout


@pytest.mark.slow
@each("name", HONEST)
def test_an_honest_program_passes(backend: LocalBackend, name: str) -> None:
    result = run_program(HONEST[name], stdin="41\n", expected="42", limits=ROOMY, backend=backend)
    assert result.passed, result


@pytest.mark.sampled(14)
@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE_FUNCTIONS)
def test_no_function_fakes_its_value(backend: LocalBackend, name: str) -> None:
    source = HOSTILE_FUNCTIONS[name]
    called = verdict(run_function, source, "f", [[41]], expected=[42], limits=QUICK, backend=backend)
    assert called.outcome is Outcome.failed, called
    checked = verdict(run_check, source, CHECK, "f", limits=QUICK, backend=backend)
    assert checked.outcome is Outcome.failed, checked


def test_a_function_can_read_its_own_text(backend: LocalBackend) -> None:
    source = "import inspect\ndef f(x): return len(inspect.getsource(f).splitlines()) + x"
    assert run_function(source, "f", [[41]], expected=[42], limits=ROOMY, backend=backend).passed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "test"),
    [("def f(x):\n    import time\n    time.sleep(1000)", "f(1)"), ("f = str", "import time\ntime.sleep(1000)")],
)
def test_a_test_that_waits_ends_with_the_time_of_the_program(backend: LocalBackend, source: str, test: str) -> None:
    result = verdict(run_check, source, test, "f", limits=Limits(wall_s=1.0), backend=backend)
    assert (result.outcome, result.reason) == (Outcome.failed, "wall"), result.detail


def test_a_bool_is_no_number_among_keys(backend: LocalBackend) -> None:
    for wanted, other in (("{1, 2}", {True, 2}), ("{True: 5}", {1: 5}), ("{(1, 0)}", {(True, 0)})):
        source = f"def f(): return {wanted}"
        assert run_function(source, "f", [[]], expected=[eval(wanted)], limits=ROOMY, backend=backend).passed
        assert not run_function(source, "f", [[]], expected=[other], limits=ROOMY, backend=backend).passed


@pytest.mark.slow
def test_four_times_as_many_as_places(backend: LocalBackend) -> None:
    """Whatever runs beside them, honest programs pass and hostile ones fail."""
    names = ["fork bomb", "balloon", "print for ever", "spin", "signals to all", "fill the disk", "exit early", "sleep"]
    jobs = [(name, ATTACKS[name], QUICK) for name in names]
    jobs += [(name, source, ROOMY) for name, source in list(HONEST.items())[: len(names)]]
    jobs.sort(key=lambda job: hash(job[1]))
    threads_before = threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        results = list(
            pool.map(
                lambda job: verdict(run_program, job[1], stdin="41", expected="42", limits=job[2], backend=backend),
                jobs,
            )
        )
    wrong = [(job[0], one) for job, one in zip(jobs, results, strict=True) if one.passed != (job[0] in HONEST)]
    assert not wrong
    assert threading.active_count() < threads_before + 8
