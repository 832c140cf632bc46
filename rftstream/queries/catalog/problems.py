"""Problems from a catalog, one page at a time; also those whose reference answer may be wrong.

Such a problem was attempted often, none of its attempts was right, and most of them give the same answer. Either the
reference answer is another one, or the policy makes the same mistake each time: a person has to look.
"""

from __future__ import annotations

from dataclasses import dataclass

from rftstream.queries.catalog.database import CatalogReader, like
from rftstream.queries.catalog.finding import PAGE, Range, row_as, values_at
from rftstream.queries.catalog.moments import Moment
from rftstream.queries.catalog.texts import SIBLING_BITS

RIGHT_FROM = 0.5
"""Reward from which on an attempt counts as right, as in the operators of data pipelines."""
LEAST_ATTEMPTS = 8
"""Fewest scored attempts that may cast doubt on a reference answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemRow:
    """A problem with the results of its groups."""

    taskset: str
    problem: int
    num_groups: int
    num_scored: int
    """Groups with a scored rollout."""
    reward_first: float | None
    """Mean reward of its first scored group."""
    reward_newest: float | None
    reward_mean: float | None
    """Over its scored groups."""
    answer: str | None
    """Its reference answer; None until texts are read, too."""
    agreed: str | None
    """The answer that most of its attempts gave; None: the problem is not doubtful, or nobody asked."""
    num_agreed: int | None
    """Attempts that gave it."""
    num_answers: int | None
    """Scored attempts whose texts are read."""


ORDERS = {
    "problem": "taskset, problem",
    "hardest": "reward_mean IS NULL, reward_mean, taskset, problem",
    "easiest": "reward_mean IS NULL, reward_mean DESC, taskset, problem",
    "learned": "newest - first IS NULL, newest - first DESC, taskset, problem",
    "forgotten": "newest - first IS NULL, newest - first, taskset, problem",
    "seen": "num_groups DESC, taskset, problem",
    "rare": "num_groups, taskset DESC, problem DESC",
    "last": "taskset DESC, problem DESC",
}
"""Orders of problems. The table `problems` has an index for each, which is read backwards for the last two."""

_PROBLEMS_THEN = (
    "SELECT p.*, (SELECT reward_mean FROM groups g WHERE g.sequence = p.first_sequence) AS first,"
    " (SELECT reward_mean FROM groups g WHERE g.sequence = p.newest_sequence) AS newest FROM ("
    "SELECT taskset, problem, count(*) AS num_groups,"
    " count(CASE WHEN decided_at <= :at THEN reward_mean END) AS num_scored,"
    " avg(CASE WHEN decided_at <= :at THEN reward_mean END) AS reward_mean,"
    " min(CASE WHEN decided_at <= :at AND reward_mean IS NOT NULL THEN sequence END) AS first_sequence,"
    " max(CASE WHEN decided_at <= :at AND reward_mean IS NOT NULL THEN sequence END) AS newest_sequence"
    " FROM groups WHERE admitted_at <= :at AND (:version_from IS NULL OR min_version >= :version_from)"
    " GROUP BY taskset, problem) p"
)
"""The table `problems` at an earlier moment, or of the groups since a version."""

_DECIDED = "decided_at <= :at AND (:version_from IS NULL OR min_version >= :version_from)"
_DOUBTFUL = (
    "SELECT taskset, problem, answer AS agreed, max(num) AS num_agreed, sum(num) AS num_answers FROM ("
    "SELECT taskset, problem, t.answer, count(*) AS num FROM"
    f" (SELECT sequence, taskset, problem FROM groups WHERE {_DECIDED} AND (taskset, problem) IN"
    f" (SELECT taskset, problem FROM groups WHERE {_DECIDED} GROUP BY taskset, problem"
    f" HAVING max(reward_most) < {RIGHT_FROM} AND sum(num_scored) >= {LEAST_ATTEMPTS}))"
    f" JOIN rollouts r USING (sequence) JOIN texts t ON t.id = ((r.sequence << {SIBLING_BITS}) | r.sibling)"
    " WHERE r.reward IS NOT NULL GROUP BY taskset, problem, t.answer) GROUP BY taskset, problem"
    f" HAVING agreed IS NOT NULL AND 2 * num_agreed > num_answers AND num_answers >= {LEAST_ATTEMPTS}"
)
"""The doubtful problems, each with the answer that most of its attempts gave."""
_MOST_AGREED = "num_agreed * 1.0 / num_answers DESC, num_answers DESC, taskset, problem"


def find_problems(
    catalog: CatalogReader,
    moment: Moment,
    *,
    taskset: str = "",
    text: str = "",
    reward: Range = (None, None),
    version_from: int | None = None,
    doubtful: bool = False,
    order: str = "problem",
    skip: int = 0,
    limit: int = PAGE,
) -> list[ProblemRow]:
    """Return problems with the results of their groups: all, or those with a text in their prompt, or with a mean
    reward in a range. For now, they are a page of an index; for an earlier moment, or for the groups that no version
    before `version_from` may sample, all groups are read, as for those that are doubtful: these come by the share of
    attempts that agree, unless another order is asked for."""
    values = values_at(moment, taskset=taskset, text=like(text), version_from=version_from, least=reward[0])
    indexed = moment.is_now and version_from is None
    by = _MOST_AGREED if doubtful and order == "problem" else ORDERS.get(order, ORDERS["problem"])
    rows = catalog.rows(
        "SELECT *, first AS reward_first, newest AS reward_newest, (SELECT answer FROM prompts q"
        " WHERE q.taskset = p.taskset AND q.problem = p.problem) AS answer"
        f"{'' if doubtful else ', NULL AS agreed, NULL AS num_agreed, NULL AS num_answers'}"
        f" FROM {_problems(indexed, taskset, reward, text, doubtful)} ORDER BY {by} LIMIT :limit OFFSET :skip",
        {**values, "most": reward[1], "limit": limit, "skip": skip},
    )
    return [row_as(ProblemRow, row) for row in rows]


def count_problems(
    catalog: CatalogReader,
    moment: Moment,
    *,
    taskset: str = "",
    text: str = "",
    reward: Range = (None, None),
    version_from: int | None = None,
    doubtful: bool = False,
) -> int:
    """Count the problems that have a group: all, or those that `find_problems` finds."""
    indexed = moment.is_now and version_from is None
    values = values_at(moment, taskset=taskset, text=like(text), version_from=version_from, least=reward[0])
    row = catalog.row(
        "SELECT coalesce(sum(problems), 0) AS problems FROM tasksets WHERE :taskset = '' OR taskset = :taskset"
        if indexed and reward == (None, None) and not (doubtful or text)
        else f"SELECT count(*) AS problems FROM {_problems(indexed, taskset, reward, text, doubtful)}",
        {**values, "most": reward[1]},
    )
    return 0 if row is None else int(row["problems"])


def _problems(indexed: bool, taskset: str, reward: Range, text: str = "", doubtful: bool = False) -> str:
    """Return the SQL for the wanted problems, `p`. `indexed`: by the table `problems`."""
    conditions = {
        "taskset = :taskset": taskset,
        "(taskset, problem) IN (SELECT taskset, problem FROM prompts WHERE text LIKE :text ESCAPE '!')": text,
        "reward_mean >= :least": reward[0] is not None,
        "reward_mean <= :most": reward[1] is not None,
    }
    where = " AND ".join(["1", *(condition for condition, is_wanted in conditions.items() if is_wanted)])
    joined = f" JOIN ({_DOUBTFUL}) USING (taskset, problem)" if doubtful else ""
    return f"({'SELECT * FROM problems' if indexed else _PROBLEMS_THEN}) p{joined} WHERE {where}"


def list_tasksets(catalog: CatalogReader) -> list[str]:
    """Return the tasksets that have groups."""
    rows = catalog.rows("SELECT taskset FROM tasksets ORDER BY taskset")
    return [row["taskset"] for row in rows]
