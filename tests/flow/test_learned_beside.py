"""What a trainer holds beside the policy, a critic or a renewed reference: it survives kills, and a replay finds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftstream.errors import ConfigError
from rftstream.roles.trainer.training import build_training
from rftstream.testing import RoleDriver
from tests.flow.scene import Scene
from tests.flow.test_replay import replayed
from tests.flow.trained import checkpoints_of, digests_of, steps_of, trained

CHARACTERS = "".join(map(chr, range(33, 260)))
"""As many tokens as the scene's segments speak of."""
SMALL: dict[str, Any] = {
    "model": {"make": {"characters": CHARACTERS, "layers": 1, "width": 16, "heads": 2}, "dtype": "float32"},
    "trainer__backend": "torch", "trainer__checkpoint_every": 3, "trainer__lr": 1e-3,
}  # fmt: skip
PPO: dict[str, Any] = {
    "trainer__algorithm": "ppo",
    "algorithms": {"ppo": {"whiten_advantages": False, "critic": {"lr": 1e-2, "warmup_batches": 2}}},
}
RENEWED: dict[str, Any] = {
    "trainer__algorithm": "asymre", "trainer__reference_every": 2, "algorithms": {"asymre": {"kl_coef": 1.0}},
}  # fmt: skip
"""AsymRE, since siblings of a scene say the same: what is compared inside of groups alone would teach nothing."""


def scene_of(folder: Path, settings: dict[str, Any], **more: Any) -> Scene:
    scene = Scene(folder, **SMALL, **settings, **more)
    for number in range(6):
        scene.batch(number)
    return scene


@pytest.mark.slow
@pytest.mark.law("replay")
@pytest.mark.parametrize("settings", [PPO, RENEWED], ids=["critic", "reference"])
def test_killed_and_replayed_it_is_the_same_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Killed after five versions it goes on from the checkpoint of the third."""
    scene = Scene(tmp_path, **SMALL, **settings)
    trainer = trained(scene, 5)
    scene.batch(5)
    trainer.restart()
    trainer.work()
    through = scene_of(tmp_path / "through", settings)
    RoleDriver(through, "trainer").work()
    found = digests_of(scene)
    assert set(found) == set(range(7))
    assert found == digests_of(through), "of each version one digest, whoever trained it"
    assert (1, 3) in checkpoints_of(scene)
    whole = replayed(through)
    assert whole.equal and whole.num_digests == 7
    part = replayed(through, first=5, last=6)
    assert part.equal and part.checkpoint == "1/3"


@pytest.mark.slow
def test_while_the_critic_warms_up_the_weights_stay(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, PPO)
    RoleDriver(scene, "trainer").work()
    digests = digests_of(scene)
    assert digests[0] == digests[1] == digests[2] != digests[3] != digests[4]
    steps = [step for step in steps_of(scene) if not step.resumed]
    assert all({"value_loss", "value_explained_variance", "return"} <= step.metrics.keys() for step in steps)
    assert ["loss" in step.metrics for step in steps] == [False, False, True, True, True, True]
    assert steps[5].metrics["value_loss"] < steps[0].metrics["value_loss"]


def test_divergence_begins_anew_with_each_reference(tmp_path: Path) -> None:
    """In the batch that begins with a new one the policy is where its reference is."""
    scene = scene_of(tmp_path, RENEWED)
    RoleDriver(scene, "trainer").work()
    divergences = [step.metrics["kl"] for step in steps_of(scene) if not step.resumed]
    assert [divergence < 1e-9 for divergence in divergences] == [True, False] * 3, divergences


@pytest.mark.parametrize(("settings", "message"), [
    ({"trainer__algorithm": "ppo"}, "'fake' cannot hold a critic, which 'ppo' has; use 'torch'"),
    ({"trainer__reference_every": 2}, "'grpo' has no reference as it is set"),
    ({**RENEWED, "trainer__backend": "fake"}, "the backend 'fake' cannot renew a reference"),
    ({**SMALL, "trainer__algorithm": "ppo", "algorithms": {"ppo": {"critic": {"model": "nowhere"}}}},
     r"algorithms\.ppo\.critic\.model: .*/nowhere: no model folder"),
])  # fmt: skip
def test_what_cannot_be_held_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    scene = Scene(tmp_path, **settings)
    from rftstream.models.folders.folder import prepare_model

    spec = prepare_model(scene.config.model, scene.folder.model, 0)
    with pytest.raises(ConfigError, match=message):
        build_training(scene.config, spec)
