"""Places as containers of Docker or Podman, by the command of the engine.

Everything goes through the command's own pipes, so the engine may run on another machine. A container lives as long as
its `docker run` is connected: its first process reads stdin until that ends. So nothing is left when this process is
killed, and what an engine or a machine that died has left is removed by the next start (`sweep`)."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from rftstream.environments.places.base import MODEL_PORT, PlaceOrder, PlaceSettings, Ran, last_lines
from rftstream.environments.places.engine import (
    COMMAND_S,
    KEEPER,
    KILL,
    LABEL,
    READY,
    SHELL,
    WRONG_MACHINE,
    EngineCommand,
    is_abandoned,
    name_owner,
)
from rftstream.environments.places.images import Images
from rftstream.environments.places.packing import TAR_BYTES, pack_folder, unpack_file
from rftstream.environments.places.processes import OUTPUT_BYTES, drain, end_process
from rftstream.environments.places.relay import RELAY, Relayed
from rftstream.errors import ConfigError, HostedCodeError, HostError

DISK_LOOK_S = 5.0
"""Seconds between two looks at how much a place has written."""
CPU_PERIOD_US = 100_000
END = "rftstream-end"
"""Last word of each command's output. Without it the engine's command has ended, and the other may go on."""
ENGINE_FAILED = (1, 125, 255)
"""Exit codes of the engine's command about itself: Docker's, Podman's, and that of ssh."""
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


class DockerPlaces(EngineCommand):
    """Makes containers, and the images for them. An explorer makes one for the settings of an environment."""

    def __init__(self, settings: PlaceSettings) -> None:
        host = {name: settings.engine_host for name in ("DOCKER_HOST", "CONTAINER_HOST") if settings.engine_host}
        program = settings.engine or "docker"
        super().__init__(program, what="Docker or Podman", unreachable=NO_ENGINE, variables=host)
        self._settings = settings
        self._images = Images(self)
        self._is_swept = False

    async def create(self, order: PlaceOrder) -> DockerPlace:
        """Return a new container. While an engine that has answered before does not, it is waited for. `base.Places`
        lists the errors."""
        return await self.when_back(lambda: self._create(order))

    async def _create(self, order: PlaceOrder) -> DockerPlace:
        if not self._is_swept:
            await self.sweep()
            self._is_swept = True
        await self.remove_left()
        image = await self._images.of_source(order.source)
        if order.model_url:
            await self._images.pull(self._settings.relay_image, order.source.build_timeout_s)
        return await DockerPlace.start(self, self._settings, image, order)

    async def sweep(self) -> None:
        """Remove the containers whose owner on this machine is dead, and those that have outlived their time."""
        found = (await self.ask("ps", "--all", "--quiet", "--filter", f"label={LABEL}")).split()
        for number in found:
            with contextlib.suppress(HostError):  # it may have gone by itself
                owner = await self.ask("inspect", "--format", f'{{{{index .Config.Labels "{LABEL}"}}}}', number)
                if is_abandoned(owner):
                    await self.remove(number)

    def removal(self, name: str) -> list[str]:
        """Return the words that remove a container, whatever its state."""
        return ["rm", "--force", "--volumes", name]


class DockerPlace(Relayed):
    """One container. `start` makes it; see `base.Place`."""

    def __init__(self, engine: DockerPlaces, name: str, order: PlaceOrder) -> None:
        super().__init__()
        self._engine, self._name, self._order = engine, name, order
        self._keeper: asyncio.subprocess.Process | None = None
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
        try:
            await self._begin_tunnel(process, self._order.model_url)
        except asyncio.IncompleteReadError:
            raise HostError(f"the relay to the model does not start in {image}, which needs python3") from None

    def _begin(self, name: str) -> list[str]:
        """Return the beginning of a command that runs a container of this place."""
        labels = {f"rftstream.{key}": value for key, value in self._order.labels.items()}
        labels[LABEL] = name_owner(self._order.limits.life_s)
        begin = ["run", "--interactive", "--rm", "--init", f"--name={name}", "--log-driver=none"]
        return [*begin, *(f"--label={key}={value}" for key, value in labels.items())]

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
        script = f"rft_as=\n{SHELL}printf {END}\nexit $rft_code"
        process = await self._engine.spawn(
            ["exec", f"--env={mark}", *options, self._name, "sh", "-c", script, "sh", command], variables=variables
        )
        try:
            code, data = await self._finish(process, timeout_s=timeout_s)
        except TimeoutError:
            await self._engine.call(["exec", "--user=0", self._name, "sh", "-c", KILL, "sh", mark])
            return Ran(exit_code=None, output="")
        output = data.decode(errors="replace")
        self._check()
        if code:
            await self._must_live()
        if not output.endswith(END) and (code < 0 or code in ENGINE_FAILED):
            raise HostError(f"the place has lost a command that it ran: {last_lines(output)}")
        return Ran(exit_code=code, output=output.removesuffix(END))

    async def get(self, path: str, *, max_bytes: int) -> bytes | None:
        """Return the content of a file of the container."""
        self._check()
        data = await self._engine.read(["cp", f"{self._name}:{path}", "-"], max_bytes + TAR_BYTES, path)
        member, content = unpack_file(data)
        if member is not None and member.size > max_bytes:
            raise HostedCodeError(f"{path}: got {member.size} bytes, expected at most {max_bytes}")
        return content

    async def _close(self) -> None:
        await super()._close()
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
