"""The sections of a run file: every setting with its type, its range, its default, and what it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from rftstream.config import registry, secrets
from rftstream.contracts.tasks import Sampling
from rftstream.errors import ConfigError

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
AboveZero = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
RunName = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9][a-z0-9_-]*$",
        description="lower case letters, digits, - and _, and a letter or a digit first, e.g. 'words-2'",
    ),
]
SectionName = Annotated[
    str, Meta(pattern=r"^[a-z0-9_-]+$", description="lower case letters, digits, - and _, e.g. 'words-2'")
]


@dataclass(frozen=True, kw_only=True)
class RunSection:
    name: RunName
    """Lower case letters, digits, - and _; names the run folder and the topics."""
    steps: Positive | None = None
    """Ends after so many batches."""
    hours: AboveZero | None = None
    """Ends at the first step after so long."""
    stop_reward: float | None = None
    """Ends when the mean reward of the last `stop_reward_over` steps reaches this."""
    stop_reward_over: Positive = 10
    seed: Count = 0
    folder: str = "runs"
    """Where run folders are made."""
    resume: Literal["never", "auto"] | Count = "never"
    """What `run` does when the run is there already. never: refuses one that has not ended, and begins a new one beside
    one that has. auto: goes on with it, and is content with one that is complete. A number: goes on from the
    checkpoint of this version; later versions are not in force any more, their recorded batches are trained again."""
    imported_from: str | None = None
    """Run folder that the rollouts of this run were copied from, without a staleness check; `rftstream rescore` and
    `rftstream replay --into` set it."""
    imported_versions: tuple[Count, Count] | None = None
    """Its batches between these versions are trained here, under other settings; `rftstream replay --into` sets it."""


@dataclass(frozen=True, kw_only=True)
class MakeModel:
    """A small model made on the spot, with one token per character: to learn from nothing, in seconds."""

    characters: str = "0123456789+-*/= "
    layers: Positive = 2
    width: Positive = 64
    heads: Positive = 4
    context: Positive = 64


@dataclass(frozen=True, kw_only=True)
class LoraSection:
    """The model stays as it is, and low-rank matrices beside its linear layers are trained, published and saved; which
    ones is fixed for a run. With the extra `lora`, where the trainer runs. Usual learning rates are ten times those of
    a whole model."""

    rank: Positive = 16
    """Columns of the matrices: how much can be learned, and how large versions are."""
    alpha: AboveZero = 32.0
    """They count alpha / rank times."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Which linear layers get them, by the last parts of their names, e.g. `["q_proj", "v_proj"]`; all-linear: each but
    the head."""


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    path: str | None = None
    """A Hugging Face model folder, relative to the run file, or a name on the hub."""
    make: MakeModel | None = None
    init_from: str | None = None
    """`RUN@version`: begins with the weights of another run, which is a run folder or a run file; without version its
    newest. Tokenizer and template come along. They are the weights as engines got them, rounded to that run's dtype."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """What engines compute in and what is published; the trainer's masters are float32."""
    chat_template: str | None = None
    """Path of a Jinja template, or its text; default: the model's own. `final/` gets it."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """What the template is given beside messages and tools, e.g. `{ enable_thinking = false }`."""
    context: Positive | None = None
    """Longest prompt + completion in tokens; default: what the model's config says."""
    lora: LoraSection | None = None


@dataclass(frozen=True, kw_only=True)
class WeightedReward:
    name: str
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class TasksetSection:
    source: str
    """`jsonl:PATH`, `parquet:PATH`, `hf:FOLDER-OR-NAME`, `reasoning_gym:NAME`, `arithmetic`, or `module:Class`."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our name (prompt, messages, answer, system, tools, data_source) -> the source's, or the path of a field in it."""
    reward: str | list[WeightedReward] = "exact"
    algorithm: str | dict[str, Any] | None = None
    """What its groups are learned from by, instead of `trainer.algorithm`: a name, or a name with differences from the
    settings in [algorithms.NAME], `{ name = "grpo", clip_high = 0.28 }`. Each algorithm's loss counts by its share of
    the batch."""
    weight: NotNegative = 1.0
    """Share of the groups, relative to the other tasksets."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Differences from [sampling]."""
    environment: str = "single_turn"
    system: str | None = None
    """System prompt put in front."""
    shuffle: bool = True
    """Each pass in another order, derived from the run's seed."""
    passes: Positive | None = None
    """How often the taskset is gone through; default: as often as the run needs."""
    too_long: Literal["error", "skip", "truncate"] = "error"
    """Prompts that leave no room for a completion in the context: refuse at check, leave out, or cut from the left."""
    chat_template: str | None = None
    """For this taskset alone, instead of the model's."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Differences from the model's."""
    options: dict[str, Any] = field(default_factory=dict)
    """The source's own."""


