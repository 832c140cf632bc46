"""Converts TRL's settings to a run file: GRPO, RLOO, SFT, DPO and reward models, from a training script or the YAML of
TRL's command line.

Names and defaults are those of TRL 1.16 (trl/trainer/*_config.py, trl/scripts) and of transformers' TrainingArguments.
TRL counts completions and optimizer steps; a run file counts problems and batches. `_batches` converts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rftstream.errors import ConfigError
from rftstream.integrations.foreign_configs.conversion import (
    Conversion,
    ConvertedConfig,
    many,
    share,
)
from rftstream.integrations.foreign_configs.reading import merged, read_yaml, tables_of
from rftstream.integrations.foreign_configs.trl_files import FORMATS, described, holds_chats, rows_of, source_of
from rftstream.integrations.foreign_configs.trl_script import Script, ScriptReader

ALGORITHMS = {"grpo": "grpo", "rloo": "rloo", "sft": "sft", "dpo": "dpo", "reward": "reward_model"}
TABLES = tables_of("trl")
CORRECTIONS = {"truncate": "tis", "mask": "mask"}
REWARDS = {"accuracy_reward": "math", "reasoning_accuracy_reward": "math"}


def convert_trl(files: list[Path], gpus: int | None, trainer: str | None) -> ConvertedConfig:
    """Return the run file for a training script, a YAML config, or both together."""
    script = Script("")
    given: list[tuple[Path, Mapping[str, Any]]] = []
    for path in files:
        if path.suffix in (".yaml", ".yml"):
            given.append((path, read_yaml(path)))
        else:
            script = ScriptReader(path).read()
            given.append((path, {name: value for name, value in script.settings.items() if value is not None}))
    settings = merged(given)
    kind = trainer or script.trainer or _kind(settings, files[0])
    if settings.get("reward_funcs") and kind not in ("grpo", "rloo"):
        raise ConfigError(
            f"--trainer {kind}: the config has reward_funcs, which grpo and rloo take; say --trainer grpo"
        )
    defaults = {**TABLES["defaults"]["every"], **TABLES["defaults"][kind]}
    conversion = Conversion("TRL", settings, defaults, TABLES["settings"].split())
    conversion.algorithm = ALGORITHMS[kind]
    rules = _TrlRules(conversion, kind, 1 if gpus is None else gpus, script, files[0])
    rules.apply()
    for name, place in script.unreadable.items():
        if name not in settings and name not in rules.asked:
            conversion.leave_unread(name, f"could not be read without running the script: {place}")
    if script.environment:
        values = ", ".join(f"{name} = {value}" for name, value in script.environment.items())
        conversion.ask(f"the script's defaults of environment variables were taken: {values}")
    return conversion.finish(TABLES["decided"])


def _kind(settings: Mapping[str, Any], path: Path) -> str:
    """Return the kind of trainer for a YAML config, which does not name it."""
    if "reward_funcs" in settings or "num_generations" in settings:
        return "grpo"
    if named := [kind for kind in ALGORITHMS if kind in path.stem.lower()]:
        return named[0]
    raise ConfigError(f"{path}: does not say which trainer it is for; add --trainer {'|'.join(ALGORITHMS)}")


class _TrlRules:
    """The conversion rules for TRL's settings. `apply` is called once."""

    def __init__(self, conversion: Conversion, kind: str, gpus: int, script: Script, path: Path) -> None:
        self._c, self._kind, self._gpus, self._script, self._path = conversion, kind, gpus, script, path
        self._module = re.sub(r"\W", "_", path.stem)  # train-grpo.py is no name of a module
        self._samples = kind in ("grpo", "rloo")
        self.asked: set[str] = set()
        """Arguments of the trainer that the user is asked to write."""

    def apply(self) -> None:
        c = self._c
        c.name_run(Path(str(c.get("output_dir"))).name, "output_dir")
        self._model()
        if self._samples:
            self._loss()
        c.put("trainer.algorithm", c.algorithm, f"{self._kind.upper()}Trainer")
        self._batches()
        c.take(TABLES["alike"])
        c.keep("save_total_limit")
        c.put("trainer.adam_betas", [c.get("adam_beta1"), c.get("adam_beta2")], "adam_beta1, adam_beta2")
        if self._samples:
            self._sampled()
        else:
            self._demonstrations()
        c.track(c.get("report_to"), "report_to", c.get("run_name", "huggingface"))

    def _model(self) -> None:
        c = self._c
        if (model := c.get("model_name_or_path")) is None:
            where = self._script.unreadable.get("model", "nothing names one")
            raise ConfigError(
                f"{self._path}: the model could not be read: {where}; name it as a text in the script, or in a second "
                "FILE, a YAML with model_name_or_path: NAME"
            )
        c.put("model.path", model, "model" if self._script.trainer else "model_name_or_path")
        if c.get("fp16") or c.get("bf16") is False:
            c.put("model.dtype", "float16" if c.get("fp16") else "float32", "fp16" if c.get("fp16") else "bf16")
        else:
            c.get("bf16")
        if c.get("use_peft") or "lora_r" in self._script.settings:
            c.lora("lora_r", "lora_alpha", "lora_target_modules", 32.0, default_rank=16)

    def _source(self, prefix: str) -> dict[str, Any]:
        """Return source, options, columns and system prompt of a dataset, or a placeholder for it."""
        c = self._c
        name = c.get(f"{prefix}dataset_name")
        if name is None:
            place = self._script.unreadable.get(f"{prefix or 'train_'}dataset", "none is named")
            return {"source": self._by_hand(prefix, f"that the trainer gets ({place})")}
        source, split, limits = self._place(prefix, name)
        subset, revision = c.get(f"{prefix}dataset_config"), c.get(f"{prefix}load_dataset.revision")
        of_hub = {"subset": subset, "split": split, "revision": revision} if str(source).startswith("hf:") else {}
        if limits and not (self._samples or of_hub):
            c.leave_unread(
                f"rows of {prefix or 'train_'}dataset", "only a source hf: takes some; write these to a file"
            )
            limits = {}
        options = {**of_hub, "answer_after": c.get(f"{prefix}dataset.answer_after"), **limits}
        for one in c.names(f"{prefix}dataset."):
            if one.startswith(f"{prefix}dataset.map") or one.rpartition(".")[2] in (
                "filter",
                "map",
                "train_test_split",
            ):
                c.leave(one, f"{c.get(one)}; make such rows beforehand, or use [[pipeline]]")
        columns = self._columns(c.get(f"{prefix}dataset.columns") or {})
        scheme, _, file = str(source).partition(":")
        if self._samples and not {"prompt", "messages"} & set(columns) and scheme == "jsonl":
            is_chat = holds_chats(self._path.parent / file)
            columns = {"messages": "prompt", **columns} if is_chat else columns
        found = {
            "source": source,
            "options": {key: value for key, value in options.items() if value is not None},
            "columns": columns,
            "system": c.get(f"{prefix}dataset.system"),
        }
        return {key: value for key, value in found.items() if value}

    def _place(self, prefix: str, name: str) -> tuple[Any, str | None, dict[str, int]]:
        """Return the source of a dataset that is named, its split, and which rows are taken."""
        c = self._c
        split, first, end = c.get(f"{prefix}dataset_train_split"), None, None
        if split is not None and (rows := rows_of(str(split))) is not None:
            split, first, end = rows
        elif split is not None:
            c.leave(f"{prefix}dataset_train_split = {split!r}", "give the rows by options.skip and options.size")
            split = re.split(r"\W", str(split))[0]
        files, folder = c.get(f"{prefix}load_dataset.data_files"), c.get(f"{prefix}load_dataset.data_dir")
        source: Any = f"hf:{name}"
        if name in FORMATS:
            source = source_of(name, files, folder, split or "train", self._path.parent, experts=not self._samples)
        elif files or folder:
            there = f"{prefix}load_dataset.{'data_files' if files else 'data_dir'} = {files or folder!r}"
            c.leave_unread(there, 'fetch these files to a folder, and name it: source = "hf:FOLDER"')
        if source is None:
            place = f"that load_dataset returns for {described(name, files, folder)}"
            source, first, end = self._by_hand(prefix, place), None, None  # what the user writes is sliced
        selected = c.get(f"{prefix}dataset.select") or []
        skip = (first or 0) + (selected[0] if len(selected) > 1 else 0)
        ends = [one for one in (end, (first or 0) + selected[-1] if selected else None) if one is not None]
        limits = {**({"skip": skip} if skip else {}), **({"size": min(ends) - skip} if ends else {})}
        return source, split, limits

    def _by_hand(self, prefix: str, place: str) -> str:
        """Ask the user for a file with the rows of a dataset, and return the source that reads it."""
        self.asked.add(f"{prefix or 'train_'}dataset")
        file = f"{prefix or 'train_'}data.jsonl"
        section = "evaluations.held-out" if prefix else f"tasksets.{self._c.taskset}" if self._samples else "experts"
        self._c.ask(
            f"write the rows as JSON lines to {file} beside the run file, where {section}.source looks for them; "
            f'`dataset.to_json("{file}")` in the script does, of the dataset {place}'
        )
        if self._samples and not prefix:
            self._c.ask(
                "where prompts are texts and not messages: TRL shows them to the model as they are, a run as messages "
                "of a user; bare they are by model.chat_template, a file with "
                "{% for message in messages %}{{ message['content'] }}{% endfor %}"
            )
        return f"jsonl:{file}"

    def _columns(self, made: Mapping[str, str]) -> dict[str, str]:
        """Return the columns under our names. The column that a reward compares with is the answer."""
        ours = {"solution": "answer", "ground_truth": "answer"}
        found = {ours.get(name, name): column for name, column in made.items()}
        known = ("prompt", "messages", "answer", "completion", "chosen", "rejected")
        named = {name: column for name, column in found.items() if name in known and name != column}
        uses_maths = any(self._reward(one) == "math" for one in many(self._c.get("reward_funcs") or []))
        return {"answer": "solution", **named} if uses_maths and "answer" not in found else named

    # ------------------------------------------------------------------------------------ GRPO and RLOO

    def _loss(self) -> None:
        c = self._c
        if self._kind == "rloo":
            c.put("algorithms.rloo.kl_coef", c.get("beta"), "beta")
            if c.get("beta"):
                c.put("algorithms.rloo.kl_in", "reward", "beta: RLOO takes the divergence from the reward")
                c.put("algorithms.rloo.kl_estimator", "k1", "beta: RLOO sums log-ratios")
            return
        loss, scale = c.get("loss_type"), c.get("scale_rewards")
        algorithm, normalise = TABLES["losses"].get(loss, ("grpo", "token"))
        if loss not in TABLES["losses"]:
            c.leave("loss_type", f"{loss!r} has no counterpart; the mean over tokens stands in its place")
        if c.get("importance_sampling_level") == "sequence":
            algorithm, normalise = "gspo", ""
            c.put("trainer.algorithm", "gspo", "importance_sampling_level")
        if scale in (False, "none") and algorithm == "grpo":
            algorithm, normalise = "dr_grpo", ""
            c.ask("scale_rewards none: dr_grpo only centres rewards, and divides the sum over a row by a constant")
        elif scale == "batch":
            c.leave("scale_rewards", "'batch' has no counterpart; each group's own spread divides")
        c.algorithm = algorithm
        if normalise:
            c.put("algorithms.grpo.normalise", normalise, f"loss_type {loss!r}")
        if algorithm == "dr_grpo":
            if scale in (True, "group"):
                c.ask("scale_rewards: TRL still divides by the spread of the group; dr_grpo here only centres rewards")
            c.put("algorithms.dr_grpo.row_tokens", c.get("max_completion_length"), "max_completion_length")
        elif scale in (True, "group"):
            c.put(f"algorithms.{algorithm}.advantage_eps", 1e-4, "scale_rewards: TRL adds 1e-4 to the spread")
        if algorithm == "cispo":
            c.put("algorithms.cispo.max_ratio", c.get("epsilon_high", c.get("epsilon", 0.2)), "epsilon_high")
        if algorithm == "sapo":
            c.put("algorithms.sapo.tau_positive", c.get("sapo_temperature_pos", 1.0), "sapo_temperature_pos")
            c.put("algorithms.sapo.tau_negative", c.get("sapo_temperature_neg", 1.05), "sapo_temperature_neg")
        if c.get("beta"):
            c.put(f"algorithms.{algorithm}.kl_coef", c.get("beta"), "beta: k3, in the loss")
        if c.get("sync_ref_model"):
            c.put("trainer.reference_every", c.get("ref_model_sync_steps", 512), "ref_model_sync_steps")
            c.leave("ref_model_mixup_alpha", "the newer policy takes the place of the reference, unmixed")

    def _batches(self) -> None:
        """Convert numbers that TRL counts in completions and optimizer steps."""
        c, processes = self._c, max(self._gpus, 1)
        device, accumulated = c.get("per_device_train_batch_size"), c.get("gradient_accumulation_steps")
        said = f"per_device_train_batch_size {device} x {processes} processes"
        steps, passes = 1, 1
        if self._samples:
            per_generation = c.get("steps_per_generation", accumulated)
            completions = c.get("generation_batch_size") or device * processes * max(per_generation, accumulated)
            said = (
                f"generation_batch_size {completions}"
                if c.get("generation_batch_size")
                else f"{said} x {max(per_generation, accumulated)} steps = {completions} completions"
            )
            size = c.get("num_generations")
            c.put("feeder.group_size", size, "num_generations")
            groups, rounded = share(completions, size)
            c.put("feeder.groups_per_batch", groups, f"{said} / num_generations {size}{rounded}")
            steps, rounded = share(completions, device * processes * accumulated)
            passes = c.get("num_iterations")
            if steps > 1:
                there = f"steps_per_generation: {completions} completions / {device * processes * accumulated} a step"
                c.put("trainer.minibatches", steps, there + rounded)
            if passes > 1:
                c.put("trainer.updates_per_batch", passes, "num_iterations")
            c.put("feeder.max_staleness", 0, "on-policy: TRL samples and trains in turns; 1 or 2 does both at once")
        else:
            there = f"{said} x gradient_accumulation_steps {accumulated}"
            c.put("experts.per_batch", device * processes * accumulated, there)
        self._length(steps * passes)

    def _length(self, batch_steps: int) -> None:
        c = self._c
        divided = f" / {batch_steps} optimizer steps per batch" if batch_steps > 1 else ""
        self._batch_steps, self._divided = batch_steps, divided
        most, epochs = c.get("max_steps", -1), c.get("num_train_epochs")
        steps = None
        if most > 0:
            steps, rounded = share(most, batch_steps, up=True)
            c.put("run.steps", steps, f"max_steps {most}{divided}{rounded}" if divided else "max_steps")
        else:
            place = "tasksets.train" if self._samples else "experts"
            passes = math.ceil(epochs)
            rounded = "" if passes == epochs else f" {epochs}, rounded up"
            c.put(f"{place}.passes", passes, f"num_train_epochs{rounded}")
        warmup, ratio = c.get("warmup_steps"), c.get("warmup_ratio")
        c.schedule(
            "lr_scheduler_type", warmup or ratio, "warmup_steps" if warmup else "warmup_ratio", steps, batch_steps
        )
        if c.get("save_strategy", "steps") == "steps" and (every := c.get("save_steps")) >= 1:
            saved, rounded = share(every, batch_steps, up=True)
            c.put("trainer.checkpoint_every", saved, f"save_steps {every}{divided}{rounded}")

    def _sampled(self) -> None:
        c = self._c
        c.put("sampling.max_tokens", c.get("max_completion_length"), "max_completion_length")
        if c.get("use_vllm"):
            mode = c.get("vllm_mode", "colocate")
            if self._gpus:
                c.put("explorer.policy", "vllm", "use_vllm")
            self._correction()
            c.place(
                self._gpus,
                self._gpus if mode == "server" else self._gpus - 1,
                f"vllm_mode {mode!r}, --gpus {self._gpus}",
            )
        else:
            c.place(self._gpus, self._gpus - 1, f"--gpus {self._gpus}")
        taskset = f"tasksets.{c.taskset}"
        for key, value in self._source("").items():
            c.put(f"{taskset}.{key}", value, "train_dataset")
        c.put(f"{taskset}.shuffle", c.get("shuffle_dataset"), "shuffle_dataset")
        c.put(f"{taskset}.reward", self._rewards(), "reward_funcs, reward_weights")
        self._tools(taskset)
        if c.get("eval_dataset_name") or "eval_dataset" in self._script.unreadable:
            for key, value in self._source("eval_").items():
                c.put(f"evaluations.held-out.{key}", value, "eval_dataset")
            c.put("evaluations.held-out.reward", self._rewards(), "reward_funcs")
            if every := c.get("eval_steps"):
                asked, rounded = share(every, self._batch_steps, up=True)
                said = f"eval_steps {every}{self._divided}{rounded}" if self._divided else "eval_steps"
                c.put("evaluations.held-out.every", asked, said)
            c.put(
                "evaluations.held-out.n",
                c.get("num_generations_eval", c.get("num_generations")),
                "num_generations_eval",
            )

    def _correction(self) -> None:
        c = self._c
        place = f"algorithms.{c.algorithm}.correction"
        if c.get("vllm_importance_sampling_correction") is False:
            c.put(place, "none", "vllm_importance_sampling_correction")
            return
        level, _, kind = c.get("vllm_importance_sampling_mode", "sequence_mask").partition("_")
        if self._kind == "grpo":
            c.put(place, CORRECTIONS[kind], f"vllm_importance_sampling_mode '{level}_{kind}'")
            c.put(f"{place}_level", level, f"vllm_importance_sampling_mode '{level}_{kind}'")
            name = "vllm_importance_sampling_clip_max"
            c.put(f"{place}_high", c.get(name, c.get("vllm_importance_sampling_cap", 3.0)), name)
            if (low := c.get("vllm_importance_sampling_clip_min")) is not None:
                c.put(f"{place}_low", low, "vllm_importance_sampling_clip_min")

    def _rewards(self) -> Any:
        """Return the rewards in the form of a run file."""
        c = self._c
        named, weights = c.get("reward_funcs") or [], c.get("reward_weights")
        rewards = []
        for number, one in enumerate(many(named)):
            if (name := self._reward(one)) is not None:
                weight = {} if weights is None else {"weight": float(weights[number])}
                rewards.append({"name": name, **weight})
        if not rewards:
            where = self._script.unreadable.get("reward_funcs", "none is named")
            self.asked.add("reward_funcs")
            c.ask(f'the reward could not be read ({where}): set reward to a name or "module:function"')
            return "exact"
        return rewards[0]["name"] if len(rewards) == 1 and len(rewards[0]) == 1 else rewards

    def _reward(self, one: Any) -> str | None:
        """Return the name here of one reward, or None if it becomes a setting."""
        c = self._c
        if isinstance(one, dict) and "model" in one:
            c.put("rewards.reward_model.path", one["model"], "reward_funcs: a model")
            return "reward_model"
        module, _, name = str(next(iter(one)) if isinstance(one, dict) else one).rpartition(":")
        is_theirs = module.partition(".")[0] == "trl" or (not module and name not in self._script.functions)
        if name == "get_soft_overlong_punishment" and is_theirs:
            most = one[name] if isinstance(one, dict) else {"max_completion_len": 1280, "soft_punish_cache": 256}
            share = most["soft_punish_cache"] / most["max_completion_len"]
            c.put(f"algorithms.{c.algorithm}.overlong_share", share, f"{name}: soft_punish_cache / max_completion_len")
            return None
        if name in REWARDS and is_theirs:
            return REWARDS[name]
        if not module and "." in name:
            module, _, name = name.rpartition(".")
        if module:
            c.ask(f"{module}:{name} must be importable where the run file lies")
            return f"{module}:{name}"
        ours = f"{self._module}_rewards:{name}"
        c.ask(
            f"copy {name}, with what it uses, from {self._path.name} to {ours.partition(':')[0]}.py beside the run file"
        )
        return ours

    def _tools(self, taskset: str) -> None:
        c = self._c
        if tools := c.get("tools"):
            module = f"{self._module}_tools"
            c.put(f"{taskset}.environment", "tools", "tools")
            c.put("environments.tools.tools", [one if ":" in one else f"{module}:{one}" for one in tools], "tools")
            c.ask(f"copy the tools {', '.join(tools)}, with what they use, to {module}.py beside the run file")
            if turns := c.get("max_tool_calling_iterations"):
                c.put("environments.tools.max_turns", turns + 1, f"max_tool_calling_iterations {turns} + the answer")

    # ------------------------------------------------------------------------------------ SFT, DPO, reward

    def _demonstrations(self) -> None:
        c = self._c
        c.place(self._gpus, 0, f"--gpus {self._gpus}")
        for key, value in self._source("").items():
            c.put(f"experts.{key}", value, "train_dataset")
        c.put("experts.shuffle", c.get("shuffle_dataset", self._kind != "sft"), "shuffle_dataset")
        c.put("model.context", c.get("max_length"), "max_length")
        c.put("experts.too_long", "skip", "max_length: TRL cuts what is longer, here it is left out")
        if self._kind == "dpo":
            if c.get("loss_type", "sigmoid") not in ("sigmoid", ["sigmoid"]):
                c.leave("loss_type", "only 'sigmoid' has a counterpart, which stands in its place")
            c.put("algorithms.dpo.beta", c.get("beta"), "beta")
            if smoothing := c.get("label_smoothing"):
                c.put("algorithms.dpo.label_smoothing", smoothing, "label_smoothing")
        if self._kind == "reward" and (factor := c.get("center_rewards_coefficient")):
            c.put("algorithms.reward_model.centring", factor, "center_rewards_coefficient")
        for name in ("completion_only_loss", "assistant_only_loss"):
            if c.get(name) is not None:
                c.leave(name, "what the assistant said is trained, always")
