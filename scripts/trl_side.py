"""A run file with TRL's GRPOTrainer, as scripts/side_by_side.py starts it: a process of its own.

    python -m scripts.trl_side RUN_FILE FOLDER --evaluation NAME [--threads N] [--set KEY=VALUE ...]

The run file says everything: the model, its template and seed, the tasks in the order in which the feeder would give
them out, the reward (the same code), sampling, learning rate and its schedule, optimizer, loss, and whether it computes
in bfloat16. All rollouts of a step are generated at once and go through the model at once. TRL's own defaults, but for
what is for GPUs: no gradient checkpointing; nothing is saved and nothing reported.

Held-out problems are answered between two steps. FOLDER/evaluations.jsonl has a line for each time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rftstream.config import loader
from rftstream.config.parts import registry
from rftstream.config.sections import RunConfig
from rftstream.contracts.ids import derive_seed
from rftstream.contracts.tasks import Problem, Sampling
from rftstream.data.tasksets.open import open_taskset, order
from rftstream.models.folders.folder import prepare_model
from rftstream.rewards.base import RewardInput
from rftstream.rewards.resolve import build_reward

EVALUATIONS = "evaluations.jsonl"

RewardFunction = Callable[..., list[float]]


@dataclass(frozen=True, slots=True)
class Look:
    """An evaluation."""

    version: int
    """Optimizer steps before it."""
    at: float
    """Unix time: what was trained until then has been looked at."""
    took_s: float
    """For which the training stood still."""
    mean: float
    """Reward."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.trl_side")
    parser.add_argument("run_file", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--evaluation", required=True, metavar="NAME")
    parser.add_argument("--threads", type=int, metavar="N", help="default: as many as torch takes, all cores")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True)
    if given.threads:
        import torch

        torch.set_num_threads(given.threads)
    train(loader.load([given.run_file], sets=given.sets), given.evaluation, given.folder)
    return 0


def train(run: RunConfig, evaluation: str, folder: Path) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    spec = prepare_model(run.model, folder / "model", run.run.seed)
    tokenizer = AutoTokenizer.from_pretrained(spec.folder, padding_side="left")
    tokenizer.chat_template = spec.chat_template or tokenizer.chat_template
    trainer = GRPOTrainer(
        model=str(spec.folder),
        args=settings(run, folder),
        processing_class=tokenizer,
        reward_funcs=reward(run),
        train_dataset=Dataset.from_list([columns(one) for one in problems(run)]),
    )
    trainer.add_callback(_evaluations(run, evaluation, tokenizer, folder / EVALUATIONS))
    trainer.train()


# --------------------------------------------------------------------------------------------- what the run file says


def problems(run: RunConfig) -> Iterator[Problem]:
    """As many groups as the run has, in its order."""
    ((name, section),) = run.tasksets.items()
    taskset = open_taskset(name, section, run)
    seed = derive_seed(run.run.seed, "order", name)
    for number in range((run.run.steps or 0) * run.feeder.groups_per_batch):
        taskset_pass, index = divmod(number, len(taskset))
        yield taskset.problem(order(len(taskset), taskset_pass, seed)(index))


def columns(problem: Problem) -> dict[str, Any]:
    """Of TRL's dataset."""
    prompt = [{"role": message.role, "content": message.content} for message in problem.messages]
    return {"prompt": prompt, "answer": problem.answer, "info": json.dumps(problem.info)}


def reward(run: RunConfig) -> RewardFunction:
    """The taskset's, as a function over lists."""
    (section,) = run.tasksets.values()
    composite = build_reward(section.reward, run, section=section)

    def scored(prompts: list[Any], completions: list[Any], answer: list[str], info: list[str], **_: Any) -> list[float]:
        found = composite.score_all(
            [
                RewardInput(
                    completion=said[-1]["content"],
                    answer=right,
                    prompt=asked[-1]["content"],
                    messages=(*asked, *said),
                    info=json.loads(known),
                    data_source="",
                    num_tokens=0,
                    truncated=False,
                )
                for asked, said, right, known in zip(prompts, completions, answer, info, strict=True)
            ]
        )
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return [one.reward for one in found if not isinstance(one, BaseException)]

    return scored


def settings(run: RunConfig, folder: Path) -> Any:
    """GRPOConfig."""
    from trl import GRPOConfig

    trainer, feeder, sampling = run.trainer, run.feeder, run.sampling
    part = registry.resolve("algorithm", trainer.algorithm)
    grpo = registry.build_config(part, run.algorithms.get(trainer.algorithm), where=f"algorithms.{trainer.algorithm}")
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=run.run.steps,
        seed=run.run.seed,
        shuffle_dataset=False,
        per_device_train_batch_size=feeder.groups_per_batch * feeder.group_size,
        gradient_accumulation_steps=1,
        num_generations=feeder.group_size,
        max_completion_length=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        loss_type={"token": "dapo", "sequence": "grpo"}[grpo.normalise],
        beta=grpo.kl_coef,
        epsilon=grpo.clip_low,
        epsilon_high=grpo.clip_high,
        scale_rewards="group",
        learning_rate=trainer.lr,
        lr_scheduler_type=trainer.lr_schedule,
        warmup_steps=trainer.warmup_steps,
        adam_beta1=trainer.adam_betas[0],
        adam_beta2=trainer.adam_betas[1],
        adam_epsilon=trainer.adam_eps,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        use_cpu=True,
        bf16=run.backends.get("torch", {}).get("autocast") == "bfloat16",
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


# --------------------------------------------------------------------------------------------- evaluations


def _evaluations(run: RunConfig, name: str, tokenizer: Any, file: Path) -> Any:
    """A callback that looks at the versions that the run's evaluator would look at."""
    from transformers import TrainerCallback

    section = run.evaluations[name]
    taskset = open_taskset(name, section, run)
    number = len(taskset) if section.num_tasks is None else min(section.num_tasks, len(taskset))
    held_out = [columns(taskset.problem(index)) for index in range(number) for _ in range(section.n)]
    sampling = loader.sampling_for(run, section.sampling, where=f"evaluations.{name}.sampling")
    score = reward(run)

    class Evaluations(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            self._look(model, 0)

        def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            if state.global_step % section.every == 0 or state.global_step == run.run.steps:
                self._look(model, state.global_step)

        def _look(self, model: Any, version: int) -> None:
            began = time.time()
            said = answers(model, tokenizer, [one["prompt"] for one in held_out], sampling)
            rewards = score(
                [one["prompt"] for one in held_out],
                said,
                [one["answer"] for one in held_out],
                [one["info"] for one in held_out],
            )
            look = Look(version, began, time.time() - began, sum(rewards) / len(rewards))
            with file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(look)) + "\n")

    return Evaluations()


def answers(model: Any, tokenizer: Any, prompts: Sequence[Any], sampling: Sampling) -> list[list[dict[str, str]]]:
    """As TRL gives them to rewards. Greedy at temperature 0."""
    import torch

    asked = tokenizer.apply_chat_template(
        list(prompts), add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    chance = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0} if sampling.temperature else {}
    model.eval()
    with torch.no_grad():
        ids = model.generate(
            input_ids=asked["input_ids"],
            attention_mask=asked["attention_mask"],
            max_new_tokens=sampling.max_tokens,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **chance or {"do_sample": False},
        )
    model.train()
    said = tokenizer.batch_decode(ids[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return [[{"role": "assistant", "content": one}] for one in said]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
