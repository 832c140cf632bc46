"""Conversion rules for how TRL trains: data type, four bits, adapter and optimizer of the model, what transformers
counts in optimizer steps (evaluations, the end of a schedule), and tools."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rftstream.integrations.foreign_configs.conversion import Conversion, share, take_dtype

WITHOUT_END = 0
"""Longest row where TRL's is None."""


def put_model(c: Conversion) -> None:
    """Write how the model is held and trained."""
    if c.get("fp16") or c.get("bf16") is False:
        c.put("model.dtype", "float16" if c.get("fp16") else "float32", "fp16" if c.get("fp16") else "bf16")
        c.get("bf16")
    elif c.get("bf16"):
        c.put("model.dtype", "bfloat16", "bf16")
    else:
        take_dtype(c, ("dtype", "torch_dtype"))
        for name in ("dtype", "torch_dtype"):
            if c.get(name) in ("bfloat16", "float16"):
                c.leave(f"{name} of the weights that are trained", "the trainer's weights are float32")
    if template := c.get("tokenizer.chat_template"):
        c.put("model.chat_template", template, "tokenizer.chat_template")
    if path := c.get("chat_template_path"):
        if str(path).endswith((".jinja", ".jinja2", ".j2")):
            c.put("model.chat_template", path, "chat_template_path")
        else:
            c.ask(
                f"chat_template_path {path}: TRL takes the template of that model, with its special tokens; write "
                "model.chat_template, a template's file or text"
            )
    if token := c.get("eos_token"):
        c.ask(
            f"eos_token {token}: answers end with that token there, here with what the chat template writes and the "
            "model's own end: set it in the model's folder (tokenizer_config.json, generation_config.json)"
        )
    if c.get("load_in_4bit"):
        names = ("bnb_4bit_quant_type", "quantization_config.bnb_4bit_quant_type")
        given = {name: kind for name in names if (kind := c.get(name)) is not None}
        c.put("model.quantize", "nf4", ", ".join(("load_in_4bit", *(one for one in given if given[one] == "nf4"))))
        for name, kind in given.items():
            if kind != "nf4":
                c.leave(f"{name} = {kind!r}", "nf4 stands in its place")
    if (optimizer := str(c.get("optim", ""))).endswith("8bit") and "adamw" in optimizer:
        c.put("backends.torch.moments", "8bit", f"optim {optimizer}")
    elif optimizer and "adamw" not in optimizer:
        c.leave(f"optim = {optimizer!r}", "AdamW, always")
    if c.get("use_peft") and c.algorithm == "reward_model":
        c.ask(
            "peft_config: a reward model is trained whole here, an adapter of it is none yet: set trainer.lr, as that "
            "of an adapter is too high for all weights"
        )
    elif c.get("use_peft"):
        if c.get("lora_target_modules") is None:
            c.ask(
                "lora_target_modules: none are named, and PEFT takes those of the model's family, of Qwen and Llama "
                "q_proj and v_proj; all-linear stands in their place: write model.lora.targets"
            )
        c.lora("lora_r", "lora_alpha", "lora_target_modules", 32.0, default_rank=16, rooted="use_rslora")


def evaluated_every(c: Conversion, steps: int | None) -> tuple[Any, str]:
    """Return the optimizer steps between two evaluations as transformers has them, None if none says how many, and the
    setting that they are of. `steps`: all optimizer steps of the training, if they are known."""
    strategy = c.get("eval_strategy", c.get("evaluation_strategy", "no"))
    name = "eval_steps" if c.get("eval_steps") else "logging_steps"
    if strategy != "steps" and name == "logging_steps":
        return None, f"eval_strategy {strategy!r}"
    every = c.get(name)
    if 0 < every < 1:
        return (None if steps is None else max(math.ceil(every * steps), 1)), name
    return int(every), name if name == "eval_steps" else "logging_steps, as eval_strategy has no eval_steps"


def put_in_steps(c: Conversion, batch_steps: int) -> None:
    """Write what the optimizer's steps decide: the lowest learning rate, and the policy that is the reference. A batch
    takes `batch_steps` of them."""
    if c.get("sync_ref_model"):
        every, rounded = share(c.get("ref_model_sync_steps", 512), batch_steps, up=True)
        said = f" / {batch_steps} optimizer steps per batch{rounded}" if batch_steps > 1 else ""
        c.put("trainer.reference_every", every, f"ref_model_sync_steps{said}")
        c.leave("ref_model_mixup_alpha", "the newer policy takes the place of the reference, unmixed")
    _put_lowest_rate(c)


