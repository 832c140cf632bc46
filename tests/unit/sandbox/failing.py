"""Break something that the sandbox needs, as NAME says, and score programs: `python failing.py NAME`.

It prints what the reward `code` says before, while and after: the reward as a number, or why there is none.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from rftstream.errors import RewardError
from rftstream.rewards.base import RewardInput
from rftstream.rewards.code import CodeReward
from rftstream.sandbox import cgroups, local
from rftstream.sandbox.inside import kernel

FUNCTION = {"fn_name": "f", "inputs": [[1]], "outputs": [2]}
ASSERTS = {"test": "assert f(1) == 2", "entry_point": "f"}
RIGHT, WRONG = "def f(x): return x + 1", "def f(x): return x"
SLOW = "import time\ntime.sleep(20)\n"
"""Before a program that is not to come to its end: whoever kills it may come late on a busy machine."""
CAP_SETUID = 7


def main() -> None:
    name = sys.argv[1]
    reward = CodeReward(CodeReward.Config(wall_s=30.0, cpu_s=30.0))
    if name in WHILE_WARM:
        say("before", reward)
    with BREAK[name]():
        say("while", reward, SLOW)
    if name not in FOR_GOOD:
        say("after", reward)


def say(when: str, reward: CodeReward, before: str = "") -> None:
    """Score a right and a wrong program, by calls of a function and by a test that asserts."""
    for info in ({"tests": FUNCTION}, ASSERTS):
        for source in (RIGHT, WRONG):
            item = RewardInput(
                completion=before + source, answer=None, prompt="", messages=(), info=info, data_source="",
                num_tokens=1, truncated=False,
            )  # fmt: skip
            try:
                print(when, reward(item).reward, flush=True)
            except RewardError as error:
                print(when, "unscorable", str(error).replace("\n", " "), flush=True)


@contextlib.contextmanager
def without_bubblewrap() -> Iterator[None]:
    path, os.environ["PATH"] = os.environ["PATH"], str(Path(sys.executable).parent)
    yield
    os.environ["PATH"] = path


@contextlib.contextmanager
def without_right_to_change_user() -> Iterator[None]:
    """Give up CAP_SETUID, for good, also for what is executed."""
    kernel.prctl(kernel.PR_CAPBSET_DROP, CAP_SETUID)
    libc, header = ctypes.CDLL(None, use_errno=True), struct.pack("=Ii", 0x20080522, 0)
    capabilities = ctypes.create_string_buffer(24)
    number = {"x86_64": (125, 126), "aarch64": (90, 91)}[kernel.machine()]
    assert libc.syscall(number[0], ctypes.create_string_buffer(header), capabilities) == 0
    sets = list(struct.unpack("=6I", capabilities.raw))
    for place in range(3):
        sets[place] &= ~(1 << CAP_SETUID)
    assert libc.syscall(number[1], ctypes.create_string_buffer(header), struct.pack("=6I", *sets)) == 0
    yield


@contextlib.contextmanager
def without_processes() -> Iterator[None]:
    """Let the cgroup of this process have no more processes and threads than there are now."""
    parents = cgroups.find_parents()
    assert parents is not None
    local.default_backend()  # it finds where its cgroups are made before this process moves
    folder = parents.by_controller["pids"] / f"rftstream-test-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        (folder / "pids.max").write_text((folder / "pids.current").read_text(encoding="ascii"), encoding="ascii")
        yield
    finally:
        (folder / "pids.max").write_text("max", encoding="ascii")
        (folder.parent / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        folder.rmdir()


@contextlib.contextmanager
def with_few_processes_for_a_user() -> Iterator[None]:
    """Set RLIMIT_NPROC, which binds the user that programs run as."""
    resource.setrlimit(resource.RLIMIT_NPROC, (20, 20))
    yield


@contextlib.contextmanager
def with_memory_cgroup_read_only() -> Iterator[None]:
    """Mount what bounds memory read-only, for this process alone. Its warm interpreters are there already."""
    parents = cgroups.find_parents()
    assert parents is not None
    place = str(parents.by_controller["memory"])
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount(place, place, None, kernel.MS_BIND)
    kernel.mount("none", place, None, kernel.MS_BIND | 32 | kernel.MS_RDONLY)  # 32: remount
    for found in places():
        if found._cgroup is not None:
            found._cgroup._memory_bytes = 0  # so that the limit is written anew
    yield
    assert ctypes.CDLL(None).umount2(place.encode(), 2) == 0


def places() -> list[local.SandboxPlace]:
    backend = local.default_backend()
    return [*backend._programs._idle, *backend._judges._idle]


def killed_all_the_time(which: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Kill what is in the sandboxes of this process as soon as it is there: warm interpreters or processes 1."""

    @contextlib.contextmanager
    def break_it() -> Iterator[None]:
        import psutil

        done = threading.Event()

        def kill() -> None:
            while not done.wait(0.02):
                for process in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.Error, ValueError):  # one is gone meanwhile
                        above = [parent.pid for parent in process.parents()]
                        if above.index(os.getpid()) == DEPTHS[which]:
                            process.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        yield
        done.set()
        killer.join()

    return break_it


DEPTHS = {"keeper": 0, "zygote": 3, "process 1": 4}
"""How many of our processes stand between a process and this one: keeper, bubblewrap, its process 1, zygote, box."""

BREAK: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "no bubblewrap": without_bubblewrap,
    "no right to change the user": without_right_to_change_user,
    "no processes": without_processes,
    "few processes for a user": with_few_processes_for_a_user,
    "memory cgroup read-only": with_memory_cgroup_read_only,
    "keeper killed": killed_all_the_time("keeper"),
    "zygote killed": killed_all_the_time("zygote"),
    "process 1 killed": killed_all_the_time("process 1"),
}
WHILE_WARM = {"memory cgroup read-only", "zygote killed", "process 1 killed"}
"""What is broken after programs have run."""
FOR_GOOD = {"no right to change the user", "few processes for a user"}
"""What this process cannot mend."""

if __name__ == "__main__":
    main()
