"""The command `convert-config` makes a run file from a config of TRL, verl or prime-rl."""

from __future__ import annotations

import json
from pathlib import Path

import click

from rftstream.commands.options import command, json_option, say
from rftstream.commands.param_types import AnyPath
from rftstream.errors import ConfigError
from rftstream.integrations.foreign_configs import SYSTEMS, TRAINERS, convert_config


@command(
    "rftstream convert-config trl train_grpo.py -o rftstream.toml && rftstream check",
    "rftstream convert-config verl run_gsm8k.sh --gpus 0 -o cpu.toml",
    "rftstream convert-config prime-rl rl.toml --json | jq .not_taken",
    name="convert-config",
)
@click.argument("system", type=click.Choice(list(SYSTEMS)))
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=AnyPath(dir_okay=False))
@click.option("-o", "--out", type=AnyPath(dir_okay=False), metavar="FILE", help="Write the run file there.")
@click.option(
    "--gpus",
    type=click.IntRange(min=0),
    metavar="N",
    help="GPUs of the run; 0: it runs on CPUs.  [default: as the config says, else those where it runs]",
)
@click.option("--trainer", type=click.Choice(TRAINERS), help="TRL's trainer, for a YAML that does not name it.")
@json_option
def convert(
    system: str, files: tuple[Path, ...], out: Path | None, gpus: int | None, trainer: str | None, as_json: bool
) -> None:
    """Convert a config of TRL, verl or prime-rl to a run file, and say what was not taken and why.

    trl: a training script, which is read and never run, the YAML of its command line, both, or a shell script that
    launches them. verl: a YAML config, a script that launches it with overrides, or both. prime-rl: its TOML files. The
    run file goes to stdout, the report to stderr. With -o the script's rewards and tools are copied to modules beside
    it. docs/coming-from.md explains the differences.
    """
    if out is not None and out.exists():
        raise ConfigError(f"{out}: is there already; name another file, or remove it")
    done = convert_config(system, files, gpus=gpus, trainer=trainer)
    said = []
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(done.run_file, encoding="utf-8")
        said = [_written(out.parent / one.name, one.text) for one in done.modules]
        said.append(f"wrote {out}; `rftstream check {out}` looks at it")
    if done.num_gpus > (here := _gpus_here() if done.num_gpus else 0):
        names = "cuda:0" if done.num_gpus == 1 else f"cuda:0 to cuda:{done.num_gpus - 1}"
        said.append(
            f"the run names {names}, and this machine has {here or 'no'} GPUs: "
            f"`--gpus {here}` converts for this machine"
        )
    if as_json:
        click.echo(json.dumps(done.to_json()))
        return
    if out is None:
        click.echo(done.run_file, nl=False)
        said += ["-o FILE writes the modules, too"] if done.modules else []
    say("\n".join([done.to_text(), *said]))


def _gpus_here() -> int:
    from rftstream.models.machine import read_machine

    return len(read_machine().gpus)


def _written(path: Path, text: str) -> str:
    """Write a module unless there is a file, and return a sentence about it."""
    if path.exists():
        return f"kept {path}, which is there already; remove it and the run file to have it written"
    path.write_text(text, encoding="utf-8")
    return f"wrote {path}"
