"""Themes: what a user asks for by a word like OOM, and the settings that decide it, the first to try first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """A theme of `rftstream explain`."""

    name: str
    words: tuple[str, ...]
    """Other words for it."""
    about: str
    """The command that shows where a run stands in this."""
    settings: Mapping[str, str]
    """Key of a setting -> the reason to change it."""


THEMES = (
    Theme(
        name="memory",
        words=("oom", "vram", "ram", "out_of_memory", "outofmemoryerror"),
        about="Memory of devices and processes. `rftstream check FILE` estimates it by role, before a run.",
        settings={
            "trainer.tokens_per_microbatch": "Trainer out of memory: half of it; results stay the same.",
            "backends.torch.gradient_checkpointing": "Trainer: recomputes activations; a third slower.",
            "backends.torch.offload_activations": "Trainer: with it, activations of long rows move to main memory.",
            "backends.torch.max_logits_bytes": "Trainer: smaller pieces of logits, for large vocabularies.",
            "backends.torch.offload_optimizer": "Trainer: 12 bytes a parameter move to main memory.",
            "model.lora": "Trainer: adapters need no masters and moments of the model.",
            "model.quantize": "Trainer: beside adapters, the model takes half a byte a parameter.",
            "backends.torch.moments": "Trainer: 8bit moments, 2 bytes a parameter instead of 8.",
            "backends.deepspeed.stage": "Trainer on several GPUs: 2 or 3 share out optimizer, gradients and weights.",
            "trainer.colocate": "One GPU for both: explorer and trainer take turns on it.",
            "explorer.max_concurrent": "Explorer out of memory: fewer rollouts at a time, fewer keys and values.",
            "policies.hf.prefill_tokens": "Explorer: smaller pieces of prompts.",
            "policies.vllm.engine": "vLLM: { gpu_memory_utilization = 0.6 } leaves room for others.",
            "sampling.max_tokens": "Both: shorter completions.",
            "model.context": "Both: the longest prompt and completion together.",
            "buffer.max_body_bytes": "Main memory of the buffer.",
        },
    ),
    Theme(
        name="gpu",
        words=("gpus", "cuda", "devices", "device", "multi_gpu", "accelerator"),
        about="A run takes the GPUs that are there; `rftstream check FILE` says where each role is, if it fits.",
        settings={
            "trainer.device": "Device of the trainer.",
            "explorer.devices": "Devices of the explorers, dealt out in turn.",
            "explorer.count": "Explorers that `run` starts: one for each GPU that samples.",
            "explorer.policy": "vllm: an engine made for GPUs.",
            "trainer.colocate": "A single GPU: sampling and training take turns.",
            "evaluator.device": "Device of the evaluations.",
            "trainer.backend": "deepspeed trains on several GPUs.",
            "backends.deepspeed.processes": "GPUs that train together on a host.",
            "policies.vllm.engine": "{ tensor_parallel_size = 2 }: a model over two GPUs.",
            "explorer.max_concurrent": "More rollouts at a time fill a GPU that idles; auto finds how many.",
            "model.dtype": "bfloat16, or float16 for GPUs older than Ampere.",
        },
    ),
    Theme(
        name="resume",
        words=("crash", "recover", "recovery", "killed", "preemption", "checkpointing"),
        about="A run that was killed goes on from its log: `rftstream resume RUN`.",
        settings={
            "run.resume": "auto: `run` itself resumes, for jobs that are restarted by a scheduler.",
            "trainer.checkpoint_every": "Fewer versions between checkpoints: less is trained again after a crash.",
            "trainer.keep_checkpoints": "Checkpoints that `run.resume = VERSION` can go back to.",
            "trainer.keep_every": "Keeps some of the old ones, too.",
            "explorer.partial_every_s": "Long rollouts go on from their last save.",
            "transport.patience_s": "How long workers wait for a log that cannot be reached.",
            "transport.session_timeout_s": "How soon the work of a dead worker goes to others.",
            "model.init_from": "A new run with the weights of an old one.",
        },
    ),
    Theme(
        name="speed",
        words=("slow", "throughput", "performance", "idle", "faster", "latency"),
        about="`rftstream status RUN` says which role is waited for. First help that one.",
        settings={
            "explorer.count": "The trainer waits: more explorers, here or by `rftstream worker` elsewhere.",
            "explorer.policy": "The trainer waits, on a GPU: vllm.",
            "explorer.max_concurrent": "The trainer waits: more rollouts at a time, or auto.",
            "sampling.max_tokens": "Fewer tokens where most of the answer is not needed.",
            "explorer.repetition_tokens": "Ends completions that repeat themselves.",
            "verifier.processes": "Rewards are slow: more of them at a time.",
            "trainer.tokens_per_microbatch": "Explorers wait: larger pieces fill the trainer's device.",
            "backends.torch.compile": "Explorers wait: compiled layers, after minutes at the start.",
            "buffer.zero_variance": "replace: groups without a signal cost no training.",
            "feeder.max_staleness": "0 makes sampling and training take turns; 2 keeps both busy.",
            "trainer.publish_every": "Large models: fewer versions to send.",
        },
    ),
    Theme(
        name="learning",
        words=("learn", "unstable", "nan", "collapse", "diverges", "flat", "no_signal"),
        about="`rftstream try FILE` shows prompts, answers and rewards; `rftstream status RUN` names what looks wrong.",
        settings={
            "tasksets.NAME.reward": "The reward stays at 0: does it accept the reference answer?",
            "sampling.max_tokens": "Answers are cut off before they end.",
            "trainer.lr": "Nothing is learned: three times as much; gradients or KL run away: a third.",
            "feeder.group_size": "All siblings right, or all wrong: more of them.",
            "feeder.groups_per_batch": "The reward jumps from step to step: more problems in a batch.",
            "sampling.temperature": "Siblings give equal answers: higher.",
            "buffer.zero_variance": "replace: batches without groups that teach nothing.",
            "pipeline": "solve_rate leaves out what is always or never solved.",
            "algorithms.grpo.kl_coef": "Holds the policy near the first model.",
            "trainer.warmup_steps": "The first steps do damage: a slower start.",
            "trainer.max_grad_norm": "Spikes: a lower norm.",
        },
    ),
    Theme(
        name="dead",
        words=(
            "dead_letter",
            "dead_letters",
            "dead_group",
            "dead_groups",
            "died",
            "retry",
            "retries",
            "put_back",
            "reward_0",
            "reward_is_0",
            "zero_reward",
            "always_0",
            "always_zero",
            "no_reward",
            "bad_reward",
        ),
        about="Rewards that fail, or are always 0. `rftstream check FILE` scores the problems' own answers; `rftstream "
        "dead list RUN` says what rollouts died of; when mended, `rftstream dead retry RUN --all`, then resume.",
        settings={
            "tasksets.NAME.reward": "0 for every rollout: does it give 1 for the problem's own answer?",
            "tasksets.NAME.columns": "The column with the answer; a reward that reads another one never matches.",
            "sampling.max_tokens": "Answers are cut off before they end.",
            "verifier.tries": "How often a reward that raises is tried before its rollout has none.",
            "verifier.timeout_s": "How long one try may take.",
            "verifier.max_dead_share": "Share of rollouts without a reward above which the run stops (exit 6).",
            "buffer.min_siblings": "A group with fewer scored rollouts dies.",
        },
    ),
    Theme(
        name="disk",
        words=("storage", "space", "retention", "cleanup"),
        about="`rftstream check FILE` estimates the disk before a run; `rftstream delete RUN` removes a run.",
        settings={
            "trainer.keep_checkpoints": "Checkpoints have weights, masters and moments: 14 bytes a parameter.",
            "weights.keep": "Full copies of the weights that stay.",
            "weights.anchor_every": "Deltas between two full copies.",
            "retention.checkpoints": "How far back the log is kept.",
            "tasksets.NAME.options": "keep: the columns that go through the log with every rollout.",
            "run.folder": "Where runs are written.",
        },
    ),
    Theme(
        name="cluster",
        words=("hosts", "nodes", "machines", "distributed", "multi_node", "slurm", "kubernetes"),
        about="The log on Kafka and the weights where all hosts reach them; `rftstream worker` joins a run.",
        settings={
            "transport.kind": "kafka.",
            "transport.servers": "Where the brokers listen.",
            "transport.options": "Security of Kafka: TLS, SASL.",
            "transport.partitions": "At least as many as explorers or verifiers.",
            "weights.store": "s3://BUCKET/PATH, or a folder that all hosts share.",
            "explorer.count": "0: explorers are started by hand, or by the scheduler.",
            "run.resume": "auto, for schedulers that start a job again.",
        },
    ),
    Theme(
        name="preferences",
        words=("kto", "orpo", "cpo", "simpo", "ipo", "bco", "preference_pairs", "preference_data", "unpaired"),
        about="Preferences are learned from pairs, by dpo; KTO, ORPO and their like are not there. Next to them:",
        settings={
            "algorithms.dpo": "Pairs of answers, beside the model that the run began with.",
            "experts": "Rows of prompt, chosen and rejected; a row with one `label` is refused.",
            "algorithms.reward_model": "Pairs become a reward model, which is then the reward of a run.",
            "stages": "ORPO in two steps: sft on the better answers, then dpo.",
            "algorithms.sft": "KTO's good answers alone, as prompt and completion.",
            "feedback": "KTO's thumbs, for answers of this policy: they become its reward.",
        },
    ),
    Theme(
        name="reproducibility",
        words=("deterministic", "determinism", "reproducible", "random"),
        about="`rftstream replay RUN` trains the recorded batches again; on CPUs bit for bit.",
        settings={
            "run.seed": "Order of problems, every rollout, and weights of made models.",
            "feeder.max_staleness": "0: what a version samples does not depend on time.",
            "policies.vllm.environment": '{ VLLM_BATCH_INVARIANT = "1" }: vLLM\'s batches change no result.',
        },
    ),
)


def themes_in(text: str) -> list[Theme]:
    """Return the themes of which a text has a word, with all its parts."""
    there = set(re.findall(r"\w+", text.lower().replace("_", " ")))
    return [theme for theme in THEMES if any(there.issuperset(one.split("_")) for one in (theme.name, *theme.words))]


def theme_named(word: str) -> Theme | None:
    """Return the theme of a word, in any spelling."""
    name = word.lower().replace("-", "_").replace(" ", "_")
    return next((theme for theme in THEMES if name in (theme.name, *theme.words)), None)
