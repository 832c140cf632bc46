"""Fields of scripts' own dataclasses, and single settings of verl and prime-rl, as their sources have them:
verl/trainer/ppo/core_algos.py and its engines at 1dda039, packages/prime-rl-configs at 559b447."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rftstream.integrations.foreign_configs import convert_config
from rftstream.integrations.foreign_configs.trl.sources import BARE
from tests.suite.each import each
from tests.unit.integrations.test_foreign_configs import setting, written

VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.train_files=a.parquet "
GRPO = f"{VERL}algorithm.adv_estimator=grpo "
BOTH = (
    "actor_rollout_ref.actor.use_kl_loss=True algorithm.use_kl_in_reward=True actor_rollout_ref.actor.kl_loss_type=kl"
)
RATES = "lr_warmup_steps_ratio=0.05 trainer.total_training_steps=30"


@each(
    ("text", "found", "said"),
    [
        (f"{GRPO}actor_rollout_ref.actor.optim.{RATES}",  # int(1.5), as in its engines
         {"trainer.warmup_steps": 1, "tasksets.a.passes": None, "run.steps": 30}, ()),
        (f"{GRPO}trainer.total_epochs=2 trainer.total_training_steps=9", {"tasksets.a.passes": 2, "run.steps": 9}, ()),
        (f"{GRPO}actor_rollout_ref.actor.clip_ratio=0.3", {"algorithms.grpo.clip_low": 0.2},
         ("clip_ratio = 0.3: verl takes clip_ratio_low",)),
        (f"{GRPO}actor_rollout_ref.actor.policy_loss.loss_mode=cispo actor_rollout_ref.actor.clip_ratio_high=0.28",
         {"algorithms.cispo.max_ratio": 1.28}, ("bounds ratios below, too",)),
        (f"{GRPO}actor_rollout_ref.actor.policy_loss.loss_mode=sapo actor_rollout_ref.actor.tau_pos=2.0",
         {"algorithms.sapo.tau_positive": 2.0, "algorithms.sapo.tau_negative": 1.05}, ()),
        (f"{GRPO}actor_rollout_ref.actor.policy_loss.loss_mode=gpg", {"trainer.algorithm": "grpo"}, ("'gpg' has no",)),
        (f"{GRPO}actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
         {"algorithms.dr_grpo.row_tokens": 1, "algorithms.dr_grpo.scale_rewards": "group"}, ()),
        (f"{GRPO}actor_rollout_ref.actor.loss_agg_mode=token-sum", {"algorithms.grpo.normalise": "token"},
         ("'token-sum' has no counterpart",)),
        (f"{GRPO}algorithm.norm_adv_by_std_in_grpo=False",
         {"algorithms.grpo.scale_rewards": "none", "algorithms.grpo.normalise": "token"}, ()),
        (f"{VERL}algorithm.adv_estimator=rloo", {"trainer.algorithm": "rloo"}, ("here both are of rows",)),
        (f"{VERL}algorithm.adv_estimator=remax actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
         {"trainer.algorithm": "remax"}, ("remax averages over tokens",)),
        (f"{GRPO}{BOTH}", {"algorithms.grpo.kl_estimator": "k3", "algorithms.grpo.kl_in": None},
         ("it has no gradient on average", "use_kl_in_reward: the divergence is in the loss")),
        (f"{GRPO}algorithm.use_kl_in_reward=True algorithm.kl_penalty=abs",
         {"algorithms.grpo.kl_in": "reward", "algorithms.grpo.kl_estimator": "k1"}, ("'abs'", "taken off after")),
        (f"{GRPO}algorithm.rollout_correction.bypass_mode=True",
         {"algorithms.grpo.ratio_from": "behavior", "algorithms.grpo.correction": "none"}, ()),
        (f"{GRPO}+actor_rollout_ref.actor.tis_imp_ratio_cap=4",
         {"algorithms.grpo.correction": "tis", "algorithms.grpo.correction_high": 4.0}, ()),
        (f"{GRPO}algorithm.rollout_correction.rollout_rs=geometric", {"algorithms.grpo.correction": "mis"}, ()),
        (f"{GRPO}algorithm.rollout_correction.rollout_rs=seq_mean_k3", {"algorithms.grpo.correction": "tis"},
         ("rollout_rs = 'seq_mean_k3'",)),
        (f"{GRPO}algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc "
         "custom_reward_function.path=r.py reward_model.reward_manager=dapo", {"buffer.zero_variance": "replace"},
         ("filter_groups.metric = 'acc': groups are filtered by their rewards", "found out from the reward's")),
        (f"{GRPO}data.val_files=b.parquet", {"evaluations.val.every": 50}, ()),
        (f"{GRPO}trainer.v1.trainer_mode=separate_async", {"feeder.max_staleness": 8}, ()),
        (f"{GRPO}+data.apply_chat_template_kwargs={{enable_thinking:False}}",
         {"model.chat_template_kwargs": {"enable_thinking": False}}, ()),
        (f"{GRPO}actor_rollout_ref.model.lora.rank=8", {"model.lora.rank": 8, "model.lora.alpha": 32.0}, ()),
        (f"{GRPO}--config-name=mine", {}, ("takes the config mine.yaml, which is not here",)),
        (f"case gpu in\n  gpu)\n    N=5\n    ;;\n  *)\n    N=6\n    ;;\nesac\nM=\n{GRPO}"
         "actor_rollout_ref.rollout.n=$N data.seed=${M:-3}", {"feeder.group_size": 5, "run.seed": 3}, ()),
        (f"R=1e-6\nif [ $1 ]; then\n  R=2e-6\nfi\nS=1\n{GRPO}actor_rollout_ref.actor.optim.lr=$R data.seed=$S",
         {"trainer.lr": 2e-6, "run.seed": 1}, ("optim.lr: the script sets it in branches of an `if`; '2e-6'",)),
        (f'A="\n data.train_batch_size=512 \\\n"\nB=(data.max_response_length=9 data.shuffle=False)\n{GRPO}$A',
         {"feeder.groups_per_batch": 512, "sampling.max_tokens": 9, "tasksets.a.shuffle": False,
          "trainer.minibatches": 2}, ()),
    ],
)  # fmt: skip
def test_settings_of_verl(text: str, found: dict[str, Any], said: tuple[str, ...], tmp_path: Path) -> None:
    assert_converted("verl", {"run.sh": text}, found, said, tmp_path)


PRIME = '[[orchestrator.train.source]]\nname = "a"\nenv.taskset.id = "a"\n'


@each(
    ("text", "found", "said"),
    [
        (f"seq_len = 4096\n{PRIME}", {"sampling.max_tokens": 4096, "algorithms.dppo.scale_rewards": "none",
                                      "buffer.zero_variance": "keep", "feeder.max_staleness": 8}, ()),
        (f"[trainer.model.lora]\n{PRIME}", {"model.lora.rank": 16, "model.lora.alpha": 32.0}, ()),
        (f'[trainer.scheduler]\ntype = "linear"\n{PRIME}', {"trainer.warmup_steps": 10, "trainer.lr_schedule": None},
         ("falls in the last 10 steps alone",)),
        (f"[orchestrator]\ngroup_size = 8\n{PRIME}"
         'algo.type = "opd"\ncurriculum.gates.g.type = "advantage_range"\nsampling.temperature = 0.5\n',
         {"buffer.zero_variance": "replace", "tasksets.a.sampling": {"temperature": 0.5}}, ("source.algo",)),
        (f"[orchestrator.train.sampling]\ntemperature = 0.7\n[orchestrator.eval]\nsampling.top_p = 0.9\n"
         f'[[orchestrator.eval.source]]\nname = "b"\nenv.taskset.id = "b"\nsampling.max_completion_tokens = 9\n{PRIME}',
         {"sampling.temperature": 0.7, "evaluations.b.sampling": {"top_p": 0.9, "max_tokens": 9}}, ()),
        (f'[orchestrator]\nalgo.type = "max_rl"\n{PRIME}', {"trainer.algorithm": "maxrl"}, ("maxrl here has PPO",)),
        ('max_steps = 9\n[data]\nname = "a"\n[optim]\nlr = 3e-5\n', {"trainer.lr": 3e-5, "run.steps": 9}, ()),
    ],
)  # fmt: skip
def test_settings_of_prime_rl(text: str, found: dict[str, Any], said: tuple[str, ...], tmp_path: Path) -> None:
    assert_converted("prime-rl", {"rl.toml": text}, found, said, tmp_path)


def assert_converted(
    system: str, files: dict[str, str], found: dict[str, Any], said: tuple[str, ...], folder: Path
) -> None:
    """The run file has these settings, None for one that it leaves out, and the report says these words."""
    done = convert_config(system, written(folder, files))
    values = tomllib.loads(done.run_file)
    for key, value in found.items():
        section, _, name = key.rpartition(".")
        assert (setting(values, section) if section else values).get(name) == value, key
    text = re.sub(r"\n\s{4,}", " ", done.to_text())
    assert all(one in text for one in said), text
    listed = {one.there.split(" ")[0] for one in done.not_taken}
    assert not listed & {one.there.split(" ")[0].rstrip(":,") for one in done.taken}


OWN_FIELDS = """
from dataclasses import dataclass, field
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser


