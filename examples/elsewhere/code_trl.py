from datasets import load_dataset
from my_sandbox import share_of_right_calls  # TRL runs no programs: isolation is the user's
from trl import GRPOConfig, GRPOTrainer


def passes_tests(completions, tests, **kwargs):
    return [share_of_right_calls(said, one) for said, one in zip(completions, tests, strict=True)]


dataset = load_dataset("json", data_files="functions.jsonl", split="train")
args = GRPOConfig(output_dir="code", max_steps=170, num_generations=8, learning_rate=2e-3)
GRPOTrainer("model", passes_tests, args=args, train_dataset=dataset).train()  # after an SFTTrainer of its own
