"""A policy with two users: what one user's work finishes for the other is not waited for."""

from __future__ import annotations

from rftstream.roles.explorer.agents.parts import share_policy
from tests.unit.policies.test_fake import policy, request


def test_what_has_finished_for_the_other_user_is_there_at_once() -> None:
    shared = policy()
    first, second = share_policy(shared, lambda request_id: request_id == "r0")
    first.submit(request(0))
    while shared.num_active:
        assert not second.step()
    assert (first.num_active, first.idle_s()) == (1, 0.0)
    assert [completion.request_id for completion in first.step()] == ["r0"]
    assert first.num_active == 0
