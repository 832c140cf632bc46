"""Events of a run's log files: whole, in the order of time, the newest ones without reading all, and what comes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rftstream.commands import cli
from rftstream.launch import log_files
from rftstream.launch.log_files import LogFile, in_order

TRACEBACK = "Traceback (most recent call last):\n  File ...\nValueError: no"


def line(second: int, text: str, level: str = "INFO") -> str:
    return f"2026-01-31 12:00:{second:02d}.000 {level:<7} trainer-0 {text}\n"


def texts(*files: LogFile) -> list[str]:
    return [event.text.partition("trainer-0 ")[2] for event in in_order(files)]


def test_a_traceback_belongs_to_its_event(tmp_path: Path) -> None:
    path = tmp_path / "trainer-0.log"
    path.write_text(line(1, "one") + line(2, "failed", "ERROR") + f"{TRACEBACK}\n" + line(3, "two"))
    assert texts(LogFile(path)) == ["one", f"failed\n{TRACEBACK}", "two"]
    assert texts(LogFile(path, 2)) == [f"failed\n{TRACEBACK}", "two"]


def test_files_come_in_the_order_of_time_in_both_forms(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(line(1, "a1") + line(4, "a4"))
    as_json = json.dumps({"time": 1.0, "level": "warning", "process": "trainer-0", "message": "before all"})
    (tmp_path / "b.log").write_text(f"{as_json}\n" + line(3, "b3"))
    found = list(in_order([LogFile(tmp_path / "a.log"), LogFile(tmp_path / "b.log")]))
    assert [event.text[-2:].strip() for event in found] == ['"}', "a1", "b3", "a4"]
    assert found[0].level == "WARNING"


@pytest.mark.parametrize("last", [1, 7, 99, 100, 200])
@pytest.mark.parametrize("block", [16, 1_000, 1 << 16])
def test_the_newest_are_found_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, block: int
) -> None:
    monkeypatch.setattr(log_files, "_BLOCK_BYTES", block)
    path = tmp_path / "trainer-0.log"
    path.write_text("begins in the middle\n" + "".join(line(1, f"event {number}") for number in range(100)))
    found = texts(LogFile(path, last))
    assert found[-min(last, 100) :] == [f"event {number}" for number in range(100)][-last:]
    assert len(found) == (last if last <= 100 else 101)


def test_what_comes_is_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "trainer-0.log"
    path.write_text(line(1, "one") + line(2, "half")[:20])
    file = LogFile(path)
    assert texts(file) == ["one"]
    with path.open("a") as out:
        out.write(line(2, "half")[20:])
    assert texts(file) == ["half"]
    assert texts(file) == []


def test_the_command_shows_roles_and_troubles(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        '[run]\nname = "x"\nsteps = 1\n[model]\npath = "fake"\n[tasksets.a]\nsource = "arithmetic"\n'
    )
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer-0.log").write_text(line(1, "fine") + line(2, "odd", "WARNING"))
    (tmp_path / "logs" / "feeder-0.log").write_text(line(3, "fed"))

    def said(*options: str) -> list[str]:
        done = CliRunner().invoke(cli, ["logs", str(tmp_path), *options])
        assert done.exit_code == 0, done.output
        return [event.partition("trainer-0 ")[2] for event in done.stdout.splitlines()]

    assert said() == ["fine", "odd", "fed"]
    assert said("--role", "feeder") == ["fed"]
    assert said("--troubles") == ["odd"]
    none = CliRunner().invoke(cli, ["logs", str(tmp_path), "--troubles", "--role", "feeder"])
    assert (none.stdout, none.stderr) == ("", "no warning or error in 1 log\n")
    assert said("--last", "1") == ["fed"]
    told = line(3, "trainer-0: odd", "WARNING") + line(4, "trainer-0: died 5 times in a row", "ERROR")
    (tmp_path / "logs" / "run.log").write_text(told.replace(" trainer-0 ", " run "))
    many = [line(5, f"sums/0/{number}/0/3: 'text {number}' scored", "WARNING") for number in range(9)]
    (tmp_path / "logs" / "trainer-0.log").write_text(line(1, "fine") + line(2, "odd", "WARNING") + "".join(many))
    assert said()[-1] == "sums/0/8/0/3: 'text 8' scored (8 more like it since 2026-01-31 12:00:05.000)"
    assert said("--last", "3")[0] == "fed" and len(said("--json", "--last", "20")) == 13
    (tmp_path / "logs" / "trainer-0.log").write_text(line(1, "fine") + line(2, "odd", "WARNING"))
    assert said("--troubles")[0] == "odd"
    assert len(said("--troubles")) == 2, "what the command tells once more is shown once"
    assert len(said("--role", "run")) == 2
    (tmp_path / "logs" / "run.log").unlink()
    (tmp_path / "config.toml").unlink()
    assert said() == ["fine", "odd", "fed"], "a run of another host, of which this one has logs alone"
    refused = CliRunner().invoke(cli, ["logs", str(tmp_path), "--role", "cook"])
    assert refused.exit_code == 2 and "no logs of cook (known: feeder, trainer)" in refused.stderr


def test_logs_are_shown_though_the_broker_is_gone(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(
        '[run]\nname = "x"\nsteps = 1\n[model]\npath = "fake"\n[tasksets.a]\nsource = "arithmetic"\n'
    )
    (tmp_path / "kafka.toml").write_text('[transport]\nkind = "kafka"\nservers = "127.0.0.1:1"\n')
    for name in ("x", "x-2", "xy"):
        (tmp_path / "runs" / name / "logs").mkdir(parents=True)
        (tmp_path / "runs" / name / "logs" / "verifier-0.log").write_text(line(1, f"of {name}"))
    done = CliRunner().invoke(cli, ["logs", f"{tmp_path}/x.toml,{tmp_path}/kafka.toml"])
    assert done.exit_code == 0 and done.stdout.endswith("of x-2\n"), done.output
