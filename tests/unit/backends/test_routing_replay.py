"""Routing replay: the experts that the sampler recorded are those that the trainer computes and learns with."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rftstream.algorithms.base import TrainingRow
from rftstream.algorithms.grpo import Grpo
from rftstream.backends.base import OptimizerSettings
from rftstream.backends.deepspeed.backend import DeepSpeedBackend
from rftstream.backends.deepspeed.worlds import steady
from rftstream.backends.torch.inputs import make_inputs
from rftstream.backends.torch.network import load_model
from rftstream.config.sections import LoraSection
from rftstream.contracts.beside import Beside, fill_columns, uniform
from rftstream.contracts.token_values import EXPERTS
from rftstream.errors import ConfigError
from rftstream.models.folders.tiny_copy import tiny_config
from rftstream.models.routers import Routers, Routing
from rftstream.roles.explorer.open_segment import OpenSegment
from tests.unit import tiny

GRPO, KL = Grpo(Grpo.Config()), Grpo(Grpo.Config(kl_coef=0.1))
PROMPT = (4, 11, 5, 15)
GATES = {
    "qwen3_moe": lambda logits_NE, chosen: logits_NE.softmax(-1).gather(1, chosen),
    "mixtral": lambda logits_NE, chosen: _normed(logits_NE.softmax(-1).gather(1, chosen)),
    "olmoe": lambda logits_NE, chosen: logits_NE.softmax(-1).gather(1, chosen),
    "gpt_oss": lambda logits_NE, chosen: logits_NE.gather(1, chosen).softmax(-1),
    "granitemoe": lambda logits_NE, chosen: logits_NE.gather(1, chosen).softmax(-1),
    "deepseek_v3": lambda logits_NE, chosen: 2.5 * _normed(logits_NE.sigmoid().gather(1, chosen)),
    "glm4_moe": lambda logits_NE, chosen: _normed(logits_NE.sigmoid().gather(1, chosen)),
}
"""Family -> the gates of the chosen experts, by hand."""


def _normed(gates_NK):
    return gates_NK / gates_NK.sum(-1, keepdim=True)


def mixture(folder, family, *, dtype="float32", strong=1.0, **settings):
    """A tiny mixture whose experts are `strong` times as strong as initialised, in weights that bfloat16 holds."""
    spec = tiny.make(folder, family=family, dtype=dtype, **{"layers": 2, "heads": 2, **settings})
    file = spec.folder / "model.safetensors"
    tensors = load_file(file)
    for name, one in tensors.items():
        factor = strong if "experts." in name or "put_linear" in name else 1
        tensors[name] = (factor * one).bfloat16().to(one.dtype).contiguous()
    save_file(tensors, file, {"format": "pt"})
    return dataclasses.replace(spec, replays_experts=True)


def sampled(policy, prompts, *, max_tokens=8):
    """The rows of completions of these prompts, as the explorer puts them together."""
    for number, prompt in enumerate(prompts):
        policy.submit(dataclasses.replace(tiny.request(number, prompt, max_tokens=max_tokens), may_go_on=True))
    done = tiny.drain(policy)
    completions = [done[f"r{number}"] for number in range(len(prompts))]
    return [row_of(*pair) for pair in zip(prompts, completions, strict=True)], completions


def row_of(prompt, completion):
    ids = np.asarray([*prompt, *completion.token_ids], np.int32)
    zeros = np.zeros(len(prompt), np.float32)
    return TrainingRow(
        token_ids=ids, loss_mask=np.concatenate([zeros, np.ones(len(completion.token_ids), np.float32)]),
        behavior_logprobs=np.concatenate([zeros, completion.behavior_logprobs]),
        advantages=np.full(len(ids), 1.0 - 2 * (len(ids) % 2), np.float32),
        beside=fill_columns({}, len(ids), completion.beside),
    )  # fmt: skip


def without(rows):
    return [dataclasses.replace(row, beside={}) for row in rows]


def forced_at_random(rows, spec, seed=3):
    """The rows with other experts than a router would choose; some tokens have none."""
    random, routing = np.random.default_rng(seed), Routing.of(load_model(spec, torch.device("cpu")), where="here")
    found = []
    for row in rows:
        counts_T = np.where(random.random(len(row.token_ids)) < 0.8, routing.num_chosen, 0).astype(np.int32)
        counts_T[0] = 0
        chosen = [
            np.concatenate([random.permutation(layer.num_experts)[: layer.num_chosen] for layer in routing.layers])
            for _ in range(int((counts_T > 0).sum()))
        ]
        beside = {EXPERTS: Beside(counts_T, np.concatenate(chosen).astype(np.uint8))}
        found.append(dataclasses.replace(row, beside=beside))
    return found


def own_experts(spec, token_ids):
    """What a plain model takes for all tokens but the last, [T - 1, K]."""
    model = load_model(spec, torch.device("cpu"))
    routing = Routing.of(model, where="here")
    with torch.no_grad(), routing.recorded() as experts:
        model(input_ids=torch.from_numpy(token_ids[None, :-1].astype(np.int64)), use_cache=False)
    return experts().numpy()


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("family", [*GATES, "qwen3_next", "jamba"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_experts_are_those_of_a_plain_model_and_replay_of_ones_own_changes_nothing(tmp_path, family, packing):
    """Of siblings, of a further turn, of a request that goes on elsewhere, and after new weights."""
    spec = mixture(tmp_path, family)
    backend = tiny.backend(spec, packing=packing)
    served = {name: dataclasses.replace(one, data=bytes(one.data)) for name, one in backend.served_tensors().items()}
    policy = tiny.policy(spec, served, records=[EXPERTS], batch_size=8, in_flight="recompute")
    rows, completions = sampled(policy, [PROMPT, PROMPT, (7, 3)])
    first = rows[0]
    turn = (*first.token_ids.tolist(), 9, 2, 6)
    further = dataclasses.replace(tiny.request(7, turn), may_go_on=True)
    policy.submit(further)
    policy.submit(dataclasses.replace(tiny.request(8, turn[:7]), num_sampled=3))
    policy.step()
    policy.load(served, tiny.name(1))
    done = tiny.drain(policy)
    whole = OpenSegment()
    whole.prompt(PROMPT)
    whole.sampled(completions[0])
    whole.prompt(turn[len(first.token_ids) :])
    whole.sampled(done["r7"])
    rows += [dataclasses.replace(row_of(turn, done["r7"]), beside=whole.beside), row_of(turn[:7], done["r8"])]
    for row in rows:
        expected_TK = own_experts(spec, row.token_ids)
        column = row.beside[EXPERTS]
        assert column.values.dtype == np.uint8
        assert column.counts_T.tolist() == [0, *[expected_TK.shape[1]] * len(expected_TK)]
        np.testing.assert_array_equal(column.values.reshape(expected_TK.shape), expected_TK)
    for row, own, replayed in zip(rows, backend.logprobs(without(rows)), backend.logprobs(rows), strict=True):
        np.testing.assert_array_equal(own, replayed)
        np.testing.assert_allclose(replayed, row.behavior_logprobs, atol=1e-5)
    update = backend.update(rows, GRPO, tiny.plan())
    assert update.metrics["routing_mismatch"] == 0
    after, other = tiny.state(backend), tiny.backend(spec, packing=packing)
    assert "routing_mismatch" not in other.update(without(rows), GRPO, tiny.plan()).metrics
    assert after == tiny.state(other)


@contextlib.contextmanager
def forced_by_hand(model, family, row):
    """Routers that give the row's experts, with the gates of `GATES`, and their own where the row has none."""
    column = row.beside[EXPERTS].cut(1)
    has_N = torch.from_numpy(column.counts_T > 0)
    per_layer = column.values.reshape(int(has_N.sum()), -1)
    handles, start = [], 0
    for router in Routers.of(model).routers:
        chosen = torch.from_numpy(per_layer[:, start : start + router.num_chosen].astype(np.int64))
        start += router.num_chosen

        def hook(module, inputs, output, chosen=chosen):
            [own] = (one for one in output if one.dtype == torch.int64)
            [logits] = (one for one in output if one.shape[1] == 4)
            [gates] = (one for one in output if one is not own and one is not logits)
            wanted = own.index_put((has_N,), chosen)
            by_hand = GATES[family](logits.float(), wanted).to(gates.dtype)
            torch.testing.assert_close(GATES[family](logits.float(), own).to(gates.dtype), gates)
            return tuple(wanted if one is own else by_hand if one is gates else one for one in output)

        handles.append(router.module.register_forward_hook(hook))
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("family", GATES)
def test_gradients_are_those_of_routers_that_are_forced_by_hand(tmp_path, family):
    """Packed and padded, with and without activations that are computed again; each time all parameters."""
    spec = mixture(tmp_path, family)
    rows = forced_at_random(tiny.rows(6), spec)
    model = load_model(spec, torch.device("cpu"))
    total = torch.zeros(())
    for row in rows:
        with forced_by_hand(model, family, row):
            ids = torch.from_numpy(row.token_ids.astype(np.int64))
            logprobs = model(input_ids=ids[None, :-1], use_cache=False).logits[0].float().log_softmax(-1)
            taken = logprobs.gather(1, ids[1:, None])[:, 0]
            total = total + (taken * torch.from_numpy(row.advantages[1:] * row.loss_mask[1:])).sum()
    total.backward()
    expected = {name: one.grad for name, one in model.named_parameters()}
    for packed in (True, False):
        for again in (False, True):
            network = tiny.backend(spec, packing=packed, gradient_checkpointing=again)._network
            # two passes before the backward pass, whose layers are each computed again with the experts of their own
            halves = [make_inputs(part, torch.device("cpu"), packed=network.packs) for part in (rows[:3], rows[3:])]
            found = [(network.logprobs(one)[0] * one.rows.advantages_BT).sum() for one in halves]
            network.routing.force(None, torch.device("cpu"))
            counts = network.routed()
            sum(found).backward()
            assert network.routed() == counts, "passes that recompute count nothing"
            torch.testing.assert_close(sum(found).detach(), total.detach(), atol=1e-4, rtol=1e-4)
            for name, one in network.model.named_parameters():
                torch.testing.assert_close(one.grad, expected[name], atol=2e-5, rtol=1e-3, msg=lambda m, n=name: n + m)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("config", [
    {"stage": 1},
    {"stage": 3, "gradient_checkpointing": True},
    {"stage": 3, "processes": 2},
    {"stage": 2, "processes": 2, "sequence_parallel": 2},
])  # fmt: skip
def test_ranks_force_what_one_process_forces(tmp_path, kept, monkeypatch, config):
    pytest.importorskip("deepspeed")
    spec = mixture(tmp_path, "qwen3_moe", heads=4)
    rows = forced_at_random(tiny.rows(6), spec)
    whole = tiny.backend(spec)
    own, expected = whole.logprobs(without(rows)), whole.logprobs(rows) + whole.reference_logprobs(rows, 30)
    assert max(np.abs(one - other).max() for one, other in zip(own, expected, strict=False)) > 1e-3
    metrics = whole.update(rows, GRPO, tiny.plan(tokens_per_microbatch=30)).metrics
    if config.get("processes", 1) > 1:
        monkeypatch.setattr(steady, "Ranks", lambda *args, **settings: kept(config["processes"]))
    backend = DeepSpeedBackend(
        DeepSpeedBackend.Config(timeout_s=600, **config), model=spec, optimizer=OptimizerSettings(), seed=0
    )
    try:
        backend.open()
        found = backend.logprobs(rows, 30) + backend.reference_logprobs(rows, 30)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        update = backend.update(rows, GRPO, tiny.plan(tokens_per_microbatch=30)).metrics
        for name in ("grad_norm", "loss", "mismatch_k3"):
            assert update[name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-6), name
        if "sequence_parallel" not in config:  # then it is that of one rank's tokens
            assert update["routing_mismatch"] == pytest.approx(metrics["routing_mismatch"])
        after = {name: np.frombuffer(one.data, np.float32) for name, one in backend.served_tensors().items()}
    finally:
        backend.close()
    for name, one in whole.served_tensors().items():
        np.testing.assert_allclose(after[name], np.frombuffer(one.data, np.float32), atol=2e-3, err_msg=name)


