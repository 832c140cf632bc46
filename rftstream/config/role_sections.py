"""The sections of a run file that belong to one role each, and those of stages, which vary the trainer's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from rftstream.config.ranges import AboveZero, Count, Decay, Fraction, NotNegative, Positive, RunName


@dataclass(frozen=True, kw_only=True)
class FeederSection:
    """The feeder admits groups of rollouts and bounds how far the explorers may be ahead of the trainer."""

    groups_per_batch: Positive = 8
    """Problems in a batch; each batch makes one version."""
    group_size: Positive = 8
    """Rollouts of each problem."""
    max_staleness: Count = 2
    """Versions that may lie between what sampled a token and what is trained on it. 0: strictly in turn."""
    on_stale: Literal["wait", "drop"] = "wait"
    """`wait`: batches take groups in the order in which they were admitted, and wait for the next. `drop`: as they
    become ready; what is then too old expires."""


@dataclass(frozen=True, kw_only=True)
class WorkerSection:
    """Settings that every role has."""

    threads: Positive = 1
    """CPU threads for array work, of each process."""


@dataclass(frozen=True, kw_only=True)
class ExplorerSection(WorkerSection):
    """Explorers sample rollouts with the newest weights."""

    count: Count = 1
    """Processes that `run` starts; more can be started by hand at any time."""
    policy: str = "hf"
    """A built-in name or `module:Class`."""
    devices: tuple[str, ...] = ("cpu",)
    """Given to the processes in turn."""
    max_concurrent: Positive = 64
    """Rollouts in flight in one process."""
    partial_every_s: NotNegative = 30.0
    """Seconds between two savings of unfinished rollouts. A process that takes over from one that died goes on from the
    saved pieces, and at most this many seconds of sampling are lost. Each piece holds only what is new, some 10 bytes a
    token and 1 KB; short rollouts are mostly finished before they are saved. 0: only when a process is told to
    leave."""
    yield_after_tokens: Count = 0
    """Tokens after which a rollout is saved and makes room for rollouts that wait; it goes on when they have had their
    turn. The process then takes twice `max_concurrent` tasks and samples as many at once as before, or as many as the
    policy samples at once if that is less. 0: rollouts are finished in one go."""
    repetition_tokens: Count = 0
    """A rollout is cut short, as `truncated`, if this many tokens at its end repeat one pattern over and over. 0:
    never."""
    repetition_period: Positive = 64
    """Longest pattern, in tokens; it has to be there at least twice."""
    gateway_address: str = "127.0.0.1:0"
    """`HOST:PORT` of the endpoint for agents, if a taskset has some; port 0: any free one. Agents that run elsewhere
    need a fixed one, at which they find the process that takes over, too. With several explorers, `run` gives the first
    one this port, the second one the next port, and so on."""
    gateway_url: str = ""
    """The URL up to `/v1` under which agents elsewhere reach it; `{port}` in it stands for the explorer's port. Empty:
    made from the address."""
    gateway_max_body_bytes: Positive = 4 * 1024 * 1024
    """Largest request of an agent; larger ones are refused with 413."""
    max_calls: Positive = 1000
    """Model calls of one rollout of an agent."""
    max_calls_at_once: Positive = 16
    """Model calls of one rollout at the same time; more are refused with 429."""
    idle_timeout_s: AboveZero = 600.0
    """Seconds after which a rollout whose agent makes no call ends, as `truncated`."""
    reply_timeout_s: AboveZero = 60.0
    """Time limit of one call of an environment, as its answer to a turn. A rollout whose environment exceeds it ends as
    `truncated` with what it has. It holds in evaluations, too."""
    rollout_timeout_s: NotNegative = 0.0
    """Time limit of a whole rollout from its start, also where another process goes on with it; it then ends as
    `truncated` with what it has. It holds in evaluations, too. 0: none."""


@dataclass(frozen=True, kw_only=True)
class VerifierSection(WorkerSection):
    """Verifiers score rollouts in child processes, so that a reward may hang or crash."""

    count: Count = 1
    """Processes that `run` starts; more can be started by hand at any time."""
    max_concurrent: Positive = 256
    """Rollouts in hand in one process."""
    processes: Positive = 1
    """Children that compute rewards, of each verifier."""
    timeout_s: AboveZero = 10.0
    """Time limit of one call of a reward. Time in which it waits for a processor because of others does not count, so
    a busy machine makes no answer wrong. A call for several rollouts that takes longer is made again for each
    alone. The time that programs run in a sandbox has limits of its own and does not count."""
    max_batch: Positive = 64
    """Rollouts that a reward over lists (TRL's, verl's batch, async) gets at once, at most: what waits for it."""
    tries: Positive = 3
    """How often a rollout is tried whose reward raises, hangs or takes its process along. There are fewer tries where
    one after the other hangs: then one at a time is tried, and the others are given up until one comes back."""
    max_dead_share: Fraction = 0.5
    """Stops with exit 6 when more than this share of the last 200 rollouts has no reward, whatever they died of:
    environment, policy or reward."""


@dataclass(frozen=True, kw_only=True)
class BufferSection(WorkerSection):
    """The buffer decides about each group and makes batches of those that are complete."""

    zero_variance: Literal["keep", "replace"] = "keep"
    """Groups whose rewards are all equal carry no gradient: keep them in the batch, or filter and refill."""
    max_refill: Positive = 1000
    """With `replace`: this many groups without a full batch end the run with the reason no_signal."""
    min_siblings: Positive = 2
    """Scored siblings that a group needs to be batched (never more than group_size)."""
    group_deadline_s: AboveZero | None = None
    """Seconds after its first record on `verified` at which a group is closed."""
    max_body_bytes: Positive = 256 * 1024 * 1024
    """Bodies of open groups held in memory; the rest is read again from the log."""


@dataclass(frozen=True, kw_only=True)
class FeedbackSection:
    """This section says which rollouts people are asked about, and how their answers change rewards. Without the
    section nobody is asked, and feedback changes no batch."""

    ask: Literal["label", "rating"] = "label"
    """Kind of answer that is asked for, and that changes the rollout's reward. Answers of the other kind are judged,
    too, but change nothing, since the two kinds have no common scale."""
    unscorable: bool = False
    """Asks about finished rollouts whose reward could not be computed."""
    disagreement: AboveZero | None = None
    """Asks about rollouts whose reward has parts that are at least so far apart."""
    share: Fraction = 0.0
    """Asks about this share of the rollouts, chosen by the run's seed."""
    pairs: Fraction = 0.0
    """Asks of this share of the groups which of two siblings is better, chosen by the run's seed."""
    quorum: Positive = 1
    """Distinct annotators whose votes it takes. A corrected answer takes one."""
    expires_s: AboveZero | None = None
    """Seconds after which answers to a question change nothing, by the log's time; default: never."""
    hold_s: NotNegative = 0.0
    """Seconds that a group with questions is kept out of batches, unless all are judged earlier. Later groups wait for
    it where `feeder.on_stale` is wait. 0: answers change the reward only if they come before the batch by
    themselves."""
    weight: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the judged reward in the new reward; the rest is the scorer's. If the scorer gave a rollout no reward,
    the judged reward counts alone."""
    scale: tuple[float, float] = (1.0, 5.0)
    """The lowest and the highest rating. They become rewards of 0 and 1."""
    gold: Fraction = 0.1
    """Share of what the studio asks each annotator that are gold questions, chosen by the run's seed, as long as there
    are some that they have not answered. `rftstream feedback gold` adds them."""

    def problem(self, group_size: int) -> str | None:
        """Return what is wrong with the settings in a run with groups of this size, or None."""
        low, high = self.scale
        if not low < high:
            return f"feedback.scale: got [{low}, {high}], expected the lowest rating and then a higher one"
        if self.pairs and group_size == 1:
            return "feedback.pairs: groups of size 1 have no pairs; expected feeder.group_size of at least 2"
        return None


@dataclass(frozen=True, kw_only=True)
class TrainerSection(WorkerSection):
    """The trainer takes an optimizer step for each batch, publishes versions and keeps checkpoints."""

    algorithm: str = "grpo"
    """A built-in name or `module:Class`."""
    backend: str = "torch"
    """A built-in name or `module:Class`."""
    device: str = "cpu"
    """`cpu`, `cuda:0`, ..."""
    colocate: bool = False
    """Explorers and the evaluator whose device is the trainer's use it in turns with the trainer, on one machine: their
    engines have its memory until a batch is complete, then they sleep in the middle of rollouts, the trainer trains and
    moves its state to main memory, and they go on. With the policies hf and vllm, and the
    backend torch, or deepspeed in one process."""
    lr: NotNegative = 1e-6
    """Learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """From lr, after the warm-up, to `min_lr_share` of it at `run.steps`; without `run.steps` each is constant."""
    warmup_steps: Count = 0
    """Versions over which the learning rate rises from 0 to lr."""
    min_lr_share: Fraction = 0.0
    """Share of lr where linear and cosine end."""
    weight_decay: NotNegative = 0.0
    """AdamW's; of matrices, not of norms and biases."""
    adam_betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's."""
    adam_eps: AboveZero = 1e-8
    """AdamW's."""
    max_grad_norm: NotNegative = 1.0
    """Norm to which gradients are clipped; 0: no clipping."""
    minibatches: Positive = 1
    """Optimizer steps in one pass over a batch; each has as much of every kind and taskset."""
    updates_per_batch: Positive = 1
    """Passes over a batch."""
    tokens_per_microbatch: Positive = 16384
    """Tokens that go through the model at once, forward and backward; a longer row goes alone. Memory depends on it,
    results do not. Where rows are not packed, padding counts."""
    reference_every: Positive | None = None
    """The reference of a divergence (`kl_coef`) or of DPO becomes the policy of each version that is a multiple of
    this, before it is trained on. Unset: it is version 0 for the whole run."""
    shares: Positive = 1
    """Partitions of `batches`, fixed for a run. The trainer reads them all, and trains the same whatever their
    number."""
    checkpoint_every: Positive = 20
    """Versions between two checkpoints."""
    keep_checkpoints: Annotated[int, Meta(ge=2)] = 2
    """Number of newest checkpoints that are kept."""
    keep_every: Positive | None = None
    """Beside them each one whose version is a multiple of this; itself a multiple of `checkpoint_every`."""
    keep_best: str | None = None
    """Name of an evaluation: beside them the best one by its mean, of those versions that have a checkpoint. Let its
    `every` be a multiple of `checkpoint_every`."""
    publish_every: Positive = 1
    """Versions from one that is published to the next; at most max_staleness + 1."""
    peak_tflops: AboveZero | None = None
    """Peak speed of the device in 10^12 operations a second. The metric `mfu` is the share of it that the model's own
    products use. Default: the data sheet's figure for the usual GPUs; for other devices there is no such metric."""
    max_skips_in_a_row: Positive = 3
    """NaN batches; then the run stops with exit 6."""
    max_steps_without_signal: Count = 100
    """Steps in a row without a spread of rewards in any group (`reinforce_plus_plus` and `ppo`: in the batch) after
    which the run stops with exit 6. A resumed run stops again after as many more. Steps of algorithms that learn
    without a spread (`sft`, `dpo`, `reward_model`, `opd`, `topr`, `asymre`) do not count. 0: never."""
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
    """Name of the stage for people; default: its algorithm's."""
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
    """Policy that a divergence (`kl_coef`) or DPO compares with. stage: the policy that the stage begins with. run: the
    reference of the stage before, which is version 0 if no stage renewed it. The first stage always compares with
    version 0."""
    experts_ratio: Annotated[float, Meta(gt=0)] | None = None
    """Share of demonstrations, for a stage that takes them beside rollouts; default: `experts.ratio`."""
    experts_per_batch: Positive | None = None
    """Number per batch, for a stage that takes demonstrations alone; default: `experts.per_batch`."""


