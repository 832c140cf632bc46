"""Where the steps of a rollout end, as tokens. Shapes: T tokens of a segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def find_step_ends(
    token_ids_T: np.ndarray, loss_mask_T: np.ndarray, separator: str, decode: Callable[[Sequence[int]], str]
) -> np.ndarray:
    """Return where steps end, bool [T]; only sampled tokens count.

    A step ends with the token that completes a separator, and with the last token of each run of sampled tokens. A step
    has text: a piece that is only separators, white space or the token that ends the turn belongs to its neighbour."""
    ends_T = np.zeros(len(token_ids_T), bool)
    sampled = np.flatnonzero(np.asarray(loss_mask_T) != 0)
    for run in np.split(sampled, np.flatnonzero(np.diff(sampled) != 1) + 1):
        if len(run):
            places = _ends_of_run(token_ids_T[run].tolist(), separator, decode)
            ends_T[run[places]] = True
    return ends_T


def _ends_of_run(tokens: Sequence[int], separator: str, decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return the indices in the run at which steps end. Whole prefixes are decoded, since a character may take several
    tokens. This is done only for tokens that may complete a separator, since nothing else matters."""
    text = decode(tokens)
    ends: list[int] = []
    known, length = 0, 0
    if separator in text:
        for place, token in enumerate(tokens):
            if not set(decode([token])) & {separator[-1], "\N{REPLACEMENT CHARACTER}"}:
                continue
            beginning = decode(tokens[: place + 1])
            if (count := beginning.count(separator)) > known:
                known = count
                if beginning[length:].replace(separator, "").strip():  # separators alone are no step
                    ends.append(place)
                    length = len(beginning)
    if ends and not text[length:].replace(separator, "").strip():
        ends.pop()
    return [*ends, len(tokens) - 1]
