"""`rftstream convert-config`: recipes of TRL, verl and prime-rl become run files that `rftstream check` accepts."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rftstream.config import aliases, loader
from rftstream.config.placement import Gpu, Machine
from rftstream.config.sections import MakeModel, ModelSection
from rftstream.integrations.foreign_configs import MOST_GPUS, convert_config, prime_rl, verl
from rftstream.integrations.foreign_configs.conversion import Conversion
from rftstream.integrations.foreign_configs.trl import rules as trl
from rftstream.integrations.foreign_configs.trl.rewards import PLACEHOLDER
from rftstream.integrations.foreign_configs.trl.sources import BARE
from rftstream.models import machine
from rftstream.models.folders.folder import prepare_model
from rftstream.preflight.checks.check import check
from tests.commands import call, called
from tests.made import made_once, shared_folder
from tests.suite.each import each
from tests.unit.integrations.recipes import RECIPES, Recipe

MODEL, SEEING = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-VL-3B-Instruct"
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAQAAAAECAIAAAAmkwkpAAAAEElEQVR4nGP8z4AATAxEcQAz0QEHOoQ+uAAAAABJRU5ErkJggg=="
OFF: tuple[Any, ...] = (False, None, 0, -1, {}, "none", "no", "error", "console", ["console"], "colocate", "steps")
"""Values of settings that need not be told: they are the default there, and what they say is so here."""
ROW: dict[str, Any] = {
    "question": "2 + 3?", "answer": "#### 5", "solution": "5", "data_source": "sums",
    "prompt": [{"role": "user", "content": "2 + 3?"}], "reward_model": {"ground_truth": "5", "style": "rule"},
    "extra_info": {"question": "2 + 3?", "answer": "5"},
}  # fmt: skip
HUB: dict[str, dict[str, Any]] = {
    "openai/gsm8k/main/train.jsonl": {key: ROW[key] for key in ("question", "answer", "solution")},
    "org/chats/train.jsonl": {"messages": [*ROW["prompt"], {"role": "assistant", "content": "5"}]},
    "org/math/train.jsonl": {"prompt": ROW["prompt"], "solution": "5"},
    "org/facts/train.jsonl": {"question": "Who?", "answer": "me"},
    "org/facts/test.jsonl": {"question": "What?", "answer": "that"},
    "org/charts/train.jsonl": {
        "problem": "How many?",
        "original_question": "?",
        "image": f"data:image/png;base64,{PICTURE}",
        "solution": "5",
    },
    "org/pairs/train.jsonl": {"prompt": "2 + 3?", "chosen": "5", "rejected": "6"},
    "sums.jsonl": {"prompt": "2 + 3?", "answer": "5"},
    "chats.jsonl": {"prompt": ROW["prompt"], "solution": "5"},
}


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model and small data sets under the names that the recipes have for those of the hub."""

    def make(folder: Path) -> None:
        characters = "".join(map(chr, range(32, 127))) + "\n"
        made = MakeModel(characters=characters, width=8, layers=1, heads=1, context=16384)
        spec = prepare_model(ModelSection(make=made), folder / "made", 0)
        shutil.copytree(Path(spec.folder), folder / MODEL)
        spec = prepare_model(ModelSection(make=dataclasses.replace(made, vision=True)), folder / "seeing", 0)
        shutil.copytree(Path(spec.folder), folder / SEEING)
        for name, row in HUB.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text((json.dumps(row) + "\n") * 20)
        image = {"images": [{"bytes": base64.b64decode(PICTURE)}], "prompt": [{"role": "user", "content": "<image>2?"}]}
        chats = HUB["org/chats/train.jsonl"]
        for place, row in (("gsm8k", ROW), ("geo3k", {**ROW, **image}), ("chats", chats)):
            (folder / "data" / place).mkdir(parents=True, exist_ok=True)
            for name in ("train", "test"):
                pq.write_table(pa.Table.from_pylist([row] * 4), folder / "data" / place / f"{name}.parquet")

    return made_once(shared_folder(tmp_path_factory), "foreign", make)


def written(folder: Path, files: dict[str, str]) -> list[Path]:
    for name, text in files.items():
        (folder / name).write_text(text)
    return [folder / name for name in files]


