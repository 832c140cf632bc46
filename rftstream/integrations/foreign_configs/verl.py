"""Converts verl's settings to a run file: PPO's trainer with all its estimators, and SFT, from YAML and from overrides
in a launch script.

Names and defaults are those of verl/trainer/config/ppo_trainer.yaml, sft_trainer_engine.yaml and the older
sft_trainer.yaml. verl counts problems per batch, as a run file does. It gives the size of minibatches; a run file gives
their number.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from rftstream.data.tasksets.arrow import describe_parquet
from rftstream.errors import ConfigError
from rftstream.integrations.foreign_configs.conversion import Conversion, ConvertedConfig, many, section_name, share
from rftstream.integrations.foreign_configs.reading import interpolated, merged, read_yaml, tables_of
from rftstream.integrations.foreign_configs.shell import read_branches, read_named_config, read_overrides
from rftstream.integrations.foreign_configs.verl_losses import ACTOR, put_loss

ROLLOUT = "actor_rollout_ref.rollout"
TABLES = tables_of("verl")
PATHS = ("model.path", "partial_pretrain", "train_files", "val_files")
"""Ends of the names of path settings, which may keep an unresolved shell variable."""
ENGINES = ("vllm", "hf")
PLACEHOLDER = "my_tools:write_these_tools"
"""A tool that is not there, so that `check` refuses the run file."""
NO_VAL = "there are no data.val_files"
TOO_LONG = {"error": "error", "left": "truncate", "right": "truncate", "middle": "truncate"}


def convert_verl(files: list[Path], gpus: int | None, trainer: str | None) -> ConvertedConfig:
    """Return the run file for YAML configs and launch scripts. Overrides of a script win over the files."""
    scripts = [path for path in files if path.suffix not in (".yaml", ".yml")]
    named = [] if len(scripts) < len(files) else [one for path in scripts if (one := read_named_config(path))]
    read = [path for path in files if path not in scripts] + [path for path in named if path.is_file()]
    given = merged([(path, read_yaml(path)) for path in read])
    given |= merged([(path, read_overrides(path)) for path in scripts])
    is_sft = not any(name.startswith("actor_rollout_ref.") for name in given) and bool(
        {"model.partial_pretrain", "model.path"} & set(given)
    )
    is_older = is_sft and ("model.partial_pretrain" in given or "data.prompt_key" in given)
    defaults = TABLES[("sft_defaults" if is_older else "sft_engine_defaults") if is_sft else "defaults"]
    given = interpolated(given, defaults)
    unread = {name: value for name, value in given.items() if "$" in str(value)}
    placed = {name for name in unread if name.endswith(PATHS)}
    for name in set(unread) - placed:
        del given[name]
    conversion = Conversion("verl", given, defaults, TABLES["decided"])
    for name, value in unread.items():
        if name in placed:
            conversion.ask(f"{name}: {value!r} has a variable of the shell; write the path in its place")
        else:
            conversion.leave_unread(name, f"{value!r}: only the shell that runs the script knows it")
    for name, taken in {name: value for path in scripts for name, value in read_branches(path).items()}.items():
        conversion.ask(f"{name}: the script sets it in branches of an `if`; {taken!r}, its last, was taken")
    for path in named:
        if not path.is_file() and not path.stem.endswith("_trainer"):
            conversion.ask(f"the script takes the config {path.name}, which is not here: name that file, too")
    (_sft if is_sft else _reinforced)(conversion, files[0], gpus)
    return conversion.finish()


def _model(c: Conversion, name: str, path: Path) -> None:
    if (model := c.get(name)) is None:
        raise ConfigError(f"{path}: no {name} that could be read, expected the model; add it to the file")
    c.put("model.path", model, name)
    prefix = name.rpartition(".")[0]
    if c.get(f"{prefix}.lora.rank"):  # megatron's
        c.lora(f"{prefix}.lora.rank", f"{prefix}.lora.alpha", f"{prefix}.lora.target_modules", 32)
    else:
        c.lora(f"{prefix}.lora_rank", f"{prefix}.lora_alpha", f"{prefix}.target_modules", 16)
    kwargs = "data.apply_chat_template_kwargs"
    if given := {one.removeprefix(f"{kwargs}."): c.get(one) for one in c.names(f"{kwargs}.")}:
        c.put("model.chat_template_kwargs", given, kwargs)
    if c.get(f"{ACTOR}.freeze_vision_tower"):
        c.put("backends.torch.freeze_vision_tower", True, f"{ACTOR}.freeze_vision_tower")


def _passes(c: Conversion, place: str) -> None:
    """Take the epochs, unless they are verl's default beside a number of steps. What ends first ends the run."""
    epochs, has_steps = c.get("trainer.total_epochs"), c.get("trainer.total_training_steps") is not None
    if not has_steps or c.get("trainer.total_epochs", only_given=True):
        c.put(f"{place}.passes", epochs, "trainer.total_epochs")


