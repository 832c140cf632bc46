"""Places as pods of Kubernetes, by `kubectl`.

A pod has a container for the place and one for its relay to the model. The first process of the place's ends with its
connection to `kubectl attach`, so nothing runs on when this process is killed; what is left of the pod is removed by
the next start (`sweep`), and Kubernetes ends it after the place's life. A NetworkPolicy forbids pods of places every
connection; the first place tries whether the cluster's network keeps it. Commands and their variables go through
stdin, since the cluster's audit log has the words of a command."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rftstream.environments.places.base import MODEL_PORT, PlaceOrder, PlaceSettings, Ran, last_lines
from rftstream.environments.places.engine import (
    COMMAND_S,
    KILL,
    LABEL,
    SHELL,
    EngineCommand,
    is_abandoned,
)
from rftstream.environments.places.packing import pack_folder
from rftstream.environments.places.pods import (
    PLACE,
    POLICY,
    RELAY_NAME,
    describe_pod,
    describe_policy,
    find_trouble,
    waiting_for,
)
from rftstream.environments.places.processes import drain, end_process
from rftstream.environments.places.relay import RELAY, Relayed
from rftstream.errors import ConfigError, HostedCodeError, HostError

SETTINGS = "environments.harbor"
LOOK_S = 0.5
"""Seconds between two looks at a pod that starts or ends."""
END_S = 10.0
"""Largest number of seconds until the cluster says how a pod ended whose connection is gone."""
MAX_ANSWER = 64 << 20
"""Most bytes of what a cluster says of pods."""
MAX_WORD = 128 << 10
"""Bytes of a variable or a command, with its end, that no program can be given."""
ROOT = """[ "$(id -u)" = 0 ] || { echo "the image begins as user $(id -u), expected root"; rft_end 126; }"""
AS_USER = """
rft_group=$(id -g "$rft_user" 2>/dev/null) && rft_groups=--init-groups || { rft_group=0; rft_groups=--clear-groups; }
HOME=/
while IFS=: read -r rft_name _ rft_id _ _ rft_home _; do
  if [ "$rft_name" = "$rft_user" ] || [ "$rft_id" = "$rft_user" ]; then HOME=$rft_home; break; fi
done </etc/passwd
export HOME
rft_as="setpriv --reuid=$rft_user --regid=$rft_group $rft_groups"
"""
"""Shell commands by which root begins a command of another user."""
PROBE = """
import os, socket, sys, time
for _ in range(10):
    try:
        where = os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"])
        socket.create_connection(where, 2).close()
    except (OSError, LookupError):
        sys.exit()
    time.sleep(1)
print("reached")
"""
"""Tries to reach the cluster's own API server, until the network refuses it."""
NO_CLUSTER = (
    "Unable to connect to the server",
    "was refused - did you specify",
    "current-context",
    "no configuration has been provided",
    "does not exist",
)


class KubernetesPlaces(EngineCommand):
    """Makes pods. An explorer makes one for the settings of an environment."""

    def __init__(self, settings: PlaceSettings) -> None:
        super().__init__(settings.engine or "kubectl", what="kubectl", unreachable=NO_CLUSTER)
        self.settings = settings
        self._lock = asyncio.Lock()
        self._is_prepared = False
        self._is_probed = False

    def words(self, *words: str) -> list[str]:
        """Return the words of kubectl for a command in the namespace of places."""
        return [*([f"--namespace={self.settings.namespace}"] if self.settings.namespace else []), *words]

    async def create(self, order: PlaceOrder) -> KubernetesPlace:
        """Return a new pod. While a cluster that has answered before does not, it is waited for. `base.Places` lists
        the errors."""
        return await self.when_back(lambda: self._create(order))

    async def _create(self, order: PlaceOrder) -> KubernetesPlace:
        source = order.source
        if not source.image:
            raise ConfigError(
                f"{SETTINGS}.place: 'kubernetes' builds no images; build that of {source.folder}/Dockerfile, push it "
                'to a registry of the cluster, and name it in task.toml: [environment] docker_image = "..."'
            )
        if source.install:
            raise ConfigError(
                f"{SETTINGS}.place: 'kubernetes' installs nothing; put the harness into the tasks' images, and set "
                f"{SETTINGS}.command to what runs it"
            )
        async with self._lock:
            if not self._is_prepared:
                await self.sweep()
                await self.ask(
                    *self.words("apply", "--server-side", "-f", "-"), data=json.dumps(describe_policy()).encode()
                )
                self._is_prepared = True
        await self.remove_left()
        place = await KubernetesPlace.start(self, order)
        if order.model_url and not order.has_internet:
            try:
                async with self._lock:
                    if not self._is_probed:
                        await place.probe()
                        self._is_probed = True
            except BaseException:
                await place.close()
                raise
        return place

    async def sweep(self) -> None:
        """Remove the pods whose owner on this machine is dead, and those that have outlived their time."""
        for pod in (await self._read("pods", f"--selector={LABEL}"))["items"]:
            owner = pod["metadata"].get("annotations", {}).get(LABEL)
            if owner and is_abandoned(owner):
                await self.remove(pod["metadata"]["name"])

    def removal(self, name: str) -> list[str]:
        """Return the words that remove a pod, whatever its state."""
        return self.words("delete", "pod", name, "--ignore-not-found", "--wait=false")

    async def pod(self, name: str) -> dict[str, Any]:
        """Return what the cluster says of a pod. HostError if it is gone."""
        return await self._read("pod", name)

    async def _read(self, *words: str) -> dict[str, Any]:
        """Return an answer of `kubectl get`, which may warn of something before and after."""
        output = await self.ask(*self.words("get", *words, "--output=json"), most=MAX_ANSWER)
        found: dict[str, Any] = json.JSONDecoder().raw_decode(output, output.index("{"))[0]
        return found

    def error(self, output: str) -> Exception:
        """Return the error of a kubectl that failed with this output."""
        said = last_lines(output)
        if "violates PodSecurity" in output:
            return ConfigError(f"{SETTINGS}.namespace: {said}; places need one whose PodSecurity is `baseline`")
        if ("Forbidden" in output and "cannot" in output) or "Unauthorized" in output:
            return ConfigError(f"{SETTINGS}.place: {said}; deploy/places.yaml has the rights that places need")
        if "strict decoding error" in output or "is invalid" in output:
            return ConfigError(f"{SETTINGS}.pod: {said}; expected fields of a pod's spec")
        return super().error(output)


