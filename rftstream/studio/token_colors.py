"""Colours of a rollout's tokens, as classes of studio.css, for the page of a rollout and for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rftstream.queries.records.rollout_view import TokenRow
from rftstream.studio.rendering import shade

COLORINGS = ("logprob", "version", "mask", "advantage")
"""Values that tokens can be coloured by."""
LEAST_LOGPROB = -5.0
"""Logprobs below this have the strongest colour."""
NUM_VERSION_COLORS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ColoredToken:
    """A token with the CSS class of its colour, and its numbers in words."""

    text: str
    style: str
    numbers: str


def color_tokens(tokens: Sequence[TokenRow], coloring: str) -> list[ColoredToken]:
    """Return the tokens with their colours. `coloring`: one of COLORINGS."""
    versions = sorted({token.version for token in tokens if token.version is not None})
    largest = max((abs(token.advantage) for token in tokens if token.advantage is not None), default=0.0)
    return [
        ColoredToken(text=token.text, style=_style(token, coloring, versions, largest), numbers=_numbers(token))
        for token in tokens
    ]


def _style(token: TokenRow, coloring: str, versions: Sequence[int], largest: float) -> str:
    """Return the CSS class of a token's colour. Tokens that were not sampled are dim."""
    special = " special" if token.special else ""
    if not token.sampled:
        return f"given{special}"
    if coloring == "mask":
        return f"kept{special}"
    if coloring == "version" and token.version is not None:
        return f"v{versions.index(token.version) % NUM_VERSION_COLORS}{special}"
    if coloring == "advantage" and token.advantage is not None and largest > 0:
        size = shade(abs(token.advantage), 0.0, largest, 5)
        return f"{'up' if token.advantage > 0 else 'down' if token.advantage < 0 else 'even'}{size}{special}"
    if coloring == "logprob" and token.logprob is not None:
        return f"l{shade(-token.logprob, 0.0, -LEAST_LOGPROB, 6)}{special}"
    return f"plain{special}"


def _numbers(token: TokenRow) -> str:
    parts = [f"{token.position}: id {token.token_id} {token.text!r}"]
    if not token.sampled:
        return f"{parts[0]}, given, not trained on"
    if token.logprob is not None:
        parts.append(f"logprob {token.logprob:.4f}")
    if token.version is not None:
        parts.append(f"version {token.version} (epoch {token.trainer_epoch})")
    if token.advantage is not None:
        parts.append(f"advantage {token.advantage:.4f}")
    return ", ".join(parts)
