"""The sections of a run file: every setting with its type, range, default and meaning."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from rftstream.config import secrets
from rftstream.config.parts import registry
from rftstream.config.parts.reward_uses import RewardNamed
from rftstream.config.ranges import AboveZero, Count, NotNegative, Positive, RunName, SectionName
from rftstream.config.role_sections import (
    BufferSection,
    EvaluatorSection,
    ExplorerSection,
    FeedbackSection,
    FeederSection,
    LogSection,
    StageSection,
    SynthesiserSection,
    TrackersSection,
    TrainerSection,
    VerifierSection,
)
from rftstream.contracts.tasks import Sampling
from rftstream.errors import ConfigError

RewardSign = Literal["canary", "checks", "dominance", "falling", "held_out", "kl", "judge", "length", "unscored"]
"""Kinds of signs of a hacked reward (`algorithms/reward_signs.py`)."""


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """This section sets the run's name, its end, and the place of its folder."""

    name: RunName
    """Lower case letters, digits, - and _; names the run folder and the topics."""
    steps: Positive | None = None
    """The run ends after this many batches."""
    hours: AboveZero | None = None
    """The run ends at the first step after this many hours."""
    stop_reward: float | None = None
    """The run ends early when the mean reward of the last `stop_reward_over` steps reaches this."""
    stop_reward_over: Positive = 10
    """Steps that the mean for `stop_reward` is taken over."""
    stop_on: tuple[RewardSign, ...] = ()
    """The run ends with exit code 6 when one of these signs of a hacked reward appears, as `status` tells them; by
    default never. It begins to look after 20 steps. canary: an evaluation with each other's answers is rewarded;
    checks: a second opinion (`use = "check"`) is far from the reward; dominance: one part of the reward rose, the
    others fell; falling: a part fell, the reward rose; held_out: the reward rose, no evaluation did; judge: a judge
    contradicts itself when the order of two answers changes; kl: the policy leaves version 0 ever faster, for no more
    reward; length: completions became twice or half as long, no evaluation rose; unscored: ever more rollouts have no
    reward."""
    seed: Count = 0
    """Seed of the order of problems, of each rollout, and of the weights of a made model. Fixed for a run."""
    folder: str = "runs"
    """Folder in which run folders are made."""
    resume: Literal["never", "auto"] | Count = "never"
    """Behaviour of `run` if the run exists already. never: refuses a run that has not ended; beside one that has ended,
    begins a new run. auto: resumes a run that has not ended, and leaves a complete run as it is. A number: resumes from
    the checkpoint of this version; later versions are no longer in force, and their recorded batches are trained
    again."""
    imported_from: str | None = None
    """Run folder that the rollouts of this run were copied from, without a staleness check; `rftstream rescore` and
    `rftstream replay --into` set it."""
    imported_versions: tuple[Count, Count] | None = None
    """Versions of that run whose batches are trained here, under other settings, by `rftstream replay --into`."""


@dataclass(frozen=True, kw_only=True)
class MakeModel:
    """A small new model with one token per character: to learn from nothing, in seconds."""

    family: str = "llama"
    """Kind of model, by transformers' name (`qwen3_moe`, `lfm2`, `gemma3_text`): its own layers, at these sizes."""
    characters: str = "0123456789+-*/= "
    """Characters of the vocabulary, beside padding, end and unknown."""
    words: tuple[str, ...] = ()
    """Longer texts with a token of their own, as tokenizers have for the marks of tool calls."""
    layers: Positive = 2
    """Layers of the transformer; of other families than llama: of each kind of layer."""
    width: Positive = 64
    """Width of a layer: a multiple of heads, with an even number for each head."""
    heads: Positive = 4
    """Heads of attention."""
    context: Positive = 64
    """Longest prompt + completion in tokens."""
    vision: bool = False
    """Whether the model takes images, by a small vision tower in front: 32 x 32 pixels and 16 tokens each."""