@pytest.mark.slow
def test_policy_reference_and_all_settings_of_a_backend_are_forced(tmp_path):
    pytest.importorskip("peft")
    spec = mixture(tmp_path, "qwen3_moe")
    rows, plain = forced_at_random(tiny.rows(6), spec), tiny.backend(spec)
    expected, own = np.concatenate(plain.logprobs(rows)), np.concatenate(plain.logprobs(without(rows)))
    assert np.abs(expected - own).max() > 0.1
    adapted = dataclasses.replace(spec, lora=LoraSection(rank=4, alpha=8.0))
    for model, config, near in (
        (spec, {"parameters": "bfloat16", "gradient_checkpointing": True}, 0.01),
        (spec, {"offload_parameters": True}, 1e-5),
        (adapted, {}, 1e-5),
    ):
        backend = tiny.backend(model, **config)
        for found in backend.logprobs(rows), backend.reference_logprobs(rows, 1000):
            np.testing.assert_allclose(np.concatenate(found), expected, atol=near)
        update = backend.update(rows, KL, tiny.plan(updates_per_batch=2)).metrics
        assert update["routing_mismatch"] > 0.5


def mismatch(rows, found):
    """mismatch_k3 of the rows' unmasked tokens."""
    log_rho = np.concatenate(
        [(one - row.behavior_logprobs)[row.loss_mask > 0] for row, one in zip(rows, found, strict=True)]
    )
    return float(np.mean(np.expm1(log_rho) - log_rho))


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("family", GATES)
def test_with_replay_a_sampler_that_rounds_is_ten_times_nearer(tmp_path, family):
    spec = mixture(tmp_path, family, dtype="bfloat16", layers=4, width=64, strong=8.0)
    backend = tiny.backend(spec)
    policy = tiny.policy(spec, backend.served_tensors(), records=[EXPERTS], batch_size=64)
    rows, _ = sampled(policy, [(*PROMPT, number % 7) for number in range(40)], max_tokens=60)
    own, replayed = mismatch(rows, backend.logprobs(without(rows))), mismatch(rows, backend.logprobs(rows))
    share = backend.update(rows, GRPO, tiny.plan()).metrics["routing_mismatch"]
    print(f"| {family} | {own:.1e} | {replayed:.1e} | {own / replayed:.0f} | {100 * share:.1f} % |")
    assert own > 10 * replayed
    assert 0 < share < 0.2


