"""The sections of a run file that belong to one role each; the stages, which vary settings of the trainer; trackers and
logs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from rftstream.config.ranges import AboveZero, Count, Decay, Fraction, NotNegative, Positive, RunName
from rftstream.contracts.token_values import ALLOWED, EXPERTS

AUTO = "auto"
"""Value of settings that are decided by the machine (config/placement.py)."""


@dataclass(frozen=True, kw_only=True)
class FeederSection:
    """The feeder admits groups of rollouts and limits how far the explorers may be ahead of the trainer."""

    groups_per_batch: Positive = 8
    """Problems in a batch; each batch makes one version."""
    group_size: Positive = 8
    """Rollouts of each problem."""
    max_staleness: Count = 2
    """Most versions between the policy that sampled a token and the version at which the token is trained: how far
    off-policy training may be. 0: strictly in turn."""
    on_stale: Literal["wait", "drop"] = "wait"
    """`wait`: batches take groups in the order of admission, and wait for the next one. `drop`: batches take groups as
    they become ready; groups that are then too old expire."""


@dataclass(frozen=True, kw_only=True)
class WorkerSection:
    """Settings that every role has."""

    threads: Positive = 1
    """CPU threads for array work, of each process."""


@dataclass(frozen=True, kw_only=True)
class ExplorerSection(WorkerSection):
    """Explorers sample rollouts with the newest weights."""

    count: Count | Literal["auto"] = "auto"
    """Processes that `run` starts; more can be started by hand at any time. auto: one for each device."""
    policy: str = "auto"
    """A built-in name or `module:Class`. auto: vllm on GPUs if it is installed, else hf."""
    devices: tuple[str, ...] = ("auto",)
    """Devices of the processes, dealt out in turn; `"cuda:0,1"` is one engine on two GPUs. auto: the GPUs that the
    trainer leaves; if there is only one, explorers and trainer take turns on it; the CPU for a made model."""
    max_concurrent: Positive | Literal["auto"] = 64
    """Rollouts in flight in one process. auto: each process begins with 64, and finds out how many its engine takes."""
    partial_every_s: NotNegative = 30.0
    """Seconds between two saves of unfinished rollouts. A process that takes over from a dead one continues from the
    saved pieces, so at most this many seconds of sampling are lost. Each piece holds only new tokens, about 10 bytes
    a token and 1 KB; short rollouts mostly finish before their first save. 0: save only when a process is told to
    leave."""
    yield_after_tokens: Count = 0
    """Tokens after which a rollout is saved and makes room for waiting rollouts. It continues after their turn. The
    process then takes twice `max_concurrent` tasks and samples as many at once as before, or as many as the policy
    samples at once if that is less. 0: rollouts are finished in one go."""
    repetition_tokens: Count = 0
    """A rollout is cut short, as `truncated`, if this many tokens at its end repeat one pattern over and over. 0:
    never."""
    repetition_period: Positive = 64
    """Longest pattern, in tokens. It counts if it repeats at least twice."""
    gateway_address: str = "127.0.0.1:0"
    """`HOST:PORT` of the endpoint for agents, if a taskset has some; port 0: any free one. Agents that run elsewhere
    need a fixed port, so that they also find the process that takes over. With several explorers, `run` gives the first
    one this port, the second one the next port, and so on."""
    gateway_url: str = ""
    """The URL up to `/v1` that agents elsewhere use for the gateway. `{port}` in it becomes the explorer's port. Empty:
    the URL is made from the address."""
    gateway_max_body_bytes: Positive = 4 * 1024 * 1024
    """Largest request of an agent; larger ones are refused with 413."""
    max_calls: Positive = 1000
    """Model calls of one rollout of an agent."""
    max_calls_at_once: Positive = 16
    """Model calls of one rollout at the same time; more are refused with 429."""
    idle_timeout_s: AboveZero = 600.0
    """Seconds after which a rollout whose agent makes no call ends, as `truncated`."""
    reply_timeout_s: AboveZero = 60.0
    """Time limit of one call of an environment, such as its answer to a turn. A rollout whose environment takes longer
    ends as `truncated`, with the turns that it has. The limit also holds in evaluations."""
    rollout_timeout_s: NotNegative = 0.0
    """Time limit of a whole rollout from its start, also if another process continues it. The rollout then ends as
    `truncated`, with the turns that it has. The limit also holds in evaluations. 0: none."""

    @property
    def processes(self) -> int:
        """The number of processes; 1 until a placement has decided."""
        return 1 if isinstance(self.count, str) else self.count

    @property
    def first_concurrent(self) -> int:
        """The number of rollouts in flight with which a process begins."""
        return 64 if isinstance(self.max_concurrent, str) else self.max_concurrent


@dataclass(frozen=True, kw_only=True)
class VerifierSection(WorkerSection):
    """Verifiers score rollouts in child processes, so that a reward may hang or crash."""

    count: Count = 1
    """Processes that `run` starts; more can be started by hand at any time."""
    max_concurrent: Positive = 256
    """Most unscored rollouts that one process has taken at a time."""
    processes: Positive = 1
    """Child processes of each verifier that compute rewards."""
    timeout_s: AboveZero = 10.0
    """Time limit of one call of a reward. Time spent waiting for a busy processor does not count, so a busy machine
    makes no answer wrong. A call for several rollouts that takes longer is repeated for each rollout alone. Programs in
    a sandbox and answers of served models have their own time limits, and their time does not count."""
    max_batch: Positive = 64
    """Most rollouts that a reward over lists (TRL's, verl's batch, async) gets in one call. The call takes the rollouts
    that wait for it."""
    tries: Positive = 3
    """Tries of a rollout whose reward raises, hangs or kills its process. If one rollout after the other hangs, there
    are fewer tries: one rollout at a time is tried, and the others are given up until one succeeds."""
    group_timeout_s: AboveZero | None = None
    """For rewards that compare siblings: seconds without a further sibling after which those that are there are judged,
    if they are more than half of the group. The others then have no reward. Default: all siblings are waited for."""
    max_waiting_bytes: Positive = 256 * 1024 * 1024
    """Bytes of rollouts that wait for their siblings and are held in memory. The rest is read again from the log."""
    max_dead_share: Fraction = 0.5
    """The run stops with exit 6 if more than this share of the last 200 rollouts has no reward, and of the last 200 and
    `max_concurrent`, whatever the cause: environment, policy or reward."""


@dataclass(frozen=True, kw_only=True)
class BufferSection(WorkerSection):
    """The buffer decides about each group and makes batches of those that are complete."""

    zero_variance: Literal["keep", "replace"] = "keep"
    """Groups whose rewards are all equal carry no gradient: they are kept, or filtered and refilled."""
    max_refill: Positive = 1000
    """With `replace`: the run ends with the reason no_signal after this many filtered groups without a full batch."""
    min_siblings: Positive = 2
    """Scored siblings that a group needs to be batched (never more than group_size)."""
    group_deadline_s: AboveZero | None = None
    """Seconds after its first record on `verified` at which a group is closed."""
    max_body_bytes: Positive = 256 * 1024 * 1024
    """Bytes of the bodies of open groups that are held in memory. The rest is read again from the log."""


@dataclass(frozen=True, kw_only=True)
class FeedbackSection:
    """This section says which rollouts people are asked about, and how their answers change rewards. Without the
    section nobody is asked, and feedback changes no batch."""

    ask: Literal["label", "rating"] = "label"
    """Kind of answer that people are asked for, and that changes the rollout's reward. Answers of the other kind are
    judged, too, but change nothing, since the two kinds have no common scale."""
    unscorable: bool = False
    """Whether people are asked about finished rollouts whose reward could not be computed."""
    disagreement: AboveZero | None = None
    """People are asked about rollouts whose reward has parts that differ by at least this much."""
    share: Fraction = 0.0
    """People are asked about this share of the rollouts, chosen by the run's seed."""
    pairs: Fraction = 0.0
    """For this share of the groups, chosen by the run's seed, people are asked which of two siblings is better."""
    quorum: Positive = 1
    """Distinct annotators whose votes are needed for a judgement. A corrected answer needs one."""
    expires_s: AboveZero | None = None
    """Seconds after which answers to a question change nothing, by the log's time; default: never."""
    hold_s: NotNegative = 0.0
    """Seconds that a group with questions is kept out of batches, unless all its questions are judged earlier. Later
    groups wait for it if `feeder.on_stale` is wait. 0: groups are not held back, and only answers that come before the
    batch change the reward."""
    weight: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the judged reward in the new reward; the rest is the scorer's reward. If the scorer gave none, the
    judged reward counts alone."""
    scale: tuple[float, float] = (1.0, 5.0)
    """The lowest and the highest rating. They become rewards of 0 and 1."""
    gold: Fraction = 0.1
    """Share of gold questions among those that the studio asks each annotator, chosen by the run's seed, as long as the
    annotator has unanswered ones. `rftstream feedback gold` adds gold questions."""

    def problem(self, group_size: int) -> str | None:
        """Return what is wrong with the settings for a run with groups of this size, or None."""
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
    device: str = "auto"
    """`cpu`, `cuda:0`, ... auto: the GPU with most memory, or the CPU for a made model."""
    colocate: bool | Literal["auto"] = "auto"
    """Whether engines on the trainer's device share it with the trainer in turns, on one machine (explorers and
    evaluator). The engines have its memory until a batch is complete. Then they sleep in the middle of rollouts, the
    trainer trains and moves its state to main memory, and the engines continue. For the policies hf and vllm, and for
    the backend torch, or deepspeed in one process. auto: if there is one GPU for both, and the devices are auto."""
    lr: NotNegative = 1e-6
    """Learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate from lr, after the warm-up, to `min_lr_share` of it at `run.steps`. Without
    `run.steps` each schedule is constant."""
    warmup_steps: Count = 0
    """Versions over which the learning rate rises from 0 to lr. A share (`warmup_ratio`) becomes share x run.steps."""
    min_lr_share: Fraction = 0.0
    """Share of lr at the end of the schedules linear and cosine."""
    weight_decay: NotNegative = 0.0
    """Weight decay of AdamW, for matrices but not for norms and biases."""
    adam_betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Betas of AdamW."""
    adam_eps: AboveZero = 1e-8
    """Epsilon of AdamW."""
    max_grad_norm: NotNegative = 1.0
    """Norm to which gradients are clipped; 0: no clipping."""
    router_aux_coef: NotNegative = 0.0
    """Weight of a loss that balances the experts of a mixture: transformers' load-balancing loss over the unmasked
    tokens of an optimizer step. If they take several micro-batches, counting the experts first costs one forward pass
    more. transformers' default for Qwen3-MoE is 0.001. 0: none. Biases that balance experts (DeepSeek-V3 and its kin)
    stay as they are in the checkpoint."""
    minibatches: Positive = 1
    """Optimizer steps in one pass over a batch. Each has an equal part of every kind and taskset."""
    updates_per_batch: Positive = 1
    """Passes over a batch."""
    tokens_per_microbatch: Positive = 16384
    """Tokens in one forward and backward pass; a longer row goes alone. It changes the memory used but not the results.
    Tokens that rows begin with alike count once; without packing, padding counts."""
    reference_every: Positive | None = None
    """The reference of a divergence (`kl_coef`) or of DPO becomes the policy of each version that is a multiple of
    this, before it is trained on. Unset: it is version 0 for the whole run."""
    shares: Positive = 1
    """Partitions of `batches`, fixed for a run. The trainer reads them all, and trains the same with any number."""
    checkpoint_every: Positive = 20
    """Versions between two checkpoints."""
    keep_checkpoints: Annotated[int, Meta(ge=2)] = 2
    """Number of newest checkpoints that are kept."""
    keep_every: Positive | None = None
    """The checkpoints of versions that are a multiple of this are kept, too. It is itself a multiple of
    `checkpoint_every`."""
    keep_best: str | None = None
    """Name of an evaluation. The checkpoint with its best mean is kept, too; only results by the newest version of its
    reward compare. Let the evaluation's `every` be a multiple of `checkpoint_every`."""
    publish_every: Positive = 1
    """Versions between two publications; at most max_staleness + 1."""
    peak_tflops: AboveZero | None = None
    """Peak speed of the device in 10^12 operations a second. The metric `mfu` is the share of it that the model's own
    matrix products reach. Default: the data sheet's figure for the usual GPUs; other devices have no such metric."""
    max_skips_in_a_row: Positive = 3
    """Batches with NaN in a row after which the run stops with exit 6."""
    max_steps_without_signal: Count = 100
    """The run stops with exit 6 after this many steps in a row in which the rewards of no group differ
    (`reinforce_plus_plus` and `ppo`: those of the batch). A resumed run stops again after as many more steps. Steps of
    algorithms that learn without a spread (`sft`, `dpo`, `reward_model`, `opd`, `topr`, `asymre`) do not count. 0:
    never."""
    masks: Literal["replay", "own"] = "replay"
    """The tokens over which logprobs and entropy are computed where `[sampling]` or a form left some out (`top_p`,
    `top_k`, `min_p`, `min_tokens`, a grammar). replay: those that could be sampled, which the policies hf and vllm
    record; own: all of them."""
    routing: Literal["own", "replay"] = "own"
    """The experts that tokens take in a mixture while it is trained. replay: those that they took while they were
    sampled, which the policies hf and vllm record; gates and their gradients are the trainer's. own: those that the
    trainer's router chooses, of which some differ. [models](models.md#routing-replay) has the costs."""
    warn_mismatch: NotNegative = 0.05
    """Warns, with the likely cause, if `mismatch_k3` of a step is above this. Sampler and trainer then disagree about
    the tokens' probabilities by more than some staleness explains. 0: never."""

    @property
    def replayed(self) -> frozenset[str]:
        """The kinds of values beside tokens that samplers record, and that the trainer computes with."""
        settings = {ALLOWED: self.masks, EXPERTS: self.routing}
        return frozenset(kind for kind, setting in settings.items() if setting != "own")

    @property
    def in_turns(self) -> bool:
        """Whether engines and trainer take turns on a device."""
        return self.colocate is True