@dataclass(frozen=True, kw_only=True)
class LoraSection:
    """Low-rank matrices beside the model's linear layers are trained, published and saved, while the model itself stays
    unchanged. `final/` is the model with them merged, and `final/adapter` has them alone, for PEFT; so does `rftstream
    weights export RUN --adapter` of any version. The choice of layers is fixed for a run. The trainer needs the extra
    `lora`. Usual learning rates are ten times those of a whole model."""

    rank: Positive = 16
    """Columns of the matrices. A higher rank can learn more, and makes versions larger."""
    alpha: AboveZero = 32.0
    """The matrices are scaled by alpha / rank."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that get matrices, by the last parts of their names, e.g. `["q_proj", "v_proj"]`; all-linear: every
    one except the head."""


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """This section says which model is trained: a folder or a name (`path`), a small new one (`make`), or the weights
    of another run (`init_from`)."""

    path: str | None = None
    """A Hugging Face model folder, relative to the run file, or a name on the hub."""
    make: MakeModel | None = None
    init_from: str | None = None
    """`RUN@version`: begins with the weights of another run, given as run folder or run file; without a version,
    with its newest. Tokenizer and template come along. The weights are those that engines got, rounded to the run's
    dtype."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type that engines compute in and that is published; the trainer's masters are float32."""
    chat_template: str | None = None
    """Path of a Jinja template, or its text; default: the model's own. `final/` gets this template."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments for the chat template beside messages and tools, e.g. `{ enable_thinking = false }`."""
    context: Positive | None = None
    """Longest prompt + completion in tokens. Default: the value in the model's config."""
    quantize: Literal["nf4"] | None = None
    """nf4: the trainer holds the linear layers in four bits, beside the adapters of [model.lora] (QLoRA): a seventh of
    the memory of their float32 weights. The run begins with a copy of the model that is rounded to four bits, so that
    samplers compute with the trainer's numbers. Needs the backend torch and the extra `quantize`."""
    lora: LoraSection | None = None


@dataclass(frozen=True, kw_only=True)
class TasksetSection:
    """A source of problems, with the reward that scores their completions. A run may mix several tasksets."""

    source: str
    """`jsonl:PATH`, `csv:PATH`, `parquet:PATH`, `hf:FOLDER-OR-NAME`, `reasoning_gym:NAME`, `arithmetic`, `squares`, or
    `module:Class`; or `log:problems`, whose problems join during the run."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our name (prompt, messages, answer, system, tools, data_source, images) -> the name of the source's column, or
    the path of a field in it."""
    reward: RewardNamed = "exact"
    """Reward that scores completions: a name, a name with differences from the settings in [rewards.NAME], or a list of
    these, `[{ name = "well_formed", use = "gate" }, { name = "math" }, { name = "length_penalty", weight = 0.2 }]`."""
    algorithm: str | dict[str, Any] | None = None
    """Algorithm for the groups of this taskset, instead of `trainer.algorithm`: a name, or a name with differences from
    the settings in [algorithms.NAME], `{ name = "grpo", clip_high = 0.28 }`. The loss of each algorithm counts by its
    share of the batch."""
    weight: NotNegative = 1.0
    """Share of the groups, relative to the other tasksets."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Differences from [sampling]."""
    environment: str | dict[str, Any] = "single_turn"
    """A built-in name or `module:Class`; or a name with differences from the settings in [environments.NAME],
    `{ name = "hosted_agent", target = "my_agents:solve" }`."""
    system: str | None = None
    """System prompt that is put before the messages."""
    shuffle: bool = True
    """Shuffle each pass in an order derived from the run's seed. `log:problems` keeps its own order."""
    passes: Positive | None = None
    """Passes through the taskset; default: as many as the run needs."""
    too_long: Literal["error", "skip", "truncate"] = "error"
    """Prompts that leave no room for a completion in the context: refuse at check, leave out, or cut from the left."""
    chat_template: str | None = None
    """Chat template for this taskset alone, instead of the model's."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Differences from the model's `chat_template_kwargs`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the source."""
    pipeline: tuple[dict[str, Any], ...] = ()
    """Operators for this taskset, which come after those for all tasksets in `[[pipeline]]`. Each
    `[[tasksets.NAME.pipeline]]` has a name, `op`, and the operator's settings."""