@dataclass
class Own(ScriptArguments):
    system_prompt: str = field(default=None)
    asked: str = "problem"
    rewards: str = "x"


@dataclass
class Trained(GRPOConfig):
    learning_rate: float = 5e-6
    max_grad_norm: float = 0.3


def short(completions, **kwargs):
    return [-len(one[0]["content"]) for one in completions]


def main(script, training, model):
    def talk(row, column=script.asked):
        prompt = []
        if script.system_prompt is not None:
            prompt.append({"role": "system", "content": script.system_prompt})
        prompt.append({"role": "user", "content": row[column]})
        return {"prompt": prompt}

    data = load_dataset(script.dataset_name).map(talk)
    GRPOTrainer(model=model.model_name_or_path, reward_funcs=short, args=training, train_dataset=data["train"]).train()


if __name__ == "__main__":
    main(*TrlParser((Own, Trained, ModelConfig)).parse_args_and_config())
"""


@each(
    ("script", "yaml", "columns", "system"),
    [
        (OWN_FIELDS, "system_prompt: Be short.\nasked: riddle", {"messages": "riddle"}, "Be short."),
        (OWN_FIELDS, "max_steps: 9", {"messages": "problem"}, None),
        (
            OWN_FIELDS.replace("prompt = []", "prompt = []\n        prompt.extend(FEW)"),
            "max_steps: 9",
            {"messages": "prompt"},
            None,
        ),
    ],
)
def test_a_map_reads_fields_of_the_scripts_own_dataclass(
    script: str, yaml: str, columns: Any, system: str | None, tmp_path: Path
) -> None:
    files = {"walk.py": script, "grpo.yaml": f"model_name_or_path: m\ndataset_name: org/x\nrewards: y\n{yaml}\n"}
    files["grpo.yaml"] += "max_grad_norm: 0.5\n"
    done = convert_config("trl", written(tmp_path, files))
    values = tomllib.loads(done.run_file)
    assert (values["trainer"]["lr"], values["trainer"]["max_grad_norm"]) == (5e-6, 0.5), "its own default, and a given"
    section = values["tasksets"]["train"]
    assert (section.get("columns"), section.get("system")) == (columns, system)
    asked = [one for one in done.to_do if "dataset.map: prompt is line" in one]
    assert bool(asked) is ("FEW" in script) is (section["source"] == "jsonl:walk_rows.jsonl"), done.to_do
    assert [(one.there, one.reason) for one in done.not_taken] == [('rewards = "y"', "no counterpart here")]


LOADED = """
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from trl import GRPOConfig, GRPOTrainer


