"""Rewards for what is seen in pictures: boxes, counts, charts and text; numbers by hand, and what always holds."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftstream.config.parts.reward_uses import RewardUse
from rftstream.contracts.tasks import Problem
from rftstream.errors import RewardError
from rftstream.preflight.checks.check_rewards import check_columns
from rftstream.rewards.anls import AnlsReward, edit_distance, similarity
from rftstream.rewards.answers.assignment import best_assignment
from rftstream.rewards.answers.rectangles import MAX_BOXES, Rectangle, box_overlap, find_boxes
from rftstream.rewards.base import RewardInput
from rftstream.rewards.box_iou import BoxReward
from rftstream.rewards.chart_answer import ChartReward, read_number
from rftstream.rewards.composite import CompositeReward, RewardPart
from rftstream.rewards.object_count import CountReward, read_count
from tests.suite.each import each
from tests.unit.reward_inputs import reward_input


def item(completion: str, answer: str | None = None, **info: Any) -> RewardInput:
    return reward_input(completion, answer, info=info)


def boxed(completion: str, answer: str | None = None, info: dict[str, Any] | None = None, **settings: Any) -> float:
    return BoxReward(BoxReward.Config(**settings))(item(completion, answer, **(info or {}))).reward


# ------------------------------------------------------------------------------------------ boxes

corner = st.floats(-50, 50, allow_nan=False)
rectangles = st.builds(Rectangle, corner, corner, corner, corner)
integer_boxes = st.lists(
    st.builds(
        lambda x, y, w, h: [x, y, x + w, y + h], *[st.integers(0, 20)] * 2, *[st.integers(1, 10)] * 2
    ), min_size=1, max_size=6,
)  # fmt: skip


@each(
    ("one", "other", "overlap"),
    [
        ((0, 0, 2, 2), (0, 0, 2, 2), 1.0),
        ((0, 0, 2, 2), (1, 0, 3, 2), 2 / 6),  # 2 in common, 4 + 4 - 2 in all
        ((0, 0, 4, 4), (1, 1, 3, 3), 4 / 16),
        ((0, 0, 2, 2), (2, 0, 4, 2), 0.0),  # an edge has no area
        ((2, 2, 0, 0), (0, 0, 2, 2), 0.0),  # corners the wrong way round
        ((0, 0, 0, 0), (0, 0, 0, 0), 0.0),
    ],
)
def test_overlaps(one: tuple[float, ...], other: tuple[float, ...], overlap: float) -> None:
    assert box_overlap(Rectangle(*one), Rectangle(*other)) == pytest.approx(overlap)  # type: ignore[arg-type]


@given(rectangles, rectangles)
def test_an_overlap_is_symmetric_and_a_share(one: Rectangle, other: Rectangle) -> None:
    assert box_overlap(one, other) == box_overlap(other, one)
    assert 0.0 <= box_overlap(one, other) <= 1.0
    if one.area > 1e-9:
        assert box_overlap(one, one) == pytest.approx(1.0)


@given(st.integers(1, 5), st.integers(1, 5), st.randoms(use_true_random=False))
def test_the_assignment_is_the_best_of_all(rows: int, columns: int, random: Any) -> None:
    weights = [[random.choice([0.0, 0.25, 0.5, 1.0, random.random()]) for _ in range(columns)] for _ in range(rows)]
    pairs = best_assignment(weights)
    assert len(pairs) == min(rows, columns) == len({r for r, _ in pairs}) == len({c for _, c in pairs})
    turned = weights if rows <= columns else [list(column) for column in zip(*weights, strict=True)]
    places = range(max(rows, columns))
    best = max(
        sum(turned[row][column] for row, column in enumerate(chosen))
        for chosen in itertools.permutations(places, min(rows, columns))
    )
    assert sum(weights[row][column] for row, column in pairs) == pytest.approx(best)


@pytest.mark.slow
@given(integer_boxes, integer_boxes, st.randoms(use_true_random=False))
def test_the_order_of_boxes_changes_nothing(gold: Any, found: Any, random: Any) -> None:
    for give in ("mean", "f1", "all"):
        reward = boxed(json.dumps(found), json.dumps(gold), give=give)
        assert 0.0 <= reward <= 1.0
        assert boxed(json.dumps(gold), json.dumps(found), give=give) == pytest.approx(reward)
        mixed = [random.sample(boxes, len(boxes)) for boxes in (found, gold)]
        assert boxed(json.dumps(mixed[0]), json.dumps(mixed[1]), give=give) == pytest.approx(reward)
        assert boxed(json.dumps(gold), json.dumps(gold), give=give) == 1.0


def test_the_greedy_matching_is_not_taken() -> None:
    gold = "[[0, 0, 10, 1], [4, 0, 14, 1]]"
    found = "[[2, 0, 12, 1], [8, 0, 18, 1]]"  # the first has 8/12 with both; the second 2/18 and 6/14
    assert boxed(found, gold) == pytest.approx((8 / 12 + 6 / 14) / 2)
    assert boxed(found, gold, give="f1") == pytest.approx(2 * 1 / 4)
    assert boxed(found, gold, give="f1", at_least=0.4) == 1.0
    assert boxed(found, gold, give="all", at_least=0.4) == 1.0


def test_boxes_too_many_and_too_few_cost() -> None:
    gold = "[[0, 0, 2, 2]]"
    assert boxed("[[0, 0, 2, 2], [5, 5, 6, 6]]", gold) == 0.5
    assert boxed("[[0, 0, 2, 2], [5, 5, 6, 6]]", gold, give="f1") == pytest.approx(2 / 3)
    assert boxed("[[0, 0, 2, 2], [0, 0, 2, 2]]", gold, give="all") == 0.0
    assert boxed("[]", gold) == 0.0
    assert (boxed("[]", "[]"), boxed("[[0, 0, 1, 1]]", "[]")) == (1.0, 0.0)


CAT, DOG = Rectangle(1, 2, 3, 4, "cat"), Rectangle(5, 6, 8, 9, "dog")


@each(
    ("text", "expected"),
    [
        ("[1, 2, 3, 4]", [Rectangle(1, 2, 3, 4)]),
        ("The cat is at [1, 2, 3, 4].", [Rectangle(1, 2, 3, 4)]),
        ("cat [1, 2, 3, 4], dog [5, 6, 8, 9]", [Rectangle(1, 2, 3, 4), Rectangle(5, 6, 8, 9)]),
        ("<think>[[9, 9, 10, 10]]</think>[[1, 2, 3, 4]]", [Rectangle(1, 2, 3, 4)]),
        ("I see [1] two.\n```json\n[[1, 2, 3, 4], [5, 6, 8, 9]]\n```", [Rectangle(1, 2, 3, 4), Rectangle(5, 6, 8, 9)]),
        (r"First [9, 9, 10, 10]; \boxed{[1, 2, 3, 4]}", [Rectangle(1, 2, 3, 4)]),
        ("<answer>[1, 2, 3, 4]</answer>", [Rectangle(1, 2, 3, 4)]),
        ('[{"bbox_2d": [1, 2, 3, 4], "label": "cat"}, {"bbox_2d": [5, 6, 8, 9], "label": "dog"}]', [CAT, DOG]),
        ('{"objects": [{"name": "cat", "x1": 1, "y1": 2, "x2": 3, "y2": 4}]}', [CAT]),
        ('{"label": "cat", "x": 1, "y": 2, "width": 2, "height": 2}', [CAT]),
        ('{"bbox": [[1, 2, 3, 4], [5, 6, 8, 9]], "category": ["cat", "dog"]}', [CAT, DOG]),
        ('{"cat": [1, 2, 3, 4], "dog": [[5, 6, 8, 9]]}', [CAT, DOG]),
        ("[[1, 2], [3, 4]]", [Rectangle(1, 2, 3, 4)]),
        ("<ref>cat</ref><box>(1,2),(3,4)</box> <ref>dog</ref><box>(5,6),(8,9)</box>", [CAT, DOG]),
        ("<|object_ref_start|>cat<|object_ref_end|><|box_start|>(1,2),(3,4)<|box_end|>", [CAT]),
        ("(1, 2), (3.5, 4)", [Rectangle(1, 2, 3.5, 4)]),
        ("[]", []),
        ("there is nothing", None),
        ("[1, 2, 3]", None),
        ("[1, 2, 3, true]", None),
        ("[1, 2, 3, 1e999]", None),
        ("[1, 2, 3, NaN]", None),
        ('[[1, 2, 3, 4], "and more"]', None),
        ('{"bbox": [[1, 2, 3, 4]], "category": ["cat", "dog"]}', None),
        ("[" * 5000, None),
        ("", None),
    ],
)
def test_what_is_read_as_boxes(text: str, expected: list[Rectangle] | None) -> None:
    assert find_boxes(text, "xyxy") == expected


@each(
    ("form", "numbers"),
    [("xyxy", [10, 20, 30, 60]), ("xywh", [10, 20, 20, 40]), ("cxcywh", [20, 40, 20, 40]), ("yxyx", [20, 10, 60, 30])],
)
def test_forms_of_boxes(form: str, numbers: list[int]) -> None:
    assert boxed(str(numbers), "[10, 20, 30, 60]", form=form) == 1.0
    assert boxed("[10, 20, 30, 60]", str(numbers), gold_form=form) == 1.0


def test_scales_of_boxes() -> None:
    size = {"width": 200, "height": 100}
    gold = "[20, 20, 100, 80]"
    assert boxed("[0.1, 0.2, 0.5, 0.8]", gold, size, scale="unit") == pytest.approx(1.0)
    assert boxed("[100, 200, 500, 800]", gold, size, scale="thousand") == pytest.approx(1.0)
    assert boxed(gold, "[0.1, 0.2, 0.5, 0.8]", size, gold_scale="unit") == pytest.approx(1.0)
    # shares and thousandths need no size, and neither do pixels on both sides
    assert boxed("[100, 200, 500, 800]", "[0.1, 0.2, 0.5, 0.8]", scale="thousand", gold_scale="unit") == pytest.approx(
        1
    )
    with pytest.raises(RewardError, match="'width' and 'height' are None and None, expected the size"):
        boxed("[0.1, 0.2, 0.5, 0.8]", gold, scale="unit")


def test_labels_of_boxes() -> None:
    gold = '[{"bbox": [0, 0, 2, 2], "label": "cat"}, {"bbox": [0, 0, 2, 2], "label": "dog"}]'
    turned = '[{"bbox": [0, 0, 2, 2], "label": "Dog"}, {"bbox": [0, 0, 2, 2], "label": "cat"}]'
    cats = turned.replace("Dog", "cat")
    assert boxed(turned, gold, labels=True) == 1.0
    assert (boxed(cats, gold, labels=True), boxed(cats, gold)) == (0.5, 1.0)
    with pytest.raises(RewardError, match="has no label"):
        boxed(turned, "[0, 0, 2, 2]", labels=True)


@each(
    ("answer", "info", "settings", "error"),
    [
        (None, {}, {}, "has no boxes"),
        ("nowhere", {}, {}, "'nowhere' cannot be read: no box is in it; they are its answer"),
        ("[10, 20, 5, 30]", {}, {}, "10 20 5 30 has no area"),
        (None, {"boxes": [[1, 2, 3]]}, {}, "cannot be read"),
        ("[1, 2, 3, 4]", {}, {"column": "rects"}, "no column 'rects'"),
        (str([[0, 0, 1, 1]] * (MAX_BOXES + 1)), {}, {}, "has 201 boxes"),
    ],
)
def test_boxes_of_problems_that_nobody_can_read(answer: Any, info: Any, settings: Any, error: str) -> None:
    reward = BoxReward(BoxReward.Config(**settings))
    for call in (reward, reward.check):
        with pytest.raises(RewardError, match=error):
            call(item("[1, 2, 3, 4]", answer, **info))


def test_boxes_stand_in_a_column() -> None:
    coco = {"bbox": [[1, 2, 2, 2], [5, 6, 3, 3]], "category": [3, 7]}
    assert boxed("[[1, 2, 3, 4], [5, 6, 8, 9]]", None, {"objects": coco}, gold_form="xywh") == 1.0
    assert boxed("[[1, 2, 3, 4]]", "7", {"rects": [[1, 2, 3, 4]]}, column="rects") == 1.0


def test_a_check_counts_the_problems_that_nobody_can_read() -> None:
    class Problems:
        digest = ""
        answers = ("[0, 0, 1, 1]", "?", "[0, 0, 1, 0]", None)

        def __len__(self) -> int:
            return 4

        def problem(self, index: int) -> Problem:
            return Problem(messages=(), answer=self.answers[index], data_source="d")

    part = RewardPart(name="box_iou", use=RewardUse(name="box_iou"), reward=BoxReward(BoxReward.Config()))
    (doubt,) = check_columns("tasksets.train", CompositeReward([part]), Problems(), range(4))
    assert "'?' cannot be read" in doubt
    assert "So it is with 3 of 4 looked at, whose rollouts will have no reward; the first is problem 1" in doubt


def test_answers_without_boxes_or_with_too_many_are_wrong() -> None:
    reward = BoxReward(BoxReward.Config())
    score = reward(item("a cat", "[0, 0, 1, 1]"))
    assert (score.reward, dict(score.metrics)) == (0.0, {"parsed": 0.0, "boxes": 0.0, "over_limit": 0.0})
    score = reward(item(str([[0, 0, 1, 1]] * (MAX_BOXES + 1)), "[0, 0, 1, 1]"))
    assert (score.reward, score.metrics["over_limit"]) == (0.0, 1.0)


@pytest.mark.slow
def test_long_texts_take_no_long_time() -> None:
    began = time.process_time()
    for text in ("[1,[" * 9000, "(1,2)" * 9000, " " * 60_000, "```json\n" * 9000, "<answer>" * 9000, '{"a":' * 9000):
        find_boxes(text, "xyxy")
    boxes = np.random.default_rng(0).integers(1, 90, (MAX_BOXES, 4)).tolist()
    boxed(json.dumps(boxes), json.dumps([[x, y, x + w, y + h] for x, y, w, h in boxes]), form="xywh")
    assert time.process_time() - began < 30


# ------------------------------------------------------------------------------------------ counts


@each(
    ("text", "count"),
    [
        ("3", 3), ("three", 3), ("There are three dogs.", 3), ("3 dogs", 3), ("Twenty-one", 21), ("1,024", 1024),
        ("a dozen eggs", 12), ("A hundred", 100), ("one hundred and five", 105),
        ("三", 3), ("有3只猫", 3), ("一共有三只", 3), ("两个", 2),
        ("十二", 12), ("none", 0), ("There are no cars.", 0), ("没有", 0), ("zero", 0), ("3 (three)", 3),
        ("two or three", None), ("2 cats and 3 dogs", None), ("2.5", None), ("-3", None), ("50%", None), ("1/2", None),
        ("3:30", None), ("I have no idea", None), ("many", None), ("", None), ("x3", None), ("9" * 2000, None),
    ],
)  # fmt: skip
def test_counts(text: str, count: int | None) -> None:
    assert read_count(text) == count


@each(
    ("completion", "answer", "exact", "near"),
    [
        ("I see two on the left and two on the right. The answer is four.", "4", 1.0, 1.0),
        (r"\boxed{3}", "4", 0.0, 0.75),
        ("9", "4", 0.0, 0.0),
        ("0", "0.0", 1.0, 1.0),
        ("several", "4", 0.0, 0.0),
    ],
)
def test_rewards_of_counts(completion: str, answer: str, exact: float, near: float) -> None:
    assert CountReward(CountReward.Config())(item(completion, answer)).reward == exact
    assert CountReward(CountReward.Config(give="closeness"))(item(completion, answer)).reward == near


@each("answer", [None, "", "some", "2.5"])
def test_counts_of_problems_that_nobody_can_read(answer: str | None) -> None:
    with pytest.raises(RewardError, match="object_count: the problem"):
        CountReward(CountReward.Config()).check(item("3", answer))


# ------------------------------------------------------------------------------------------ charts


@each(
    ("completion", "answer", "reward"),
    [
        ("105", "100", 1), ("95", "100", 1), ("105.1", "100", 0), ("94.9", "100", 0), ("-100", "100", 0),
        ("0", "0", 1), ("0.01", "0", 0), ("1,234", "1234", 1), ("$1.2 million", "1200000", 1), ("1.2M", "1200000", 1),
        ("28%", "28", 1), ("28%", "0.28", 1), ("0.28", "28%", 1), ("28", "28%", 1), ("2.8%", "28", 0),
        ("2010", "2010", 1), ("2011", "2010", 0), ("The year is 2009.", "2010", 0), ("2011", "2,010", 1),
        ("Germany", "germany", 1), ("Germany.", "Germany", 1), ("France", "Germany", 0), ("Yes", "Yes", 1),
        ("The answer is Germany.", "Germany", 1), ("The value in 2010 is 28%.", "28", 1), (r"\boxed{14}", '["14"]', 1),
        ("14", '["13", "14.2"]', 1), ("12 dollars", "12", 1), ("12 June", "12 May", 0), ("12", "12 May", 0),
        ("twelve", "12", 1), ("I cannot tell.", "12", 0), ("", "12", 0),
    ],
)  # fmt: skip
def test_charts(completion: str, answer: str, reward: int) -> None:
    assert ChartReward(ChartReward.Config())(item(completion, answer)).reward == reward


def test_settings_of_charts() -> None:
    assert ChartReward(ChartReward.Config(exact_years=False))(item("2011", "2010")).reward == 1.0
    assert ChartReward(ChartReward.Config(tolerance=0.0))(item("100.1", "100")).reward == 0.0
    assert ChartReward(ChartReward.Config(boxed_only=True))(item("100", "100")).reward == 0.0
    for answer in (None, " ", "[]", '["a", ""]'):
        with pytest.raises(RewardError, match="chart_answer: the problem"):
            ChartReward(ChartReward.Config()).check(item("1", answer))


@given(st.text())
def test_any_text_is_a_number_or_none(text: str) -> None:
    read_number(text)
    read_count(text)
    find_boxes(text, "xywh")


# ------------------------------------------------------------------------------------------ text


def slow_distance(one: str, other: str) -> int:
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        corner, row[0] = row[0], number
        for place, against in enumerate(other, 1):
            corner, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, corner + (letter != against))
    return row[-1]


@given(st.text("abc", max_size=80), st.text("abc", max_size=80))
def test_the_distance_is_that_of_the_table(one: str, other: str) -> None:
    assert edit_distance(one, other) == slow_distance(one, other) == edit_distance(other, one)


@given(st.text(max_size=30), st.text(max_size=30), st.sampled_from([0.0, 0.3, 0.5]))
def test_a_similarity_is_a_share(one: str, other: str, above: float) -> None:
    found = similarity(one, other, above=above)
    assert found == similarity(other, one, above=above)
    assert found == 0.0 or above < found <= 1.0
    assert (found == 1.0) == (one == other)


@each(
    ("completion", "answer", "reward"),
    [
        ("kitten", "sitting", 1 - 3 / 7),
        ("Kitten", "kitten", 1.0),
        ("12  May", "12 may", 1.0),
        ("abcd", "abxy", 0.0),  # half of it is no more than the threshold
        ("abcd", "abcx", 0.75),
        ("The answer is ITC Limited.", '["itc limited", "ITC"]', 1.0),
        (r"It is \boxed{1/8/93}", '["1/8/93"]', 1.0),
        ("x" * 100_000 + r"\boxed{" + "y" * 100_000 + "}", "y", 0.0),
        ("word " * 100, "word", 0.0),
        ("", "word", 0.0),
    ],
)
def test_text(completion: str, answer: str, reward: float) -> None:
    assert AnlsReward(AnlsReward.Config())(item(completion, answer)).reward == pytest.approx(reward)


def test_settings_of_text() -> None:
    assert AnlsReward(AnlsReward.Config(threshold=0.0))(item("abcd", "abxy")).reward == 0.5
    assert AnlsReward(AnlsReward.Config(casefold=False))(item("ABCd", "abcd")).reward == 0.0
    for answer in (None, "", "x" * 5000):
        with pytest.raises(RewardError, match="anls: "):
            AnlsReward(AnlsReward.Config()).check(item("1", answer))
