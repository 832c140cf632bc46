"""Scripts of TRL whose values come from elsewhere: a command line, the shell, files and modules beside them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rftstream.config.parts.registry import near_file
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


BESIDE = {
    "main.py": """
from trl import GRPOTrainer

import settings
from data import get_data
from lib import REWARDS, scoring
from lib.rewards import shorter

args = settings.made("exp", lr=3e-6, seed=7)
args.max_grad_norm = 0.5
train, dev = get_data("rows.jsonl")
GRPOTrainer(settings.MODEL, [*REWARDS, shorter(9), scoring.exact], args, train, dev).train()
""",
    "settings.py": """
from trl import GRPOConfig
from lib.names import NAME as MODEL

BASE = dict(num_generations=4, max_steps=60)

def made(out, *, lr=1e-6, **more):
    return GRPOConfig(output_dir=out, learning_rate=lr, eval_strategy="steps", eval_steps=5, **BASE, **more)
""",
    "data.py": """
from datasets import load_dataset

def get_data(path):
    rows = load_dataset("json", data_files=path, split="train")
    asked = rows.map(lambda row: {"prompt": [{"role": "user", "content": row["q"] + "?"}]})
    return asked.select(range(10, 20)), asked.select(range(10))
""",
    "lib/__init__.py": "from .rewards import near\nREWARDS = [near]\n",
    "lib/names.py": "NAME = 'big'\n",
    "lib/scoring.py": "def exact(completions, **kwargs):\n    return [1.0 for _ in completions]\n",
    "lib/rewards.py": """
def near(completions, a, **kwargs):
    return [0.5 for _ in completions]

def shorter(limit):
    def reward(completions, **kwargs):
        return [float(len(one[0]["content"]) < limit) for one in completions]
    return reward
""",
}


def test_modules_beside_a_script_are_read_and_their_rewards_named(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    done = convert_config("trl", written(tmp_path, {**BESIDE, "rows.jsonl": '{"q": "a", "a": 1}\n' * 30})[:1])
    values = tomllib.loads(done.run_file)
    found = {"model.path": "big", "trainer.lr": 3e-6, "trainer.max_grad_norm": 0.5, "run.steps": 60, "run.seed": 7}
    found |= {"feeder.group_size": 4, "evaluations.held-out.every": 5, "tasksets.train.source": "jsonl:rows.jsonl"}
    found |= {"tasksets.train.options": {"template": "{q}?", "skip": 10, "size": 10}}
    assert {key: setting(values, key) for key in found} == found
    rewards = [one["name"] for one in values["tasksets"]["train"]["reward"]]
    assert rewards == ["lib.rewards:near", "main_rewards:shorter_1", "lib.scoring:exact"]
    assert "from lib.rewards import shorter\n" in done.modules[0].text
    (tmp_path / "settings.py").write_text("MODEL = made_elsewhere()\n")
    with pytest.raises(ConfigError, match=r"line 1 of settings\.py: made_elsewhere"):
        convert_config("trl", [tmp_path / "main.py"])


UNSLOTH = """
import argparse
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from unsloth import FastLanguageModel
from vllm import SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--limit", type=int, default=9)
given = parser.parse_args()
length = 64 * 2
model, tokenizer = FastLanguageModel.from_pretrained(model_name="m", max_seq_length=length, fast_inference=True)
tokenizer.chat_template = "{{ 'HEAD' }}".replace("HEAD", "h")
end = "</a>" + tokenizer.eos_token

def short(completions, **kwargs):
    return [float(len(one) < given.limit and one.endswith(end)) for one in completions]

sampling = SamplingParams(min_p=0.1, top_k=-1, stop=[tokenizer.eos_token], seed=3)
data = load_dataset("rows", split="train").map(lambda row: {"image": row["image"].convert("RGB"), "prompt": [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["q"].upper()}]}]})
trainer = GRPOTrainer(model, short, GRPOConfig("o", vllm_sampling_params=sampling), data)
trainer.train()
model.save_lora("saved")
"""


def test_a_model_that_is_loaded_with_its_tokenizer_and_rows_with_images(tmp_path: Path) -> None:
    done = convert_config("trl", written(tmp_path, {"train.py": UNSLOTH}))
    values = tomllib.loads(done.run_file)
    found = {"model.path": "m", "model.context": 128, "model.chat_template": "{{ 'h' }}", "sampling.min_p": 0.1}
    found |= {"sampling.top_k": 0, "tasksets.train.source": "parquet:train_rows.parquet"}
    found |= {"tasksets.train.columns": {"messages": "prompt", "images": "image"}}
    assert {key: setting(values, key) for key in found} == found
    texts = {one.name: one.text for one in done.modules}
    assert ".to_parquet(str(Path(__file__).with_name('train_rows.parquet')))" in texts["write_train_rows.py"]
    rewards = texts["train_rewards.py"]
    assert "tokenizer = AutoTokenizer.from_pretrained('m')" in rewards and "unsloth" not in rewards
    assert "given = SimpleNamespace(limit=9)" in rewards
    assert not any("reads this" in one or "could not be read" in one for one in done.to_do), done.to_do


OF_HYDRA = """
import hydra
from datasets import load_dataset
from omegaconf import OmegaConf
from trl import DPOConfig, DPOTrainer