def short(completions, **kwargs):
    return [-len(one) for one in completions]


def asked(number, word):
    return {"prompt": f"Say {number} {word}"}


data = load_dataset("json", data_files="rows.jsonl", split="train").map(MAP)
MODEL
args = GRPOConfig("o", max_steps=3, num_iterations=2, sync_ref_model=True, ref_model_sync_steps=64)
GRPOTrainer(model=model, reward_funcs=short, args=args, train_dataset=data).train()
"""
ASKED = "lambda row: asked(row['n'], row['w'])"
FOUR = (
    "quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, "
    "bnb_4bit_quant_type='fp4', bnb_4bit_compute_dtype='bfloat16')"
)


@each(
    ("model", "rows", "found", "said"),
    [
        (f"model = AutoModelForCausalLM.from_pretrained('m', {FOUR}).to('cuda')\n"
         "model = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=['q_proj']))", ASKED,
         {"model.path": "m", "model.quantize": "nf4", "model.lora": {"rank": 4, "alpha": 16.0, "targets": ["q_proj"]},
          "tasksets.train.options": {"template": "Say {n} {w}"}, "trainer.reference_every": 32},
         ("quantization_config.bnb_4bit_use_double_quant = true: the scales of model.quantize stay float32",
          "quantization_config.bnb_4bit_quant_type = 'fp4': nf4 stands in its place",
          "quantization_config.bnb_4bit_compute_dtype = \"bfloat16\": what is computed in is model.dtype")),
        ("four = BitsAndBytesConfig(load_in_4bit=True)\n"
         "model = AutoModelForCausalLM.from_pretrained('m', quantization_config=four)\n"
         "model = get_peft_model(model, LoraConfig(r=4))", ASKED, {"model.quantize": "nf4"},
         ("quantization_config.bnb_4bit_quant_type = 'fp4, the default of transformers': nf4 stands in its place",)),
        ("model, tokenizer = FastLanguageModel.from_pretrained(model_name='m', load_in_4bit=True)\n"
         "model = FastLanguageModel.get_peft_model(model, r=8)", ASKED, {"model.quantize": "nf4"}, ()),
        ("model, tokenizer = FastLanguageModel.from_pretrained(model_name='m', load_in_4bit=False)\n"
         "model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=16, random_state=3)",
         "lambda row: made_elsewhere(row)",
         {"model.path": "m", "model.lora": {"rank": 8, "alpha": 16.0, "targets": "all-linear"}},
         ("dataset.map is line", "random_state = 3")),
        ("model = AutoModelForCausalLM.from_pretrained('m', device_map=here, torch_dtype=mine())\n"
         "model, tokenizer = setup_chat_format(get_peft_model(model, LoraConfig(r=2)), tokenizer)", ASKED,
         {"model.path": "m", "model.lora": {"rank": 2, "alpha": 8.0, "targets": "all-linear"}},
         ("torch_dtype: could not be read", "setup_chat_format\": the chat template that it gives")),
        ("model = 'm'", "lambda row: {'prompt': tokenizer.apply_chat_template(row['w'])}", {"model.lora": None},
         ("tasksets.train.chat_template",)),
    ],
)  # fmt: skip
def test_models_that_a_script_loads_itself(
    model: str, rows: str, found: dict[str, Any], said: tuple[str, ...], tmp_path: Path
) -> None:
    files = {"train.py": LOADED.replace("MAP", rows).replace("MODEL", model)}
    assert_converted("trl", files, found, said, tmp_path)
    text = convert_config("trl", [tmp_path / "train.py"]).to_text()
    assert ("fp4" in text) is ("fp4" in "".join(said)), "where nobody says it, transformers' kind, and unsloth's is nf4"


STEPWISE = """
from functools import partial
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

