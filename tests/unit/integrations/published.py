"""The files of ten recipes in the manner of published ones: tools over several turns, images, QLoRA, pairs and
demonstrations; YAML of hydra with interpolations, and overrides in arrays of a shell script."""

AGENT = """
# Train a small agent that looks up facts in a table before it answers.
import re
import sqlite3
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
def look_up(title: str) -> str:
    '''Look up an article by its title.'''
    rows = sqlite3.connect("articles.db").execute("SELECT text FROM articles WHERE title = ?", (title,)).fetchall()
    return rows[0][0][:800] if rows else "nothing found"
def add(a: float, b: float) -> float:
    '''Add two numbers.'''
    return a + b
TOOLS = [look_up, add]
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
def correct(completions, answer, **kwargs):
    scores = []
    for completion, expected in zip(completions, answer):
        found = ANSWER.findall(completion[-1]["content"] or "")
        scores.append(1.0 if found and found[-1].strip().lower() == expected.lower() else 0.0)
    return scores
def used_tools(completions, **kwargs):
    return [0.1 * any(one["role"] == "tool" for one in completion) for completion in completions]
def main(script_args, training_args, model_args):
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    def prompt(example):
        return {
            "prompt": [
                {"role": "system", "content": "Use the tools. Put your answer between <answer> and </answer>."},
                {"role": "user", "content": example["question"]},
            ]
        }
    dataset = dataset.map(prompt)
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        tools=TOOLS,
        reward_funcs=[correct, used_tools],
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    main(*parser.parse_args_and_config())
"""
AGENT_YAML = """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: org/facts
output_dir: outputs/fact-agent
run_name: fact-agent
learning_rate: 2.0e-6
lr_scheduler_type: constant_with_warmup
warmup_steps: 10
max_steps: 300
per_device_train_batch_size: 4
gradient_accumulation_steps: 16
steps_per_generation: 16
num_generations: 8
max_completion_length: 2048
max_tool_calling_iterations: 6
chat_template_kwargs:
  enable_thinking: false
use_vllm: true
vllm_mode: colocate
vllm_gpu_memory_utilization: 0.4
vllm_enable_sleep_mode: true
loss_type: dr_grpo
beta: 0.001
reward_weights: [1.0, 0.5]
mask_truncated_completions: true
eval_strategy: steps
logging_steps: 5
log_completions: true
report_to: [wandb]
bf16: true
"""
VISION = """
# accelerate launch grpo_vlm.py
import re
import torch
from datasets import load_dataset
from transformers import AutoProcessor
from trl import GRPOConfig, GRPOTrainer
MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"
SYSTEM_PROMPT = (
    "A conversation between user and assistant. The assistant looks at the picture, thinks, "
    "and gives the final number after ####."
)
dataset = load_dataset("org/charts", split="train[:90%]")
processor = AutoProcessor.from_pretrained(MODEL, use_fast=True, padding_side="left")
def make_conversation(example):
    return {
        "prompt": [
            {"role": "system", "content": [{"type": "text", "text": SYSTEM_PROMPT}]},
            {
                "role": "user",
                "content": [{"type": "image"}, {"type": "text", "text": example["problem"]}],
            },
        ],
        "image": example["image"],
    }
dataset = dataset.map(make_conversation)
dataset = dataset.remove_columns(["problem", "original_question"])
def accuracy(completions: list[list[dict[str, str]]], solution: list[str], **kwargs) -> list[float]:
    found = [re.findall(r"####\\s*(.+)", one[0]["content"]) for one in completions]
    return [float(bool(one) and one[-1].strip() == gold) for one, gold in zip(found, solution)]
training_args = GRPOConfig(
    output_dir="Qwen2.5-VL-charts",
    learning_rate=1e-5,
    model_init_kwargs={"dtype": torch.bfloat16},
    remove_unused_columns=False,
    num_train_epochs=1,
    bf16=True,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=8,
    max_completion_length=1024,
    num_generations=4,
    report_to=["tensorboard"],
    logging_steps=10,
    push_to_hub=True,
    save_strategy="steps",
    save_steps=0.25,
    importance_sampling_level="sequence",
    beta=0.04,
)
trainer = GRPOTrainer(
    model=MODEL,
    processing_class=processor,
    reward_funcs=[accuracy],
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
"""
QLORA_YAML = """
# Model
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
model_revision: main
dtype: bfloat16
attn_implementation: flash_attention_2
use_peft: true
lora_r: 32
lora_alpha: 64
lora_dropout: 0.05
lora_target_modules: [q_proj, k_proj, v_proj, o_proj]
load_in_4bit: true
bnb_4bit_quant_type: nf4
# Data
dataset_name: org/math
dataset_train_split: train
dataset_test_split: train
# GRPO
reward_funcs:
  - accuracy_reward
  - think_format_reward
  - get_soft_overlong_punishment
reward_weights:
  - 1.0
  - 0.2
  - 0.1
num_generations: 16
generation_batch_size: 256
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
num_iterations: 1
max_prompt_length: 512
max_completion_length: 1024
scale_rewards: batch
loss_type: dapo
epsilon_high: 0.28
temperature: 0.7
use_vllm: true
vllm_importance_sampling_mode: token_truncate
vllm_importance_sampling_cap: 2.0
learning_rate: 2.0e-05
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr_rate: 0.1
warmup_ratio: 0.1
num_train_epochs: 1
optim: paged_adamw_8bit
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
do_eval: true
eval_strategy: steps
eval_steps: 20
hub_model_id: someone/qwen-math
hub_strategy: every_save
push_to_hub: true
log_level: info
logging_first_step: true
logging_strategy: steps
output_dir: data/Qwen-math-lora
overwrite_output_dir: true
report_to:
  - wandb
save_strategy: epoch
save_total_limit: 1
seed: 7
"""
PAIRS = """
import argparse
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
parser = argparse.ArgumentParser()
parser.add_argument("--model_name", default="Qwen/Qwen2.5-0.5B-Instruct")
parser.add_argument("--lr", type=float, default=5e-6)
parser.add_argument("--beta", type=float, default=0.1)
args = parser.parse_args()
model = AutoModelForCausalLM.from_pretrained(args.model_name, dtype="bfloat16")
tokenizer = AutoTokenizer.from_pretrained(args.model_name)
pairs = load_dataset("org/pairs", split="train")
pairs = pairs.train_test_split(test_size=0.05, seed=42)
peft_config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
training_args = DPOConfig(
    output_dir="dpo-qwen",
    beta=args.beta,
    loss_type=["sigmoid", "sft"],
    loss_weights=[1.0, 0.2],
    learning_rate=args.lr,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=8,
    num_train_epochs=2,
    lr_scheduler_type="cosine",
    warmup_ratio=0.1,
    max_length=1536,
    eval_strategy="steps",
    eval_steps=50,
    save_steps=200,
    logging_steps=10,
    bf16=True,
    report_to="none",
)
trainer = DPOTrainer(
    model,
    ref_model=None,
    args=training_args,
    train_dataset=pairs["train"],
    eval_dataset=pairs["test"],
    processing_class=tokenizer,
    peft_config=peft_config,
)
trainer.train()
trainer.save_model()
"""
SFT_YAML = """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
model_init_kwargs:
  attn_implementation: kernels-community/flash-attn2
  dtype: bfloat16
dataset_name: org/chats
dataset_num_proc: 8
eos_token: <|im_end|>
learning_rate: 4.0e-05
num_train_epochs: 2
max_length: 4096
packing: true
packing_strategy: bfd
assistant_only_loss: true
use_liger_kernel: true
per_device_train_batch_size: 4
gradient_accumulation_steps: 4
gradient_checkpointing: true
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr_rate: 0.1
warmup_ratio: 0.03
weight_decay: 0.01
max_grad_norm: 0.2
neftune_noise_alpha: 5
output_dir: data/sft
eval_strategy: "no"
save_strategy: steps
save_steps: 100
save_total_limit: 3
bf16: true
report_to: [wandb]
seed: 42
"""
SFT_LAUNCH = """
#!/bin/bash
#SBATCH --gres=gpu:4
set -euo pipefail
export WANDB_PROJECT=sft
NUM_GPUS=${NUM_GPUS:-4}
trl sft --config sft.yaml \\
    --accelerate_config zero2 --num_processes $NUM_GPUS \\
    --run_name "chats-$(date +%m%d)" --learning_rate 2e-5
"""
MATH_YAML = """
hydra:
  searchpath:
    - file://verl/trainer/config
defaults:
  - ppo_trainer
  - _self_
data:
  train_files:
    - ~/data/gsm8k/train.parquet
  val_files: ${oc.env:HOME}/data/gsm8k/test.parquet
  train_batch_size: 128
  max_prompt_length: 1024
  max_response_length: 3072
  filter_overlong_prompts: true
  truncation: error
  apply_chat_template_kwargs:
    enable_thinking: false
actor_rollout_ref:
  model:
    path: Qwen/Qwen2.5-0.5B-Instruct
    use_remove_padding: true
    enable_gradient_checkpointing: true
  actor:
    ppo_mini_batch_size: 32
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: 24576
    clip_ratio: 0.3
    clip_ratio_high: 0.28
    loss_agg_mode: seq-mean-token-sum-norm
    loss_scale_factor: ${data.max_response_length}
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: k3+
    entropy_coeff: 0.0
    optim:
      lr: 2e-6
      lr_warmup_steps_ratio: 0.05
      lr_scheduler_type: cosine
      min_lr_ratio: 0.1
      weight_decay: 0.1
    fsdp_config:
      param_offload: false
      optimizer_offload: false
  rollout:
    name: vllm
    n: 8
    temperature: 1.0
    tensor_model_parallel_size: 1
    gpu_memory_utilization: 0.6
    log_prob_use_dynamic_bsz: true
    val_kwargs:
      do_sample: true
      temperature: 0.6
      top_p: 0.95
      n: 4
  ref:
    log_prob_use_dynamic_bsz: true
algorithm:
  adv_estimator: grpo
  norm_adv_by_std_in_grpo: false
  use_kl_in_reward: false
  rollout_correction:
    rollout_is: token
    rollout_is_threshold: 0.5_5.0
    rollout_rs: seq_mean_k1
    rollout_rs_threshold: 0.99_1.01
trainer:
  total_epochs: 10
  total_training_steps: 310
  project_name: math
  experiment_name: qwen-grpo-${oc.env:USER}
  logger: [console, wandb]
  n_gpus_per_node: 8
  nnodes: 1
  save_freq: 20
  test_freq: 10
  val_before_train: false
"""
GSPO = """
#!/usr/bin/env bash
# GSPO on math problems, FSDP + vLLM, one node of 8 GPUs.
set -xeuo pipefail
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-0.5B-Instruct}
TRAIN_FILE=${TRAIN_FILE:-$HOME/data/gsm8k/train.parquet}
TEST_FILE=${TEST_FILE:-$HOME/data/gsm8k/test.parquet}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
rollout_n=16
max_prompt_length=$((1024 * 1))
max_response_length=$((1024 * 4))
clip_ratio_low=0.0003
clip_ratio_high=0.0004
offload=False
DATA=(
    data.train_files="['$TRAIN_FILE']"
    data.val_files="['$TEST_FILE']"
    data.train_batch_size=256
    data.max_prompt_length=${max_prompt_length}
    data.max_response_length=${max_response_length}
    data.filter_overlong_prompts=True
    data.truncation=left
    data.return_raw_chat=True
    data.shuffle=False
)
MODEL=(actor_rollout_ref.model.path="$MODEL_PATH" actor_rollout_ref.model.use_remove_padding=True)
ACTOR=(
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    actor_rollout_ref.actor.optim.weight_decay=0.1
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.clip_ratio_low=${clip_ratio_low}
    actor_rollout_ref.actor.clip_ratio_high=${clip_ratio_high}
    actor_rollout_ref.actor.clip_ratio_c=10.0
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((max_prompt_length + max_response_length) * 2))
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.kl_loss_coef=0.0
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.fsdp_config.param_offload=${offload}
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=1
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.mode=async
    actor_rollout_ref.rollout.n=${rollout_n}
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.top_p=1.0
    actor_rollout_ref.rollout.top_k=-1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8
    actor_rollout_ref.rollout.val_kwargs.n=1
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7
)
REWARD=(
    reward.reward_manager.name=dapo
    +reward.reward_kwargs.overlong_buffer_cfg.enable=True
    +reward.reward_kwargs.overlong_buffer_cfg.len=1024
    +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
    +reward.reward_kwargs.max_resp_len=${max_response_length}
)
TRAINER=(
    trainer.critic_warmup=0
    trainer.logger='["console","wandb"]'
    trainer.project_name=gspo
    trainer.experiment_name="qwen-gspo-lr1e-6"
    trainer.n_gpus_per_node=${NGPUS_PER_NODE}
    trainer.nnodes=1
    trainer.val_before_train=False
    trainer.test_freq=10
    trainer.save_freq=30
    trainer.total_epochs=10
    trainer.resume_mode=auto
)
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    algorithm.use_kl_in_reward=False \\
    "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" "${TRAINER[@]}" "$@"
"""
TURNS_YAML = """
hydra:
  searchpath:
    - file://verl/trainer/config
defaults:
  - ppo_trainer
  - _self_
data:
  max_prompt_length: 1024
  max_response_length: 1024
  train_batch_size: 256
  return_raw_chat: True
actor_rollout_ref:
  hybrid_engine: True
  rollout:
    name: sglang
    multi_turn:
      enable: True
      max_assistant_turns: 5
      tool_config_path: "config/tool_config/gsm8k_tool_config.yaml"
      format: hermes
"""
TURNS = """
# run on 8 GPUs
set -x
ulimit -n 65535
PROJECT_DIR="$(pwd)"
CONFIG_PATH="$PROJECT_DIR/config"
function now() {
    date '+%d-%H-%M'
}
EXPERIMENT_NAME="qwen_async_$(now)"
python3 -m verl.trainer.main_ppo \\
    --config-path="$CONFIG_PATH" \\
    --config-name='gsm8k_multiturn_grpo' \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files=$HOME/data/gsm8k/test.parquet \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.rollout.mode=async \\
    actor_rollout_ref.rollout.n=16 \\
    actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent \\
    actor_rollout_ref.rollout.multi_turn.max_tool_response_length=1024 \\
    algorithm.use_kl_in_reward=False \\
    trainer.critic_warmup=0 \\
    trainer.logger='["console","wandb"]' \\
    trainer.project_name='gsm8k_async_rl' \\
    trainer.experiment_name=$EXPERIMENT_NAME \\
    trainer.n_gpus_per_node=8 \\
    trainer.save_freq=-1 \\
    trainer.test_freq=20 \\
    trainer.total_epochs=15 $@
"""
IMAGES = """
set -x
ENGINE=${1:-vllm}
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/geo3k/train.parquet \\
    data.val_files=$HOME/data/geo3k/test.parquet \\
    data.train_batch_size=512 \\
    data.max_prompt_length=1024 \\
    data.max_response_length=2048 \\
    data.filter_overlong_prompts=True \\
    data.truncation='error' \\
    data.image_key=images \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-3B-Instruct \\
    actor_rollout_ref.model.lora_rank=64 \\
    actor_rollout_ref.model.lora_alpha=32 \\
    actor_rollout_ref.model.target_modules=all-linear \\
    actor_rollout_ref.model.exclude_modules='.*visual.*' \\
    actor_rollout_ref.actor.freeze_vision_tower=True \\
    actor_rollout_ref.actor.optim.lr=3e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.01 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.rollout.name=$ENGINE \\
    actor_rollout_ref.rollout.n=5 \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True \\
    reward.custom_reward_function.path=scores/geo.py \\
    reward.custom_reward_function.name=compute_score \\
    +reward.custom_reward_function.reward_kwargs.format_weight=0.1 \\
    trainer.logger=[console,wandb] \\
    trainer.project_name='vl' trainer.experiment_name='geo3k_lora' \\
    trainer.n_gpus_per_node=8 trainer.nnodes=2 \\
    trainer.save_freq=20 trainer.test_freq=5 \\
    trainer.total_epochs=15 "$@"
"""
ENGINE = """
#!/usr/bin/env bash
set -xeuo pipefail
TRAIN_FILES=${TRAIN_FILES:-~/data/chats/train.parquet}
backend=${BACKEND:-fsdp}
nproc_per_node=8
FSDP_ENGINE_CONFIG="\\
    engine=${backend} \\
    optim=${backend} \\
    optim.lr=2e-5 \\
    optim.lr_warmup_steps_ratio=0.03 \\
    optim.weight_decay=0.1 \\
    optim.betas=[0.9,0.95] \\
    optim.clip_grad=1.0 \\
    optim.min_lr_ratio=0.1 \\
    optim.lr_scheduler_type=cosine \\
    engine.ulysses_sequence_parallel_size=2 \\
    engine.strategy=fsdp2"
torchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node \\
    -m verl.trainer.sft_trainer \\
    data.train_files=$TRAIN_FILES \\
    data.train_batch_size=96 \\
    data.max_length=2048 \\
    data.pad_mode=no_padding \\
    data.truncation=error \\
    data.use_dynamic_bsz=True \\
    data.max_token_len_per_gpu=65536 \\
    data.messages_key=messages \\
    model.path=Qwen/Qwen2.5-0.5B-Instruct \\
    model.use_remove_padding=True \\
    $FSDP_ENGINE_CONFIG \\
    trainer.test_freq=after_each_epoch \\
    trainer.save_freq=-1 \\
    trainer.logger=['console'] \\
    trainer.project_name=sft \\
    trainer.experiment_name=chats-fsdp2 \\
    trainer.total_epochs=2 \\
    trainer.default_local_dir=checkpoints/sft \\
    trainer.resume_mode=disable
"""
