"""`rftstream dead`: what is listed, shown, asked for and dropped, over a run folder with an embedded log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from rftstream.config import loader
from rftstream.contracts.control import Request, RunFinished
from rftstream.contracts.messages import SPEC_OF
from rftstream.contracts.outcomes import GroupResult
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.verdicts import UnscorableReason
from rftstream.contracts.versions import VersionName
from rftstream.runs.folder import RunFolder, create_log, open_run
from rftstream.service.dead_letters import dead_letter
from rftstream.service.role import Log
from rftstream.transport.embedded.transport import EmbeddedTransport
from tests import commands
from tests.unit.synthetic import SyntheticLog, outcome, task

CONFIG = {
    "run": {"name": "demo", "steps": 4},
    "model": {"path": "fake"},
    "tasksets": {"sums": {"source": "arithmetic"}},
    "transport": {"partitions": 2},
}


def call(*arguments: object) -> Result:
    return commands.call("dead", *arguments)


def called(*arguments: object) -> Any:
    return commands.called("dead", *arguments)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Groups 0 and 1 died, of a time-out and of an error; group 1 has two letters, one of them twice; 2 was trained."""
    folder = RunFolder(tmp_path / "demo")
    folder.path.mkdir()
    config = loader.from_dict(CONFIG)
    transport = EmbeddedTransport(folder.log)
    create_log(transport, config)
    log = SyntheticLog(transport)
    log.flow(0, 1, 2)
    for sequence, reason in ((0, UnscorableReason.timeout), (1, UnscorableReason.error)):
        dead = outcome(log.siblings(sequence), GroupResult.dead)
        summaries = tuple(replace(one, reward=None, reason=reason) for one in dead.rollouts)
        log.put("outcomes", replace(dead, rollouts=summaries))
    log.batch(0, [2])
    for record in [one for one in Log(transport).read("rollouts") if one.header("sequence") in (b"0", b"1")]:
        reason = "timeout" if record.header("sequence") == b"0" else "error"
        letter = dead_letter(record, role="verifier", reason=reason, detail="Traceback\nValueError: no", tries=3,
                             now=1.0).message  # fmt: skip
        assert letter is not None
        log.put("dead", letter)
    log.put("dead", letter)
    transport.close()
    folder.config_file.write_text(loader.to_toml(config))
    return folder.path


def change(run: Path, how: Any) -> None:
    transport = EmbeddedTransport(run / "log")
    how(SyntheticLog(transport))
    transport.close()


def requests_of(run: Path) -> list[Request]:
    opened = open_run(run)
    try:
        messages = [received.message for received in Log(opened.transport).messages("control")]
        return [one for one in messages if isinstance(one, Request)]
    finally:
        opened.transport.close()


def test_list_counts_by_reason_and_a_twin_once(run: Path) -> None:
    report = called("list", run)
    kinds = {(one["reason"], one["role"], one["topic"]): one["count"] for one in report["letters"]}
    assert kinds == {("timeout", "verifier", "rollouts"): 2, ("error", "verifier", "rollouts"): 2}
    assert report["num_letters"] == 4
    assert {one["reason"]: one["dead"] for one in report["groups"]} == {"timeout": 1, "error": 1}
    assert len(report["newest"]) == 4
    assert report["newest"][0]["rollout_id"] in {"sums/0/0/0/1", "sums/0/1/0/1"}
    assert report["newest"][0]["tries"] == 3
    text = call("list", run, "--num", 1).stdout
    assert "4 dead letters, 2 dead groups of 2 problems: 2 not put back\n" in text
    assert text.count("\n  ValueError: no") == 1
    errors = {(one["reason"], one["error"]): one["count"] for one in report["errors"]}
    assert errors == {("timeout", "ValueError: no"): 2, ("error", "ValueError: no"): 2}
    assert [line.split() for line in text.splitlines() if line.endswith("2  ValueError: no")] == [
        [reason, "2", "ValueError:", "no"] for reason, _ in errors
    ]


def test_show_decodes_the_original(run: Path) -> None:
    (shown,) = called("show", run, "verifier/rollouts/1/0")
    assert (shown["reason"], shown["tries"]) == ("error", 3)
    assert shown["record"]["message"]["turns"][0]["content"] == "3"
    assert [one["id"] for one in called("show", run, "sums/0/1/0")] == [
        "verifier/rollouts/1/0",
        "verifier/rollouts/1/1",
    ]
    assert len(called("show", run, "sums/0/1/0/1")) == 1
    text = call("show", run, "verifier/rollouts/1/0").stdout
    assert "error, tried 3 times" in text
    assert "ValueError: no" in text
    segment = shown["record"]["message"]["segments"][0]
    pairs = zip(segment["token_ids"]["values"], segment["loss_mask"]["values"], strict=True)
    said = bytes(token for token, is_sampled in pairs if is_sampled).decode()
    assert said and f"assistant: {said}" in text, "what was sampled, token by token"
    assert call("show", run, "verifier/rollouts/9/9").exit_code == 2


