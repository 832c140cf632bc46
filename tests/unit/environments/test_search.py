"""BM25 by hand, and the tool `search` over a file."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftstream.environments.toolset import search
from rftstream.environments.toolset.base import ToolError
from rftstream.environments.toolset.bm25 import Bm25, words_of
from rftstream.environments.toolset.search import Search, open_corpus
from rftstream.errors import ConfigError

TEXTS = ["the cat sat", "the dog and the cat", "a bird"]
ROWS = [
    {"title": "Oslo", "text": "Oslo is the capital of Norway."},
    {"title": "Bergen", "text": "Bergen is a city in Norway, known for rain."},
    {"text": "Straße und Übermut: ÄPFEL."},
]


def written(folder: Path, *lines: str) -> str:
    path = folder / "corpus.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def corpus(folder: Path) -> str:
    return written(folder, *map(json.dumps, ROWS), "")


def test_scores_by_hand() -> None:
    index = Bm25(TEXTS, k1=1.2, b=0.75)
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))  # "cat" stands in two of three
    mean = (3 + 5 + 2) / 3
    scores = [idf * 2.2 / (1 + 1.2 * (0.25 + 0.75 * length / mean)) for length in (3, 5)]
    assert index.best("cat", 5) == [(0, pytest.approx(scores[0])), (1, pytest.approx(scores[1]))]
    twice = idf * 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 5 / mean))  # "the" stands in the second text twice
    assert dict(index.best("THE", 5))[1] == pytest.approx(twice)


def test_words_of_a_query_count_once_and_order_does_not_matter() -> None:
    index = Bm25(TEXTS)
    assert index.best("cat cat dog", 5) == index.best("dog cat", 5)


@given(st.lists(st.text(alphabet="abc ", max_size=20), max_size=12), st.text(alphabet="abc ", max_size=8))
def test_it_finds_exactly_the_texts_with_a_word_of_the_query(texts: list[str], query: str) -> None:
    found = Bm25(texts).best(query, 100)
    wanted = {place for place, text in enumerate(texts) if set(words_of(text)) & set(words_of(query))}
    assert {place for place, _ in found} == wanted
    scores = [score for _, score in found]
    assert scores == sorted(scores, reverse=True)
    assert all(score > 0 for score in scores)


def test_what_the_model_reads(tmp_path: Path) -> None:
    tool = Search(corpus=corpus(tmp_path), results=2, max_chars=30)
    assert tool("capital of Norway").splitlines() == [
        "[1] Oslo: Oslo is the capital of N... (6 characters more)",
        "[2] Bergen: Bergen is a city in No... (21 characters more)",
    ]
    assert tool("STRASSE äpfel") == "[1] Straße und Übermut: ÄPFEL."
    assert tool("\ud800 ???") == "Nothing found for '\\ud800 ???'."
    with pytest.raises(ToolError, match="a query of 100,000 characters"):
        tool("x" * 100_000)


def test_a_corpus_is_read_once_for_all_threads_and_again_when_it_changes(tmp_path: Path) -> None:
    path = corpus(tmp_path)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(open_corpus(path, "text", "title"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    written(tmp_path, json.dumps({"text": "another one"}))
    assert open_corpus(path, "text", "title").passages == (("", "another one"),)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", r"corpus.jsonl:2: not JSON"),
        ("[" * 100_000, r"corpus.jsonl:2: not JSON"),
        ("[]", r"corpus.jsonl:2: expected an object with a text as 'text'"),
        ('{"body": "x"}', r"corpus.jsonl:2: expected an object with a text as 'text'"),
    ],
)
def test_a_bad_line_is_named(line: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        Search(corpus=written(tmp_path, '{"text": "fine"}', line))


def test_a_corpus_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Search(corpus=str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="no line in it"):
        Search(corpus=written(tmp_path))
    assert search.MAX_QUERY_CHARACTERS > 0
