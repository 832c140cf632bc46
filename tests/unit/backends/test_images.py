"""Training on images: loss and gradients are those of transformers' own forward pass, however rows are laid out."""

import dataclasses

import numpy as np
import pytest
import torch

from rftstream.algorithms.grpo import Grpo
from rftstream.backends.torch.network import load_model
from rftstream.config.sections import LoraSection
from rftstream.errors import ConfigError
from rftstream.models.folders.files import read_json
from rftstream.models.rendering import open_renderer
from tests.unit import tiny
from tests.unit.policies.test_images import PICTURES, plain_logits, plain_model, prompted, row_of

SAID = [(3, 4, 5, 0), (7, 7), (9, 0), (12, 13, 14, 15, 16), (4, 4, 0), (10, 3, 2)]


MODEL = {"seed": 5, "vision": True, "context": 128}


@pytest.fixture(scope="module")
def rows(spec):
    return make_rows(spec)


def make_rows(spec):
    """Rows of one image, of the same image, of two images, and of none."""
    shown = [PICTURES[:1], PICTURES[:1], PICTURES[1:3], [], PICTURES[2:], PICTURES[3:]]
    texts = ["12+3", "1+2", "<image>1<image>=", "7*8", "<image>+<image>", "3"]
    made = []
    for number, (images, text, said) in enumerate(zip(shown, texts, SAID, strict=True)):
        row = row_of(prompted(spec, number, images=images, text=text), said, temperature=1.0 if number % 2 else 0.7)
        made.append(dataclasses.replace(row, advantages=row.loss_mask * (number - 2.3), group=number // 2))
    return made


def plainly(spec, rows):
    """Loss of GRPO without clipping, sum(-advantage * exp(logp - logp_old)) / tokens, and its gradients, by
    transformers' own forward pass, one row at a time."""
    model, processor = plain_model(spec, tiny.backend(spec))
    num_tokens = sum(row.loss_mask.sum() for row in rows)
    total = 0.0
    for row in rows:
        if row.images:
            logits = plain_logits(spec, model, processor, row)
        else:
            ids = torch.from_numpy(row.token_ids).long()[None]
            logits = model(input_ids=ids).logits[0]
            logits = logits.index_fill(-1, torch.tensor([open_renderer(spec).images.token_id]), -torch.inf)
        ids = torch.from_numpy(row.token_ids).long()
        logprobs = (logits[:-1] / row.temperature).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        unmasked = torch.from_numpy(row.loss_mask)[1:] == 1
        logprobs, weight = logprobs[unmasked], torch.from_numpy(row.advantages)[1:][unmasked]
        loss = -((logprobs - logprobs.detach()).exp() * weight).sum() / float(num_tokens)
        loss.backward()
        total += float(loss.detach())
    return total, {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("tokens_per_microbatch", [16384, 70])
def test_loss_and_gradients_are_those_of_transformers(spec, rows, packing, tokens_per_microbatch, monkeypatch):
    expected_loss, expected = plainly(spec, rows)
    backend = tiny.backend(spec, packing=packing)
    found = {}

    def step(lr, *, scale=1.0):
        found.update((name, one.grad.clone()) for name, one in backend._parameters.items() if one.grad is not None)
        backend._masters.drop_gradients()

    monkeypatch.setattr(backend._masters, "step", step)
    grpo = Grpo(Grpo.Config(correction="none"))
    update = backend.update(rows, grpo, tiny.plan(tokens_per_microbatch=tokens_per_microbatch))
    assert update.metrics["loss"] == pytest.approx(expected_loss, abs=1e-6)
    assert found.keys() == expected.keys()
    seen = [name for name in found if "vision_tower" in name or "projector" in name]
    assert all(float(found[name].abs().max()) > 0 for name in seen if "class_embedding" not in name)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_frozen_tower_stays_and_the_rest_is_trained(spec, rows):
    backend = tiny.backend(spec, freeze_vision_tower=True)
    before = tiny.state(backend)
    backend.update(rows, Grpo(Grpo.Config(correction="none")), tiny.plan())
    after = tiny.state(backend)
    changed = {name for name in before if before[name] != after[name]}
    assert not any("vision_tower" in name for name in changed)
    assert all(name in changed for name in before if "projector" in name or "language_model.layers" in name)
    assert before.keys() == after.keys()


@pytest.mark.slow
def test_a_frozen_tower_has_no_adapters(spec, rows):
    pytest.importorskip("peft")
    adapted = dataclasses.replace(spec, lora=LoraSection(rank=4, alpha=8.0))
    whole, frozen = (set(tiny.state(tiny.backend(adapted, freeze_vision_tower=one))) for one in (False, True))
    assert any("projector" in name for name in frozen)
    assert whole - frozen == {name for name in whole if "vision_tower" in name} != set()


@pytest.mark.slow
def test_an_update_is_the_same_to_the_bit_and_goes_on_from_a_checkpoint(spec, rows, tmp_path):
    grpo = Grpo(Grpo.Config(correction="none"))
    first, second = tiny.backend(spec), tiny.backend(spec)
    for backend in (first, second):
        backend.update(rows, grpo, tiny.plan())
    assert tiny.state(first) == tiny.state(second)
    tiny.whole_state(first, tmp_path / "saved")
    third = tiny.backend(spec)
    third.load(tmp_path / "saved")
    for backend in (second, third):
        backend.update(rows[::-1], grpo, tiny.plan(minibatches=2))
    assert tiny.state(second) == tiny.state(third)


@pytest.mark.slow
def test_an_exported_model_is_an_ordinary_folder(spec, rows, tmp_path):
    backend = tiny.backend(spec)
    backend.update(rows, Grpo(Grpo.Config(correction="none")), tiny.plan())
    backend.export(tmp_path)
    again = dataclasses.replace(spec, folder=tmp_path)
    theirs = tiny.backend(again)
    for ours, other in zip(backend.logprobs(rows), theirs.logprobs(rows), strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-6)
    assert read_json(tmp_path / "preprocessor_config.json")["image_processor_type"] == "CLIPImageProcessor"


@pytest.mark.slow
def test_names_of_older_checkpoints_are_trained_too(spec, rows, tmp_path):
    model = load_model(spec, torch.device("cpu"))
    model.save_pretrained(tmp_path)  # as they are on the hub
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((spec.folder / name).read_bytes())
    older = tiny.backend(dataclasses.replace(spec, folder=tmp_path))
    for ours, other in zip(tiny.backend(spec).logprobs(rows), older.logprobs(rows), strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-6)


@pytest.mark.slow
def test_a_model_of_text_has_no_tower_to_freeze(tmp_path):
    with pytest.raises(ConfigError, match="freeze_vision_tower: the model has no vision tower"):
        tiny.backend(tiny.make(tmp_path), freeze_vision_tower=True)
