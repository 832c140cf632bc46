"""Places on this machine without an engine: each command runs in bubblewrap, above a root file system of one's own.

The folders of programs (`usr`, `bin`, `lib`, ...) of `root` are shown as they are, and cannot be written. Everything
else of it is copied for each place, and stays there from command to command; of `/`, this machine, only a few files of
`etc` are. What a command leaves in the background ends with it. No image is built: `root` has what tasks and harness
need. The relay to the model runs in a network of the place, which the commands share.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rftstream.environments.places.base import MODEL_PORT, PlaceOrder, PlaceSettings, Ran, last_lines
from rftstream.environments.places.packing import pack_folder
from rftstream.environments.places.processes import OUTPUT_BYTES, end_process
from rftstream.environments.places.relay import RELAY, Relayed
from rftstream.errors import ConfigError, HostedCodeError, HostError
from rftstream.sandbox import cgroups, layers

PREFIX = "rftstream-place-"
"""Begin of the names of places' folders; the host, and id and start time of the owner follow."""
SHOWN = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "opt")
"""Folders of a root file system that places share."""
OMITTED = ("proc", "dev", "sys", "run", "tmp")
OF_MACHINE = ("etc/ld.so.cache", "etc/alternatives", "etc/passwd", "etc/group", "etc/nsswitch.conf", "etc/localtime")
"""Files of this machine that places get, if `root` is `/`."""
PATHS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where programs are found, here and in places."""
START_S = 60.0
DISK_LOOK_S = 5.0
"""Seconds between two looks at how much a place has written."""
BEGIN = 'read -r _ || exit; ulimit -f "$1"; shift; exec "$@"'
"""Waits until its process is in the cgroups, and limits the size of files. Without a word it does not begin."""
SHELL = 'if command -v bash >/dev/null; then exec bash -c "$1" </dev/null; else exec sh -c "$1" </dev/null; fi'
GET = 'test -f "$1" && test ! -L "$1" || exit 3; head -c "$2" "$1"'
SETTINGS = "environments.harbor"

_numbers = itertools.count(1)


class BubblewrapPlaces:
    """Makes places. An explorer makes one for the settings of an environment."""

    def __init__(self, settings: PlaceSettings) -> None:
        self._root = Path(settings.root).expanduser() if settings.root else None
        self._parents = cgroups.find_parents()
        self._is_swept = False

    async def create(self, order: PlaceOrder) -> BubblewrapPlace:
        """Return a new place. `base.Places` lists the errors."""
        if self._root is None or not (self._root / "usr").is_dir():
            raise ConfigError(
                f"{SETTINGS}.root: got {str(self._root or '')!r}, expected a folder with a root file system; make one, "
                "as with `docker export CONTAINER | tar -x -C FOLDER`, or take this machine's programs, '/'"
            )
        for program in ("bwrap", "nsenter", "setpriv"):
            if shutil.which(program, path=PATHS) is None:
                raise ConfigError(f"{SETTINGS}.place: 'bubblewrap' needs the program {program}; install it")
        if order.source.install or order.has_internet:
            what = "installs nothing" if order.source.install else "has no internet"
            raise ConfigError(f"{SETTINGS}.place: 'bubblewrap' {what}; put what tasks need into {self._root}")
        if not self._is_swept:
            self._is_swept = True
            await asyncio.to_thread(sweep)
        return await BubblewrapPlace.start(self._root, self._parents, order)


def sweep() -> None:
    """Remove the cgroups and folders of places whose owner on this machine is dead."""
    cgroups.sweep_all()
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}{socket.gethostname()}-*"):
        pid, _, started = folder.name.removeprefix(f"{PREFIX}{socket.gethostname()}-").partition("-")
        if pid.isdigit() and cgroups.start_time(int(pid)) != started.partition("-")[0]:
            _remove(folder)


class BubblewrapPlace(Relayed):
    """One place: a folder, a relay, and a cgroup. `start` makes it; see `base.Place`."""

    def __init__(self, root: Path, parents: cgroups.Parents | None, order: PlaceOrder) -> None:
        super().__init__()
        self._root, self._order, number = root, order, next(_numbers)
        owner = f"{socket.gethostname()}-{os.getpid()}-{cgroups.start_time(os.getpid())}-"
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX + owner))
        self._cgroup = None if parents is None else cgroups.SandboxCgroup(parents, f"place-{number}")
        self._uid = layers.own_uid(number) if os.geteuid() == 0 else None
        self._making: asyncio.Task[int] | None = None
        """The call of `_make`, in a thread that cannot be cancelled."""
        self._relay_pid = 0
        self._exceeded = ""
        """The limit that ended the place."""

    @classmethod
    async def start(cls, root: Path, parents: cgroups.Parents | None, order: PlaceOrder) -> BubblewrapPlace:
        """Copy the root file system, and start the relay. `base.Places.create` lists the errors."""
        place = cls(root, parents, order)
        try:
            place._making = asyncio.create_task(asyncio.to_thread(place._make))
            copied_bytes = await asyncio.shield(place._making)
            async with asyncio.timeout(START_S):
                if order.model_url:
                    await place._start_relay()
        except BaseException as error:
            await place.close()
            if isinstance(error, OSError | asyncio.IncompleteReadError):
                raise HostError(f"a place above {root} cannot be made: {error}") from None
            raise
        place._tasks.append(asyncio.create_task(place._watch_disk(copied_bytes)))
        return place

    def _make(self) -> int:
        """Make the place's own files, and its limits. Return the bytes of the files."""
        is_machine = self._root.resolve() == Path("/")
        for found in self._root.iterdir():
            target = self._folder / found.name
            if found.is_symlink():
                target.symlink_to(os.readlink(found))
            elif found.is_dir() and (is_machine or found.name in (*SHOWN, *OMITTED)):
                target.mkdir()
            elif found.is_dir():
                shutil.copytree(found, target, symlinks=True, ignore=_special)
        for name in OF_MACHINE if is_machine else ():
            if (found := self._root / name).is_dir():
                shutil.copytree(found, self._folder / name, symlinks=True, ignore=_special)
            elif found.is_file():
                shutil.copy2(found, self._folder / name)
        for name in ("proc", "dev", "tmp", "root"):
            (self._folder / name).mkdir(exist_ok=True)
        (self._folder / "tmp").chmod(0o777)
        if self._uid is not None:
            for folder, _, names in os.walk(self._folder):
                for name in (".", *names):
                    os.chown(os.path.join(folder, name), self._uid, self._uid, follow_symlinks=False)
        if self._cgroup is not None:
            limits = self._order.limits
            for folder in self._cgroup.folders:
                os.makedirs(folder, exist_ok=True)
            self._cgroup.bound(
                memory_bytes=limits.memory_mb << 20,
                processes=limits.pids,
                quota_us=round(limits.cpus * cgroups.PERIOD_US),
            )
        return _size_of(self._folder)

    async def _start_relay(self) -> None:
        ours, theirs = os.pipe()
        command = ["bwrap", "--unshare-user", "--unshare-net", "--unshare-pid", "--unshare-ipc", "--die-with-parent"]
        command += ["--cap-drop", "ALL", "--clearenv", "--info-fd", str(theirs), "--ro-bind", "/", "/"]
        command += ["--proc", "/proc", "--dev", "/dev", sys.executable, "-I", "-S", "-c", RELAY, str(MODEL_PORT)]
        try:
            process = await self._spawn(command, errors=asyncio.subprocess.DEVNULL, pass_fds=(theirs,))
        finally:
            os.close(theirs)
        self._relay = process  # it is ended if what follows fails
        with os.fdopen(ours, "rb") as info:
            self._relay_pid = int(json.loads(await asyncio.to_thread(info.read))["child-pid"])
        await self._begin_tunnel(process, self._order.model_url)

    async def put(self, source: Path, target: str) -> None:
        """Copy the files of a folder into a folder of the place. They are unpacked in it: its links lead nowhere
        else."""
        data = await asyncio.to_thread(pack_folder, source, target.strip("/"))
        code, output = await self._ask(["tar", "-x", "-f", "-", "-C", "/"], data)
        if code:
            raise HostError(f"the place takes no files: {last_lines(output.decode(errors='replace'))}")

    async def run(
        self,
        command: str,
        *,
        timeout_s: float,
        variables: Mapping[str, str] | None = None,
        user: str = "",
        cwd: str = "",
    ) -> Ran:
        """Run a shell command in the place."""
        number = "0" if user in ("", "0", "root") else self._number_of(user)
        options = ["--uid", number, "--gid", number, "--chdir", cwd or "/"]
        for name, value in {**self._order.variables, **(variables or {})}.items():
            options += ["--setenv", name, value]
        try:
            code, output = await self._call(["sh", "-c", SHELL, "sh", command], b"", timeout_s, options)
        except TimeoutError:
            return Ran(exit_code=None, output="")
        return Ran(exit_code=code, output=output.decode(errors="replace"))

    async def get(self, path: str, *, max_bytes: int) -> bytes | None:
        """Return the content of a file of the place."""
        code, data = await self._ask(["sh", "-c", GET, "sh", path, str(max_bytes + 1)], b"", most=max_bytes + 1)
        if code:
            return None
        if len(data) > max_bytes:
            raise HostedCodeError(f"{path}: got more than {max_bytes} bytes")
        return data

    async def _close(self) -> None:
        if self._making is not None:
            await asyncio.gather(self._making, return_exceptions=True)
        await super()._close()
        for process in (*self._running, *([self._relay] if self._relay is not None else [])):
            await end_process(process)
        if self._cgroup is not None:
            await asyncio.to_thread(self._cgroup.remove)
        await asyncio.to_thread(_remove, self._folder)

    async def _ask(self, command: Sequence[str], data: bytes, *, most: int = OUTPUT_BYTES) -> tuple[int, bytes]:
        """Return what `_call` returns, for a command of ours. HostError if it takes too long."""
        try:
            return await self._call(command, data, START_S, most=most)
        except TimeoutError:
            raise HostError(f"the place: no end of {command[0]} within {START_S:g} s") from None

    async def _call(
        self,
        command: Sequence[str],
        data: bytes,
        timeout_s: float,
        options: Sequence[str] = ("--uid", "0", "--gid", "0", "--chdir", "/"),
        *,
        most: int = OUTPUT_BYTES,
    ) -> tuple[int, bytes]:
        """Return the exit code and the output of a command in the place. TimeoutError if it takes too long; then all
        that it started is gone."""
        self._check()
        arguments = os.memfd_create("rftstream-place")  # a list of processes shows no variables
        try:
            os.write(arguments, b"".join(os.fsencode(one) + b"\0" for one in [*self._shown(), *options]))
            os.lseek(arguments, 0, os.SEEK_SET)
            process = await self._spawn([*self._begin(), "--args", str(arguments), *command], pass_fds=(arguments,))
        finally:
            os.close(arguments)
        code, output = await self._finish(process, data, timeout_s=timeout_s, most=most)
        self._check()
        if code < 0:  # of bubblewrap itself; what it runs has no such code
            raise HostError(f"the place has lost a command that it ran: it was killed by signal {-code}")
        return code, output

    def _begin(self) -> list[str]:
        """Return the beginning of a command that runs in the place: in the relay's network, or in none, and as a user
        that owns nothing else."""
        command = []
        if self._relay is not None:
            own = ["--user", "--preserve-credentials"] if self._uid is None else []
            command += ["nsenter", "--target", str(self._relay_pid), "--net", *own]
        if self._uid is not None:
            command += ["setpriv", "--reuid", str(self._uid), "--regid", str(self._uid), "--clear-groups"]
        return [*command, "bwrap"] if self._relay is not None else [*command, "bwrap", "--unshare-net"]

    def _shown(self) -> list[str]:
        """Return what a command in the place sees."""
        command = ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        command += ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
        command += ["--hostname", "place", "--bind", str(self._folder), "/", "--proc", "/proc", "--dev", "/dev"]
        for name in SHOWN:
            if (self._root / name).is_dir() and not (self._root / name).is_symlink():
                command += ["--ro-bind", str(self._root / name), f"/{name}"]
        return [*command, "--setenv", "PATH", PATHS, "--setenv", "HOME", "/root"]

    async def _spawn(
        self, command: Sequence[str], *, errors: int = asyncio.subprocess.STDOUT, pass_fds: Sequence[int] = ()
    ) -> asyncio.subprocess.Process:
        """Start a command of this machine within the place's limits."""
        pipe, blocks = asyncio.subprocess.PIPE, str(self._order.limits.disk_mb * 2048)
        try:
            process = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", BEGIN, "sh", blocks, *command),
                stdin=pipe,
                stdout=pipe,
                stderr=errors,
                env={"PATH": PATHS},
                cwd="/",
                pass_fds=pass_fds,
                start_new_session=True,
            )
        except ValueError as error:
            raise HostedCodeError(
                f"a command of the place: {error}; expected words and variables without NUL"
            ) from None
        except OSError as error:
            raise HostError(f"a command of the place cannot be started: {error}") from None
        try:
            for folder in () if self._cgroup is None else self._cgroup.folders:
                Path(folder, "cgroup.procs").write_text(str(process.pid), encoding="ascii")
        except OSError as error:
            await end_process(process)
            raise HostError(f"a command of the place cannot get its limits: {error}") from None
        assert process.stdin
        process.stdin.write(b"\n")
        return process

    def _number_of(self, user: str) -> str:
        if user.isdigit():
            return user
        with contextlib.suppress(OSError):
            for line in (self._root / "etc" / "passwd").read_text(encoding="utf-8", errors="replace").splitlines():
                name, _, number, *_ = (*line.split(":"), "", "", "")
                if name == user:
                    return number
        raise HostedCodeError(f"the user {user!r} is not in {self._root}/etc/passwd")

    def _check(self) -> None:
        """Raise the error of a place that is known to have ended."""
        if self._exceeded:
            raise HostedCodeError(f"the place was ended: {self._exceeded}")
        if self._relay is not None and self._relay.returncode is not None:
            raise HostError("the place has lost the model: its relay is gone")

    async def _watch_disk(self, copied_bytes: int) -> None:
        """End the place when it has written too much, besides the files that were copied for it."""
        most_mb = self._order.limits.disk_mb
        while True:
            await asyncio.sleep(DISK_LOOK_S)
            size = await asyncio.to_thread(_size_of, self._folder) - copied_bytes
            if size > most_mb << 20:
                self._exceeded = f"it wrote {size >> 20} MB, expected at most {most_mb}"
                for process in tuple(self._running):
                    await end_process(process)
                return


def _special(folder: str, names: list[str]) -> list[str]:
    """Return what is not copied: sockets, pipes and devices, and what this user may not read."""

    def is_copied(name: str) -> bool:
        path = os.path.join(folder, name)
        mode = os.lstat(path).st_mode
        return stat.S_ISLNK(mode) or ((stat.S_ISDIR(mode) or stat.S_ISREG(mode)) and os.access(path, os.R_OK))

    return [name for name in names if not is_copied(name)]


def _size_of(folder: Path) -> int:
    """Return the bytes that files of a folder take."""
    total = 0
    for inner, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(inner, name)).st_blocks * 512
    return total


def _remove(folder: Path) -> None:
    """Remove a folder whose owner may have closed parts of it to itself."""

    def open_and_again(function: object, path: str, error: object) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(path), 0o700)
            os.remove(path)

    shutil.rmtree(folder, onerror=open_and_again)
