"""Generated pictures of coloured squares, with a question about each. Their purpose is to see a model learn to look."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from msgspec import Meta

from rftstream.contracts.ids import derive_seed
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.data.tasksets.columns import with_system
from rftstream.data.tasksets.generated import GeneratedTaskset
from rftstream.data.tasksets.images import image_in
from rftstream.errors import ConfigError

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 70, 220),
    "yellow": (230, 220, 50),
    "white": (240, 240, 240),
}
PLACES = ("top left", "top right", "bottom left", "bottom right")
"""The quarters of a picture. Each contains at most one square."""
QUESTIONS = {"color": "color?", "count": "count?", "place": "place?"}
"""Kind of question -> its text."""
SIZE, SIDE = 32, 12
"""Pixels on each side of a picture, and of a square."""


class SquaresTaskset(GeneratedTaskset):
    """Pictures with one kind of question each, in turn: the colour of the only square, the number of squares, or the
    quarter of the only square. The same number always gives the same picture, to the byte."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[tasksets.NAME.options]`."""

        questions: tuple[Literal["color", "count", "place"], ...] = ("color", "count", "place")
        """Kinds of questions, in turn."""
        most: Annotated[int, Meta(ge=1, le=4)] = 4
        """Largest number of squares in a picture with a question about their number."""
        size: Annotated[int, Meta(ge=1)] = 10_000
        """Number of problems in one pass."""
        skip: Annotated[int, Meta(ge=0)] = 0
        """Number of first problems that are left out: problems with `size = 80` here and `skip = 80` there are made
        from different numbers."""
        seed: Annotated[int, Meta(ge=0)] = 0
        """Seed of the pictures."""

    def __init__(self, config: Config, *, location: str, columns: Mapping[str, str], system: str | None) -> None:
        if location or columns:
            raise ConfigError('squares: takes neither a location nor columns; write source = "squares"')
        if not config.questions:
            raise ConfigError("squares: questions is empty, expected some of color, count, place")
        self._config = config
        super().__init__("squares", size=config.size, system=system, decided_by=["squares", 1, asdict(config), system])

    def make_problem(self, index: int) -> Problem:
        """Return the picture with this index and its question."""
        number = self._config.skip + index
        chance = random.Random(derive_seed(self._config.seed, "squares", number))
        kind = self._config.questions[number % len(self._config.questions)]
        color = chance.choice(sorted(COLORS))
        count = chance.randint(1, self._config.most) if kind == "count" else 1
        quarters = chance.sample(range(len(PLACES)), count)
        room = SIZE // 2 - SIDE + 1
        squares = [
            (SIZE // 2 * (quarter // 2) + chance.randrange(room), SIZE // 2 * (quarter % 2) + chance.randrange(room))
            for quarter in quarters
        ]
        answer = {"color": color, "count": str(count), "place": PLACES[quarters[0]]}[kind]
        picture = image_in(draw_png([(top, left, COLORS[color]) for top, left in squares]))
        question = ChatMessage(role="user", content=QUESTIONS[kind], media=(picture,))
        return Problem(
            messages=with_system((question,), self._system, "squares"),
            answer=answer,
            info={"question": kind, "color": color, "squares": [list(square) for square in squares]},
            data_source=f"squares/{kind}",
        )


def draw_png(squares: list[tuple[int, int, tuple[int, int, int]]]) -> bytes:
    """Return a PNG of squares on black, each given by its top row, its left column and its colour. The bytes depend on
    nothing else, since no library compresses them."""
    pixels = bytearray(SIZE * SIZE * 3)
    for top, left, color in squares:
        for y in range(top, top + SIDE):
            start = (y * SIZE + left) * 3
            pixels[start : start + SIDE * 3] = bytes(color) * SIDE
    lines = b"".join(b"\0" + bytes(pixels[y * SIZE * 3 : (y + 1) * SIZE * 3]) for y in range(SIZE))
    stored = b"\x78\x01\x01" + struct.pack("<HH", len(lines), len(lines) ^ 0xFFFF) + lines
    header = struct.pack(">IIBBBBB", SIZE, SIZE, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", stored + struct.pack(">I", zlib.adler32(lines))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