def _put_lowest_rate(c: Conversion) -> None:
    """Take the learning rate at the end of a schedule that does not fall to 0."""
    kwargs = "lr_scheduler_kwargs"
    given = c.get(kwargs) or {}
    if (lowest := given.get("min_lr_rate")) is not None:
        c.put("trainer.min_lr_share", lowest, f"{kwargs}.min_lr_rate")
    elif (lowest := given.get("min_lr")) is not None:
        c.put("trainer.min_lr_share", lowest / c.get("learning_rate"), f"{kwargs}.min_lr / learning_rate")
    for name in sorted(set(given) - {"min_lr_rate", "min_lr"}):
        c.leave(f"{kwargs}.{name} = {given[name]}", "there are constant, linear and cosine, without more settings")


def name_longest_row(settings: dict[str, Any], of_script: Mapping[str, Any]) -> None:
    """Give the length of the longest row TRL's name. `of_script`: the settings in a script, also those that are
    None."""
    for name in ("max_seq_length", "vllm_max_model_length"):  # TRL's before 0.13 and unsloth's; of unsloth's model
        if name in settings:
            settings.setdefault("max_length", settings.pop(name))
    if "max_length" not in settings and "max_length" in of_script:
        settings["max_length"] = WITHOUT_END


def put_longest_row(c: Conversion) -> None:
    """Write how long a row of demonstrations may be."""
    if (longest := c.get("max_length")) == WITHOUT_END:
        c.leave("max_length = null", "rows of any length that the model takes")
    else:
        c.put("model.context", longest, "max_length")
        c.put("experts.too_long", "skip", "max_length: TRL cuts what is longer, here it is left out")


def put_objective(c: Conversion, kind: str) -> None:
    """Write what is learned from demonstrations or pairs, and say where TRL learns more of a row."""
    if kind == "dpo":
        if c.get("loss_type", "sigmoid") not in ("sigmoid", ["sigmoid"]):
            c.ask(f"loss_type {c.get('loss_type')}: 'sigmoid' alone has a counterpart, and stands in its place")
        c.put("algorithms.dpo.beta", c.get("beta"), "beta")
        if smoothing := c.get("label_smoothing"):
            c.put("algorithms.dpo.label_smoothing", smoothing, "label_smoothing")
    if kind == "sft" and (loss := c.get("loss_type", "nll")) not in ("nll", "chunked_nll"):
        c.ask(f"loss_type {loss}: 'nll' alone has a counterpart, and stands in its place")
    if kind == "reward" and (factor := c.get("center_rewards_coefficient")):
        c.put("algorithms.reward_model.centring", factor, "center_rewards_coefficient")
    if kind == "reward":
        there = (
            'it counts by experts.columns.weight = "margin", and the algorithm\'s weight_as = "margin", margin = 1.0'
        )
        c.leave("a column margin, if rows have one", there, at_default=True)
    for name in ("completion_only_loss", "assistant_only_loss"):
        if c.get(name) is not None:
            c.leave(name, "what the assistant said is trained, always")
    if (other := c.get("ref_model")) is not None:
        c.ask(
            f"ref_model {other}: the reference is the model that the run begins with, and no setting names another; "
            f"model.path = {str(other)!r} begins with it, else this is another training"
        )
    if kind == "sft" and not c.get("assistant_only_loss"):
        there = (
            "of rows with `messages` TRL trains all then, of a prompt and its completion the completion; here what the "
            "assistant said, always"
        )
        c.leave("assistant_only_loss is off", there, at_default=True)
    if kind == "sft" and c.get("packing"):
        c.ask(
            f"packing: TRL's batch has blocks of {c.get('max_length')} tokens, of several rows each, here rows: set "
            "experts.per_batch to as many as are in these blocks; run.steps and the warm-up follow from it"
        )


def put_tools(c: Conversion, sections: list[str], script: str) -> list[str]:
    """Write the tools of these sections, or the environment that is to be written in their place. Return the functions
    of the script, of this name, that are tools."""
    read = [one for one in c.get("tools") or () if isinstance(one, str)]
    if tools := c.get("tools"):
        for section in sections:
            c.put(f"{section}.environment", "tools", "tools")
        c.put("environments.tools.tools", [one if ":" in one else f"{script}_tools:{one}" for one in read], "tools")
        for one in tools:
            if isinstance(one, dict):
                c.ask(f"a tool could not be read ({next(iter(one.values()))}): add it to environments.tools.tools")
        turns, name = c.get("max_tool_calling_iterations"), "max_tool_calling_iterations"
        said = f"{name} {turns} + the answer" if turns else f"{name}: without a limit there"
        c.put("environments.tools.max_turns", turns + 1 if turns else 100, said)
    for name in ("environment_factory", "rollout_func"):
        if (made := c.get(name)) is not None:
            place = f"{script}_environment:write_this_environment"
            for section in sections:
                c.put_placeholder(f"{section}.environment", place, name)
            c.ask(
                f"{name} {made}: write it as an environment (docs/extending.md, or as tools with a state), and put "
                f"its name in the place of {place!r}; a reward that reads `environments` is the environment's own "
                'then, of each turn: reward = "environment"'
            )
    return [one for one in read if ":" not in one]
