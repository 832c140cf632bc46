"""From a seed to a run and its faults: sizes, policies of the buffer, lengths, failures."""

from __future__ import annotations

import contextlib
import json
import zlib
from pathlib import Path
from random import Random
from typing import Any

from rftstream.config import loader
from rftstream.config.parts.reward_uses import reward_names
from rftstream.config.sections import DemonstrationsSection, RunConfig
from rftstream.config.stages import taken_kinds
from rftstream.contracts.batches import LossKind
from rftstream.contracts.rollouts import Rollout
from rftstream.data.demonstrations.split import trained_numbers
from rftstream.errors import RewardError
from rftstream.roles.verifier.step import reward_input
from rftstream.runs.writes.load_demonstrations import load_demonstrations
from rftstream.testing import Faults, Simulation
from rftstream.testing.faults import FaultScript
from tests.simulation.compared import some_transactions_small, with_compared
from tests.simulation.games import draw_games
from tests.simulation.joined import with_joined
from tests.simulation.laws import Judge, Laws
from tests.simulation.pipelines import uses_facts, with_pipelines
from tests.simulation.ranks import SimulatedRanks, with_ranks
from tests.simulation.staged import PAIRS, TAKES

SLOW = 20.0
"""Tokens a second of each rollout: whole steps go by meanwhile."""

POWER_LOSS_SHARE = 0.25
"""Of the seeds."""

STRANGERS_SHARE = 0.4
"""Of the seeds."""

MAX_TICKS = 60_000
MAX_TICKS_OF_PIPELINES = 200_000
"""Some pipelines leave out nine groups of ten, and a batch takes its time."""

UNSCORABLE = f"{__name__}:unscorable_now_and_then"


def unscorable_now_and_then(completion: str, answer: str, prompt: str, unscorable_share: float = 0.0) -> float:
    """Exact match, which cannot be computed for a share of the completions."""
    luck = zlib.crc32(f"{prompt}|{completion}".encode()) / 2**32
    if luck < unscorable_share:
        raise RewardError("this one cannot be scored")
    return float(completion.strip() == answer)


def judge_by(config: RunConfig) -> Judge:
    """What the reward of these runs says; None where it raises."""
    share = config.rewards[UNSCORABLE]["unscorable_share"]
    with_environment = "environment" in reward_names(config.tasksets["sums"].reward)

    def judge(rollout: Rollout) -> float | None:
        item, posted = reward_input(rollout), rollout.posted
        try:
            reward = unscorable_now_and_then(item.completion, item.answer or "", item.prompt, share)
        except RewardError:
            return None
        if not with_environment:
            return reward
        if posted is None or posted.reward is None or posted.error is not None:
            return None
        return 0.5 * reward + posted.reward

    return judge


