"""`make curves`: every experiment is a run that could start, runs go on where they stood, and only what ended is
measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rftstream.algorithms import ALGORITHMS
from rftstream.config import loader
from rftstream.config.parts import registry
from rftstream.config.parts.part_names import check_part_names
from rftstream.config.sections import RunConfig
from rftstream.config.stages import loss_kinds
from rftstream.contracts.batches import LossKind
from rftstream.contracts.control import RunFinished
from rftstream.contracts.versions import EvalResult, VersionName
from rftstream.preflight.checks.check import check
from rftstream.runs.folder import RunFolder, create_log
from rftstream.transport.embedded.transport import EmbeddedTransport
from scripts import curves, experiments
from scripts.experiments import EXPERIMENTS, LOSSES, RUN_FILE, STALENESS, Experiment, find_row, read_rows, write_row
from tests.suite.each import each
from tests.unit.synthetic import SyntheticLog

STEPS = 20
SMALL = (f"run.steps={STEPS}", "transport.partitions=2")


def named(name: str) -> Experiment:
    return next(one for one in EXPERIMENTS if one.name == name)


def loaded(experiment: Experiment, seed: int = 0) -> RunConfig:
    return loader.load([RUN_FILE], sets=experiment.sets(seed), env={})


# --------------------------------------------------------------------------------------------- what is measured


def test_every_algorithm_that_learns_from_rewards_alone_is_there() -> None:
    rl = {name for name in ALGORITHMS if loss_kinds(name, "trainer.algorithm") == {LossKind.rl}}
    wrong = rl - {"opd"} ^ set(experiments.ALGORITHMS)
    assert not wrong, f"scripts/experiments.py: NEED_MORE: put in or take out {sorted(wrong)}, by what it learns from"


@each("experiment", EXPERIMENTS, ids=lambda one: one.name)
def test_experiments_are_run_files(experiment: Experiment) -> None:
    config = loaded(experiment, seed=2)
    check_part_names(config)
    assert config.run.seed == 2
    kind, what, *_ = experiment.name.split("/")
    algorithm = config.trainer.algorithm
    assert algorithm == (what if kind == "algorithms" else "grpo")
    part = registry.resolve("algorithm", algorithm)
    part(registry.build_config(part, config.algorithms.get(algorithm), where=f"algorithms.{algorithm}"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(f"algorithms/{one}" for one in ("ppo", "remax", "topr")), "staleness/16/plain"])
def test_runs_could_start(name: str) -> None:
    assert check(loaded(named(name))).errors == []


def test_staleness_is_measured_with_both_losses_and_nothing_else_differs() -> None:
    changed = {one.name: dict(one.settings) for one in EXPERIMENTS if one.name.startswith("staleness/")}
    assert len(changed) == len(STALENESS) * len(LOSSES)
    for eta in STALENESS:
        plain, decoupled = changed[f"staleness/{eta}/plain"], changed[f"staleness/{eta}/decoupled"]
        assert plain["feeder.max_staleness"] == decoupled["feeder.max_staleness"] == eta
        own = {key for key in {**plain, **decoupled} if plain.get(key) != decoupled.get(key)}
        assert own == {"algorithms.grpo.ratio_from", "algorithms.grpo.correction"}


def test_a_digest_follows_what_a_run_learns_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, copy = named("algorithms/grpo"), tmp_path / "arithmetic.toml"
    monkeypatch.setattr(experiments, "RUN_FILE", copy)
    text = RUN_FILE.read_text(encoding="utf-8")
    digests = []
    for changed in (text, "# said otherwise\n" + text.replace("max_concurrent = 512", "max_concurrent = 64"),
                    text.replace("lr = 1.5e-3", "lr = 1e-3")):  # fmt: skip
        copy.write_text(changed, encoding="utf-8")
        digests.append(one.digest)
    assert digests[0] == digests[1] != digests[2]
    assert len({one.digest for one in EXPERIMENTS}) == len(EXPERIMENTS)


# --------------------------------------------------------------------------------------------- what is picked


@each(
    ("picks", "count"),
    [(["algorithms"], len(experiments.ALGORITHMS)), (["algorithms/gspo"], 1), (["staleness"], 8), (["staleness/2"], 2),
     (["staleness/8/plain", "algorithms/gspo"], 2), (["arithmetic"], 0)],
)  # fmt: skip
def test_picks(picks: list[str], count: int) -> None:
    assert len(experiments.select(picks)) == count


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing alike"], "curves: unknown 'nothing alike'; known: algorithms, "),
        (["algorithms/gsop"], "curves: unknown 'algorithms/gsop'; did you mean 'algorithms/gspo'?"),
        (["arithmetics"], "did you mean 'arithmetic'?"),
        (["staleness/3"], "curves: unknown 'staleness/3'"),
        (["staleness", "--seeds", "3"], "got '3', expected A:B with A below B, such as 0:3"),
        (["staleness", "--seeds", "3:3"], "got '3:3', expected A:B"),
    ],
)
def test_what_is_unknown_is_refused_before_anything_runs(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert curves.main(arguments) == 2
    except SystemExit as end:  # of argparse
        assert end.code == 2
    assert said in capsys.readouterr().err


# --------------------------------------------------------------------------------------------- how it is run


class FakeRuns:
    """In the place of `rftstream`: writes the log of a run that comes to the end, or is stopped half way, or fails."""

    def __init__(self) -> None:
        self.called: list[tuple[str, str]] = []
        self.stopped = 0
        """So many of the next calls are stopped half way."""
        self.failing: set[str] = set()
        """Words in the names of folders."""

    def __call__(self, command: str, *arguments: str | Path) -> int:
        path = Path(arguments[arguments.index("--run-dir") + 1] if command == "run" else arguments[0])
        self.called.append((command, path.name.rpartition("-")[0]))
        if any(word in path.name for word in self.failing):
            return 1
        folder, config = RunFolder(path), loader.load([RUN_FILE], sets=SMALL, env={})
        path.mkdir(parents=True, exist_ok=True)
        transport = EmbeddedTransport(folder.log)
        if command == "run":
            create_log(transport, config)
            folder.config_file.write_text(loader.to_toml(config), encoding="utf-8")
        log = SyntheticLog(transport)
        if command == "run":
            log.step(0, resumed=True)
            evaluate(log, 0, 0.0625)
        first, last = (1, STEPS // 2) if command == "run" else (STEPS // 2 + 1, STEPS)
        if is_stopped := self.stopped > 0:
            self.stopped -= 1
        elif command == "run":
            last = STEPS
        for version in range(first, last + 1):
            log.trained[version] = version
            log.step(version, metrics={"reward": version / STEPS, "staleness_mean": 1.5, "staleness_max": version % 3},
                     at=100.0 + version)  # fmt: skip
        if not is_stopped:
            evaluate(log, STEPS, 0.875)
            end = RunFinished(reason="steps", name=VersionName(trainer_epoch=1, version=STEPS), finished_at=120.0)
            log.put("control", end)
            folder.final.mkdir()
        transport.close()
        return 0


def evaluate(log: SyntheticLog, version: int, mean: float) -> None:
    name = VersionName(trainer_epoch=1, version=version)
    log.put("evals", EvalResult(evaluation="sums", name=name, num_tasks=25, num_samples=4, num_unscored=0,
                                metrics={"mean": mean}, generations=None))  # fmt: skip


@pytest.fixture
def fake() -> FakeRuns:
    return FakeRuns()


def measure(fake: FakeRuns, tmp_path: Path, *names: str, seeds: range = range(1), **options: Any) -> int:
    chosen = [named(name) for name in names]
    return curves.measure(chosen, seeds, runs=tmp_path / "runs", measured=tmp_path / "m" / "curves.json", call=fake,
                          **options)  # fmt: skip


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return read_rows(tmp_path / "m" / "curves.json")


def test_a_run_becomes_a_row(fake: FakeRuns, tmp_path: Path) -> None:
    assert measure(fake, tmp_path, "staleness/8/plain") == 0
    experiment = named("staleness/8/plain")
    assert rows(tmp_path) == [{
        "name": "staleness/8/plain", "seed": 0, "of": experiment.digest, "versions": [0, STEPS],
        "held_out": [0.0625, 0.875], "reward": [0.075, 0.975], "staleness": [1.5, 2.0], "seconds": 19.0,
        "learned": [STEPS, 2 * STEPS],
    }]  # fmt: skip


def test_one_seed_of_all_comes_before_the_next(fake: FakeRuns, tmp_path: Path) -> None:
    assert measure(fake, tmp_path, "algorithms/grpo", "algorithms/gspo", seeds=range(2)) == 0
    assert [name for _, name in fake.called] == [
        "algorithms-grpo-seed0", "algorithms-gspo-seed0", "algorithms-grpo-seed1", "algorithms-gspo-seed1",
    ]  # fmt: skip
    assert [(row["name"], row["seed"]) for row in rows(tmp_path)] == [
        ("algorithms/grpo", 0), ("algorithms/grpo", 1), ("algorithms/gspo", 0), ("algorithms/gspo", 1),
    ]  # fmt: skip


def test_a_stopped_run_goes_on_and_a_finished_one_is_only_read(fake: FakeRuns, tmp_path: Path) -> None:
    fake.stopped = 1
    assert measure(fake, tmp_path, "algorithms/grpo", "algorithms/gspo") == 1
    assert rows(tmp_path) == []
    assert measure(fake, tmp_path, "algorithms/grpo", "algorithms/gspo") == 0
    before = rows(tmp_path)
    assert len(before) == 2
    (tmp_path / "m" / "curves.json").unlink()
    assert measure(fake, tmp_path, "algorithms/grpo", "algorithms/gspo") == 0
    assert rows(tmp_path) == before
    assert fake.called == [
        ("run", "algorithms-grpo-seed0"), ("resume", "algorithms-grpo-seed0"), ("run", "algorithms-gspo-seed0"),
    ]  # fmt: skip


def test_one_that_fails_leaves_the_others(fake: FakeRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.failing = {"grpo"}
    assert measure(fake, tmp_path, "algorithms/grpo", "algorithms/gspo") == 1
    assert [row["name"] for row in rows(tmp_path)] == ["algorithms/gspo"]
    assert "algorithms/grpo, seed 0: failed with exit code 1; see " in capsys.readouterr().err


def test_only_what_is_missing(fake: FakeRuns, tmp_path: Path) -> None:
    old = {"name": "algorithms/gspo", "seed": 0, "of": "00000000", "held_out": [0.0, 1.0]}
    for row in (old, {**old, "name": "algorithms/grpo", "of": named("algorithms/grpo").digest}):
        write_row(tmp_path / "m" / "curves.json", row)
    assert measure(fake, tmp_path, "algorithms/grpo", "algorithms/gspo", missing=True) == 0
    assert fake.called == [("run", "algorithms-gspo-seed0")], "the row of other settings is none"
    assert find_row(rows(tmp_path), named("algorithms/gspo"), 0) is not None
    assert len(rows(tmp_path)) == 2


# --------------------------------------------------------------------------------------------- what is committed


def test_what_was_measured_is_of_experiments_that_there_are() -> None:
    known = {one.name for one in EXPERIMENTS}
    found = json.loads(experiments.MEASURED.read_text(encoding="utf-8"))
    assert {row["name"] for row in found} <= known
    assert len({(row["name"], row["seed"]) for row in found}) == len(found)
