"""`rftstream evaluate`: by an evaluator that is alive, or in its place."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from rftstream import __version__
from rftstream.commands import cli
from rftstream.config import loader
from rftstream.contracts import codec
from rftstream.contracts.control import Claim, Request, RunFinished, RunManifest
from rftstream.contracts.messages import Message
from rftstream.contracts.versions import EvalResult, VersionName
from rftstream.launch.sessions import evaluation
from rftstream.policies import fake_model
from rftstream.roles.evaluator.step import EvaluatorStep
from rftstream.runs.folder import OpenRun, RunFolder, create_log, open_run, open_transport
from rftstream.service.role import Log
from rftstream.testing.played import played_records
from rftstream.weights.publisher import publish

CONFIG = {
    "run": {"name": "demo", "steps": 4},
    "model": {"path": "fake", "dtype": "float32"},
    "explorer": {"policy": "fake"},
    "tasksets": {"sums": {"source": "arithmetic"}},
    "evaluations": {
        "easy": {"source": "arithmetic", "options": {"size": 4}, "every": 2},
        "more": {"source": "arithmetic", "options": {"size": 6}, "every": 100, "n": 2, "k": [1, 2]},
    },
    "transport": {"partitions": 2},
}


class Scene:
    """A run with versions 0 to 3, finished, and an evaluator that evaluated nothing."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        path.mkdir()
        config = loader.from_dict(CONFIG)
        transport = open_transport(config, self.folder, create=True)
        create_log(transport, config)
        self.folder.config_file.write_text(loader.to_toml(config))
        self.run = OpenRun(self.folder, config, transport)
        self.put("control", RunManifest(
            run="demo", created_at=0.0, config="", digests={"taskset.sums": ""}, partitions=2, shares=1, seed=0,
            rftstream_version=__version__,
        ))  # fmt: skip
        for version in range(4):
            self.announce(version)
        name = VersionName(trainer_epoch=1, version=3)
        self.put("control", RunFinished(reason="steps", name=name, finished_at=0.0))

    def announce(self, version: int) -> None:
        tensors = {
            fake_model.SKILL: fake_model.serve(np.asarray([9.0 * version], np.float32), "float32"),
            fake_model.FILLER: fake_model.serve(np.zeros(8, np.float32), "float32"),
        }
        name = VersionName(trainer_epoch=1, version=version)
        self.put("weights", publish(self.run.store(), tensors, name, "fake", "float32", resumed=not version))

    def put(self, topic: str, *messages: Message) -> None:
        producer = self.run.transport.producer("test")
        producer.start()
        producer.commit(played_records(self.run.transport, "demo", [(topic, 0, one) for one in messages]))
        producer.close()

    def claim(self, **changes: Any) -> None:
        facts: dict[str, Any] = {"role": "evaluator", "epoch": 1, "host": socket.gethostname(), "pid": os.getppid(),
                                 "process": "evaluator-9", "claimed_at": time.time()}  # fmt: skip
        self.put("control", Claim(**{**facts, **changes}))

    def evaluated(self) -> list[tuple[str, int]]:
        messages = [one.message for one in Log(self.run.transport).messages("evals")]
        return [(one.evaluation, one.name.version) for one in messages if isinstance(one, EvalResult)]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "demo")
    yield scene
    scene.run.transport.close()


def call(scene: Scene, *arguments: object) -> Result:
    return CliRunner().invoke(cli, ["evaluate", str(scene.folder.path), *map(str, arguments)])


