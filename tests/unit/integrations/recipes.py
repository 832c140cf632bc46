"""Recipes in the manner of public ones of TRL, verl and prime-rl: their files, and what has to come of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.unit.integrations import published

GSM8K_SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SYSTEM = "Think first, then write #### and the number."


def last_number(text):
    return text.split("####")[-1].strip()


def questions(split="train"):
    rows = load_dataset("openai/gsm8k", "main")[split]
    return rows.map(
        lambda row: {
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}],
            "answer": last_number(row["answer"]),
        }
    )


def right(completions, answer, **kwargs):
    return [float(last_number(said[0]["content"]) == one) for said, one in zip(completions, answer)]


def short(completions, **kwargs):
    return [-len(said[0]["content"]) / 1000 for said in completions]


if __name__ == "__main__":
    settings = GRPOConfig(
        output_dir=f"outputs/{MODEL.split('/')[-1]}-GSM8K",
        learning_rate=1e-5,
        adam_beta2=0.99,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_completion_length=300,
        max_steps=100,
        warmup_ratio=0.1,
        lr_scheduler_type="cosine",
        use_vllm=True,
        vllm_mode="colocate",
        beta=0.04,
        logging_steps=1,
        report_to="none",
    )
    settings.save_steps = 50
    trainer = GRPOTrainer(
        model=MODEL,
        reward_funcs=[right, short],
        args=settings,
        train_dataset=questions(),
        peft_config=LoraConfig(r=16, lora_alpha=64, target_modules=["q_proj", "v_proj"], lora_dropout=0.05),
    )
    trainer.train()
"""
SHORT = "def short(completions, **kwargs):\n    return [-len(str(said)) / 1000 for said in completions]\n"
VERL_SCRIPT = """#!/bin/bash
set -x
n=${N:-5}
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files=$HOME/data/gsm8k/test.parquet \\
    data.train_batch_size=64 \\
    data.max_prompt_length=512 \\
    data.max_response_length=1024 \\
    data.filter_overlong_prompts=True \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
    actor_rollout_ref.model.lora_rank=32 \\
    actor_rollout_ref.actor.optim.lr=3e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=$n \\
    trainer.critic_warmup=0 \\
    trainer.experiment_name='gsm8k_lora' \\
    trainer.logger='["console"]' \\
    trainer.n_gpus_per_node=2 \\
    trainer.test_freq=5 \\
    trainer.total_epochs=15 $@
"""
DAPO_SCRIPT = """
exp_name='DAPO-Math'
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
buffer=$((max_response_length / 2))
TRAIN_FILE=${TRAIN_FILE:-"${HOME}/data/gsm8k/train.parquet"}
python3 -m recipe.dapo.main_dapo \\
    data.train_files="${TRAIN_FILE}" data.truncation='left' \\
    data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} \\
    data.train_batch_size=512 \\
    actor_rollout_ref.rollout.n=16 \\
    actor_rollout_ref.rollout.top_k=-1 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    algorithm.adv_estimator=grpo algorithm.filter_groups.enable=True \\
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.loss_agg_mode="token-mean" \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((max_prompt_length + max_response_length) * 2)) \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=${buffer} \\
    trainer.experiment_name="${exp_name}" trainer.total_training_steps=200 trainer.logger=console
"""
PRIME_ENVIRONMENT = """
[[orchestrator.train.source]]
name = "wordle"
[orchestrator.train.source.env.taskset]
id = "wordle"
[orchestrator.train.source.env.agent.harness]
id = "null"
"""


@dataclass(frozen=True)
class Recipe:
    """Files of one recipe, settings that the run file must have, and settings that must be listed as not taken."""

    system: str
    files: dict[str, str]
    settings: dict[str, Any]
    not_taken: tuple[str, ...] = ()
    modules: dict[str, str] = field(default_factory=dict)
    """What the report asks to be put beside the run file."""
    quiet: tuple[str, ...] = ()
    """Settings given that neither the run file nor the report names, since they change nothing here."""
    refused: str = ""
    """Why `check` refuses the run file until its user has written something."""


