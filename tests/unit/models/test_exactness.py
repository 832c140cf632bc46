"""Every family of causal language models that transformers has: trainer and sampler compute what eager attention
computes of one row at a time, or refuse the model."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rftstream.algorithms.base import TrainingRow
from rftstream.algorithms.grpo import Grpo
from rftstream.backends.passes import Passes
from rftstream.backends.torch import paths
from rftstream.backends.torch.critic import ValueNetwork, load_critic
from rftstream.backends.torch.inputs import make_inputs
from rftstream.backends.torch.network import Network, NetworkSettings, load_model, recompute_activations
from rftstream.backends.torch.scorer import load_scorer
from rftstream.config import loader
from rftstream.contracts.beside import uniform
from rftstream.contracts.versions import WeightsKind
from rftstream.errors import ConfigError
from rftstream.models.exactness import check_model, outline
from rftstream.models.folders.tiny_copy import VOCABULARY, tiny_config
from rftstream.models.offload import held_tensors
from rftstream.models.routers import Routers, Routing
from rftstream.models.spec import ModelSpec
from rftstream.preflight.checks.check import check
from rftstream.weights.checkpoint_names import names_of
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.publisher import WeightsPublisher
from rftstream.weights.stores.store import ObjectStore
from tests.families import CONFIGS, OWN_ATTENTION, PACKED, REFUSED, SLOWER, STATES, UNMADE, WITHOUT_CACHE
from tests.suite.sampling import cases
from tests.unit import tiny

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # of gpt_bigcode

CPU = torch.device("cpu")
LENGTHS = (40, 3, 17, 9, 25)
GRPO = Grpo(Grpo.Config(correction="none"))
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
SEVERAL = tiny.plan(tokens_per_microbatch=45)
NEVER_RECOMPUTED = {"ctrl", "gpt_neox_japanese", "openai-gpt"}
"""Families whose layers cannot be recomputed in the backward pass."""
QUICK = (
    *("llama", "bloom", "gpt_oss", "gemma2", "llama4_text", "mamba", "bert"),
    *("qwen3_moe", "deepseek_v3", "lfm2", "phimoe", "seed_oss"),
)
"""Families that every run has: one for each way to fail."""


def made(family, folder):
    """A model folder of a family with random weights, or an error of transformers."""
    config = tiny_config(transformers.CONFIG_MAPPING[family](**copy.deepcopy(CONFIGS.get(family, {}))))
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    vocabulary = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary)).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "t1"}))
    return model, ModelSpec(name=family, folder=folder, dtype="float32", context=100)


def true_logprobs(model, token_ids):
    """Logprobs of a row's tokens from the second on, with eager attention and no cache."""
    logits = model(input_ids=torch.tensor(np.asarray(token_ids)[None]), use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(np.asarray(token_ids))[1:, None])[:, 0]


def assert_checkpoint_names(spec, loaded):
    """A loaded model's weights are read and written under the names of its folder, and nothing else is in it."""
    saved = load_file(spec.folder / "model.safetensors")
    held = held_tensors(loaded)
    names = names_of(loaded, spec.folder)
    read = names.read(held)
    assert read.keys() | names.kept.keys() == saved.keys()
    assert all(torch.equal(read[name], saved[name]) for name in read)
    before = {name: tensor.clone() for name, tensor in held.items()}
    for tensor in held.values():
        tensor.detach().zero_()
    for name, tensor in saved.items():
        names.place(name).write(held, tensor)
    assert all(torch.equal(held[name], tensor) for name, tensor in before.items())


def assert_experts_are_whole(loaded):
    """The experts of a layer are one module, whatever tokens take. So ZeRO 3 gathers them at once, in all ranks."""
    routers = Routers.of(loaded)
    for router in () if routers is None else routers.routers:
        layer = loaded.get_submodule(router.name.rpartition(".")[0])
        assert not any(isinstance(module, torch.nn.ModuleList) for module in layer.modules())


@torch.no_grad()
def assert_experts_are_replayed(loaded, family):
    """Forced on its own experts a mixture computes the same bits, and on others something else; but for Phi-MoE."""
    if (routers := Routers.of(loaded)) is None:
        return
    token_ids = torch.arange(2, 9)[None]
    before = loaded(input_ids=token_ids, use_cache=False).logits
    if family == "phimoe":
        with pytest.raises(ConfigError, match="does not choose experts by a topk"):
            Routing.of(loaded, where="here")
        return
    routing = Routing.of(loaded, where="here")
    assert len(routing.layers) == len(routers.routers)
    with routing.recorded() as experts:
        loaded(input_ids=token_ids, use_cache=False)
    own = experts()
    sizes = torch.tensor([layer.num_experts for layer in routing.layers for _ in range(layer.num_chosen)])
    for forced, is_same in ((own, True), ((own + 1) % sizes, False)):
        routing.force(uniform(forced.numpy().astype(routing.dtype)), CPU)
        assert torch.equal(loaded(input_ids=token_ids, use_cache=False).logits, before) is is_same
    routing.force(None, CPU)