@dataclass(frozen=True, kw_only=True)
class StageSection:
    """A run in several parts, one after the other, with one lineage of versions: an SFT warm-up, then GRPO, then DPO. A
    stage without rollouts (`sft`, `dpo`) takes `experts.per_batch` demonstrations or pairs a batch, and nothing is
    sampled for it. Masters and optimizer are kept from one stage to the next. The stages set the length of the run, and
    `run.steps` is left out."""

    steps: Positive
    """Batches of the stage; each batch makes one version."""
    name: RunName | None = None
    """Name of the stage for people; default: its algorithm's."""
    algorithm: str | dict[str, Any] | None = None
    """A name, or a name with differences from the settings in [algorithms.NAME], `{ name = "sft", normalise =
    "sequence" }`; default: `trainer.algorithm`. Tasksets with an algorithm of their own keep it."""
    lr: NotNegative | None = None
    """Learning rate. Default: `trainer.lr`."""
    lr_schedule: Literal["constant", "linear", "cosine"] | None = None
    """Schedule from the stage's first step to its last. Default: `trainer.lr_schedule`, likewise."""
    warmup_steps: Count | None = None
    """Warm-up from the stage's first step on. Default: `trainer.warmup_steps`, likewise."""
    min_lr_share: Fraction | None = None
    """Default: `trainer.min_lr_share`."""
    minibatches: Positive | None = None
    """Default: `trainer.minibatches`."""
    updates_per_batch: Positive | None = None
    """Default: `trainer.updates_per_batch`."""
    reference: Literal["stage", "run"] = "stage"
    """Policy that a divergence (`kl_coef`) or DPO compares with. stage: the policy at the stage's beginning. run: the
    reference of the stage before, which is version 0 if no stage has renewed it. The first stage always compares with
    version 0."""
    experts_ratio: Annotated[float, Meta(gt=0)] | None = None
    """Share of demonstrations, for a stage that takes them beside rollouts. Default: `experts.ratio`."""
    experts_per_batch: Positive | None = None
    """Demonstrations per batch, for a stage that takes demonstrations alone. Default: `experts.per_batch`."""


