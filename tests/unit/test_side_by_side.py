"""`make curves ONLY=trl`: both sides get the same, times are read as they are told, what is done stays done."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.control import RunFinished
from rftstream.contracts.tasks import Task
from rftstream.contracts.versions import EvalResult, VersionName, WeightsAnnounced, WeightsKind
from rftstream.models.folders.folder import prepare_model
from rftstream.models.rendering import open_renderer
from rftstream.runs.folder import RunFolder, create_log
from rftstream.testing import MemoryRun, RoleDriver
from rftstream.transport.embedded.transport import EmbeddedTransport
from scripts import curves, side_by_side, trl_side
from scripts.experiments import RUN_FILE, Experiment
from scripts.side_by_side import ARITHMETIC, SMOLLM2, find_row, own_seconds, reached, read_rows
from scripts.trl_side import EVALUATIONS, Look
from tests.unit.synthetic import SyntheticLog


@pytest.fixture(scope="module")
def run() -> RunConfig:
    return loader.load([RUN_FILE], sets=[*Experiment("trl", ARITHMETIC.settings).sets(3), "run.steps=4"], env={})


# --------------------------------------------------------------------------------------------- the same for both


def test_the_same_tasks_in_the_same_order(run: RunConfig, tmp_path: Path) -> None:
    played = MemoryRun(run, folder=tmp_path)
    RoleDriver(played, "feeder").work()
    tasks = [one for one in played.messages("tasks") if isinstance(one, Task)]
    first = sorted((one for one in tasks if one.ids.sibling == 0), key=lambda one: one.ids.sequence)
    assert len(first) == 64, "as many as may be ahead: three passes through the 25 sums"
    theirs = list(trl_side.problems(run))
    assert len(theirs) == 4 * 32
    assert [one.problem for one in first if one.problem is not None] == theirs[:64]


@pytest.mark.slow
def test_the_same_tokens_and_text(run: RunConfig, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    spec = prepare_model(run.model, tmp_path / "model", 0)
    renderer, tokenizer = open_renderer(spec), AutoTokenizer.from_pretrained(spec.folder)
    for problem in itertools.islice(trl_side.problems(run), 25):
        theirs = tokenizer.apply_chat_template(
            trl_side.columns(problem)["prompt"], add_generation_prompt=True, return_dict=True
        )
        assert tuple(theirs["input_ids"]) == renderer.render(problem.messages)
    said = list(itertools.product(range(renderer.vocabulary_size), repeat=2))
    assert tokenizer.batch_decode(said, skip_special_tokens=True) == [renderer.decode(one) for one in said]


def test_the_same_reward(run: RunConfig) -> None:
    said = ["7", " 7", "07", "", "77", "7"]
    answers = ["7", "7", "7", "7", "7", "8"]
    prompts = [[{"role": "user", "content": "3+4="}]] * len(said)
    completions = [[{"role": "assistant", "content": one}] for one in said]
    found = trl_side.reward(run)(
        prompts=prompts, completions=completions, answer=answers, info=["{}"] * len(said), trainer_state=None
    )
    assert found == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what TRL brings
def test_the_same_settings(run: RunConfig, tmp_path: Path) -> None:
    theirs = trl_side.settings(run, tmp_path)
    assert (theirs.per_device_train_batch_size, theirs.steps_per_generation, theirs.num_generations) == (256, 1, 8)
    assert (theirs.learning_rate, theirs.lr_scheduler_type, theirs.adam_beta2) == (1.5e-3, "cosine", 0.99)
    assert (theirs.loss_type, theirs.epsilon, theirs.epsilon_high, theirs.beta) == ("dapo", 0.2, 0.2, 0.0)
    assert (theirs.max_completion_length, theirs.temperature, theirs.max_steps, theirs.seed) == (3, 1.0, 4, 3)
    assert (theirs.bf16, theirs.fp16, theirs.gradient_checkpointing) == (False, False, False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what TRL brings
def test_the_same_of_an_example_with_other_rewards_and_a_template(tmp_path: Path) -> None:
    sets = [*Experiment("trl", SMOLLM2.settings).sets(0), "run.steps=2"]
    run = loader.load([SMOLLM2.run_file], sets=sets, env={})
    problem = next(trl_side.problems(run))
    row = trl_side.columns(problem)
    said = [[{"role": "assistant", "content": one}] for one in (str(problem.answer), "none", f"It is {problem.answer}")]
    rewards = trl_side.reward(run)(
        prompts=[row["prompt"]] * 3, completions=said, answer=[row["answer"]] * 3, info=[row["info"]] * 3
    )
    assert rewards[0] == 1.0 > rewards[2] > rewards[1]
    theirs = trl_side.settings(run, tmp_path)
    assert (theirs.bf16, theirs.warmup_steps, theirs.per_device_train_batch_size) == (True, 5, 32)


# --------------------------------------------------------------------------------------------- times


def test_evaluations_that_others_wait_for_do_not_count() -> None:
    looks = [Look(0, 110.0, 2.0, 0.0), Look(10, 115.0, 4.0, 0.5), Look(20, 124.0, 1.0, 0.8)]
    assert own_seconds(looks, 100.0) == [[0, 10.0, 0.0], [10, 13.0, 0.5], [20, 18.0, 0.8]]


def test_the_first_that_reaches_it_counts() -> None:
    row = {"curve": [[0, 5.0, 0.1], [10, 7.0, 0.79], [20, 9.5, 0.8], [30, 11.0, 0.7], [40, 12.0, 0.9]]}
    assert reached(row, 0.8) == (20, 9.5)
    assert reached(row, 0.95) is None
    assert side_by_side.sentence(row, 0.8) == "0.8 after 10 s at version 20; 0.90 after 12 s at version 40"


# --------------------------------------------------------------------------------------------- what is done


class FakeSides:
    """In the place of the two commands: leaves what they would leave, in times counted from its start."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.code = 0
        self.at = 0.0

    def __call__(self, arguments: Sequence[str]) -> int:
        self.called.append(arguments[1] if arguments[1] != "rftstream" else arguments[2])
        if arguments[2] == "evaluate":
            return self.code
        is_trl = arguments[1] == "scripts.trl_side"
        folder = Path(arguments[3] if is_trl else arguments[arguments.index("--run-dir") + 1])
        folder.mkdir()
        means = [(0, 0.0), (10, 0.84)]
        if is_trl:
            looks = [Look(version, self.at + version + 3, 2.0, mean) for version, mean in means]
            (folder / EVALUATIONS).write_text("".join(json.dumps(asdict(one)) + "\n" for one in looks))
            return self.code
        config = loader.load([RUN_FILE], sets=["run.steps=10", "transport.partitions=2"], env={})
        transport = EmbeddedTransport(RunFolder(folder).log)
        create_log(transport, config)
        RunFolder(folder).config_file.write_text(loader.to_toml(config), encoding="utf-8")
        log = SyntheticLog(transport)
        log.step(0, resumed=True)
        for version in range(1, 11):
            log.trained[version] = version
            log.step(version, at=self.at + version)
        for version, mean in means:
            name = VersionName(trainer_epoch=1, version=version)
            log.put("weights", announcement(name, at=self.at + version + 4))
            log.put("evals", EvalResult(evaluation="sums", name=name, num_tasks=25, num_samples=1, num_unscored=0,
                                        metrics={"mean": mean}, generations=None,
                                        evaluated_at=self.at + 100))  # fmt: skip
        log.put("control", RunFinished(reason="steps", name=name, finished_at=self.at + 20))
        transport.close()
        return self.code


