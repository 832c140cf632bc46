"""Less isolation than the machine could give: only where it is asked for, and named wherever somebody looks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rftstream.preflight.checks.check import check
from rftstream.rewards.code import CodeReward
from rftstream.sandbox import layers, run_program
from rftstream.sandbox.base import Isolation, Limits
from rftstream.sandbox.inside import box
from rftstream.sandbox.local import LocalBackend
from tests.configs import small_run
from tests.unit.sandbox.corpus import ATTACKS, EXPECTED, PROBES

SHARED = Isolation.shared_user
SLEEP = "import time\ntime.sleep(1000)"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(layers.missing_text(SHARED) is not None, reason="this machine has no such sandbox"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up users of programs' own"),
]


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalBackend]:
    made = LocalBackend(slots=1, isolation=SHARED)
    yield made
    made.close()


def users(isolation: Isolation) -> set[int]:
    """The users, seen from outside, of a sandbox's process 1 and of a program in it."""
    backend = LocalBackend(slots=1, isolation=isolation)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    limits = Limits(wall_s=120.0)
    thread = threading.Thread(target=run_program, args=(SLEEP,), kwargs={"limits": limits, "backend": backend})
    thread.start()
    seen: set[int] = set()
    while thread.is_alive():
        found = [one for one in psutil.Process().children(recursive=True) if one.pid not in before]
        for process in found:
            try:
                num_above = len([one for one in process.parents() if one in found])
                if num_above >= 4:
                    seen.add(process.uids().real)
                if num_above >= 5:  # the program, after which nothing else comes
                    process.kill()
            except psutil.Error:
                continue
        time.sleep(0.02)
    backend.close()
    return seen


def test_programs_run_as_the_own_user_only_where_that_is_asked_for() -> None:
    assert users(SHARED) == {0}
    (user,) = users(Isolation.full)
    assert user >= layers.UID_BASE


def test_a_weaker_sandbox_is_named_in_the_version_of_the_scorer() -> None:
    full, shared = (CodeReward(CodeReward.Config(isolation=one)).version for one in ("full", "shared_user"))
    assert "without-own-user" not in full
    assert shared.endswith("+" + "+".join(layers.weaknesses(SHARED)))
    assert "without-own-user" in shared
    elsewhere = CodeReward(CodeReward.Config(isolation="shared_user", sandbox_url="http://127.0.0.1:9"))
    assert "without" not in elsewhere.version


@pytest.mark.parametrize("isolation", list(Isolation))
def test_check_names_it(isolation: Isolation) -> None:
    report = check(small_run(
        run={"name": "t", "steps": 1}, explorer={"policy": "fake"}, trainer={"backend": "fake"},
        tasksets={"t": {"source": "arithmetic", "reward": "code"}}, rewards={"code": {"isolation": str(isolation)}},
    ))  # fmt: skip
    named = [one for one in report.warnings if one.startswith("sandbox: without own user (given up by isolation")]
    assert len(named) == (isolation is SHARED)


def test_root_without_own_users_needs_a_cgroup_for_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rftstream.sandbox.cgroups.find_parents", lambda: None)
    layers.find_layers.cache_clear()
    try:
        assert "cgroup pids" in (layers.missing_text(SHARED) or "")
        assert layers.missing_text() is None
    finally:
        monkeypatch.undo()
        layers.find_layers.cache_clear()


@pytest.mark.parametrize("name", ["children that nobody waits for", "signals to all", "fork bomb"])
def test_attacks_fail_without_own_users(shared: LocalBackend, name: str) -> None:
    limits = Limits(wall_s=1.5, cpu_s=1.0, memory_bytes=256 << 20, disk_bytes=16 << 20)
    assert run_program(ATTACKS[name], stdin="41", expected=EXPECTED, limits=limits, backend=shared).reason
    assert run_program("print(42)", expected="42", limits=Limits(wall_s=120.0), backend=shared).passed


PROC_SYS = """
try: open("/proc/sys/kernel/core_pattern", "r+")
except OSError as error: print(error.errno)
"""


def test_the_kernels_settings_are_read_only_even_without_landlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "has", lambda name, *isolation: False)
    backend = LocalBackend(slots=1, isolation=SHARED)
    result = run_program(PROC_SYS, limits=Limits(wall_s=120.0), backend=backend)
    backend.close()
    assert result.stdout.strip() == str(errno.EROFS), result


# whose names of descriptors its own user may list, and no more
@pytest.mark.parametrize("name", [name for name in PROBES if name != "memory of process 1"])
def test_probes_reach_nothing_without_own_users(shared: LocalBackend, name: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x", encoding="utf-8")
    source = PROBES[name].replace("PORT", "9").replace("SECRET", str(tmp_path / "secret"))
    result = run_program(source, limits=Limits(wall_s=120.0), backend=shared)
    assert set(result.stdout.split()) == {"no"}, result


def test_the_processes_outside_cannot_be_listed_without_own_users(shared: LocalBackend) -> None:
    source = "import os\nprint(os.listdir('/outer-proc'))"
    listed = run_program(source, limits=Limits(wall_s=120.0), backend=shared)
    assert "PermissionError" in listed.stderr or listed.stdout.strip() == "[]"


def test_who_lets_others_overtake_is_not_delayed_by_them() -> None:
    """Without Landlock a program could fake an overloaded machine in this way."""
    if not os.path.exists("/proc/self/autogroup"):
        pytest.skip("this kernel has no groups of sessions")
    source = "open('/proc/self/autogroup', 'w').write('19'); print(1, flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", source], stdin=pipe, stdout=pipe, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline()
        assert box._has_low_priority_group(process.pid)
        process.stdin.write(b"\n")
    assert not box._has_low_priority_group(os.getpid())
