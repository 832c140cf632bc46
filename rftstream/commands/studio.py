"""The command `studio` shows runs as a web page."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from rftstream.commands.options import at_work, command
from rftstream.commands.param_types import AnyPath, RunPath
from rftstream.errors import ConfigError

HOST, PORT = "127.0.0.1", 8765
ROLES = ("viewer", "annotator", "operator")


@command(
    "rftstream studio examples/runs/arithmetic",
    "rftstream studio runs/first runs/second --port 0",
    "rftstream studio runs/first --local-role annotator",
    "rftstream studio runs/first --report first.html",
    "rftstream studio --new-token ada=annotator",
    "rftstream studio runs/first --host 0.0.0.0 --public-host studio.example.org",
)
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=RunPath())
@click.option("--host", default=HOST, show_default=True, help="Address to listen on; on any other, a token is a must.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0: one that is free.")
@click.option("--public-host", "public_hosts", metavar="NAME", multiple=True, help="Another name that browsers use.")
@click.option(
    "--local-role",
    type=click.Choice(ROLES),
    default="viewer",
    show_default=True,
    help="What may be done without a token, on 127.0.0.1.",
)
@click.option("--local-name", metavar="NAME", help="Who that is.  [default: the user's name]")
@click.option(
    "--report",
    type=AnyPath(dir_okay=False),
    metavar="FILE",
    help="Write the run's report as one HTML file to send, and end.",
)
@click.option("--new-token", metavar="NAME=ROLE", help="Make a token, print it once, and end. ROLE is as above.")
@click.option("--revoke-token", metavar="NAME", help="Take somebody's token and sessions back, and end.")
@click.option("--list-tokens", is_flag=True, help="Print who has a token, with the role, and end.")
@click.option(
    "--tokens",
    "token_path",
    type=AnyPath(dir_okay=False),
    metavar="FILE",
    help="Where digests of tokens are kept.  [default: ~/.local/state/rftstream/studio/tokens.json]",
)
def studio(
    runs: tuple[Path, ...],
    host: str,
    port: int,
    public_hosts: tuple[str, ...],
    local_role: str,
    local_name: str | None,
    report: Path | None,
    new_token: str | None,
    revoke_token: str | None,
    list_tokens: bool,
    token_path: Path | None,
) -> None:
    """Show runs in a browser: at a glance, groups, rollouts, tokens, versions, at any moment of the past.

    The pages follow a live run, and still show it after its end. Nothing waits for them. An index of groups and
    rollouts is kept in RUN/index (safe to delete). A viewer can look. An annotator can also answer questions. An
    operator can also pause, drain, evaluate and put dead groups back. On 127.0.0.1 a visitor without a token has the
    role --local-role. On another address everybody needs a token; only its digest is stored. There is no encryption:
    put a server with TLS in front if others use the pages. RUN is a run folder, or a run file (then its newest run).
    """
    from rftstream.studio.access import StudioRole, TokenFile, Viewer, check_name, default_token_file
    from rftstream.studio.server import serve

    tokens = TokenFile(token_path or default_token_file())
    if new_token is not None:
        name, _, role = new_token.partition("=")
        if role not in ROLES:
            raise ConfigError(f"--new-token: got {new_token!r}, expected NAME=ROLE with {', '.join(ROLES)}")
        click.echo(tokens.make(name, StudioRole[role]))
        return
    if revoke_token is not None:
        click.echo(f"{revoke_token}: the token is taken back ({tokens.revoke(revoke_token).name})")
        return
    if list_tokens:
        for entry in tokens.entries():
            click.echo(f"{entry.name} {entry.role.name}")
        return
    if not runs:
        raise click.UsageError("name a RUN, or several")
    if report is not None:
        if len(runs) != 1:
            raise click.UsageError(f"--report is of one run; got {len(runs)}")
        from rftstream.queries.formatting import size
        from rftstream.runs.folder import open_run
        from rftstream.studio.plot_page import write_report

        with at_work("reading the log"):
            num_bytes = write_report(open_run(runs[0]), report)
        click.echo(f"{report}: {size(num_bytes)}")
        return
    if local_name is not None:
        check_name(local_name, "--local-name")
    serve(
        runs,
        host=host,
        port=port,
        tokens=tokens,
        local=Viewer(name=local_name or _own_name(), role=StudioRole[local_role], is_local=True),
        public_hosts=public_hosts,
        ready=lambda url: click.echo(_ready_text(url, runs, host, public_hosts)),
    )


def _ready_text(url: str, runs: Sequence[Path], host: str, public_hosts: Sequence[str]) -> str:
    shown = f"{url} shows {', '.join(map(str, runs))}; ctrl-C ends it"
    if host not in ("0.0.0.0", "::") or public_hosts:
        return shown
    return f"{shown}\nothers reach it as {socket.gethostname()} alone; --public-host adds another name, or an address"


def serve_here(runs: Sequence[Path], *, ready: Callable[[str], None]) -> None:
    """Show runs to this machine alone, at the usual port or, if that is taken, at a free one, until ctrl-C. `ready` is
    called with the address."""
    from rftstream.studio.access import StudioRole, TokenFile, Viewer, default_token_file
    from rftstream.studio.server import serve

    local = Viewer(name=_own_name(), role=StudioRole.viewer, is_local=True)
    tokens = TokenFile(default_token_file())
    try:
        serve(runs, host=HOST, port=PORT, tokens=tokens, local=local, public_hosts=(), ready=ready)
    except ConfigError:  # the port is taken
        serve(runs, host=HOST, port=0, tokens=tokens, local=local, public_hosts=(), ready=ready)


def _own_name() -> str:
    """Return the user name of this process, with the characters that a name may not have replaced."""
    try:
        return re.sub(r"[^A-Za-z0-9@._-]", "_", getpass.getuser())[:64] or "local"
    except (OSError, KeyError):  # a uid without a name, as in containers
        return "local"