@dataclass(frozen=True, kw_only=True)
class ExpertsSection:
    """Demonstrations or preference pairs, for algorithms that take them: `mix` and `chord` beside rollouts, `sft` and
    `dpo` alone."""

    source: str | tuple[str, ...] | None = None
    """Loaded when the run is made, and again, what is new of it, by `resume`: `jsonl:PATH`, `parquet:PATH`,
    `hf:FOLDER-OR-NAME`, or the path alone; or several of them, chats for one stage and pairs for another. More can be
    added at any time by `rftstream experts load`."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our name (messages, prompt, completion, chosen, rejected, system, tools, weight) -> the source's, or the path of
    a field in it."""
    system: str | None = None
    """System prompt put in front."""
    options: dict[str, Any] = field(default_factory=dict)
    """The source's own."""
    ratio: Annotated[float, Meta(gt=0)] = 0.2
    """Demonstrations in each batch, beside its rollouts: this share of `groups_per_batch` times `group_size`, rounded
    up. 0.2: MIX."""
    per_batch: Positive = 16
    """Demonstrations or pairs in each batch of a run without tasksets, or of a stage without rollouts."""
    passes: Positive | None = None
    """How often each is taken; default: once in a run without tasksets, else as often as the run needs, as always in a
    run with stages."""
    shuffle: bool = True
    """Each pass in another order, derived from the run's seed."""
    held_out: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share that is never trained on, evenly spread; their loss is the metric `held_out_loss`."""
    held_out_every: Positive = 20
    """Versions between two looks at what is held out; after the last step there is always one."""
    held_out_most: Positive = 256
    """Looks at no more of them."""
    too_long: Literal["error", "skip"] = "error"
    """Longer than the context: refuse to load them all, or leave them out."""

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else self.source or ()


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    source: str
    columns: dict[str, str] = field(default_factory=dict)
    reward: str | list[WeightedReward] = "exact"
    every: Positive = 50
    """Versions between two evaluations; version 0 and the final one are always evaluated."""
    num_tasks: Positive | None = None
    """The first so many problems; default: all."""
    n: Positive = 1
    """Samples per problem."""
    k: tuple[Positive, ...] = (1,)
    """pass@k, best@k and worst@k for these, each at most n."""
    pass_reward: float = 1.0
    """A sample passes with at least this reward."""
    sampling: dict[str, Any] = field(default_factory=dict)
    environment: str = "single_turn"
    system: str | None = None
    chat_template: str | None = None
    """For this evaluation alone, instead of the model's."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Differences from the model's."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FeederSection:
    groups_per_batch: Positive = 8
    group_size: Positive = 8
    max_staleness: Count = 2
    on_stale: Literal["wait", "drop"] = "wait"


@dataclass(frozen=True, kw_only=True)
class WorkerSection:
    """What every role has."""

    threads: Positive = 1
    """CPU threads for array work, of each process."""


@dataclass(frozen=True, kw_only=True)
class ExplorerSection(WorkerSection):
    count: Count = 1
    """Processes that `run` starts; more can be started by hand at any time."""
    policy: str = "hf"
    devices: tuple[str, ...] = ("cpu",)
    """Given to the processes in turn."""
    max_concurrent: Positive = 64
    """Rollouts in flight in one process."""
    partial_every_s: NotNegative = 30.0
    """Saves what is not finished so often, so that whoever takes over from a process that died goes on from there: at
    most so many seconds of sampling are lost. Each piece holds only what is new, some 10 bytes a token and 1 KB; short
    rollouts are mostly finished before they are saved. 0: only when a process is told to leave."""
    yield_after_tokens: Count = 0
    """A rollout that was given so many tokens in one go is saved and makes room for those that wait; it goes on when
    they have had their turn. The process then takes twice `max_concurrent` tasks and samples as many at once as
    before, or as many as the policy samples at once if that is less. 0: rollouts are finished in one go."""
    repetition_tokens: Count = 0
    """A rollout whose last so many tokens are one pattern over and over is cut short, as `truncated`. 0: never."""
    repetition_period: Positive = 64
    """Longest pattern, in tokens; it has to be there at least twice."""


