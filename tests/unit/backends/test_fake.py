import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors import safe_open

from rftstream.algorithms.base import TrainingRow
from rftstream.algorithms.grpo import Grpo
from rftstream.backends.base import OptimizerSettings, UpdatePlan
from rftstream.backends.fake import FakeBackend
from rftstream.errors import ConfigError, WeightsError
from rftstream.models.spec import ModelSpec
from rftstream.policies import fake_model
from tests.suite.each import each

PLAN = UpdatePlan(lr=1e-6, minibatches=1, updates_per_batch=1, max_grad_norm=1.0, tokens_per_microbatch=1024)


def backend(tmp_path, dtype="bfloat16", seed=0, **config):
    spec = ModelSpec(name="fake", folder=tmp_path, dtype=dtype, context=None)
    opened = FakeBackend(FakeBackend.Config(**config), model=spec, optimizer=OptimizerSettings(), seed=seed)
    opened.open()
    return opened


def row(prompt, completion, advantage):
    ids = np.frombuffer((prompt + completion).encode() + b"\0", np.uint8).astype(np.int32)
    mask = (np.arange(len(ids)) >= len(prompt)).astype(np.float32)
    return TrainingRow(token_ids=ids, loss_mask=mask, behavior_logprobs=-mask, advantages=mask * advantage)


ROWS = [row("3+4=", "7", 1.0), row("3+4=", "9", -1.0), row("5*6=", "30", 0.5)]


def served(opened):
    return {name: bytes(tensor.data) for name, tensor in opened.served_tensors().items()}


def train(opened, rows=ROWS):
    return opened.update(rows, Grpo(Grpo.Config()), PLAN)


def test_right_answers_that_were_rewarded_raise_the_skill(tmp_path):
    for flip, sign in ((1, 1), (-1, -1)):
        opened = backend(tmp_path)
        rows = [dataclasses.replace(one, advantages=flip * one.advantages) for one in ROWS]
        assert sign * (train(opened, rows).metrics["skill"] + 1.0) > 0


def test_the_gradient_by_hand(tmp_path):
    p = fake_model.right_probability(-1.0, "3+4=")
    metrics = train(backend(tmp_path, skill_rate=1.0), ROWS[:2]).metrics
    assert metrics["skill"] == pytest.approx(-1.0 + (1 * (1 - p) + -1 * (0 - p)) / 2)


def test_weights_depend_on_what_was_trained_in_which_order(tmp_path):
    histories = {}
    for name, batches in {
        "a": [ROWS, ROWS[:2]], "same": [ROWS, ROWS[:2]], "order": [ROWS[:2], ROWS], "rows": [ROWS[::-1], ROWS[:2]],
    }.items():  # fmt: skip
        opened = backend(tmp_path)
        for rows in batches:
            train(opened, rows)
        histories[name] = served(opened)["fake.filler"]
    assert histories["a"] == histories["same"]
    assert len(set(histories.values())) == 3
    assert served(backend(tmp_path, seed=1)) != served(backend(tmp_path))


def test_a_batch_changes_an_eighth_of_the_filler(tmp_path):
    opened = backend(tmp_path, dtype="float32", elements=800)
    before = fake_model.read(opened.served_tensors()["fake.filler"])
    train(opened)
    changed = (before != fake_model.read(opened.served_tensors()["fake.filler"])).sum()
    assert 90 <= changed <= 100


def test_nan_batches_change_nothing_served_and_are_counted_over_a_restart(tmp_path):
    opened = backend(tmp_path, nan_at=(1, 2))
    assert not train(opened).skipped
    before = served(opened)
    assert train(opened).skipped
    assert served(opened) == before
    opened.save(tmp_path)
    successor = backend(tmp_path, nan_at=(1, 2))
    successor.load(tmp_path)
    assert train(successor).skipped
    assert not train(successor).skipped


def test_save_and_load_go_on_bit_for_bit(tmp_path):
    opened = backend(tmp_path)
    train(opened)
    opened.save(tmp_path)
    train(opened, ROWS[:2])
    successor = backend(tmp_path, seed=5)
    successor.load(tmp_path)
    train(successor, ROWS[:2])
    assert served(successor) == served(opened)
    with pytest.raises(ConfigError, match=r"has no fake\.json"):
        successor.load(tmp_path / "nowhere")


def test_export_is_readable(tmp_path):
    opened = backend(tmp_path)
    opened.export(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "fake"
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        assert sorted(file.keys()) == ["fake.filler", "fake.skill"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_served_values_come_back(dtype):
    values = np.asarray([0.0, -1.0, 0.5, 127 / 128, -3.0], np.float32)
    assert fake_model.read(fake_model.serve(values, dtype)).tolist() == values.tolist()


def test_bfloat16_rounds_to_even_as_torch_does():
    import torch

    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    values[:2] = [1.00390625, 1.01171875]  # half way between two
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy().tobytes()
    assert fake_model.serve(values, "bfloat16").data == expected


def test_foreign_weights_are_refused():
    with pytest.raises(WeightsError, match=r"weights 1/2: got x, expected fake\.filler"):
        fake_model.read_skill({"x": fake_model.serve(np.zeros(1, np.float32), "float32")}, where="weights 1/2")


@each(("text", "answer"), [
    ("3+4=", "7"), ("What is 12 * 3?", "36"), ("1+1=\n9 - 12 =", "-3"), ("hello", None),
])  # fmt: skip
def test_sums_are_solved(text, answer):
    assert fake_model.solve(text) == answer


def test_fakes_need_no_torch():
    code = (
        "import sys; import rftstream.backends.fake, rftstream.policies.fake, rftstream.algorithms.grpo, "
        "rftstream.models.rendering, rftstream.models.folders.folder; "
        "assert not {'torch', 'transformers', 'tokenizers', 'jinja2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_root())


def tmp_root():
    from pathlib import Path

    return Path(__file__).parents[3]