SCALE = 2.0


def right(completions, answer, **kwargs):
    return [float(said == one) for said, one in zip(completions, answer)]


def weighted(completions, weight, **kwargs):
    return [weight for one in completions]


def made(low):
    def clipped(completions, **kwargs):
        return [low * SCALE for one in completions]
    return clipped


class Short:
    def __init__(self, most):
        self.most = most

    def __call__(self, completions, **kwargs):
        return [float(len(one) <= self.most) for one in completions]


rewards = [right]
rewards.append(Short(most=3))
rewards += [partial(weighted, weight=0.5)]
rewards.extend([made(-1.0)])
rewards.insert(0, weighted)
MORE
data = load_dataset("json", data_files="rows.jsonl", split="train").rename_columns({"q": "prompt"})
args = GRPOConfig("o", reward_weights=WEIGHTS)
GRPOTrainer("m", rewards, args, data).train()
"""


def test_a_list_of_rewards_is_read_as_the_script_makes_it_step_by_step(tmp_path: Path) -> None:
    script = STEPWISE.replace("MORE", "").replace("WEIGHTS", "[1, 2, 3, 4, 5]")
    done = convert_config("trl", written(tmp_path, {"train.py": script, "rows.jsonl": '{"q": "2+2="}\n'})[:1])
    taskset = setting(tomllib.loads(done.run_file), "tasksets.train")
    names = [one["name"].partition(":")[2] for one in taskset["reward"]]
    assert names == ["weighted", "right", "short_1", "weighted_1", "made_1"] and not done.to_do
    assert [one["weight"] for one in taskset["reward"]] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert taskset["columns"] == {"prompt": "q"} and taskset["chat_template"] == BARE  # texts are bare in TRL
    space: dict[str, Any] = {}
    exec(done.modules[0].text, space)
    assert [space[name](["abc", "abcd"])[1] for name in names[2:]] == [0.0, 0.5, -2.0]

    script = STEPWISE.replace("MORE", "if mine():\n    rewards.append(right)").replace("WEIGHTS", "[1, 2]")
    done = convert_config("trl", written(tmp_path, {"train.py": script})[:1])
    assert any("rewards.append(right), which a branch decides" in one for one in done.to_do)
    assert any("reward_weights [1, 2]: 6 rewards were read" in one for one in done.to_do)


@each(
    ("files", "found", "said"),
    [
        ({"a.yaml": "num_processes: 2\naccelerate_config: zero3\nmax_steps: '30'\n"},
         {"feeder.groups_per_batch": 4, "run.steps": 30}, ("launcher.accelerate_config",)),
        ({"a.yaml": "accelerate_config: zero3\n"}, {"feeder.groups_per_batch": 2},
         ("accelerate_config zero3 says how many processes train, and is not read here",)),
        ({"run.sh": "accelerate launch --config_file acc.yaml train.py --config a.yaml", "a.yaml": "",
          "acc.yaml": "num_processes: 4\nmixed_precision: bf16\n",
          "train.py": STEPWISE.replace("MORE", "").replace("WEIGHTS", "None, per_device_train_batch_size=16")},
         {"feeder.groups_per_batch": 8}, ()),
    ],
)  # fmt: skip
def test_processes_that_only_accelerates_settings_name(
    files: dict[str, str], found: dict[str, Any], said: tuple[str, ...], tmp_path: Path
) -> None:
    yaml = f"model_name_or_path: m\nper_device_train_batch_size: 16\nreward_funcs: [accuracy_reward]\n{files['a.yaml']}"
    paths = written(tmp_path, {**files, "a.yaml": yaml if len(files) == 1 else "seed: 3\n"})
    done = convert_config("trl", paths[:1])
    values, text = tomllib.loads(done.run_file), done.to_text()
    assert {key: setting(values, key) for key in found} == found
    assert all(one in text for one in said) and ("is not read here" in text) == any(
        "not read here" in one for one in said
    )


PLAIN = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

class Mine(GRPOTrainer):
    def compute_loss(self, *given):
        return 0

def right(completions, answer, **kwargs):
    return [float(one in said) for said, one in zip(completions, answer)]

def made(path):
    rows = load_dataset("json", data_files=path, split="train")
    IN_FUNCTION
    return rows

model = AutoModelForCausalLM.from_pretrained("m")
tokenizer = AutoTokenizer.from_pretrained("m")
dataset = made("rows.jsonl")
args = GRPOConfig(output_dir="out", learning_rate=1e-6)
BEFORE
trainer = GRPOTrainer(model=model, reward_funcs=right, args=args, train_dataset=dataset)
AFTER
trainer.train(resume_from_checkpoint=newest())
trainer.model.generation_config.eos_token_id = 1
"""