@dataclass(frozen=True, kw_only=True)
class VerifierSection(WorkerSection):
    count: Count = 1
    max_concurrent: Positive = 256
    processes: Positive = 1
    """Children that compute rewards, of each verifier."""
    timeout_s: AboveZero = 10.0
    """Of one call of a reward. A call for several rollouts that takes longer is made again for each alone."""
    max_batch: Positive = 64
    """Rollouts that a reward over lists (TRL's, verl's batch, async) gets at once, at most: what waits for it."""
    tries: Positive = 3
    """Of a rollout whose reward raises, hangs or takes its process along. Fewer where one after the other hangs: then
    one at a time is tried, and the others are given up until one comes back."""
    max_dead_share: Fraction = 0.5
    """Stops with exit 6 when more than this share of the last 200 rollouts has no reward, whatever they died of:
    environment, policy or reward."""


@dataclass(frozen=True, kw_only=True)
class BufferSection(WorkerSection):
    zero_variance: Literal["keep", "replace"] = "keep"
    """Groups whose rewards are all equal carry no gradient: keep them in the batch, or filter and refill."""
    max_refill: Positive = 1000
    """With `replace`: this many groups without a full batch end the run with the reason no_signal."""
    min_siblings: Positive = 2
    """Scored siblings that a group needs to be batched (never more than group_size)."""
    group_deadline_s: AboveZero | None = None
    """Closes a group so long after its first record on `verified`."""
    max_body_bytes: Positive = 256 * 1024 * 1024
    """Bodies of open groups held in memory; the rest is read again from the log."""


@dataclass(frozen=True, kw_only=True)
class TrainerSection(WorkerSection):
    algorithm: str = "grpo"
    backend: str = "torch"
    device: str = "cpu"
    lr: NotNegative = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = 0
    min_lr_share: Fraction = 0.0
    """Of lr, where linear and cosine end."""
    weight_decay: NotNegative = 0.0
    adam_betas: tuple[Decay, Decay] = (0.9, 0.95)
    adam_eps: AboveZero = 1e-8
    max_grad_norm: NotNegative = 1.0
    """0: no clipping."""
    minibatches: Positive = 1
    updates_per_batch: Positive = 1
    tokens_per_microbatch: Positive = 16384
    """Tokens that go through the model at once, forward and backward; a longer row goes alone. Memory depends on it,
    results do not. Where rows are not packed, padding counts."""
    reference_every: Positive | None = None
    """The reference of a divergence (`kl_coef`) or of DPO becomes the policy of each version that is a multiple of
    this, before it is trained on. Unset: it is version 0 for the whole run."""
    shares: Positive = 1
    """Of `batches`, fixed for a run. The trainer reads them all, and trains the same whatever their number."""
    checkpoint_every: Positive = 20
    """Versions."""
    keep_checkpoints: Annotated[int, Meta(ge=2)] = 2
    """The newest so many."""
    keep_every: Positive | None = None
    """Beside them each one whose version is a multiple of this; itself a multiple of `checkpoint_every`."""
    keep_best: str | None = None
    """Name of an evaluation: beside them the best one by its mean, of those versions that have a checkpoint. Let its
    `every` be a multiple of `checkpoint_every`."""
    publish_every: Positive = 1
    """At most max_staleness + 1."""
    peak_tflops: AboveZero | None = None
    """What the device can do at most, in 10^12 operations a second, for the metric `mfu`, the share of it that the
    model's own products make use of. Default: of the usual GPUs what their data sheets say; of others there is no such
    metric."""
    max_skips_in_a_row: Positive = 3
    """NaN batches; then the run stops with exit 6."""
    max_steps_without_signal: Count = 100
    """Stops with exit 6 after so many steps in a row in which no group had a spread of rewards (`reinforce_plus_plus`
    and `ppo`: the batch), and again after as many more if the run was resumed. Steps of algorithms that learn without
    a spread (`sft`, `dpo`, `opd`, `topr`, `asymre`) do not count. 0: never."""
    warn_mismatch: NotNegative = 0.05
    """Warns, with the likely cause, when `mismatch_k3` of a step is above this: sampler and trainer then disagree about
    the tokens' probabilities by more than some staleness explains. 0: never."""