def _length(c: Conversion, warmup: str, schedule: str) -> None:
    """Take the schedule over the steps, and the intervals that are counted in steps."""
    steps = c.get("trainer.total_training_steps") or _counted(c, warmup, schedule)
    at = c.get(f"{warmup}.lr_warmup_steps", -1)
    name = f"{warmup}.lr_warmup_steps" if at > 0 else f"{warmup}.lr_warmup_steps_ratio"
    c.schedule(schedule, at if at > 0 else c.get(name), name, steps)
    for there, key in (
        ("trainer.save_freq", "trainer.checkpoint_every"),
        ("trainer.test_freq", "evaluations.val.every"),
    ):
        every, is_evaluation = c.get(there, -1), key == "evaluations.val.every"
        if is_evaluation and (c.algorithm == "sft" or not c.get("data.val_files")):
            if c.get(there, only_given=True) is not None:
                c.leave(
                    f"{there} = {every!r}",
                    "experts.held_out keeps a share of the rows" if c.algorithm == "sft" else NO_VAL,
                )
        elif isinstance(every, str):  # after_each_epoch
            c.leave(f"{there} = {every!r}", f"{key} counts versions")
        elif every > 0:
            c.put(key, every, there)
        elif is_evaluation:
            c.put(key, 50, f"{there}: verl evaluates before the training alone")
    project = c.get("trainer.project_name")
    c.keep("trainer.max_actor_ckpt_to_keep")
    c.keep("trainer.max_ckpt_to_keep")
    c.name_run(c.get("trainer.experiment_name"), "trainer.experiment_name")
    c.track(c.get("trainer.logger"), "trainer.logger", project)


