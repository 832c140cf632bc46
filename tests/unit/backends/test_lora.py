import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
import transformers

from rftstream.algorithms.grpo import Grpo
from rftstream.config.sections import LoraSection, MakeModel, ModelSection
from rftstream.errors import ConfigError, WeightsError
from rftstream.models.folders.folder import prepare_model
from rftstream.weights.adapters import whole_tensors
from rftstream.weights.snapshot import RawTensor, state_digest
from tests.unit import tiny

pytestmark = pytest.mark.slow

NUM_LAYERS = 2 * 7


def spec_of(folder, *, dtype="float32", **lora):
    section = ModelSection(make=MakeModel(width=32), dtype=dtype, lora=LoraSection(**{"rank": 4, "alpha": 8.0, **lora}))
    return prepare_model(section, folder / "tiny", 0)


@pytest.fixture
def spec(tmp_path):
    return spec_of(tmp_path)


@pytest.fixture
def grpo():
    return Grpo(Grpo.Config())


def copied(backend):
    """As a reader gets them."""
    return {name: RawTensor(one.dtype, one.shape, bytearray(one.data)) for name, one in
            backend.served_tensors().items()}  # fmt: skip


def arrays(tensors):
    return {name: np.frombuffer(one.data, np.float32).reshape(one.shape) for name, one in tensors.items()}


def test_adapters_alone_are_trained_published_and_saved(spec, grpo, tmp_path):
    backend = tiny.backend(spec)
    model = backend._network.model
    frozen = {name: one.detach().clone() for name, one in model.named_parameters() if ".lora_" not in name}
    before = tiny.state(backend)
    update = backend.update(tiny.rows(), grpo, tiny.plan())
    assert update.metrics["grad_norm"] > 0
    for name, one in frozen.items():
        assert torch.equal(model.get_parameter(name), one), name
    after = tiny.state(backend)
    assert len(after) == 2 * NUM_LAYERS
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in after
    changed = {name.rpartition(".lora_")[2][0] for name in after if after[name] != before[name]}
    assert changed == {"B"}  # which begins at 0, so the first gradient of A is 0
    saved = tiny.whole_state(backend, tmp_path / "saved")
    assert len(saved["masters.safetensors"]) < 4 * sum(one.numel() for one in frozen.values())
    assert spec.name.endswith("+lora")