@dataclass(frozen=True, kw_only=True)
class DemonstrationsSection:
    """Demonstrations or preference pairs, for algorithms that take them: `mix` and `chord` beside rollouts; `sft`,
    `dpo` and `reward_model` alone."""

    source: str | tuple[str, ...] | None = None
    """`jsonl:PATH`, `parquet:PATH`, `hf:FOLDER-OR-NAME`, `run:RUN` (rollouts of another run), or the path alone; or
    several of them, such as chats for one stage and pairs for another. The source is loaded when the run is made;
    `resume` loads new rows of it. `rftstream experts load` can add more at any time."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our name (messages, prompt, completion, chosen, rejected, system, tools, chat_template_kwargs, weight) -> the
    name of the source's column, or the path of a field in it."""
    system: str | None = None
    """System prompt that is put before the messages."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the source. Of `run:`, the conditions of `rftstream export`, such as `{ reward_from = 0.9, best = 1
    }`, and `form = "pairs"`."""
    ratio: Annotated[float, Meta(gt=0)] = 0.2
    """Demonstrations in each batch, beside its rollouts: this share of `groups_per_batch` times `group_size`, rounded
    up. 0.2: MIX."""
    per_batch: Positive = 16
    """Demonstrations or pairs in each batch of a run without tasksets, or of a stage without rollouts."""
    passes: Positive | None = None
    """How often each one is taken. Default: once in a run that has neither tasksets nor `run.steps`; otherwise, and in
    runs with stages, as often as the run needs."""
    shuffle: bool = True
    """Shuffle each pass in an order derived from the run's seed."""
    held_out: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share that is never trained on, evenly spread over the source. The loss on it is the metric `held_out_loss`."""
    held_out_every: Positive = 20
    """Versions between two evaluations of the held-out share. There is always one after the last step."""
    held_out_most: Positive = 256
    """Most held-out demonstrations that are evaluated."""
    too_long: Literal["error", "skip"] = "error"
    """If a demonstration is longer than the context: refuse to load any of them, or leave it out."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources as a tuple, however many there are."""
        return (self.source,) if isinstance(self.source, str) else self.source or ()


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """Problems that versions are evaluated on during the run. Their samples are not trained on. The problems are held
    out if no taskset has the same ones, which `check` verifies; only then do they show overfitting."""

    source: str
    """Source of the problems, written as in a taskset."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns that the fields of a problem are read from, as in a taskset."""
    reward: RewardNamed = "exact"
    """Reward that scores completions, written as in a taskset."""
    every: Positive = 50
    """Versions between two evaluations; version 0 and the final one are always evaluated."""
    num_tasks: Positive | None = None
    """Number of problems that are evaluated, from the first on; default: all."""
    n: Positive = 1
    """Samples per problem."""
    k: tuple[Positive, ...] = (1,)
    """pass@k, best@k and worst@k for these, each at most n."""
    pass_reward: float = 1.0
    """A sample passes, as pass@k counts it, with at least this reward."""
    canary: bool = False
    """Each problem gets the reference answer of another one, so that a policy earns no reward by learning the task. If
    it does earn reward, `status` and an alert say that the reward is given for something else than the answer."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Differences from [sampling]."""
    environment: str | dict[str, Any] = "single_turn"
    """Environment of the rollouts, written as in a taskset."""
    system: str | None = None
    """System prompt that is put before the messages."""
    chat_template: str | None = None
    """Chat template for this evaluation alone, instead of the model's."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Differences from the model's `chat_template_kwargs`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the source."""


@dataclass(frozen=True, kw_only=True)
class TransportSection:
    """This section says what carries the log: one file (`embedded`), Kafka, or the memory of a process."""

    kind: str = "embedded"
    """A built-in name or `module:Class`."""
    partitions: Positive = 64
    """Partitions of each topic that rollouts travel on. At most this many workers of a role can share a topic. Fixed
    for a run."""
    servers: str | None = None
    """`kafka`: where brokers listen, `host:port`, several with commas."""
    patience_s: AboveZero = 300.0
    """Seconds that a worker retries while the log refuses or cannot be reached (a full disk, no broker). Then the
    worker exits with code 3, and the run ends and can be resumed."""
    session_timeout_s: Annotated[float, Meta(ge=1)] = 10.0
    """Seconds without a heartbeat after which an explorer or verifier counts as dead, and its work goes to others: its
    process was killed or stopped, or cannot reach the log. A busy process sends heartbeats, however long its work
    takes. Brokers accept 6 to 1,800, or up to their `group.max.session.timeout.ms`."""
    options: dict[str, Any] = field(default_factory=dict)
    """`kafka`: settings of kafka-python's clients, under their own names: security_protocol, sasl_mechanism,
    sasl_plain_username, sasl_plain_password = "env:NAME", ssl_cafile, ...; and replication_factor of the topics.
    `{role}` in a value becomes the worker's role, or `operator` in commands."""