def _counted(c: Conversion, warmup: str, schedule: str) -> int | None:
    """Return the steps that the epochs come to, and take them, if a schedule needs them and the Parquet files are at
    hand. verl leaves out what is left of an epoch after its whole batches."""
    is_constant = c.get(schedule, "constant") == "constant" and not c.get(f"{warmup}.lr_warmup_steps_ratio")
    counts = [_table(file)[0] for file in many(c.get("data.train_files") or [])]
    if is_constant or not counts or None in counts:
        return None
    rows, epochs, size = sum(one or 0 for one in counts), c.get("trainer.total_epochs"), c.get("data.train_batch_size")
    steps: int = max(rows // size, 1) * epochs
    c.put("run.steps", steps, f"trainer.total_epochs {epochs} x {rows} rows / data.train_batch_size {size}")
    return steps


def _table(file: Any) -> tuple[int | None, tuple[str, ...]]:
    """Return the number of rows of a Parquet file and its columns; None and no columns if it is not at hand."""
    path = Path(str(file)).expanduser()
    return describe_parquet(path) if str(file).endswith(".parquet") and path.is_file() else (None, ())


def _reinforced(c: Conversion, path: Path, gpus: int | None) -> None:
    _model(c, "actor_rollout_ref.model.path", path)
    put_loss(c, TABLES["estimators"])
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
    if (mode := c.get("trainer.v1.trainer_mode", "sync")) == "sync":
        c.put("feeder.max_staleness", 0, "verl samples and trains in turns; 1 or 2 does both at once")
    else:
        name = "trainer.v1.sampler.max_off_policy_threshold"
        c.put("feeder.max_staleness", c.get(name, 8), f"{name}, trainer_mode {mode}")
    longest = c.get("data.max_prompt_length") + c.get("data.max_response_length")
    c.put("model.context", longest, f"data.max_prompt_length + data.max_response_length = {longest}")
    if (most := c.get(f"{ROLLOUT}.top_k", -1)) > 0:
        c.put("sampling.top_k", most, f"{ROLLOUT}.top_k")
    if c.get("algorithm.filter_groups.enable"):
        c.put("buffer.zero_variance", "replace", "algorithm.filter_groups.enable")
        if metric := c.get("algorithm.filter_groups.metric"):
            reason = "groups are filtered by their rewards, before what overlong_share takes off"
            c.leave(f"algorithm.filter_groups.metric = {metric!r}", reason)
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
    columns["data_source"] = c.get("data.reward_fn_key", "data_source")
    if (images := c.get("data.image_key")) or "images" in _table(file)[1]:
        columns["images"] = images or "images"
    c.put(f"{place}.columns", columns, "data.prompt_key")
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
    for prefix, path in (("reward_model", "model.path"), ("reward.reward_model", "model_path")):
        if c.get(f"{prefix}.enable"):
            c.put("rewards.reward_model.path", c.get(f"{prefix}.{path}"), f"{prefix}.{path}")
            return "reward_model", f"{prefix}.enable"
    c.get("reward_model.reward_manager"), c.get("reward.reward_manager.name")
    c.ask('verl chooses its reward by data_source; "math" compares the answers: set another reward for other problems')
    return "math", "custom_reward_function: none"


def _turns(c: Conversion, place: str) -> None:
    prefix, loop = f"{ROLLOUT}.multi_turn", f"{ROLLOUT}.agent.default_agent_loop"
    is_tool_agent = c.get(loop) == "tool_agent"
    if not is_tool_agent and c.get(loop) not in (None, "single_turn_agent"):
        c.leave(f"{loop} = {c.get(loop)!r}", "its class is of verl: write an environment, docs/extending.md")
    if not (c.get(f"{prefix}.enable") or is_tool_agent):
        return
    c.put(
        f"{place}.environment",
        "tools",
        loop if not c.get(f"{prefix}.enable") else f"{prefix}.enable, default_agent_loop",
    )
    turns = c.get(f"{prefix}.max_assistant_turns", c.get(f"{prefix}.max_turns"))
    said = f"{prefix}.max_assistant_turns" if turns else f"{prefix}.max_assistant_turns: without a limit there"
    c.put("environments.tools.max_turns", turns or 100, said)
    c.put(
        "environments.tools.max_result_chars",
        c.get(f"{prefix}.max_tool_response_length", 256),
        f"{prefix}.max_tool_response_length: cut at the end here, in the middle there",
    )
    c.put("environments.tools.max_calls", c.get(f"{prefix}.max_parallel_calls", 1), f"{prefix}.max_parallel_calls")
    told = [name for name in (f"{prefix}.tool_config_path", f"{prefix}.function_tool_path") if c.get(name)]
    named = ", ".join(str(c.get(name)) for name in told) or "in no file that the config names"
    c.put_placeholder("environments.tools.tools", [PLACEHOLDER], (told or [f"{prefix}.tool_config_path"])[0])
    c.ask(
        f"verl's tools ({named}): write each as a function of a module, and name them in the place of {PLACEHOLDER!r}"
    )


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
    if c.get("data.multiturn.enable") or c.get("data.messages_key"):
        columns = {"messages": c.get("data.messages_key", c.get("data.multiturn.messages_key", "messages"))}
    else:
        keys = {
            "prompt": ("data.prompt_key", "data.prompt_dict_keys"),
            "completion": ("data.response_key", "data.response_dict_keys"),
        }
        columns = {ours: ".".join([c.get(key), *(c.get(inner) or [])[:1]]) for ours, (key, inner) in keys.items()}
    dicts = "data.prompt_key, response_key, prompt_dict_keys, response_dict_keys"
    c.put("experts.columns", columns, "data.messages_key" if "messages" in columns else dicts)
    c.put("experts.per_batch", c.get("data.train_batch_size"), "data.train_batch_size")
    c.put("model.context", c.get("data.max_length"), "data.max_length")
    if c.get("data.truncation", "error") != "error":
        c.put("experts.too_long", "skip", "data.truncation: verl cuts what is longer, here it is left out")
    c.take(TABLES["sft_alike"])
    _passes(c, "experts")
    _length(c, "optim", "optim.lr_scheduler" if c.get("optim.lr_scheduler") else "optim.lr_scheduler_type")
    c.place(
        c.get("trainer.n_gpus_per_node", only_given=True) if gpus is None else gpus,
        "trainer.n_gpus_per_node: one of them trains",
    )
