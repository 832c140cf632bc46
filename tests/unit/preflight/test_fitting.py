"""Sizes that `init` writes fit the machine it runs on, by the same estimate that `check` shows."""

from types import SimpleNamespace

import pytest

from rftstream.config.placement import Gpu, Machine
from rftstream.preflight.checks import fitting
from rftstream.preflight.memory import MAIN
from tests.configs import small_run

GB = 1 << 30


def machine(main, *gpus):
    return Machine(memory_bytes=main * GB, gpus=tuple(Gpu(name="GPU", memory_bytes=one * GB) for one in gpus))


def estimate(config, report):
    """A model that needs 4 GB and 1 GB for 1,024 tokens, where the trainer is; half without activations."""
    tokens = config.trainer.tokens_per_microbatch / 1_024
    recomputed = config.backends.get("torch", {}).get("gradient_checkpointing", False)
    needs = {config.trainer.device: 4 + tokens / (4 if recomputed else 1)}
    total = {MAIN if one == "cpu" else one: num for one, num in needs.items()}
    return SimpleNamespace(places=[MAIN, *total], total=lambda place: total.get(place, 1) * GB)


@pytest.mark.parametrize(("found", "tokens", "concurrent", "recomputed"), [
    (machine(64, 80), 32_768, 256, False),
    (machine(64, 24), None, None, False),
    (machine(64, 16), 8_192, None, False),
    (machine(64, 8), 4_096, None, True),
    (machine(64), None, None, False),
    (machine(6), 4_096, None, True),
    (machine(2), 1_024, 16, True),
])  # fmt: skip
def test_the_largest_that_fits_is_taken(monkeypatch, found, tokens, concurrent, recomputed):
    monkeypatch.setattr(fitting, "memory_of", estimate)
    monkeypatch.setattr(fitting, "disk_of", lambda config, report: SimpleNamespace(fits=True))
    sizes = fitting.fitting_sizes(found, small_run(model={"path": "a/model"}), None)
    assert sizes.get("trainer", {}).get("tokens_per_microbatch") == tokens
    assert sizes.get("explorer", {}).get("max_concurrent") == concurrent
    assert ("backends" in sizes) == recomputed and "weights" not in sizes


def test_a_small_disk_keeps_fewer_versions(monkeypatch):
    monkeypatch.setattr(fitting, "memory_of", lambda config, report: None)
    monkeypatch.setattr(fitting, "disk_of", lambda config, report: SimpleNamespace(fits=False))
    assert fitting.fitting_sizes(machine(8), small_run(), None) == {"weights": {"keep": 2}}