def results(scene: Scene, *arguments: object) -> list[dict[str, Any]]:
    result = call(scene, *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["results"]
    return found


def test_what_is_due_on_a_finished_run_is_made_up_for(scene: Scene) -> None:
    found = [(one["evaluation"], one["version"]) for one in results(scene)]
    assert found == [("easy", 0), ("more", 0), ("easy", 2), ("easy", 3), ("more", 3)]
    assert scene.evaluated() == found
    again = call(scene)
    assert again.exit_code == 0
    assert "nothing is due" in again.stdout
    assert scene.evaluated() == found


@pytest.mark.slow
def test_a_version_that_was_asked_for(scene: Scene) -> None:
    (one,) = results(scene, "--evaluation", "more", "--versions", 1)
    assert (one["evaluation"], one["version"], one["num_tasks"], one["num_samples"]) == ("more", 1, 6, 2)
    assert set(one["metrics"]) >= {"mean", "pass@1", "pass@2"}
    lines = scene.run.store().get(one["generations"]).decode().splitlines()
    assert len(lines) == 12
    assert scene.evaluated() == [("more", 1)], "nothing that was not asked for"
    text = call(scene, "--evaluation", "easy", "--version", 3)
    assert [line.split() for line in text.stdout.splitlines()] == [
        ["evaluation", "version", "mean", "pass@1", "length_mean", "truncated_share", "samples"],
        ["easy", "3", "1", "1", "2.750", "0", "4", "x", "1"],
    ]
    assert "no evaluator is alive: evaluating here" in text.stderr
    assert "easy of version 3: mean 1\n" in text.stderr


@pytest.mark.law("twice")
@pytest.mark.slow
def test_several_versions_beside_each_other_and_none_twice(scene: Scene) -> None:
    first = results(scene, "--evaluation", "easy", "--versions", "3,0")
    assert [(one["version"], one["new"]) for one in first] == [(0, True), (3, True)]
    both = results(scene, "--versions", "0,1,3")
    assert {(one["evaluation"], one["version"]): one["new"] for one in both} == {
        ("easy", 0): False, ("easy", 3): False, ("easy", 1): True,
        ("more", 0): True, ("more", 1): True, ("more", 3): True,
    }  # fmt: skip
    text = call(scene, "--versions", "all")
    rows = [tuple(line.split()[:2]) for line in text.stdout.splitlines()[1:]]
    assert rows == [*(("easy", str(n)) for n in range(4)), *(("more", str(n)) for n in range(4))]
    assert sorted(scene.evaluated()) == [(name, n) for name in ("easy", "more") for n in range(4)]
    table = call(scene, "--versions", "0,1,2,3").stdout
    assert table == text.stdout, "what stands is shown, without work"
    assert call(scene).stdout.startswith("nothing is due")


@pytest.mark.law("twice")
@pytest.mark.slow
def test_another_result_for_what_has_one(scene: Scene) -> None:
    (before,) = results(scene, "--evaluation", "easy", "--versions", 2)
    (again,) = results(scene, "--evaluation", "easy", "--versions", 2, "--again")
    assert again["new"]
    assert again["metrics"]["mean"] == before["metrics"]["mean"], "the same seeds"
    assert again["generations"] != before["generations"]
    assert scene.evaluated() == [("easy", 2), ("easy", 2)]
    (shown,) = results(scene, "--evaluation", "easy", "--versions", 2)
    assert shown["generations"] == again["generations"], "the newest counts"


@pytest.mark.slow
def test_stopped_it_goes_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """ctrl-C when the first result is there: the request for the others stands already."""
    end_with = EvaluatorStep._end_with

    def interrupted(step: EvaluatorStep, result: EvalResult) -> None:
        end_with(step, result)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(EvaluatorStep, "_end_with", interrupted)
        stopped = call(scene, "--versions", "0,1", "--evaluation", "easy")
    assert stopped.exit_code == 1
    assert "stopped; what has its result keeps it, and the same command does the rest" in stopped.stderr
    assert scene.evaluated() == [("easy", 0)]
    found = results(scene, "--versions", "0,1", "--evaluation", "easy")
    assert [(one["version"], one["new"]) for one in found] == [(0, False), (1, True)]
    assert scene.evaluated() == [("easy", 0), ("easy", 1)]


def test_a_dead_evaluator_is_replaced(scene: Scene) -> None:
    scene.claim(epoch=3, claimed_at=1.0)
    assert len(results(scene)) == 5


def answer(folder: Path, stop: threading.Event) -> None:
    """As the run's evaluator would."""
    run = open_run(folder)
    producer = run.transport.producer("evaluator")
    producer.start()
    while not stop.is_set():
        requests = [one.message for one in Log(run.transport).messages("control") if isinstance(one.message, Request)]
        for request in requests:
            name = VersionName(trainer_epoch=1, version=request.arguments["version"])
            producer.commit([codec.to_record(EvalResult(
                evaluation=request.arguments["evaluation"], name=name, num_tasks=16, num_samples=2, num_unscored=16,
                metrics={"mean": 1.0}, generations=None, request_id=request.request_id,
            ), "evals", 0, run="demo")])  # fmt: skip
        if requests:
            stop.set()
    run.transport.close()


def test_a_living_evaluator_is_asked_and_a_mean_says_what_was_not_scored(scene: Scene) -> None:
    scene.claim()
    stop = threading.Event()
    thread = threading.Thread(target=answer, args=(scene.folder.path, stop))
    thread.start()
    try:
        found = call(scene)
    finally:
        stop.set()
        thread.join()
    assert [line.split() for line in found.stdout.splitlines()] == [
        ["evaluation", "version", "mean", "samples", "unscored"],
        *([name, "3", "1", "16", "x", "2", "16"] for name in ("easy", "more")),
    ]
    assert "more of version 3: mean 1 (16 of 32 samples unscored)\n" in found.stderr


@pytest.mark.slow
def test_results_that_come_late_are_waited_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader may have nothing yet when the work is done; asking it again at once would take a whole processor."""
    transport, waits = scene.run.transport, list[float]()
    reader = transport.reader(transport.admin.end_offsets("evals"))
    wait, poll = transport.wait, reader.poll

    def waited(sources: Sequence[Any], timeout_s: float) -> None:
        if reader in sources:
            waits.append(timeout_s)
        else:
            wait(sources, timeout_s)

    monkeypatch.setattr(transport, "wait", waited)
    monkeypatch.setattr(reader, "poll", lambda **limits: poll(**limits) if len(waits) > 2 else [])
    found = list(evaluation._work(scene.run, reader, None, lambda text: None))
    assert len(found) == 5
    assert len(waits) == 3 and min(waits) > 0


@pytest.mark.slow
def test_one_that_does_not_answer(scene: Scene) -> None:
    scene.claim()
    result = call(scene, "--timeout", "0.2")
    assert result.exit_code == 1
    assert "no result for easy of version 3, more of version 3 within 0.2 s" in result.stderr
    assert "asked evaluator-9, process" in result.stderr
    assert [one["version"] for one in results(scene, "--here", "--versions", "1,2")] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--evaluation", "esy"), "--evaluation: unknown 'esy'; known: easy, more; did you mean 'easy'?"),
        (("--versions", 17), "--versions 17: no such version; with weights in the store: 0 to 3"),
        (("--versions", "0,x"), "got '0,x', expected numbers with commas between them"),
        (("--versions", ""), "got '', expected numbers with commas between them"),
    ],
)
def test_bad_input(scene: Scene, arguments: tuple[object, ...], text: str) -> None:
    result = call(scene, *arguments)
    assert result.exit_code == 2
    assert text in result.stderr


def test_weights_that_are_gone(scene: Scene) -> None:
    scene.run.store().delete("versions/000001-00000001.safetensors")
    result = call(scene, "--versions", "2,1")
    assert result.exit_code == 2
    assert "--versions 1: its weights are deleted; with weights in the store: 0, 2, 3 (weights.keep" in result.stderr
    assert scene.evaluated() == [], "all of it or nothing"


@pytest.mark.slow
def test_weights_that_are_gone_after_their_evaluation(scene: Scene) -> None:
    results(scene, "--versions", "1")
    scene.run.store().delete("versions/000001-00000001.safetensors")
    assert [one["version"] for one in results(scene, "--versions", "1", "--evaluation", "easy")] == [1]
    assert {one["version"] for one in results(scene, "--versions", "all")} == {0, 2, 3}


def test_weights_that_go_while_an_evaluator_is_asked(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.claim()
    monkeypatch.setattr(evaluation, "SAY_S", 0.0)
    monkeypatch.setattr(evaluation, "_ask", lambda *_: scene.run.store().delete("versions/000001-00000001.safetensors"))
    result = call(scene, "--versions", 1, "--evaluation", "easy")
    assert result.exit_code == 1
    assert "no result for easy of version 1: the run has deleted the weights meanwhile" in result.stderr


@pytest.mark.slow
def test_damaged_weights(scene: Scene) -> None:
    path = scene.folder.weights / "versions" / "000001-00000001.safetensors"
    path.write_bytes(b"x" * path.stat().st_size)
    result = call(scene, "--versions", "0,1", "--evaluation", "easy")
    assert result.exit_code == 1
    assert "no result for easy of version 1; the weights were deleted meanwhile or are damaged" in result.stderr
    assert scene.evaluated() == [("easy", 0)]


def test_a_misspelt_run(scene: Scene) -> None:
    result = CliRunner().invoke(cli, ["evaluate", str(scene.folder.path.with_name("demmo"))])
    assert result.exit_code == 2
    assert f"did you mean {scene.folder.path}?" in result.stderr