@pytest.mark.parametrize(("arguments", "groups"), [
    (("--all",), {"sums/0/0/0", "sums/0/1/0"}),
    (("--reason", "error"), {"sums/0/1/0"}),
    (("verifier/rollouts/0/1",), {"sums/0/0/0"}),
    (("sums/0/1/0/0", "sums/0/1/0"), {"sums/0/1/0"}),
    (("--reason", "failed"), set()),
])  # fmt: skip
def test_retry_asks_for_groups(run: Path, arguments: tuple[str, ...], groups: set[str]) -> None:
    report = called("retry", run, *arguments)
    assert set(report["groups"]) == groups
    counts = {"not put back": 2 - len(groups), "asked to be put back": len(groups)}
    told = ", ".join(f"{count} {words}" for words, count in counts.items() if count)
    assert call("list", run).stdout.splitlines()[0].endswith(f"2 dead groups of 2 problems: {told}")
    assert report["num_stored"] == 2 * len(groups)
    assert "rftstream resume" in report["next"]
    found = {one.arguments["group"]: one for one in requests_of(run)}
    assert set(found) == groups
    if "sums/0/1/0" in groups:
        assert found["sums/0/1/0"].arguments["stored"] == ["rollouts[1]@0", "rollouts[1]@1"]
    assert sum(one["asked"] for one in called("list", run)["groups"]) == len(groups)


def test_a_reason_that_is_not_here_names_those_that_are(run: Path) -> None:
    here = "what is dead here died of error (2 letters, 1 group), timeout (2 letters, 1 group)"
    for command in ("retry", "drop"):
        wrong = call(command, run, "--reason", "tiemout")
        assert (wrong.exit_code, wrong.stderr) == (
            2, f"rftstream: --reason tiemout: there is no such reason; {here}\n"
        )  # fmt: skip
    assert call("retry", run, "--reason", "failed").stdout.startswith(f"{here}; no group that died of 'failed' is left")
    shown = call("show", run, "verifier/rollouts/9/9").stderr
    assert shown.endswith(f"`rftstream dead list {run}` shows them\n"), "the run, and no RUN"


def test_retry_with_sampling(run: Path) -> None:
    assert called("retry", run, "--all", "--sample")["num_stored"] == 0
    assert [one.arguments["stored"] for one in requests_of(run)] == [[], []]


def test_what_was_put_back_is_not_asked_for_again(run: Path) -> None:
    again = [replace(one, group_id="sums/0/0/1", rollout_id=f"sums/0/0/1/{one.sibling}", sequence=3)
             for one in SyntheticLog.siblings(type("", (), {"group_size": 2})(), 0)]  # type: ignore[arg-type]  # fmt: skip
    change(run, lambda log: log.put("tasks", *map(task, again)))
    assert called("retry", run, "--all")["groups"] == ["sums/0/1/0"]
    report = called("retry", run, "sums/0/0/0")
    assert (report["groups"], report["put_back_before"]) == ([], 1)
    assert {one["reason"]: one["put_back"] for one in called("list", run)["groups"]} == {"timeout": 1, "error": 0}
    assert "put back" not in commands.call("status", run).stdout
    called("drop", run, "--reason", "error")
    assert commands.called("status", run)["dead_letters"] == {"timeout": 2}, "but for those dropped"
    assert "timeout; all dead groups were put back" in commands.call("status", run).stdout


def test_only_dead_groups_can_be_put_back(run: Path) -> None:
    result = call("retry", run, "sums/0/2/0")
    assert result.exit_code == 2
    assert "expected the id of a dead letter, or of a rollout or group whose outcome is dead" in result.output
    assert call("retry", run).exit_code == 2
    assert f" dead list {run}` lists" in " ".join(call(run).output.split())
    assert call("retry", run, "sums/0/1/0", "--all").exit_code == 2


def test_retry_says_what_a_finished_run_needs(run: Path) -> None:
    finished = RunFinished(reason="steps", name=VersionName(trainer_epoch=1, version=1), finished_at=0.0)
    change(run, lambda log: log.put("control", finished))
    assert "with more steps" in call("retry", run, "--all").stdout


def test_drop_lists_no_more_and_deletes_nothing(run: Path) -> None:
    dropped = called("drop", run, "--reason", "error", "--why", "a bad problem")
    assert (len(dropped["letters"]), dropped["groups"]) == (2, ["sums/0/1/0"])
    report = called("list", run)
    assert (report["num_letters"], report["num_groups"], report["num_dropped"]) == (2, {"dead": 1}, 3)
    assert called("list", run, "--dropped")["num_letters"] == 4
    assert called("retry", run, "--all")["groups"] == ["sums/0/0/0"]
    assert called("retry", run, "sums/0/1/0")["groups"] == ["sums/0/1/0"], "by its name it still can"
    assert call("drop", run, "sums/0/1/0").exit_code == 2
    called("drop", run, "--all")
    assert call("list", run).stdout == "nothing is dead (6 records dropped)\n"
    opened = open_run(run)
    assert len(list(Log(opened.transport).read("dead"))) == 5
    by = [one.message for one in Log(opened.transport).messages("control") if one.message is not None]
    opened.transport.close()
    assert {SPEC_OF[type(one)].contract for one in by} - {"claim"} == {"request", "dead_dropped"}


# --------------------------------------------------------------------------------------------- rescore


@pytest.mark.parametrize(("reward", "says"), [
    ("json:score", "tasksets.sums.reward: module 'json' has no 'score'"),
    ("exact", "deleted by retention, expected all of them"),
])  # fmt: skip
def test_what_cannot_be_scored_again_leaves_nothing_behind(run: Path, reward: str, says: str) -> None:
    if reward == "exact":
        change(run, lambda log: log.transport.admin.delete_before({TopicPartition("tasks", 0): 1}))
    into = run.with_name("again")
    result = commands.call("rescore", run, "--reward", reward, "--into", into)
    assert result.exit_code == 2
    assert says in result.stderr
    assert not into.exists()


def test_ctrl_c_while_it_scores_says_how_it_goes_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rftstream.launch.sessions.rescore.rescore", interrupted)
    result = commands.call("rescore", run, "--reward", "exact", "--into", run.with_name("again"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "stopped; what is scored stays, and the same command goes on\n"
