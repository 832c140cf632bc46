"""Rewards of one's own: plain functions."""

from __future__ import annotations


def closeness(completion: str, answer: str, *, scale: float = 10.0) -> dict[str, float]:
    """1 for the right number, less the further off it is; 0 for what is no number at all."""
    right = float(answer)  # a broken answer raises: the rollout then has no reward, instead of a wrong one
    try:
        distance = abs(float(completion) - right)
    except ValueError:
        return {"reward": 0.0, "is_number": 0.0}
    return {"reward": max(0.0, 1.0 - distance / scale), "is_number": 1.0}
