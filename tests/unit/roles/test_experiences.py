"""What the trainer gets of a scored rollout."""

from __future__ import annotations

from dataclasses import replace

from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.roles.buffer.experiences import experience_of
from tests.contracts.samples import SAMPLES


def test_metrics_are_those_of_the_rollout_and_of_the_verdict() -> None:
    verified = SAMPLES["verified_rollout.v1"]
    assert isinstance(verified, VerifiedRollout) and verified.rollout is not None and verified.verdict is not None
    rollout = replace(verified.rollout, metrics={"tool_calls": 2.0, "length": 3.0})
    verdict = replace(verified.verdict, metrics={"length": 4.0, "format": 0.5})
    experience = experience_of(replace(verified, rollout=rollout, verdict=verdict), 7, 0, position=3)
    assert experience.metrics == {"tool_calls": 2.0, "length": 4.0, "format": 0.5}
    assert (experience.reward, experience.parts) == (verdict.reward, verdict.parts)
