"""Converts verl's settings to a run file: PPO's trainer with all its estimators, and SFT, from YAML and from overrides
in a launch script.

Names and defaults are those of verl/trainer/config/ppo_trainer.yaml and sft_trainer.yaml. verl counts problems per
batch, as a run file does. It gives the size of minibatches; a run file gives their number.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from rftstream.errors import ConfigError
from rftstream.integrations.foreign_configs.conversion import Conversion, ConvertedConfig, many, section_name, share
from rftstream.integrations.foreign_configs.reading import merged, read_overrides, read_yaml, tables_of

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TABLES = tables_of("verl")
LOSSES = ("gspo", "cispo", "sapo")
PATHS = ("model.path", "partial_pretrain", "train_files", "val_files")
"""Ends of the names of path settings, which may keep an unresolved shell variable."""
LEVELS = ("token", "sequence", "geometric")
ENGINES = ("vllm", "hf")
DIVERGENCES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
TOO_LONG = {"error": "error", "left": "truncate", "right": "truncate", "middle": "truncate"}


def convert_verl(files: list[Path], gpus: int | None, trainer: str | None) -> ConvertedConfig:
    """Return the run file for YAML configs and launch scripts. Overrides of a script win over the files."""
    given = merged([(path, read_yaml(path)) for path in files if path.suffix in (".yaml", ".yml")])
    scripts = [(path, read_overrides(path)) for path in files if path.suffix not in (".yaml", ".yml")]
    given |= merged(scripts)
    is_sft = "model.partial_pretrain" in given or ("optim.lr" in given and f"{ACTOR}.optim.lr" not in given)
    unread = {name: value for name, value in given.items() if "$" in str(value)}
    placed = {name for name in unread if name.endswith(PATHS)}
    for name in set(unread) - placed:
        del given[name]
    conversion = Conversion("verl", given, TABLES["sft_defaults" if is_sft else "defaults"])
    for name, value in unread.items():
        if name in placed:
            conversion.ask(f"{name}: {value!r} has a variable of the shell; write the path in its place")
        else:
            conversion.leave_unread(name, f"{value!r}: only the shell that runs the script knows it")
    (_sft if is_sft else _reinforced)(conversion, files[0], gpus)
    return conversion.finish(TABLES["decided"])


def _model(c: Conversion, name: str, path: Path) -> None:
    if (model := c.get(name)) is None:
        raise ConfigError(f"{path}: no {name} that could be read, expected the model; add it to the file")
    c.put("model.path", model, name)
    prefix = name.rpartition(".")[0]
    c.lora(f"{prefix}.lora_rank", f"{prefix}.lora_alpha", f"{prefix}.target_modules", 16)


def _passes(c: Conversion, place: str) -> None:
    """Take the epochs if no number of steps is given. Steps win over epochs."""
    epochs = c.get("trainer.total_epochs")
    if c.get("trainer.total_training_steps") is None:
        c.put(f"{place}.passes", epochs, "trainer.total_epochs")


def _length(c: Conversion, warmup: str, schedule: str) -> None:
    """Take the schedule over the steps, and the intervals that are counted in steps."""
    steps = c.get("trainer.total_training_steps")
    at = c.get(f"{warmup}.lr_warmup_steps", -1)
    name = f"{warmup}.lr_warmup_steps" if at > 0 else f"{warmup}.lr_warmup_steps_ratio"
    c.schedule(schedule, at if at > 0 else c.get(name), name, steps)
    for there, key in (
        ("trainer.save_freq", "trainer.checkpoint_every"),
        ("trainer.test_freq", "evaluations.val.every"),
    ):
        every = c.get(there, -1)
        if every > 0 and (key != "evaluations.val.every" or c.get("data.val_files")):
            c.put(key, every, there)
    project = c.get("trainer.project_name")
    c.keep("trainer.max_actor_ckpt_to_keep")
    c.keep("trainer.max_ckpt_to_keep")
    c.name_run(c.get("trainer.experiment_name"), "trainer.experiment_name")
    c.track(c.get("trainer.logger"), "trainer.logger", project)


def _reinforced(c: Conversion, path: Path, gpus: int | None) -> None:
    _model(c, "actor_rollout_ref.model.path", path)
    _loss(c)
    files = many(c.get("data.train_files") or [])
    if not files:
        raise ConfigError(
            f"{path}: no data.train_files that could be read, expected the problems; add them to the file"
        )
    for number, file in enumerate(files):
        c.taskset = (
            section_name(str(file)) if number == 0 or section_name(str(file)) != c.taskset else f"{c.taskset}-{number}"
        )
        place = f"tasksets.{c.taskset}"
        _problems(c, place, file, "data.train_files", "data.train_max_samples")
        is_filtered, cut = c.get("data.filter_overlong_prompts"), TOO_LONG[c.get("data.truncation", "error")]
        c.put(f"{place}.too_long", "skip" if is_filtered else cut, "data.filter_overlong_prompts, data.truncation")
        _turns(c, place)
        _passes(c, place)
    newer, older = f"{ACTOR}.optim.lr_scheduler_type", f"{ACTOR}.optim.warmup_style"
    _length(c, f"{ACTOR}.optim", older if c.get(older) else newer)
    c.take(TABLES["alike"])
    prompts, minibatch = c.get("data.train_batch_size"), c.get(f"{ACTOR}.ppo_mini_batch_size")
    if prompts > minibatch:
        steps, rounded = share(prompts, minibatch)
        said = f"{ACTOR}.ppo_mini_batch_size: data.train_batch_size {prompts} / {minibatch} problems a step{rounded}"
        c.put("trainer.minibatches", steps, said)
    c.put("feeder.max_staleness", 0, "verl samples and trains in turns; 1 or 2 does both at once")
    longest = c.get("data.max_prompt_length") + c.get("data.max_response_length")
    c.put("model.context", longest, f"data.max_prompt_length + data.max_response_length = {longest}")
    if (most := c.get(f"{ROLLOUT}.top_k", -1)) > 0:
        c.put("sampling.top_k", most, f"{ROLLOUT}.top_k")
    if c.get("algorithm.filter_groups.enable"):
        c.put("buffer.zero_variance", "replace", "algorithm.filter_groups.enable")
        c.get("algorithm.filter_groups.metric")
    _held_out(c)
    at_hand = c.get("trainer.n_gpus_per_node", only_given=True) if gpus is None else gpus
    engine = c.get(f"{ROLLOUT}.name", "hf")
    if engine not in ENGINES:
        c.leave(f"{ROLLOUT}.name", f"{engine!r}: the engines here are {' and '.join(ENGINES)}")
    if at_hand and engine != "hf":
        c.put("explorer.policy", ENGINES[0], f"{ROLLOUT}.name")
    c.place(at_hand, f"trainer.n_gpus_per_node {at_hand}: one trains, the others sample")


def _problems(c: Conversion, place: str, file: Any, there: str, size: str) -> None:
    kind = "jsonl" if str(file).endswith((".json", ".jsonl")) else "parquet"
    c.put(f"{place}.source", f"{kind}:{file}", there)
    columns = {"messages": c.get("data.prompt_key", "prompt"), "answer": "reward_model.ground_truth"}
    c.put(f"{place}.columns", {**columns, "data_source": c.get("data.reward_fn_key", "data_source")}, "data.prompt_key")
    if (most := c.get(size, -1)) > 0:
        c.put(f"{place}.options", {"size": most}, size)
    c.put(f"{place}.reward", *_reward(c))


def _reward(c: Conversion) -> tuple[Any, str]:
    """Return the reward, and the setting that names it. Newer versions have it below `reward`."""
    for prefix in ("custom_reward_function", "reward.custom_reward_function"):
        if file := c.get(f"{prefix}.path"):
            name = f"{PurePosixPath(file).stem}:{c.get(f'{prefix}.name', 'compute_score')}"
            c.ask(f"put {file} beside the run file, as {PurePosixPath(file).stem}.py")
            for one in c.names(f"{prefix}.reward_kwargs."):
                c.put(f'rewards."{name}".{one.rpartition(".")[2]}', c.get(one), one)
            return name, f"{prefix}.path, .name"
    if c.get("reward_model.enable"):
        c.put("rewards.reward_model.path", c.get("reward_model.model.path"), "reward_model.model.path")
        return "reward_model", "reward_model.enable"
    c.ask('verl chooses its reward by data_source; "math" compares the answers: set another reward for other problems')
    return "math", "custom_reward_function: none"


def _turns(c: Conversion, place: str) -> None:
    prefix = f"{ROLLOUT}.multi_turn"
    if not c.get(f"{prefix}.enable"):
        return
    c.put(f"{place}.environment", "tools", f"{prefix}.enable")
    if turns := c.get(f"{prefix}.max_assistant_turns", c.get(f"{prefix}.max_turns")):
        c.put("environments.tools.max_turns", turns, f"{prefix}.max_assistant_turns")
    if most := c.get(f"{prefix}.max_tool_response_length"):
        c.put("environments.tools.max_result_chars", most, f"{prefix}.max_tool_response_length")
    tools = f"{prefix}.tool_config_path"
    if c.get(tools):
        c.leave(
            tools, "its tools are classes of verl; write each as a function, and name it in environments.tools.tools"
        )


def _loss(c: Conversion) -> None:
    estimator = c.get("algorithm.adv_estimator")
    loss, reduction = c.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla"), c.get(f"{ACTOR}.loss_agg_mode")
    c.algorithm, there = TABLES["estimators"].get(estimator, "grpo"), "algorithm.adv_estimator"
    if estimator not in TABLES["estimators"]:
        c.leave(there, f"{estimator!r} has no counterpart; grpo stands in its place")
    if loss in LOSSES and c.algorithm == "grpo":
        c.algorithm, there = loss, f"{ACTOR}.policy_loss.loss_mode"
    elif loss != "vanilla":
        c.leave(f"{ACTOR}.policy_loss.loss_mode", f"{loss!r} has no counterpart; PPO's clip stands in its place")
    sums = reduction in ("seq-mean-token-sum", "seq-mean-token-sum-norm")
    if c.algorithm == "grpo" and (sums or c.get("algorithm.norm_adv_by_std_in_grpo") is False):
        c.algorithm, there = "dr_grpo", "algorithm.norm_adv_by_std_in_grpo, loss_agg_mode"
        longest = 1 if reduction == "seq-mean-token-sum" else c.get("data.max_response_length")
        c.put("algorithms.dr_grpo.row_tokens", longest, f"{ACTOR}.loss_agg_mode, data.max_response_length")
        if not sums:
            c.ask("norm_adv_by_std_in_grpo: dr_grpo only centres rewards, and divides the sum over a row by a constant")
    c.put("trainer.algorithm", c.algorithm, there)
    if c.algorithm == "grpo":
        normalise = "sequence" if reduction == "seq-mean-token-mean" else "token"
        c.put("algorithms.grpo.normalise", normalise, f"{ACTOR}.loss_agg_mode")
    if estimator == "reinforce_plus_plus_baseline":
        c.put("algorithms.reinforce_plus_plus.group_baseline", True, "algorithm.adv_estimator")
    place = f"algorithms.{c.algorithm}"
    in_reward = c.get("algorithm.use_kl_in_reward")
    if c.get(f"{ACTOR}.use_kl_loss"):
        c.put(f"{place}.kl_coef", c.get(f"{ACTOR}.kl_loss_coef", 0.001), f"{ACTOR}.kl_loss_coef")
        kind = str(c.get(f"{ACTOR}.kl_loss_type", "low_var_kl"))
        c.put(f"{place}.kl_estimator", DIVERGENCES.get(kind.rstrip("+"), "k3"), f"{ACTOR}.kl_loss_type {kind}")
    elif in_reward:
        c.put(f"{place}.kl_in", "reward", "algorithm.use_kl_in_reward")
        c.put(f"{place}.kl_coef", c.get("algorithm.kl_ctrl.kl_coef", 0.001), "algorithm.kl_ctrl.kl_coef")
        kind = c.get("algorithm.kl_penalty", "kl")
        c.put(f"{place}.kl_estimator", DIVERGENCES.get(kind, "k1"), f"algorithm.kl_penalty {kind}")
    _correction(c, place)
    for name in (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type", "algorithm.kl_ctrl.kl_coef"):
        c.get(name)
    for prefix in ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"):
        if c.get(f"{prefix}.enable"):
            tokens, longest = c.get(f"{prefix}.len"), c.get("data.max_response_length")
            said = f"{prefix}.len {tokens} / data.max_response_length {longest}"
            c.put(f"{place}.overlong_share", tokens / longest, said)
            c.put(
                f"{place}.overlong_penalty", float(c.get(f"{prefix}.penalty_factor", 1.0)), f"{prefix}.penalty_factor"
            )
        c.get(f"{prefix}.log"), c.get("reward_model.reward_kwargs.max_resp_len")
    c.get("reward_model.reward_manager")


def _correction(c: Conversion, place: str) -> None:
    prefix = "algorithm.rollout_correction"
    for name, kind in (("rollout_is", "tis"), ("rollout_rs", "mis")):
        level, most = c.get(f"{prefix}.{name}"), c.get(f"{prefix}.{name}_threshold")
        if level and (level not in LEVELS or isinstance(most, str)):
            c.leave(f"{prefix}.{name}", f"{level!r} has no counterpart; there are {', '.join(LEVELS)}")
        elif level:
            c.put(f"{place}.correction", kind, f"{prefix}.{name}")
            c.put(f"{place}.correction_level", level, f"{prefix}.{name} {level}")
            if most is not None:
                c.put(f"{place}.correction_high", float(most), f"{prefix}.{name}_threshold")


def _held_out(c: Conversion) -> None:
    for number, file in enumerate(many(c.get("data.val_files") or [])):
        place = "evaluations.val" if number == 0 else f"evaluations.val-{number}"
        _problems(c, place, file, "data.val_files", "data.val_max_samples")
        prefix = f"{ROLLOUT}.val_kwargs"
        greedy = not c.get(f"{prefix}.do_sample")
        names = {"temperature": 0.0 if greedy else c.get(f"{prefix}.temperature"), "top_p": c.get(f"{prefix}.top_p")}
        given = {name: float(value) for name, value in names.items() if value is not None}
        c.put(f"{place}.sampling", given, f"{prefix}, do_sample {not greedy}")
        c.put(f"{place}.n", c.get(f"{prefix}.n", 1), f"{prefix}.n")
        for name in (f"{prefix}.temperature", f"{prefix}.top_k"):
            c.get(name)


def _sft(c: Conversion, path: Path, gpus: int | None) -> None:
    c.algorithm = "sft"
    _model(c, "model.partial_pretrain" if c.get("model.partial_pretrain") else "model.path", path)
    c.put("trainer.algorithm", "sft", "the trainer of SFT")
    sources = [
        f"{'parquet' if str(one).endswith('.parquet') else 'file'}:{one}" for one in many(c.get("data.train_files"))
    ]
    c.put("experts.source", sources[0] if len(sources) == 1 else sources, "data.train_files")
    if c.get("data.multiturn.enable"):
        columns = {"messages": c.get("data.multiturn.messages_key", "messages")}
    else:
        keys = {
            "prompt": ("data.prompt_key", "data.prompt_dict_keys"),
            "completion": ("data.response_key", "data.response_dict_keys"),
        }
        columns = {ours: ".".join([c.get(key), *(c.get(inner) or [])[:1]]) for ours, (key, inner) in keys.items()}
    c.put("experts.columns", columns, "data.prompt_key, data.response_key")
    c.put("experts.per_batch", c.get("data.train_batch_size"), "data.train_batch_size")
    c.put("model.context", c.get("data.max_length"), "data.max_length")
    c.take(TABLES["sft_alike"])
    _passes(c, "experts")
    _length(c, "optim", "optim.lr_scheduler")
    c.place(
        c.get("trainer.n_gpus_per_node", only_given=True) if gpus is None else gpus,
        "trainer.n_gpus_per_node: one of them trains",
    )