@dataclass(frozen=True, kw_only=True)
class EvaluatorSection(WorkerSection):
    """The evaluator samples and scores the evaluations of each version that is due."""

    count: Annotated[int, Meta(ge=0, le=1)] = 1
    """Number of evaluators that `run` starts: 1, or 0 to start it by hand."""
    policy: str | None = None
    """The policy that evaluates; default: the explorers'."""
    device: str = "cpu"
    """`cpu`, `cuda:0`, ..."""
    max_concurrent: Positive = 64
    """Samples in flight."""
    gateway_address: str = "127.0.0.1:0"
    """`HOST:PORT` of its own endpoint for agents, if an evaluation has some; port 0: any free one. The explorers'
    limits of agents hold here, too."""
    gateway_url: str = ""
    """The URL up to `/v1` under which agents elsewhere reach it, as `explorer.gateway_url`."""


@dataclass(frozen=True, kw_only=True)
class SynthesisServer:
    """The model that a synthesiser asks, where it is a served one: any server with OpenAI's `/chat/completions`."""

    url: str
    """URL of the server's API: `http://127.0.0.1:8000/v1`."""
    model: str
    """Name of the model on the server."""
    api_key: str | None = None
    """`"env:NAME"`: sent as the bearer token; it is looked up in the environment and written nowhere."""
    timeout_s: AboveZero = 120.0
    """Seconds to wait for one answer."""
    tries: Positive = 3
    """Tries of a request that reaches no server, or a busy one. After the last try the request waits, and is sent again
    later."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request, as the server knows them."""


