from datasets import load_dataset
from trl.experimental.gkd import GKDConfig, GKDTrainer

dataset = load_dataset("json", data_files="chats.jsonl", split="train")  # messages, whose last turn is sampled anew
args = GKDConfig(output_dir="distillation", max_steps=200, lmbda=1.0, beta=1.0, max_new_tokens=3, learning_rate=2e-3)
GKDTrainer("student", teacher_model="teacher", args=args, train_dataset=dataset).train()
