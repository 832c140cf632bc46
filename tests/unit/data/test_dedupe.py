"""The operator dedupe: what it skips and why, and that it finds what datasketch finds at equal parameters."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rftstream.contracts.tasks import ChatMessage, Media, Problem
from rftstream.data.operators.base import KEEP, Problems, RunProblems, Skip
from rftstream.data.operators.dedupe import Dedupe
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.shingles import choose_rows, jaccard, normalized, numbers_in, shingles_of
from rftstream.errors import ConfigError
from tests.unit.data.test_task_operators import draw_of


class Listed:
    """Problems of a list."""

    def __init__(self, *problems: str | Problem) -> None:
        self._problems = [one if isinstance(one, Problem) else asking(one) for one in problems]

    def __len__(self) -> int:
        return len(self._problems)

    def problem(self, index: int) -> Problem:
        return self._problems[index]


def asking(text: str, *, system: str | None = None, image: str | None = None) -> Problem:
    media = () if image is None else (Media(url="x", digest=image, kind="image/png"),)
    before = () if system is None else (ChatMessage(role="system", content=system),)
    return Problem(messages=(*before, ChatMessage(role="user", content=text, media=media)))


def prepared(
    tasksets: dict[str, Listed], held_out: dict[str, Listed] | None = None, **settings: Any
) -> Callable[[str], list[str]]:
    """Return what says for each problem of a taskset why it is skipped."""
    operator = Dedupe(Dedupe.Config(**settings))
    operator.prepare(RunProblems(
        tuple(Problems(name, one) for name, one in tasksets.items()),
        lambda: tuple(Problems(name, one) for name, one in (held_out or {}).items()),
    ))  # fmt: skip

    def reasons(taskset: str) -> list[str]:
        decisions = [operator.decide(draw_of(n, taskset=taskset), Facts(), 0) for n in range(len(tasksets[taskset]))]
        assert all(one is KEEP or isinstance(one, Skip) for one in decisions)
        return [one.reason if isinstance(one, Skip) else "" for one in decisions]

    return reasons


LONG = "A farmer takes his 12 sheep to the market in the next village and comes home with nothing but a goat."


def test_the_first_of_equal_problems_is_kept() -> None:
    texts = Listed("What is it?", "what  IS it?", "Ｗhat is it?", "What is that?")
    assert prepared({"a": texts}, similarity=1.0)("a") == ["", "equal in a", "equal in a", ""]


def test_problems_of_other_tasksets_and_evaluations_are_found() -> None:
    tasksets = {"a": Listed("one", "two"), "b": Listed("two", "three", "three", "four")}
    evaluations = {"held-out": Listed("four", "one", "one")}
    reasons = prepared(tasksets, evaluations)
    assert reasons("a") == ["equal in the evaluation held-out", ""]
    assert reasons("b") == ["equal in a", "", "equal in b", "equal in the evaluation held-out"]
    assert prepared(tasksets, evaluations, across=False, evaluations=False)("b") == ["", "", "equal in b", ""]


def test_an_evaluation_is_as_large_as_what_is_evaluated_of_it() -> None:
    operator = Dedupe(Dedupe.Config())
    both = Listed("one", "two")
    operator.prepare(RunProblems((Problems("a", both),), lambda: (Problems("held-out", both, 1),)))
    assert isinstance(operator.decide(draw_of(0, taskset="a"), Facts(), 0), Skip)
    assert operator.decide(draw_of(1, taskset="a"), Facts(), 0) is KEEP


def test_nearly_equal_problems_have_the_same_numbers() -> None:
    texts = Listed(LONG, LONG.replace("12", "13"), LONG.replace("goat", "cow"))
    assert prepared({"a": texts})("a") == ["", "", "nearly equal in a"]
    assert prepared({"a": texts}, same_numbers=False, similarity=0.7)("a") == [
        "", "nearly equal in a", "nearly equal in a"]  # fmt: skip
    assert prepared({"a": texts}, similarity=1.0)("a") == ["", "", ""]


def test_other_images_make_other_problems_and_system_messages_do_not() -> None:
    images = Listed(asking(LONG, image="sha256:1"), asking(LONG, image="sha256:2"), asking(LONG, image="sha256:1"))
    assert prepared({"a": images})("a") == ["", "", "equal in a"]
    systems = Listed(asking(LONG, system="Think."), asking(LONG), asking("no", system=LONG), asking("yes", system=LONG))
    assert prepared({"a": systems})("a") == ["", "equal in a", "", ""]


def test_a_problem_that_came_later_is_kept() -> None:
    operator = Dedupe(Dedupe.Config())
    operator.prepare(RunProblems((Problems("a", Listed("one")),)))
    assert operator.decide(draw_of(7, taskset="a"), Facts(), 0) is KEEP


def test_shingles_by_hand() -> None:
    assert shingles_of("a b c d", 3) == {"a b c", "b c d"}
    assert shingles_of("a-b", 3) == {"a - b"}
    assert shingles_of("", 3) == {""}
    assert shingles_of("多少 ok", 2) == {"多 少", "少 ok"}
    assert jaccard(frozenset("abc"), frozenset("bcd")) == 0.5
    assert numbers_in("3 of 1,000.5 in 2024.") == ("3", "1,000.5", "2024")
    assert normalized(" Ａ\n b ") == "a b"


def test_rows_find_95_of_100_pairs_that_are_just_similar_enough() -> None:
    # s = 0.8 and 128 hashes: 1 - (1 - 0.8^7)^18 = 0.985, 1 - (1 - 0.8^8)^16 = 0.947
    assert choose_rows(0.8, 128) == 7
    assert choose_rows(0.01, 4) == 1


def test_more_rows_than_hashes_are_refused() -> None:
    with pytest.raises(ConfigError, match="rows: got 9, expected at most num_hashes = 8"):
        Dedupe(Dedupe.Config(num_hashes=8, rows=9))


# --------------------------------------------------------------------------------------------- beside datasketch


def edited_texts(count: int = 500) -> list[str]:
    """Texts of 40 words, each followed by a copy with up to a quarter of its words replaced."""
    rng = random.Random(0)
    words = [f"w{number:03d}" for number in range(500)]
    texts = []
    for number in range(count):
        text = rng.choices(words, k=40)
        copy = list(text)
        for place in rng.sample(range(40), number % 11):
            copy[place] = rng.choice(words)
        texts += [" ".join(text), " ".join(copy)]
    return texts


def repeats(sets: Sequence[frozenset[str]], candidates: Callable[[int], list[int]], add: Callable[[int], None],
            similarity: float) -> set[int]:  # fmt: skip
    """Return the numbers of the sets that are similar to an earlier one that is none."""
    found = set()
    for number, one in enumerate(sets):
        if any(jaccard(one, sets[other]) >= similarity for other in candidates(number)):
            found.add(number)
        else:
            add(number)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("similarity", [0.6, 0.8])
def test_it_finds_what_datasketch_finds_at_equal_parameters(similarity: float) -> None:
    import datasketch  # takes seconds

    texts = edited_texts()
    sets = [shingles_of(text, 3) for text in texts]
    kept: list[int] = []
    truth = repeats(sets, lambda _: kept, kept.append, similarity)

    rows = choose_rows(similarity, 128)
    index = datasketch.MinHashLSH(num_perm=128, params=(128 // rows, rows))
    theirs = [datasketch.MinHash(num_perm=128, seed=1) for _ in sets]
    for signature, one in zip(theirs, sets, strict=True):
        signature.update_batch([shingle.encode() for shingle in sorted(one)])
    by_datasketch = repeats(sets, lambda number: index.query(theirs[number]),
                            lambda number: index.insert(number, theirs[number]), similarity)  # fmt: skip

    unchecked = {number for number, signature in enumerate(theirs)
                 if any(other < number for other in index.query(signature))}  # fmt: skip
    reasons = prepared({"a": Listed(*texts)}, similarity=similarity, rows=rows, same_numbers=False)("a")
    ours = {number for number, reason in enumerate(reasons) if reason}
    assert len(truth) > 90
    assert ours <= truth, "what is found is similar enough: a precision of 1"
    assert by_datasketch <= truth
    print(f"similarity {similarity}: {len(truth)} repeats, recall {len(ours) / len(truth):.3f}, of datasketch "
          f"{len(by_datasketch) / len(truth):.3f}, both {len(ours & by_datasketch)}; precision 1, of its candidates "
          f"{len(unchecked & truth) / len(unchecked):.3f}")  # fmt: skip
    assert len(ours) >= 0.98 * len(truth)
    assert len(ours & by_datasketch) >= 0.98 * len(by_datasketch)
