"""`rftstream completion`: the scripts, and what a Tab gives."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from rftstream.commands import COMMANDS, cli
from rftstream.commands.param_types import KINDS
from rftstream.config.parts.registry import KINDS as PLUGINS
from rftstream.contracts.topics import TOPICS
from rftstream.queries.reference.settings import plural_of
from rftstream.roles import ROLES


def completed(*words: str) -> list[str]:
    """What the shell would offer for the last of the words."""
    *before, last = words
    return [item.value for item in ShellComplete(cli, {}, "rftstream", "_").get_completions(list(before), last)
            if item.type == "plain"]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/first", "runs/second", "other"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/first", "runs/second"):
        (tmp_path / name / "config.toml").write_text("")
        (tmp_path / name / "run.lock").write_text("")
    (tmp_path / "mine.toml").write_text("")
    (tmp_path / "notes.txt").write_text("")
    return tmp_path


def test_commands_and_options(here: Path) -> None:
    assert completed("") == list(COMMANDS)
    assert completed("tr") == ["try", "traces", "trace"]
    assert "--version" in completed("evaluate", "runs/first", "--v")


def test_runs_and_run_files(here: Path) -> None:
    assert completed("status", "") == ["runs/first", "runs/second", "mine.toml"]
    assert completed("trace", "runs/s") == ["runs/second"]
    assert completed("delete", "fi") == ["runs/first"]
    assert completed("run", "") == ["mine.toml"]
    assert completed("run", f"{here}/m") == [f"{here}/mine.toml"]


def test_topics_roles_kinds(here: Path) -> None:
    assert completed("inspect", "runs/first", "") == list(TOPICS)
    assert completed("worker", "mine.toml", "--role", "e") == ["explorer", "evaluator"]
    assert completed("list", "rew") == ["rewards"]
    assert completed("topics", "ap") == ["apply"]
    assert set(completed("worker", "mine.toml", "--role", "")) == set(ROLES)
    assert set(KINDS) == {plural_of(kind) for kind in PLUGINS} | {"benchmarks", "runs"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(shell: str) -> None:
    result = CliRunner().invoke(cli, ["completion", shell])
    assert result.exit_code == 0
    assert "_RFTSTREAM_COMPLETE" in result.stdout
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n"], input=result.stdout, text=True, check=True, capture_output=True)


TYPED = (
    ("rftstream run mine.toml --set trainer.lr", ["trainer.lr=", "trainer.lr_schedule="]),
    ("rftstream run mine.toml --set trainer.lr_schedule=cos", ["cosine"]),
    ("rftstream run mine.toml --set tasksets.s", ["tasksets.sums."]),
    ("rftstream run mine.toml --set ", ["run.", "model."]),
    ("rftstream explain model.make.l", ["model.make.layers"]),
    ("rftstream stat", ["status"]),
)


@pytest.mark.slow
def test_in_bash(here: Path) -> None:
    """By bash's own variables: it splits words at `=`, and wants what follows."""
    (here / "mine.toml").write_text('[tasksets.sums]\nsource = "arithmetic"\n')
    lines = [
        'eval "$(rftstream completion bash)"',
        "compopt() { :; }  # works inside of a completion alone",
        "declare -F _rftstream_completion > /dev/null || exit 1",
    ]
    for typed, _ in TYPED:
        lines += [f"COMP_LINE={typed!r} COMP_POINT={len(typed)} COMPREPLY=()", "_rftstream_completion rftstream",
                  'echo "${COMPREPLY[*]}"']  # fmt: skip
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=300, cwd=here,
                          env={**os.environ, "PATH": path})  # fmt: skip
    assert done.returncode == 0, done.stderr
    for (typed, wanted), line in zip(TYPED, done.stdout.splitlines(), strict=True):
        assert line.split()[: len(wanted)] == wanted, typed


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_words_for_other_shells(shell: str, here: Path) -> None:
    """They split words at spaces alone."""
    (here / "mine.toml").write_text('[tasksets.sums]\nsource = "arithmetic"\n')
    words = "rftstream run mine.toml --set tasksets.sums.shuffle=t"
    at = {"zsh": "4", "fish": words.rpartition(" ")[2]}[shell]
    done = subprocess.run(
        [sys.executable, "-m", "rftstream"], capture_output=True, text=True, timeout=120, cwd=here,
        env={**os.environ, "_RFTSTREAM_COMPLETE": f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": at},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "tasksets.sums.shuffle=true" in done.stdout


def test_another_shell() -> None:
    result = CliRunner().invoke(cli, ["completion", "tcsh"])
    assert result.exit_code == 2
    assert "'bash', 'zsh', 'fish'" in result.stderr


def test_a_tab_imports_nothing_heavy(here: Path) -> None:
    script = """
import os, sys
os.environ |= {"_RFTSTREAM_COMPLETE": "zsh_complete", "COMP_CWORD": "3"}
os.environ["COMP_WORDS"] = "rftstream inspect runs/first ro"
from rftstream.commands import main
try:
    main([])
except SystemExit as end:
    assert not end.code
heavy = {"numpy", "torch", "transformers", "msgspec", "rich", "sqlite3", "kafka"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=here)
    assert done.returncode == 0, done.stderr
    assert "rollouts" in done.stdout
