"""A plain GRPO loop, that of docs/python.md, and the backend `torch` on the same batches."""

import dataclasses
import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import rftstream
from rftstream.algorithms.grpo import Grpo
from rftstream.backends.base import OptimizerSettings
from rftstream.backends.joined import JoinedBackend, TrainerDesk
from rftstream.backends.joined_weights import ModelWeights
from rftstream.desk import AnswerRefused
from rftstream.joined.trainer import JoinedTrainer
from rftstream.weights.tensors import as_tensor
from tests.docs.reading import ROOT, blocks
from tests.unit import tiny

LR = 1e-3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("model"))


def as_role(desk, spec, batches, states):
    """Train the batches as the role does, in its thread, without a log."""
    backend = JoinedBackend(JoinedBackend.Config(), model=spec, optimizer=OptimizerSettings(), seed=0, desk=desk)
    backend.open()
    states.append(tiny.state(backend))
    desk.version = 0
    for number, rows in enumerate(batches):
        backend.begin_batch(number, ())
        backend.update(rows, Grpo(Grpo.Config()), tiny.plan(lr=LR))
        states.append(tiny.state(backend))
        with desk.changed:
            desk.version = number + 1
            desk.notify()
    desk.end()


def test_the_loop_of_the_page_gives_the_weights_of_the_backend(made, monkeypatch):
    trained, batches = tiny.backend(made), []
    expected = [tiny.state(trained)]
    for number in range(3):
        rows = tiny.rows(seed=number)
        on_policy = [dataclasses.replace(row, behavior_logprobs=logprobs)
                     for row, logprobs in zip(rows, trained.logprobs(rows), strict=True)]  # fmt: skip
        batches.append(on_policy)
        trained.update(on_policy, Grpo(Grpo.Config()), tiny.plan(lr=LR))
        expected.append(tiny.state(trained))
    desk, states = TrainerDesk(), []
    monkeypatch.setattr(rftstream, "join", lambda run, role: JoinedTrainer(desk), raising=False)
    role = threading.Thread(target=as_role, args=(desk, made, batches, states), daemon=True)
    role.start()
    (loop,) = (block.text for block in blocks(ROOT / "docs" / "python.md", "python") if 'role="trainer"' in block.text)
    assert len(loop.splitlines()) <= 40
    exec(compile(loop, "docs/python.md", "exec"), {})
    role.join()
    assert [state.keys() for state in states] == [state.keys() for state in expected]
    assert states[0] == expected[0]
    for version in range(1, 4):
        for name in expected[0]:
            of_version = (expected[version - 1], expected[version], states[version])
            before, ours, theirs = (np.frombuffer(state[name], np.float32) for state in of_version)
            assert np.abs(theirs - ours).mean() < 1e-3 * np.abs(ours - before).mean(), (version, name)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_names_of_the_loaded_model_and_of_wrappers_are_taken(made, prefix):
    weights = ModelWeights(made)
    model = AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32)
    state = {prefix + name: one for name, one in model.state_dict().items()}
    served, expected = weights.served(state), tiny.state(tiny.backend(made))
    assert bytes_of(served) == expected
    model.load_state_dict(weights.state(served))
    assert bytes_of(weights.served({name: as_tensor(one) for name, one in served.items()})) == expected
    name = next(iter(state))
    with pytest.raises(AnswerRefused, match=r"lack 1 .* of the model's"):
        weights.served({key: one for key, one in state.items() if key != name})
    with pytest.raises(AnswerRefused, match=r"have other 1 \('extra'\)"):
        weights.served({**model.state_dict(), "extra": torch.ones(1)})


def bytes_of(served):
    return {name: bytes(one.data) for name, one in served.items()}
