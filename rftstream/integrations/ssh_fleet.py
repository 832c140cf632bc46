"""A run on plain machines that are reached by ssh: which host has which workers, and what is done on the hosts.

Each host gets one process, `rftstream workers`, which starts the host's workers and starts again what dies. It outlives
the connection. Start, status, logs and stop are short scripts that the program `ssh` gives to the host's `sh`. So
nothing is installed on a host, and keys, users, ports and jumps are those of the user's own ssh config.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftstream.config.sections import RunConfig
from rftstream.contracts.role_names import RoleName
from rftstream.errors import ConfigError, RftError
from rftstream.queries.formatting import columns, number, table
from rftstream.queries.state.workers import health_sentence
from rftstream.roles import count_workers, role_specs
from rftstream.runs.folder import lies_in_folder
from rftstream.service.role_spec import RoleKind

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
SSH_FAILED = 255
"""Exit code of ssh itself. Our scripts end with 40 when the host lacks something."""

BEGIN = """
fail() { echo "$1" >&2; exit 40; }
cd @folder@ 2>/dev/null || fail "no folder "@folder@
set -- @files@
for file; do [ -r "$file" ] || fail "no run file $file"; done
pid_file=@state@.pid log=@state@.log
alive() {
  pid=$(cat "$pid_file" 2>/dev/null) && tr '\\0' '\\n' 2>/dev/null <"/proc/$pid/cmdline" | grep -qxF "$pid_file"
}
rft() { @rftstream@ "$@"; }
rft --version >/dev/null 2>&1 || fail "no rftstream: "@rftstream_text@" does not run"
"""
MAKE = 'rft run "$@" --no-workers\n'
START = """
mkdir -p "$(dirname "$log")" || exit 40
exec 9>>"$log"
command -v flock >/dev/null && flock 9  # another call may be about to start the same
if alive; then echo "runs already, process $pid"; exit 0; fi
size=$(wc -c <"$log")
setsid nohup @rftstream@ workers "$@" @workers@ --pid-file "$pid_file" >>"$log" 2>&1 </dev/null 9>&- &
pid=$!
echo "$pid" >"$pid_file"
tries=0
while [ $tries -lt 900 ]; do
  grep -qs '^State:.[^ZX]' "/proc/$pid/status" || { tail -n 3 "$log" >&2; exit 40; }
  tail -c "+$((size + 1))" "$log" | grep -q ' workers of ' && { echo "started, process $pid"; exit 0; }
  sleep 0.2
  tries=$((tries + 1))
done
fail "process $pid has found no run within 180 s; see $log"
"""
STOP = """
alive || { echo "nothing runs"; exit 0; }
kill -TERM "$pid"
tries=0
while alive; do
  [ $tries -lt 450 ] || fail "process $pid has not left within 90 s; see $log"
  sleep 0.2
  tries=$((tries + 1))