@each(
    ("place", "statement"),
    [
        ("IN_FUNCTION", "rows.set_transform(mine)"),
        ("BEFORE", "model.resize_token_embeddings(100)"),
        ("BEFORE", "for one in model.parameters():\n    if one.ndim > 1:\n        one.requires_grad = False"),
        ("BEFORE", "core = model.model\ncore.layers[0].requires_grad_(False)"),
        ("BEFORE", "freeze(model)"),
        ("BEFORE", "tokenizer.add_special_tokens({'additional_special_tokens': ['<a>']})\nmodel.tie(tokenizer)"),
        ("BEFORE", "model.generation_config.temperature = 0.5"),
        ("BEFORE", "setattr(args, 'learning_rate', 3e-6)"),
        ("BEFORE", "args.set_lr_scheduler(name='cosine')"),
        ("BEFORE", "if big:\n    pass\nelse:\n    args.learning_rate = 3e-6"),
        ("BEFORE", "try:\n    import fast\nexcept ImportError:\n    args.learning_rate = 3e-6"),
        ("BEFORE", "GRPOTrainer.compute_loss = mine"),
        ("AFTER", "trainer.add_callback(Early())"),
        ("AFTER", "trainer.args.learning_rate = 3e-6"),
        ("AFTER", "trainer.reward_funcs.append(other)"),
        ("AFTER", "with quiet():\n    trainer.create_optimizer = mine"),
        ("Mine", "def compute_loss(self, *given):"),
        (None, "tokenizer.pad_token = tokenizer.eos_token"),
        ("BEFORE", "frozen(1, model)\ndef frozen(one, two):\n    two.requires_grad_(False)"),
        (None, "model.config.use_cache = False\nmodel.print_trainable_parameters()"),
        (None, "def shown(one, two):\n    print(one)\nshown(1, model)\ndataset = dataset.remove_columns('a')"),
        (None, "set_seed(args.seed)"),
        (None, "given = get_quantization_config(more)\nif given is not None:\n    model.config.head = given"),
        ("BEFORE", "if given is not None:\n    model.config.head = given"),
        (None, "print(len(dataset))\nfor row in dataset:\n    print(row)"),
    ],
)  # fmt: skip
def test_what_no_rule_reads_in_a_script_is_to_do(place: str | None, statement: str, tmp_path: Path) -> None:
    script = PLAIN.replace("trainer = GRPOTrainer", "trainer = Mine") if place == "Mine" else PLAIN
    for one in ("IN_FUNCTION", "BEFORE", "AFTER"):
        inserted = statement if one == (place or "BEFORE") else "pass"
        script = script.replace(one, inserted.replace("\n", "\n    ") if one == "IN_FUNCTION" else inserted)
    done = convert_config("trl", written(tmp_path, {"train.py": script, "rows.jsonl": '{"prompt": "a"}\n'})[:1])
    last = statement.splitlines()[-1].strip(" )")
    said = [one for one in done.to_do if last in one or ("3e-06" in one and "3e-6" in last)]
    assert bool(said) is (place is not None), done.to_do
    assert place is not None or not done.to_do