@dataclass(frozen=True, kw_only=True)
class WeightsSection:
    """This section sets where versions are stored, how they are published, and how many are kept."""

    store: str = "file://weights"
    """URL of the object store; relative file:// ones lie in the run folder. `{run}` in it becomes the run's id: objects
    are never written twice, so a store elsewhere (`s3://BUCKET/{run}`) needs it, or another prefix for each run. It
    never contains keys; keys and the endpoint come from the environment (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
    `AWS_ENDPOINT_URL`)."""
    anchor_every: Positive = 20
    """Versions between two full snapshots (anchors). A worker that starts late begins at an anchor. Each version is
    published as its changes since the one before, lossless and some hundred times smaller. 1: snapshots alone."""
    patience_s: AboveZero = 120.0
    """Seconds that a request to a remote store is retried, with longer and longer pauses, while the store is busy, cut
    off or silent. Then the process exits with code 3, and the run ends and can be resumed. An explorer retries for 5 s,
    continues with the weights that it has, and asks again later."""
    timeout_s: AboveZero = 30.0
    """Seconds of silence in the middle of a request after which a remote store (S3) is asked again."""
    keep: Annotated[int, Meta(ge=2)] = 3
    """Newest anchors kept, with all versions since the oldest of them. Other versions in use are kept, too."""


