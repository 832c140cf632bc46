"""Converts prime-rl's TOML to a run file: that of `rl`, of separate trainer and orchestrator, and of `sft`.

Names and defaults are those of packages/prime-rl-configs, with the older names of the orchestrator beside them.
prime-rl counts a batch in rollouts, a run file in problems. An environment of verifiers runs as an agent in its own
interpreter, and keeps its taskset, harness and rewards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rftstream.config import toml_files
from rftstream.config.plain import toml_value
from rftstream.errors import ConfigError
from rftstream.integrations.foreign_configs.conversion import (
    Conversion,
    ConvertedConfig,
    section_name,
    share,
)
from rftstream.integrations.foreign_configs.reading import flat, merged, tables_of

SHARED = (
    r"(max_steps|seq_len|model\.name|ckpt|monitors|wandb|output_dir|log|run|resume|weight_broadcast|slurm|deployment)"
)
TABLES = tables_of("prime_rl")
EVALUATED = {
    "max_completion_tokens": "max_tokens",
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p")},
}
READ = {"name", "id", "args", "env", "ratio", "sampling", "curriculum", "serve"}
"""Settings of a source that rules read, or that are of its server."""
SAMPLING = ("orchestrator.train.sampling", "orchestrator.sampling")


def convert_prime_rl(files: list[Path], gpus: int | None, trainer: str | None) -> ConvertedConfig:
    """Return the run file for one file of `rl` or `sft`, or for files of trainer and orchestrator."""
    given = merged([(path, _whole(toml_files.read_toml(path))) for path in files])
    is_sft = any(name.startswith("data.") for name in given)
    c = Conversion("prime-rl", given, TABLES["sft_defaults" if is_sft else "defaults"], TABLES["decided"])
    c.put("model.path", c.get("model.name"), "model.name")
    given_gpus = [c.get(f"deployment.num_{kind}_gpus") for kind in (("train",) if is_sft else ("train", "infer"))]
    if gpus is None and any(given_gpus):
        gpus = sum(one or 1 for one in given_gpus)
    prefix = "" if is_sft else "trainer."
    (_sft if is_sft else _reinforced)(c, files[0], gpus)
    _optimizer(c, prefix)
    lora = f"{prefix}model.lora"
    if c.get(lora) == {} or c.names(f"{lora}."):
        c.get(lora)
        c.lora(f"{lora}.rank", f"{lora}.alpha", f"{lora}.target_modules", 32.0, default_rank=16)
        c.get("orchestrator.model.lora.rank"), c.get("orchestrator.model.lora.name")
    project = c.get("monitors.wandb.project", c.get("wandb.project"))
    entity, named = c.get("monitors.wandb.entity"), c.get("monitors.wandb.name", c.get("wandb.name"))
    own = c.get("run.name")
    place = "run.name" if own else "monitors.wandb.name" if named else "the folder of the file"
    c.name_run(own or named or files[0].parent.resolve().name, place)
    if project:
        c.put("trackers.wandb", f"{entity}/{project}" if entity else project, "monitors.wandb.project")
    c.keep("ckpt.keep_last")
    c.get("output_dir")
    return c.finish()


def _whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's settings under the names of `rl`, with the prefix of trainer or orchestrator."""
    found = flat(values)
    tops = set(values)
    if tops & {"trainer", "orchestrator"} or (isinstance(values.get("data"), Mapping) and "fake" not in values["data"]):
        return found
    role = "orchestrator" if tops & {"train", "env", "batch_size", "group_size", "rollouts_per_example"} else "trainer"
    renamed = {"model.seq_len": "seq_len"} if role == "trainer" else {}
    return {
        renamed.get(name, name if re.match(SHARED, name) else f"{role}.{name}"): value for name, value in found.items()
    }