RECIPES = {
    "trl-grpo-gsm8k-lora-vllm": Recipe(
        "trl",
        {"train_grpo.py": GSM8K_SCRIPT},
        {
            "run.name": "qwen2-5-0-5b-instruct-gsm8k", "run.steps": 100, "feeder.group_size": 8,
            "feeder.groups_per_batch": 4, "trainer.warmup_steps": 10, "trainer.lr_schedule": "cosine",
            "trainer.adam_betas": [0.9, 0.99], "trainer.checkpoint_every": 50, "algorithms.grpo.kl_coef": 0.04,
            "algorithms.grpo.correction_level": "sequence", "model.lora.rank": 16, "sampling.max_tokens": 300,
            "tasksets.train.columns": {"messages": "question"},
            "tasksets.train.options": {"subset": "main", "split": "train", "answer_after": "####"},
            "tasksets.train.system": "Think first, then write #### and the number.",
            "tasksets.train.reward": [{"name": "train_grpo_rewards:right"}, {"name": "train_grpo_rewards:short"}],
        },
        ("logging_steps", "lora_dropout"),
    ),
    "trl-grpo-yaml-server-weights": Recipe(
        "trl",
        {
            "grpo.yaml": "model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct\ndataset_name: org/math\n"
            "reward_funcs: [accuracy_reward, my_rewards.short]\nreward_weights: [1.0, 0.2]\n"
            "num_generations: 4\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n"
            "steps_per_generation: 8\nnum_iterations: 2\nmax_steps: 400\nlearning_rate: 1e-6\nloss_type: grpo\n"
            "use_vllm: true\nvllm_mode: server\nepsilon_high: 0.28\nlr_scheduler_type: constant\nwarmup_steps: 16\n"
            "top_entropy_quantile: 0.2\ndataset_train_split: train\n"
        },
        {
            "feeder.groups_per_batch": 8, "trainer.minibatches": 4, "trainer.updates_per_batch": 2, "run.steps": 50,
            "trainer.warmup_steps": 2, "algorithms.grpo.normalise": "sequence", "algorithms.grpo.clip_high": 0.28,
            "trainer.lr": 1e-6, "tasksets.train.columns": {"messages": "prompt", "answer": "solution"},
            "tasksets.train.reward": [{"name": "math", "weight": 1.0}, {"name": "my_rewards:short", "weight": 0.2}],
        },
        ("top_entropy_quantile",),
        {"my_rewards.py": SHORT},
    ),
    "trl-rloo": Recipe(
        "trl",
        {
            "rloo-sums.py": "from datasets import load_dataset\nfrom trl import RLOOConfig, RLOOTrainer\n"
            "data = load_dataset('json', data_files='sums.jsonl', split='train').select(range(10))\n"
            "def shorter(completions, **kwargs):\n    return [-float(len(one)) for one in completions]\n"
            "RLOOTrainer('Qwen/Qwen2.5-0.5B-Instruct', shorter, train_dataset=data, args=RLOOConfig('rloo', "
            "num_generations=4, bf16=False)).train()\n"
        },
        {
            "trainer.algorithm": "rloo", "algorithms.rloo.kl_coef": 0.05, "algorithms.rloo.kl_in": "reward",
            "algorithms.rloo.kl_estimator": "k1", "feeder.groups_per_batch": 2, "model.dtype": "float32",
            "tasksets.train.source": "jsonl:sums.jsonl", "tasksets.train.options": {"size": 10},
            "run.steps": 15, "tasksets.train.reward": "rloo_sums_rewards:shorter",
        },
    ),
    "trl-grpo-own-reward-of-chats": Recipe(
        "trl",
        {
            "train.py": "from datasets import load_dataset\nfrom trl import GRPOConfig, GRPOTrainer\n"
            "data = load_dataset('json', data_files={'train': 'chats.jsonl', 'test': 'chats.jsonl'})\n"
            "def accuracy_reward(completions, solution, **kwargs):\n    return [0.0 for _ in completions]\n"
            "GRPOTrainer('Qwen/Qwen2.5-0.5B-Instruct', accuracy_reward, train_dataset=data['train'], "
            "eval_dataset=data['test'], args=GRPOConfig('chats', max_steps=2)).train()\n"
        },
        {
            "tasksets.train.source": "jsonl:chats.jsonl", "tasksets.train.reward": "train_rewards:accuracy_reward",
            "evaluations.held-out.source": "jsonl:chats.jsonl",
            "tasksets.train.columns": {"messages": "prompt"}, "evaluations.held-out.columns": {"messages": "prompt"},
        },
    ),
    "trl-grpo-tools": Recipe(
        "trl",
        {
            "agent.py": "from datasets import load_dataset\nfrom trl import GRPOConfig, GRPOTrainer\n"
            "from my_rewards import short\n\n"
            "def multiply(a: int, b: int) -> int:\n    '''Multiply.'''\n    return a * b\n\n"
            "data = load_dataset('json', data_files='sums.jsonl')['train']\ndata = (\n    data.shuffle(seed=1)\n)\n"
            "data = data.select(range(8))\n\ndef main(most=10):\n"
            "    args = GRPOConfig(output_dir='agent', max_steps=most, num_generations=2, "
            "max_tool_calling_iterations=3, scale_rewards='none', steps_per_generation=2, eval_steps=6)\n"
            "    GRPOTrainer(model='Qwen/Qwen2.5-0.5B-Instruct', args=args, reward_funcs=short, train_dataset=data,\n"
            "                eval_dataset=data, tools=[multiply]).train()\n\nmain()\n"
        },
        {
            "trainer.algorithm": "grpo", "algorithms.grpo.scale_rewards": "none",
            "algorithms.grpo.normalise": "token", "tasksets.train.environment": "tools",
            "environments.tools.tools": ["agent_tools:multiply"],
            "evaluations.held-out.every": 3, "run.steps": 5,
            "environments.tools.max_turns": 4, "tasksets.train.reward": "my_rewards:short",
        },
        (),
        {"my_rewards.py": SHORT},
    ),
    "trl-sft": Recipe(
        "trl",
        {
            "sft.py": "from datasets import load_dataset\nfrom trl import SFTConfig, SFTTrainer\n"
            "trainer = SFTTrainer(model='Qwen/Qwen2.5-0.5B-Instruct', train_dataset=load_dataset('org/chats', "
            "split='train'), args=SFTConfig(output_dir='sft', max_length=512, packing=True, max_steps=30, "
            "gradient_accumulation_steps=2))\ntrainer.train()\n"
        },
        {
            "trainer.algorithm": "sft", "experts.per_batch": 16, "experts.source": "hf:org/chats",
            "model.context": 512, "trainer.lr": 2e-5, "run.steps": 30,
        },
        ("assistant_only_loss is off",),
    ),
    "verl-grpo-lora": Recipe(
        "verl",
        {"run_gsm8k.sh": VERL_SCRIPT},
        {
            "run.name": "gsm8k_lora", "feeder.groups_per_batch": 64, "feeder.group_size": 5, "trainer.minibatches": 4,
            "algorithms.grpo.kl_coef": 0.001, "algorithms.grpo.kl_estimator": "k3", "algorithms.grpo.dual_clip": 3.0,
            "tasksets.gsm8k.too_long": "skip", "tasksets.gsm8k.passes": 15, "model.context": 1536,
            "tasksets.gsm8k.source": "parquet:~/data/gsm8k/train.parquet", "evaluations.val.every": 5,
            "evaluations.val.sampling": {"temperature": 0.0}, "model.lora.alpha": 16.0,
        },
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "trainer.critic_warmup"),
    ),
    "verl-dapo": Recipe(
        "verl",
        {"run_dapo.sh": DAPO_SCRIPT},
        {
            "run.steps": 200, "algorithms.grpo.clip_high": 0.28, "algorithms.grpo.overlong_share": 0.5,
            "buffer.zero_variance": "replace", "trainer.minibatches": 16, "trainer.tokens_per_microbatch": 20480,
            "tasksets.gsm8k.too_long": "truncate", "sampling.max_tokens": 8192,
        },
    ),
    "verl-ppo-critic": Recipe(
        "verl",
        {
            "ppo.yaml": "defaults: [ppo_trainer, _self_]\n"
            "data: {train_files: ~/data/gsm8k/train.parquet, train_batch_size: 256}\n"
            "actor_rollout_ref:\n  model: {path: Qwen/Qwen2.5-0.5B-Instruct}\n  rollout: {name: vllm}\n"
            "critic: {optim: {lr: 1e-5}, model: {path: Qwen/Qwen2.5-0.5B-Instruct}}\n"
            "algorithm: {adv_estimator: gae, lam: 0.95, use_kl_in_reward: true, kl_ctrl: {kl_coef: 0.002}}\n"
            "custom_reward_function: {path: scoring/my_score.py, name: score, reward_kwargs: {bonus: 0.5}}\n"
            "trainer: {total_training_steps: 50, logger: [console], critic_warmup: 5}\n"
        },
        {
            "trainer.algorithm": "ppo", "algorithms.ppo.lam": 0.95, "algorithms.ppo.critic.lr": 1e-5,
            "algorithms.ppo.critic.value_clip": 0.5, "algorithms.ppo.critic.warmup_batches": 5,
            "algorithms.ppo.kl_in": "reward", "algorithms.ppo.kl_coef": 0.002, "algorithms.ppo.kl_estimator": "k1",
            "feeder.group_size": 1, "tasksets.gsm8k.reward": "my_score:score", "rewards.my_score:score.bonus": 0.5,
        },
        (),
        {"my_score.py": "def score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):\n"
                        "    return float(ground_truth in solution_str) + bonus\n"},
    ),
    "verl-sft": Recipe(
        "verl",
        {
            "sft.sh": "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=$HOME/data/gsm8k/train.parquet "
            "data.prompt_key=extra_info data.response_key=extra_info optim.lr=1e-4 "
            "data.val_files=$DATA/test.parquet "
            "data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] trainer.default_local_dir=$2 "
            "model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct trainer.total_epochs=1 trainer.logger=console\n"
        },
        {
            "trainer.algorithm": "sft", "experts.per_batch": 256, "trainer.lr": 1e-4, "experts.passes": 1,
            "experts.columns": {"prompt": "extra_info.question", "completion": "extra_info.answer"},
        },
        ("trainer.default_local_dir", "data.val_files"),
    ),
    "trl-grpo-agent": Recipe(
        "trl",
        {"agent_grpo.py": published.AGENT, "agent_grpo.yaml": published.AGENT_YAML},
        {
            "tasksets.train.columns": {"messages": "question"}, "tasksets.train.options": {"split": "train"},
            "evaluations.held-out.options": {"split": "test"}, "evaluations.held-out.every": 5,
            "environments.tools.tools": ["agent_grpo_tools:look_up", "agent_grpo_tools:add"],
            "environments.tools.max_turns": 7, "model.chat_template_kwargs": {"enable_thinking": False},
            "trainer.algorithm": "dr_grpo", "algorithms.dr_grpo.row_tokens": 2048,
            "algorithms.dr_grpo.scale_rewards": "group", "algorithms.dr_grpo.advantage_eps": 1e-4,
            "algorithms.dr_grpo.kl_unbiased": True, "algorithms.dr_grpo.correction": "mask",
        },
        ("log_completions", "vllm_enable_sleep_mode"),
        quiet=("steps_per_generation",),
    ),
    "trl-grpo-vision": Recipe(
        "trl",
        {"grpo_vlm.py": published.VISION},
        {
            "tasksets.train.columns": {"messages": "prompt", "images": "image"}, "trainer.algorithm": "gspo",
            "algorithms.gspo.normalise": "token", "algorithms.gspo.clip_low": 0.2, "algorithms.gspo.clip_high": 0.2,
            "algorithms.gspo.correction": "tis", "tasksets.train.reward": "grpo_vlm_rewards:accuracy",
        },
        ("save_steps",),
        refused="grpo_vlm_rows.parquet: no such file",  # `train[:90%]`: a script writes them
    ),
    "trl-grpo-qlora-yaml": Recipe(
        "trl",
        {"recipe_lora.yaml": published.QLORA_YAML},
        {
            "model.quantize": "nf4", "model.lora.rank": 32, "backends.torch.moments": "8bit",
            "trainer.lr_schedule": "cosine", "trainer.min_lr_share": 0.1, "algorithms.grpo.scale_rewards": "batch",
            "algorithms.grpo.overlong_penalty": 0.1, "feeder.groups_per_batch": 16, "trainer.minibatches": 4,
            "evaluations.held-out.every": 5, "algorithms.grpo.correction_high": 2.0,
            "tasksets.train.columns": {"messages": "prompt", "answer": "solution"},
            "tasksets.train.reward": [{"name": "math", "weight": 1.0},
                                      {"name": "trl.rewards:think_format_reward", "weight": 0.2}],
        },
        ("save_strategy",),
        quiet=("num_iterations", "per_device_train_batch_size"),
    ),
    "trl-dpo": Recipe(
        "trl",
        {"dpo_lora.py": published.PAIRS},
        {"trainer.algorithm": "dpo", "experts.held_out": 0.05, "experts.held_out_every": 50, "trainer.lr": 5e-6,
         "model.lora.rank": 16, "experts.per_batch": 16, "experts.passes": 2, "trainer.checkpoint_every": 200},
        ("loss_weights",),
    ),
    "trl-sft-yaml-launched": Recipe(
        "trl",
        {"sft.yaml": published.SFT_YAML, "launch_sft.sh": published.SFT_LAUNCH},
        {"trainer.algorithm": "sft", "trainer.lr": 2e-5, "run.name": "sft", "experts.per_batch": 64,
         "trainer.min_lr_share": 0.1, "model.context": 4096},
        ("run_name", "launcher.accelerate_config", "neftune_noise_alpha"),
    ),
    "verl-yaml": Recipe(
        "verl",
        {"grpo_math.yaml": published.MATH_YAML},
        {
            "trainer.algorithm": "dr_grpo", "algorithms.dr_grpo.row_tokens": 3072, "algorithms.dr_grpo.clip_low": 0.2,
            "algorithms.dr_grpo.clip_high": 0.28, "algorithms.dr_grpo.kl_estimator": "k2", "trainer.warmup_steps": 15,
            "algorithms.dr_grpo.correction": "icepop", "algorithms.dr_grpo.correction_low": 0.5, "run.steps": 310,
            "tasksets.gsm8k.passes": 10, "evaluations.val.source": "parquet:~/data/gsm8k/test.parquet",
            "model.chat_template_kwargs": {"enable_thinking": False}, "evaluations.val.n": 4,
        },
        ("actor_rollout_ref.actor.clip_ratio = 0.3", "algorithm.rollout_correction.rollout_rs"),
    ),
    "verl-gspo-arrays": Recipe(
        "verl",
        {"run_gspo.sh": published.GSPO},
        {
            "trainer.algorithm": "gspo", "algorithms.gspo.clip_high": 4e-4, "algorithms.gspo.overlong_share": 0.25,
            "tasksets.gsm8k.shuffle": False, "trainer.warmup_steps": 10, "trainer.tokens_per_microbatch": 10240,
            "algorithms.gspo.correction": "tis", "evaluations.val.sampling": {"temperature": 1.0, "top_p": 0.7},
        },
        ("actor_rollout_ref.actor.clip_ratio_c",),
        quiet=("actor_rollout_ref.actor.loss_agg_mode", "reward.reward_kwargs.max_resp_len"),
    ),
    "verl-tools": Recipe(
        "verl",
        {"gsm8k_multiturn_grpo.yaml": published.TURNS_YAML, "run_multiturn.sh": published.TURNS},
        {
            "tasksets.gsm8k.environment": "tools", "environments.tools.max_turns": 5, "sampling.max_tokens": 1024,
            "environments.tools.max_result_chars": 1024, "environments.tools.max_calls": 1, "feeder.group_size": 16,
        },
        ("actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.multi_turn.format"),
        quiet=("actor_rollout_ref.actor.ppo_mini_batch_size",),
        refused="'my_tools:write_these_tools' cannot be imported",
    ),
    "verl-images-lora": Recipe(
        "verl",
        {"run_vl_lora.sh": published.IMAGES},
        {
            "model.lora.rank": 64, "model.lora.alpha": 32.0, "backends.torch.freeze_vision_tower": True,
            "tasksets.geo3k.columns": {"messages": "prompt", "answer": "reward_model.ground_truth",
                                       "data_source": "data_source", "images": "images"},
            "rewards.geo:compute_score.format_weight": 0.1, "trainer.minibatches": 4, "feeder.group_size": 5,
        },
        ("actor_rollout_ref.model.exclude_modules", "trainer.nnodes"),
        {"geo.py": "def compute_score(data_source, solution_str, ground_truth, extra_info=None, format_weight=0.0):\n"
                   "    return float(ground_truth in solution_str)\n"},
    ),
    "verl-sft-engine": Recipe(
        "verl",
        {"run_sft_engine.sh": published.ENGINE},
        {
            "trainer.algorithm": "sft", "experts.columns": {"messages": "messages"}, "trainer.lr": 2e-5,
            "trainer.min_lr_share": 0.1, "trainer.lr_schedule": "cosine", "run.steps": 2, "experts.per_batch": 96,
        },
        ("trainer.test_freq", "engine.strategy", "trainer.default_local_dir"),
    ),
    "prime-rl-wordle": Recipe(
        "prime-rl",
        {
            "rl.toml": 'max_steps = 200\nseq_len = 4096\n[model]\nname = "Qwen/Qwen2.5-0.5B-Instruct"\n'
            '[monitors.wandb]\nproject = "games"\nname = "Wordle"\n[orchestrator]\nbatch_size = 512\n'
            "group_size = 16\n[orchestrator.train.sampling]\nmax_completion_tokens = 1024\n[trainer.loss]\n"
            "kl_tau = 0.01\n[inference.vllm]\ndata_parallel_size = 6\n" + PRIME_ENVIRONMENT
        },
        {
            "run.name": "wordle", "run.steps": 200, "feeder.groups_per_batch": 32, "feeder.group_size": 16,
            "feeder.max_staleness": 8, "trainer.algorithm": "dppo", "algorithms.dppo.square_coef": 0.01,
            "tasksets.wordle.reward": "environment", "trackers.wandb": "games",
        },
        ("inference.vllm.data_parallel_size",),
        {"wordle.jsonl": '{"prompt": "0", "idx": 0}\n'},
    ),
    "prime-rl-apart": Recipe(
        "prime-rl",
        {
            "orch.toml": 'max_steps = 20\nbatch_size = 128\ngroup_size = 16\nmax_off_policy_steps = 4\n[model]\n'
            'name = "Qwen/Qwen2.5-0.5B-Instruct"\n' + PRIME_ENVIRONMENT.replace("orchestrator.", ""),
            "train.toml": 'max_steps = 20\n[model]\nname = "Qwen/Qwen2.5-0.5B-Instruct"\nseq_len = 2048\n[optim]\n'
            "lr = 3e-6\n[ckpt]\ninterval = 10\nkeep_last = 1\n",
        },
        {
            "run.steps": 20, "feeder.groups_per_batch": 8, "feeder.max_staleness": 4, "trainer.lr": 3e-6,
            "trainer.checkpoint_every": 10, "trainer.keep_checkpoints": 2, "model.context": 2048,
        },
        (),
        {"wordle.jsonl": '{"prompt": "0", "idx": 0}\n'},
    ),
    "prime-rl-sft": Recipe(
        "prime-rl",
        {
            "sft.toml": 'max_steps = 20\n[model]\nname = "Qwen/Qwen2.5-0.5B-Instruct"\n[data]\nname = "org/chats"\n'
            "seq_len = 1024\nbatch_size = 64\nmicro_batch_size = 1\n[optim]\nlr = 1e-5\n"
        },
        {"trainer.algorithm": "sft", "experts.source": "hf:org/chats", "experts.per_batch": 64, "model.context": 1024},
        ("data.micro_batch_size",),
    ),
}  # fmt: skip
