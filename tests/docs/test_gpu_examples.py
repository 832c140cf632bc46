"""The examples for GPUs: `check` reads them with models of the hub's sizes, and estimates what their heads say; what
other systems have beside them is the same training."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pages import gallery

from rftstream.config import loader
from rftstream.integrations.foreign_configs import convert_config
from rftstream.preflight.checks.check import check
from rftstream.preflight.memory import MAIN
from rftstream.queries.formatting import size
from tests.docs.reading import ROOT
from tests.stand_ins import make_hub
from tests.suite.each import each

FOLDER = ROOT / "examples"
NOT_HERE = ("the package vllm is not installed", "is not there, torch sees no GPU", "is not there, there are")
"""What `check` says of a machine without GPUs."""
ELSEWHERE = sorted((FOLDER / "elsewhere").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k", "gsm8k-8gpu"])
def test_check_estimates_what_the_head_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_hub(tmp_path)
    text = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    (tmp_path / "run.toml").write_text(text.replace('"hf:', f'"hf:{tmp_path}/'))
    monkeypatch.chdir(tmp_path)
    report = check(loader.load([tmp_path / "run.toml"], env={}))
    assert not [error for error in report.errors if not any(part in error for part in NOT_HERE)]
    assert report.memory is not None and report.disk is not None
    head = " ".join(text.partition("\n\n")[2].partition("[run]")[0].replace("\n#", " ").split())
    said = dict(re.findall(r"\b(cuda:0|main memory|disk) (\d+\.\d GB)", head))
    assert said == {
        "cuda:0": size(report.memory.total("cuda:0")),
        MAIN: size(report.memory.total(MAIN)),
        "disk": size(report.disk.total_bytes),
    }
    assert f"prompts of {report.tasksets[0].longest} tokens" in head
    assert f"counts {report.disk.rollouts:,} rollouts" in head
    assert "Not measured: no GPU was there." in head


SAME = {
    "gsm8k_trl.py": ("run.name", "run.steps", "model.path", "sampling.max_tokens", "feeder.group_size",
                     "feeder.groups_per_batch", "explorer.policy", "explorer.devices", "trainer.colocate",
                     "trainer.lr", "trainer.warmup_steps", "trainer.checkpoint_every",
                     "backends.torch.gradient_checkpointing"),
    "gsm8k-8gpu_verl.sh": ("run.name", "run.steps", "model.path", "model.context", "sampling.max_tokens",
                           "feeder.group_size", "feeder.groups_per_batch", "explorer.policy", "trainer.lr",
                           "trainer.warmup_steps", "trainer.checkpoint_every",
                           "backends.torch.gradient_checkpointing"),
    "tools_trl.py": ("run.name", "sampling.max_tokens", "feeder.group_size"),
    "vision_trl.py": ("run.name", "sampling.max_tokens", "feeder.group_size"),
    "code_trl.py": ("run.name", "feeder.group_size", "trainer.lr"),
    "distillation_trl.py": (),  # no trainer that convert-config knows
}  # fmt: skip
"""Script -> the settings that it has in common with the run file beside it."""


@each("path", ELSEWHERE, ids=lambda path: path.name)
def test_what_others_have_is_the_same_training(path: Path) -> None:
    example, _, system = path.stem.rpartition("_")
    assert system in gallery.SYSTEMS
    ours = tomllib.loads((FOLDER / f"{example}.toml").read_text(encoding="utf-8"))
    if keys := SAME[path.name]:
        gpus = 1 if system == "trl" else None  # a script does not say it
        theirs = tomllib.loads(convert_config(system, [path], gpus=gpus).run_file)
        assert {key: setting(theirs, key) for key in keys} == {key: setting(ours, key) for key in keys}
    else:
        compile(path.read_text(encoding="utf-8"), path.name, "exec")
    assert path.read_text(encoding="utf-8").strip() in (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")


def setting(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values