def _optimizer(c: Conversion, prefix: str) -> None:
    if (kind := c.get(f"{prefix}optim.type", "adamw")) != "adamw":
        c.leave(f"{prefix}optim.type", f"{kind!r} has no counterpart; AdamW stands in its place")
    betas = [c.get(f"{prefix}optim.betas1", 0.9), c.get(f"{prefix}optim.betas2", 0.999)]
    c.put("trainer.adam_betas", betas, f"{prefix}optim.betas1, betas2 (default of prime-rl)")
    if (schedule := c.get(f"{prefix}scheduler.type", "constant")) == "linear":
        c.put("trainer.warmup_steps", c.get(f"{prefix}scheduler.warmup_steps", 10), f"{prefix}scheduler.warmup_steps")
        last = c.get(f"{prefix}scheduler.decay_steps", 10)
        c.get(f"{prefix}scheduler.min_lr")
        c.ask(f"scheduler linear: prime-rl's rate falls in the last {last} steps alone, here it stays constant")
    elif schedule != "constant":
        name = f"{prefix}scheduler.warmup_steps"
        c.schedule(f"{prefix}scheduler.type", c.get(name, 10), name, c.get("max_steps"))
        if (low := c.get(f"{prefix}scheduler.min_lr")) is not None:
            c.put("trainer.min_lr_share", low / c.get(f"{prefix}optim.lr"), f"{prefix}scheduler.min_lr / optim.lr")
    c.put("backends.torch.gradient_checkpointing", True, f"{prefix}model.ac: prime-rl's default, too")
    for name in c.names(f"{prefix}model.ac."):
        c.get(name)


def _reinforced(c: Conversion, path: Path, gpus: int | None) -> None:
    _loss(c)
    size = c.get("orchestrator.group_size", c.get("orchestrator.rollouts_per_example", 1))
    c.put("feeder.group_size", size, "orchestrator.group_size")
    rollouts = c.get("orchestrator.batch_size")
    groups, rounded = share(rollouts, size)
    said = f"orchestrator.batch_size {rollouts} rollouts / group_size {size}{rounded}"
    c.put("feeder.groups_per_batch", groups, said)
    if (level := c.get("orchestrator.max_async_level")) is not None:
        c.put("feeder.max_staleness", level, "orchestrator.max_async_level")
    c.take(TABLES["alike"])
    longest = c.get("orchestrator.seq_len", c.get("seq_len"))
    c.put("model.context", longest, "seq_len")
    c.put("sampling.max_tokens", longest, "seq_len, without a max_completion_tokens")
    for prefix in SAMPLING:
        most = c.get(f"{prefix}.max_completion_tokens", c.get(f"{prefix}.max_tokens"))
        if most is not None:
            c.put(
                "sampling.max_tokens", most, f"{prefix}.max_completion_tokens: of one turn there, of all together here"
            )
        c.take([f"{prefix}.{name}" for name in ("temperature", "min_tokens", "repetition_penalty")])
    name = "orchestrator.train.filter_zero_advantages"
    c.get(name)
    c.put("buffer.zero_variance", "keep", f"{name}: groups without an advantage teach nothing, but count in the mean")
    sources = c.get("orchestrator.train.source") or c.get("orchestrator.env") or c.get("env") or []
    if not sources:
        raise ConfigError(
            f"{path}: no [[orchestrator.train.source]], expected the problems; name the orchestrator's file, too"
        )
    for one in sources:
        _environment(c, "tasksets", one, "orchestrator.train.source")
        gates = (one.get("curriculum") or {}).get("gates") or {}
        if any(gate.get("type") == "advantage_range" for gate in gates.values()) and size > 1:
            c.put("buffer.zero_variance", "replace", "orchestrator.train.source.curriculum.gates advantage_range")
        for name in sorted(set(one) - READ):
            shown = toml_value(one[name])
            c.leave(
                f"orchestrator.train.source.{name} = {shown[:60]}", "of all tasksets or none: no counterpart for one"
            )
    for one in c.get("orchestrator.eval.source") or c.get("orchestrator.eval.env") or []:
        place = _environment(c, "evaluations", one, "orchestrator.eval.source")
        c.put(
            f"{place}.every",
            one.get("interval", c.get("orchestrator.eval.interval", 100)),
            "orchestrator.eval.interval",
        )
        c.put(
            f"{place}.n",
            one.get("group_size", c.get("orchestrator.eval.group_size", 1)),
            "orchestrator.eval.group_size",
        )
        if (count := one.get("num_examples", c.get("orchestrator.eval.num_examples", -1))) > 0:
            c.put(f"{place}.num_tasks", count, "orchestrator.eval.num_examples")
        sampling = {ours: c.get(f"orchestrator.eval.sampling.{name}") for name, ours in EVALUATED.items()}
        if given := {name: value for name, value in sampling.items() if value is not None} | _sampled(one):
            c.put(f"{place}.sampling", given, "orchestrator.eval.sampling")
    if gpus:
        c.put("explorer.policy", "vllm", "inference")
    c.place(gpus, f"deployment, {gpus} GPUs: one trains, the others sample")


