"""Units of systemd for the workers of a run on a host, which systemd starts again as the exit codes ask for it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rftstream.config.sections import RunConfig
from rftstream.contracts.role_names import RoleName
from rftstream.roles import role_spec
from rftstream.service.role_spec import RoleKind

UNIT = """\
# Written by `rftstream launch systemd`.
[Unit]
Description=rftstream {run}: {role}
Wants=network-online.target
After=network-online.target
# One that dies ten times within ten minutes is given up.
StartLimitIntervalSec=600
StartLimitBurst=10

[Service]
Type=exec
{more}WorkingDirectory={folder}
# A run that has ended is left alone: `rftstream run FILE --no-workers` begins the next one.
ExecCondition=/bin/sh -c {condition}
{make}ExecStart={start}
Restart=on-failure
RestartSec=2
# 2, 4, 6, 7: another try mends nothing. 5: another process has the role, as it should.
RestartPreventExitStatus=2 4 5 6 7
SuccessExitStatus=5
# The worker is told to leave, and takes up to 40 s. What it has started ends with it.
KillMode=mixed
TimeoutStopSec=60

[Install]
WantedBy={target}
"""


def worker_units(
    config: RunConfig,
    files: Sequence[Path],
    roles: Sequence[str],
    command: Sequence[str],
    *,
    user: str | None = None,
    environment: Path | None = None,
    per_user: bool = False,
) -> dict[str, str]:
    """Return the name of each unit -> its text. A role with any number of workers has a template, for instances.

    `user`: the system's user that runs them; `environment`: a file with variables; `per_user`: they are for the systemd
    of a user and not of the system.
    """
    paths = [str(file.resolve()) for file in files]
    condition = f"! {shlex.join([*command, 'status', *paths, '--json'])} 2>/dev/null | grep -q 'state.: .finished'"
    more = [("User", user), ("EnvironmentFile", environment)]
    units = {}
    for role in roles:
        instance = "" if role_spec(role).kind is RoleKind.single else "-%i"
        start = _line([*command, "worker", *paths, "--role", role, "--metrics-port", "0"])
        make = _line([*command, "run", *paths, "--no-workers"])
        units[f"rftstream-{config.run.name}-{role}{'@' if instance else ''}.service"] = UNIT.format(
            run=_percent(config.run.name),
            role=f"{role}{instance}",
            folder=_percent(str(Path(config.base).resolve())),
            condition=_line([condition]),
            make=f"ExecStartPre={make}\n" if role == RoleName.feeder else "",
            start=f"{start} --process {role}-%l{instance}",
            target="default.target" if per_user else "multi-user.target",
            more="".join(f"{key}={_percent(str(value))}\n" for key, value in more if value is not None),
        )
    return units


def _percent(text: str) -> str:
    return text.replace("%", "%%")


def _line(words: Sequence[str]) -> str:
    """Return words as systemd reads a command line."""
    return " ".join(
        '"' + _percent(word).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$") + '"'
        if any(character in word for character in " \\\"'$;")
        else _percent(word)
        for word in words
    )
