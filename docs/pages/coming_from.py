"""docs/coming-from-*.md: a config of each system, and the run file that `convert-config` makes of it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rftstream.integrations.foreign_configs import convert_config

SAMPLES = {
    "trl": (
        "train_grpo.py",
        "python",
        """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def right(completions, answer, **kwargs):
    pairs = zip(completions, answer)
    return [float(one in said[0]["content"]) for said, one in pairs]


dataset = load_dataset("openai/gsm8k", "main", split="train").map(
    lambda row: {
        "prompt": [{"role": "user", "content": row["question"]}],
        "answer": row["answer"].split("####")[1].strip(),
    }
)
args = GRPOConfig(
    output_dir="qwen-gsm8k",
    learning_rate=2e-6,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=8,
    num_generations=8,
    max_steps=500,
    use_vllm=True,
    logging_steps=1,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=right,
    args=args,
    train_dataset=dataset,
)
trainer.train()
""",
    ),
    "verl": (
        "run_gsm8k.sh",
        "bash",
        """
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.train_batch_size=256 \\
    data.max_response_length=1024 \\
    data.filter_overlong_prompts=True \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    trainer.n_gpus_per_node=2 \\
    trainer.experiment_name=gsm8k \\
    trainer.total_epochs=15
""",
    ),
    "prime-rl": (
        "rl.toml",
        "text",
        """
max_steps = 200
seq_len = 8192

[model]
name = "PrimeIntellect/Qwen3-1.7B-Wordle-SFT"

[orchestrator]
batch_size = 512
group_size = 16

[orchestrator.train.sampling]
max_completion_tokens = 1024

[[orchestrator.train.source]]
name = "wordle"
env.taskset.id = "wordle"
env.agent.harness.id = "null"

[inference.vllm]
gpu_memory_utilization = 0.7
""",
    ),
}
"""System -> name, language and text of its config."""


def converted(system: str) -> str:
    """The config and the run file side by side, and what the command says besides."""
    name, language, text = SAMPLES[system]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, system, name)  # whose folder names the run
        file.parent.mkdir()
        file.write_text(text.lstrip(), encoding="utf-8")
        done = convert_config(system, [file])
    rest = done.to_text()
    said = rest[rest.index("not taken:") :]
    sides = (f"```{language}\n{text.strip()}\n```", f"```toml\n{done.run_file.strip()}\n```")
    cells = "".join(f'<td markdown valign="top">\n\n{side}\n\n</td>' for side in sides)
    head = f"<th><code>{name}</code></th><th><code>rftstream convert-config {system} {name}</code> prints</th>"
    table = f'<table class="sides" markdown>\n<tr>{head}</tr>\n<tr markdown>{cells}</tr>\n</table>'
    return f"{table}\n\nIt says, beside what was taken:\n\n```text\n{said}\n```"