def test_version_0_is_the_model(spec):
    plain = tiny.backend(dataclasses.replace(spec, lora=None))
    backend = tiny.backend(spec)
    for found, expected in zip(backend.logprobs(tiny.rows()), plain.logprobs(tiny.rows()), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_the_policy_samples_from_what_is_trained(spec, grpo):
    backend = tiny.backend(spec)
    policy = tiny.policy(spec, copied(backend))
    for version in (1, 2):
        for seed in range(3):
            backend.update(tiny.rows(seed=seed), grpo, tiny.plan())
        policy.load(copied(backend), tiny.name(version))
        done = tiny.drain_one(policy, tiny.request(version))
        tokens = np.concatenate([tiny.request(0).token_ids, done.token_ids]).astype(np.int32)
        mask = np.zeros(len(tokens), np.float32)
        mask[-len(done.token_ids) :] = 1
        row = dataclasses.replace(tiny.rows(1)[0], token_ids=tokens, loss_mask=mask)
        (found,) = backend.logprobs([row])
        np.testing.assert_allclose(done.behavior_logprobs, found[-len(done.token_ids) :], atol=1e-5)


def test_weights_do_not_depend_on_versions_seen_before(spec, grpo):
    backend = tiny.backend(spec)
    versions = [copied(backend)]
    for seed in range(2):
        backend.update(tiny.rows(seed=seed), grpo, tiny.plan())
        versions.append(copied(backend))
    late = tiny.policy(spec, versions[-1])
    early = tiny.policy(spec, versions[0])
    early.load(versions[1], tiny.name(1))
    early.load(versions[2], tiny.name(2))
    for name, one in late._model.parameters.items():
        assert torch.equal(one, early._model.parameters[name]), name


def test_the_reference_is_the_model_without_adapters(spec, grpo):
    backend = tiny.backend(spec)
    before = backend.logprobs(tiny.rows())
    for seed in range(3):
        backend.update(tiny.rows(seed=seed), Grpo(Grpo.Config(kl_coef=0.1)), tiny.plan())
    reference = backend.reference_logprobs(tiny.rows(), 64)
    assert backend._reference.model is backend._network.model
    for found, expected in zip(reference, before, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    moved = np.abs(np.concatenate(backend.logprobs(tiny.rows())) - np.concatenate(before)).max()
    assert moved > 1e-2


@pytest.mark.parametrize("config", [{}, {"autocast": "bfloat16", "gradient_checkpointing": True}])
def test_a_restart_changes_no_bit(spec, tmp_path, config):
    algorithm = Grpo(Grpo.Config(kl_coef=0.5))
    through = tiny.backend(spec, **config)
    through.update(tiny.rows(seed=1), algorithm, tiny.plan())
    (tmp_path / "middle").mkdir()
    through.save(tmp_path / "middle")
    through.update(tiny.rows(seed=2), algorithm, tiny.plan(minibatches=2))
    resumed = tiny.backend(spec, **config)
    resumed.load(tmp_path / "middle")
    resumed.update(tiny.rows(seed=2), algorithm, tiny.plan(minibatches=2))
    assert state_digest(resumed.served_tensors()) == state_digest(through.served_tensors())
    assert tiny.whole_state(resumed, tmp_path / "a") == tiny.whole_state(through, tmp_path / "b")


def test_matrices_are_held_in_what_they_are_computed_in(spec, grpo):
    plain = tiny.backend(dataclasses.replace(spec, lora=None), autocast="bfloat16", parameters="float32")
    backend = tiny.backend(spec, autocast="bfloat16")
    layer = backend._network.model.model.layers[0].mlp.up_proj
    assert (layer.base_layer.weight.dtype, layer.lora_A["default"].weight.dtype) == (torch.bfloat16, torch.float32)
    for found, expected in zip(backend.logprobs(tiny.rows()), plain.logprobs(tiny.rows()), strict=True):
        np.testing.assert_array_equal(found, expected)  # what autocast rounds is rounded already
    assert backend.update(tiny.rows(), grpo, tiny.plan()).metrics["grad_norm"] > 0


def test_final_is_the_merged_model_and_the_adapter_apart(spec, grpo, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    backend = tiny.backend(spec)
    for seed in range(3):
        backend.update(tiny.rows(seed=seed), grpo, tiny.plan())
    final = tmp_path / "final"
    final.mkdir()
    backend.export(final)
    merged = AutoModelForCausalLM.from_pretrained(final)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(spec.folder), str(final / "adapter"))
    token_ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = backend._network.model(input_ids=token_ids).logits
        start = AutoModelForCausalLM.from_pretrained(spec.folder)(input_ids=token_ids).logits
        for model in (merged, adapted):
            torch.testing.assert_close(model(input_ids=token_ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert (start - expected).abs().max() > 1e-2
    settings = json.loads((final / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (4, 8.0, "all-linear")


def test_merged_weights_by_hand(tmp_path, grpo):
    spec = spec_of(tmp_path, targets=("q_proj",))
    backend = tiny.backend(spec)
    backend.update(tiny.rows(), grpo, tiny.plan())
    served = arrays(copied(backend))
    assert len(served) == 2 * 2
    stem = "base_model.model.model.layers.1.self_attn.q_proj"
    name, other = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"
    whole = arrays(whole_tensors(spec, copied(backend), [name, other], where="test"))
    base = tiny.backend(dataclasses.replace(spec, lora=None)).served_tensors()
    expected = arrays({key: base[key] for key in (name, other)})
    expected[name] = expected[name] + 2.0 * served[f"{stem}.lora_B.weight"] @ served[f"{stem}.lora_A.weight"]
    np.testing.assert_allclose(whole[name], expected[name], rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(whole[other], expected[other])


@pytest.mark.parametrize("targets", ["all-linear", ("c_proj", "c_fc")])
def test_matrices_that_lie_transposed_are_adapted(tmp_path, grpo, targets):
    """GPT-2's are [in, out], and some of them square."""
    config = transformers.GPT2Config(vocab_size=tiny.VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    folder, made = tmp_path / "gpt2", spec_of(tmp_path)
    shutil.copytree(made.folder, folder)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    spec = dataclasses.replace(made, folder=folder, lora=LoraSection(rank=4, alpha=8.0, targets=targets))
    backend = tiny.backend(spec)
    for seed in range(3):
        backend.update(tiny.rows(seed=seed), grpo, tiny.plan())
    exported, plain = tmp_path / "exported", dataclasses.replace(spec, lora=None)
    exported.mkdir()
    backend.export(exported)
    merged = tiny.backend(dataclasses.replace(plain, folder=exported)).logprobs(tiny.rows())
    for found, expected, before in zip(
        merged, backend.logprobs(tiny.rows()), tiny.backend(plain).logprobs(tiny.rows()), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert not np.allclose(found, before, atol=1e-3)
    assert json.loads((exported / "adapter" / "adapter_config.json").read_text())["fan_in_fan_out"]


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda found: found.pop(sorted(found)[0]), "is missing"),
        (lambda found: found.update({"model.norm.weight": found[sorted(found)[0]]}), "not one of an adapter"),
        (lambda found: found.update({name.replace("layers.1", "layers.9"): found.pop(name) for name in sorted(found)}),
         "another model"),
    ],
)  # fmt: skip
def test_what_are_no_adapters_of_the_model_is_refused(spec, damage, what):
    tensors = copied(tiny.backend(spec))
    policy = tiny.policy(spec, dict(tensors))
    damage(tensors)
    with pytest.raises(WeightsError, match=what):
        policy.load(tensors, tiny.name(1))


def test_adapters_of_another_rank_are_refused(spec, tmp_path):
    other = copied(tiny.backend(spec_of(tmp_path / "other", rank=8)))
    with pytest.raises(WeightsError, match="rank 4"):
        tiny.policy(spec, other)


@pytest.mark.parametrize(("targets", "what"), [(("nothing",), "nothing"), (("lm_head",), "head"),
                                               (("embed_tokens",), "Embedding")])  # fmt: skip
def test_targets_that_can_not_be_adapted_are_refused(tmp_path, targets, what):
    with pytest.raises(ConfigError, match=rf"model\.lora\.targets: .*{what}"):
        tiny.backend(spec_of(tmp_path, targets=targets))


def test_the_fake_model_has_nothing_to_adapt(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.lora"):
        prepare_model(ModelSection(path="fake", lora=LoraSection()), tmp_path, 0)
