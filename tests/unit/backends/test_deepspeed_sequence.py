"""Micro-batches that several ranks compute together, each its part of the tokens, against the torch backend.

What is equal and how closely is said in with_ranks.py.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rftstream.backends.deepspeed.rank_processes import RankPlace
from rftstream.backends.deepspeed.sequence import LENGTH_DEPENDENT, SequenceGroup, SplitNetwork, _rope_kinds
from rftstream.backends.deepspeed.settings import share_of
from rftstream.backends.torch.inputs import make_inputs
from rftstream.backends.torch.network import Network, NetworkSettings, load_model
from rftstream.core.allowed import column_of, encode_sets, read_sets
from rftstream.errors import ConfigError
from tests.unit import tiny
from tests.unit.backends import test_deepspeed_critic as of_critic
from tests.unit.backends.test_critic import reward_model
from tests.unit.backends.with_ranks import (
    BATCHES,
    GRPO,
    KL,
    agree,
    files_agree,
    make_backend,
    metrics_agree,
    plan,
    saved,
    skips_what_is_no_number,
    torch_backend,
    train,
    values_agree,
)
from tests.unit.models.test_exactness import made

CPU = torch.device("cpu")
SETTINGS = NetworkSettings(autocast=None, max_logits_bytes=1 << 20, packing=True)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    """Four heads that share two of keys and values; some layers see 6 tokens."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    made = tiny.make(tmp_path_factory.mktemp("model"))
    config = Qwen2Config(
        vocab_size=tiny.VOCABULARY, num_hidden_layers=2, max_position_embeddings=64, hidden_size=32,
        intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True, sliding_window=6,
        layer_types=["full_attention", "sliding_attention"],
    )  # fmt: skip
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(made.folder)
    return made


@pytest.fixture
def opened(spec, open_kept):
    """Opens one backend after another."""

    def make(critic=None, **config):
        backend = make_backend(spec, **{"processes": 2, "sequence_parallel": 2, **config})
        if critic is not None:
            backend.hold_critic(of_critic.PPO.critic, critic)
        return open_kept(backend)

    return make


@pytest.fixture(scope="module")
def expected(spec, tmp_path_factory):
    """Metrics, and files after the last batch."""
    backend = torch_backend(spec)
    return train(backend), saved(backend, tmp_path_factory.mktemp("expected") / "files")


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("config", [
    {"stage": 0, "packing": False},
    {"stage": 2},
    {"stage": 3, "gradient_checkpointing": True},
    pytest.param({"stage": 2, "processes": 4}, marks=pytest.mark.long),
])  # fmt: skip
def test_ranks_together_give_what_one_gives(opened, expected, config, tmp_path):
    backend = opened(**config)
    agree((train(backend), saved(backend, tmp_path / "after")), expected)
    skips_what_is_no_number(backend, GRPO, tmp_path, {"minibatches": 4})


@pytest.mark.slow
def test_halves_are_exchanged_too(spec, opened):
    """Up to the rounding of bfloat16."""
    whole, backend = torch_backend(spec, autocast="bfloat16"), opened(stage=0, autocast="bfloat16")
    theirs, ours = (one.update(BATCHES[0][0], GRPO, BATCHES[0][1]).metrics for one in (whole, backend))
    for name in ("loss", "entropy", "grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=0.02, abs=0.01), name


@pytest.mark.slow
def test_a_reference_is_computed_together_too(spec, opened):
    rows, twice = tiny.rows(5, seed=4), plan(updates_per_batch=2)
    whole, backend = torch_backend(spec), opened(stage=2)
    for one in whole, backend:
        one.update(BATCHES[0][0], KL, BATCHES[0][1])
    theirs = whole.logprobs(rows, 20) + whole.reference_logprobs(rows, 20)
    ours = backend.logprobs(rows, 20) + backend.reference_logprobs(rows, 20)
    values_agree(ours, theirs)
    theirs, ours = (one.update(rows, KL, twice).metrics for one in (whole, backend))
    for name in ("kl", "loss", "grad_norm", "num_tokens", "tflop"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name


@pytest.mark.slow
def test_a_critic_is_computed_together_too(spec, opened, tmp_path):
    reward_model(tmp_path / "reward", spec, pad_token_id=0)
    whole = torch_backend(spec, critic=(of_critic.PPO.critic, tmp_path / "reward"))
    backend = opened(tmp_path / "reward", stage=3)
    (values, metrics), (ours, our_metrics) = of_critic.course(whole), of_critic.course(backend)
    values_agree(ours, values)
    metrics_agree(our_metrics, metrics)
    found = saved(backend, tmp_path / "ours", of_critic.FILES)
    files_agree(found, saved(whole, tmp_path / "theirs", of_critic.FILES), of_critic.NUM_STEPS)


@pytest.mark.slow
def test_a_rank_holds_its_part_of_a_row(opened):
    """Of 41 tokens that are read and 1 of padding: 21, in every layer and in the head."""
    backend, seen = opened(stage=0, packing=False), []
    model = backend._rank._model
    for module in (*model.model.layers, *(layer.mlp for layer in model.model.layers), model.model.norm):
        module.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0].shape[1]))
    row = tiny.rows(1)[0]
    longer = {
        name: np.resize(getattr(row, name), 42)
        for name in ("token_ids", "loss_mask", "behavior_logprobs", "advantages")
    }
    backend.update([dataclasses.replace(row, **longer)], GRPO, plan(tokens_per_microbatch=64))
    assert seen == [21] * 5


