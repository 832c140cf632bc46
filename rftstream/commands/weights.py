"""The commands `weights`: list the published versions of a run, verify them, and export them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from rftstream.commands.options import at_work, command, group, json_option, run_argument
from rftstream.commands.param_types import AnyPath, VersionNumber
from rftstream.commands.views import opened_run, print_out


@group(
    "rftstream weights list runs/smollm2",
    "rftstream weights verify runs/smollm2",
    "rftstream weights export runs/smollm2 --version 120 --to models/mine",
)
def weights() -> None:
    """List published versions, verify them, or export one as an ordinary model folder.

    RUN may be live or over; no trainer is needed.
    """


@command(
    "rftstream weights list runs/smollm2", "rftstream weights list runs/smollm2 --json", group=weights, name="list"
)
@run_argument
@click.option("--all", "everything", is_flag=True, help="Also versions whose objects were deleted, as the run said.")
@json_option
def list_(run: Path, everything: bool, as_json: bool) -> None:
    """Show the versions in force: anchor or delta, how large, and whether they can still be made.

    With --json one list.
    """
    from rftstream.queries.records.weights import lines_to_table, list_versions
    from rftstream.runs.published import read_published

    with opened_run(run) as opened:
        lines = list_versions(read_published(opened))
        shown = [line for line in lines if everything or line.state != "deleted"]
        if as_json:
            print_out(shown)
            return
        from rich.console import Console

        more = len(lines) - len(shown)
        title = f"{opened.run_id}: {opened.store().url}" + (f" ({more} more are deleted: --all)" if more else "")
        Console(width=None if Console().is_terminal else 120).print(lines_to_table(shown, title))


@command("rftstream weights verify runs/smollm2", group=weights)
@run_argument
@json_option
@click.pass_context
def verify(ctx: click.Context, run: Path, as_json: bool) -> None:
    """Read every version that the run keeps, make its weights, and compare all digests. Exit 1 if one is damaged.

    With --json one object a line.
    """
    from rftstream.queries.plain import pick
    from rftstream.runs.published import read_published
    from rftstream.runs.published import verify as verified

    damaged = num = 0
    with opened_run(run) as opened:
        found = verified(read_published(opened))
        while True:
            with at_work("reading the store"):
                one, problem = next(found, (None, None))
            if one is None:
                break
            num, damaged = num + 1, damaged + (problem is not None)
            if as_json:
                said = pick(one, "version=name.version trainer_epoch=name.trainer_epoch object")
                print_out({**said, "good": problem is None, "problem": problem})
            elif problem is not None:
                click.echo(f"version {one.name.version}: {problem}")
    if not as_json:
        click.echo(f"{num - damaged} of {num} versions are good" + ("" if damaged else ", bit for bit"))
    if damaged:
        ctx.exit(1)


@command(
    "rftstream weights export runs/smollm2",
    "rftstream weights export runs/smollm2 --version best --to models/mine",
    "rftstream weights export runs/smollm2 --version 100 --version 120 --to models/mine",
    "rftstream weights export runs/smollm2-lora --adapter --to adapters/mine",
    "rftstream weights export runs/smollm2 --version 120 --upload me/smollm2-sums --private",
    group=weights,
)
@run_argument
@click.option(
    "--version",
    "versions",
    type=VersionNumber(),
    multiple=True,
    metavar="NUMBER",
    help="Which one, or `best`: by its evaluations; several with several. Default: the newest.",
)
@click.option(
    "--to",
    "target",
    type=AnyPath(),
    metavar="FOLDER",
    help="Where to; several versions go to v<NUMBER> in it. Default: RUN/exports/v<NUMBER>.",
)
@click.option(
    "--adapter", is_flag=True, help="Of a run with [model.lora]: the adapter alone, not merged with the model."
)
@click.option(
    "--upload",
    "repository",
    metavar="OWNER/NAME[@BRANCH]",
    help="Send it to a hub, too (HF_TOKEN, HF_ENDPOINT). Several go to branches v<NUMBER>.",
)
@click.option("--private", is_flag=True, help="A repository that --upload makes is not public.")
@json_option
def export(
    run: Path,
    versions: tuple[int | str, ...],
    target: Path | None,
    adapter: bool,
    repository: str | None,
    private: bool,
    as_json: bool,
) -> None:
    """Make an ordinary Hugging Face model folder of a version: weights, config, tokenizer, template, model card.

    With --json one object a line: version, folder, weights_digest, and url if it was uploaded.
    """
    from rftstream.queries.curves.model_card import write_model_card
    from rftstream.queries.state.best_version import best_number
    from rftstream.runs.published import model_of, read_published, write_model_folder
    from rftstream.service.role import Log

    places: list[Any] = []
    if private and repository is None:
        raise click.UsageError("--private is for what --upload makes; give --upload OWNER/NAME, too.")
    with opened_run(run) as opened:
        numbers = list(dict.fromkeys(one if isinstance(one, int) else best_number(opened) for one in versions))
        if repository is not None:
            from rftstream.models.folders import hub

            places = hub.places_of(repository, numbers, where="--upload")
        spec, published = model_of(opened), read_published(opened)
        describe = partial(write_model_card, Log(opened.transport), opened.config, spec)
        for number, one in enumerate(published.choose(numbers, where="--version")):
            version = one.name.version
            folder = target or opened.folder.exports
            if target is None or len(numbers) > 1:
                folder = folder / (f"v{version}-adapter" if adapter else f"v{version}")
            with at_work(f"version {version}"):
                write_model_folder(published, one, spec, folder, adapter=adapter, describe=describe)
            told = {"version": version, "folder": str(folder), "weights_digest": one.weights_digest}
            text = f"version {version} is in {folder}"
            if places:
                with at_work(f"sending version {version}"):
                    message = f"version {version} of {opened.run_id}"
                    told["url"] = hub.upload(folder, places[number], private=private, message=message)
                text += f", and at {told['url']}"
            print_out(told if as_json else text)
