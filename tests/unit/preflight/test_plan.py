"""What is prepared and looked at for each purpose, and that nobody does it beside `plan`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rftstream.config import loader
from rftstream.config.placement import Gpu, Machine, chosen_settings, place
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.launch.supervisor import worker_commands
from rftstream.models import machine
from rftstream.preflight.plan import Purpose, placed_here, plan
from rftstream.runs.folder import RunFolder
from tests.source import sources
from tests.unit.tiny_run import write_run_file

STARTS = (Purpose.begin, Purpose.resume)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return loader.load([write_run_file(tmp_path)])


@pytest.mark.parametrize("purpose", Purpose)
def test_own_modules_can_be_imported_whatever_the_purpose(config: RunConfig, purpose: Purpose, tmp_path: Path) -> None:
    config = place(Machine(), config).config
    planned = plan(config, purpose, scratch=tmp_path / "scratch")
    assert (planned.config, planned.purpose, planned.problems) == (config, purpose, ())
    assert str(tmp_path.resolve()) in sys.path
    assert os.getcwd() in map(os.path.realpath, sys.path)


@pytest.mark.parametrize(("purpose", "role", "open_settings"), [
    (Purpose.begin, None, ()), (Purpose.resume, None, ()), (Purpose.build, None, ()), (Purpose.report, None, ()),
    (Purpose.join, "trainer", ()),
    (Purpose.make, None, ("trainer.device", "explorer.devices", "evaluator.device")),
])  # fmt: skip
def test_devices_are_decided_where_the_work_is(config: RunConfig, purpose, role, open_settings, tmp_path) -> None:
    planned = plan(config, purpose, role=role, scratch=tmp_path / "scratch")
    assert chosen_settings(planned.config) == open_settings


@pytest.mark.parametrize(("num_gpus", "wanted", "devices"), [
    (0, {"explorer": 2, "trainer": 1, "verifier": 1}, ["cpu", "cpu", "cpu"]),
    (4, {"explorer": 2}, ["cuda:0", "cuda:1"]),
    (2, {"explorer": 3}, ["cuda:0", "cuda:1", "cuda:0"]),
    (3, {"trainer": 1, "explorer": 2}, ["cuda:1", "cuda:2", "cuda:0"]),
    (1, {"trainer": 1}, ["cuda:0"]),
])  # fmt: skip
def test_workers_of_a_host_that_does_not_see_the_run_folder_get_its_own_devices(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_gpus, wanted, devices
) -> None:
    """Those of explorers, then the trainer's: roles that are elsewhere take none of this host's GPUs."""
    gpus = (Gpu(name="GPU", memory_bytes=80 * 2**30, capability=(9, 0)),) * num_gpus
    monkeypatch.setattr(machine, "read_machine", lambda: Machine(gpus=gpus, memory_bytes=2**36))
    parts = {"model__path": "a/model", "explorer__policy": "hf", "trainer__backend": "torch"}
    placed = placed_here(loader.replace(config, **parts), wanted)
    commands = dict(sorted((one.process, one.arguments) for _, one in worker_commands(
        placed, RunFolder(tmp_path / "none"), counts=wanted, host="b", files=[tmp_path / "tiny.toml"]
    )))  # fmt: skip
    assert [words[-1] for words in commands.values() if "--device" in words] == devices


def test_unknown_parts_are_refused_before_they_are_used(config: RunConfig, tmp_path: Path) -> None:
    wrong = loader.replace(config, trainer__algorithm="gpro")
    for purpose in (*STARTS, Purpose.make, Purpose.build):
        with pytest.raises(ConfigError, match=r"trainer\.algorithm: unknown 'gpro'"):
            plan(wrong, purpose)
    (problem,) = plan(wrong, Purpose.report, scratch=tmp_path / "scratch").problems
    assert problem.found.startswith("trainer.algorithm: unknown 'gpro'")
    assert plan(wrong, Purpose.join).looked == (), "it was looked at when the run was made"


@pytest.mark.slow
def test_what_only_workers_need_is_looked_at_where_they_start(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wrong = loader.replace(config, weights__store=f"{tmp_path}/file/store", trainer__device="cuda:99")
    for purpose in STARTS:
        with pytest.raises(ConfigError, match=r"cuda:99(.|\n)*nothing can be made in"):
            plan(wrong, purpose)
    report = plan(wrong, Purpose.report, scratch=tmp_path / "scratch")
    assert [problem.what for problem in report.problems] == ["cuda:99", "object store"]
    assert {"cuda:99", "object store"}.isdisjoint(looked.what for looked in plan(wrong, Purpose.make).looked)
    for purpose in (Purpose.build, Purpose.join):
        assert plan(wrong, purpose).looked == ()


@pytest.mark.parametrize("purpose", Purpose)
def test_a_missing_module_of_a_reward_is_found_before_the_start(
    config: RunConfig, purpose: Purpose, tmp_path: Path
) -> None:
    """Where the workers start elsewhere, the module may be there alone."""
    own = loader.load([tmp_path / "tiny.toml"], sets=["tasksets.sums.reward=no_such_module:score"])
    if purpose in STARTS:
        with pytest.raises(ConfigError, match=r"tasksets\.sums\.reward: .*no module named 'no_such_module'"):
            plan(own, purpose)
    else:
        found = [problem.found for problem in plan(own, purpose, scratch=tmp_path / "scratch").problems]
        assert any("no_such_module" in one for one in found) == (purpose is Purpose.report)


def test_an_import_is_no_run_file(config: RunConfig) -> None:
    imported = loader.replace(config, run__imported_from="elsewhere")
    with pytest.raises(ConfigError, match=r"run\.imported_from: is for `rftstream rescore`"):
        plan(imported, Purpose.begin)
    plan(imported, Purpose.resume)


def test_hidden_modules_are_told_to_who_starts(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for number, folder in enumerate((tmp_path, Path.cwd())):
        (folder / "own_planned_reward.py").write_text(f"def score(completion): return {number}.0\n")
    own = loader.load([tmp_path / "tiny.toml"], sets=["tasksets.sums.reward=own_planned_reward:score"])
    for purpose in (*STARTS, Purpose.report, Purpose.build):
        planned = plan(own, purpose, scratch=tmp_path / "scratch")
        assert [module.name for module in planned.modules] == ["own_planned_reward"]
        (note,) = planned.notes
        assert note.startswith(f"own_planned_reward: taken from {tmp_path / 'own_planned_reward.py'}; own_")
    assert plan(own, Purpose.make).notes == ()


def test_a_worker_that_is_planned_imports_nothing_that_only_a_start_needs(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom rftstream.config import loader\n"
        "from rftstream.config.placement import Gpu, Machine, place\n"
        "from rftstream.preflight.plan import Purpose, plan\n"
        f"config = place(Machine(), loader.load([Path({str(write_run_file(tmp_path))!r})])).config\n"
        "before = set(sys.modules)\nplan(config, Purpose.join, role='trainer')\n"
        "print(sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout == "[]\n", done.stderr


# ------------------------------------------------------------------------------------------------ nobody else

PLAN = "rftstream.preflight.plan"
OWN_PATHS = (PLAN, "rftstream.rewards.child", "rftstream.commands.run_file")
"""Who changes the import paths: a child that runs rewards is given those of its parent, and `explain` has no run file
beside which modules of one's own could lie."""


@pytest.mark.slow
def test_only_the_plan_prepares_a_run() -> None:
    wrong = []
    for source in sources("rftstream", "workers"):
        module = source.module
        for call in source.calls:
            name = call.function
            adds_paths = name in ("sys.path.append", "sys.path.insert", "sys.path.extend")
            looks = name in ("readiness.look", "readiness.requirements", "check_part_names")
            if (adds_paths and module not in OWN_PATHS) or (looks and module != PLAN):
                wrong.append(f"{module}:{call.line} calls {name}")
        for one in source.imports:
            taken = one.name in (
                "rftstream.config.parts.part_names.check_part_names",
                "rftstream.preflight.readiness.look",
                "rftstream.preflight.readiness.requirements",
            )
            if taken and module != PLAN:
                wrong.append(str(one))
    assert not wrong, "\n".join(wrong)
