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
from rftstream.integrations.foreign_configs import MOST_GPUS
from rftstream.integrations.foreign_configs.conversion import Conversion, ConvertedConfig, many, share
from rftstream.integrations.foreign_configs.reading import lifted, merged, read_yaml, tables_of
from rftstream.integrations.foreign_configs.trl.files import (
    FORMATS,
    MORE_PROCESSES,
    launched_files,
    own_parts_of_deepspeed,
    take_processes,
)
from rftstream.integrations.foreign_configs.trl.losses import put_correction, put_loss
from rftstream.integrations.foreign_configs.trl.rewards import RewardRules
from rftstream.integrations.foreign_configs.trl.scripts.modules import Script
from rftstream.integrations.foreign_configs.trl.scripts.reader import ScriptReader
from rftstream.integrations.foreign_configs.trl.sources import DatasetRules, of_mixture, with_evaluation
from rftstream.integrations.foreign_configs.trl.training import (
    evaluated_every,
    name_longest_row,
    put_in_steps,
    put_longest_row,
    put_model,
    put_objective,
    put_tools,
)

ALGORITHMS = {"grpo": "grpo", "rloo": "rloo", "sft": "sft", "dpo": "dpo", "reward": "reward_model"}
TABLES = tables_of("trl")


def convert_trl(files: list[Path], gpus: int | None, trainer: str | None) -> ConvertedConfig:
    """Return the run file for a training script, a YAML config, or both together, or for the shell script that launches
    them."""
    named, (files, launched) = files[0], launched_files(files, tuple(ALGORITHMS))
    is_counted = gpus is None
    unknown: dict[str, str] = {}
    if launched is not None:
        shown = ((name, str(one)) for name, one in launched.settings.items() if not name.startswith("launcher."))
        unknown = {name: text for name, text in shown if "$" in text}
        for name in unknown:
            del launched.settings[name]
        gpus, trainer = launched.processes if gpus is None else gpus, trainer or launched.trainer
    script, known, flags = Script(""), TABLES["settings"].split(), launched.settings if launched is not None else {}
    given = [(path, read_yaml(path, nested=True)) for path in files if path.suffix in (".yaml", ".yml")]
    parsed = merged(given) | flags
    scripts = [path for path in files if path.suffix not in (".yaml", ".yml")]
    for path in scripts:
        environment = launched.environment if launched else {}
        script = ScriptReader(path, parsed if given or launched else None, known, environment).read()
        given = [one for one in given if one[0].resolve() not in script.configs]
        given.append((path, {name: value for name, value in script.settings.items() if value is not None}))
    if "reward_funcs" in script.settings:  # a YAML's are names for the script
        for _, one in given[: -len(scripts)]:
            one.pop("reward_funcs", None)
        flags.pop("reward_funcs", None)
    if script.settings.get("dataset_name") in FORMATS:  # the script loads files, which it may call by another flag
        for one in [*(one for _, one in given[: -len(scripts)]), flags]:
            one.pop("dataset_name", None)
    parsed = merged(given) | {name: flags[name] for name in flags if name not in script.arguments}
    settings = lifted({name: one for name, one in parsed.items() if name not in script.own_taken}, known)
    path = (scripts or files or [named])[0]
    count, unread = take_processes(settings, path.parent)
    gpus = count if gpus is None else gpus
    processes = (launched.processes if launched is not None else None) or count or gpus
    if is_counted and settings.get("use_cpu"):
        gpus = 0
    kind = trainer or script.trainer or _kind(settings, path)
    if kind not in ("grpo", "rloo"):
        name_longest_row(settings, script.settings)
    if not scripts:
        settings, mixed = of_mixture(settings)
        script.unreadable |= {"train_dataset": mixed} if mixed else {}
    if not scripts and kind in ("grpo", "rloo"):
        settings = with_evaluation(settings)
    if settings.get("reward_funcs") and kind not in ("grpo", "rloo"):
        raise ConfigError(
            f"--trainer {kind}: the config has reward_funcs, which grpo and rloo take; say --trainer grpo"
        )
    defaults = {**TABLES["defaults"]["every"], **TABLES["defaults"][kind], **script.defaults}
    conversion = Conversion("TRL", settings, defaults, TABLES["decided"], [*known, *script.own])
    conversion.algorithm = ALGORITHMS[kind]
    for name in ("deepspeed", "launcher.deepspeed"):
        if parts := own_parts_of_deepspeed(settings.get(name), path.parent):
            conversion.ask(
                f"{name} has its own {' and '.join(parts)}, which may train in the place of the config's: compare "
                "trainer.lr, trainer.adam_betas, trainer.weight_decay and trainer.lr_schedule with it"
            )
    if conversion.get("use_cpu"):
        conversion.put("trainer.device", "cpu", "use_cpu")
    gpus = _of_one_machine(conversion, settings, gpus) if is_counted and gpus else gpus
    rules = _TrlRules(conversion, kind, gpus, script, path, processes or 1)
    if unread and not processes:
        conversion.ask(f"{unread} {MORE_PROCESSES}")
    rules.apply()
    for name, place in script.unreadable.items():
        if name not in rules.asked and (name != "model" or not settings.get("model_name_or_path")):
            conversion.leave_unread(name, f"could not be read without running the script: {place}")
    for text in [*script.unread_statements, *(launched.others if launched else ())]:
        conversion.ask(text)
    for name, text in unknown.items():
        conversion.leave_unread(name, f"{text!r}: only the shell that runs the script knows it")
    if script.environment:
        values = ", ".join(f"{name} = {value}" for name, value in script.environment.items())
        conversion.ask(f"the script's defaults of environment variables were taken: {values}")
    return conversion.finish()


