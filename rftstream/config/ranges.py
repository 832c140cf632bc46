"""Types of settings with their ranges, shared by all sections of a run file."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
AboveZero = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
RunName = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9][a-z0-9_-]{0,229}$",
        description="lower case letters, digits, - and _, at most 230, and a letter or a digit first, e.g. 'words-2'",
    ),
]
"""Name of a run. With our prefix and suffix, it fits into Kafka's limit for topics (249 characters) and that of file
systems (255)."""
SectionName = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9_-]{1,230}$",
        description="lower case letters, digits, - and _, at most 230, e.g. 'words-2'",
    ),
]