done
tail -n 1 "$log"
"""
STATUS = """
if alive; then echo "process $pid"; else echo; fi
echo "$(tail -n 1 "$log" 2>/dev/null)"
rft status "$@" --json
"""
LOGS = """
tail -n 5 "$log" 2>/dev/null
rft logs "$@" @options@
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetHost:
    """A host and its workers. `read_hosts` makes it."""

    address: str
    """Name for ssh."""
    workers: dict[str, int]
    """Role -> number of workers."""

    @property
    def name(self) -> str:
        """Return the name that is part of the workers' names and of file names."""
        return _name(self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAnswer:
    """A host's answer to a script. A `Fleet` makes it."""

    host: FleetHost
    code: int
    out: str
    err: str

    @property
    def trouble(self) -> str:
        """Return what is wrong with the host and what to do; empty if all is well."""
        if not self.code:
            return ""
        address = self.host.address
        said = next((line.strip() for line in reversed(self.err.splitlines()) if line.strip()), f"exit {self.code}")
        if self.code != SSH_FAILED:
            return said
        if "Permission denied" in said:
            return f"refuses the key: {said}; expected that `ssh {address} true` asks nothing, see `ssh-copy-id`"
        if "verification failed" in said:
            return f"has another key than known, or none: {said}; `ssh {address}` shows it"
        return f"does not answer: {said}; see `ssh {address} true`"


def _name(address: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "_", address.rpartition("@")[2])


def read_hosts(file: Path, config: RunConfig) -> tuple[FleetHost, ...]:
    """Return the hosts of a file, each line `HOST [ROLE[=NUMBER]]...`. The roles that no line names are dealt to the
    hosts without roles: single ones to the first, workers of the others to all, from the last on.

    ConfigError if the file and the run do not fit.
    """
    if not file.is_file():
        raise ConfigError(f"--hosts: {file}: no such file, expected lines `HOST [ROLE[=NUMBER]]...`")
    found: dict[str, dict[str, int]] = {}
    for line_number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        address, *words = line.partition("#")[0].split() or [""]
        if address.startswith("-") or _name(address) in map(_name, found):
            raise ConfigError(f"{file}:{line_number}: got {address!r}, expected the name of a host, and each once")
        if address:
            found[address] = count_workers(words, f"{file}:{line_number}")
    free = [address for address, workers in found.items() if not workers]
    placed = {spec.name: [one for one, workers in found.items() if spec.name in workers] for spec in role_specs()}
    for spec in role_specs():
        if spec.kind is RoleKind.single and len(hosts := placed[spec.name]) > 1:
            raise ConfigError(f"{file}: {spec.name} on {' and '.join(hosts)}, expected one host; one is in force")
    for spec in role_specs():
        count = 0 if placed[spec.name] else spec.count(config)
        if count and not free:
            raise ConfigError(f"{file}: no host has the {spec.name}, expected one; write {spec.name} behind a host")
        for index in range(count):
            workers = found[free[0] if spec.kind is RoleKind.single else free[-1 - index % len(free)]]
            workers[spec.name] = workers.get(spec.name, 0) + 1
    fleet = tuple(FleetHost(address=address, workers=workers) for address, workers in found.items() if workers)
    if len(fleet) > 1 and lies_in_folder(config):
        raise ConfigError(
            f"{file}: {len(fleet)} hosts, but the log of transport.kind {config.transport.kind!r} is on one, expected "
            "one host, or transport.kind = 'kafka'"
        )
    return fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The hosts of a run. `rftstream launch ssh` makes it, and calls one of its methods."""

    hosts: Sequence[FleetHost]
    folder: str
    """Working folder on the hosts."""
    files: Sequence[str]
    """Run files on the hosts."""
    state: Path
    """Folder for process ids and logs of `rftstream workers`, from the working folder on."""
    command: Sequence[str]
    """Command that runs rftstream on the hosts."""
    before: Sequence[str] = ()
    """Lines of shell that run first on a host."""
    options: Sequence[str] = ()
    """Options of ssh."""

    def start(self, say: Callable[[str], None]) -> None:
        """Make the run, and start the workers of each host, unless they run. RftError names the hosts that failed; if
        one of them lacks something, nothing is started."""
        self._on_all("")
        first = next((host for host in self.hosts if RoleName.feeder in host.workers), self.hosts[0])
        made = self._ask(first, MAKE)
        self._check([made])
        say(f"{first.address}: {made.out.strip().partition(';')[0]}")
        self._on_all(START, say)

    def stop(self, say: Callable[[str], None]) -> None:
        """Tell the workers of each host to leave, and wait until they have. RftError names the hosts that failed."""
        self._on_all(STOP, say)

    def status(self) -> dict[str, Any]:
        """Return the state of each host and its workers, as these say, and the state of the run. RftError if no host
        answers."""
        hosts, run = [], None
        answers = self._answers(STATUS)
        for answer in answers:
            process, line, text = [*answer.out.split("\n", 2), "", ""][:3]
            said = json.loads(text) if not answer.code else {}
            own = re.compile(rf"[a-z]+-{re.escape(answer.host.name)}-[0-9]+")
            workers = [one for one in said.pop("workers", []) if own.fullmatch(one["process"])]
            run = run or said
            hosts.append(
                {"host": answer.host.address, "planned": answer.host.workers, "trouble": answer.trouble,
                 "process": process.removeprefix("process ") or None, "said": line, "workers": workers}
            )  # fmt: skip
        if not run:
            self._check(answers)
        return {"run": run, "hosts": hosts}

    def logs(self, options: Sequence[str], say: Callable[[str], None]) -> None:
        """Pass each line of the hosts' logs to `say`, behind the host. RftError names the hosts that failed."""
        width = max(len(host.address) for host in self.hosts)
        lock = threading.Lock()

        def show(host: FleetHost, line: str) -> None:
            with lock:
                say(f"{host.address:{width}} | {line}")

        self._check(self._answers(LOGS.replace("@options@", shlex.join(options)), show))

    def _on_all(self, script: str, say: Callable[[str], None] = lambda text: None) -> None:
        answers = self._answers(script)
        for answer in answers:
            if not answer.code and answer.out.strip():
                say(f"{answer.host.address}: {answer.out.strip()}")
        self._check(answers)

    def _check(self, answers: Sequence[HostAnswer]) -> None:
        if troubles := [f"{answer.host.address}: {answer.trouble}" for answer in answers if answer.code]:
            raise RftError("\n".join(troubles))

    def _answers(self, script: str, show: Callable[[FleetHost, str], None] | None = None) -> list[HostAnswer]:
        with ThreadPoolExecutor(max_workers=len(self.hosts)) as pool:
            return list(pool.map(lambda host: self._ask(host, script, show), self.hosts))

    def _ask(self, host: FleetHost, script: str, show: Callable[[FleetHost, str], None] | None = None) -> HostAnswer:
        with subprocess.Popen(
            [*SSH, *self.options, "--", host.address, "sh -s"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            if show is None:
                out, err = process.communicate(self._script(host, script))
                return HostAnswer(host=host, code=process.returncode, out=out, err=err)
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            with suppress(BrokenPipeError):  # its exit code says why
                process.stdin.write(self._script(host, script))
                process.stdin.close()
            for line in process.stdout:
                show(host, line.rstrip("\n"))
            err = process.stderr.read()
            return HostAnswer(host=host, code=process.wait(), out="", err=err)

    def _script(self, host: FleetHost, script: str) -> str:
        workers = [word for role, count in host.workers.items() for word in ("--role", f"{role}={count}")]
        command = shlex.join(self.command)
        words = {
            "folder": shlex.quote(self.folder),
            "files": shlex.join(self.files),
            "state": shlex.quote(str(self.state / host.name)),
            "rftstream": command,
            "rftstream_text": shlex.quote(command),
            "workers": shlex.join([*workers, "--name", host.name]),
        }
        before = [f"{{\n{line}\n}} >&2" for line in self.before]
        text = "\n".join([*before, BEGIN, script])
        return re.sub(r"@([a-z_]+)@", lambda match: words[match[1]], text)


def fleet_text(status: dict[str, Any], now: float) -> str:
    """Return the status of a fleet as text for people."""
    run = status["run"]
    steps = f" of {run['steps']:,}" if run["steps"] else ""
    reward = run["reward"]["last"]
    rows = [("run", run["run"]), ("state", run["state"]), ("version", f"{run['version']:,}{steps}")]
    rows += [] if reward is None else [("reward", number(reward))]
    lines = columns(rows, left=2, indent="  ")
    found = []
    for host in status["hosts"]:
        planned = ", ".join(f"{role} {count}" if count > 1 else role for role, count in host["planned"].items())
        at_work = host["trouble"] or (
            f"process {host['process']}" if host["process"] else f"nothing runs; {host['said']}"
        )
        found.append((host["host"], planned, at_work))
        found += [("", worker["process"], health_sentence(_health(worker), now)) for worker in host["workers"]]
    return "\n".join([*lines, *table(("host", "workers", "at work"), found, left=3, indent="  ")])


def _health(worker: dict[str, Any]) -> dict[str, Any] | None:
    told = {key: value for key, value in worker.items() if key not in ("port", "host", "reachable")}
    return told if worker["reachable"] else None