def _of_one_machine(conversion: Conversion, settings: Mapping[str, Any], gpus: int) -> int | None:
    """Return the GPUs of one machine, on which a run file places all roles; None if no machine has as many."""
    machines = settings.get("launcher.num_machines")
    on_each = gpus // machines if isinstance(machines, int) and machines > 1 else gpus
    if on_each > MOST_GPUS:
        conversion.ask(
            f"{gpus:,} processes were found, more GPUs than a machine has: the batch is that of all of them, and the "
            "run takes the GPUs of its machine; --gpus N names them"
        )
        return None
    if on_each == gpus:
        return gpus
    conversion.ask(
        f"{gpus} processes on {machines} machines: the run file places all roles on one, of {on_each} "
        "GPUs; deploy/README.md says how roles are on several"
    )
    return on_each


def _kind(settings: Mapping[str, Any], path: Path) -> str:
    """Return the kind of trainer for a YAML config, which does not name it."""
    if "reward_funcs" in settings or "num_generations" in settings:
        return "grpo"
    if named := [kind for kind in ALGORITHMS if kind in path.stem.lower()]:
        return named[0]
    raise ConfigError(f"{path}: does not say which trainer it is for; add --trainer {'|'.join(ALGORITHMS)}")


class _TrlRules:
    """The conversion rules for TRL's settings. `apply` is called once."""

    def __init__(
        self, conversion: Conversion, kind: str, gpus: int | None, script: Script, path: Path, processes: int
    ) -> None:
        """`processes`: those that TRL trains in, whose batches add up."""
        self._c, self._kind, self._gpus, self._script, self._path = conversion, kind, gpus, script, path
        self._processes = processes
        self._module = re.sub(r"\W", "_", path.stem)  # train-grpo.py is no name of a module
        self._samples = kind in ("grpo", "rloo")
        self.asked: set[str] = set()
        """Arguments of the trainer that the user is asked to write."""
        self._rewards = RewardRules(conversion, script, path, self._module, self.asked)
        rewards = many(conversion.get("reward_funcs") or []) if self._samples else []
        by_math = any(self._rewards.named_here(one) == "math" for one in rewards)
        by_chat = by_math or any(self._rewards.is_theirs_of_chats(one) for one in rewards)
        self._datasets = DatasetRules(
            conversion, script, path, self.asked, samples=self._samples, by_math=by_math, by_chat=by_chat
        )

    def apply(self) -> None:
        c = self._c
        if name := c.get("run_name"):
            c.leave("output_dir", "a run is in runs/NAME; run.folder names another place than runs")
        c.name_run(name or Path(str(c.get("output_dir"))).name, "run_name" if name else "output_dir")
        self._train = self._datasets.source("")
        self._model()
        c.put(
            "trainer.algorithm",
            c.algorithm,
            "RewardTrainer" if self._kind == "reward" else f"{self._kind.upper()}Trainer",
        )
        if self._samples:
            put_loss(c, self._kind, TABLES["losses"])
            put_correction(c, self._kind)
        self._batches()
        c.take(TABLES["alike"])
        c.keep("save_total_limit")
        c.put("trainer.adam_betas", [c.get("adam_beta1"), c.get("adam_beta2")], "adam_beta1, adam_beta2")
        if self._samples:
            self._sampled()
        else:
            self._demonstrations()
        project = c.get("wandb_project") or c.get("project") or Path(str(c.get("output_dir"))).name
        c.track(c.get("report_to"), "report_to", project)
        if (resumed := c.get("resume_from_checkpoint")) is True:
            c.put("run.resume", "auto", "resume_from_checkpoint")
        elif resumed:
            c.leave(
                f"resume_from_checkpoint = {resumed!r}", "a run resumes from its own checkpoints: `rftstream resume`"
            )

    def _model(self) -> None:
        c = self._c
        if (model := c.get("model_name_or_path")) is None:
            where = self._script.unreadable.get("model", "nothing names one")
            raise ConfigError(
                f"{self._path}: the model could not be read: {where}; name it as a text in the script, or in a second "
                "FILE, a YAML with model_name_or_path: NAME"
            )
        c.put("model.path", model, "model" if self._script.trainer else "model_name_or_path")
        put_model(c)

    # ------------------------------------------------------------------------------------ GRPO and RLOO

    def _batches(self) -> None:
        """Convert numbers that TRL counts in completions and optimizer steps."""
        c, processes = self._c, self._processes
        device, accumulated = c.get("per_device_train_batch_size"), c.get("gradient_accumulation_steps")
        said = f"per_device_train_batch_size {device} x {processes} processes"
        steps, passes = 1, 1
        if self._samples:
            longer, sampled = (
                max(c.get("steps_per_generation", accumulated), accumulated),
                c.get("generation_batch_size"),
            )
            least = device * processes * accumulated  # several batches of samples in one optimizer step are one here
            completions = max(sampled, least) if sampled else device * processes * longer
            name = "steps_per_generation" if longer > accumulated else "gradient_accumulation_steps"
            said = f"{said} x {name} {longer} = {completions} completions"
            said = f"generation_batch_size {completions}" if sampled and sampled >= least else said
            size = c.get("num_generations")
            c.put("feeder.group_size", size, "num_generations")
            groups, rounded = share(completions, size)
            self._per_batch = groups
            c.put("feeder.groups_per_batch", groups, f"{said} / num_generations {size}{rounded}")
            steps, rounded = share(completions, least)
            passes = c.get("num_iterations")
            if steps > 1:
                there = f"steps_per_generation: {completions} completions / {least} by gradient_accumulation_steps"
                c.put("trainer.minibatches", steps, there + rounded)
            if passes > 1:
                c.put("trainer.updates_per_batch", passes, "num_iterations")
            c.put("feeder.max_staleness", 0, "on-policy: TRL samples and trains in turns; 1 or 2 does both at once")
        else:
            there = f"{said} x gradient_accumulation_steps {accumulated}"
            self._per_batch = device * processes * accumulated
            c.put("experts.per_batch", self._per_batch, there)
        self._length(steps * passes)

    def _length(self, batch_steps: int) -> None:
        c = self._c
        divided = f" / {batch_steps} optimizer steps per batch" if batch_steps > 1 else ""
        self._batch_steps, self._divided = batch_steps, divided
        most, epochs = c.get("max_steps", -1), c.get("num_train_epochs")
        steps: int | None = None
        if most > 0:
            steps, rounded = share(most, batch_steps, up=True)
            c.put("run.steps", steps, f"max_steps {most}{divided}{rounded}" if divided else "max_steps")
        else:
            steps = self._steps_of_passes(epochs)
        self._steps = steps
        name = "warmup_steps" if c.get("warmup_steps") else "warmup_ratio"
        c.schedule("lr_scheduler_type", c.get(name), name, steps, batch_steps, math.ceil)
        put_in_steps(c, batch_steps)
        every = c.get("save_steps", 0)
        if 0 < every < 1 and steps is not None:
            every = math.ceil(every * steps * batch_steps)
        if (strategy := c.get("save_strategy", "steps")) == "steps" and 0 < every < 1:
            c.leave(f"save_steps = {every}", "a share of steps that the config does not say")
        elif strategy == "steps" and every >= 1:
            saved, rounded = share(every, batch_steps, up=True)
            c.put("trainer.checkpoint_every", saved, f"save_steps {every}{divided}{rounded}")
        elif strategy != "steps":
            c.leave(f"save_strategy = {strategy!r}", "trainer.checkpoint_every counts versions")

    def _steps_of_passes(self, epochs: float) -> int | None:
        """Take the passes through the rows. Return the steps that they come to, if a schedule needs them and the number
        of rows is known."""
        c, rows, passes = self._c, self._train.num_rows, math.ceil(epochs)
        is_falling = c.get("lr_scheduler_type") not in ("constant", "constant_with_warmup") or c.get("warmup_ratio")
        if not is_falling or not rows or c.get("packing"):
            rows = None
        if self._samples and rows is not None:
            steps = max(math.ceil(epochs * (rows // self._per_batch)), 1)
            c.put("run.steps", steps, f"num_train_epochs {epochs} x {rows} rows / {self._per_batch} a batch")
            return steps
        if rows is None:
            rounded = "" if passes == epochs else f" {epochs}, rounded up"
            c.put("tasksets.train.passes" if self._samples else "experts.passes", passes, f"num_train_epochs{rounded}")
            return None
        steps = max(int(passes * rows * (1 - (self._datasets.held_out() or 0))) // self._per_batch, 1)
        c.put("run.steps", steps, f"num_train_epochs {passes} x {rows} rows / {self._per_batch} a batch")
        return steps

    def _sampled(self) -> None:
        c = self._c
        c.put("sampling.max_tokens", c.get("max_completion_length"), "max_completion_length")
        for name in ("stop", "stop_strings"):  # of vLLM, and of transformers
            if ends := c.get(f"generation_kwargs.{name}"):
                c.put("sampling.stop", list(many(ends)), f"generation_kwargs.{name}")
        if c.get("use_vllm"):
            mode = c.get("vllm_mode", "colocate")
            if self._gpus is None:
                said = "use_vllm" if mode == "colocate" else f"use_vllm, vllm_mode {mode}"
                c.put("explorer.policy", "auto", f"{said}: vllm, where it is installed for a GPU")
            elif self._gpus:
                c.put("explorer.policy", "vllm", "use_vllm")
            else:
                c.leave("use_vllm", "with --gpus 0 the run's own engine samples, on CPUs")
            apart = self._gpus if mode == "server" and self._processes <= (self._gpus or 0) else None
            c.place(self._gpus, f"vllm_mode {mode!r}, --gpus {self._gpus}", apart=apart)
        else:
            c.place(self._gpus, f"--gpus {self._gpus}")
        taskset = f"tasksets.{c.taskset}"
        for key, value in self._train.settings.items():
            c.put(f"{taskset}.{key}", value, self._train.there if key == "options" else "train_dataset")
        c.put(f"{taskset}.shuffle", c.get("shuffle_dataset"), "shuffle_dataset")
        self._rewards.put(taskset, "reward_funcs, reward_weights")
        is_evaluated = c.get("eval_dataset_name") or "eval_dataset" in self._script.unreadable
        if tools := put_tools(c, [taskset, *(["evaluations.held-out"] if is_evaluated else [])], self._module):
            self._rewards.copy(tools, f"{self._module}_tools")
        if is_evaluated:
            held_out = self._datasets.source("eval_")
            for key, value in held_out.settings.items():
                c.put(f"evaluations.held-out.{key}", value, held_out.there if key == "options" else "eval_dataset")
            self._rewards.put("evaluations.held-out", "reward_funcs")
            self._evaluated("evaluations.held-out.every")
            c.put(
                "evaluations.held-out.n",
                c.get("num_generations_eval", c.get("num_generations")),
                "num_generations_eval",
            )

    def _evaluated(self, key: str) -> None:
        """Write how often there is an evaluation, in versions."""
        c = self._c
        every, there = evaluated_every(c, None if self._steps is None else self._steps * self._batch_steps)
        rows = self._train.num_rows
        if every is not None:
            asked, rounded = share(every, self._batch_steps, up=True)
            c.put(key, asked, f"{there} {every}{self._divided}{rounded}" if self._divided else there)
        elif there == "eval_strategy 'epoch'" and rows:
            of_pass = max(rows // self._per_batch, 1) if self._samples else share(rows, self._per_batch, up=True)[0]
            c.put(key, of_pass, f"{there}: {rows} rows / {self._per_batch} a batch")
        else:
            no = " (default of TRL), which does not evaluate" if there.endswith("'no'") else ""
            c.put(key, 50, f"{there}{no}: not known in versions")

    # ------------------------------------------------------------------------------------ SFT, DPO, reward

    def _demonstrations(self) -> None:
        c = self._c
        c.place(self._gpus, f"--gpus {self._gpus}")
        for key, value in self._train.settings.items():
            c.put(f"experts.{key}", value, "train_dataset")
        is_random = c.get("train_sampling_strategy", "random") != "sequential"
        c.put("experts.shuffle", is_random, "train_sampling_strategy: at random, whatever shuffle_dataset says")
        c.get("shuffle_dataset")
        self._held_out()
        put_longest_row(c)
        put_objective(c, self._kind)

    def _held_out(self) -> None:
        """Take the share of rows that is held out, or say that the rows are not taken."""
        c, share = self._c, self._datasets.held_out()
        if share is not None:
            c.put("experts.held_out", share, "train_test_split")
            self._evaluated("experts.held_out_every")
        elif split := c.get("dataset.train_test_split"):
            c.ask(
                f"train_test_split {split}: its test rows are in no file; experts.held_out keeps a share of those that "
                "are trained on, for held_out_loss: write it"
            )
        for name in (held := [*c.names("eval_dataset"), *c.names("eval_load_dataset")]):
            c.get(name)
        if (held or "eval_dataset" in self._script.unreadable) and share is None:
            self.asked.add("eval_dataset")
            c.leave("eval_dataset", "experts.held_out keeps a share of the rows")
        if share is None:
            names = ("eval_strategy", "eval_steps", "dataset_test_split")
            for name in [one for one in names if c.get(one, only_given=True) is not None]:
                c.leave(name, "rows apart are experts.held_out, a share of the rows; the loss on it is held_out_loss")
