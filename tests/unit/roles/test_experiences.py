"""What the trainer gets of a scored rollout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rftstream.contracts.batches import Experience
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.roles.buffer.experiences import encoded, experience_of
from tests.contracts.samples import SAMPLES


def test_metrics_are_those_of_the_rollout_and_of_the_verdict() -> None:
    verified = SAMPLES["verified_rollout.v1"]
    assert isinstance(verified, VerifiedRollout) and verified.rollout is not None and verified.verdict is not None
    rollout = replace(verified.rollout, metrics={"tool_calls": 2.0, "length": 3.0})
    verdict = replace(verified.verdict, metrics={"length": 4.0, "format": 0.5})
    experience = experience_of(replace(verified, rollout=rollout, verdict=verdict), 7, 0, position=3)
    assert experience.metrics == {"tool_calls": 2.0, "length": 4.0, "format": 0.5}
    assert (experience.reward, experience.parts) == (verdict.reward, verdict.parts)


@pytest.mark.law("bounded")
def test_an_encoded_experience_keeps_nothing_of_the_body() -> None:
    verified = SAMPLES["verified_rollout.v1"]
    assert isinstance(verified, VerifiedRollout)
    experience = experience_of(verified, 7, 0, position=3)
    output = encoded(experience)
    assert output.message == experience
    assert isinstance(output.message, Experience)
    for segment in output.message.segments:
        for array in (segment.token_ids, segment.behavior_logprobs, segment.loss_mask):
            assert isinstance(array.data, memoryview)
            assert array.data.obj is output.value
