"""The commands `sandbox`: what this machine has to run programs of a policy, and a server for machines that have
less."""

from __future__ import annotations

import os
import signal
import sys
import threading

import click

from rftstream.commands.options import command, group

TOKEN = "RFTSTREAM_SANDBOX_TOKEN"
"""Environment variable with the token of a sandbox server."""


@group("rftstream sandbox layers")
def sandbox() -> None:
    """Try and serve sandboxes for programs that a policy wrote."""


@command("rftstream sandbox layers", group=sandbox)
def layers() -> None:
    """Show the layers that this machine has, and what it costs that one is missing."""
    from rftstream.sandbox.layers import find_layers, missing_text

    for layer in find_layers():
        click.echo(f"{'ok' if layer.is_there else 'missing':8} {layer.name:14} {layer.found}")
        if not layer.is_there:
            click.echo(f"         {layer.cost}")
    if missing_text() is not None:
        sys.exit(1)


@command("rftstream sandbox serve", "rftstream sandbox serve --address 0.0.0.0:8090 --slots 8", group=sandbox)
@click.option("--address", default="127.0.0.1:8090", show_default=True, help="HOST:PORT; port 0: any free one.")
@click.option("--slots", type=click.IntRange(0), default=0, help="Programs at once.  [default: one for each core]")
@click.option(
    "--isolation",
    type=click.Choice(["full", "shared_user"]),
    default="full",
    show_default=True,
    help="shared_user: programs run as this user, which is weaker.",
)
def serve(address: str, slots: int, isolation: str) -> None:
    """Run programs for others, over HTTP.

    Other machines are served only with a token, which both sides read from RFTSTREAM_SANDBOX_TOKEN.
    """
    from rftstream.errors import ConfigError
    from rftstream.sandbox.base import Isolation
    from rftstream.sandbox.layers import weaknesses
    from rftstream.sandbox.local import LocalBackend
    from rftstream.sandbox.server import SandboxServer

    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--address: found {address!r}, expected HOST:PORT")
    backend = LocalBackend(slots=slots, isolation=Isolation(isolation))
    for name in weaknesses(Isolation(isolation)):
        click.echo(f"warning: sandboxes {name.replace('-', ' ')}", err=True)
    server = SandboxServer((host.strip("[]"), int(port)), backend, token=os.environ.get(TOKEN, ""))
    click.echo(f"serving sandboxes at {server.url}")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        stop.wait()
    finally:
        server.close()
