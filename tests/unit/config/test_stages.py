"""Stages as functions of the version: which batches take rollouts, how many groups may be admitted, at which rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.config.stages import Stages, stage_line, taken_kinds
from rftstream.contracts.batches import LossKind
from rftstream.contracts.control import RunFinished
from rftstream.contracts.versions import StepRecord, VersionName
from rftstream.errors import ConfigError
from rftstream.launch.start import nothing_more
from rftstream.preflight.checks.check_report import CheckReport
from rftstream.preflight.trial_run import trial_config
from rftstream.roles.feeder.admission import Admission, VersionInForce
from rftstream.roles.trainer.schedule import rate_at, rate_change
from rftstream.runs.manifest import changed_settings, changes_of_resume, check_same_run, make_manifest
from rftstream.runs.writes.load_demonstrations import check_demonstrations
from tests.suite.each import each

THREE = [{"steps": 3, "algorithm": "sft", "lr": 0.1, "lr_schedule": "linear"}, {"steps": 4, "name": "explore"},
         {"steps": 2, "algorithm": {"name": "dpo", "beta": 0.5}, "experts_per_batch": 5}]  # fmt: skip


def make(stages: Any = THREE, **values: Any) -> RunConfig:
    return loader.from_dict({
        "run": {"name": "x"}, "model": {"path": "fake"}, "tasksets": {"sums": {"source": "arithmetic"}},
        "experts": {"source": ["a.jsonl", "b.jsonl"], "per_batch": 8}, "trainer": {"lr": 0.01}, "stages": stages,
        **values,
    })  # fmt: skip


def in_force(version: int, trained: int) -> VersionInForce:
    found = VersionInForce()
    found.absorb(StepRecord(
        name=VersionName(trainer_epoch=1, version=version), batch_sequence=None, positions=(), trained_groups=trained,
        trained_rollouts=0, weights_digest=None, metrics={},
    ))  # fmt: skip
    return found


def test_what_a_stage_is() -> None:
    config = make()
    stages = Stages.of(config)
    assert config.steps == stages.steps == 9
    assert [stages.at(version).number for version in range(11)] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert [(one.name, one.first, one.end) for one in stages.all] == [("sft", 0, 3), ("explore", 3, 7), ("dpo", 7, 9)]
    assert [one.takes_rollouts for one in stages.all] == [False, True, False]
    assert [one.kind for one in stages.all] == [LossKind.sft, None, LossKind.dpo]
    assert [one.demonstrations_per_batch for one in stages.all] == [8, 8, 5]
    assert taken_kinds(config) == {LossKind.sft, LossKind.rl, LossKind.dpo}
    assert stage_line(config, 3) == "2 of 3, explore, versions 3 to 7"
    assert stage_line(config, 9) == "3 of 3, dpo, versions 7 to 9"
    assert not stages.always_explores
    assert loader.from_toml(loader.to_toml(config)) == config


def test_without_stages_there_is_one() -> None:
    config = make([], experts=None, run={"name": "x", "steps": 5})
    stages = Stages.of(config)
    assert (stages.named, stages.steps, stages.always_explores, config.steps) == (False, 5, True, 5)
    assert stage_line(config, 2) is None
    assert stages.batches_of_rollouts(3, 9) == 6
    assert stages.batch_of_rollouts(3, 9) == 12


def test_batches_of_rollouts_are_counted_as_if_written_out() -> None:
    plans = [[3, -4, 2], [-3, 4, -2], [2, 2, -1, 5], [-1], [1]]
    for plan in plans:
        stages = Stages.of(make([{"steps": abs(one), "algorithm": "grpo" if one > 0 else "sft"} for one in plan]))
        takes = [one > 0 for one in plan for _ in range(abs(one))]
        for first in range(len(takes) + 1):
            left = [version for version in range(first, len(takes)) if takes[version]]
            for end in range(first, len(takes) + 3):
                assert stages.batches_of_rollouts(first, end) == sum(takes[first:end])
            for number in range(len(takes) + 1):
                assert stages.batch_of_rollouts(first, number) == (left[number] if number < len(left) else len(takes))


def test_nothing_is_admitted_that_would_be_too_old_or_for_nobody() -> None:
    """Versions 3 to 6 take rollouts; two groups a batch, staleness up to 1."""
    admission = Admission(2, 1, stages=Stages.of(make()))
    found: list[tuple[int, int, int]] = []
    for version, trained in [(0, 0), (1, 0), (2, 0), (3, 0), (4, 2), (5, 4), (6, 6), (7, 8), (8, 8), (9, 8)]:
        now = in_force(version, trained)
        while admission.wanted(now, 9, len(found)):
            found.append((version, len(found), admission.min_version(now, len(found))))
    assert found == [(2, 0, 2), (2, 1, 2), (3, 2, 3), (3, 3, 3), (4, 4, 4), (4, 5, 4), (5, 6, 5), (5, 7, 5)]


def test_what_is_rejected_is_made_up_for() -> None:
    admission = Admission(2, 0, stages=Stages.of(make()), rejected=1)
    assert admission.wanted(in_force(6, 6), None, 8) == 1
    assert admission.min_version(in_force(6, 6), 8) == 6
    assert admission.wanted(in_force(7, 8), None, 9) == 0, "it would be for nobody"


def test_without_stages_admission_is_what_it_was() -> None:
    unstaged, one = Admission(3, 2, 1), Admission(3, 2, 1, stages=Stages.of(make([{"steps": 50}], experts=None)))
    for version in range(8):
        now = in_force(version, 3 * version)
        assert unstaged.allowed(now, 4) == one.allowed(now, 4) == max(0, 3 * version + 9 + 1 - 4)
        if now.trained_groups <= 3:
            assert unstaged.min_version(now, 4) == one.min_version(now, 4)


def test_each_stage_has_its_schedule_to_itself() -> None:
    config = make([*THREE[:2], {"steps": 2, "algorithm": "dpo", "warmup_steps": 2}])
    stages = Stages.of(config)
    rates = [rate_at(stages, version) for version in range(9)]
    assert rates == pytest.approx([0.1, 0.1 * 2 / 3, 0.1 / 3, 0.01, 0.01, 0.01, 0.01, 0.005, 0.01])
    plain = make([], experts=None, run={"name": "x", "steps": 4}, trainer={"lr": 1.0, "lr_schedule": "linear"})
    assert [rate_at(Stages.of(plain), version) for version in range(4)] == [1.0, 0.75, 0.5, 0.25]


@each(
    ("steps", "lr", "version", "said"),
    [
        (4, 1.0, 3, None),
        (12, 1.0, 0, None),
        (12, 1.0, 3, "learning rate 0.5 at the last step, 0.75 at the next (trainer.lr_schedule 'linear' from 1, to "
         "version 12); it rises: trainer.lr=0.667 goes on where it was"),
        (4, 0.5, 3, "learning rate 0.5 at the last step, 0.125 at the next (trainer.lr_schedule 'linear' from 0.5, to "
         "version 4)"),
    ],
)  # fmt: skip
def test_another_schedule_says_the_old_and_the_new_rate(steps: int, lr: float, version: int, said: str | None) -> None:
    def of(steps: int, lr: float) -> Stages:
        trainer = {"lr": lr, "lr_schedule": "linear"}
        return Stages.of(make([], experts=None, run={"name": "x", "steps": steps}, trainer=trainer))

    assert rate_change(of(4, 1.0), of(steps, lr), version) == said
    if said is not None:  # where a resume that made no step had other settings, the log has the rate of the last one
        failed = of(4, 0.01)
        assert rate_change(failed, of(steps, lr), version, 0.5) == said
        assert rate_change(failed, failed, version, 0.5) is not None


def test_more_steps_at_the_end_of_a_schedule_are_said_to_learn_little() -> None:
    def of(steps: int, warmup: int = 0) -> Stages:
        trainer = {"lr": 1.0, "lr_schedule": "linear", "warmup_steps": warmup}
        return Stages.of(make([], experts=None, run={"name": "x", "steps": steps}, trainer=trainer))

    assert (rate_change(of(96), of(100), 96) or "").endswith(
        "0.04 at the next (trainer.lr_schedule 'linear' from 1, to version 100); little is learned at the end of a "
        "schedule: trainer.lr_schedule=constant keeps trainer.lr"
    )
    for more, version in ((of(200), 96), (of(100, 100), 2)):
        assert "constant" not in (rate_change(of(96), more, version) or "constant")


@each(
    ("changes", "problem"),
    [
        ({"tasksets": {}}, r"stages.1 \(explore\): learns from rollouts, but there are no tasksets"),
        ({"experts": None}, r"stages.0 \(sft\): learns from demonstrations, but there are none"),
        ({"stages": THREE[:1]}, r"tasksets: no stage learns from rollouts"),
        ({"stages": [{"steps": 1}]}, r"experts: no stage takes any"),
        ({"stages": [{"steps": 1, "algorithm": "stf"}]}, r"unknown 'stf'.*did you mean 'sft'"),
        ({"run": {"name": "x", "steps": 3}}, r"run.steps: got 3, expected none beside"),
        ({"experts": {"source": "a.jsonl", "passes": 2}}, r"experts.passes: got 2, expected none beside"),
        ({"stages": [{"algorithm": "sft"}]}, r"stages.0: missing 'steps'"),
        ({"stages": [{"steps": 0}]}, r"stages.0.steps: got 0"),
        ({"stages": [{"steps": 1, "sampling": {}}]}, r"stages.0.sampling: unknown key"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(changes: dict[str, Any], problem: str) -> None:
    values = {"stages": THREE, **changes}
    if values.get("experts", 0) is None:
        values["experts"] = {"source": "a.jsonl"}
        with pytest.raises(ConfigError, match=problem):
            check_demonstrations(loader.replace(make(THREE), experts=None))
        return
    with pytest.raises(ConfigError, match=problem):
        check_demonstrations(make(values.pop("stages"), **values))


def test_from_a_file_and_set_one_by_one(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[run]\nname = "x"\n[model]\npath = "fake"\n[tasksets.sums]\nsource = "arithmetic"\n'
        "[[stages]]\nsteps = 2\n[[stages]]\nsteps = 3\n", encoding="utf-8",
    )  # fmt: skip
    config = loader.load([file], sets=["stages.1.steps=7", "stages.0.lr=0.5"], env={})
    assert [(one.steps, one.lr) for one in config.stages] == [(2, 0.5), (7, None)]
    shown = CheckReport(run="x", stages=list(Stages.of(config).all)).to_text()
    assert "stages.0  grpo  2 steps, versions 0 to 2" in shown, "as --set and errors call it"
    env = {"RFTSTREAM__STAGES__0__STEPS": "4"}
    assert loader.load([file], env=env).steps == 7
    assert loader.load([file], sets=["stages=[]", "run.steps=1"], env={}).stages == ()
    with pytest.raises(ConfigError, match=r"got stages.2, expected stages.0 to stages.1"):
        loader.load([file], sets=["stages.2.steps=7"], env={})


def test_a_resume_says_which_of_the_trainers_settings_no_stage_takes() -> None:
    own, left = {"steps": 2, "lr": 0.5}, {"steps": 3}
    for stages, why in (
        ([own, own], "changes nothing: every stage has its own lr; set stages.0.lr, stages.1.lr, ..."),
        ([own, left], "what is learned changes"),
    ):
        before, after = (make(stages, trainer={"lr": lr}) for lr in (0.25, 0.125))
        assert changes_of_resume(before, after) == [f"trainer.lr 0.25 -> 0.125 ({why})"]
    games = [make(environments={"games:Safe": {"guesses": guesses}}) for guesses in (3, 4)]
    assert changes_of_resume(*games) == [
        "environments.games:Safe.guesses 3 -> 4 (rewards and evaluations of before do not compare with those from "
        "here on)"
    ]


def test_a_run_goes_on_with_more_steps_but_not_with_stages_where_there_were_none() -> None:
    before, after = make(), make([*THREE[:2], {**THREE[2], "steps": 5}])
    assert changed_settings(before, after) == ["stages.2.steps 2 -> 5"]
    manifest = make_manifest(before, "a", {}, 0.0)
    check_same_run(manifest, after, {})
    plain = make([], run={"name": "x", "steps": 9}, trainer={"algorithm": "mix"})
    with pytest.raises(ConfigError, match="stages True -> False"):
        check_same_run(manifest, plain, {})
    check_same_run(manifest, plain, {}, other_operators=True)
    finished = RunFinished(reason="steps", name=VersionName(trainer_epoch=1, version=9), finished_at=0.0)
    said = nothing_more(finished, 9, before, before)
    assert said is not None
    assert "9 of 9 steps; give more, e.g. --set stages.2.steps=12" in said
    assert nothing_more(finished, 9, before, after) is None


def test_tasks_are_tried_without_stages_and_evaluations() -> None:
    config = make(
        evaluations={"held-out": {"source": "arithmetic"}}, trainer={"keep_best": "held-out"}, feedback={"pairs": 0.5}
    )
    tried = trial_config(config, num_tasks=2, samples=1)
    assert (tried.stages, tried.steps, tried.evaluations, tried.trainer.keep_best) == ((), 1, {}, None)
