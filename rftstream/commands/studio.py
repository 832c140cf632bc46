"""`studio`: a page over runs, for a browser."""

from __future__ import annotations

from pathlib import Path

import click

from rftstream.commands.options import examples
from rftstream.commands.param_types import AnyPath, RunPath
from rftstream.errors import ConfigError

ROLES = ("viewer", "annotator", "operator")


@examples(
    "rftstream studio examples/runs/arithmetic",
    "rftstream studio runs/first runs/second --port 0",
    "rftstream studio --new-token ada=viewer",
    "rftstream studio runs/first --host 0.0.0.0 --public-host studio.example.org",
)
@click.command()
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=RunPath())
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; on any other, a token is a must."
)
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="0: one that is free.")
@click.option("--public-host", "public_hosts", metavar="NAME", multiple=True, help="Another name that browsers use.")
@click.option(
    "--local-role",
    type=click.Choice(ROLES),
    default="viewer",
    show_default=True,
    help="What may be done without a token, on 127.0.0.1.",
)
@click.option("--new-token", metavar="NAME=ROLE", help="Make a token, print it once, and end. ROLE is as above.")
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
    new_token: str | None,
    token_path: Path | None,
) -> None:
    """Show runs in a browser: at a glance, groups, rollouts, tokens, versions, at any moment of the past.

    The pages follow a run while it goes on, and stay when it has ended. They only read, and nothing waits for them.
    What they know of groups and rollouts is kept in RUN/index (safe to delete). On 127.0.0.1 nobody is asked who they
    are; on another address everybody needs a token, of which only a digest is kept. There is no encryption: put a
    server with TLS in front where others look. RUN is a run folder, or a run file (then its newest run). Needs the
    extra: pip install 'rftstream[studio]'.
    """
    try:
        from rftstream.studio.access import StudioRole, TokenFile, default_token_file
        from rftstream.studio.server import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"studio: the package {error.name} is not installed; pip install 'rftstream[studio]'"
        ) from None
    tokens = TokenFile(token_path or default_token_file())
    if new_token is not None:
        name, _, role = new_token.partition("=")
        if role not in ROLES:
            raise ConfigError(f"--new-token: got {new_token!r}, expected NAME=ROLE with {', '.join(ROLES)}")
        click.echo(tokens.make(name, StudioRole[role]))
        return
    if not runs:
        raise click.UsageError("name a RUN, or several")
    serve(
        runs,
        host=host,
        port=port,
        tokens=tokens,
        local_role=StudioRole[local_role],
        public_hosts=public_hosts,
        ready=lambda url: click.echo(f"{url} shows {', '.join(map(str, runs))}; ctrl-C ends it"),
    )