@hydra.main(config_path="conf", config_name="small")
def main(cfg):
    def plain(row):
        return {"prompt": tokenizer.apply_chat_template(row[cfg.data.column]), "chosen": row["a"], "rejected": row["b"]}

    args = DPOConfig(cfg.out, **OmegaConf.to_container(cfg.training, resolve=True))
    DPOTrainer(cfg["model"].name, args=args, train_dataset=load_dataset(cfg.data.name, split="train").map(plain))

main()
"""


def test_a_config_of_hydra_a_module_that_is_launched_and_a_notebook(tmp_path: Path) -> None:
    (tmp_path / "pkg/conf").mkdir(parents=True)
    config = "out: o\nmodel: {name: m}\ndata: {name: rows, column: q}\ntraining: {learning_rate: 2e-6, max_steps: 9}\n"
    (tmp_path / "pkg/conf/small.yaml").write_text(config)
    shell = "torchrun --nproc_per_node=4 -m pkg.train 2>&1 | tee log\n"
    run, module = written(tmp_path, {"run.sh": shell, "pkg/train.py": OF_HYDRA})
    cells = [{"cell_type": "markdown", "source": ["words"]}]
    setup = [
        "%%capture\n",
        "import os\n",
        "if os.environ:\n",
        "    !pip install trl \\\n",
        "        peft\n",
        "files = !ls\n",
    ]
    sources = (setup, "%%html\n<b>words</b>\n", ["%time\n", OF_HYDRA, "trainer?"])
    cells += [{"cell_type": "code", "source": one} for one in sources]
    (tmp_path / "pkg/train.ipynb").write_text(json.dumps({"cells": cells}))
    for file, processes in ((run, 4), (module, 1), (tmp_path / "pkg/train.ipynb", 1)):
        done = convert_config("trl", [file])
        values = tomllib.loads(done.run_file)
        found = {"model.path": "m", "trainer.lr": 2e-6, "run.steps": 9, "experts.per_batch": 8 * processes}
        assert {key: setting(values, key) for key in found} == found
        assert any("write the messages, without apply_chat_template" in one for one in done.to_do)
        assert not any("nothing here reads this" in one for one in done.to_do), done.to_do


OBJECTS = """
import click
from dataclasses import dataclass
from trl import GRPOConfig, GRPOTrainer

class Names:
    OUT = "out"

@dataclass
class Settings:
    model: str = "m"
    rate: float = 1e-6
    steps: int = 3
    seed: int = 4

def right(completions, **kwargs):
    return [1.0 for _ in completions]

settings = Settings("other", steps=5)
more = dict(weight_decay=0.5)
more["temperature"] = 0.25
if settings.steps == 5:
    more.update(top_k=7)
settings.rate = 2e-6
given = vars(parser.parse_args())
parser.add_argument("--size", default=6)

@click.command()
@click.option("-b", "--beta", default=0.5)
def main(beta):
    args = GRPOConfig(Names.OUT, learning_rate=settings.rate, max_steps=settings.steps, seed=settings.seed, beta=beta,
                      num_generations=given["size"], per_device_train_batch_size=given["size"], **more)
    GRPOTrainer(settings.model, right, args, load_dataset("rows")).train()
"""


def test_settings_in_objects_and_options_of_a_script(tmp_path: Path) -> None:
    values = tomllib.loads(convert_config("trl", written(tmp_path, {"train.py": OBJECTS})).run_file)
    found = {"run.name": "out", "model.path": "other", "trainer.lr": 2e-6, "run.steps": 5, "run.seed": 4}
    found |= {"algorithms.grpo.kl_coef": 0.5, "feeder.group_size": 6, "feeder.groups_per_batch": 1}
    found |= {"trainer.weight_decay": 0.5, "sampling.temperature": 0.25, "sampling.top_k": 7}
    assert {key: setting(values, key) for key in found} == found


OF_A_CLASS = """
import argparse
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

