"""The commands `feedback`: what people say about rollouts, and what it changes."""

from __future__ import annotations

import re
import time
from pathlib import Path

import click

from rftstream.commands.options import at_work, command, from_option, group, json_option, run_argument
from rftstream.commands.param_types import AnyPath
from rftstream.commands.views import opened_run, print_out


@group(
    "rftstream feedback questions examples/runs/arithmetic",
    "rftstream feedback add examples/runs/arithmetic --from votes.jsonl",
    "rftstream feedback judgements examples/runs/arithmetic --json",
)
def feedback() -> None:
    """Ask people about rollouts: questions, votes, and how they are judged.

    The section [feedback] of the run file says which questions are asked, and what the answers change. Votes can be
    added to any run, live or not, also without a question.
    """


@command(
    "rftstream feedback add examples/runs/arithmetic --from votes.jsonl",
    "rftstream feedback add runs/a --from votes.jsonl --dry-run --json",
    group=feedback,
)
@run_argument
@from_option(
    "JSON lines: rollout, by, and one of label, rating, choice, correction, flag, retract.", AnyPath(dir_okay=False)
)
@click.option("--dry-run", is_flag=True, help="Look at everything, write nothing.")
@json_option
def add(run: Path, source: Path, dry_run: bool, as_json: bool) -> None:
    """Add votes to a run, live or not, each once however often it is added.

    A row names a rollout (`rollout`, or `rollouts` of a pair), its annotator (`by`) and the answer. A later vote of an
    annotator on the same question is an edit and replaces the earlier one; `retract` takes a vote back. Names do not
    reach the log, which holds their HMAC under the run's secret. An error names the line, and then nothing is written.
    """
    from rftstream.data.feedback.rows import read_votes
    from rftstream.runs.writes.feedback import add_votes

    with opened_run(run) as opened:
        added = add_votes(opened.transport, opened.config, opened.folder, read_votes(source), dry_run=dry_run)
    print_out(added.to_json() if as_json else added.to_text())


@command(
    "rftstream feedback gold examples/runs/arithmetic --from right.jsonl",
    "rftstream feedback gold runs/a --from right.jsonl --dry-run --json",
    group=feedback,
)
@run_argument
@from_option("JSON lines: rollout, and one of label, rating, choice, or retract.", AnyPath(dir_okay=False))
@click.option("--dry-run", is_flag=True, help="Look at everything, write nothing.")
@json_option
def gold(run: Path, source: Path, dry_run: bool, as_json: bool) -> None:
    """Say the right answers to questions that annotators are measured by.

    A row is a vote without `by`. From then on the question is gold: answers to it change no reward and are never
    judged, and `feedback annotators` counts right answers by annotator. The studio puts gold questions between the
    others (`feedback.gold` says how many) and never shows the right answer. The log holds the right answer, so
    everybody who can read the log can read it.
    """
    from rftstream.data.feedback.rows import read_gold
    from rftstream.runs.writes.feedback import add_votes

    with opened_run(run) as opened:
        added = add_votes(opened.transport, opened.config, opened.folder, read_gold(source), gold=True, dry_run=dry_run)
    print_out(added.to_json() if as_json else added.to_text())


@command(
    "rftstream feedback annotators runs/a",
    "rftstream feedback annotators runs/a --json | jq .annotators",
    group=feedback,
)
@run_argument
@json_option
def annotators(run: Path, as_json: bool) -> None:
    """Show how each annotator judges: agreement with the others, time, sides, and right answers to gold questions.

    Annotators are shown as keyed hashes, as on the log. Labels, ratings and choices are compared separately. Shares
    come with Wilson's interval of 95 %.
    """
    from rftstream.queries.people.annotators import read_annotators
    from rftstream.queries.people.feedback import read_feedback
    from rftstream.service.role import Log

    with opened_run(run) as opened:
        view = read_annotators(read_feedback(Log(opened.transport), opened.config), opened.config)
    print_out(view.to_json() if as_json else view.to_text())


@command("rftstream feedback questions runs/a", "rftstream feedback questions runs/a --open --json", group=feedback)
@run_argument
@click.option("--open", "only_open", is_flag=True, help="Only those that wait for answers.")
@json_option
def questions(run: Path, only_open: bool, as_json: bool) -> None:
    """List what people are asked about rollouts, why, and how many have answered."""
    from rftstream.queries.people.feedback import question_state, questions_to_json, questions_to_text, read_feedback
    from rftstream.service.role import Log

    now = time.time()
    with opened_run(run) as opened:
        view = read_feedback(Log(opened.transport), opened.config)
    if only_open:
        view.questions = [question for question in view.questions if question_state(view, question, now) == "open"]
    print_out(questions_to_json(view, now) if as_json else questions_to_text(view, now))


@command("rftstream feedback judgements runs/a", "rftstream feedback judgements runs/a --json", group=feedback)
@run_argument
@json_option
def judgements(run: Path, as_json: bool) -> None:
    """Show how each question is judged: votes, agreement, what it changed, and the batch and version it came too late
    for.

    Votes that came after the run had ended are judged here by the same rules. The next resume records them.
    """
    from rftstream.queries.people.feedback import judgements_to_json, judgements_to_text, read_feedback
    from rftstream.service.role import Log

    with opened_run(run) as opened:
        view = read_feedback(Log(opened.transport), opened.config)
    print_out(judgements_to_json(view) if as_json else judgements_to_text(view))


