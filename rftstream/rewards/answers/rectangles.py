"""Boxes in pictures: reading them, and the overlap of two boxes (IoU).

Forms that are read, in JSON or in text:

    [12, 30, 80, 95]                                [[12, 30, 80, 95], [4, 4, 9, 9]]
    {"bbox_2d": [12, 30, 80, 95], "label": "cat"}   also `bbox`, `box`, `box_2d`; a list of such objects
    {"x": 12, "y": 30, "width": 68, "height": 65}   corners by names: x1 y1 x2 y2, xmin ..., left top right bottom
    {"bbox": [[12, 30, 80, 95]], "category": [3]}   parallel lists, as in tables of COCO
    <ref>cat</ref><box>(12,30),(80,95)</box>        and `(12,30),(80,95)`: always corners
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rftstream.rewards.answers.boxes import last_boxes
from rftstream.rewards.answers.json_values import json_values
from rftstream.rewards.answers.thoughts import after_thoughts

BoxForm = Literal["xyxy", "xywh", "cxcywh", "yxyx"]
"""Meaning of a list's four numbers: two corners, corner and size, centre and size, or two corners with y first."""
BoxScale = Literal["absolute", "unit", "thousand"]
"""Unit of the numbers: pixels, shares of the picture from 0 to 1, or thousandths of it."""

MAX_BOXES = 200
"""Largest number of boxes that are matched."""
MAX_TEXT = 20_000
"""Number of characters, from a completion's end, that are searched."""
MAX_NUMBER = 1e7

_LABELS = ("label", "labels", "name", "class", "category", "categories", "objects_label")
_BOXES = ("bbox_2d", "box_2d", "bbox", "box", "boxes", "bboxes", "objects", "detections", "annotations", "predictions")
_SIDES = (
    (("x1", "y1", "x2", "y2"), "xyxy"),
    (("xmin", "ymin", "xmax", "ymax"), "xyxy"),
    (("x_min", "y_min", "x_max", "y_max"), "xyxy"),
    (("left", "top", "right", "bottom"), "xyxy"),
    (("left", "top", "width", "height"), "xywh"),
    (("x", "y", "width", "height"), "xywh"),
    (("x", "y", "w", "h"), "xywh"),
    (("cx", "cy", "w", "h"), "cxcywh"),
)
_NUMBER = r"\s*(-?\d+(?:\.\d+)?)\s*"
_POINT = rf"\({_NUMBER},{_NUMBER}\)"
_CORNERS = re.compile(
    r"(?:(?:<ref>|<\|object_ref_start\|>)([^<]{0,200})(?:</ref>|<\|object_ref_end\|>)\s*)?"
    rf"(?:<box>|<\|box_start\|>)?{_POINT}\s*,\s*{_POINT}"
)
_FENCED = re.compile(r"```[a-zA-Z]*\n(.*?)```", re.DOTALL)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


class NotBoxes(Exception):
    """A value contains something other than boxes."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A box whose sides are parallel to the picture's. x grows to the right, y downwards."""

    left: float
    top: float
    right: float
    bottom: float
    label: str = ""

    @property
    def area(self) -> float:
        """Return the area; 0 if the corners are swapped."""
        return max(0.0, self.right - self.left) * max(0.0, self.bottom - self.top)

    def scaled(self, x: float, y: float) -> Rectangle:
        """Return the box in other units: all x multiplied by `x`, all y by `y`."""
        return replace(self, left=self.left * x, top=self.top * y, right=self.right * x, bottom=self.bottom * y)


def box_overlap(one: Rectangle, other: Rectangle) -> float:
    """Return the intersection over union of two boxes, from 0 to 1. A box without area gives 0 with every box."""
    width = min(one.right, other.right) - max(one.left, other.left)
    height = min(one.bottom, other.bottom) - max(one.top, other.top)
    if width <= 0 or height <= 0 or not one.area or not other.area:
        return 0.0
    common = width * height
    return min(1.0, common / (one.area + other.area - common))


def read_boxes(value: Any, form: BoxForm) -> list[Rectangle]:
    """Return the boxes in a column's value: a JSON value, or a text. NotBoxes if it contains something else."""
    if isinstance(value, str):
        found = find_boxes(value, form)
        if found is None:
            raise NotBoxes("no box is in it")
        return found
    return _boxes_in(value, form)


