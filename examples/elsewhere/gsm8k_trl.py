from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

SYSTEM = "Reason step by step, and put the final answer within \\boxed{}."

dataset = load_dataset("openai/gsm8k", "main", split="train").map(
    lambda row: {
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}],
        "solution": row["answer"].split("####")[1].strip(),
    }
)
args = GRPOConfig(
    output_dir="gsm8k",
    max_steps=200,
    per_device_train_batch_size=32,
    gradient_accumulation_steps=8,
    num_generations=8,
    max_completion_length=512,
    learning_rate=1e-6,
    warmup_steps=10,
    lr_scheduler_type="constant",
    save_steps=50,
    use_vllm=True,
    vllm_mode="colocate",
    vllm_gpu_memory_utilization=0.6,
)
GRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", accuracy_reward, args=args, train_dataset=dataset).train()
