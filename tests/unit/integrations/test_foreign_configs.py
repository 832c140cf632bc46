"""`rftstream convert-config`: recipes of TRL, verl and prime-rl become run files that `rftstream check` accepts."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rftstream.config import aliases, loader
from rftstream.config.sections import MakeModel, ModelSection
from rftstream.integrations.foreign_configs import convert_config, prime_rl, trl, verl
from rftstream.integrations.foreign_configs.conversion import Conversion
from rftstream.models.folders.folder import prepare_model
from rftstream.preflight.checks.check import check
from tests.commands import call, called
from tests.made import made_once, shared_folder
from tests.unit.integrations.recipes import RECIPES, Recipe

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
ROW: dict[str, Any] = {
    "question": "2 + 3?", "answer": "#### 5", "solution": "5", "data_source": "sums",
    "prompt": [{"role": "user", "content": "2 + 3?"}], "reward_model": {"ground_truth": "5", "style": "rule"},
    "extra_info": {"question": "2 + 3?", "answer": "5"},
}  # fmt: skip
HUB: dict[str, dict[str, Any]] = {
    "openai/gsm8k/main/train.jsonl": {key: ROW[key] for key in ("question", "answer", "solution")},
    "org/chats/train.jsonl": {"messages": [*ROW["prompt"], {"role": "assistant", "content": "5"}]},
    "org/math/train.jsonl": {"prompt": ROW["prompt"], "solution": "5"},
    "org/pairs/train.jsonl": {"prompt": "2 + 3?", "chosen": "5", "rejected": "6"},
    "sums.jsonl": {"prompt": "2 + 3?", "answer": "5"},
}


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model and small data sets under the names that the recipes have for those of the hub."""

    def make(folder: Path) -> None:
        characters = "".join(map(chr, range(32, 127))) + "\n"
        made = MakeModel(characters=characters, width=8, layers=1, heads=1, context=16384)
        spec = prepare_model(ModelSection(make=made), folder / "made", 0)
        shutil.copytree(Path(spec.folder), folder / MODEL)
        for name, row in HUB.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text((json.dumps(row) + "\n") * 20)
        for name in ("train", "test"):
            (folder / "data" / "gsm8k").mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist([ROW] * 4), folder / "data" / "gsm8k" / f"{name}.parquet")

    return made_once(shared_folder(tmp_path_factory), "foreign", make)


def written(folder: Path, files: dict[str, str]) -> list[Path]:
    for name, text in files.items():
        (folder / name).write_text(text)
    return [folder / name for name in files]


def setting(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_recipes_pass_check(recipe: Recipe, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "work"
    shutil.copytree(world, place)
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    done = convert_config(recipe.system, written(place, recipe.files), gpus=0)
    values = tomllib.loads(done.run_file)
    assert {key: setting(values, key) for key in recipe.settings} == recipe.settings
    assert "could not" not in done.to_text()
    listed = [one.there for one in done.not_taken]
    assert all(any(one.startswith(name) for one in listed) for name in recipe.not_taken), listed
    written(place, {**recipe.modules, "run.toml": done.run_file})
    asked = " ".join(done.to_do)
    assert all(name.removesuffix(".py") in asked for name in recipe.modules), asked
    if "verifiers" in done.run_file:
        (place / "venvs/verifiers/bin").mkdir(parents=True)
        (place / "venvs/verifiers/bin/python").symlink_to(sys.executable)
    for module in recipe.modules:
        monkeypatch.delitem(sys.modules, module.removesuffix(".py"), raising=False)
    report = check(loader.load([place / "run.toml"], env={}))
    assert report.errors == []


@pytest.mark.parametrize(
    ("system", "files", "error"),
    [
        ("trl", {"a.py": "def (:"}, "a.py: not Python"),
        ("trl", {"a.py": "print(1)"}, "no trainer in it"),
        ("trl", {"a.yaml": "- 1\n"}, "a list, expected a mapping"),
        ("trl", {"a.yaml": "a: [1"}, "not YAML"),
        ("trl", {"a.yaml": "learning_rate: 1e-6"}, "add --trainer grpo"),
        ("trl", {"a.py": "SFTTrainer(model=pick())"}, r"could not be read: line 1: pick\(\)"),
        ("trl", {"a.yaml": "reward_funcs: [a.b]\nseed: 1", "b.yaml": "seed: 2"}, "seed: .*a.yaml says 1"),
        ("verl", {"a.sh": "echo"}, "no override such as"),
        ("verl", {"a.yaml": "data: {train_batch_size: 1}"}, "no actor_rollout_ref.model.path"),
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
    unread = {one["there"]: one["reason"] for one in done["not_taken"]}
    assert "line 7: training" in unread["args"] and "bound in a branch" in unread["train_dataset"]
    assert "make()" in unread["reward_funcs"]
    assert any("train_data.jsonl" in text for text in done["to_do"])
    assert tomllib.loads(done["run_file"])["run"]["steps"] == 5


def test_gpus_place_the_roles_and_nothing_is_written_over(tmp_path: Path) -> None:
    (script,) = written(tmp_path, RECIPES["trl-grpo-gsm8k-lora-vllm"].files)
    out = tmp_path / "run.toml"
    assert call("convert-config", "trl", script, "--gpus", 3, "-o", out).exit_code == 0
    values = tomllib.loads(out.read_text())
    assert values["explorer"] == {"policy": "vllm", "count": 2, "devices": ["cuda:1", "cuda:2"]}
    assert values["feeder"]["groups_per_batch"] == 12
    assert "8 x 3 processes x 4 steps = 96 completions / num_generations 8" in out.read_text()
    assert "is there already" in call("convert-config", "trl", script, "-o", out).output


@pytest.mark.parametrize(
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
    conversion = Conversion("x", {}, {})
    for name in names:
        conversion.algorithm = "ppo" if name.startswith(("critic", "algorithm", "trainer.critic")) else "grpo"
        keys = conversion.keys_of(name)
        assert keys, name
        for key in keys:
            assert not key.startswith("algorithms.") or conversion.has_setting(key), (name, key)


def test_dotted_names_of_others_are_found_by_their_end() -> None:
    assert aliases.meant("actor_rollout_ref.rollout.n") == ("feeder.group_size",)
    assert aliases.meant("critic.optim.lr") == ("algorithms.ppo.critic.lr",)
    assert aliases.meant("nobody.knows") == ()