MAPPED = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

HEAD = "Sort {x}:"

def right(completions, answer, **kwargs):
    return [float(one in said[0]["content"]) for said, one in zip(completions, answer)]

def cut(text):
    return text.split("####")[-1].strip()

def ended(text):
    if "####" not in text:
        return None
    return text.split("####")[1].strip()

def made(row, sign="!"):
    BODY

data = load_dataset("json", data_files="rows.jsonl", split="train")BEFORE.map(made)
GRPOTrainer("m", right, GRPOConfig("o"), data).train()
"""
USER = 'return {"prompt": [{"role": "user", "content": CONTENT}], "answer": row["a"]}'


@each(
    ("body", "before", "found"),
    [
        (USER.replace("CONTENT", "row['q']"), "", {"columns": {"messages": "q", "answer": "a"}}),
        (USER.replace("CONTENT", "row['q']"), ".rename_column('word', 'q')",
         {"columns": {"messages": "word", "answer": "a"}}),
        (USER.replace("CONTENT", "row['q'] + sign"), "", {"options": {"template": "{q}!"}}),
        (USER.replace("CONTENT", "f'{HEAD} {row[\"q\"]}'"), "", None),  # braces that a template would fill
        (USER.replace("CONTENT", "row['q'] + row['a']"), "", None),  # may be numbers
        (USER.replace("CONTENT", "row['q'].upper()"), "", None),
        (USER.replace("CONTENT", "row['q']"), ".map(lambda one: {'q': one['q'].upper()})", None),
        (USER.replace("CONTENT", "row['q']"), ".map(lambda one: {'q': one['w'] + '?'})",
         {"columns": {"messages": "w", "answer": "a"}, "options": {"template": "{w}?"}}),
        (USER.replace("CONTENT", "row['q']"), ".filter(good)", None),
        (USER.replace("CONTENT", "row['q']"), ".map(other, batched=True)", None),
        (USER.replace("CONTENT", "row['q']"), ".shuffle(seed=3).select(range(5))",
         {"options": {"size": 5, "shuffle_seed": 3}}),
        (USER.replace("CONTENT", "row['q']"), ".select(range(9)).shuffle(seed=3)", {"options": {"size": 9}}),
        ("if len(row['q']) > 3:\n        row['q'] = 'long'\n    " + USER.replace("CONTENT", "row['q']"), "", None),
        ("changed(row)\n    " + USER.replace("CONTENT", "row['q']"), "", None),
        ("row.update(q='long')\n    " + USER.replace("CONTENT", "row['q']"), "", None),
        (USER.replace("CONTENT", "row['q']").replace("row[\"a\"]", "row['a'].split('####')[0].strip()"), "", None),
        (USER.replace("CONTENT", "row['q']").replace("row[\"a\"]", "row['a'].split(' ')[1]"), "", None),
        (USER.replace("CONTENT", "row['q']").replace("row[\"a\"]", "ended(row['a'])"), "",
         {"options": {"answer_after": "####"}}),
        ("row['q'] += sign\n    " + USER.replace("CONTENT", "row['q']"), "", {"options": {"template": "{q}!"}}),
        ("said = []\n    said.append(dict(role='user', content=row['q']))\n    "
         "return dict(prompt=said, answer=cut(row['a']))", "",
         {"columns": {"messages": "q", "answer": "a"}, "options": {"answer_after": "####"}}),
    ],
)  # fmt: skip
def test_a_map_is_followed_as_far_as_settings_say_it_and_else_its_rows_are_to_be_written(
    body: str, before: str, found: dict[str, Any] | None, tmp_path: Path
) -> None:
    files = {"train.py": MAPPED.replace("BODY", body).replace("BEFORE", before), "rows.jsonl": ""}
    done = convert_config("trl", written(tmp_path, files)[:1])
    section = setting(tomllib.loads(done.run_file), "tasksets.train")
    expected = found or {"source": "jsonl:train_rows.jsonl", "columns": {"messages": "prompt"}}
    expected = {"columns": {"messages": "q", "answer": "a"}, **expected}
    assert {key: section.get(key) for key in expected} == expected, section
    assert any("train_rows.jsonl" in one for one in done.to_do) is (found is None), done.to_do


ROWS_MADE = """
import os
from datasets import Dataset, load_dataset
from trl import GRPOConfig, GRPOTrainer