@dataclass(frozen=True, kw_only=True)
class StageSection:
    """A run in several parts, one after the other, with one lineage of versions: an SFT warm-up, then GRPO, then DPO. A
    stage without rollouts (`sft`, `dpo`) takes `experts.per_batch` demonstrations or pairs a batch, and nothing is
    sampled for it. Masters and optimizer go on from one stage to the next. Stages say how long the run is; `run.steps`
    is left out."""

    steps: Positive
    """Batches, of which each makes a version."""
    name: RunName | None = None
    """In what is shown; default: its algorithm's."""
    algorithm: str | dict[str, Any] | None = None
    """A name, or a name with differences from the settings in [algorithms.NAME], `{ name = "sft", normalise =
    "sequence" }`; default: `trainer.algorithm`. Tasksets with an algorithm of their own keep it."""
    lr: NotNegative | None = None
    """Default: `trainer.lr`."""
    lr_schedule: Literal["constant", "linear", "cosine"] | None = None
    """From the stage's first step to its last. Default: `trainer.lr_schedule`, likewise."""
    warmup_steps: Count | None = None
    """From its first step on. Default: `trainer.warmup_steps`, likewise."""
    min_lr_share: Fraction | None = None
    """Default: `trainer.min_lr_share`."""
    minibatches: Positive | None = None
    """Default: `trainer.minibatches`."""
    updates_per_batch: Positive | None = None
    """Default: `trainer.updates_per_batch`."""
    reference: Literal["stage", "run"] = "stage"
    """Of a divergence (`kl_coef`) or of DPO: the policy that the stage begins with, or what it was before the stage,
    version 0 if no other stage renewed it. Of the first stage it is version 0 in any case."""
    experts_ratio: Annotated[float, Meta(gt=0)] | None = None
    """Where it takes demonstrations beside rollouts; default: `experts.ratio`."""
    experts_per_batch: Positive | None = None
    """Where it takes them alone; default: `experts.per_batch`."""


@dataclass(frozen=True, kw_only=True)
class EvaluatorSection(WorkerSection):
    count: Annotated[int, Meta(ge=0, le=1)] = 1
    policy: str | None = None
    """Default: the explorers'."""
    device: str = "cpu"
    max_concurrent: Positive = 64


@dataclass(frozen=True, kw_only=True)
class TransportSection:
    kind: str = "embedded"
    partitions: Positive = 64
    servers: str | None = None
    """`kafka`: where brokers listen, `host:port`, several with commas."""
    patience_s: AboveZero = 300.0
    """So long a worker tries again when the log refuses or is gone (a full disk, no broker); then it ends with exit 3,
    and the run with it, to be resumed."""
    session_timeout_s: Annotated[float, Meta(ge=1)] = 10.0
    """An explorer or verifier that gives no sign for so long is declared dead, and its work goes to others. Brokers
    take no less than 6."""
    options: dict[str, Any] = field(default_factory=dict)
    """`kafka`: settings of kafka-python's clients, as they are: security_protocol, sasl_mechanism, sasl_plain_username,
    sasl_plain_password = "env:NAME", ssl_cafile, ...; and replication_factor of the topics."""


@dataclass(frozen=True, kw_only=True)
class WeightsSection:
    store: str = "file://weights"
    """URL of the object store; relative file:// ones lie in the run folder. `{run}` in it becomes the run's id: objects
    are never written twice, so a store elsewhere (`s3://BUCKET/{run}`) needs it, or another prefix for each run. Keys
    never stand in it; they and the endpoint come from the environment (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
    `AWS_ENDPOINT_URL`)."""
    anchor_every: Positive = 20
    """Versions are published as what changed since the one before, without loss and some hundred times smaller; each
    so many there is a full snapshot as well, an anchor, where a worker that comes late begins. 1: snapshots alone."""
    patience_s: AboveZero = 120.0
    """So long a request to a store elsewhere is made again, after longer and longer pauses, when it is refused for now,
    cut off or not answered. Then who needs it ends with exit 3, and the run with it, to be resumed; an explorer asks
    for 5 s, goes on with the weights that it has, and asks again."""
    timeout_s: AboveZero = 30.0
    """A store elsewhere (S3) that is silent for so long in the middle of a request is asked again."""
    keep: Annotated[int, Meta(ge=2)] = 3
    """Newest anchors kept, with the versions since the oldest of them, beside those that something still needs."""


@dataclass(frozen=True, kw_only=True)
class RetentionSection:
    """Deletes from the log what nobody needs to go on with, after each checkpoint. Without this section the log keeps
    everything, and replay, rescore and trace reach back to the beginning."""

    checkpoints: Annotated[int, Meta(ge=2)] = 2
    """Batches are kept from the oldest of the newest so many checkpoints on, so that each of them can be resumed from
    and replayed; tasks and rollouts until their group was trained below it. At most `trainer.keep_checkpoints`."""


@dataclass(frozen=True, kw_only=True)
class TrackersSection:
    """Where curves are shown outside of the run. `run` and `resume` write them; for others there is `plot`."""

    tensorboard: str | None = None
    """Folder for TensorBoard's event files, relative to the run folder; default: none. With the extra `tensorboard`."""
    wandb: str | None = None
    """Project at Weights & Biases, `PROJECT` or `ENTITY/PROJECT`; default: none. With the extra `wandb`. The key comes
    from WANDB_API_KEY; `WANDB_MODE=offline` writes files into the run folder, for `wandb sync`. The run there is the
    same after each resume."""
    mlflow: str | None = None
    """Experiment of MLflow; default: none. With the extra `mlflow`. The store is what MLFLOW_TRACKING_URI says, keys
    come from the environment. The run there is the same after each resume."""


