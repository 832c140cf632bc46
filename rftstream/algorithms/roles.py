"""Episodes of several agents as an algorithm sees them: what a role did in a rollout is a rollout of its own, with the
role's reward, and is compared with what the same role did in the siblings.

So all that an algorithm computes from rollouts, groups and their rewards, it computes for each role. Segments without a
role are together, too, and have the reward of the whole. A batch without roles stays as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from rftstream.contracts.arrays import Array
from rftstream.contracts.batches import Experience
from rftstream.contracts.rollouts import roles_of


@dataclass(frozen=True, slots=True)
class RoleExperience:
    """The part of an experience that one role sampled."""

    experience: Experience
    """The experience with the role's segments, its reward, and its part of arrays over all tokens. Without a reward the
    role is not trained."""
    role: str
    """Name of the role; empty for segments without one."""
    places: tuple[int, ...]
    """Number of each of its segments in the whole experience."""
    whole: int
    """Number of the experience in its batch."""


def by_role(batch: Iterable[Experience]) -> Iterator[RoleExperience]:
    """Yield the parts of each experience, in the order in which the roles spoke first."""
    for number, whole in enumerate(batch):
        if not roles_of(whole.segments):
            yield RoleExperience(whole, "", tuple(range(len(whole.segments))), number)
            continue
        for role in dict.fromkeys(segment.role for segment in whole.segments):
            places = tuple(place for place, segment in enumerate(whole.segments) if segment.role == role)
            shares_reward = not role or not whole.roles
            part = replace(
                whole,
                segments=tuple(whole.segments[place] for place in places),
                reward=whole.reward if shares_reward else whole.roles.get(role),
                additions={name: _of_places(array, whole, places) for name, array in whole.additions.items()},
            )
            yield RoleExperience(part, role, places, number)


def _of_places(array: Array, whole: Experience, places: tuple[int, ...]) -> Array:
    """Return the part of an array for some segments, if it has an element for each token of all; else the array."""
    lengths = [segment.token_ids.shape[0] for segment in whole.segments]
    if array.shape != (sum(lengths),):
        return array
    parts = np.split(array.numpy(), np.cumsum(lengths)[:-1])
    own = np.concatenate([parts[place] for place in places])
    return Array(dtype=array.dtype, shape=own.shape, data=own.tobytes())