@dataclass(frozen=True, kw_only=True)
class EvaluatorSection(WorkerSection):
    """The evaluator samples and scores the evaluations of each version that is due for one."""

    count: Annotated[int, Meta(ge=0, le=1)] = 1
    """Number of evaluators that `run` starts: 1, or 0 to start it by hand."""
    policy: str | None = None
    """The policy that samples the evaluations. Default: the explorers' policy."""
    device: str = "auto"
    """`cpu`, `cuda:0`, ... auto: a GPU of its own if there are three or more, else the explorers'."""
    max_concurrent: Positive = 64
    """Samples in flight."""
    gateway_address: str = "127.0.0.1:0"
    """`HOST:PORT` of the evaluator's own endpoint for agents, if an evaluation has some; port 0: any free one. The
    explorers' limits for agents hold here, too."""
    gateway_url: str = ""
    """The URL up to `/v1` that agents elsewhere use for the gateway, as `explorer.gateway_url`."""


@dataclass(frozen=True, kw_only=True)
class SynthesisServer:
    """The server of the model that a synthesiser asks, if the model is a served one: any server with OpenAI's
    `/chat/completions`."""

    url: str
    """URL of the server's API: `http://127.0.0.1:8000/v1`."""
    model: str
    """Name of the model on the server."""
    api_key: str | None = None
    """`"env:NAME"`: the environment variable with the bearer token. The token is written nowhere."""
    timeout_s: AboveZero = 120.0
    """Seconds to wait for one answer."""
    tries: Positive = 3
    """Tries of a request if the server is busy or cannot be reached. After the last try the request waits, and is sent
    again later."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request, under the names that the server uses."""