@command("rftstream feedback list runs/a", "rftstream feedback list runs/a --json", group=feedback, name="list")
@run_argument
@json_option
def list_(run: Path, as_json: bool) -> None:
    """List everything that was said, and what became of it: counted, late, unknown, twice or taken back."""
    from rftstream.queries.people.feedback import read_feedback, votes_to_json, votes_to_text
    from rftstream.service.role import Log

    with opened_run(run) as opened:
        view = read_feedback(Log(opened.transport), opened.config)
    print_out(votes_to_json(view) if as_json else votes_to_text(view))


@command("rftstream feedback taints runs/a", "rftstream feedback taints runs/a --json | jq .batches", group=feedback)
@run_argument
@json_option
def taints(run: Path, as_json: bool) -> None:
    """List the rollouts that were trained otherwise than people judge them now, with their batches and versions.

    `rftstream replay RUN --without feedback --into NEWRUN` trains the batches again without them.
    """
    from rftstream.queries.curves.history import read_history
    from rftstream.queries.people.taints import read_taints, taints_to_json, taints_to_text
    from rftstream.service.role import Log

    with opened_run(run) as opened:
        found, version = read_taints(Log(opened.transport), opened.config), read_history(Log(opened.transport)).version
    print_out(taints_to_json(found, version) if as_json else taints_to_text(found, version))


@command(
    "rftstream feedback export runs/a --what pairs --to pairs.jsonl",
    "rftstream feedback export runs/a --what corrections --to chats.jsonl",
    "rftstream experts load runs/dpo --from pairs.jsonl",
    group=feedback,
)
@run_argument
@click.option(
    "--what", type=click.Choice(["pairs", "corrections"]), required=True, help="Preference pairs, or corrected answers."
)
@click.option("--to", "target", required=True, type=AnyPath(dir_okay=False), metavar="FILE", help="JSON lines.")
@json_option
def export(run: Path, what: str, target: Path, as_json: bool) -> None:
    """Write what people judged as rows that `experts load` and `experts.source` read.

    A pair has prompt, chosen and rejected, for DPO and reward models. Pairs without a better side are left out. A
    corrected answer is a chat to imitate. Each row names its source.
    """
    import json

    from rftstream.queries.people.feedback import read_feedback
    from rftstream.queries.people.feedback_data import demonstration_rows, preference_rows
    from rftstream.service.role import Log

    with opened_run(run) as opened:
        log = Log(opened.transport)
        view = read_feedback(log, opened.config)
        rows = list((preference_rows if what == "pairs" else demonstration_rows)(log, view))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    target.write_text(text, encoding="utf-8")
    print_out({"file": str(target), "rows": len(rows)} if as_json else f"{target}: {len(rows):,} {what}")


@command(
    "rftstream feedback label-studio runs/a --url http://127.0.0.1:8080",
    "rftstream feedback label-studio runs/a --url https://labels.example.org --token-file token --port 9401",
    "rftstream feedback label-studio runs/a --url http://127.0.0.1:8080 --once --json",
    group=feedback,
    name="label-studio",
)
@run_argument
@click.option("--url", required=True, metavar="URL", help="Where Label Studio is, as a browser shows it.")
@click.option(
    "--token-file",
    type=AnyPath(dir_okay=False),
    metavar="FILE",
    help="A personal access token.  [default: the variable RFTSTREAM_LABEL_STUDIO_TOKEN]",
)
@click.option("--once", is_flag=True, help="Bring both sides up to date once, and end.")
@click.option(
    "--every-s", type=click.FloatRange(0.1), default=10.0, show_default=True, help="Seconds between two rounds."
)
@click.option(
    "--timeout-s", type=click.FloatRange(0.1), default=60.0, show_default=True, help="Most seconds for one request."
)
@click.option(
    "--source",
    default="label-studio",
    show_default=True,
    metavar="NAME",
    help="What votes from there are named after; each of several servers needs a name of its own.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address for --port.")
@click.option("--port", type=click.IntRange(0, 65535), help="Serve /livez and /readyz there; 0: one that is free.")
@json_option
def label_studio(
    run: Path,
    url: str,
    token_file: Path | None,
    once: bool,
    every_s: float,
    timeout_s: float,
    source: str,
    host: str,
    port: int | None,
    as_json: bool,
) -> None:
    """Let people answer in Label Studio: questions become tasks there, annotations come back as votes.

    Each vote comes once: an edit is a revision, a deletion takes it back. The command polls both sides until ctrl-C,
    and waits while Label Studio or the log cannot be reached. It keeps no state, so it may be killed at any time. It
    makes a project for each kind of question, and deletes nothing in Label Studio. The token is made in Label Studio
    under Account & Settings > Personal Access Token. Names do not reach the log, which holds an HMAC of the user's id.
    With --json, --once prints what was done.
    """
    from rftstream.integrations.label_studio.client import PersonalToken
    from rftstream.integrations.label_studio.serving import run_once, serve
    from rftstream.launch.logging import setup

    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,39}", source):
        raise click.UsageError(f"--source {source}: expected up to 40 of a to z, 0 to 9, - and _")
    token = PersonalToken(token_file)
    if once:
        with at_work("bringing both sides up to date"):
            report = run_once(run, url=url, token=token, timeout_s=timeout_s, source=source)
        print_out(report.to_json() if as_json else report.to_text())
        return
    setup("label-studio", level="info", form="text", echoes=False)
    serve(
        run,
        url=url,
        token=token,
        timeout_s=timeout_s,
        source=source,
        every_s=every_s,
        host=host,
        port=port,
        ready=lambda address: click.echo(f"{run} and {url} follow each other; ctrl-C ends it {address}".rstrip()),
    )