def draw_config(random: Random) -> RunConfig:
    """A small run."""
    max_staleness = random.choice([0, 0, 1, 1, 2, 3, 4])
    group_size = random.randint(1, 6)
    calm = random.random() < 0.4
    bad_share = 0.0 if calm else random.choice([0.1, 0.1, 0.35])
    values: dict[str, Any] = {
        "run": {"name": "simulated", "steps": random.randint(6, 12), "seed": random.randint(0, 9)},
        "model": {"path": "fake", "dtype": random.choice(["bfloat16", "float32"])},
        "tasksets": {"sums": {"source": "arithmetic", "reward": UNSCORABLE}},
        "feeder": {
            "groups_per_batch": random.randint(1, 5), "group_size": group_size, "max_staleness": max_staleness,
            "on_stale": random.choice(["wait", "wait", "drop"]),
        },
        "explorer": {
            "count": random.randint(1, 3), "policy": "fake", "max_concurrent": random.choice([1, 2, 4, 64]),
        },
        "verifier": {
            "count": random.randint(1, 2), "max_concurrent": random.choice([1, 4, 256]),
            "max_dead_share": 0.9,  # so many are drawn at times that the verifier would be right to stop the run
        },
        "buffer": {
            "zero_variance": "replace" if group_size > 1 and random.random() < 0.3 else "keep",
            "min_siblings": random.randint(1, 3),
            "max_body_bytes": random.choice([1, 2000, 1 << 28]),
        },
        "trainer": {
            "backend": "fake", "checkpoint_every": random.choice([1, 2, 3, 4, 20]), "shares": random.randint(1, 3),
            "publish_every": random.randint(1, max_staleness + 1), "minibatches": random.randint(1, 2),
            "max_skips_in_a_row": 3,
        },
        "transport": {"partitions": random.randint(1, 5)},
        "weights": {"keep": random.randint(2, 3)},
        "policies": {"fake": {
            "answer_depends_on": random.choice(["task", "weights"]),
            "tokens_per_s": random.choice([0.0, 300.0, SLOW]), "mean_tokens": random.choice([0.0, 6.0]), "sigma": 1.0,
            "fail_share": bad_share,
        }},
        "backends": {"fake": {"nan_at": () if random.random() < 0.7 else (random.randint(0, 8),)}},
        "rewards": {UNSCORABLE: {"unscorable_share": bad_share}},
    }  # fmt: skip
    if bad_share > 0.3:  # else hardly a group in fifty would come through
        most = 1 if values["buffer"]["zero_variance"] == "replace" else 2
        values["buffer"]["min_siblings"] = min(most, values["buffer"]["min_siblings"])
    if random.random() < 0.25:
        values["tasksets"]["sums"] |= {"options": {"size": random.randint(4, 30)}, "passes": 1}
        del values["run"]["steps"]
    if random.random() < 0.2:
        values["tasksets"]["more"] = {**values["tasksets"]["sums"], "weight": 2.5}
    if random.random() < 0.3:
        values["evaluations"] = {"held-out": {"source": "arithmetic", "options": {"size": 4}, "every": 2, "n": 2}}
    if random.random() < 0.2:
        values["trainer"]["keep_every"] = 2 * values["trainer"]["checkpoint_every"]
        values["trainer"] |= {"keep_best": "held-out"} if "evaluations" in values else {}
    if random.random() < 0.2:  # never so short that no group can be made in time
        quick = values["policies"]["fake"]["tokens_per_s"] == 0.0
        values["buffer"]["group_deadline_s"] = random.choice([0.3, 1.0, 5.0] if quick else [10.0, 30.0])
    if random.random() < 0.5:
        values["trainer"]["keep_checkpoints"] = random.randint(2, 3)
        values["retention"] = {"checkpoints": random.randint(2, values["trainer"]["keep_checkpoints"])}
    aside = Random(repr(values))  # so that what is drawn above stays what it was
    values["weights"]["anchor_every"] = aside.choice([1, 2, 3, 20])
    values["backends"]["fake"]["elements"] = aside.choice([64, 2048])  # too few for deltas to be smaller, and enough
    _draw_saving(random, values)
    _draw_experts(random, values)
    _draw_stages(random, values)
    draw_games(values)
    slow = values["policies"]["fake"]["tokens_per_s"] == SLOW
    in_time = not (slow and "rollout_timeout_s" in values["explorer"])  # else most end before their first reward
    if "environments" in values and in_time and Random(f"rewards {values!r}").random() < 0.5:
        for section in values["tasksets"].values():
            section["reward"] = [{"name": UNSCORABLE, "weight": 0.5}, {"name": "environment"}]
    values["policies"]["fake"]["values_beside"] = Random(f"beside {values!r}").choice([0, 3])
    own = Random(f"concurrent {values!r}")  # so that other seeds stay what they were
    if own.random() < 0.2:
        values["explorer"]["max_concurrent"] = "auto"
        values["policies"]["fake"]["batch_size"] = own.choice([1, 3, 256])
    return loader.from_dict(values)


def _draw_saving(random: Random, values: dict[str, Any]) -> None:
    """How unfinished rollouts are saved. From numbers of its own: what else a seed means stays as it was."""
    own = Random()
    own.setstate(random.getstate())
    values["explorer"] |= {
        "partial_every_s": own.choice([0.0, 0.05, 0.2, 1.0]), "yield_after_tokens": own.choice([0, 0, 1, 4]),
    }  # fmt: skip
    many = values["explorer"]["max_concurrent"] > 2
    if own.random() < 0.5 and many and "group_deadline_s" not in values["buffer"]:  # long ones
        values["policies"]["fake"] |= {"tokens_per_s": SLOW, "mean_tokens": 40.0}


def _draw_experts(random: Random, values: dict[str, Any]) -> None:
    """Demonstrations beside the rollouts. Likewise."""
    own = Random(f"experts {random.getstate()}")
    if own.random() < 0.4:
        values["experts"] = {
            "ratio": own.choice([0.1, 0.5, 1.5]), "shuffle": own.random() < 0.8, "held_out": own.choice([0.0, 0.2]),
        }  # fmt: skip
        if own.random() < 0.3:
            values["experts"]["passes"] = own.randint(1, 3)
        values["trainer"]["algorithm"] = own.choice(["mix", "chord"])