SIGN = os.environ.get("SIGN", "!")
kept = []
for word in ("ba", "dc"):
    kept.append({"q": word, "a": "".join(sorted(word))})


def short(completions, **kwargs):
    return [-len(one) for one in completions]


def main():
    def talk(row):
        return {"prompt": [{"role": "user", "content": row["q"].upper() + SIGN}], "answer": row["a"]}

    BEFORE
    data = Dataset.from_list(kept).map(talk, remove_columns=["q", "a"])
    print(len(data))
    GRPOTrainer("m", short, GRPOConfig("o"), data).train()


if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_the_part_of_a_script_that_makes_its_rows_writes_them(tmp_path: Path) -> None:
    script = written(tmp_path, {"train.py": ROWS_MADE.replace("BEFORE", "size = 3")})
    module = next(one for one in convert_config("trl", script).modules if one.name == "write_train_rows.py")
    assert "GRPOTrainer" not in module.text and "short" not in module.text and "size" not in module.text
    exec(module.text, {"__file__": str(tmp_path / module.name), "__name__": "__main__"})
    rows = [json.loads(line) for line in (tmp_path / "train_rows.jsonl").read_text().splitlines()]
    assert rows == [
        {"prompt": [{"role": "user", "content": f"{word}!"}], "answer": word.lower()[::-1]} for word in ("BA", "DC")
    ]

    drawn = ROWS_MADE.replace("BEFORE", "asked = Dataset.from_list(random.sample(kept, 1))").replace(
        ", data)", ", data, asked)"
    )
    drawn = drawn.replace("from_list(kept)", "from_list(random.sample(kept, 2))").replace(
        "import os", "import os\nimport random"
    )
    done = convert_config("trl", written(tmp_path, {"train.py": drawn}))  # both draw of one sequence
    assert all(
        "sample(kept, 1)" in one.text and "sample(kept, 2)" in one.text for one in done.modules if "rows" in one.name
    )

    script = written(tmp_path, {"train.py": ROWS_MADE.replace("BEFORE", "kept[0]['a'] = parser.parse_args().first")})
    done = convert_config("trl", script)  # only a command line has that
    assert all(one.name != "write_train_rows.py" for one in done.modules)
    assert any('`dataset.to_json("train_rows.jsonl")` in the script does' in one for one in done.to_do)