def setting(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


def is_said(name: str, value: Any, said: str) -> bool:
    """Whether the run file or the report names a setting, or has its value in another's place: rows and models."""
    named = re.search(rf"\b{name.rpartition('.')[2]}\b", said) is not None
    is_place = name.startswith(("model_name", "dataset_", "eval_dataset", "load_dataset", "eval_load", "dataset."))
    return named or is_place or (isinstance(value, str) and value in said) or (name == "use_peft" and "lora_r" in said)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_recipes_pass_check(recipe: Recipe, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "work"
    shutil.copytree(world, place)
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    given: dict[str, Any] = {}
    begin = Conversion.__init__

    def recorded(self: Conversion, system: str, settings: dict[str, Any], *more: Any) -> None:
        given.update(settings)
        begin(self, system, settings, *more)

    monkeypatch.setattr(Conversion, "__init__", recorded)
    files = written(place, recipe.files)
    launched = any(file.suffix == ".sh" for file in files) and recipe.system == "trl"
    files = [file for file in files if file.suffix != ".yaml" or not launched]  # a launch names its YAML
    done = convert_config(recipe.system, files)
    if done.num_gpus:  # the config says how many; others run on what is here
        done = convert_config(recipe.system, files, gpus=0)
    said = done.run_file + done.to_text()
    dropped = {name for name, value in given.items() if value not in OFF and not is_said(name, value, said)}
    assert dropped == set(recipe.quiet)
    values = tomllib.loads(done.run_file)
    assert {key: setting(values, key) for key in recipe.settings} == recipe.settings
    assert "could not" not in done.to_text()
    listed = [one.there for one in done.not_taken]
    assert all(any(one.startswith(name) for one in listed) for name in recipe.not_taken), listed
    modules = {**recipe.modules, **{one.name: one.text for one in done.modules}}
    written(place, {**modules, "run.toml": done.run_file})
    asked = " ".join(done.to_do)
    assert all(name.removesuffix(".py") in asked for name in recipe.modules), asked
    if "verifiers" in done.run_file:
        (place / "venvs/verifiers/bin").mkdir(parents=True)
        (place / "venvs/verifiers/bin/python").symlink_to(sys.executable)
    for name in (module.removesuffix(".py") for module in modules):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # so that the one of here is forgotten afterwards
        del sys.modules[name]
    errors = check(loader.load([place / "run.toml"], env={})).errors
    assert [one for one in errors if not recipe.refused or recipe.refused not in one] == []
    assert bool(errors) == bool(recipe.refused)


@pytest.mark.parametrize(
    ("system", "files", "error"),
    [
        ("trl", {"a.py": "def (:"}, "a.py: not Python"),
        ("trl", {"a.py": "print(1)"}, "no trainer in it"),
        ("trl", {"a.py": "KTOTrainer(model=m)"}, "KTOTrainer has no counterpart here: dpo learns"),
        ("trl", {"a.yaml": "- 1\n"}, "a list, expected a mapping"),
        ("trl", {"a.yaml": "a: [1"}, "not YAML"),
        ("trl", {"a.yaml": "learning_rate: 1e-6"}, "add --trainer grpo"),
        ("trl", {"a.py": "SFTTrainer(model=pick())"}, r"could not be read: line 1: pick\(\)"),
        ("trl", {"a.yaml": "reward_funcs: [a.b]\nseed: 1", "b.yaml": "seed: 2"}, "seed: .*a.yaml says 1"),
        ("verl", {"a.sh": "echo"}, "no override such as"),
        ("verl", {"a.yaml": "data: {train_batch_size: 1}"}, "no actor_rollout_ref.model.path"),
        ("trl", {"a.yaml": "actor_rollout_ref: {model: {path: m}}"}, "it looks like a config of verl: `conv"),
        ("verl", {"a.yaml": "model_name_or_path: m"}, "looks like a config of trl"),
        ("prime-rl", {"a.toml": "max_steps = 1", "b.toml": "max_steps = 2"}, "max_steps: .*a.toml says 1"),
        ("prime-rl", {"a.toml": "max_steps = 1\n[trainer]\n"}, "orchestrator.train.source"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said(system: str, files: dict[str, str], error: str, tmp_path: Path) -> None:
    result = call("convert-config", system, *written(tmp_path, files))
    assert result.exit_code == 2
    assert re.search(error, result.output, re.DOTALL), result.output


def test_a_script_that_makes_its_config_elsewhere_is_completed_by_a_yaml(tmp_path: Path) -> None:
    script = (
        "parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))\n"
        "script, training, model = parser.parse_args_and_config()\n"
        "if script.long:\n    data = load_dataset('long')\nelse:\n    data = load_dataset('short')\n"
        "trainer = GRPOTrainer(model=model.model_name_or_path, args=training, "
        "train_dataset=data, reward_funcs=make())\n"
    )
    files = written(tmp_path, {"train.py": script, "grpo.yaml": f"model_name_or_path: {MODEL}\nmax_steps: 5\n"})
    done = called("convert-config", "trl", *files)
    assert not {"model", "args", "train_dataset", "reward_funcs"} & {one["there"] for one in done["not_taken"]}
    asked = "\n".join(done["to_do"])
    assert re.search(r"train_rows.jsonl .* bound in a branch", asked) and "make()" in asked
    assert tomllib.loads(done["run_file"])["run"]["steps"] == 5


def test_rewards_that_a_yaml_names_are_looked_up_in_the_scripts_table(tmp_path: Path) -> None:
    script = (
        "def right(completions):\n    return [1.0]\ndef short(completions):\n    return [0.5]\n"
        "REWARDS = {'r': right, 's': short}\n"
        "script, training, model = TrlParser(Script).parse_args_and_config()\n"
        "def rewards_of(given):\n    found = [REWARDS[one] for one in given.reward_funcs]\n    return found\n"
        "GRPOTrainer(model.model_name_or_path, rewards_of(script), args=training)\n"
    )
    yaml = f"model_name_or_path: {MODEL}\nreward_funcs: [s, NAME]\nreward_weights: [1, 2]\n"
    for name, found in (("r", "train_rewards:right"), ("no", f"train_rewards:{PLACEHOLDER}")):
        done = called(
            "convert-config", "trl", *written(tmp_path, {"train.py": script, "a.yaml": yaml.replace("NAME", name)})
        )
        rewards = tomllib.loads(done["run_file"])["tasksets"]["train"]["reward"]
        names = [one["name"] for one in (rewards if isinstance(rewards, list) else [rewards])]
        assert names[-1] == found, name


def test_a_function_in_another_one_reads_names_of_the_module(tmp_path: Path) -> None:
    script = (
        f"{HEAD}SYSTEM = 'Answer shortly.'\n{OWN}"
        "def main():\n"
        "    def talk(row):\n"
        "        asked = {'role': 'user', 'content': row['question']}\n"
        "        return {'prompt': [{'role': 'system', 'content': SYSTEM}, asked]}\n"
        f"    GRPOTrainer(model='{MODEL}', reward_funcs=accuracy_reward, args=GRPOConfig('out'),"
        f" train_dataset={ROWS}.map(talk))\n"
        "main()\n"
    )
    done = called("convert-config", "trl", *written(tmp_path, {"train.py": script}))
    section = tomllib.loads(done["run_file"])["tasksets"]["train"]
    assert (section["source"], section["system"]) == ("jsonl:rows.jsonl", "Answer shortly.")


HEAD = "import os\nfrom datasets import Dataset, load_dataset\nfrom trl import GRPOConfig, GRPOTrainer\n"
TRL = "from trl.rewards import accuracy_reward\n"
OWN = "def accuracy_reward(completions, **kwargs):\n    return [0.0 for _ in completions]\n"
SOLVED = "HEAD = 'Sort: {q}'\ndef accuracy_reward(completions, solution):\n    return []\n"
ROWS = "load_dataset('json', data_files='rows.jsonl', split='train')"
CHATS = "load_dataset('json', data_files='chats.jsonl', split='train')"


@pytest.mark.parametrize(
    ("head", "data", "settings", "found", "said"),
    [
        (TRL, CHATS, "", {"reward": "math", "source": "jsonl:chats.jsonl",
                          "columns": {"messages": "prompt", "answer": "solution"}}, ()),
        (OWN, CHATS, "", {"reward": "train_rewards:accuracy_reward", "columns": None},
         ("train_rewards.py: accuracy_reward with what is used",)),
        (f"async {OWN}", CHATS, "", {"reward": "train_rewards:accuracy_reward", "columns": None}, ()),
        ("from mine import accuracy_reward\n", CHATS, "", {"reward": "mine:accuracy_reward"}, ()),
        (OWN, "load_dataset('json', data_files={'train': 'a.jsonl', 'test': 'b.jsonl'})['test']", "",
         {"source": "jsonl:b.jsonl"}, ()),
        (OWN, "load_dataset('json', data_files={'train': 'a.jsonl', 'test': 'b.jsonl'}, split='no')", "",
         {"source": "jsonl:train_rows.jsonl"}, ("JSON lines to train_rows.jsonl", "json files: a.jsonl, b.jsonl")),
        (OWN, "load_dataset('json', data_files=['a.jsonl'], data_dir='d')['train']", "",
         {"source": "jsonl:d/a.jsonl"}, ()),
        (OWN, "load_dataset('json', data_files=['a.jsonl', 'b.jsonl'])['train']", "",
         {"source": "jsonl:train_rows.jsonl"}, ("json files: a.jsonl, b.jsonl",)),
        (OWN, "load_dataset('json', data_files='list.json')['train']", "",
         {"source": "jsonl:train_rows.jsonl"}, ("json files: list.json",)),
        (OWN, "load_dataset('csv', data_files='a.csv', split='train[:100]')", "",
         {"source": "jsonl:train_rows.jsonl", "options": None},
         ("tasksets.train.source", "csv files: a.csv")),
        (OWN, "load_dataset('parquet', data_files='p/*.parquet', split='train[10:]').select(range(5))", "",
         {"source": "parquet:p/*.parquet", "options": {"skip": 10, "size": 5}}, ()),
        (OWN, "load_dataset('org/x', split='train[5:9]')", "",
         {"source": "hf:org/x", "options": {"split": "train", "skip": 5, "size": 4}}, ()),
        (OWN, "load_dataset('org/x', split='train[:10%]', data_files='a.json')", "",
         {"source": "jsonl:train_rows.jsonl", "options": None}, ("the split is 'train[:10%]', which no setting does",)),
        (OWN, "Dataset.from_json('a.jsonl')", "", {"source": "jsonl:a.jsonl"}, ()),
        (OWN, "Dataset.from_json('a.jsonl').skip(3)", "", {"source": "jsonl:a.jsonl", "options": {"skip": 3}}, ()),
        (OWN, "Dataset.from_json('a.jsonl').skip(3).take(2)", "", {"source": "jsonl:train_rows.jsonl"}, ()),
        (OWN, "Dataset.from_list([{}])", "", {"source": "jsonl:train_rows.jsonl"},
         ("it writes train_rows.jsonl", "line 6: Dataset.from_list")),
        (OWN, "Dataset.from_dict({}).shuffle()", "", {}, ("tasksets.train.source", "line 6: Dataset.from_dict")),
        (OWN, CHATS, "num_generations=int(os.environ.get('N', 16)), max_steps=int(os.getenv('M', default='5'))",
         {"feeder.group_size": 16, "run.steps": 5}, ("N = 16, M = 5",)),
        (OWN, CHATS, "num_generations=int(os.environ['N'])", {"feeder.group_size": 8},
         ("num_generations: could not", "line 7: os.environ['N']; 8 stands in its place")),
        ("accuracy_reward = lambda completions: [0.0]\n", CHATS, "", {"reward": "train_rewards:accuracy_reward"}, ()),
        ("accuracy_reward = made()\n", CHATS, "", {"reward": f"train_rewards:{PLACEHOLDER}"},
         ("line 4: made()): put a reward's name",)),
        (OWN, f"{ROWS}.map(lambda row: {{'prompt': f'Sort {{row[\"q\"]}}!', 'level': row['grade']}})", "",
         {"options": {"template": "Sort {q}!"}, "columns": None}, ()),
        (SOLVED, f"{ROWS}.map(lambda row: {{'prompt': HEAD.format(q=row['q']), 'solution': row['answer']}})", "",
         {"options": {"template": "Sort: {q}"}, "columns": None}, ("; solution is called answer there",)),
        (SOLVED.replace("[]", "['<solution>' in one for one in completions]"),
         f"{ROWS}.map(lambda row: {{'prompt': row['q'], 'solution': row['answer']}})", "", {"columns": {"prompt": "q"}},
         ("solution is the column answer of the rows", "call the parameter of the reward answer")),
        (OWN, f"{ROWS}.map(lambda row: {{'prompt': str(len(row['q']))}})", "", {"options": None},
         ("it writes train_rows.jsonl", "dataset.map: prompt is str(len(row['q'])), which no setting does")),
        (SOLVED, f"{ROWS}.map(lambda row: {{'prompt': row['q'], 'solution': str(row['a'] + row['b'])}})", "",
         {"columns": {"answer": "solution"}, "source": "jsonl:train_rows.jsonl"},
         ("gets: dataset.map: solution is str(row['a'] + ",)),
        (f"{SOLVED}def cut(text):\n    return text.split('####')[1].replace(',', '')\n",
         f"{ROWS}.map(lambda row: {{'prompt': row['q'], 'solution': cut(row['answer'])}})", "",
         {"source": "jsonl:train_rows.jsonl"}, ("dataset.map: solution is cut(row['answer']), which",)),
        (OWN, f"{ROWS}.train_test_split(test_size=0.1)['train']", "",
         {"options": {"skip": 7, "shuffle_seed": 0}, "run.steps": 171}, ("test_size 0.1: 7 rows are held out",)),
        (OWN, f"{ROWS}.select(range(30)).train_test_split(test_size=10)['test'].select(range(4))", "",
         {"options": {"size": 4}, "run.steps": 12}, ()),
        (OWN, "load_dataset('org/x', split='train').train_test_split(0.2)['train']", "",
         {"options": {"split": "train", "skip": 100}}, ("of how many rows is not known here",)),
        (OWN, "Dataset.from_list([{'prompt': [{'role': 'user', 'content': 'a'}]}])", "",
         {"columns": {"messages": "prompt"}}, ()),
        (OWN, ROWS, "warmup_ratio=0.1, num_train_epochs=2, save_strategy='steps'",
         {"run.steps": 128, "trainer.warmup_steps": 13, "passes": None, "trainer.checkpoint_every": None}, ()),
        (OWN, CHATS, "run_name='b', bf16=True, report_to='tensorboard', save_steps=5",
         {"run.name": "b", "model.dtype": "bfloat16", "trackers.tensorboard": "tensorboard",
          "trainer.checkpoint_every": 5}, ()),
        (OWN, CHATS, "foo_bar=1, num_generatoins=4, top_entropy_quantile=0.2", {},
         ("TRL has no setting 'foo_bar'\n", "no setting 'num_generatoins'; did you mean 'num_generations'?",
          "top_entropy_quantile = 0.2: no counterpart here")),
        (OWN, CHATS, "max_steps=12, num_iterations=2, warmup_steps=0.05, save_strategy='epoch', "
         "generation_kwargs={'min_p': 0.1, 'no': 1}, model_init_kwargs={'dtype': 'float32'}), "
         "peft_config=LoraConfig(r=4, use_rslora=True",
         {"trainer.warmup_steps": 1, "sampling.min_p": 0.1, "model.dtype": "float32", "model.lora.alpha": 16.0},
         ("save_strategy = 'epoch': trainer.checkpoint", 'generation_kwargs = {"no": 1}: no counterpart')),
        (OWN, CHATS, "generation_kwargs={'stop': '</a>', 'no': 1}), callbacks=([Mine()]", {"sampling.stop": ["</a>"]},
         ('generation_kwargs = {"no": 1}', 'callbacks = "[Mine()]": a run calls none: run.stop_reward ends it')),
        (f"os.environ['WANDB_PROJECT'] = 'maths'\n{OWN}", f"{ROWS}.take(5)",
         "report_to='wandb', router_aux_loss_coef=0.01, lr_scheduler_type='polynomial'",
         {"trackers.wandb": "maths", "options": {"size": 5}, "trainer.router_aux_coef": 0.01,
          "trainer.lr_schedule": "constant"},
         ("lr_scheduler_type = 'polynomial' has no counterpart: after its warm-up the learning rate stays constant",)),
        (SOLVED, f"{ROWS}.map(lambda row: {{'prompt': row['q'], 'answer': str(row['n'])}})", "",
         {"columns": {"prompt": "q", "answer": "n"}}, ()),
        (OWN, f"{ROWS}.map(lambda row: {{'prompt': 'Sort: ' + row['q']}})", "",
         {"options": {"template": "Sort: {q}"}, "chat_template": BARE}, ()),  # texts are given bare there
        (OWN, "load_dataset('json', data_files='texts.jsonl', split='train')", "",
         {"chat_template": BARE}, ()),
        (OWN, "load_dataset('json', data_files='texts.jsonl', split='train').map(lambda row: {'prompt': f(row)})", "",
         {"chat_template": None}, ("dataset.map: prompt is",)),  # whatever the prompts of the file are
        (OWN, CHATS, "max_steps=30, eval_strategy='steps', eval_steps=0.1), eval_dataset=(data",
         {"evaluations.held-out.every": 3, "chat_template": None}, ()),
        (OWN, CHATS, "max_steps=12, warmup_steps=0.1", {"trainer.warmup_steps": 2}, ()),  # 1.2, as transformers rounds
        (OWN, CHATS, "loss_type='dr_grpo', max_completion_length=64",
         {"algorithms.dr_grpo.scale_rewards": "group", "algorithms.dr_grpo.row_tokens": 64,
          "algorithms.dr_grpo.advantage_eps": 1e-4, "algorithms.dr_grpo.correction": "tis"}, ()),
        (OWN, CHATS, "loss_type='cispo', importance_sampling_level='sequence', epsilon_high=5.0, scale_rewards=False",
         {"algorithms.cispo.max_ratio": 5.0, "algorithms.cispo.scale_rewards": "none"},
         ("importance_sampling_level: cispo has a ratio for each token",)),
        (OWN, CHATS, "loss_type='vespo', use_vllm=True, vllm_importance_sampling_mode='token_mask', beta=0.1",
         {"algorithms.grpo.correction": "mask", "algorithms.grpo.kl_unbiased": True},
         ("loss_type: 'vespo' has no counterpart",)),
        (OWN, CHATS, "eval_strategy='steps', logging_steps=7, steps_per_generation=2), eval_dataset=(data",
         {"evaluations.held-out.every": 4}, ()),
        (OWN, CHATS, "eval_strategy='steps'), eval_dataset=(data", {"evaluations.held-out.every": 10}, ()),
        (OWN, ROWS, "eval_strategy='epoch', per_device_train_batch_size=40), eval_dataset=(data",
         {"evaluations.held-out.every": 12}, ()),  # 64 rows by 5: TRL leaves out the last batch, which is not full
        (OWN, CHATS, "max_steps=1), environment_factory=(Wordle",
         {"environment": "train_environment:write_this_environment"}, ("environment_factory Wordle: write it",)),
        (f"{OWN}def add(a: int):\n    'Add.'\n    return a\n", CHATS, "max_steps=1), tools=([add]",
         {"environments.tools.max_turns": 100, "environments.tools.tools": ["train_tools:add"]}, ()),
        (OWN, CHATS, "max_steps=100), eval_dataset=(data", {"evaluations.held-out.every": 50}, ("eval_strategy 'no'",)),
        (OWN, CHATS, "generation_batch_size=8, gradient_accumulation_steps=4, num_generations=4",
         {"feeder.groups_per_batch": 8, "trainer.minibatches": None}, ()),
        (OWN, CHATS, "num_generations=3, per_device_train_batch_size=8", {"feeder.groups_per_batch": 2},
         ("num_generations 3, rounded from 2.667",)),
    ],
)  # fmt: skip
def test_scripts_of_trl_are_read_as_they_would_run(
    head: str, data: str, settings: str, found: dict[str, Any], said: tuple[str, ...], tmp_path: Path
) -> None:
    call = f"GRPOTrainer('m', accuracy_reward, train_dataset=data, args=GRPOConfig('o', {settings}))"
    others = {"list.json": "[\n{}]", "rows.jsonl": '{"q": "ba"}\n' * 64, "texts.jsonl": '{"prompt": "ba"}\n'}
    files = written(tmp_path, {**others, "train.py": f"{HEAD}{head}data = {data}\n{call}.train()\n"})
    done = convert_config("trl", files[3:])
    values = tomllib.loads(done.run_file)
    for key, value in found.items():
        section, _, name = f"tasksets.train.{key}".rpartition(".") if "." not in key else key.rpartition(".")
        assert setting(values, section).get(name) == value, key
    text = re.sub(r"\n\s{4,}", " ", done.to_text()) + "\n"
    assert all(one in text for one in said), text
    listed = {one.there.split(" ")[0] for one in done.not_taken}
    assert not listed & {one.there.split(" ")[0] for one in done.taken}
    assert not any("does not load" in one for one in done.to_do), done.to_do


@pytest.mark.parametrize(
    ("data", "source"),
    [
        ("load_dataset('csv', data_files='a.csv', split='train')", "file:a.csv"),
        ("load_dataset('json', data_files=['a.jsonl', 'b.json'], split='train')", ["jsonl:a.jsonl", "file:b.json"]),
        ("load_dataset('parquet', data_dir='p', split='train')", "parquet:p"),
        ("load_dataset('json', data_files='a.jsonl', split='train[:10]')", "jsonl:sft_rows.jsonl"),
        ("load_dataset('csv', 'x', data_files='*.csv', split='train[:11]')", "jsonl:sft_rows.jsonl"),
    ],
)
def test_files_of_demonstrations_have_a_source(data: str, source: Any, tmp_path: Path) -> None:
    script = f"{HEAD}SFTTrainer('m', train_dataset={data}).train()\n"
    done = convert_config("trl", written(tmp_path, {"sft.py": script}))
    experts = tomllib.loads(done.run_file)["experts"]
    assert experts["source"] == source and "options" not in experts
    assert ("some of its rows are taken" in done.to_text()) == ("[:10]" in data)


WALK = """
import re
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.rewards import think_format_reward

NUMBER = re.compile("[0-9]+")


def numbers(text):
    return NUMBER.findall(text)


def same_numbers(completions, answer, **kwargs):
    return [float(numbers(said[0]["content"]) == numbers(one)) for said, one in zip(completions, answer)]


if __name__ == "__main__":
    script, training, model = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
    data = load_dataset(script.dataset_name, name=script.dataset_config)

    def make_conversation(row):
        return {"prompt": [{"role": "user", "content": f"Say {row['question']}"}]}

    data = data.map(make_conversation)
    GRPOTrainer(
        model=model.model_name_or_path, args=training, peft_config=get_peft_config(model),
        reward_funcs=[same_numbers, think_format_reward], processing_class=AutoTokenizer.from_pretrained(
            model.model_name_or_path), train_dataset=data[script.dataset_train_split],
        eval_dataset=data[script.dataset_test_split],
    ).train(resume_from_checkpoint=True)
"""
WALK_YAML = f"report_to: wandb\nmodel_name_or_path: {MODEL}\ndataset_name: org/x\nuse_peft: true\nuse_vllm: true\n"


@pytest.mark.parametrize("yaml", ["lora_r: 16\nlora_alpha: 32\n", ""], ids=["named", "default"])
def test_a_script_with_its_yaml_and_the_shell_script_that_launches_both(yaml: str, tmp_path: Path) -> None:
    flags = "--config_file zero.yaml --num_processes 2 walk.py \\\n --config grpo.yaml --seed $SEED"
    shell = f"SEED=3\nexport WANDB_PROJECT=maths\naccelerate launch {flags}\n"
    *_, launch = written(tmp_path, {"walk.py": WALK, "grpo.yaml": WALK_YAML + yaml, "run.sh": shell})
    done = convert_config("trl", [launch])
    values = tomllib.loads(done.run_file)
    assert values["model"]["lora"] == {"rank": 16, "alpha": 32.0, "targets": "all-linear"}
    assert values["run"]["seed"] == 3 and values["run"]["resume"] == "auto" and values["explorer"]["count"] == 1
    assert values["trackers"] == {"wandb": "maths"}
    changed = {"template": "Say {question}"}
    assert values["tasksets"]["train"]["options"] == {"split": "train", **changed}
    assert values["evaluations"]["held-out"]["options"] == {"split": "test", **changed}
    assert values["tasksets"]["train"]["columns"] == {"messages": "question"}
    assert [one.there.split(" ")[0] for one in done.not_taken] == ["launcher.config_file"]
    assert any("pip install trl" in one for one in done.to_do)
    on_cpus = convert_config("trl", [*written(tmp_path, {"walk.py": WALK, "grpo.yaml": WALK_YAML})], gpus=0)
    assert "use_vllm" in [one.there for one in on_cpus.not_taken]
    out = tmp_path / "run.toml"
    assert call("convert-config", "trl", launch, "-o", out).exit_code == 0
    made = tmp_path / "walk_rewards.py"
    space: dict[str, Any] = {}
    exec(made.read_text(), space)
    assert space["same_numbers"]([[{"content": "it is 12"}]], ["12!"]) == [1.0] and "GRPOTrainer" not in space
    made.write_text("mine")
    out.unlink()
    assert "kept" in call("convert-config", "trl", launch, "-o", out).stderr and made.read_text() == "mine"


@pytest.mark.parametrize("flag", ["--config-name=mine", "--config-name mine", "-cn mine"])
def test_overrides_after_the_name_of_a_config_of_verl(flag: str, tmp_path: Path) -> None:
    shell = f"python -m verl.trainer.main_ppo {flag} actor_rollout_ref.rollout.n=3 trainer.total_training_steps=4"
    data = "{prompt_key: prompt, train_files: a.parquet}"
    yaml = f"actor_rollout_ref: {{model: {{path: {MODEL}}}, rollout: {{n: 7}}}}\ndata: {data}\n"
    launch, *_ = written(tmp_path, {"run.sh": shell, "mine.yaml": yaml})
    done = convert_config("verl", [launch])
    values = tomllib.loads(done.run_file)
    assert (values["feeder"]["group_size"], values["run"]["steps"], values["model"]["path"]) == (3, 4, MODEL)
    launch.write_text(
        f"{shell.replace('mine', 'ppo_trainer')} actor_rollout_ref.model.path={MODEL} data.train_files=a.parquet"
    )
    assert not any("takes the config" in one for one in convert_config("verl", [launch]).to_do)


def test_a_script_with_an_argparse_of_its_own_is_converted_as_it_is_launched(tmp_path: Path) -> None:
    script = (
        f"import argparse, asyncio\n{HEAD}"
        "async def right(completions, solution):\n"
        "    async def one(said, solution):\n"
        "        return float(said == solution)\n"
        "    return await asyncio.gather(*(one(*pair) for pair in zip(completions, solution)))\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('-l', '--lr', default=1e-5)\n"
        "parser.add_argument('--beta', default=0.1)\n"
        "args = parser.parse_args()\n"
        "config = GRPOConfig('o', learning_rate=args.lr, beta=args.beta)\n"
        f"GRPOTrainer('m', right, train_dataset={ROWS}.map("
        "lambda row: {'prompt': row['q'], 'solution': row['answer']}), args=config)\n"
    )
    files = {"rows.jsonl": '{"q": "a", "answer": "b"}\n', "train.py": script, "run.sh": "python train.py --lr 2e-5\n"}
    *_, launch = written(tmp_path, files)
    done = convert_config("trl", [launch])
    values = tomllib.loads(done.run_file)
    assert (values["trainer"]["lr"], values["algorithms"]["grpo"]["kl_coef"]) == (2e-5, 0.1)
    assert not [one for one in done.not_taken if "lr" in one.there.split(" ")], done.not_taken
    assert not any("uses one" in one for one in done.to_do), done.to_do
    assert "solution is called answer there" in re.sub(r"\s+", " ", done.to_text())


def test_a_yaml_without_a_reward_has_a_placeholder_that_check_refuses(tmp_path: Path) -> None:
    held_out = "eval_strategy: steps\neval_steps: 7\ndataset_test_split: held\n"
    head = f"model_name_or_path: {MODEL}\ndataset_name: org/x\ndataset_config: main\nmax_steps: 1\n"
    (file,) = written(tmp_path, {"grpo.yaml": head + held_out})
    done = convert_config("trl", [file], trainer="grpo")
    assert "tasksets.train.reward" not in [one.key for one in done.taken]
    assert any(PLACEHOLDER in one for one in done.to_do)
    evaluation = tomllib.loads(done.run_file)["evaluations"]["held-out"]
    assert evaluation["source"] == "hf:org/x" and evaluation["every"] == 7
    assert evaluation["options"] == {"subset": "main", "split": "held"}
    (run,) = written(tmp_path, {"run.toml": done.run_file})
    assert any(PLACEHOLDER in one for one in check(loader.load([run], env={})).errors)


def test_demonstrations_are_shuffled_as_the_trainer_does_and_a_share_is_held_out(tmp_path: Path) -> None:
    script = (
        f"{HEAD}data = load_dataset('json', data_files='rows.jsonl', split='train').train_test_split(test_size=0.25)\n"
        "SFTTrainer('m', train_dataset=data['train'], eval_dataset=data['test'],\n"
        "           args=SFTConfig('o', shuffle_dataset=False)).train()\n"
    )
    _, file = written(tmp_path, {"rows.jsonl": "".join(f'{{"q": "ba{row}"}}\n' for row in range(64)), "sft.py": script})
    done = convert_config("trl", [file])
    values = tomllib.loads(done.run_file)
    assert values["experts"]["shuffle"] is True and values["experts"]["held_out"] == 0.25
    assert values["run"]["steps"] == 3 * 48 // 8
    by_place = "GRPOTrainer('m', len, GRPOConfig('o', beta=0.5), load_dataset('a/b', split='test')).train()"
    values = tomllib.loads(convert_config("trl", written(tmp_path, {"g.py": HEAD + by_place})).run_file)
    assert values["algorithms"]["grpo"]["kl_coef"] == 0.5 and values["tasksets"]["train"]["source"] == "hf:a/b"
    by_place = "DPOTrainer('m', None, DPOConfig('o', beta=0.5), None, load_dataset('a/b', split='test')).train()"
    values = tomllib.loads(convert_config("trl", written(tmp_path, {"d.py": HEAD + by_place})).run_file)
    assert values["algorithms"]["dpo"]["beta"] == 0.5 and values["experts"]["source"] == "hf:a/b"
    assert [one.there for one in done.not_taken] == ["assistant_only_loss is off"]
    asked = ".map(lambda row: {'prompt': row['q'][:1], 'completion': row['q'][1:]}).train_test_split"
    done = convert_config("trl", written(tmp_path, {"sft.py": script.replace(".train_test_split", asked)}))
    assert "columns" not in tomllib.loads(done.run_file)["experts"]  # what cuts a row is not a column
    assert "dataset.map: prompt is row['q'][:1]; dataset.map: completion is row['q'][1:], which" in done.to_do[0]
    packed = script.replace("shuffle_dataset=False", "packing=True, assistant_only_loss=True")
    done = convert_config("trl", written(tmp_path, {"sft.py": packed}))
    assert "steps" not in tomllib.loads(done.run_file)["run"]  # a batch has more rows than blocks
    assert any("packing: TRL's batch has blocks of 1024 tokens" in one for one in done.to_do), done.to_do


def test_trl_has_the_settings_that_rules_know() -> None:
    tables = trl.TABLES
    known = set(tables["settings"].split())
    used = [*tables["alike"], *(name for names in tables["defaults"].values() for name in names)]
    assert set(used) <= known


def test_gpus_place_the_roles_and_nothing_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_machine", lambda: Machine(gpus=(Gpu(name="L4", memory_bytes=1),) * 2))
    (script,) = written(tmp_path, RECIPES["trl-grpo-gsm8k-lora-vllm"].files)
    out = tmp_path / "run.toml"
    done = call("convert-config", "trl", script, "--gpus", 3, "-o", out)
    assert done.exit_code == 0
    assert (
        "the run names cuda:0 to cuda:2, and this machine has 2 GPUs: `--gpus 2` converts for this machine"
        in done.output
    )
    values = tomllib.loads(out.read_text())
    assert values["explorer"] == {"policy": "vllm", "count": 2, "devices": ["cuda:1", "cuda:2"]}
    assert values["feeder"]["groups_per_batch"] == 12
    assert "8 x 3 processes x gradient_accumulation_steps 4 = 96 completions / num_generations 8" in out.read_text()
    assert "is there already" in call("convert-config", "trl", script, "-o", out).output
    plain = call("convert-config", "trl", script)
    assert 'policy = "auto"' in plain.output and 'device = "auto"' in plain.output and "cuda" not in plain.output
    assert "8 x 1 processes" in plain.output and "this machine has" not in plain.output
    assert call("convert-config", "trl", script, "--gpus", MOST_GPUS).exit_code == 0
    refused = call("convert-config", "trl", script, "--gpus", MOST_GPUS + 1)
    assert (refused.exit_code, "--gpus: got 65, expected 0 to 64: " in refused.output) == (2, True)


@each(
    ("module", "names"),
    [
        (trl, trl.TABLES["alike"]),
        (verl, verl.TABLES["alike"]),
        (verl, verl.TABLES["sft_alike"]),
        (prime_rl, prime_rl.TABLES["alike"]),
    ],
    ids=["trl", "verl", "verl-sft", "prime-rl"],
)
def test_names_that_mean_the_same_lead_to_settings_that_there_are(module: Any, names: Sequence[str]) -> None:
    conversion = Conversion("x", {}, {}, {})
    for name in names:
        conversion.algorithm = "ppo" if name.startswith(("critic", "algorithm", "trainer.critic")) else "grpo"
        keys = conversion.keys_of(name)
        assert keys, name
        for key in keys:
            assert not key.startswith("algorithms.") or conversion.has_setting(key), (name, key)


def test_dotted_names_of_others_are_found_by_their_end() -> None:
    assert aliases.meant("actor_rollout_ref.rollout.n") == ("feeder.group_size",)
    assert aliases.meant("critic.optim.lr") == ("algorithms.ppo.critic.lr",)
    assert aliases.meant("peft") == ("model.lora",) and aliases.meant("pass@1") == ("evaluations.NAME.pass_reward",)
    assert aliases.meant("nobody.knows") == ()


def test_a_metric_of_another_log_is_named() -> None:
    for theirs, ours in (("frac_reward_zero_std", "zero_variance_share"), ("rewards/fmt/mean", "part/fmt")):
        assert f"{theirs}, a metric: {ours} of a step here" in call("explain", theirs).output
