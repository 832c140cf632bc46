from __future__ import annotations

from pathlib import Path

import click
import pytest

from rftstream.commands import options
from rftstream.commands.options import at_work, of_this_run, run_files
from rftstream.errors import ConfigError


def test_a_proposed_command_names_all_files_of_the_run() -> None:
    context = click.Context(click.Command("status"))
    context.params = {"run": Path("a.toml"), "layers": (Path("kafka.toml"),)}
    assert of_this_run("`rftstream audit RUN`", context) == "`rftstream audit a.toml,kafka.toml`"


def test_what_a_users_code_prints_is_kept_apart_from_what_scripts_read(capsys: pytest.CaptureFixture[str]) -> None:
    with at_work("scoring"):
        print("said by a reward")
    assert capsys.readouterr() == ("", "said by a reward\n")


def test_long_work_is_told_at_intervals_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "TOLD_EVERY_S", 0.005)
    said = ""
    with at_work("reading the log", at_intervals=True) as doing:
        for phase in ("reading the log", "reading tasks, 5 of 10 offsets"):
            while f"{phase} ...\n" not in said:
                said += capsys.readouterr().err
            doing("reading tasks, 5 of 10 offsets")
    assert set(said.splitlines()) == {"reading the log ...", "reading tasks, 5 of 10 offsets ..."}
    monkeypatch.setattr(options, "TOLD_EVERY_S", 10.0)
    with at_work("reading the log", at_intervals=True) as doing:
        doing("reading tasks, 10 of 10 offsets")
    assert capsys.readouterr().err == "", "what is done soon says nothing"


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (["sums.toml", "pyproject.toml"], "name one, sums.toml here"),
        (["pyproject.toml"], "`rftstream init` writes a first one"),
    ],
)
def test_who_names_no_file_hears_which_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in there:
        Path(name).touch()
    with pytest.raises(ConfigError, match=said):
        run_files(())