def find_boxes(text: str, form: BoxForm) -> list[Rectangle] | None:
    r"""Return the boxes in a completion, or None if nothing can be read as boxes. An empty list of boxes is an answer.

    The answer is in the last fenced block with boxes, else in the last `\boxed{}`, else in `<answer>`, else in the
    whole text without its reasoning. If there are several JSON values, the last one that contains a list of boxes or an
    object counts; if there are only single boxes, all of them count."""
    text = after_thoughts(text)[-MAX_TEXT:]
    for block in reversed(_FENCED.findall(text)):
        if (found := _boxes_of_text(block, form)) is not None:
            return found
    for part in (last_boxes(text), next(iter(reversed(_TAGGED.findall(text))), None)):
        if part is not None:
            return _boxes_of_text(part, form)
    return _boxes_of_text(text, form)


def _boxes_of_text(text: str, form: BoxForm) -> list[Rectangle] | None:
    corners = [
        _box([float(number) for number in match.groups()[1:]], "xyxy", (match[1] or "").strip())
        for match in _CORNERS.finditer(text)
    ]
    single: list[Rectangle] = []
    several: list[Rectangle] | None = None
    for value in json_values(text):
        try:
            boxes = _boxes_in(value, form)
        except (NotBoxes, RecursionError):
            continue
        if _is_row(value):
            single += boxes
        else:
            several = boxes
    if several is not None:
        return several
    return corners or single or None


def _boxes_in(value: Any, form: BoxForm) -> list[Rectangle]:
    if isinstance(value, Mapping):
        return _boxes_of_map(value, form)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise NotBoxes(f"found {value!r:.100}, expected a box or a list of boxes")
    if _is_row(value):
        return [_box(value, form)]
    if len(value) == 2 and all(_is_point(one) for one in value):
        return [_box([*value[0], *value[1]], "xyxy")]
    found: list[Rectangle] = []
    for one in value:
        found += _boxes_in(one, form)
        if len(found) > 10 * MAX_BOXES:
            raise NotBoxes(f"more than {10 * MAX_BOXES} boxes")
    return found


def _boxes_of_map(value: Mapping[str, Any], form: BoxForm) -> list[Rectangle]:
    label = next((value[name] for name in _LABELS if name in value), "")
    for names, own in _SIDES:
        if all(name in value for name in names):
            return [_box([value[name] for name in names], own, label)]  # type: ignore[arg-type]
    inner = next((value[name] for name in _BOXES if name in value), None)
    if inner is None:
        return _boxes_by_label(value, form)
    boxes = _boxes_in(inner, form)
    if isinstance(label, Sequence) and not isinstance(label, str):
        if len(label) != len(boxes):
            raise NotBoxes(f"{len(boxes)} boxes have {len(label)} labels")
        return [replace(box, label=_text(own)) for box, own in zip(boxes, label, strict=True)]
    return [replace(box, label=box.label or _text(label)) for box in boxes]


def _boxes_by_label(value: Mapping[str, Any], form: BoxForm) -> list[Rectangle]:
    """Return the boxes of `{"cat": [1, 2, 3, 4], "dog": [...]}`."""
    if not value:
        raise NotBoxes("an empty object")
    return [
        replace(box, label=box.label or str(name)) for name, inner in value.items() for box in _boxes_in(inner, form)
    ]


def _box(numbers: Sequence[Any], form: BoxForm, label: Any = "") -> Rectangle:
    if not all(_is_number(number) for number in numbers):
        raise NotBoxes(f"found {list(numbers)!r:.100}, expected four numbers")
    a, b, c, d = (float(number) for number in numbers)
    match form:
        case "xywh":
            a, b, c, d = a, b, a + c, b + d
        case "cxcywh":
            a, b, c, d = a - c / 2, b - d / 2, a + c / 2, b + d / 2
        case "yxyx":
            a, b, c, d = b, a, d, c
        case _:
            pass
    return Rectangle(a, b, c, d, _text(label))


def _text(label: Any) -> str:
    return str(label).strip() if isinstance(label, str | int) else ""


def _is_row(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) == 4 and all(_is_number(one) for one in value)


def _is_point(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) == 2
        and all(_is_number(one) for one in value)
    )


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and abs(value) <= MAX_NUMBER and math.isfinite(value)