def right(completions, answer, **kwargs):
    return [1.0 for _ in completions]

class Runner:
    steps = 12

    def __init__(self, given, rate=1e-6):
        self.given = given
        self.rate = rate
        self.setup()
        IN_INIT

    def setup(self):
        self.name = "m"
        self.model = AutoModelForCausalLM.from_pretrained(self.name)
        self.data = load_dataset("rows")

    def rows(self, part):
        return self.data[part].map(lambda row: {"prompt": [{"role": "user", "content": row["q"]}]})

    def config(self):
        return GRPOConfig("out", max_steps=self.steps, learning_rate=self.rate, beta=self.given.beta)

    def run(self):
        IN_RUN
        self.trainer.train()

parser = argparse.ArgumentParser()
parser.add_argument("--beta", default=0.5)
Runner(parser.parse_args(), rate=3e-6).run()
"""
MADE = "self.trainer = GRPOTrainer(self.model, right, self.config(), train_dataset=self.rows('train'))"


@pytest.mark.parametrize("place", ["IN_INIT", "IN_RUN"])
def test_a_trainer_in_a_class_of_the_script(place: str, tmp_path: Path) -> None:
    script = OF_A_CLASS.replace(place, MADE).replace("IN_INIT", "pass").replace("IN_RUN", "pass")
    done = convert_config("trl", written(tmp_path, {"train.py": script}))
    values = tomllib.loads(done.run_file)
    found = {"model.path": "m", "trainer.lr": 3e-6, "run.steps": 12, "algorithms.grpo.kl_coef": 0.5}
    found |= {"tasksets.train.source": "hf:rows", "tasksets.train.columns": {"messages": "q"}}
    assert {key: setting(values, key) for key in found} == found
    assert not done.to_do
    frozen = script.replace("self.data = ", "self.model.requires_grad_(False)\n        self.data = ")
    done = convert_config("trl", written(tmp_path, {"train.py": frozen}))
    assert any("self.model.requires_grad_(False)" in one for one in done.to_do)


FLAGS = """
export WANDB_PROJECT=p
python get_rows.py
trl sft --model_name_or_path m --dataset_name rows --eos_token '<|im_end|>' --seed 7 --output_dir first \\
  --num_train_epochs 2 "$@"
trl dpo --model_name_or_path first --dataset_name pairs
"""


def test_commands_of_trl_without_a_file(tmp_path: Path) -> None:
    done = convert_config("trl", written(tmp_path, {"go.sh": FLAGS, "get_rows.py": "print(1)\n"})[:1])
    values = tomllib.loads(done.run_file)
    assert (values["run"]["name"], values["run"]["seed"], values["experts"]["passes"]) == ("first", 7, 2)
    asked = "\n".join(done.to_do)
    assert "go.sh runs get_rows.py before, which no run does" in asked
    assert "flags: '$@': only the shell" in asked and "go.sh goes on with `trl dpo --model_name_or_path" in asked


SWEEP = """
import os
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

other = AutoModelForCausalLM.from_pretrained("other")
for beta, rate in [(0.3, 1e-6), (0.5, 2e-6)]:
    model = AutoModelForCausalLM.from_pretrained("m")
    args = DPOConfig(os.path.join("runs", "o"), beta=beta, learning_rate=rate)
    DPOTrainer(model, other, args, train_dataset=load_dataset("pairs", split="train")).train()
"""


def test_the_first_turn_of_a_loop_over_trainers(tmp_path: Path) -> None:
    done = convert_config("trl", written(tmp_path, {"train.py": SWEEP}))
    values = tomllib.loads(done.run_file)
    found = {
        "run.name": "o",
        "model.path": "m",
        "algorithms.dpo.beta": 0.3,
        "trainer.lr": 1e-6,
        "experts.source": "hf:pairs",
    }
    assert {key: setting(values, key) for key in found} == found
    asked = "\n".join(done.to_do)
    assert "line 8: for (beta, rate) in [(0.3, 1e-06), (0.5, 2e-06)]: the run is that of the first turn" in asked
    assert "ref_model other: the reference is the model that the run begins with" in asked


SHOWN = """
import mine.rewards as of_mine
from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

judge = AutoModelForSequenceClassification.from_pretrained("judge", num_labels=1)
COUNT = 0