def test_every_token_is_in_the_part_of_one_rank():
    """Also where they do not divide, and where a rank has none that is trained on."""
    for packed in (True, False):
        inputs = make_inputs(tiny.rows(5, seed=2), CPU, packed=packed)
        parts = [part_of(inputs, number, 3) for number in range(3)]
        together = torch.cat([part.token_ids for part in parts], dim=1)
        num_tokens = inputs.token_ids.shape[1]
        assert torch.equal(together[:, :num_tokens], inputs.token_ids)
        assert not together[:, num_tokens:].any() and together.shape[1] - num_tokens < 3
        assert sum(parts[0].lengths) == together.numel()
        targets = torch.cat([part.targets_N for part in parts])
        assert sorted(targets.tolist()) == sorted(inputs.targets_N.tolist())
        own = parts[1].token_ids
        read = [own[source // own.shape[1], source % own.shape[1]] for source in parts[1].sources_N.tolist()]
        numbers = [  # the token that comes before the trained one
            int(inputs.token_ids.flatten()[source])
            for source, row, place in zip(inputs.sources_N, inputs.rows_N, inputs.places_N, strict=True)
            if (int(row), int(place)) in set(zip(parts[1].rows_N.tolist(), parts[1].places_N.tolist(), strict=True))
        ]
        assert [int(one) for one in read] == numbers
    row = tiny.rows(1)[0]
    last = np.zeros_like(row.loss_mask)
    last[-1] = 1
    inputs = make_inputs([dataclasses.replace(row, loss_mask=last, temperature=0.5)], CPU, packed=True)
    first, second = (part_of(inputs, number, 2) for number in range(2))
    assert second.places_N.tolist() == [len(last) - 1] and second.temperatures_N.tolist() == [0.5]
    assert first.places_N.tolist() == [0] and first.temperatures_N.tolist() == [1]  # a masked place
    only_itself = column_of(encode_sets(torch.eye(tiny.VOCABULARY, dtype=torch.bool)[row.token_ids.tolist()]))
    inputs = make_inputs([dataclasses.replace(row, loss_mask=last, beside=only_itself)], CPU, packed=True)
    first, second = (part_of(inputs, number, 2) for number in range(2))
    assert read_sets(second.sets_N, second.targets_N.numpy(), tiny.VOCABULARY) is not None, (
        "no token is outside of its set"
    )
    assert first.sets_N is None, "the masked one has no set"


def part_of(inputs, number, size):
    group = SequenceGroup.__new__(SequenceGroup)
    group.number, group.size = number, size
    return group.part(inputs)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "what"), [(3, "the 4 heads"), (4, "the 2 key-value heads")])
def test_heads_are_divided(spec, size, what):
    network = Network(load_model(spec, CPU), SETTINGS)
    with pytest.raises(ConfigError, match=f"sequence_parallel: got {size}, expected a divisor of {what}"):
        SplitNetwork(network, SimpleNamespace(size=size), near=1e-3)


def test_a_model_that_cannot_be_split_is_found_by_trying(spec):
    """Here all ranks would get the first half of the tokens, and nobody the others."""
    network = Network(load_model(spec, CPU), SETTINGS)
    group = SequenceGroup.__new__(SequenceGroup)
    group.number, group.size = 0, 2
    group.all_tokens = lambda own: own.repeat(1, 1, 2, 1)
    group.all_heads = lambda own: own[:, :, : own.shape[2] // 2]
    group.together = lambda own: own
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM can't be computed in parts"):
        SplitNetwork(network, group, near=1e-3)


def test_what_our_attention_does_not_compute_is_refused(tmp_path):
    network = Network(load_model(made("gemma2", tmp_path)[1], CPU), SETTINGS)
    with pytest.raises(ConfigError, match="what its attention computes is more than ours does"):
        SplitNetwork(network, SimpleNamespace(size=2), near=1e-3)


def test_processes_are_divided(spec):
    with pytest.raises(ConfigError, match=r"sequence_parallel: got 2, expected a divisor of the 3 processes"):
        make_backend(spec, processes=3, sequence_parallel=2).open()


def test_images_are_refused(tmp_path):
    seeing = tiny.make(tmp_path, vision=True, context=128)
    backend = make_backend(seeing, processes=2, sequence_parallel=2)
    with pytest.raises(ConfigError, match=r"sequence_parallel: .* is shown images"):
        backend.open()


def test_a_micro_batch_counts_once():
    shares = [
        share_of(RankPlace(rank=rank, size=4, local_rank=rank, host="127.0.0.1", port=1), together=2)
        for rank in range(4)
    ]
    assert [(one.number, one.count, one.counts) for one in shares] == [
        (0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False),
    ]  # fmt: skip


def test_positions_that_depend_on_the_longest_row_are_found():
    for given in ({"rope_type": "dynamic"}, {"type": "dynamic"}, {"full_attention": {"rope_type": "dynamic"}}):
        assert "dynamic" in _rope_kinds(SimpleNamespace(rope_parameters=given)) & LENGTH_DEPENDENT
    assert not _rope_kinds(SimpleNamespace(rope_parameters=None)) & LENGTH_DEPENDENT
    assert not _rope_kinds(SimpleNamespace(rope_scaling={"rope_type": "llama3"})) & LENGTH_DEPENDENT