class KubernetesPlace(Relayed):
    """One pod. `start` makes it; see `base.Place`."""

    def __init__(self, engine: KubernetesPlaces, name: str, order: PlaceOrder) -> None:
        super().__init__()
        self._engine, self._name, self._order = engine, name, order
        self._keeper: asyncio.subprocess.Process | None = None

    @classmethod
    async def start(cls, engine: KubernetesPlaces, order: PlaceOrder) -> KubernetesPlace:
        """Start a pod and its relay. `base.Places.create` lists the errors."""
        place = cls(engine, f"rftstream-{secrets.token_hex(8)}", order)
        limit_s = order.source.build_timeout_s + COMMAND_S
        waits = "the cluster said nothing"
        try:
            async with asyncio.timeout(limit_s):
                await place._ask_for_pod()
                while waits := waiting_for(await place._looked_at()):
                    await asyncio.sleep(LOOK_S)
                await place._attach()
                if order.model_url:
                    await place._start_relay()
        except TimeoutError:
            await place.close()
            raise HostError(f"a pod of {order.source.image} did not start within {limit_s:g} s: {waits}") from None
        except BaseException:
            await place.close()
            raise
        return place

    async def _ask_for_pod(self) -> None:
        """Have the cluster make the pod. A namespace whose quota is used up makes it wait."""
        pod = json.dumps(describe_pod(self._name, self._order, self._engine.settings)).encode()
        while True:
            code, output = await self._engine.call(self._engine.words("create", "-f", "-"), pod)
            if not code:
                return
            if "exceeded quota" not in output:
                raise self._engine.error(output)
            await asyncio.sleep(10 * LOOK_S)

    async def _looked_at(self) -> dict[str, Any]:
        """Return the pod. Raise the error of one that has ended, or cannot begin."""
        pod = await self._engine.pod(self._name)
        if trouble := find_trouble(pod):
            raise trouble
        return pod

    async def _attach(self) -> None:
        words = self._engine.words("attach", "--quiet", "--stdin", f"--container={PLACE}", self._name)
        self._keeper = await self._engine.spawn(words)
        assert self._keeper.stdout
        self._tasks.append(asyncio.create_task(drain(self._keeper.stdout)))

    async def _start_relay(self) -> None:
        words = self._exec(RELAY_NAME, "python3", "-c", RELAY, str(MODEL_PORT))
        process = await self._engine.spawn(words, errors=asyncio.subprocess.DEVNULL)
        try:
            await self._begin_tunnel(process, self._order.model_url)
        except asyncio.IncompleteReadError:
            await self._looked_at()
            image = self._engine.settings.relay_image
            raise HostError(f"the relay to the model does not start in {image}, which needs python3") from None

    async def probe(self) -> None:
        """Raise ConfigError if the pod reaches more than the model."""
        if (await self._engine.ask(*self._exec(RELAY_NAME, "python3", "-c", PROBE))).strip():
            raise ConfigError(
                f"{SETTINGS}.place: a pod reaches the cluster's API server although the NetworkPolicy {POLICY} forbids "
                f"it; use a network that enforces policies, or give places the internet ({SETTINGS}.internet)"
            )

    def _exec(self, container: str, *words: str) -> list[str]:
        """Return the words of kubectl that run a command in a container."""
        return self._engine.words("exec", "--stdin", f"--container={container}", self._name, "--", *words)

    async def put(self, source: Path, target: str) -> None:
        """Copy the files of a folder into a folder of the place, whose image needs `tar`."""
        await self._check()
        data = await asyncio.to_thread(pack_folder, source, target.strip("/"))
        code, output = await self._engine.call(self._exec(PLACE, "tar", "-x", "-f", "-", "-C", "/"), data)
        if code:
            await self._must_live(output)
            raise HostedCodeError(f"files cannot be put into the place, whose image needs tar: {last_lines(output)}")

    async def run(
        self,
        command: str,
        *,
        timeout_s: float,
        variables: Mapping[str, str] | None = None,
        user: str = "",
        cwd: str = "",
    ) -> Ran:
        """Run a shell command in the place. One of another user than the image's needs `setpriv` there."""
        await self._check()
        mark = secrets.token_hex(8)
        script = write_script(command, mark, {**self._order.variables, **(variables or {})}, user, cwd)
        process = await self._engine.spawn(self._exec(PLACE, "sh", "-s"))
        try:
            _, data = await self._finish(process, script.encode(), timeout_s=timeout_s)
        except TimeoutError:
            await self._engine.call(self._exec(PLACE, "sh", "-c", KILL, "sh", f"RFTSTREAM_COMMAND={mark}"))
            return Ran(exit_code=None, output="")
        output = data.decode(errors="replace")
        said, is_whole, code = output.rpartition(f"\n{mark} ")
        if not is_whole or not code.strip().isdigit():
            await self._must_live(output)
            raise HostError(f"the connection to the place was lost: {last_lines(output)}")
        return Ran(exit_code=int(code), output=said)

    async def get(self, path: str, *, max_bytes: int) -> bytes | None:
        """Return the content of a file of the place."""
        await self._check()
        script = 'test -f "$1" && test ! -L "$1" || { echo none; exit; }; wc -c <"$1"; head -c "$2" "$1"'
        words = self._exec(PLACE, "sh", "-c", script, "sh", path, str(max_bytes))
        head, is_whole, content = (await self._engine.read(words, max_bytes + 32, path)).partition(b"\n")
        if head == b"none":
            return None
        if not is_whole or not head.strip().isdigit() or len(content) < min(int(head), max_bytes):
            await self._must_live("")
            raise HostError(f"the place: {path} was cut off while it was read")
        if int(head) > max_bytes:
            raise HostedCodeError(f"{path}: got {int(head)} bytes, expected at most {max_bytes}")
        return content

    async def _close(self) -> None:
        await super()._close()
        await self._engine.remove(self._name)
        for process in (self._relay, self._keeper):
            if process is not None:
                await end_process(process)

    async def _check(self) -> None:
        """Raise the error of a place that is known to have ended."""
        for process, what in ((self._keeper, "ended"), (self._relay, "lost the model")):
            if process is not None and process.returncode is not None:
                await self._must_live("")
                raise HostError(f"the place has {what}: its connection is gone")

    async def _must_live(self, output: str) -> None:
        """Raise the error of a place that cannot go on. The cluster may say later than a connection that it ended."""
        deadline = time.monotonic() + END_S
        while True:
            await self._looked_at()
            code, said = await self._engine.call(self._exec(PLACE, "true"))
            if not code:
                return
            if time.monotonic() > deadline:
                raise HostedCodeError(
                    "the place takes no more commands, perhaps since its pids are used up: "
                    f"{last_lines(f'{output}{said}')}"
                )
            await asyncio.sleep(LOOK_S)


def write_script(command: str, mark: str, variables: Mapping[str, str], user: str, cwd: str) -> str:
    """Return what a shell in the place reads to run a command. What it prints ends with the mark and the exit code.
    HostedCodeError for variables that no command can have."""
    for name, value in {**variables, "the command": command}.items():
        if "\0" in value or len(value.encode()) + len(name) + 2 > MAX_WORD:
            raise HostedCodeError(f"{name}: expected text without NUL, of at most 128 KiB: the agent's prompt is one")
    if bad := [name for name in variables if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)]:
        raise HostedCodeError(f"variables: got the name {bad[0]!r}, expected letters, digits and _")
    lines = [f"rft_end() {{ printf '\\n{mark} %s' \"$1\"; exit 0; }}", f"export RFTSTREAM_COMMAND={mark}", "rft_as="]
    lines += [ROOT] if user else []
    lines += [f"rft_user={shlex.quote(user)}", AS_USER] if user not in ("", "0", "root") else []
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines += [f"cd {shlex.quote(cwd)} || rft_end 126"] if cwd else []
    return "\n".join([*lines, f"set -- {shlex.quote(command)}", f"{SHELL}rft_end $rft_code", ""])