@dataclass(frozen=True, kw_only=True)
class RetentionSection:
    """Deletes records that no resume needs from the log, after each checkpoint. Without this section the log keeps
    everything, and replay, rescore and trace can go back to the beginning."""

    checkpoints: Annotated[int, Meta(ge=2)] = 2
    """Number of newest checkpoints that can be resumed from and replayed. Batches are kept from the oldest of these on;
    tasks and rollouts are kept until their group was trained before it. At most `trainer.keep_checkpoints`."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run file, resolved and checked. `rftstream.config.loader.load` makes it; every process of the run gets
    the same config."""

    run: RunSection
    model: ModelSection
    tasksets: dict[SectionName, TasksetSection] = field(default_factory=dict)
    evaluations: dict[SectionName, EvaluationSection] = field(default_factory=dict)
    experts: DemonstrationsSection | None = None
    sampling: Sampling = field(default_factory=Sampling)
    feeder: FeederSection = field(default_factory=FeederSection)
    explorer: ExplorerSection = field(default_factory=ExplorerSection)
    verifier: VerifierSection = field(default_factory=VerifierSection)
    buffer: BufferSection = field(default_factory=BufferSection)
    feedback: FeedbackSection | None = None
    trainer: TrainerSection = field(default_factory=TrainerSection)
    stages: tuple[StageSection, ...] = ()
    evaluator: EvaluatorSection = field(default_factory=EvaluatorSection)
    synthesiser: SynthesiserSection | None = None
    transport: TransportSection = field(default_factory=TransportSection)
    weights: WeightsSection = field(default_factory=WeightsSection)
    retention: RetentionSection | None = None
    trackers: TrackersSection = field(default_factory=TrackersSection)
    log: LogSection = field(default_factory=LogSection)
    pipeline: tuple[dict[str, Any], ...] = ()
    """Operators for all tasksets, in order: each `[[pipeline]]` has a name, `op`, and the operator's settings."""
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    backends: dict[str, dict[str, Any]] = field(default_factory=dict)
    algorithms: dict[str, dict[str, Any]] = field(default_factory=dict)
    rewards: dict[str, dict[str, Any]] = field(default_factory=dict)
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    base: str = "."
    """Folder of the run file. Relative paths and the user's own modules are looked up there. Set by `load`."""

    @property
    def without_tasks(self) -> bool:
        """Whether the run has no tasks: it learns from demonstrations or pairs alone."""
        return not self.tasksets

    @property
    def demonstrations_alone(self) -> bool:
        """Whether the run lasts as long as its demonstrations."""
        return self.without_tasks and not self.stages

    @property
    def steps(self) -> int | None:
        """Batches of the whole run, if the run file says it."""
        return sum(stage.steps for stage in self.stages) if self.stages else self.run.steps

    def part_options(self, kind: str, name: str) -> Mapping[str, Any]:
        """Return the table `[<kind>s.<name>]`, e.g. ("policy", "hf") -> [policies.hf], with secrets looked up."""
        section = "policies" if kind == "policy" else f"{kind}s"
        tables: dict[str, dict[str, Any]] = getattr(self, section)
        return secrets.reveal(tables.get(name, {}), where=f"{section}.{name}")

    def build_part(self, kind: str, name: str) -> tuple[Any, Any]:
        """Return a part's class and its Config. ConfigError also if the part reports that it cannot be used here."""
        part = _usable(kind, name)
        plural = "policies" if kind == "policy" else f"{kind}s"
        return part, registry.build_config(part, self.part_options(kind, name), where=f"{plural}.{name}")

    @property
    def shared_system(self) -> str | None:
        """Return the system prompt of all tasksets; None if they have none, or different ones."""
        found = {one.system for one in self.tasksets.values()}
        return found.pop() if len(found) == 1 else None

    def algorithms_named(self) -> dict[str, str | dict[str, Any]]:
        """Return each place in the run file that names an algorithm, with the value there."""
        own = {f"tasksets.{name}.algorithm": one.algorithm for name, one in self.tasksets.items() if one.algorithm}
        stages = {
            f"stages.{number}.algorithm": stage.algorithm for number, stage in enumerate(self.stages) if stage.algorithm
        }
        return {"trainer.algorithm": self.trainer.algorithm, **own, **stages}

    def build_algorithm(self, where: str) -> tuple[Any, Any]:
        """Return class and Config, as `build_part` does, of the algorithm named at `where`."""
        return self._build_named("algorithm", self.algorithms_named()[where], where)

    def environments_named(self) -> dict[str, str | dict[str, Any]]:
        """Return each place in the run file that has an environment, with the value there."""
        tasksets = {f"tasksets.{name}.environment": one.environment for name, one in self.tasksets.items()}
        evaluations = {f"evaluations.{name}.environment": one.environment for name, one in self.evaluations.items()}
        return {**tasksets, **evaluations}

    def build_environment(self, where: str, name: str = "") -> tuple[Any, Any]:
        """Return class and Config, as `build_part` does, of the environment named at `where`. For a task of another
        environment, `name`, or an unknown `where`, the settings are those of [environments.NAME] alone."""
        named = self.environments_named().get(where, name)
        if name and name != name_of_part(named, where):
            named = name
        return self._build_named("environment", named, where)

    def _build_named(self, kind: str, named: str | Mapping[str, Any], where: str) -> tuple[Any, Any]:
        if isinstance(named, str):
            return self.build_part(kind, named)
        name = name_of_part(named, where)
        part, differences = _usable(kind, name), {key: named[key] for key in named if key != "name"}
        options = {**self.part_options(kind, name), **secrets.reveal(differences, where=where)}
        try:
            return part, registry.build_config(part, options, where=f"{kind}s.{name}")
        except ConfigError as error:
            raise ConfigError(self.as_written(str(error), kind, named, where)) from None

    def as_written(self, error: str, kind: str, named: str | Mapping[str, Any], where: str) -> str:
        """Return an error about settings with the place where the user wrote them: [environments.NAME], or the table
        `named` at `where`."""
        if isinstance(named, str):
            return error
        name = name_of_part(named, where)
        usual: Mapping[str, Any] = getattr(self, f"{kind}s").get(name, {})
        section = rf"{kind}s(\.{re.escape(name)}(?=[.:])|(?=:))"
        place = re.match(rf"{section}((\.|: )(?P<key>[\w-]+)(?=[.:]))?", error)
        if place is None or (place["key"] in usual and place["key"] not in named):
            return error
        return f"{where}{'.' if place['key'] else ''}{place['key'] or ''}{error[place.end() :]}"


def name_of_part(named: str | Mapping[str, Any], where: str) -> str:
    """Return the name of a part, without its settings. ConfigError if there is none."""
    name = named if isinstance(named, str) else named.get("name")
    if not isinstance(name, str):
        raise ConfigError(f'{where}: found no name, expected one beside its settings, {{ name = "NAME", ... }}')
    return name


def _usable(kind: str, name: str) -> Any:
    part = registry.resolve(kind, name, where=kind)
    if (require := getattr(part, "require", None)) is not None:
        require()
    return part