@dataclass(frozen=True, kw_only=True)
class SynthesiserSection(WorkerSection):
    """Synthesisers have a model make new problems of those that the run knows. Each is attempted several times; if the
    reward agrees with its answer it joins a taskset whose source is `log:problems`. Without this section there are
    none."""

    count: Count = 1
    """Processes that `run` starts; more can be started by hand at any time."""
    read: Literal["outcomes", "verified", "tasks", "problems"] = "outcomes"
    """Which records name the problems that new ones are made of. `outcomes`: each group when it is decided; `verified`:
    the first rollout of each group when it is scored; `tasks`: each group when it is admitted, however it goes;
    `problems`: what people and agents add."""
    tasksets: tuple[str, ...] = ()
    """Whose problems; default: of all tasksets but `into`. With `read = "problems"`: of all that grow."""
    into: str | None = None
    """The taskset that the new problems join; default: the only one that grows."""
    make: tuple[Literal["reworded", "varied", "harder"], ...] = ("reworded",)
    """Kinds of problems that the model is asked for. `reworded`: other words, the same answer; `varied`: another
    problem of the kind; `harder`: a harder one. The model gives the answers of the latter two."""
    per_parent: Positive = 1
    """Problems of each kind that are made of one."""
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the problems that are taken, chosen by the run's seed."""
    solved: tuple[Fraction, Fraction] = (0.0, 1.0)
    """Takes only problems of which this share of the attempts reached `pass_reward`, from and to. With `verified` the
    share is that of one attempt, 0 or 1; with `tasks` and `problems` it is not known."""
    most: Positive | None = None
    """Most problems that join, give or take those in the making."""
    ask: Literal["policy", "server"] = "policy"
    """Model that makes the problems and attempts them: the run's policy with its newest weights, or the model of
    [synthesiser.server]."""
    policy: str | None = None
    """The policy, if that is asked; default: the explorers'."""
    device: str = "cpu"
    """Device of the run's policy in this process."""
    server: SynthesisServer | None = None
    """Server of that model."""
    max_concurrent: Positive = 16
    """Problems that one process makes of at once."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Differences from [sampling] when it is asked for a problem. Attempts are sampled as the taskset `into` says."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Kind -> what it is asked instead of the default; {problem} and {answer} are filled in."""
    pattern: str | None = None
    """A regular expression with the groups `(?P<problem>...)` and `(?P<answer>...)` that reads its answer; `.` also
    matches line breaks. Default: the last JSON object that has a `problem`."""
    check_samples: Positive = 4
    """Attempts at a new problem before it joins."""
    check_agree: tuple[Fraction, Fraction] = (0.5, 1.0)
    """Share of the scored attempts that have to reach `pass_reward`, from and to. An upper end below 1 keeps out what
    is solved each time."""
    pass_reward: float = 1.0
    """The least reward of an attempt that has the answer."""
    warn_share: Fraction = 0.8
    """Warns, with the most frequent reason, when more than this share of the last 50 were rejected."""