def _draw_stages(random: Random, values: dict[str, Any]) -> None:
    """Stages with and without rollouts, and an algorithm for a taskset alone. Likewise."""
    own = Random(f"stages {random.getstate()}")
    if "more" in values["tasksets"] and own.random() < 0.7:
        values["tasksets"]["more"] = {**values["tasksets"]["more"], "algorithm": "rloo"}
    if own.random() < 0.7:
        return
    values["run"].pop("steps", None)
    experts = values.setdefault("experts", {"ratio": 0.5, "held_out": own.choice([0.0, 0.2])})
    experts.pop("passes", None)
    experts["per_batch"] = own.randint(1, 5)
    names = [own.choice(["sft", "sft", PAIRS, "grpo", "rloo", "mix"]) for _ in range(own.randint(1, 4))]
    names.insert(own.randint(0, len(names)), own.choice(["grpo", "mix"]))
    if all(TAKES[name] is None for name in names):
        names.insert(own.randint(0, len(names)), "sft")
    values["stages"] = [{"steps": own.randint(1, 4), "algorithm": name} for name in names]


def with_savers(config: RunConfig) -> RunConfig:
    """The run with long rollouts, which several explorers save again and again."""
    fake = {**config.policies["fake"], "tokens_per_s": SLOW, "mean_tokens": 40.0}
    return loader.replace(
        config,
        explorer__count=3, explorer__max_concurrent=64, explorer__partial_every_s=0.05, explorer__rollout_timeout_s=0.0,
        buffer__group_deadline_s=None, policies={**config.policies, "fake": fake},
    )  # fmt: skip


def load_some(simulation: Simulation, own: Random) -> None:
    """What a user loads: some anew, some of it twice."""
    path = simulation.folder.path / "demonstrations.jsonl"
    known = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [_chat(len(known) + row) for row in range(own.randint(1, 12))]
    kinds = taken_kinds(simulation.config)
    if LossKind.dpo in kinds:
        pairs = [_pair(len(known) + row) for row in range(own.randint(1, 6))]
        rows = [*rows, *pairs] if LossKind.sft in kinds else pairs
    assert simulation.config.experts is not None
    share = simulation.config.experts.held_out
    for kind, key, made in ((LossKind.sft, "completion", _chat), (LossKind.dpo, "chosen", _pair)):
        while kind in kinds and not any(
            key in rows[number - len(known)]
            for number in trained_numbers(len(known) + len(rows), share).tolist() if number >= len(known)
        ):  # fmt: skip
            rows.append(made(len(known) + len(rows)))  # a stage for which all are held out has none
    path.write_text("\n".join([*known, *map(json.dumps, rows)]) + "\n", encoding="utf-8")
    section = DemonstrationsSection(source=f"jsonl:{path}")
    transport, folder = simulation.transport("user"), simulation.folder
    loaded = load_demonstrations(transport, simulation.config, folder, section, say=print)
    assert (loaded.new, loaded.known, loaded.total) == (len(rows), len(known), len(known) + len(rows))


def _chat(number: int) -> dict[str, str]:
    return {"prompt": f"{number}+1=", "completion": str(number + 1)}


def _pair(number: int) -> dict[str, str]:
    return {"prompt": f"{number}+1=", "chosen": str(number + 1), "rejected": "0"}


def user_loads(simulation: Simulation, random: Random) -> None:
    """Some before anybody starts, most times. More while the run goes on, where batches may depend on when."""
    own = Random(f"loads {random.getstate()}")
    if simulation.config.experts is None:
        return
    # A pass goes through what is known when it begins, which is a matter of time when it is loaded meanwhile.
    deterministic = is_deterministic(simulation.config)
    late_s = 0.0 if own.random() < 0.8 else 3 * own.random()
    simulation.at(0.0 if deterministic else late_s, lambda: load_some(simulation, own))
    if not deterministic:
        for _ in range(own.randint(0, 2)):
            simulation.at(3 + 20 * own.random(), lambda: load_some(simulation, own))


def draw_faults(random: Random) -> Faults:
    """Now and then all that goes wrong hits one or two roles, again and again."""
    roles = random.choice([(), (), (), ("trainer",), ("trainer", "explorer"), ("feeder", "buffer"), ("verifier",)])
    more = 2 if roles else 1
    own = Random(f"power {random.getstate()}")  # so that other seeds stay what they were
    strange = Random(f"strangers {random.getstate()}")
    return Faults(
        strangers=strange.randint(1, 8) if strange.random() < STRANGERS_SHARE else 0,
        power_losses=own.randint(1, 3) if own.random() < POWER_LOSS_SHARE else 0,
        share=random.choice([0.01, 0.03, 0.06, 0.12]),
        roles=roles,
        kills=random.randint(0, 6 * more),
        pauses=random.randint(0, 4 * more),
        restarts=random.randint(0, 2),
        takeovers=random.randint(0, 2 * more),
        joins=random.randint(0, 2),
        aborts=random.randint(0, 4),
        unknowns=random.randint(0, 2 * more),
        silences=random.randint(0, 4),
        user_pauses=random.randint(0, 1),
        drains=int(random.random() < 0.1),
        retries=random.randint(0, 4),
    )