def announcement(name: VersionName, at: float) -> WeightsAnnounced:
    return WeightsAnnounced(
        model="tiny", name=name, kind=WeightsKind.full, parent=None, object="w", num_bytes=1, digest="sha256:0",
        weights_digest="sha256:0", dtype="float32", announced_at=at,
    )  # fmt: skip


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSides:
    sides = FakeSides()
    monkeypatch.setattr(side_by_side, "time", SimpleNamespace(time=lambda: sides.at))
    return sides


def measure(fake: FakeSides, folder: Path, **options: Any) -> int:
    measured = folder / "m" / "trl.json"
    return side_by_side.measure([ARITHMETIC], range(1), runs=folder / "runs", measured=measured, call=fake, **options)


def test_all_sides_become_rows_and_are_not_run_again(fake: FakeSides, tmp_path: Path) -> None:
    assert measure(fake, tmp_path) == 0
    rows = read_rows(tmp_path / "m" / "trl.json")
    assert [(row["side"], row["seed"], row["curve"]) for row in rows] == [
        ("rftstream", 0, [[0, 4.0, 0.0], [10, 14.0, 0.84]]), ("trl", 0, [[0, 3.0, 0.0], [10, 11.0, 0.84]]),
        ("trl-1-thread", 0, [[0, 3.0, 0.0], [10, 11.0, 0.84]]),
    ]  # fmt: skip
    (tmp_path / "m" / "trl.json").unlink()
    assert measure(fake, tmp_path) == 0
    assert read_rows(tmp_path / "m" / "trl.json") == rows
    assert fake.called == ["run", "evaluate", "scripts.trl_side", "scripts.trl_side"]
    side_by_side.draw(ARITHMETIC, rows, tmp_path / "trl.png")
    assert (tmp_path / "trl.png").read_bytes().startswith(b"\x89PNG")


def test_a_side_that_failed_or_was_stopped_begins_anew(fake: FakeSides, tmp_path: Path) -> None:
    fake.code = 3
    assert measure(fake, tmp_path) == 3
    assert read_rows(tmp_path / "m" / "trl.json") == []
    fake.code = 0
    assert measure(fake, tmp_path) == 0
    assert fake.called == ["run", "run", "evaluate", "scripts.trl_side", "scripts.trl_side"]


def test_only_what_is_missing(fake: FakeSides, tmp_path: Path) -> None:
    old = {
        "name": "trl",
        "side": "rftstream",
        "seed": 0,
        "of": ARITHMETIC.digest("rftstream"),
        "curve": [[0, 1.0, 0.0]],
    }
    side_by_side.write_row(tmp_path / "m" / "trl.json", old)
    side_by_side.write_row(tmp_path / "m" / "trl.json", {**old, "side": "trl", "of": "00000000"})
    assert measure(fake, tmp_path, missing=True) == 0
    assert fake.called == ["scripts.trl_side", "scripts.trl_side"], "the row of other settings is none"
    rows = read_rows(tmp_path / "m" / "trl.json")
    assert len(rows) == 3 and find_row(rows, ARITHMETIC, "trl", 0) is not None


def test_without_trl_it_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert curves.main(["trl"]) == 2
    assert "curves: trl: not installed, expected version 1.16; scripts/setup developer" in capsys.readouterr().err


def test_what_was_measured_is_of_sides_that_there_are() -> None:
    sides = {one.name: one.sides for one in side_by_side.COMPARISONS}
    for row in read_rows():
        assert row["side"] in sides[row["name"]] and row["curve"][0][0] == 0
