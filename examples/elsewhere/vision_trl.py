from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def exact(completions, answer, **kwargs):
    return [float(said[-1]["content"].strip() == one) for said, one in zip(completions, answer, strict=True)]


dataset = load_dataset("imagefolder", data_dir="squares", split="train")  # columns image, prompt, answer
args = GRPOConfig(output_dir="vision", max_steps=500, num_generations=8, max_completion_length=2)
GRPOTrainer("model-with-images", exact, args=args, train_dataset=dataset).train()