def rows():
    random = np.random.default_rng(0)
    ids = [random.integers(2, VOCABULARY, length).astype(np.int32) for length in LENGTHS]
    zeros = [np.zeros(len(one), np.float32) for one in ids]
    return [
        TrainingRow(token_ids=one, loss_mask=zero + 1, behavior_logprobs=zero, advantages=zero)
        for one, zero in zip(ids, zeros, strict=True)
    ]


def sampled_rows():
    """The same rows as answers to prompts of a third, some better than others."""
    found = []
    for number, row in enumerate(rows()):
        mask_T = (np.arange(len(row.token_ids)) > len(row.token_ids) // 3).astype(np.float32)
        advantages_T = mask_T * (1.0 if number % 2 else -0.7)
        found.append(replace(row, loss_mask=mask_T, behavior_logprobs=-3 * mask_T, advantages=advantages_T))
    return found


@torch.no_grad()
def trained_error(loaded, model):
    """The largest error of the trainer's logprobs, packed and padded."""
    errors = []
    for packing in (True, False):
        network = Network(loaded, NetworkSettings(autocast=None, max_logits_bytes=1 << 20, packing=packing))
        found, _ = network.logprobs(make_inputs(rows(), CPU, packed=network.packs))
        errors += [
            float((one[1 : len(row.token_ids)] - true_logprobs(model, row.token_ids)).abs().max())
            for one, row in zip(found, rows(), strict=True)
        ]
    return max(errors)


def gradient_error(loaded, model, plan=SEVERAL):
    """The largest error of the gradients of a step in several micro-batches, in shares of each parameter's largest
    gradient, and its parameter."""
    network = Network(loaded, NetworkSettings(autocast=None, max_logits_bytes=1 << 20, packing=True))
    passes = Passes(network, sampled_rows(), plan, CPU)
    assert passes.num_microbatches > 1 or plan is not SEVERAL
    passes.accumulate(passes.minibatches[0], GRPO)
    found = {name: parameter.grad for name, parameter in loaded.named_parameters()}
    errors = []
    for name, parameter in model.named_parameters():
        true = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        ours = torch.zeros_like(parameter) if found[name] is None else found[name]
        errors.append((float((ours - true).abs().max() / true.abs().max().clamp(min=1e-4)), name))
    loaded.zero_grad()
    return max(errors)


def compute_gradients(model):
    """Let a model have the gradients of a step of GRPO, from one row at a time."""
    num_tokens = sum(row.loss_mask.sum() for row in sampled_rows())
    for row in sampled_rows():
        logprobs_T = true_logprobs(model, row.token_ids)
        ratios_T = (logprobs_T - logprobs_T.detach()).exp()
        (-(ratios_T * torch.from_numpy(row.advantages * row.loss_mask)[1:]).sum() / num_tokens).backward()


def sampled_error(policy, model):
    """The largest error of the sampler's logprobs, of siblings and rows that join one after another."""
    prompts = {number: rows()[row].token_ids[:-1].tolist() for number, row in enumerate((1, 0, 3, 0, 2))}
    done = {}
    for number, prompt in prompts.items():
        policy.submit(tiny.request(number, prompt, max_tokens=7))
        done |= {one.request_id: one for one in policy.step()}
    done |= tiny.drain(policy)
    errors = []
    for number, prompt in prompts.items():
        one = done[f"r{number}"]
        assert one.error is None and len(one.token_ids), one.error
        true = true_logprobs(model, [*prompt, *one.token_ids.tolist()])[len(prompt) - 1 :]
        errors.append(float(np.abs(one.behavior_logprobs - true.detach().numpy()).max()))
    return max(errors)


@pytest.mark.slow
@pytest.mark.parametrize("family", cases(sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - UNMADE), kept=QUICK, num=8))
def test_a_model_is_computed_as_it_is_or_refused(family, tmp_path):
    """What eager attention gives of one row at a time is what trainer and sampler give, logprobs and gradients. What
    they publish, follow and export is a checkpoint of the family."""
    model, spec = made(family, tmp_path)
    if family in REFUSED:
        for load in (lambda: load_model(spec, CPU), lambda: tiny.policy(spec)):
            with pytest.raises(ConfigError, match=REFUSED[family]):
                load()
        return
    backend = tiny.backend(spec)
    loaded = backend._network.model
    assert trained_error(loaded, model) < 1e-3
    path = paths.path_of(loaded)
    assert (path.rows is paths.Rows.PACKED) == path.shares == (family in PACKED)
    assert_checkpoint_names(spec, loaded)
    assert_experts_are_whole(loaded)
    assert_experts_are_replayed(loaded, family)
    publisher = WeightsPublisher(ObjectStore("file://weights", base=tmp_path), family, "float32", anchor_every=9)
    follower = WeightsFollower(ObjectStore("file://weights", base=tmp_path), family)
    policy = tiny.policy(spec)
    announce(publisher, follower, policy, backend, 0)
    assert sampled_error(policy, model) < 1e-3
    keeps_states = policy._model.keeps_states
    assert keeps_states == (family in PACKED - WITHOUT_CACHE | STATES | OWN_ATTENTION)
    check_model(outline(spec))
    compute_gradients(model)
    assert gradient_error(loaded, model) < (1e-3, "")
    assert backend.update(sampled_rows(), GRPO, tiny.plan(lr=1e-3)).metrics["grad_norm"] > 0
    announce(publisher, follower, policy, backend, 1)
    (tmp_path / "final").mkdir()
    backend.export(tmp_path / "final")
    exported, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "final", dtype=torch.float32, output_loading_info=True, **EAGER
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sampled_error(policy, exported) < 1e-3
    if family not in NEVER_RECOMPUTED:
        recompute_activations(backend._network.model)
        exported.zero_grad()
        compute_gradients(exported)
        assert gradient_error(loaded, exported) < (1e-3, "")