@dataclass(frozen=True, kw_only=True)
class SynthesiserSection(WorkerSection):
    """Synthesisers have a model make new problems from those of the run. Each new problem is attempted several times.
    If the reward agrees with its answer, it joins a taskset whose source is `log:problems`. Without this section there
    are no synthesisers."""

    count: Count = 1
    """Processes that `run` starts; more can be started by hand at any time."""
    read: Literal["outcomes", "verified", "tasks", "problems"] = "outcomes"
    """Records that name the problems from which new ones are made. `outcomes`: each group when it is decided;
    `verified`: the first rollout of each group when it is scored; `tasks`: each group when it is admitted, whatever
    becomes of it; `problems`: problems that people and agents add."""
    tasksets: tuple[str, ...] = ()
    """Tasksets whose problems are used. Default: all except `into`. With `read = "problems"`: all growing tasksets."""
    into: str | None = None
    """The taskset that the new problems join. Default: the only growing one."""
    make: tuple[Literal["reworded", "varied", "harder"], ...] = ("reworded",)
    """Kinds of problems that the model is asked for. `reworded`: other words, the same answer; `varied`: another
    problem of the same kind; `harder`: a harder problem. The model gives the answers of the latter two."""
    per_parent: Positive = 1
    """Problems of each kind that are made from one problem."""
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the problems from which new ones are made, chosen by the run's seed."""
    solved: tuple[Fraction, Fraction] = (0.0, 1.0)
    """Lower and upper bound: only problems are used for which the share of attempts that reached `pass_reward` is
    between them. With `verified` the share is that of one attempt, 0 or 1; with `tasks` and `problems` it is not
    known."""
    most: Positive | None = None
    """Most problems that join. Problems that are being made may exceed it slightly."""
    ask: Literal["policy", "server"] = "policy"
    """Model that makes the problems and attempts them: the run's policy with its newest weights, or the model of
    [synthesiser.server]."""
    policy: str | None = None
    """The policy, if the run's policy is asked. Default: the explorers' policy."""
    device: str = "auto"
    """Device of the run's policy in this process. auto: the last GPU that the trainer leaves, else the CPU."""
    server: SynthesisServer | None = None
    """Server of the model, if the model is a served one."""
    max_concurrent: Positive = 16
    """Problems from which one process makes new ones at the same time."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Differences from [sampling] for requests for a problem. Attempts are sampled with the settings of the taskset
    `into`."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Kind -> the prompt that replaces the default; {problem} and {answer} are filled in."""
    pattern: str | None = None
    """A regular expression with the groups `(?P<problem>...)` and `(?P<answer>...)` that reads the model's answer; `.`
    also matches line breaks. Default: the last JSON object that has a `problem`."""
    check_samples: Positive = 4
    """Attempts at a new problem before it joins."""
    check_agree: tuple[Fraction, Fraction] = (0.5, 1.0)
    """Lower and upper bound for the share of the scored attempts that reach `pass_reward`. An upper bound below 1 keeps
    out problems that are always solved."""
    pass_reward: float = 1.0
    """Least reward of an attempt that counts as right."""
    warn_share: Fraction = 0.8
    """Warns, with the most frequent reason, if more than this share of the last 50 problems was rejected."""


