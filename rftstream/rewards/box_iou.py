"""Boxes in pictures: the answer's boxes are matched one to one with the problem's, and compared by IoU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from rftstream.errors import RewardError
from rftstream.rewards.answers.assignment import best_assignment
from rftstream.rewards.answers.rectangles import (
    MAX_BOXES,
    BoxScale,
    NotBoxes,
    Rectangle,
    box_overlap,
    find_boxes,
    read_boxes,
)
from rftstream.rewards.base import RewardInput, Score
from rftstream.rewards.evaluating import evaluating_answer
from rftstream.rewards.version import config_version

COLUMNS = ("objects", "boxes", "bboxes", "bbox")
"""Columns that may contain the boxes if the problem has no answer."""


class BoxReward:
    """The agreement of boxes, from 0 to 1, under the matching that gives the answer the highest score.

    Metrics: `parsed` (the answer has boxes that can be read), `boxes` (how many) and `over_limit` (too many).
    """

    reads_tokens = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.box_iou]`."""

        give: Literal["mean", "f1", "all"] = "mean"
        """`mean`: the sum of the IoUs of matched boxes, divided by the larger of the problem's and the answer's numbers
        of boxes. `f1`: an F1 score over matched boxes with at least `at_least`. `all`: 1 if every box has such a match
        and none is left over."""
        at_least: Annotated[float, Meta(gt=0, le=1)] = 0.5
        """The smallest IoU of a match that counts for `f1` and `all`."""
        form: Literal["xyxy", "xywh", "cxcywh", "yxyx"] = "xyxy"
        """Meaning of a list's four numbers in the answer."""
        scale: Literal["absolute", "unit", "thousand"] = "absolute"
        """Unit of the numbers in the answer: pixels of the problem's picture, shares of it from 0 to 1, or
        thousandths."""
        gold_form: Literal["xyxy", "xywh", "cxcywh", "yxyx"] = "xyxy"
        """Meaning of a list's four numbers in the problem; COCO uses `xywh`."""
        gold_scale: Literal["absolute", "unit", "thousand"] = "absolute"
        """Unit of the numbers in the problem."""
        column: str = ""
        """Column with the problem's boxes. Empty: its answer, else `objects`, `boxes`, `bboxes` or `bbox`."""
        width_column: str = "width"
        """Column with the width of the picture in pixels. It is needed if exactly one scale is `absolute`."""
        height_column: str = "height"
        """Column with its height."""
        labels: bool = False
        """Match only boxes with the same label, ignoring case. Each of the problem's boxes then needs a label."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.version = config_version("2", config)

    def __call__(self, item: RewardInput) -> Score:
        gold, size = self._gold(item), self._size(item)
        with evaluating_answer():
            found = find_boxes(item.conclusion, self._config.form)
            too_many = found is not None and len(found) > MAX_BOXES
            if found is None or too_many:
                return _score(0.0, boxes=0 if found is None else len(found), parsed=False, over_limit=too_many)
            boxes = [_to_unit(box, self._config.scale, size) for box in found]
            return _score(self._agreement(gold, boxes), boxes=len(boxes), parsed=True)

    def check(self, item: RewardInput) -> None:
        """Raise RewardError if the problem's boxes cannot be read, or required labels or sizes are missing."""
        self._gold(item)

    def _agreement(self, gold: Sequence[Rectangle], boxes: Sequence[Rectangle]) -> float:
        if not gold or not boxes:
            return float(len(gold) == len(boxes))
        overlaps = [[self._overlap(one, other) for other in boxes] for one in gold]
        if self._config.give == "mean":
            return sum(overlaps[row][column] for row, column in best_assignment(overlaps)) / max(len(gold), len(boxes))
        good = [[float(overlap >= self._config.at_least) for overlap in row] for row in overlaps]
        matches = sum(good[row][column] for row, column in best_assignment(good))
        share = 2 * matches / (len(gold) + len(boxes))
        return share if self._config.give == "f1" else float(share == 1.0)

    def _overlap(self, gold: Rectangle, box: Rectangle) -> float:
        if self._config.labels and gold.label.casefold() != box.label.casefold():
            return 0.0
        return box_overlap(gold, box)

    def _gold(self, item: RewardInput) -> list[Rectangle]:
        value, where = self._gold_value(item)
        try:
            boxes = read_boxes(value, self._config.gold_form)
        except NotBoxes as error:
            raise RewardError(f"box_iou: the problem's boxes {value!r:.200} cannot be read: {error}; {where}") from None
        if len(boxes) > MAX_BOXES:
            raise RewardError(f"box_iou: the problem has {len(boxes)} boxes, at most {MAX_BOXES} are matched")
        for box in boxes:
            if not box.area:
                raise RewardError(
                    f"box_iou: the problem's box {box.left:g} {box.top:g} {box.right:g} {box.bottom:g} has no area; "
                    "correct it, or gold_form"
                )
            if self._config.labels and not box.label:
                raise RewardError("box_iou: a box of the problem has no label, expected one with labels = true")
        size = self._size(item)
        return [_to_unit(box, self._config.gold_scale, size) for box in boxes]

    def _gold_value(self, item: RewardInput) -> tuple[Any, str]:
        if self._config.column:
            if (value := item.info.get(self._config.column)) is None:
                raise RewardError(
                    f"box_iou: the problem has no column {self._config.column!r}, expected its boxes there"
                )
            return value, f"they stand in the column {self._config.column!r}"
        if item.answer is not None:
            return item.answer, "they are its answer"
        name = next((name for name in COLUMNS if item.info.get(name) is not None), None)
        if name is None:
            raise RewardError(
                "box_iou: the problem has no boxes; name their column in the taskset's columns, as answer"
            )
        return item.info[name], f"they stand in the column {name!r}"

    def _size(self, item: RewardInput) -> tuple[float, float] | None:
        """Return width and height of the picture. None if pixels are not compared with shares: scaling both axes
        changes no IoU."""
        if (self._config.scale == "absolute") == (self._config.gold_scale == "absolute"):
            return None
        names = (self._config.width_column, self._config.height_column)
        sizes = [item.info.get(name) for name in names]
        width, height = (size if isinstance(size, int | float) and 0 < size < 1e7 else 0 for size in sizes)
        if not width or not height:
            raise RewardError(
                f"box_iou: the problem's columns {names[0]!r} and {names[1]!r} are {sizes[0]!r} and {sizes[1]!r}, "
                "expected the size of the picture in pixels, since only one of scale and gold_scale is 'absolute'"
            )
        return width, height


def _to_unit(box: Rectangle, scale: BoxScale, size: tuple[float, float] | None) -> Rectangle:
    """Return the box in shares of the picture; in pixels, if both sides use pixels."""
    if scale == "thousand":
        return box.scaled(1e-3, 1e-3)
    return box.scaled(1 / size[0], 1 / size[1]) if scale == "absolute" and size is not None else box


def _score(reward: float, *, boxes: int, parsed: bool, over_limit: bool = False) -> Score:
    metrics = {"parsed": float(parsed), "boxes": float(boxes), "over_limit": float(over_limit)}
    return Score(reward=reward, metrics=metrics)
