"""What scripts of TRL and their launches change on the way to a trainer: it is converted, or said to be left to do."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from rftstream.integrations.foreign_configs import convert_config
from rftstream.integrations.foreign_configs.conversion import ConvertedConfig
from tests.unit.integrations.test_foreign_configs import setting, written

ROWS = "load_dataset('rows', split='train')"
HEAD = """import copy, dataclasses, os
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

def right(completions, **kwargs):
    return [1.0 for _ in completions]

class Scorer:
    def __init__(self, points):
        self.points = points

    def score(self, completions, **kwargs):
        return [self.points for _ in completions]

class Careful(GRPOConfig):
    beta: float = 0.2

"""
OF = f"GRPOTrainer('m', right, GRPOConfig('o', max_steps=4, **A), {ROWS}).train()"
TRAINED = f"GRPOTrainer('m', right, A, {ROWS}).train()"
LEFT = "reads this"


def found_at(values: Any, key: str) -> Any:
    try:
        return setting(values, key)
    except KeyError:
        return None


def converted(tmp_path: Path, files: dict[str, str]) -> tuple[ConvertedConfig, dict[str, Any]]:
    done = convert_config("trl", written(tmp_path, files)[:1])
    return done, tomllib.loads(done.run_file)


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (f"B = dict(seed=5)\nB['seed'] = 6\nA = {{**B, 'beta': 0.5}}\n{OF}",
         {"run.seed": 6, "algorithms.grpo.kl_coef": 0.5}),
        (f"A = dict(seed=5, beta=0.5)\nA.pop('beta')\ndel A['seed']\n{OF}",
         {"run.seed": 42, "algorithms.grpo.kl_coef": None}),
        (f"B = GRPOConfig('o', beta=0.1)\nB.beta = 0.3\nA = dataclasses.replace(B, seed=5)\n{TRAINED}",
         {"run.seed": 5, "algorithms.grpo.kl_coef": 0.3}),
        (f"A = copy.deepcopy(GRPOConfig('o', seed=5))\nA.seed = 6\n{TRAINED}", {"run.seed": 6}),
        (f"P.add_argument('-s', '--seed', default=7)\nA = vars(P.parse_args())\n{OF}", {"run.seed": 7}),
        (f"A = Careful('o', max_steps=4)\n{TRAINED}", {"algorithms.grpo.kl_coef": 0.2}),
        (f"os.environ['S'] = '5'\nos.environ.setdefault('B', '0.5')\n"
         f"A = dict(seed=int(os.environ['S']), beta=float(os.getenv('B', '0.1')))\n{OF}",
         {"run.seed": 5, "algorithms.grpo.kl_coef": 0.5}),
        (f"A = dict(args=GRPOConfig('o', seed=5), train_dataset={ROWS})\nGRPOTrainer('m', right, **A).train()",
         {"run.seed": 5, "tasksets.train.source": "hf:rows"}),
        ("D = load_dataset('rows')\nD['train'] = D['train'].select(range(100))\n"
         "GRPOTrainer('m', right, GRPOConfig('o'), D['train']).train()",
         {"tasksets.train.options": {"split": "train", "size": 100}}),
        (f"D = {ROWS}.shuffle(seed=3).select(range(100))\nGRPOTrainer('m', right, GRPOConfig('o'), D).train()",
         {"tasksets.train.source": "jsonl:t_rows.jsonl"}),
        (f"S = Scorer(2.0)\nGRPOTrainer('m', [S.score, Scorer(3.0).score], GRPOConfig('o'), {ROWS}).train()",
         {"tasksets.train.reward": [{"name": "t_rewards:score_1"}, {"name": "t_rewards:score_2"}]}),
        (f"T = ['q_proj']\nT.append('v_proj')\nGRPOTrainer('m', right, GRPOConfig('o'), {ROWS}, "
         "peft_config=LoraConfig(target_modules=T)).train()", {"model.lora.targets": ["q_proj", "v_proj"]}),
    ],
)  # fmt: skip
def test_what_is_changed_on_the_way_is_taken(script: str, found: dict[str, Any], tmp_path: Path) -> None:
    done, values = converted(tmp_path, {"t.py": f"{HEAD}{script}\n"})
    assert {key: found_at(values, key) for key in found} == found
    assert not any(LEFT in one for one in done.to_do), done.to_do


def test_methods_of_objects_are_copied_with_their_objects(tmp_path: Path) -> None:
    script = f"{HEAD}S = Scorer(2.0)\nGRPOTrainer('m', S.score, GRPOConfig('o'), {ROWS}).train()\n"
    copied: dict[str, Any] = {}
    exec(converted(tmp_path, {"t.py": script})[0].modules[0].text, copied)
    assert copied["score_1"](["a"]) == [2.0]


LOOP = (
    "for rate in [1e-5, 2e-5]:\n    if CUT:\n        continue\n    "
    f"{TRAINED.replace('A', 'GRPOConfig()')}\nelse:\n    tidy()\n"
)
SFT = f"trainer = SFTTrainer('m', SFTConfig('o', max_steps=4), train_dataset={ROWS})\n"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"{SFT}trainer = patched(trainer)\ntrainer.train()", ["trainer = patched(trainer): nothing here reads"]),
        (LOOP, ["if CUT: continue: the run is of a first turn that does", "tidy(): it runs after the turns of a loop"]),
        (f"while more():\n    {TRAINED.replace('A', 'GRPOConfig()')}", ["while more(): trains in turns"]),
        (f"A = GRPOConfig()\nM = PeftModel.from_pretrained(AutoModel.from_pretrained('m'), 'ad')\n"
         f"GRPOTrainer(M, right, A, {ROWS}).train()",
         ["PeftModel.from_pretrained(AutoModel.from_pretrained('m'),...: the adapter is not in the run file"]),
        (f"A = dict(seed=1)\ndef f():\n    A['beta'] = 0.5\nf()\n{OF}", ["A, which a function changes"]),
        (f"def made():\n    return GRPOTrainer('m', right, GRPOConfig('o'), {ROWS})\n"
         "t = made()\nt.args.seed = 3\nt.train()", ["t.args.seed = 3: nothing here reads"]),
        (f"GRPOTrainer('m', ['org/a', 'org/b', right], GRPOConfig('o'), {ROWS}).train()",
         ["org/b is a second model beside org/a"]),
        (f"A = GRPOConfig('o')\nvars(A)['seed'] = 3\n{TRAINED}", ["vars(A)['seed'] = 3: nothing here reads"]),
        (f"GRPOTrainer('m', right, GRPOConfig('o', deepspeed='d.json'), {ROWS}).train()",
         ["deepspeed has its own scheduler"]),
        (f"GRPOTrainer('m', right, GRPOConfig('o'), {ROWS}, processing_class=made()).train()",
         ["processing_class: could not be read"]),
    ],
)  # fmt: skip
def test_what_is_not_followed_is_left_to_do(script: str, said: list[str], tmp_path: Path) -> None:
    done, _ = converted(tmp_path, {"t.py": f"{HEAD}{script}\n", "d.json": '{"scheduler": {}}'})
    asked = "\n".join(done.to_do)
    assert all(one in asked for one in said), asked


def test_training_on_responses_alone_is_what_a_run_does(tmp_path: Path) -> None:
    script = f"{HEAD}{SFT}trainer = train_on_responses_only(trainer, response_part='a')\ntrainer.train()\n"
    done, _ = converted(tmp_path, {"t.py": script})
    assert [one.reason for one in done.not_taken if one.there.startswith("assistant_only_loss")] == [
        "what the assistant said is trained, always"
    ]
    assert not any(LEFT in one for one in done.to_do)


SCRIPT = f"{HEAD}A = GRPOConfig('o', max_steps=4)\n{TRAINED}\n"
NODES = "num_machines: 2\nnum_processes: 16\n"


@pytest.mark.parametrize(
    ("shell", "groups", "explorers", "said"),
    [
        ("accelerate launch --config_file a.yaml t.py", 16, 7, "16 processes on 2 machines"),
        ("torchrun --nnodes 2 --nproc_per_node 4 t.py", 8, 3, "8 processes on 2 machines"),
        ("deepspeed --num_nodes 2 --num_gpus 4 t.py", 8, 3, "8 processes on 2 machines"),
        ("accelerate launch --num_processes 10000 t.py", 10_000, None, "10,000 processes were found, more GPUs than"),
        ("torchrun --nproc_per_node gpu t.py", 1, None, "nproc_per_node gpu: how many that is, only the machine"),
        ("python t.py trainer.lr=3e-6 --seed 1", 1, None, "trainer.lr=3e-6: given to t.py, and nothing here reads it"),
        ("accelerate launch --config_file cpu.yaml t.py", 2, None, ""),
    ],
)
def test_processes_on_all_machines(shell: str, groups: int, explorers: int | None, said: str, tmp_path: Path) -> None:
    cpu = "use_cpu: true\nnum_processes: 2\n"
    done, values = converted(tmp_path, {"go.sh": f"{shell}\n", "t.py": SCRIPT, "a.yaml": NODES, "cpu.yaml": cpu})
    assert setting(values, "feeder.groups_per_batch") == groups
    assert found_at(values, "explorer.count") == explorers
    assert (values["trainer"]["device"] == "cpu") is ("cpu.yaml" in shell)
    assert said in "\n".join(done.to_do)


def test_arrays_of_a_shell_are_words_of_its_commands(tmp_path: Path) -> None:
    shell = (
        'A=(--seed 1 --max_steps 2)\nA+=(\n  --beta 0.5  # why\n)\nL=(accelerate launch t.py)\n"${L[@]}" "${A[@]}"\n'
    )
    done, values = converted(tmp_path, {"go.sh": shell, "t.py": SCRIPT.replace("max_steps=4", "seed=1")})
    assert {key: setting(values, key) for key in ("run.steps", "algorithms.grpo.kl_coef")} == {
        "run.steps": 2, "algorithms.grpo.kl_coef": 0.5,
    }  # fmt: skip
    assert not any("goes on" in one for one in done.to_do)


def test_datasets_and_templates_of_a_yaml(tmp_path: Path) -> None:
    head = "model_name_or_path: m\nchat_template_path: org/other\neos_token: <end>\n"
    head += "datasets:\n  - {path: a/b, name: c, split: d}\n"
    done, values = converted(tmp_path, {"sft.yaml": head})
    assert values["experts"]["source"] == "hf:a/b"
    assert values["experts"]["options"] == {"subset": "c", "split": "d"}
    asked = "\n".join(done.to_do)
    assert "chat_template_path org/other: TRL takes" in asked and "eos_token <end>" in asked
    done, _ = converted(tmp_path, {"sft.yaml": f"{head}  - path: e\n"})
    assert "TRL joins path a/b name c split d, path e" in "\n".join(done.to_do)


PAIRS = '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n{"prompt": "1+2=", "chosen": "3", "rejected": "4"}\n'
DPO = (
    "from datasets import load_dataset\nfrom trl import DPOConfig, DPOTrainer\n"
    "rows = load_dataset('json', data_files='pairs.jsonl', split='train')CHANGED\n"
    "args = DPOConfig('o', per_device_train_batch_size=2, num_train_epochs=2)\n"
    "DPOTrainer('m', 'older', args, train_dataset=rows).train()\n"
)


def test_some_rows_of_a_file_of_pairs_are_written_by_the_script(tmp_path: Path) -> None:
    """Demonstrations take a file whole, so a training on some of its rows would be another one."""
    changed = DPO.replace("CHANGED", ".shuffle(seed=7).select(range(4))")
    done, values = converted(tmp_path, {"dpo.py": changed, "pairs.jsonl": PAIRS * 4})
    assert values["experts"]["source"] == "jsonl:dpo_rows.jsonl"
    assert values["run"]["steps"] == 2 * 4 // 2
    (module,) = (one for one in done.modules if one.name == "write_dpo_rows.py")
    assert "shuffle(seed=7).select(range(4))" in module.text
    assert any("after a shuffle with seed 7 (size 4)" in one for one in done.to_do)
    assert any("model.path = 'older' begins with it" in one for one in done.to_do)


def test_rows_that_are_there_twice_are_named_and_the_steps_stay_those_of_all(tmp_path: Path) -> None:
    done, values = converted(tmp_path, {"dpo.py": DPO.replace("CHANGED", ""), "pairs.jsonl": PAIRS * 4})
    assert values["run"]["steps"] == 2 * 8 // 2
    assert "passes" not in values["experts"]  # two passes of two rows would end it before its last step
    (left,) = (one for one in done.not_taken if one.there.startswith("rows that are the same"))
    assert "6 of pairs.jsonl" in left.reason
    assert not any("eval_strategy" in one.there for one in done.not_taken)  # which the script does not name


def test_flags_of_the_server_and_the_file_that_the_script_loads(tmp_path: Path) -> None:
    script = (
        f"{HEAD}from trl import ModelConfig, ScriptArguments, TrlParser\n"
        "s, a, m = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()\n"
        "D = load_dataset('json', data_files=s.dataset_name, split='train')\n"
        "GRPOTrainer(m.model_name_or_path, right, a, D).train()\n"
    )
    shell = (
        "srun trl vllm-serve --model m --max_model_len 4096 --data_parallel_size 2 &\n"
        "accelerate launch t.py --model_name_or_path m --dataset_name rows.jsonl --max_steps 4\n"
    )
    done, values = converted(tmp_path, {"go.sh": shell, "t.py": script, "rows.jsonl": '{"prompt": "1+1="}\n'})
    assert values["model"]["context"] == 4096
    assert values["tasksets"]["train"]["source"] == "jsonl:rows.jsonl"
    assert any("data_parallel_size = 2" in one.there for one in done.not_taken)


def test_a_reward_model_of_the_hub_is_to_be_fetched(tmp_path: Path) -> None:
    made = "AutoModelForSequenceClassification"
    script = (
        f"{HEAD}from transformers import {made}\nR = {made}.from_pretrained('org/judge')\n"
        f"GRPOTrainer('m', R, GRPOConfig('o', max_steps=4), {ROWS}).train()\n"
    )
    done, values = converted(tmp_path, {"t.py": script})
    assert values["rewards"]["reward_model"]["path"] == "org/judge"
    assert any("hf download org/judge" in one for one in done.to_do)
    (tmp_path / "org" / "judge").mkdir(parents=True)
    done, _ = converted(tmp_path, {"t.py": script})
    assert not any("hf download" in one for one in done.to_do)
