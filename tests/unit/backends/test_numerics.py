import dataclasses

import pytest
import torch

from rftstream.backends.numerics import FORMULAS, peak_tflops, why_not_equal
from rftstream.config import loader
from rftstream.config.role_sections import TrainerSection
from rftstream.replay.again import with_prefixes_of
from rftstream.roles.trainer.training import Training


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H200", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA L4", 121),
                                            ("NVIDIA L40S", 362), ("Something else", None)])  # fmt: skip
def test_devices_are_known_by_their_names(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops("cuda:0") == peak
    assert peak_tflops("cpu") is None


def test_speeds_of_a_step():
    training = Training(backend=None, algorithm=None, settings=TrainerSection(peak_tflops=10.0))
    values = {"computed_tokens": 3000.0, "tflop": 4.0}
    assert training.speeds(values, 2.0) == {"computed_tokens_per_s": 1500.0, "mfu": 0.2}
    assert training.speeds(values, 0.0) == training.speeds({}, 2.0) == {}
    unknown = dataclasses.replace(training, settings=TrainerSection())
    assert unknown.speeds(values, 2.0) == {"computed_tokens_per_s": 1500.0}


@pytest.mark.parametrize(
    ("formulas", "backend", "shares", "is_repeated"),
    [(None, "torch", False, False), ("2", "torch", False, True), ("2", "deepspeed", False, True),
     ("2", "fake", None, True), (FORMULAS, "torch", None, True)],
)  # fmt: skip
def test_a_run_from_before_shared_prefixes_is_replayed_without_them(formulas, backend, shares, is_repeated, run_file):
    config = loader.replace(loader.load([run_file], env={}), trainer__backend=backend)
    said = {"device": "cpu"} | ({} if formulas is None else {"formulas": formulas})
    assert with_prefixes_of(config, said).backends.get(backend, {}).get("share_prefixes") is shares
    assert (not why_not_equal([said], {"device": "cpu", "formulas": FORMULAS})) is is_repeated
