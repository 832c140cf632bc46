import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from rftstream.algorithms.grpo import Grpo
from rftstream.backends.stopping import UpdateStop, UpdateStopped
from rftstream.backends.torch import attention
from rftstream.contracts.tasks import ChatMessage
from rftstream.errors import ConfigError
from rftstream.models.rendering import open_renderer
from tests.unit import tiny


@pytest.fixture
def grpo():
    return Grpo(Grpo.Config())


def updated(spec, grpo, rows, **changes):
    backend = tiny.backend(spec)
    update = backend.update(rows, grpo, tiny.plan(**changes))
    return backend, update


def masters(backend):
    return {name: np.frombuffer(data, np.float32) for name, data in tiny.state(backend).items()}


def gradients(masters, monkeypatch):
    """What the steps of masters are given from here on: of these Adam's first step would show little but the sign."""
    caught = {}
    parameters = masters._parameters

    def step(lr, *, scale=1.0):
        caught.update((name, one.grad.clone()) for name, one in parameters.items())
        masters.drop_gradients()

    monkeypatch.setattr(masters, "step", step)
    return caught


@pytest.mark.slow
@pytest.mark.parametrize("normalise", ["token", "sequence"])
@pytest.mark.parametrize("packing", [True, False])
def test_no_budget_and_no_layout_changes_the_gradients(spec, normalise, packing, monkeypatch):
    grpo = Grpo(Grpo.Config(normalise=normalise, entropy_coefficient=0.1))
    plain = tiny.backend(spec, packing=False)
    expected = gradients(plain._masters, monkeypatch)
    loss = plain.update(tiny.rows(), grpo, tiny.plan()).metrics["loss"]
    for tokens, num in ((1, 12), (20, None), (60, None), (16384, 1)):
        backend = tiny.backend(spec, packing=packing)
        found = gradients(backend._masters, monkeypatch)
        metrics = backend.update(tiny.rows(), grpo, tiny.plan(tokens_per_microbatch=tokens)).metrics
        assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
        assert num in (None, metrics["microbatches"])
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_order_of_rows_does_not_matter(spec, grpo):
    rows = tiny.rows()
    losses = [updated(spec, grpo, order)[1].metrics for order in (rows, rows[::-1])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.law("replay")
def test_an_update_is_deterministic_and_changes_every_weight(spec, grpo):
    first, second = (updated(spec, grpo, tiny.rows())[0] for _ in range(2))
    assert tiny.state(first) == tiny.state(second)
    before, after = tiny.state(tiny.backend(spec)), tiny.state(first)
    assert all(before[name] != after[name] for name in before)


def test_metrics_of_an_on_policy_batch(spec, grpo):
    backend = tiny.backend(spec)
    rows = tiny.rows()
    on_policy = [
        dataclasses.replace(row, behavior_logprobs=logprobs)
        for row, logprobs in zip(rows, backend.logprobs(rows), strict=True)
    ]
    metrics = backend.update(on_policy, grpo, tiny.plan()).metrics
    assert metrics["mismatch_k3"] == pytest.approx(0, abs=1e-9)
    assert metrics["ess"] == pytest.approx(1)
    assert metrics["ratio"] == pytest.approx(1)
    assert metrics["clip_fraction"] == 0
    assert metrics["num_tokens"] == sum(row.loss_mask[1:].sum() for row in rows)
    assert 2.5 < metrics["entropy"] <= np.log(tiny.VOCABULARY)


def test_clipping_bounds_the_gradient(spec, grpo):
    # Adam does not see the scale of its first gradient, but its second moment does
    squares = []
    for bound in (0.0, 1e-3):
        backend, update = updated(spec, grpo, tiny.rows(), max_grad_norm=bound)
        total = sum(float(value.sum()) for key, value in backend._masters.moments() if key.startswith("exp_avg_sq/"))
        squares.append(np.sqrt(total / (1 - 0.95)))
        assert update.metrics["grad_norm"] > 1e-3
    assert squares[0] == pytest.approx(update.metrics["grad_norm"], rel=1e-4)
    assert squares[1] == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize("changes", [{}, {"minibatches": 4}, {"updates_per_batch": 2}])
def test_a_nan_leaves_everything_as_it_was(spec, grpo, tmp_path, changes):
    backend, _ = updated(spec, grpo, tiny.rows(seed=1))
    before = tiny.whole_state(backend, tmp_path / "before")
    rows = tiny.rows(seed=2)
    rows[-1] = dataclasses.replace(rows[-1], advantages=np.full_like(rows[-1].advantages, np.nan))
    update = backend.update(rows, grpo, tiny.plan(**changes))
    assert update.skipped
    assert np.isnan(update.metrics["loss"])
    assert tiny.whole_state(backend, tmp_path / "after") == before
    assert not backend.update(tiny.rows(seed=3), grpo, tiny.plan()).skipped


@pytest.mark.law("replay")
@pytest.mark.parametrize("changes", [{}, {"minibatches": 2, "updates_per_batch": 2}])
@pytest.mark.parametrize("settings", [{}, {"offload_parameters": True, "gradient_checkpointing": True}])
def test_a_batch_left_half_trained_leaves_everything_as_it_was(spec, tmp_path, monkeypatch, changes, settings):
    """At its first layer, in the backward passes of its first and its last step, and between."""
    algorithm, rows, plan = Grpo(Grpo.Config(kl_coef=0.5)), tiny.rows(seed=2), tiny.plan(**changes)
    checks = []
    check = UpdateStop.check

    def counted(stop, *of):
        checks.append(of)
        if len(checks) == place:
            stop.ask()
        check(stop, *of)

    monkeypatch.setattr(UpdateStop, "check", counted)
    backend, place = tiny.backend(spec, **settings), None
    backend.update(tiny.rows(seed=1), algorithm, plan)
    before = tiny.whole_state(backend, tmp_path / "before")
    for place in np.linspace(1, len(checks), 6).astype(int):
        stopped = tiny.backend(spec, **settings)
        stopped.load(tmp_path / "before")
        checks.clear()
        with stopped.stopping.allowed(), pytest.raises(UpdateStopped):
            stopped.update(rows, algorithm, plan)
        assert tiny.whole_state(stopped, tmp_path / f"after-{place}") == before
    place = None
    for one in (backend, stopped):  # once it is not allowed any more, the request is without effect
        one.update(rows, algorithm, plan)
    assert tiny.whole_state(stopped, tmp_path / "b") == tiny.whole_state(backend, tmp_path / "a")


@pytest.mark.law("replay")
def test_save_and_load_go_on_bit_for_bit(spec, grpo, tmp_path):
    backend, _ = updated(spec, grpo, tiny.rows(seed=1))
    tiny.whole_state(backend, tmp_path / "saved")
    backend.update(tiny.rows(seed=2), grpo, tiny.plan(minibatches=2))
    successor = tiny.backend(spec)
    successor.load(tmp_path / "saved")
    successor.update(tiny.rows(seed=2), grpo, tiny.plan(minibatches=2))
    assert tiny.whole_state(successor, tmp_path / "b") == tiny.whole_state(backend, tmp_path / "a")


def test_an_optimizer_in_main_memory_gives_the_same_bits(spec, grpo, tmp_path):
    plain, offloaded = tiny.backend(spec), tiny.backend(spec, offload_optimizer=True)
    bad = [dataclasses.replace(row, advantages=np.full_like(row.advantages, np.nan)) for row in tiny.rows()]
    for backend in (plain, offloaded):
        backend.update(tiny.rows(seed=1), grpo, tiny.plan())
        assert backend.update(bad, grpo, tiny.plan(minibatches=2)).skipped
        backend.update(tiny.rows(seed=2), grpo, tiny.plan(minibatches=2))
    expected = tiny.whole_state(plain, tmp_path / "plain")
    assert tiny.whole_state(offloaded, tmp_path / "offloaded") == expected
    resumed = tiny.backend(spec, offload_optimizer=True)
    resumed.load(tmp_path / "plain")
    assert tiny.whole_state(resumed, tmp_path / "resumed") == expected
    for found, here in zip(resumed.logprobs(tiny.rows()), plain.logprobs(tiny.rows()), strict=True):
        np.testing.assert_array_equal(found, here)


# --------------------------------------------------------------------------------------------- packed rows


def test_packed_rows_give_what_padded_ones_give(spec):
    packed, padded = tiny.backend(spec), tiny.backend(spec, packing=False)
    assert (packed._network.packs, padded._network.packs) == (True, False)
    rows = [dataclasses.replace(row, temperature=1.0 + 0.1 * number) for number, row in enumerate(tiny.rows())]
    for found, expected in zip(packed.logprobs(rows), padded.logprobs(rows), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_poisoned_neighbour_changes_no_bit(spec):
    backend = tiny.backend(spec)
    rows = [dataclasses.replace(row, token_ids=np.where(row.token_ids == 16, 15, row.token_ids)) for row in tiny.rows()]
    clean = backend.logprobs(rows)
    rows[3] = dataclasses.replace(rows[3], token_ids=np.full_like(rows[3].token_ids, 16))
    model = backend._network.model
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        model.get_input_embeddings().weight[16] = float("inf")  # no other row has token 16
    after = backend.logprobs(rows)
    assert not np.isfinite(after[3][rows[3].loss_mask > 0]).any()
    for number in (one for one in range(len(rows)) if one != 3):
        np.testing.assert_array_equal(after[number], clean[number])


def test_a_model_that_mixes_packed_rows_is_padded(spec, monkeypatch):
    run_lengths = attention.run_lengths
    monkeypatch.setattr(
        attention, "run_lengths", lambda lengths, parents=None: run_lengths([sum(lengths)])
    )  # rows see those before
    backend = tiny.backend(spec)
    assert not backend._network.packs
    assert not backend.update(tiny.rows(), Grpo(Grpo.Config()), tiny.plan()).skipped


@pytest.mark.parametrize("window", [None, 3])
def test_attention_of_packed_rows_by_hand(window):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 4, generator=generator) for heads in (4, 2, 2))
    found, _ = attention.attend(
        torch.nn.Identity(), query, key, value, attention.run_lengths([5, 4]), sliding_window=window
    )
    key, value = (one.repeat_interleave(2, dim=1) for one in (key, value))
    places, row = torch.tensor([*range(5), *range(4)]), torch.tensor([0] * 5 + [1] * 4)
    distance = places[:, None] - places[None]
    sees = (row[:, None] == row[None]) & (distance >= 0) & (distance < (window or 9))
    scores = (query @ key.transpose(2, 3) / 2).masked_fill(~sees, -torch.inf)
    torch.testing.assert_close(found, (scores.softmax(dim=-1) @ value).transpose(1, 2))