@dataclass(frozen=True, kw_only=True)
class LogSection:
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    run: RunSection
    model: ModelSection
    tasksets: dict[SectionName, TasksetSection] = field(default_factory=dict)
    evaluations: dict[SectionName, EvaluationSection] = field(default_factory=dict)
    experts: ExpertsSection | None = None
    sampling: Sampling = field(default_factory=Sampling)
    feeder: FeederSection = field(default_factory=FeederSection)
    explorer: ExplorerSection = field(default_factory=ExplorerSection)
    verifier: VerifierSection = field(default_factory=VerifierSection)
    buffer: BufferSection = field(default_factory=BufferSection)
    trainer: TrainerSection = field(default_factory=TrainerSection)
    stages: tuple[StageSection, ...] = ()
    evaluator: EvaluatorSection = field(default_factory=EvaluatorSection)
    transport: TransportSection = field(default_factory=TransportSection)
    weights: WeightsSection = field(default_factory=WeightsSection)
    retention: RetentionSection | None = None
    trackers: TrackersSection = field(default_factory=TrackersSection)
    log: LogSection = field(default_factory=LogSection)
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    backends: dict[str, dict[str, Any]] = field(default_factory=dict)
    algorithms: dict[str, dict[str, Any]] = field(default_factory=dict)
    rewards: dict[str, dict[str, Any]] = field(default_factory=dict)
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    base: str = "."
    """Folder of the run file: relative paths and own modules are looked up there. Set by `load`."""

    @property
    def without_tasks(self) -> bool:
        """Whether there is nothing to explore: it learns from demonstrations or pairs alone."""
        return not self.tasksets

    @property
    def experts_alone(self) -> bool:
        """Whether the run is as long as its demonstrations last."""
        return self.without_tasks and not self.stages

    @property
    def steps(self) -> int | None:
        """Batches of the whole run, where the run file says it."""
        return sum(stage.steps for stage in self.stages) if self.stages else self.run.steps

    def part_options(self, kind: str, name: str) -> Mapping[str, Any]:
        """The table `[<kind>s.<name>]`, e.g. ("policy", "hf") -> [policies.hf], with secrets looked up."""
        section = "policies" if kind == "policy" else f"{kind}s"
        tables: dict[str, dict[str, Any]] = getattr(self, section)
        return secrets.reveal(tables.get(name, {}), where=f"{section}.{name}")

    def build_part(self, kind: str, name: str) -> tuple[Any, Any]:
        """A part's class and its Config. ConfigError also where the part says that it cannot be used here."""
        part = _usable(kind, name)
        plural = "policies" if kind == "policy" else f"{kind}s"
        return part, registry.build_config(part, self.part_options(kind, name), where=f"{plural}.{name}")

    def algorithms_named(self) -> dict[str, str | dict[str, Any]]:
        """Where in the run file algorithms are named -> each, as it stands there."""
        own = {f"tasksets.{name}.algorithm": one.algorithm for name, one in self.tasksets.items() if one.algorithm}
        stages = {
            f"stages.{number}.algorithm": one.algorithm for number, one in enumerate(self.stages) if one.algorithm
        }
        return {"trainer.algorithm": self.trainer.algorithm, **own, **stages}

    def build_algorithm(self, where: str) -> tuple[Any, Any]:
        """As `build_part`, of the algorithm that is named there."""
        named = self.algorithms_named()[where]
        if isinstance(named, str):
            return self.build_part("algorithm", named)
        name = name_of_algorithm(named, where)
        part, differences = _usable("algorithm", name), {key: named[key] for key in named if key != "name"}
        return part, registry.build_config(part, {**self.part_options("algorithm", name), **differences}, where=where)


def name_of_algorithm(named: str | Mapping[str, Any], where: str) -> str:
    """Without its settings. ConfigError if there is none."""
    name = named if isinstance(named, str) else named.get("name")
    if not isinstance(name, str):
        raise ConfigError(f'{where}: found no name, expected one beside its settings, e.g. {{ name = "grpo", ... }}')
    return name


def _usable(kind: str, name: str) -> Any:
    part = registry.resolve(kind, name, where=kind)
    if (require := getattr(part, "require", None)) is not None:
        require()
    return part
