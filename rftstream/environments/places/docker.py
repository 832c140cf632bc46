"""Places as containers of Docker or Podman, by the command of the engine.

Everything goes through the command's own pipes, so the engine may run on another machine. A container lives as long as
its `docker run` is connected: its first process reads stdin until that ends. So nothing is left when this process is
killed, and what an engine or a machine that died has left is removed by the next start (`sweep`)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rftstream.environments.places.base import MODEL_PORT, PlaceOrder, PlaceSettings, Ran, last_lines
from rftstream.environments.places.images import Images
from rftstream.environments.places.packing import TAR_BYTES, pack_folder, unpack_file
from rftstream.environments.places.processes import OUTPUT_BYTES, communicate, drain, end_process, read_up_to
from rftstream.environments.places.relay import RELAY, Tunnel
from rftstream.errors import ConfigError, HostedCodeError, HostError
from rftstream.sandbox.cgroups import start_time

LABEL = "rftstream.place"
"""Label of each container: `HOST PID START UNTIL` of its owner."""
COMMAND_S = 120.0
"""Largest number of seconds of one command of the engine, except builds and what a place runs."""
DISK_LOOK_S = 5.0
"""Seconds between two looks at how much a place has written."""
CPU_PERIOD_US = 100_000
WRONG_MACHINE = "exec format error"
"""Words of the kernel for programs of another processor."""
READY = "rftstream-ready"
KEEPER = f"echo {READY}; exec cat >/dev/null"
"""First process of a container. It ends with its stdin, and the container with it."""
END = "rftstream-end"
"""Last word of each command's output. Without it the engine's command has ended, and the other may go on."""
ENGINE_FAILED = (1, 125, 255)
"""Exit codes of the engine's command about itself: Docker's, Podman's, and that of ssh."""
SHELL = f"""
kept=$(mktemp) || kept=/dev/null
if command -v bash >/dev/null; then bash -c "$1"; else sh -c "$1"; fi >"$kept" 2>&1 </dev/null
code=$?
tail -c {OUTPUT_BYTES} "$kept"; rm -f "$kept"; printf {END}
exit $code
"""
"""Runs a command, by bash as Harbor does. Its output goes through a file: a process that the command leaves in the
background would keep a pipe open."""
KILL = 'for one in /proc/[0-9]*; do grep -qs "$1" "$one/environ" && kill -9 "${one#/proc/}"; done 2>/dev/null; true'
"""Ends all processes with a mark among their variables."""
OF_ENGINE = re.compile(
    r"PATH|HOME|TMPDIR|(HTTPS?|ALL|NO)_PROXY|STORAGE_(DRIVER|OPTS)|REGISTRY_AUTH_FILE|GODEBUG|SSH_AUTH_SOCK"
    r"|(DOCKER|BUILDKIT_|_?CONTAINERS?_|PODMAN_|XDG_|LD_|SSL_CERT_).*",
    re.IGNORECASE | re.DOTALL,
)
"""Variables that the engine's command reads itself. A task that sets one does not set it for the engine."""
NO_ENGINE = (
    "Cannot connect to",
    "permission denied while trying",
    "unable to connect to",
    "is the docker daemon running",
    "error during connect",
    "dial-stdio] has exited",
)
"""Words of the engine's command that reaches no engine."""
AWAY_S = 300.0
"""Seconds for which an engine that has answered before is waited for."""
AWAY_LOOK_S = 2.0