@each(
    ("lines", "rate"),
    [
        ("if 'llama' in NAME:\n    args.learning_rate = 1.0\nelse:\n    args.learning_rate = 2.0", 2.0),
        ("big = not NAME.startswith('x') and len(NAME) > 3", None),
        ("big = False\nif big or NAME == 'qwen':\n    args.learning_rate = 3.0", 3.0),
        ("if given.fast:\n    args.learning_rate = 4.0", 1e-6),
        ("if not given.fast and 2 > 1:\n    args.learning_rate = 5.0", 5.0),
        ("if elsewhere():\n    args.learning_rate = 6.0", None),
        ("for one in (1, 2):\n    args.learning_rate = one", None),
    ],
)
def test_a_branch_whose_condition_is_known_is_followed(lines: str, rate: float | None, tmp_path: Path) -> None:
    head = "NAME = 'qwen'\nparser = argparse.ArgumentParser()\nparser.add_argument('--fast', action='store_true')\n"
    more = "\nif big:\n    args.learning_rate = 9.0" if "big = not" in lines else ""
    script = PLAIN.replace("BEFORE", f"given = parser.parse_args()\n{lines}{more}").replace("IN_FUNCTION", "pass")
    script = head + script.replace("AFTER", "pass")
    done = convert_config("trl", written(tmp_path, {"train.py": script, "rows.jsonl": ""})[:1])
    assert tomllib.loads(done.run_file)["trainer"]["lr"] == (1e-6 if rate is None else rate)
    assert any(one.startswith("learning_rate: could not be read") for one in done.to_do) is (rate is None), done.to_do


def test_a_second_trainer_of_a_script_is_to_do(tmp_path: Path) -> None:
    script = (
        PLAIN.replace("BEFORE", "pass").replace("IN_FUNCTION", "pass").replace("AFTER", "SFTTrainer(model).train()")
    )
    done = convert_config("trl", written(tmp_path, {"train.py": script, "rows.jsonl": ""})[:1])
    assert tomllib.loads(done.run_file)["trainer"]["algorithm"] == "grpo"
    assert any("SFTTrainer(model)" in one for one in done.to_do)