def announce(publisher, follower, policy, backend, version):
    """Bring a version from the trainer to the sampler by the store."""
    told = publisher.publish(backend.served_tensors(), tiny.name(version), resumed=version == 0)
    assert told.kind is (WeightsKind.delta if version else WeightsKind.full)
    assert follower.announced(told)
    policy.load(follower.fetch(told), told.name)


@pytest.mark.parametrize("family", sorted(NEVER_RECOMPUTED))
def test_layers_that_cannot_be_recomputed_are_said(family, tmp_path):
    """By `check`, too."""
    _, spec = made(family, tmp_path)
    saying = "has no layers that can be recomputed; leave it off"
    with pytest.raises(ConfigError, match=saying):
        tiny.backend(spec, gradient_checkpointing=True)
    run = run_of(tmp_path) | {"backends": {"torch": {"gradient_checkpointing": True}}}
    assert saying in " ".join(check(loader.from_dict(run)).errors)


def run_of(folder):
    tasksets = {"sums": {"source": "arithmetic", "reward": "exact"}}
    return {"run": {"name": "a", "steps": 1}, "model": {"path": str(folder)}, "tasksets": tasksets}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bloom", "gemma2", "gpt_oss", "llama"])
def test_critics_and_reward_models_are_computed_as_they_are(family, tmp_path):
    """They may be of another family than the policy. What stands before a token is valued."""
    _, spec = made(family, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path, num_labels=1, pad_token_id=0)
    model = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path)
    settings = NetworkSettings(autocast=None, max_logits_bytes=1 << 20, packing=True)
    for loaded in (load_critic(tmp_path, CPU, vocabulary=VOCABULARY), load_scorer(spec, CPU)[0]):
        network = ValueNetwork(loaded, settings)
        with torch.no_grad():
            values = network.values(make_inputs(rows(), CPU, packed=network.packs))
            for row, found in zip(rows(), values, strict=True):
                hidden = model.base_model(input_ids=torch.tensor(row.token_ids[None]), use_cache=False)[0]
                true = model.score(hidden)[0, :-1, 0]
                assert float((found[1 : len(row.token_ids)] - true).abs().max()) < 1e-3


def test_every_family_stands_in_one_table():
    """A new version of transformers brings new ones: docs/models.md shows these tables."""
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) == PACKED | SLOWER | set(REFUSED) | UNMADE
    assert len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) == len(PACKED) + len(SLOWER) + len(REFUSED) + len(UNMADE)


def test_an_encoder_with_a_decoder_is_refused(tmp_path):
    _, spec = made("bart", tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text()) | {"is_encoder_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    run = loader.from_dict(run_of(tmp_path))
    for compute in (lambda: load_model(spec, CPU), lambda: tiny.policy(spec)):
        with pytest.raises(ConfigError, match="bart is an encoder with a decoder, expected a decoder alone"):
            compute()
    assert "bart is an encoder with a decoder" in " ".join(check(run).errors)