class DockerPlaces:
    """Makes containers, and the images for them. An explorer makes one for the settings of an environment."""

    def __init__(self, settings: PlaceSettings) -> None:
        self._settings = settings
        self._images = Images(self)
        self._host = {name: settings.engine_host for name in ("DOCKER_HOST", "CONTAINER_HOST") if settings.engine_host}
        self._has_answered = False
        self._is_away = False
        """Whether the newest command that failed has reached no engine."""
        self._left: set[str] = set()
        """Containers that could not be removed."""
        self._is_swept = False

    async def create(self, order: PlaceOrder) -> DockerPlace:
        """Return a new container. While an engine that has answered before does not, it is waited for. `base.Places`
        lists the errors."""
        while True:
            try:
                return await self._create(order)
            except HostError:
                if not self._is_away:
                    raise
                await self._wait_until_back()

    async def _create(self, order: PlaceOrder) -> DockerPlace:
        if not self._is_swept:
            await self.sweep()
            self._is_swept = True
        for name in list(self._left):
            self._left.discard(name)
            await self.remove(name)
        image = await self._images.of_source(order.source)
        if order.model_url:
            await self._images.pull(self._settings.relay_image, order.source.build_timeout_s)
        return await DockerPlace.start(self, self._settings, image, order)

    async def _wait_until_back(self) -> None:
        """Return when the engine answers. ConfigError if it does not."""
        until = time.monotonic() + AWAY_S
        while self._is_away:
            with contextlib.suppress(HostError):
                code, output = await self.call(["version"])
                if code and time.monotonic() > until:
                    raise self._no_engine(output)
            if self._is_away:
                await asyncio.sleep(AWAY_LOOK_S)

    async def sweep(self) -> None:
        """Remove the containers whose owner on this machine is dead, and those that have outlived their time."""
        found = (await self.ask("ps", "--all", "--quiet", "--filter", f"label={LABEL}")).split()
        for number in found:
            with contextlib.suppress(HostError):  # it may have gone by itself
                owner = await self.ask("inspect", "--format", f'{{{{index .Config.Labels "{LABEL}"}}}}', number)
                host, pid, started, until = owner.split()
                is_dead = host == socket.gethostname() and start_time(int(pid)) != started
                if is_dead or time.time() > float(until):
                    await self.remove(number)

    async def remove(self, name: str) -> None:
        """Remove a container, whatever its state. One that cannot be is tried again before the next is made."""
        try:
            await self.ask("rm", "--force", "--volumes", name)
        except HostError:
            self._left.add(name)

    async def ask(self, *arguments: str, data: bytes = b"") -> str:
        """Return the output of a command of the engine. HostError if it fails, ConfigError if there is no engine."""
        code, output = await self.call(list(arguments), data)
        if code:
            raise self.error(output)
        return output

    async def call(
        self, arguments: Sequence[str], data: bytes = b"", *, timeout_s: float | None = COMMAND_S
    ) -> tuple[int, str]:
        """Return the exit code and the output of a command of the engine. HostError if it does not end."""
        process = await self.spawn(arguments)
        try:
            async with asyncio.timeout(timeout_s):
                output = await communicate(process, data)
                code = await process.wait()
        except TimeoutError:
            raise HostError(f"{self._settings.engine} {arguments[0]}: no end within {timeout_s:g} s") from None
        finally:
            await end_process(process)
        if code < 0:
            raise HostError(f"{self._settings.engine} {arguments[0]} was killed by signal {-code}")
        if not code:
            self._has_answered, self._is_away = True, False
        return code, output

    async def spawn(
        self,
        arguments: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        errors: int = asyncio.subprocess.STDOUT,
    ) -> asyncio.subprocess.Process:
        """Start a command of the engine. ConfigError if the engine is not installed, HostedCodeError for arguments or
        variables that no command can have, HostError if this machine can start no process now."""
        pipe = asyncio.subprocess.PIPE
        try:
            return await asyncio.create_subprocess_exec(
                self._settings.engine,
                *arguments,
                stdin=pipe,
                stdout=pipe,
                stderr=errors,
                env={**os.environ, **(variables or {}), **self._host},
                start_new_session=True,  # a Ctrl-C is for rftstream, which then closes its places
            )
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", errno.E2BIG)  # a ValueError is about a NUL
            if number == errno.E2BIG:
                raise HostedCodeError(
                    f"{self._settings.engine} {arguments[0]}: {error}; expected words and variables without NUL, of at "
                    "most 128 KiB each: the agent's prompt is one"
                ) from None
            if number in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
                raise HostError(f"{self._settings.engine} {arguments[0]}: cannot be started now: {error}") from None
            raise ConfigError(
                f"environments.harbor.engine: {self._settings.engine!r} cannot be run: {error}; install Docker or "
                "Podman, or name the command"
            ) from None

    def error(self, output: str) -> Exception:
        """Return the error of a command of the engine that failed with this output."""
        if any(one in output for one in NO_ENGINE):
            if not self._has_answered:
                return self._no_engine(output)
            self._is_away = True
        return HostError(f"{self._settings.engine}: {last_lines(output)}")

    def _no_engine(self, output: str) -> ConfigError:
        return ConfigError(
            f"environments.harbor.engine: {self._settings.engine!r} reaches no engine: {last_lines(output)}; start it, "
            "and let this user use it"
        )


