"""Process reward models: where steps end, what a folder says of each, and how that becomes advantages of tokens."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rftstream.algorithms.grpo import Grpo
from rftstream.config.parts.part_names import check_part_names, check_steps
from rftstream.contracts.arrays import Array
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.contracts.versions import StepRecord
from rftstream.core.advantages import compute_step_advantages
from rftstream.errors import ConfigError, RewardError
from rftstream.rewards import classifier
from rftstream.rewards.base import TokenSegment
from rftstream.rewards.resolve import build_reward
from rftstream.rewards.reward_model import ModelReward
from rftstream.rewards.steps import find_step_ends
from rftstream.testing import Simulation
from tests.configs import small_run
from tests.flow.scene import make_config
from tests.suite.each import each
from tests.unit.algorithms.test_imitation import experience, segment
from tests.unit.rewards.test_reward_model import item, make_classifier, of_folder

CHARACTERS = "0123456789+="
IDS = {character: number for number, character in enumerate(CHARACTERS, start=1)}
END = 0


def said(prompt, answer, *, ended=True):
    """A segment as an explorer makes it."""
    ids = [IDS[one] for one in prompt + answer] + [END] * ended
    mask = [0] * len(prompt) + [1] * (len(answer) + ended)
    return TokenSegment(
        token_data=np.asarray(ids, "<i4").tobytes(), mask_data=np.asarray(mask, "u1").tobytes(),
        logprob_data=np.zeros(len(ids), "<f4").tobytes(),
    )  # fmt: skip


def rollout(answer, *, prompt="2+3=", ended=True, **changes):
    return item(answer, prompt, segments=(said(prompt, answer, ended=ended),), **changes)


# ------------------------------------------------------------------------------------------------ where steps end


def ends(text, *, separator="\n\n", sizes=None, mask=None):
    """With tokens of so many characters each, one by default."""
    sizes = sizes or [1] * len(text)
    cuts = np.cumsum([0, *sizes])
    pieces = [text[begin:end] for begin, end in itertools.pairwise(cuts)]
    mask = np.ones(len(pieces), np.uint8) if mask is None else np.asarray(mask, np.uint8)
    found = find_step_ends(
        np.arange(len(pieces)), mask, separator, lambda tokens: "".join(pieces[token] for token in tokens)
    )
    return np.flatnonzero(found).tolist()


@each(("text", "settings", "places"), [
    ("ab", {}, [1]),
    ("a\n\nb", {}, [2, 3]),
    ("a\n\nb\n\n", {}, [2, 5]),  # nothing comes after the last one
    ("a\n\nb\n\n \n", {}, [2, 7]),  # white space belongs to the step before
    ("\n\nab", {}, [3]),  # nothing comes before the first one
    ("a\n\n\nb", {}, [2, 4]),
    ("a\n\n\n\nb", {}, [2, 5]),  # nothing is no step
    ("a\n\n \n\n", {}, [5]),
    ("a\n\nb", {"sizes": [2, 2]}, [1]),  # one token ends a step and begins the next
    ("a.\n\nb.\n\nc", {"sizes": [4, 5]}, [0, 1]),
    ("a\n\nbcd\n\ne", {"mask": [1, 1, 1, 1, 0, 1, 1, 1, 1]}, [2, 3, 7, 8]),  # two turns
    ("", {}, []),
])  # fmt: skip
def test_where_steps_end(text, settings, places):
    assert ends(text, **settings) == places


def test_a_character_of_several_tokens_is_read_whole():
    """As byte tokens are: half of a character is no text."""
    data = "é。ü".encode()

    def decode(tokens):
        return bytes(data[token] for token in tokens).decode(errors="replace")

    found = find_step_ends(np.arange(len(data)), np.ones(len(data), np.uint8), "。", decode)
    assert np.flatnonzero(found).tolist() == [4, 6]


# ------------------------------------------------------------------------------------------------ a folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_classifier(tmp_path_factory.mktemp("one"))


@pytest.fixture(autouse=True)
def forget():
    classifier.load_model.cache_clear()


def of_beginning(made, text):
    with torch.no_grad():
        return float(made[1](input_ids=torch.tensor([[IDS[one] for one in text]])).logits[0, 0])


def test_each_step_has_what_the_model_says_of_the_text_so_far(made):
    """Of several rollouts at once, of several lengths."""
    items = [rollout("12=345=6", ended=False), rollout("7", ended=False), rollout("8=9", ended=False)]
    for size in (1, 16):
        scores = of_folder(made[0], steps="=", batch_size=size).score_all(items)
        for score, one, beginnings in zip(
            scores, items, [("12=", "12=345=", "12=345=6"), ("7",), ("8=", "8=9")], strict=True
        ):
            wanted = [of_beginning(made, "2+3=" + beginning) for beginning in beginnings]
            rewards, marks = (score.additions[name].numpy() for name in ("step_rewards", "step_ends"))
            assert rewards[marks != 0].tolist() == pytest.approx(wanted, abs=1e-5)
            assert np.flatnonzero(marks).tolist() == [3 + len(beginning) for beginning in beginnings]
            assert not rewards[marks == 0].any()
            assert len(marks) == len(one.segments[0].token_ids)
            assert score.reward == pytest.approx(min(wanted), abs=1e-5)
            assert score.metrics["steps"] == len(beginnings)


@each(("how", "whole"), [("min", min), ("last", lambda some: some[-1]), ("sum", sum),
                                            ("mean", lambda some: sum(some) / len(some))])  # fmt: skip
def test_the_reward_of_the_whole(made, how, whole):
    wanted = [2 * (of_beginning(made, one) - 1) for one in ("2+3=1=", "2+3=1=2")]
    score = of_folder(made[0], steps="=", steps_as=how, scale=2.0, offset=1.0)(rollout("1=2", ended=False))
    assert score.reward == pytest.approx(whole(wanted), abs=1e-5)


def test_a_classifier_of_tokens_is_one_too(tmp_path):
    folder, model = make_classifier(tmp_path, labels=2, kind="AutoModelForTokenClassification")
    score = of_folder(folder, steps="=", label=1, activation="softmax")(rollout("1=2", ended=False))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[IDS[one] for one in "2+3=1=2"]])).logits[0]
    wanted = logits.softmax(-1)[[5, 6], 1].tolist()
    assert score.additions["step_rewards"].numpy()[[5, 6]].tolist() == pytest.approx(wanted, abs=1e-5)
    with pytest.raises(ConfigError, match="is a LlamaForTokenClassification, which has no classifier head"):
        of_folder(folder, label=1)


def test_the_token_that_ends_the_turn_ends_the_last_step(made):
    score = of_folder(made[0], steps="=")(rollout("1=2="))
    assert np.flatnonzero(score.additions["step_ends"].numpy()).tolist() == [5, 8]


def test_segments_stand_one_after_the_other(made):
    two = item("3=4", segments=(said("2+3=", "1=2", ended=False), said("5+", "3=4", ended=False)))
    score = of_folder(made[0], steps="=")(two)
    assert np.flatnonzero(score.additions["step_ends"].numpy()).tolist() == [5, 6, 7 + 3, 7 + 4]


@each(("changes", "says"), [
    ({"completion": "77"}, "expected '77' in it; rewards of steps need the tokenizer"),
    ({"segments": (said("2+3=", "5" * 40),)}, "a segment has 45 tokens, expected at most 32"),
    ({"segments": (said("2+3=5", "", ended=False),), "completion": ""}, "no sampled token"),
    ({"segments": (), "completion": ""}, "no sampled token"),
])  # fmt: skip
def test_what_has_no_steps_has_no_score(made, changes, says):
    fine, odd = of_folder(made[0], steps="=").score_all([rollout("5"), replace(rollout("5"), **changes)])
    assert math.isfinite(fine.reward)
    assert isinstance(odd, RewardError)
    assert says in str(odd)


def test_a_token_that_the_model_does_not_know_is_another_tokenizer(made):
    spoilt = replace(rollout("5"), segments=(TokenSegment(
        token_data=np.asarray([1, 5000], "<i4").tobytes(), mask_data=b"\0\1", logprob_data=bytes(8)),))  # fmt: skip
    with pytest.raises(RewardError, match="got token 5000; rewards of steps need the tokenizer"):
        of_folder(made[0], steps="=")(spoilt)


@pytest.mark.parametrize(("settings", "says"), [
    ({"steps": ""}, "got an empty text"),
    ({"steps": "=", "text": "{prompt}"}, "text: means nothing with `steps`"),
    ({"steps": "=", "too_long": "cut_left"}, "too_long: means nothing with `steps`"),
])  # fmt: skip
def test_settings_that_mean_nothing(made, settings, says):
    with pytest.raises(ConfigError, match=says):
        of_folder(made[0], **settings)
    with pytest.raises(ConfigError, match="steps: means nothing for a served model"):
        ModelReward(ModelReward.Config(url="http://127.0.0.1:1", model="m", steps="="))


@pytest.mark.slow
def test_a_model_that_reads_both_ways_is_refused(tmp_path):
    """What an encoder says of a step depends on the steps after it."""
    import transformers

    folder, _ = make_classifier(tmp_path)
    config = transformers.BertConfig(vocab_size=13, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=16, num_labels=1)  # fmt: skip
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    with pytest.raises(ConfigError, match="depends on what comes later, expected a decoder"):
        of_folder(folder, steps="=").open()


# ------------------------------------------------------------------------------------------------ the algorithm


def with_steps(group, ids, mask, places, *, reward=0.0):
    rewards_T, ends_T = np.zeros(len(ids)), np.zeros(len(ids), np.uint8)
    for place, one in places:
        rewards_T[place], ends_T[place] = one, 1
    return experience(group, segment(ids, mask), reward=reward, loss_kind="rl", additions={
        "step_rewards": Array.of(rewards_T, "float32"), "step_ends": Array.of(ends_T, "uint8")})  # fmt: skip


def batch():
    return [
        with_steps("g", [5, 6, 7, 8], [0, 1, 1, 1], [(1, 1.0), (3, 3.0)], reward=1.0),
        with_steps("g", [5, 6, 7], [0, 1, 1], [(2, 2.0)], reward=0.0),
    ]


def advantages_of(step_rewards):
    rows, metrics = Grpo(Grpo.Config(step_rewards=step_rewards, advantage_eps=1e-9)).prepare(batch())
    return [row.advantages.tolist() for row in rows], metrics


def test_tokens_learn_from_their_steps_and_those_after():
    """Rewards 1, 3 and 2: mean 2, deviation 1."""
    only, metrics = advantages_of("only")
    assert only == [pytest.approx([0, 0, 1, 1], abs=1e-6), pytest.approx([0, 0, 0], abs=1e-6)]
    assert (metrics["steps_per_rollout"], metrics["step_reward"]) == (1.5, 2.0)
    off, metrics = advantages_of("off")
    assert off == [pytest.approx([1 / math.sqrt(2)] * 4), pytest.approx([-1 / math.sqrt(2)] * 3)]
    assert "step_reward" not in metrics
    beside, _ = advantages_of("beside")
    assert [np.subtract(one, other).tolist() for one, other in zip(beside, off, strict=True)] == [
        pytest.approx(one, abs=1e-6) for one in only
    ]


def test_rollouts_without_rewards_of_steps_are_told_so():
    lacking = [replace(one, additions={}) for one in batch()]
    with pytest.raises(ConfigError, match=r"algorithms\.grpo\.step_rewards: rollout .* add the reward 'reward_model'"):
        Grpo(Grpo.Config(step_rewards="only")).prepare(lacking)
    assert Grpo(Grpo.Config()).prepare(lacking)[0]


# ------------------------------------------------------------------------------------------------ the run file


def config(*, reward, algorithm="grpo", **settings):
    return small_run(
        run={"name": "t", "steps": 1}, tasksets={"t": {"source": "arithmetic", "reward": reward}},
        trainer={"algorithm": algorithm}, algorithms={algorithm: settings},
    )  # fmt: skip


def test_an_algorithm_that_is_to_learn_from_steps_needs_some():
    steps = {"name": "reward_model", "steps": "\n\n", "path": "x"}
    check_part_names(config(reward=steps, step_rewards="only"))
    check_part_names(config(reward="exact"))
    check_steps(config(reward="my_rewards:steps", step_rewards="only"))
    with pytest.raises(ConfigError, match=r"tasksets\.t\.reward: gives no rewards of steps, expected some for trainer"):
        check_part_names(config(reward="exact", step_rewards="beside"))
    with pytest.raises(ConfigError, match="gives no rewards of steps"):
        check_part_names(config(reward={"name": "reward_model", "path": "x"}, step_rewards="only"))


def test_an_algorithm_that_cannot_use_them_says_so():
    for name in ("rloo", "ppo", "opd", "gigpo"):
        with pytest.raises(ConfigError, match="step_rewards: unknown"):
            config(reward="exact", algorithm=name, step_rewards="only").build_algorithm("trainer.algorithm")


def test_steps_are_read_behind_a_closed_gate_too(made):
    """Or rollouts that fail the gate would have no rewards of steps, which the algorithm needs."""
    parts = [{"name": "exact", "use": "gate"}, {"name": "reward_model", "steps": "=", "path": str(made[0])}]
    run = config(reward=parts, step_rewards="only")
    score = build_reward(run.tasksets["t"].reward, run)(rollout("1=2"))
    assert score.reward == 0.0
    assert score.additions["step_ends"].numpy().any()


def test_a_run_learns_from_rewards_of_steps(tmp_path, monkeypatch):
    """From the verdicts through the batches into the rows, for every rollout."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "steps_for_tests.py").write_text(
        "import numpy as np\n"
        "from rftstream.contracts.arrays import Array\n"
        "from rftstream.rewards.base import Score\n"
        "def score(item):\n"
        "    mask = np.concatenate([one.loss_mask for one in item.segments])\n"
        "    ids = np.concatenate([one.token_ids for one in item.segments])\n"
        "    return Score(reward=float((ids * mask).sum() % 7), additions={\n"
        "        'step_rewards': Array.of(np.where(mask, ids % 5, 0), 'float32'),\n"
        "        'step_ends': Array.of(mask, 'uint8')})\n"
    )
    run = make_config(run__steps=2, tasksets__sums__reward="steps_for_tests:score", feeder__group_size=3,
                      algorithms={"grpo": {"step_rewards": "only"}})  # fmt: skip
    simulation = Simulation(run, folder=tmp_path)
    simulation.run()
    assert simulation.audit().fine
    verified = [one for one in simulation.messages("verified") if isinstance(one, VerifiedRollout)]
    groups = {}
    for one in verified:
        groups.setdefault(one.rollout.ids.group_id, []).append(one.verdict.additions)
    largest = []
    for siblings in groups.values():
        found = compute_step_advantages(
            [one["step_rewards"].numpy().astype(float) for one in siblings],
            [one["step_ends"].numpy() != 0 for one in siblings], np.zeros(len(siblings), np.int64),
        )  # fmt: skip
        largest.append(max(np.abs(one).max() for one in found))
    steps = [one for one in simulation.messages("steps") if isinstance(one, StepRecord) and not one.resumed]
    assert len(steps) == 2
    assert all(step.metrics["steps_per_rollout"] > 0 for step in steps)
    for step in steps:
        assert step.metrics["advantage_max"] > 0
        assert any(step.metrics["advantage_max"] == pytest.approx(one, rel=1e-5) for one in largest)