def test_a_checkpoint_of_another_model_is_refused(spec, tmp_path):
    tiny.whole_state(tiny.backend(spec), tmp_path / "saved")
    other = tiny.backend(tiny.make(tmp_path / "other", layers=3))
    with pytest.raises(ConfigError, match="another model"):
        other.load(tmp_path / "saved")


def test_several_steps_use_the_policy_before_the_batch(spec, grpo):
    _, update = updated(spec, grpo, tiny.rows(), updates_per_batch=3, lr=5e-2)
    assert update.metrics["optimizer_steps"] == 3
    assert update.metrics["clip_fraction"] > 0
    assert update.metrics["ratio"] != pytest.approx(1, abs=1e-3)


def test_nothing_to_train_on_takes_no_step(spec, grpo, tmp_path):
    backend = tiny.backend(spec)
    before = tiny.whole_state(backend, tmp_path / "before")
    rows = [dataclasses.replace(row, loss_mask=np.zeros_like(row.loss_mask)) for row in tiny.rows(3)]
    for batch in (rows, []):
        update = backend.update(batch, grpo, tiny.plan())
        assert not update.skipped
        assert update.metrics["num_tokens"] == 0
    assert tiny.whole_state(backend, tmp_path / "after") == before


def test_recomputing_in_the_backward_pass_changes_nothing(spec, grpo):
    plain = updated(spec, grpo, tiny.rows())[1].metrics
    for config in ({"gradient_checkpointing": True}, {"max_logits_bytes": 1 << 16}):
        backend = tiny.backend(spec, **config)
        assert backend.update(tiny.rows(40)[:12], grpo, tiny.plan()).metrics["num_tokens"] > 0
        assert tiny.backend(spec, **config).update(tiny.rows(), grpo, tiny.plan()).metrics == pytest.approx(plain)