def counted(completions, **kwargs):
    global COUNT
    COUNT += 1
    return [float(COUNT) for _ in completions]

def talk(row):
    return {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["q"]}]}]}

data = Dataset.from_list(made()).map(talk)
GRPOTrainer("m", [judge, counted, of_mine.short, accuracy_reward], GRPOConfig("o"), data).train()
"""


def test_rewards_of_every_kind_and_images_of_rows_that_the_script_makes(tmp_path: Path) -> None:
    done = convert_config("trl", written(tmp_path, {"see.py": SHOWN}))
    values = tomllib.loads(done.run_file)
    train = values["tasksets"]["train"]
    names = [one["name"] for one in train["reward"]]
    assert names == ["reward_model", "see_rewards:counted", "mine.rewards:short", "math"]
    assert values["rewards"]["reward_model"]["path"] == "judge"
    assert train["source"] == "parquet:see_rows.parquet", "another script's rows have another name"
    assert train["columns"] == {"messages": "prompt", "answer": "solution", "images": "image"}
    copied: dict[str, Any] = {}
    exec(next(one.text for one in done.modules if one.name == "see_rewards.py"), copied)
    assert copied["counted"](["a"]) == [1.0]
    (tmp_path / "write_see_rows.py").touch()
    assert near_file(tmp_path / "see_rows.parquet") == f"; `python {tmp_path / 'write_see_rows.py'}` writes it"
    (tmp_path / "see_rows.parquet").touch()
    assert near_file(tmp_path / "see_rows.parquet") == near_file(Path()) == "", "what is there is not missing"


def test_a_reward_model_with_an_adapter_is_trained_whole(tmp_path: Path) -> None:
    script = (
        "from peft import LoraConfig\nfrom trl import RewardConfig, RewardTrainer\nfrom datasets import load_dataset\n"
        "RewardTrainer('m', RewardConfig('o'), train_dataset=load_dataset('rows', split='train'), "
        "eval_dataset=made(), peft_config=LoraConfig(r=4)).train()\n"
    )
    done = convert_config("trl", written(tmp_path, {"train.py": script}))
    assert "lora" not in tomllib.loads(done.run_file)["model"]
    assert any(one.startswith("peft_config: a reward model is trained whole") for one in done.to_do)
    left = {one.there: one.reason for one in done.not_taken}
    assert "weight_as" in left["a column margin, if rows have one"] and "held_out" in left["eval_dataset"]
    assert not any("eval_dataset" in one for one in done.to_do)


CHANGED_LATER = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

C = {"lr": 1e-5}
C.update(lr=2e-6)
WORDS = []
WORDS.append("8")
SEED = 1

def choose():
    global SEED
    SEED = 2

choose()

def right(completions, **kwargs):
    return [float(WORDS[0] in said) for said in completions]

rows = load_dataset("json", data_files="a.jsonl", split="train[10%:20%]").select(range(0, 50, 2))
GRPOTrainer("m", right, GRPOConfig("out", max_steps=3, learning_rate=C["lr"], seed=SEED), rows).train()
"""


def test_what_a_script_changes_after_binding_it_and_rows_that_no_option_takes(tmp_path: Path) -> None:
    launch = 'CMD="accelerate launch --num-processes 4 t.py --model-name m"\nsrun bash -c "$CMD"\n'
    done = convert_config("trl", written(tmp_path, {"t.py": CHANGED_LATER}))
    values = tomllib.loads(done.run_file)
    modules = {one.name: one.text for one in done.modules}
    assert setting(values, "trainer.lr") == 2e-6
    assert any("seed" in one and "which a function sets" in one for one in done.to_do)
    assert 'WORDS.append("8")' in modules["t_rewards.py"]
    assert setting(values, "tasksets.train.source") == "jsonl:t_rows.jsonl"
    assert "range(0, 50, 2)" in modules["write_t_rows.py"]
    job = """#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
N=m
if [ -n "$BIG" ]; then N=big; fi
srun python t.py --model-name $N
"""
    (tmp_path / "job.sh").write_text(job)
    submitted = convert_config("trl", [tmp_path / "job.sh"])
    assert setting(tomllib.loads(submitted.run_file), "feeder.groups_per_batch") == 8
    assert "N: job.sh sets it in an `if`; 'big', its last, was taken" in submitted.to_do
    (tmp_path / "go.sh").write_text(launch)
    launched = tomllib.loads(convert_config("trl", [tmp_path / "go.sh"]).run_file)
    assert setting(launched, "feeder.groups_per_batch") == 4