@dataclass(frozen=True, kw_only=True)
class TrackersSection:
    """Where curves are shown outside of the run. `run` and `resume` send them; `plot` draws them without any of
    these."""

    tensorboard: str | None = None
    """Folder for TensorBoard's event files, relative to the run folder; default: none. With the extra `tensorboard`."""
    wandb: str | None = None
    """Project at Weights & Biases, `PROJECT` or `ENTITY/PROJECT`; default: none. With the extra `wandb`. The key comes
    from WANDB_API_KEY; `WANDB_MODE=offline` writes files into the run folder, for `wandb sync`. A resumed run continues
    the same W&B run."""
    mlflow: str | None = None
    """Experiment of MLflow; default: none. With the extra `mlflow`. MLFLOW_TRACKING_URI names the store; keys come from
    the environment. A resumed run continues the same MLflow run."""
    trackio: str | None = None
    """Project of Trackio; default: none. With the extra `trackio`. `trackio show` draws it; TRACKIO_SPACE_ID or
    TRACKIO_SERVER_URL name a server instead. A resumed run continues the same run."""
    swanlab: str | None = None
    """Project at SwanLab, `PROJECT` or `WORKSPACE/PROJECT`; default: none. With the extra `swanlab`. The key comes from
    SWANLAB_API_KEY; `SWANLAB_MODE=offline` writes files into the run folder, for `swanlab sync`. A resumed run
    continues the same experiment."""


@dataclass(frozen=True, kw_only=True)
class LogSection:
    """This section sets what the processes of a run write into their logs."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is written."""
    format: Literal["text", "json"] = "text"
    """`text` for people, `json` for machines."""