@pytest.mark.heavy("PyTorch compiles layers")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own doings
def test_compiled_layers_compute_the_same(spec, grpo, monkeypatch):
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # no processes that stay behind
    metrics = tiny.backend(spec, compile=True).update(tiny.rows(), grpo, tiny.plan()).metrics
    assert metrics == pytest.approx(updated(spec, grpo, tiny.rows())[1].metrics, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_batches_are_profiled_on_demand(spec, grpo, tmp_path):
    backend = tiny.backend(spec, profile=(1,), profile_folder=str(tmp_path / "traces"))
    for seed in range(3):
        backend.update(tiny.rows(seed=seed), grpo, tiny.plan())
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name == "batch-1.json"
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::scaled_dot_product_attention" in names


def test_operations_are_counted_by_hand(spec, grpo):
    """2 layers of width 32, MLP 64, vocabulary 17: 2 operations a weight and token forward, twice as many backward."""
    rows = [row for row in tiny.rows() if row.loss_mask.any()]
    metrics = tiny.backend(spec).update(rows, grpo, tiny.plan()).metrics
    lengths, targets = [len(row.token_ids) - 1 for row in rows], sum(row.loss_mask.sum() for row in rows)
    body = 2 * (4 * 32 * 32 + 3 * 32 * 64)
    forward = 2 * body * sum(lengths) + 2 * 17 * 32 * targets + 2 * 4 * 32 * sum(one * one for one in lengths) / 2
    assert metrics["tflop"] == pytest.approx(3 * forward / 1e12)
    assert metrics["computed_tokens"] == sum(lengths)


def test_autocast_computes_in_bfloat16_and_keeps_float32_masters(spec, grpo):
    backend = tiny.backend(spec, autocast="bfloat16")
    metrics = backend.update(tiny.rows(), grpo, tiny.plan()).metrics
    assert metrics["loss"] == pytest.approx(updated(spec, grpo, tiny.rows())[1].metrics["loss"], abs=0.02)
    assert {parameter.dtype for parameter in backend._masters.masters.values()} == {torch.float32}


@pytest.mark.parametrize(("dtype", "known"), [("float32", "F32"), ("bfloat16", "BF16"), ("float16", "F16")])
def test_served_tensors_are_the_checkpoint_in_the_served_dtype(spec, dtype, known):
    backend = tiny.backend(dataclasses.replace(spec, dtype=dtype))
    served = backend.served_tensors()
    stored = load_file(spec.folder / "model.safetensors")
    assert served.keys() == stored.keys()  # the tied head only once
    for name, tensor in served.items():
        assert (tensor.dtype, tensor.shape) == (known, stored[name].shape)
        expected = torch.from_numpy(stored[name]).to(getattr(torch, dtype)).reshape(-1).view(torch.uint8)
        assert bytes(tensor.data) == expected.numpy().tobytes()


def test_served_tensors_are_a_copy(spec, grpo):
    backend = tiny.backend(spec)
    served = dict(backend.served_tensors())
    before = {name: bytes(tensor.data) for name, tensor in served.items()}
    backend.update(tiny.rows(), grpo, tiny.plan())
    assert {name: bytes(tensor.data) for name, tensor in served.items()} == before


def test_export_is_an_ordinary_folder(spec, grpo, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    template = "{{ messages[-1]['content'] }}="
    backend = tiny.backend(dataclasses.replace(spec, dtype="bfloat16", chat_template=template))
    backend.update(tiny.rows(), grpo, tiny.plan())
    target = tmp_path / "final"
    target.mkdir()
    backend.export(target)
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.dtype == torch.bfloat16
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    for name, tensor in backend.served_tensors().items():
        assert bytes(tensor.data) == model.get_parameter(name).detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "3+4"}], tokenize=False) == "3+4="
    exported = open_renderer(dataclasses.replace(spec, folder=target))
    assert exported.render([ChatMessage(role="user", content="3+4")]) == (4, 11, 5, 15)


