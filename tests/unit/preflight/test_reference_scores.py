"""`check` scores the problems' own answers and empty ones, and says what is doubtful about the rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.preflight.checks import reference_scores
from rftstream.preflight.checks.check import check

RUN_FILE: dict[str, Any] = {
    "run": {"name": "demo", "steps": 10},
    "model": {"path": "fake", "context": 40},
    "explorer": {"policy": "fake"},
    "trainer": {"backend": "fake"},
}

SCORES = {
    "exact": "1 for the problem's answer, 0 for an empty one, in 2 problems",
    "majority_vote": "1 for the problem's answer, 0 for an empty one, in 2 problems",
    "own_check_rewards:kind": "1 for the problem's answer, 1 (0 expected) for an empty one, in 2 problems",
    "own_check_rewards:asleep": "could not be computed: not all scored within 0.2 s",
    "own_check_rewards:broken": "could not be computed: TypeError: unsupported operand",
    "own_check_rewards:of_solution": "0 for an empty completion, in 2 problems without an answer",
    "own_check_rewards:unwritten": "could not be computed: NameError: name 'ANSWER' is not defined",
    "own_check_rewards:lacking": "1 for the problem's answer, 0 for an empty one, in 2 problems; raised for 1 of 2: "
    "KeyError: '2-1='",
    "own_check_rewards:strict": "1 for the problem's answer, an error for an empty one, in 2 problems; raised for 2 of "
    "2: ValueError: invalid literal",
    "own_check_rewards:at_once": "1 for the problem's answer, 0 for an empty one, in 2 problems; raised for 1 of 2: "
    "KeyError: '2-1='",
    "own_check_rewards:halved": "0.500 (1 expected) for the problem's answer, 0 for an empty one, in 2 problems",
    "own_check_rewards:by_token": "1 for the problem's answer, 0 for an empty one, in 2 problems",
    "own_check_rewards:doubled": "2 for the problem's answer, 0 for an empty one, in 2 problems",
    "own_check_rewards:never": "0 (1 expected) for the problem's answer, 0 for an empty one, in 2 problems",
    "own_check_rewards:labelled": "0 (1 expected) for the problem's answer, 1 for 'Answer: 1', 0 for an empty one",
    "own_check_rewards:spaceless": "0 (1 expected) for the problem's answer, 0.200 for 'Answer: 1', 0 for an empty one",
}
DOUBTS = {
    "own_check_rewards:kind": ["1 for completions that say nothing"],
    "own_check_rewards:asleep": ["the answers of 2 problems were not all scored within 0.2 s"],
    "own_check_rewards:unwritten": [
        "no empty completion could be scored (NameError: name 'ANSWER' is not defined at own_check_rewards.py:22, in "
        "unwritten)"
    ],
    "own_check_rewards:lacking": ["raised for 1 of 2: KeyError: '2-1=' at own_check_rewards.py:13, in lacking"],
    "own_check_rewards:strict": [
        "raised for 2 of 2: ValueError: invalid literal for int() with base 10: '' at own_check_rewards.py:16, "
        "in strict"
    ],
    "own_check_rewards:at_once": ["raised for 1 of 2: KeyError: '2-1=' at own_check_rewards.py:13, in lacking"],
    "own_check_rewards:halved": [
        "0.500 in the mean for the problems' own answers, 1 expected: '1' got 0.500, '1' got 0.500"
    ],
    "own_check_rewards:never": [
        "0 for the own answers of all 2 problems tried, and at most 0 in a usual form ('Answer: 1')"
    ],
    "own_check_rewards:spaceless": [
        "0 for the own answers of all 2 problems tried, and at most 0.200 in a usual form ('Answer: 1')"
    ],
}
"""Reward -> what `check` warns of."""
REFUSED = {
    "own_check_rewards:broken": "tasksets.train.reward: no answer of a problem could be scored (TypeError: unsupported "
    "operand type(s) for /: 'str' and 'str' at own_check_rewards.py:10, in broken)",
}
"""Reward -> the error, where it fails for whatever is said."""


@pytest.mark.parametrize("reward", SCORES)
def test_the_short_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reward: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(reference_scores, "LIMIT_S", 0.2 if "asleep" in reward else 60.0)
    (tmp_path / "own_check_rewards.py").write_text(
        "import re, subprocess, sys, time\n\n"
        "def kind(completion, answer):\n    return print('noise', subprocess.run('true', stdout=sys.stdout)) or 1.0\n\n"
        "def asleep(completion, answer):\n    time.sleep(3600)\n\n"
        "def broken(completion, answer):\n    return completion / answer\n\n"
        "def lacking(completion, answer, prompt):\n    return {'1+1=\\nGo': float(completion == answer)}[prompt]\n\n"
        "def strict(completion, answer):\n    return float(int(completion) == int(answer))\n\n"
        "def of_solution(completion, solution):\n    return float(completion == solution)\n\n"
        "def unwritten(completion, solution):\n    return float(ANSWER.search(completion) == solution)\n\n"
        "def never(completion, answer):\n    return 0.0\n\n"
        "def labelled(completion, answer):\n"
        "    return float(re.findall(r'Answer: *(\\d+)', completion) == [answer])\n\n"
        "def spaceless(completion, answer):\n"
        "    return 0.2 * ('Answer' in completion) + (re.findall(r'Answer:(\\d+)', completion) == [answer])\n\n"
        "def by_token(completions, completion_ids, answer):\n"
        "    return [(one == right) * 2 / len(ids) for one, right, ids in zip(completions, answer, completion_ids)]\n\n"
        "def halved(completion, answer):\n    return 0.5 * (completion == answer)\n\n"
        "def doubled(completion, answer):\n    return 2.0 * (completion == answer)\n\n"
        "def at_once(completions, prompts, answer):\n    return list(map(lacking, completions, answer, prompts))\n"
    )
    right = "solution" if reward.endswith(("of_solution", "unwritten")) else "answer"
    rows = [json.dumps({"prompt": prompt, right: "1"}) for prompt in ("1+1=\nGo", "2-1=")]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    taskset = {"source": "jsonl:train.jsonl", "reward": reward}
    report = check(loader.from_dict({**RUN_FILE, "tasksets": {"train": taskset}, "base": str(tmp_path)}))
    assert [one.partition(";")[0] for one in report.errors] == [said for one, said in REFUSED.items() if one == reward]
    assert "noise" not in capsys.readouterr().out
    lines = report.to_short_text().splitlines()
    assert lines[3:5] == ["taskset train: jsonl:" + str(tmp_path / "train.jsonl") + f", 2 problems, reward {reward}",
                          "  the model sees, 7 tokens: 1+1=↵Go"]  # fmt: skip
    assert lines[5].startswith(f"  reward: {SCORES[reward]}")
    assert ("ready to run" in lines) == (reward not in REFUSED) and len(lines) <= 16  # with devices and two warnings
    assert set(lines[4:6]) <= set(report.to_text().splitlines())  # -v has what the short one has
    doubts = [one.removeprefix("tasksets.train.reward: ") for one in report.warnings if ".reward: " in one]
    assert [one.partition(";")[0] for one in doubts] == DOUBTS.get(reward, [])
    advice = {"strict": "give each wrong answer its reward", "lacking": "right answers to 1 problem are among them"}
    assert advice.get(reward.rpartition(":")[2], "") in "".join(doubts)


HACKED = {
    "exact": [],
    "own_hacked_rewards:last": [],
    "math": ["the prompt itself gets 1 on 20 of 20 problems: the model will learn to repeat the prompt"],
    "own_hacked_rewards:any_text": [
        "'I do not know.' gets 1 on 20 of 20 problems: the model will learn to say anything"
    ],
    "own_hacked_rewards:long": [
        "0.010 in the mean for the problems' own answers, 1 expected: '600' got 0.010, '601' got "
        "0.010, '602' got 0.010",
        "350 words that say nothing gets 3.500 on 20 of 20 problems: the model will learn to write long",
    ],
    "own_hacked_rewards:right_and_long": [
        "the right answer with 350 words that say nothing after it gets 1.351 instead of 1.001 on 20 of 20 problems: "
        "the model will learn to write long",
        "an answer that lists 20 candidates gets 1.020 on 20 of 20 problems: the model will learn to list",
    ],
    "own_hacked_rewards:a_number": [
        "the prompt itself gets 1 on 20 of 20 problems: the model will learn to repeat the prompt",
        "the answer of another problem gets 1 on 20 of 20 problems: the model will learn to guess",
        "an answer that lists 20 candidates gets 1 on 20 of 20 problems: the model will learn to list",
    ],
    "own_hacked_rewards:any_label": [
        "an answer that lists 20 candidates gets 1 on 20 of 20 problems: the model will learn to list"
    ],
    "own_hacked_rewards:counts": ["the same answer got 1.001 and 1.161 when scored twice"],
    "own_hacked_rewards:given_fields": [
        "the first field alone gets 1 on 20 of 20 problems: the model will learn to leave fields out"
    ],
    "own_hacked_rewards:all_fields": [],
    "own_hacked_rewards:guarded": [
        "raised for 100 wrong or long answers tried, and for no right or empty one: ValueError: invalid literal for "
        "int() with base 10: 'I do not know.' at own_hacked_rewards.py:19, in guarded"
    ],
}
"""Reward -> what `check` warns of, with problems of 20 different answers that are no word of their prompts."""


@pytest.mark.parametrize("reward", HACKED)
def test_rewards_that_pay_for_what_is_not_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: str) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(reference_scores, "LIMIT_S", 60.0)
    (tmp_path / "own_hacked_rewards.py").write_text(
        "import json, re\n\n"
        "def last(completion, answer):\n    return float(re.findall(r'\\d+', completion)[-1:] == [answer])\n\n"
        "def any_text(completion, answer):\n    return float(len(completion) > 3 or completion == answer)\n\n"
        "def long(completion, answer):\n    return len(completion.split()) / 100\n\n"
        "def right_and_long(completion, answer):\n"
        "    return (answer in completion.split()) and 1 + len(completion.split()) / 1000\n\n"
        "def a_number(completion, answer):\n    return float(re.search(r'\\d', completion) is not None)\n\n"
        "def guarded(completion, answer):\n    return float(int(completion) == int(answer)) if completion else 0.0\n\n"
        "SEEN = []\n"
        "def counts(completion, answer):\n"
        "    SEEN.append(1)\n    return (completion == answer) * (1 + len(SEEN) / 1000)\n\n"
        "def any_label(completion, answer):\n"
        "    return float(answer in re.findall(r'Answer: *(\\d+)', completion))\n\n"
        "def read(completion):\n"
        "    try: return json.loads(completion)\n"
        "    except ValueError: return None\n\n"
        "def given_fields(completion, answer):\n    found, answer = read(completion), read(answer)\n"
        "    return float(isinstance(found, dict) and all(found[one] == answer.get(one) for one in found))\n\n"
        "def all_fields(completion, answer):\n    found, answer = read(completion), read(answer)\n"
        "    return sum(isinstance(found, dict) and found.get(one) == answer[one] for one in answer) / len(answer)\n"
    )
    rows = [
        json.dumps({"prompt": f"What is {100 + n} + 500?", "answer": {"is": n, "of": 2} if "fields" in reward else
                    str(600 + n)}) for n in range(20)
    ]  # fmt: skip
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    taskset = {"source": "jsonl:train.jsonl", "reward": reward}
    report = check(loader.from_dict({**RUN_FILE, "tasksets": {"train": taskset}, "base": str(tmp_path)}))
    doubts = [one.removeprefix("tasksets.train.reward: ") for one in report.warnings if ".reward: " in one]
    assert not report.errors and [one.partition(";")[0] for one in doubts] == HACKED[reward]
    scores = report.tasksets[0].scores
    hacks = [] if scores is None else scores.to_json()["hacks"]
    assert sum(f"learn to {hack['learned']}; if that is not meant, {hack['advice']}" in text for hack in hacks
               for text in report.to_short_text().splitlines()) == len(hacks)  # fmt: skip
    assert len(hacks) == sum("will learn to" in one for one in doubts)


def test_answers_of_one_kind_at_the_end_of_the_data_are_scored_too(tmp_path: Path) -> None:
    rows = [{"prompt": "abc", "answer": "a"}] * 30 + [{"prompt": "abc", "answer": " a b"}] * 10
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    taskset = {"source": "jsonl:rows.jsonl", "reward": {"name": "exact", "extract": "^(\\w+)$"}}
    found = check(loader.from_dict({**RUN_FILE, "tasksets": {"rows": taskset}, "base": str(tmp_path)}))
    assert "0.750 (1 expected) for the problem's answer" in found.to_text()


def test_right_answers_that_no_completion_has_room_for(tmp_path: Path) -> None:
    rows = [{"prompt": "abc", "answer": "cba"}, {"prompt": "ab", "answer": "ba"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for most, said in (
        (3, []),
        (2, ["tasksets.rows: the answers of 1 of 2 problems tried have more tokens, up to 3, than a completion may "
             "have (2, sampling.max_tokens): raise it, unless shorter ones are right, too"]),
    ):  # fmt: skip
        sections = {"sampling": {"max_tokens": most}, "tasksets": {"rows": {"source": "jsonl:rows.jsonl"}}}
        found = check(loader.from_dict({**RUN_FILE, **sections, "base": str(tmp_path)}))
        assert [one for one in found.warnings if "more tokens" in one] == said


def test_right_answers_that_the_model_has_no_token_for(tmp_path: Path) -> None:
    rows = [{"prompt": "abc", "answer": "cba"}, {"prompt": "ab", "answer": "1 \u20ac"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sections = {"tasksets": {"rows": {"source": "jsonl:rows.jsonl"}}, "base": str(tmp_path)}
    made = {"make": {"characters": "abc"}}
    found = check(loader.from_dict({"run": {"name": "demo", "steps": 10}, "model": made, **sections}))
    assert not found.errors, "the run starts"
    (told,) = [one for one in found.warnings if "cannot say" in one]
    which = "the answers of 1 of 2 problems tried, such as '1 \u20ac', "
    assert told.startswith(f"tasksets.rows: the model cannot say {which}")
    assert "has no token for '1', ' ', '\u20ac'" in told


def test_rewards_of_several_parts_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_part_rewards.py").write_text(
        "SEEN = []\n"
        "def same(completion, answer):\n    return float(completion == answer)\n\n"
        "def digits(completion):\n    return float(completion.isdecimal())\n\n"
        "def drawn(completion):\n    SEEN.append(1)\n    return len(SEEN) / 1000\n\n"
        "def plain(completion, answer):\n    return float(completion == answer) - len(completion) / 1000\n\n"
        "def form(completion):\n    return -float('Answer' not in completion)\n\n"
        "def rank(group):\n    return [sum(a.completion > b.completion for b in group.siblings) / 2\n"
        "            for a in group.siblings]\n"
    )
    rows = [{"prompt": "abc", "answer": "3"}] * 3 + [{"prompt": "abc", "answer": "3.0"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names = ("same", "digits", "drawn", "plain", "form", "rank")
    same, digits, drawn, plain, form, rank = ({"name": f"own_part_rewards:{name}"} for name in names)
    long = {"name": "length_penalty", "soft": 0, "hard": 2}
    for reward, said, doubts in (
        ([same, long], "0.500 for the problem's answer (same 1, length_penalty -0.500), 0 for", []),
        ([{**same, "weight": 0.5}, long], "0 (1 expected) for the problem's answer (same 1, length", ["0 for the own"]),
        ([same, form], "0 (1 expected) for the problem's answer (same 1, form -1)", ["0 for the own answers of all 4"]),
        ([{**rank, "group": True}], "0.500 for the problem's answer, 0 for an empty one", []),
        ([plain], "0.998 for the problem's answer, 0 for an empty one", []),
        ([same, {**digits, "weight": 0.5}], "1.375 for the problem's answer (same 1, digits 0.750; 1 for '3.0')", []),
        ([same, digits, drawn], "(same 1, digits 0.750, drawn 0.0", ["when scored twice by drawn; one that draws"]),
    ):
        taskset = {"source": "jsonl:rows.jsonl", "reward": reward}
        found = check(loader.from_dict({**RUN_FILE, "tasksets": {"rows": taskset}, "base": str(tmp_path)}))
        assert said in found.to_short_text()
        unsteady = [one for one in found.warnings if "when scored twice" in one or "for the" in one]
        assert len(unsteady) == len(doubts) and all(said in one for said, one in zip(doubts, unsteady, strict=True))


def test_each_kind_of_error_is_told_with_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_moody_rewards.py").write_text(
        "def moody(completion, answer):\n"
        "    if answer == '1':\n        return float('nan')\n"
        "    if answer == '2':\n        return None\n"
        "    if answer in '345':\n        raise ValueError(f'cannot read {completion!r}')\n"
        "    return float(completion == answer)\n"
    )
    rows = [{"prompt": "abc", "answer": str(answer)} for answer in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    taskset = {"source": "jsonl:rows.jsonl", "reward": "own_moody_rewards:moody"}
    found = check(loader.from_dict({**RUN_FILE, "tasksets": {"rows": taskset}, "base": str(tmp_path)})).to_text()
    assert "raised for 5 of 8: 3 x ValueError: cannot read '3' at own_moody_rewards.py:7, in moody; 1 x " in found
    assert "got nan, expected a finite number" in found and "got None, expected a number" in found