def _loss(c: Conversion) -> None:
    kind, loss = (
        c.get("orchestrator.algo.type", c.get("orchestrator.advantage.type", "grpo")),
        c.get("trainer.loss.type", "default"),
    )
    algorithm = {"max_rl": "maxrl", "opd": "opd"}.get(kind, "dppo")
    if kind not in ("grpo", "default", "max_rl", "opd"):
        c.leave("orchestrator.algo.type", f"{kind!r} has no counterpart; dppo stands in its place")
    if loss != "default":
        c.leave("trainer.loss.type", f"{loss!r}: a loss of your own is `module:Class`, see docs/extending.md")
    c.algorithm = algorithm
    c.put("trainer.algorithm", algorithm, "orchestrator.algo.type, trainer.loss.type")
    if algorithm == "dppo":
        c.put("algorithms.dppo.scale_rewards", "none", "orchestrator.algo.type: rewards minus the group's mean")
        for name, ours in (("dppo_mask_high", "max_rise"), ("dppo_mask_low", "max_fall"), ("kl_tau", "square_coef")):
            if (value := c.get(f"trainer.loss.{name}")) is not None:
                c.put(f"algorithms.dppo.{ours}", value, f"trainer.loss.{name}")
    if algorithm == "maxrl":
        c.ask("prime-rl drops tokens as dppo does; maxrl here has PPO's clip")
    if algorithm == "opd":
        c.put("rewards.teacher.url", c.get("orchestrator.algo.teacher.base_url"), "orchestrator.algo.teacher.base_url")
        c.put("rewards.teacher.model", c.get("orchestrator.algo.teacher.name"), "orchestrator.algo.teacher.name")


def _sampled(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling of one source under our names."""
    given = source.get("sampling") or {}
    return {EVALUATED[name]: value for name, value in given.items() if name in EVALUATED}


def _environment(c: Conversion, kind: str, source: Mapping[str, Any], there: str) -> str:
    """Write a taskset or evaluation with the problems of a verifiers taskset. Return its section."""
    env = source.get("env") or {"taskset": {"id": source.get("id"), **(source.get("args") or {})}}
    name = section_name(str(source.get("name") or env.get("taskset", {}).get("id") or "env"))
    place = f"{kind}.{name}"
    c.put(f"{place}.source", f"jsonl:{name}.jsonl", f"{there} {name!r}")
    agent = {
        "name": "hosted_agent",
        "target": "verifiers",
        "python": "venvs/verifiers/bin/python",
        "options": {"env": env},
    }
    c.put(f"{place}.environment", agent, f"{there}.env")
    c.put(f"{place}.reward", "environment", f"{there}.env: the rewards of verifiers")
    if kind == "tasksets" and (ratio := source.get("ratio")):
        c.put(f"{place}.weight", float(ratio), f"{there}.ratio")
    if kind == "tasksets" and _sampled(source):
        c.put(f"{place}.sampling", _sampled(source), f"{there}.sampling")
    c.ask(f'write {name}.jsonl beside the run file, a line {{"prompt": "", "idx": 0}} for each task of the taskset')
    c.ask("make venvs/verifiers with the packages of the environments: docs/agents.md, agents of frameworks")
    return place


def _sft(c: Conversion, path: Path, gpus: int | None) -> None:
    c.algorithm = "sft"
    c.put("trainer.algorithm", "sft", "[data]")
    c.put("experts.source", f"hf:{c.get('data.name', 'PrimeIntellect/Reverse-Text-SFT')}", "data.name")
    if splits := c.get("data.splits"):
        c.put("experts.options", {"split": splits[0]}, "data.splits")
    c.put("experts.per_batch", c.get("data.batch_size"), "data.batch_size")
    c.put("experts.shuffle", c.get("data.shuffle", True), "data.shuffle")
    c.put("model.context", c.get("data.seq_len"), "data.seq_len")
    c.leave(
        "data.micro_batch_size",
        f"{c.get('data.micro_batch_size', 1)}: memory is trainer.tokens_per_microbatch, by tokens",
    )
    c.take(["max_steps", "optim.lr", "optim.weight_decay", "optim.max_norm", "ckpt.interval"])
    c.place(gpus, "deployment: one GPU trains")