@pytest.mark.parametrize(
    ("family", "expected"),
    [("qwen3_moe", (0, 1)), ("deepseek_v3", (1,)), ("jetmoe", None)],
)
def test_layers_that_another_engine_numbers_are_known_by_the_names_of_routers(tmp_path, family, expected):
    more = {"first_k_dense_replace": 1} if family == "deepseek_v3" else {}
    config = tiny_config(transformers.CONFIG_MAPPING[family](**more))
    config.num_hidden_layers = 2
    routers = Routers.of(transformers.AutoModelForCausalLM.from_config(config))
    if expected is not None:
        assert routers.layer_numbers() == expected
        return
    with pytest.raises(ConfigError, match=r"trainer\.routing: routers .* have no layer each"):
        routers.layer_numbers()


@pytest.mark.parametrize(
    ("family", "expected"),
    [("llama", "is no mixture of experts"), ("phimoe", "does not choose experts by a topk in model.layers.0.mlp")],
)
def test_a_model_whose_experts_cannot_be_replayed_is_refused(tmp_path, family, expected):
    model = load_model(tiny.make(tmp_path, family=family, layers=1, heads=2), torch.device("cpu"))
    with pytest.raises(ConfigError, match=f"^trainer.routing: .*{expected}"):
        Routing.of(model, where="trainer.routing")


def test_experts_of_another_model_are_refused(tmp_path):
    spec = mixture(tmp_path, "qwen3_moe", layers=1)
    row = tiny.rows(1)[0]
    row = dataclasses.replace(row, beside={EXPERTS: uniform(np.zeros((len(row.token_ids), 3), np.uint8))})
    with pytest.raises(ValueError, match="got 3 experts of a token, expected 2"):
        tiny.backend(spec).logprobs([row])
