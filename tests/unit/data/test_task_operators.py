"""Operators of the task side, by hand: what each decides about which problem, and by which facts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rftstream.contracts.outcomes import GroupOutcome, GroupResult, RolloutSummary
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.tasks import ChatMessage, Problem, Sampling
from rftstream.data.operators.base import KEEP, Change, Draw, Problems, RunProblems, Skip
from rftstream.data.operators.draws import Budget, Curriculum, Mixture, rollout_value
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.texts import LANGUAGES, LanguageFilter, detect
from rftstream.errors import ConfigError
from tests.suite.each import each


def draw_of(index: int = 0, *, taskset: str = "sums", text: str = "1+1=", size: int = 8, **values: Any) -> Draw:
    problem = Problem(messages=(ChatMessage(role="user", content=text),), **values)
    return Draw(group_id=f"{taskset}/0/{index}/0", taskset=taskset, taskset_pass=0, index=index, problem=problem,
                sampling=Sampling(), group_size=size)  # fmt: skip


def reason_of(decision: object) -> str:
    return decision.reason if isinstance(decision, Skip) else ""


LUCKY, UNLUCKY = 0, 2**63 - 1
"""Seeds that stand for the smallest and the largest number below 1."""


def facts_of(*groups: tuple[int, Sequence[float]], taskset: str = "sums") -> Facts:
    """Facts of groups: index of the problem, rewards."""
    facts = Facts()
    add(facts, *groups, taskset=taskset)
    return facts


def add(facts: Facts, *groups: tuple[int, Sequence[float]], taskset: str = "sums") -> None:
    for index, rewards in groups:
        facts.absorb(GroupOutcome(
            group_id=f"{taskset}/0/{index}/0", taskset=taskset, sequence=facts.seen, result=GroupResult.filtered,
            reason="test", rollouts=tuple(
                RolloutSummary(rollout_id=f"{index}/{n}", num_tokens=1, status=RolloutStatus.completed, reward=reward)
                for n, reward in enumerate(rewards)
            ),
        ))  # fmt: skip


# --------------------------------------------------------------------------------------------- budget


def test_the_value_of_a_rollout_is_what_it_adds_to_that_of_the_group() -> None:
    def value(rate: float, size: int) -> float:
        return float(rate * (1 - rate) ** 2 * (1 - rate**size - (1 - rate) ** size))

    assert rollout_value(0.5, 2) == pytest.approx(0.125 * 0.5)
    for rate in (0.1, 0.5, 0.8):
        for size in range(2, 40):
            assert rollout_value(rate, size) == pytest.approx(value(rate, size) - value(rate, size - 1))
            assert rollout_value(rate, size) > rollout_value(rate, size + 1)


def sizes(budget: Budget, facts: Facts) -> list[int]:
    return [decision.group_size or 0 for index in range(4) if isinstance(decision := budget.decide(
        draw_of(index), facts, 0), Change)]  # fmt: skip


def test_budget_gives_most_rollouts_where_few_succeed_and_fewest_where_all_do() -> None:
    facts = facts_of((0, [1.0] * 30), (1, [0.0, 1.0] * 15), (2, [0.0] * 27 + [1.0] * 3), (3, [0.0] * 998))
    # p = 31/32, 1/2, 1/8 and 1/1000, since one success and one failure are taken as given
    assert sizes(Budget(Budget.Config(max_size=100)), facts) == [2, 7, 19, 2]
    assert sizes(Budget(Budget.Config(min_size=4, max_size=10)), facts) == [4, 7, 10, 4]
    assert sizes(Budget(Budget.Config(price=0.01, max_size=100)), facts) == [2, 4, 3, 2]


def test_a_problem_without_facts_gets_the_first_size() -> None:
    assert Budget(Budget.Config()).decide(draw_of(), Facts(), 0) is KEEP
    assert Budget(Budget.Config(first_size=3)).decide(draw_of(), Facts(), 0) == Change(group_size=3)


def test_budget_reads_a_named_part_and_the_newest_group() -> None:
    facts = facts_of((0, [0.0] * 30), (0, [1.0, 0.0] * 15))
    assert sizes(Budget(Budget.Config(last_group=True)), facts) == [7]
    assert Budget(Budget.Config(on="right")).decide(draw_of(), facts, 0) is KEEP  # nothing is known of the part


def test_budget_refuses_bounds_that_are_none() -> None:
    with pytest.raises(ConfigError, match="max_size: got 3, expected at least min_size = 4"):
        Budget(Budget.Config(min_size=4, max_size=3))


# --------------------------------------------------------------------------------------------- curriculum


class Levels:
    """Problems with a level each."""

    def __init__(self, *levels: object) -> None:
        self._levels = levels

    def __len__(self) -> int:
        return len(self._levels)

    def problem(self, index: int) -> Problem:
        return Problem(messages=(), info={"level": self._levels[index]})


def curriculum(*levels: object, **settings: Any) -> Curriculum:
    operator = Curriculum(Curriculum.Config(**{"stages": ((1,), (2,), (3,)), "groups": 2, **settings}))
    operator.prepare(RunProblems((Problems("sums", Levels(*levels)),), asked=frozenset({"sums"})))
    return operator


def admitted(operator: Any, facts: Facts, seed: int = UNLUCKY) -> list[int]:
    return [index for index in range(4) if operator.decide(draw_of(index), facts, seed) is KEEP]


def test_a_curriculum_goes_on_when_the_newest_groups_of_its_stage_are_solved() -> None:
    operator = curriculum(1, 2, 3, 1)
    facts = Facts({operator: operator.fold()})
    assert admitted(operator, facts) == [0, 3]
    add(facts, (0, [0.0, 1.0]), (3, [1.0, 1.0]))  # 0.75 in the mean
    assert admitted(operator, facts) == [0, 3]
    add(facts, (1, [1.0]), (1, [1.0]))  # of a later stage
    assert admitted(operator, facts) == [0, 3]
    add(facts, (0, [0.6, 0.6]))
    assert admitted(operator, facts) == [1]
    add(facts, (0, [0.0, 0.0]), (3, [0.0, 0.0]))  # what was passed is passed
    assert admitted(operator, facts) == [1]
    assert admitted(operator, facts, LUCKY) == [0, 1, 3]
    add(facts, (1, [1.0]), (1, [1.0]))
    assert admitted(operator, facts) == [2]
    add(facts, (2, [1.0]), (2, [1.0]))
    assert admitted(operator, facts) == [2]
    assert reason_of(operator.decide(draw_of(0), facts, UNLUCKY)) == "of an earlier stage"


def test_a_curriculum_without_a_mark_goes_on_after_so_many_groups() -> None:
    operator = curriculum(1, 2, 3, 1, advance="groups")
    facts = Facts({operator: operator.fold()})
    add(facts, (0, [0.0]), (3, []))
    assert admitted(operator, facts) == [0, 3]  # a group without a reward says nothing
    add(facts, (3, [0.0]))
    assert admitted(operator, facts) == [1]


def test_a_curriculum_refuses_what_would_never_end() -> None:
    with pytest.raises(ConfigError, match=r"stages.2: the taskset sums has no problem with level = \(3,\)"):
        curriculum(1, 2)
    with pytest.raises(ConfigError, match="problem 3 of the taskset sums has level = 'x', expected a value of"):
        curriculum(1, 2, 3, "x")
    with pytest.raises(ConfigError, match="1 is in two stages"):
        curriculum(1, stages=((1,), (1,)))


# --------------------------------------------------------------------------------------------- mixture


def share(operator: Mixture, taskset: str, facts: Facts) -> float:
    kept = [operator.decide(draw_of(taskset=taskset), facts, (2**63 // 1000) * n) is KEEP for n in range(1000)]
    return sum(kept) / 1000


def mixture(*tasksets: str, **settings: Any) -> Mixture:
    operator = Mixture(Mixture.Config(**settings))
    operator.prepare(RunProblems(asked=frozenset(tasksets)))
    return operator


def test_a_mixture_follows_its_schedule_in_groups() -> None:
    operator = mixture("easy", "hard", weights={"easy": (1.0, 0.2), "hard": (0.1, 1.0)}, groups=(0, 10))
    facts = Facts()
    assert [share(operator, name, facts) for name in ("easy", "hard")] == pytest.approx([1.0, 0.1], abs=0.01)
    add(facts, *[(0, [1.0])] * 5)  # halfway: 0.6 to 0.55
    assert [share(operator, name, facts) for name in ("easy", "hard")] == pytest.approx([1.0, 0.917], abs=0.01)
    add(facts, *[(0, [1.0])] * 20)
    assert [share(operator, name, facts) for name in ("easy", "hard")] == pytest.approx([0.2, 1.0], abs=0.01)


def test_tasksets_that_are_not_named_have_a_weight_of_1() -> None:
    operator = mixture("a", "b", "c", weights={"a": (0.1,), "b": (0.5,)})
    assert [share(operator, name, Facts()) for name in "abc"] == pytest.approx([0.1, 0.5, 1.0], abs=0.01)


def test_an_adaptive_mixture_prefers_what_is_solved_half_of_the_time() -> None:
    facts = facts_of((0, [1.0, 0.0]), taskset="half")
    add(facts, (0, [1.0, 1.0, 1.0, 0.0]), taskset="most")
    add(facts, (0, [1.0]), taskset="all")
    operator = mixture("half", "most", "all", "new", adaptive=True)
    names = ("half", "most", "all", "new")
    assert [share(operator, name, facts) for name in names] == pytest.approx([1.0, 0.75, 0.1, 1.0], abs=0.01)


def test_a_mixture_refuses_weights_that_are_none() -> None:
    with pytest.raises(ConfigError, match="unknown taskset 'esy'; known here: easy"):
        mixture("easy", weights={"esy": (1.0,)})
    with pytest.raises(ConfigError, match=r"weights.a: got 1 numbers, expected 2"):
        mixture("a", weights={"a": (1.0,)}, groups=(0, 10))
    with pytest.raises(ConfigError, match="all are 0 at 10 groups"):
        mixture("a", weights={"a": (1.0, 0.0)}, groups=(0, 10))
    with pytest.raises(ConfigError, match="groups: got \\[5, 5\\]"):
        mixture("a", weights={"a": (1.0, 1.0)}, groups=(5, 5))
    with pytest.raises(ConfigError, match="found none, expected weights or adaptive"):
        mixture("a")


# --------------------------------------------------------------------------------------------- language

WRITTEN = {
    "en": "If each of the three boxes has twelve apples, how many apples are there in all?",
    "de": "Wenn jede der drei Kisten zwölf Äpfel enthält, wie viele Äpfel sind es dann insgesamt?",
    "fr": "Si chacune des trois boîtes contient douze pommes, combien y a-t-il de pommes en tout?",
    "es": "Si cada una de las tres cajas tiene doce manzanas, ¿cuántas manzanas hay en total?",
    "it": "Se ognuna delle tre scatole ha dodici mele, quante mele ci sono in tutto nella stanza e per chi sono?",
    "pt": "Se cada uma das três caixas tem doze maçãs, quantas maçãs há no total?",
    "nl": "Als elke doos twaalf appels heeft, hoeveel appels zijn er dan in totaal?",
    "sv": "Om varje låda har tolv äpplen, hur många äpplen finns det då?",
    "da": "Hvis hver kasse har tolv æbler, hvor mange æbler er der så?",
    "fi": "Jos jokainen laatikko on täynnä, kuinka monta omenaa on kaikissa?",
    "pl": "Jeśli każdy z trzech pudełek ma dwanaście jabłek, ile jest jabłek?",
    "cs": "Kolik jablek je ve třech bednách, když každá má dvanáct jablek a kolik je to pro každého?",
    "hu": "Ha minden doboz tizenkét almát tartalmaz, hány alma van összesen a három dobozban?",
    "ro": "Dacă fiecare cutie are douăsprezece mere, câte mere sunt în total?",
    "tr": "Her kutuda on iki elma varsa üç kutuda kaç elma var ve bir kişi için ne kadar?",
    "ru": "Если в каждом из трёх ящиков двенадцать яблок, сколько всего яблок?",
    "uk": "Якщо в кожному з трьох ящиків дванадцять яблук, скільки всього яблук?",
    "bg": "Колко ябълки има във всички кутии, ако всяка от тях има по дванадесет?",
    "vi": "Nếu mỗi hộp có mười hai quả táo thì có bao nhiêu quả táo?",
    "zh": "三个箱子里一共有多少个苹果？",
    "ja": "三つの箱にりんごはいくつありますか？",
    "ko": "상자 세 개에 사과가 모두 몇 개 있습니까?",
    "ar": "كم عدد التفاحات في الصناديق الثلاثة؟",
    "he": "כמה תפוחים יש בשלוש הקופסאות?",
    "el": "Πόσα μήλα υπάρχουν συνολικά στα τρία κουτιά;",
    "hi": "तीन डिब्बों में कुल कितने सेब हैं?",
    "th": "มีแอปเปิลทั้งหมดกี่ลูกในกล่องสามใบ",
}


@each("language", WRITTEN)
def test_languages_are_told_apart(language: str) -> None:
    assert detect(WRITTEN[language]) == language


def test_every_language_has_a_sentence() -> None:
    assert set(WRITTEN) == set(LANGUAGES)


@each("text", ["3+4=", "", "Solve x^2+3x=0", "$a$ ```the of and is in to```", "Paris", "🙂" * 50])
def test_what_is_too_short_or_no_language_is_unknown(text: str) -> None:
    assert detect(text) == "unknown"


def test_language_keeps_what_is_wanted() -> None:
    english = LanguageFilter(LanguageFilter.Config())
    assert english.decide(draw_of(text=WRITTEN["en"]), Facts(), 0) is KEEP
    assert english.decide(draw_of(text="3+4="), Facts(), 0) is KEEP
    assert reason_of(english.decide(draw_of(text=WRITTEN["fr"]), Facts(), 0)) == "language fr"
    strict = LanguageFilter(LanguageFilter.Config(keep=("en", "fr"), keep_unknown=False))
    assert strict.decide(draw_of(text=WRITTEN["fr"]), Facts(), 0) is KEEP
    assert reason_of(strict.decide(draw_of(text="3+4="), Facts(), 0)) == "language unknown"
    with pytest.raises(ConfigError, match="keep: unknown language 'english'; known: ar, bg"):
        LanguageFilter(LanguageFilter.Config(keep=("english",)))