def is_short(seed: int) -> bool:
    """Return whether the run of this seed is one of seconds. Where groups are given up after moments, and others are
    admitted in place of flat ones, most groups come to nothing and a batch takes long."""
    config = draw_config(Random(f"grid {seed}"))
    return config.buffer.group_deadline_s is None or config.buffer.zero_variance == "keep"


def simulate(
    seed: int,
    folder: Path,
    *,
    calm: bool = False,
    faults: Faults | FaultScript | None = None,
    max_ticks: int | None = None,
    pipelines: bool = False,
    joined: bool = False,
    compared: bool = False,
    savers: bool = False,
    ranks: bool = False,
) -> tuple[Simulation, Laws]:
    """The run of this seed, to its end, all laws checked. `calm`: the same run with nothing going wrong; `faults`: with
    these instead of those of the seed. `pipelines`: with operators. `joined`: with users' loops for samplers and
    trainer. `compared`: with a reward that compares siblings. `savers`: with long rollouts that are saved often.
    `ranks`: with versions that several ranks publish, each its part."""
    random = Random(f"grid {seed}")
    config, drawn = draw_config(random), draw_faults(random)
    if pipelines:
        config = with_pipelines(config, random)
    if savers:
        config = with_savers(config)
    if joined:
        config = with_joined(config)
    if compared:
        config = with_compared(config, seed)
    if ranks:
        config = with_ranks(config, seed)
    if calm or isinstance(faults, FaultScript):
        drawn = Faults()
    elif faults is not None:
        drawn = faults
    tick_s = random.choice([0.001, 0.001, 0.01, 0.1])
    if config.policies["fake"]["tokens_per_s"] == SLOW:
        tick_s = max(tick_s, 1 / SLOW)
    simulation = Simulation(config, folder=folder, seed=seed, tick_s=tick_s, faults=drawn)
    user_loads(simulation, random)
    if isinstance(faults, FaultScript):
        simulation.plan = faults
    simulation.watch = laws = Laws(simulation, judge_by(config))
    try:
        with contextlib.ExitStack() as played:
            if compared:
                played.enter_context(some_transactions_small(seed))
            if ranks:
                laws.ranks = SimulatedRanks(simulation, seed, calm=calm)
                played.enter_context(laws.ranks.playing(lambda name: laws.weights_digests[name]))
            simulation.run(max_ticks or (MAX_TICKS_OF_PIPELINES if pipelines else MAX_TICKS))
        laws.check_end()
    except BaseException as error:
        kinds = {"calm": calm, "pipelines": pipelines, "joined": joined, "compared": compared, "ranks": ranks}
        again = f"python -m tests.simulation {seed}" + "".join(f" --{kind}" for kind, is_so in kinds.items() if is_so)
        error.add_note(f"{loader.to_toml(config)}\n{simulation.to_text()}\n\nagain: {again}")
        raise
    return simulation, laws


def check_seed(
    seed: int,
    folder: Path,
    *,
    faults: Faults | FaultScript | None = None,
    max_ticks: int | None = None,
    pipelines: bool = False,
    joined: bool = False,
    compared: bool = False,
    savers: bool = False,
    ranks: bool = False,
) -> Simulation:
    """The run of this seed; where nothing that goes wrong may change batches or weights, compared with a calm one."""
    more = {"pipelines": pipelines, "compared": compared, "savers": savers, "ranks": ranks}
    simulation, laws = simulate(seed, folder, faults=faults, max_ticks=max_ticks, joined=joined, **more)
    if is_deterministic(simulation.config) and not laws.num_retried:
        _, calm = simulate(seed, folder / "calm", calm=True, **more)  # by our own roles
        try:
            laws.compare(calm)
        except AssertionError as error:
            error.add_note(f"{simulation.to_text()}\n\nagain: python -m tests.simulation {seed}")
            raise
    return simulation


def is_deterministic(config: RunConfig) -> bool:
    """Whether batches and weights depend on nothing but the tasks."""
    fake = config.policies["fake"]
    return (
        fake["answer_depends_on"] == "task"
        and config.feeder.on_stale == "wait"
        and config.buffer.group_deadline_s is None
        and config.verifier.group_timeout_s is None
        and not uses_facts(config)
    )