class DockerPlace:
    """One container. `start` makes it; see `base.Place`."""

    def __init__(self, engine: DockerPlaces, name: str, order: PlaceOrder) -> None:
        self._engine, self._name, self._order = engine, name, order
        self._keeper: asyncio.subprocess.Process | None = None
        self._relay: asyncio.subprocess.Process | None = None
        self._tunnel: Tunnel | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._running: set[asyncio.subprocess.Process] = set()
        self._exceeded = ""
        """The limit that ended the place."""

    @classmethod
    async def start(cls, engine: DockerPlaces, settings: PlaceSettings, image: str, order: PlaceOrder) -> DockerPlace:
        """Start a container and its relay. `base.Places.create` lists the errors."""
        place = cls(engine, f"rftstream-{secrets.token_hex(8)}", order)
        try:
            async with asyncio.timeout(COMMAND_S):
                await place._start(image)
                if order.model_url:
                    await place._start_relay(settings.relay_image)
        except TimeoutError:
            await place.close()
            raise HostError(f"a place of {image} did not start within {COMMAND_S:g} s") from None
        except BaseException:
            await place.close()
            raise
        return place

    async def _start(self, image: str) -> None:
        limits = self._order.limits
        options = [
            f"--cpu-period={CPU_PERIOD_US}",
            f"--cpu-quota={round(limits.cpus * CPU_PERIOD_US)}",  # `--cpus` refuses more than there are
            f"--memory={limits.memory_mb}m",
            f"--memory-swap={limits.memory_mb}m",
            f"--pids-limit={limits.pids}",
            f"--ulimit=fsize={limits.disk_mb << 20}",
            "--cap-drop=NET_RAW",
            "--cap-drop=MKNOD",
            f"--network={'bridge' if self._order.has_internet else 'none'}",
        ]
        process = await self._engine.spawn([*self._begin(self._name), *options, image, "sh", "-c", KEEPER])
        self._keeper = process
        assert process.stdout
        seen = b""
        while line := await process.stdout.readline():
            seen = (seen + line)[-OUTPUT_BYTES:]
            if line.strip() == READY.encode():
                break
        else:  # the image's entry point may have printed anything, also what an engine says
            said = last_lines(seen.decode(errors="replace"))
            if WRONG_MACHINE in said.lower():
                raise HostedCodeError(f"{image} is not for this engine's processor: {said}; name an image that is")
            raise HostError(f"the container of {image} ended at once: {said}")
        self._tasks.append(asyncio.create_task(drain(process.stdout)))
        self._tasks.append(asyncio.create_task(self._watch_disk()))

    async def _start_relay(self, image: str) -> None:
        options = [
            f"--network=container:{self._name}",
            "--memory=256m",
            "--pids-limit=32",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            "--read-only",
            "--user=65534:65534",
            "--entrypoint=python3",
        ]
        process = await self._engine.spawn(
            [*self._begin(f"{self._name}-relay"), *options, image, "-c", RELAY, str(MODEL_PORT)],
            errors=asyncio.subprocess.DEVNULL,
        )
        self._relay = process
        assert process.stdout and process.stdin
        self._tunnel = Tunnel(process.stdout, process.stdin, self._order.model_url)
        try:
            await self._tunnel.ready()
        except asyncio.IncompleteReadError:
            raise HostError(f"the relay to the model does not start in {image}, which needs python3") from None
        self._tasks.append(asyncio.create_task(self._tunnel.run()))
        self._tasks[-1].add_done_callback(lambda task: self._end_commands())

    def _end_commands(self) -> None:
        """End what runs: without its model an agent could only wait."""
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def _begin(self, name: str) -> list[str]:
        """Return the beginning of a command that runs a container of this place."""
        until = time.time() + self._order.limits.life_s
        owner = f"{socket.gethostname()} {os.getpid()} {start_time(os.getpid())} {until:.0f}"
        labels = {LABEL: owner, **{f"rftstream.{key}": value for key, value in self._order.labels.items()}}
        begin = ["run", "--interactive", "--rm", "--init", f"--name={name}", "--log-driver=none"]
        return [*begin, *(f"--label={key}={value}" for key, value in labels.items())]

    @property
    def has_called(self) -> bool:
        """Return whether anything in the container has connected to the model."""
        return self._tunnel is not None and self._tunnel.newest > 0

    def end_calls(self) -> int:
        """Close the connections to the model, and refuse later ones."""
        return 0 if self._tunnel is None else self._tunnel.end_calls()

    async def put(self, source: Path, target: str) -> None:
        """Copy the files of a folder into a folder of the container."""
        self._check()
        await self._engine.ask(
            "cp", "-", f"{self._name}:/", data=await asyncio.to_thread(pack_folder, source, target.strip("/"))
        )

    async def run(
        self,
        command: str,
        *,
        timeout_s: float,
        variables: Mapping[str, str] | None = None,
        user: str = "",
        cwd: str = "",
    ) -> Ran:
        """Run a shell command in the container."""
        self._check()
        mark = f"RFTSTREAM_COMMAND={secrets.token_hex(8)}"
        options, variables = _given({**self._order.variables, **(variables or {})})
        options += [f"--user={user}"] * bool(user) + [f"--workdir={cwd}"] * bool(cwd)
        process = await self._engine.spawn(
            ["exec", f"--env={mark}", *options, self._name, "sh", "-c", SHELL, "sh", command], variables=variables
        )
        self._running.add(process)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                output = await communicate(process)
                code = await process.wait()
        except TimeoutError:
            if not limit.expired():
                raise
            await self._engine.call(["exec", "--user=0", self._name, "sh", "-c", KILL, "sh", mark])
            return Ran(exit_code=None, output="")
        finally:
            self._running.discard(process)
            await end_process(process)
        self._check()
        if code:
            await self._must_live()
        if not output.endswith(END) and (code < 0 or code in ENGINE_FAILED):
            raise HostError(f"the place has lost a command that it ran: {last_lines(output)}")
        return Ran(exit_code=code, output=output.removesuffix(END))

    async def get(self, path: str, *, max_bytes: int) -> bytes | None:
        """Return the content of a file of the container."""
        self._check()
        process = await self._engine.spawn(["cp", f"{self._name}:{path}", "-"], errors=asyncio.subprocess.DEVNULL)
        assert process.stdout
        try:
            async with asyncio.timeout(COMMAND_S):
                data = await read_up_to(process.stdout, max_bytes + TAR_BYTES)
        except TimeoutError:
            raise HostError(f"the place: {path} is not read within {COMMAND_S:g} s") from None
        finally:
            await end_process(process)
        member, content = unpack_file(data)
        if member is not None and member.size > max_bytes:
            raise HostedCodeError(f"{path}: got {member.size} bytes, expected at most {max_bytes}")
        return content

    async def close(self) -> None:
        """Remove the container and its relay. A caller that is cancelled meanwhile leaves nothing behind, either."""
        await asyncio.shield(self._close())

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tunnel is not None:
            await self._tunnel.close()
        both = ((self._relay, f"{self._name}-relay"), (self._keeper, self._name))
        await asyncio.gather(*(self._remove(process, name) for process, name in both if process is not None))

    async def _remove(self, process: asyncio.subprocess.Process, name: str) -> None:
        await self._engine.remove(name)
        await end_process(process)

    def _check(self) -> None:
        """Raise the error of a place that is known to have ended."""
        if self._exceeded:
            raise HostedCodeError(f"the place was ended: {self._exceeded}")
        assert self._keeper
        if self._keeper.returncode is not None:
            raise HostError("the place has ended: its container is gone")
        if self._relay is not None and self._relay.returncode is not None:
            raise HostError("the place has lost the model: its relay is gone")

    async def _must_live(self) -> None:
        """Raise the error of a place that cannot go on. What a command has printed proves nothing, so the engine is
        asked."""
        for name in [self._name] + [f"{self._name}-relay"] * (self._relay is not None):
            code, output = await self._engine.call(["inspect", "--format", "{{.State.Running}}", name])
            if code or output.strip() != "true":
                self._check()
                raise HostError(f"the place has ended: its container {name} is gone")
        self._check()
        code, output = await self._engine.call(["exec", "--user=0", self._name, "true"])
        if code:
            raise HostedCodeError(
                f"the place takes no more commands, perhaps since its pids are used up: {last_lines(output)}"
            )

    async def _watch_disk(self) -> None:
        """End the container when it has written too much."""
        most_mb = self._order.limits.disk_mb
        while True:
            await asyncio.sleep(DISK_LOOK_S)
            with contextlib.suppress(HostError, ConfigError, ValueError):  # `run` asks whether the engine is there
                size = await self._engine.ask("container", "inspect", "--size", "--format", "{{.SizeRw}}", self._name)
                if int(size) > most_mb << 20:
                    self._exceeded = f"it wrote {int(size) >> 20} MB, expected at most {most_mb}"
                    await self._engine.remove(self._name)
                    return


def _given(variables: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the options that give variables to a command in a container, and the variables of the engine's command,
    from which it takes their values: a list of processes shows none of them but those of OF_ENGINE."""
    own = {name for name in variables if OF_ENGINE.fullmatch(name)}
    options = [f"--env={name}={variables[name]}" if name in own else f"--env={name}" for name in variables]
    return options, {name: value for name, value in variables.items() if name not in own}
