from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def calculator(expression: str) -> str:
    """Compute a sum.

    Args:
        expression: Two numbers with a plus between them.
    """
    return str(sum(map(int, expression.split("+"))))


def exact(completions, answer, **kwargs):
    return [float(said[-1]["content"].strip() == one) for said, one in zip(completions, answer, strict=True)]


dataset = load_dataset("json", data_files="sums.jsonl", split="train")
args = GRPOConfig(output_dir="tools", num_generations=8, max_completion_length=24, max_tool_calling_iterations=2)
GRPOTrainer("model", exact, args=args, train_dataset=dataset, tools=[calculator]).train()
