"""Scripts of TRL whose values come from elsewhere: a command line, the shell, files and modules beside them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from rftstream.errors import ConfigError
from rftstream.integrations.foreign_configs import convert_config
from tests.unit.integrations.test_foreign_configs import setting, written

PARSED = """
import torch
from dataclasses import dataclass, field
from datasets import load_dataset
from peft import prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, HfArgumentParser
from trl import GRPOConfig, GRPOTrainer

@dataclass
class Given:
    name: str = field(default="m", metadata={"help": "the model"})
    rate: float = 3e-6
    is_short: bool = False

def add(a: int) -> int:
    return a + 1

def right(completions, answer, **kwargs):
    return [float(one in said) for said, one in zip(completions, answer)]

given = HfArgumentParser(Given).parse_args_into_dataclasses()[0]
model = prepare_model_for_kbit_training(AutoModelForCausalLM.from_pretrained(given.name))
args = GRPOConfig("out", learning_rate=given.rate, bf16=torch.cuda.is_bf16_supported(), eval_steps=7,
                  eval_strategy="no" if given.is_short or not given.name else "steps", warmup_ratio=0.1)
GRPOTrainer(model, right, args, load_dataset("rows"), load_dataset("asked"), tools=[add]).train()
"""


def test_defaults_of_the_scripts_own_dataclass_and_tools_that_evaluations_have_too(tmp_path: Path) -> None:
    done = convert_config("trl", written(tmp_path, {"train.py": PARSED}))
    values = tomllib.loads(done.run_file)
    found = {"model.path": "m", "model.dtype": "bfloat16", "trainer.lr": 3e-6, "evaluations.held-out.every": 7}
    found |= {f"{one}.environment": "tools" for one in ("tasksets.train", "evaluations.held-out")}
    assert {key: setting(values, key) for key in found} == found
    assert not any("could not be read" in one for one in done.to_do)
    assert any("trainer.warmup_steps, to 0.1" in one for one in done.to_do)


LAUNCHED = """
import os
import yaml
from pathlib import Path
from trl import GRPOConfig, GRPOTrainer

def right(completions, answer, **kwargs):
    return [1.0 for _ in completions]

with open(Path(__file__).parent / "conf" / "train.yaml") as file:
    config = yaml.safe_load(file)
args = GRPOConfig("out", learning_rate=float(os.environ["LR"]), use_vllm=True, **config["training"])
GRPOTrainer(os.environ.get("MODEL", "m"), right, args, config.get("data", other)).train()
"""
CONFIG = "training: {per_device_train_batch_size: 2, num_generations: 4, max_steps: 5e1}"
SHELL = """
export MODEL=${MODEL:-big} OUT=/tmp/$USER
GIVEN=1e-6
LR=$GIVEN srun --nodelist "$SLURM_NODES" accelerate launch --num_processes 16 --num_machines 2 train.py &
"""


def test_a_script_gets_what_the_shell_exports_and_the_yaml_that_it_loads(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/train.yaml").write_text(CONFIG)
    files = written(tmp_path, {"run.sbatch": SHELL, "train.py": LAUNCHED})
    done = convert_config("trl", files[:1])
    values = tomllib.loads(done.run_file)
    found = {"model.path": "big", "trainer.lr": 1e-6, "run.steps": 50, "feeder.groups_per_batch": 8}
    assert {key: setting(values, key) for key in found} == found
    assert done.num_gpus == 8 and any(one.startswith("16 processes on 2 machines") for one in done.to_do)
    assert not any("nodelist" in one for one in (*done.to_do, *(one.there for one in done.not_taken)))

    (tmp_path / "conf/train.yaml").unlink()
    script = LAUNCHED.replace('os.environ.get("MODEL", "m")', 'config["model"]')
    with pytest.raises(ConfigError, match=r"conf/train\.yaml is not beside"):
        convert_config("trl", written(tmp_path, {"train.py": script}))
