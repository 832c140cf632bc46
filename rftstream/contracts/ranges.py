"""Types of numbers with the range that a message promises. Decoding checks it, and the schema says it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

NonNegativeInt = Annotated[int, Meta(ge=0)]
"""A count, an index, an offset, a version: every integer of a message is at least 0."""

PositiveInt = Annotated[int, Meta(ge=1)]

NonNegativeFloat = Annotated[float, Meta(ge=0)]
"""A weight: at least 0, and finite as every float of a message."""