def test_an_algorithm_that_needs_more_is_refused(spec, grpo):
    grpo.needs = frozenset({"values"})
    with pytest.raises(ConfigError, match="values"):  # there is no critic
        tiny.backend(spec).update(tiny.rows(), grpo, tiny.plan())


# --------------------------------------------------------------------------------------------- the reference


def distance(backend, rows):
    """Mean k3 from version 0."""
    policy, reference = backend.logprobs(rows), backend.reference_logprobs(rows, 64)
    d = np.concatenate([r - p for p, r in zip(policy, reference, strict=True)])
    return float(np.mean(np.expm1(d) - d))


def test_the_reference_is_what_the_run_began_with(spec):
    algorithm = Grpo(Grpo.Config(kl_coef=0.1))
    backend, update = updated(spec, algorithm, tiny.rows())
    assert update.metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert distance(backend, tiny.rows()) > 1e-3
    fresh = tiny.backend(spec)
    for found, expected in zip(backend.reference_logprobs(tiny.rows(), 20), fresh.logprobs(tiny.rows()), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert backend.update(tiny.rows(), algorithm, tiny.plan()).metrics["kl"] > 1e-3


def test_without_kl_no_reference_is_held(spec, grpo):
    backend, update = updated(spec, grpo, tiny.rows())
    assert backend._reference is None
    assert "kl" not in update.metrics


@pytest.mark.slow
@pytest.mark.law("replay")
@pytest.mark.parametrize("changes", [{}, {"minibatches": 2, "updates_per_batch": 2, "tokens_per_microbatch": 30}])
def test_with_a_reference_a_restart_changes_no_bit(spec, tmp_path, changes):
    algorithm, plan = Grpo(Grpo.Config(kl_coef=0.5)), tiny.plan(**changes)
    through = tiny.backend(spec)
    for number in range(4):
        through.update(tiny.rows(seed=number), algorithm, plan)
        if number == 1:
            (tmp_path / "middle").mkdir()
            through.save(tmp_path / "middle")
    resumed = tiny.backend(spec)
    resumed.load(tmp_path / "middle")
    for number in (2, 3):
        resumed.update(tiny.rows(seed=number), algorithm, plan)
    assert tiny.whole_state(resumed, tmp_path / "resumed") == tiny.whole_state(through, tmp_path / "through")
