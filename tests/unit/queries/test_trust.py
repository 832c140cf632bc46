"""How far the mean of an evaluation can be trusted, in words."""

from __future__ import annotations

from rftstream.contracts.versions import EvalResult, VersionName
from rftstream.queries.curves.evaluations import trust_text
from tests.suite.each import each


@each(("metrics", "says"), [
    ({"mean": 0.2, "pass@1": 0.2}, "5 problems: standard error 0.179"),
    ({"mean": 0.3, "pass@1": 0.2}, "5 problems: pass@1 0.200, standard error 0.179"),  # graded rewards
    ({"mean": 0.3, "pass@1": 0.0}, "5 problems"),
    ({"mean": 1.0, "pass@1": 1.0}, "5 problems"),
    ({"length_mean": 3.0}, "5 problems"),
])  # fmt: skip
def test_what_is_said_beside_a_mean(metrics: dict[str, float], says: str) -> None:
    result = EvalResult(
        evaluation="held-out", name=VersionName(trainer_epoch=1, version=2), num_tasks=5, num_samples=1,
        num_unscored=0, metrics=metrics, generations=None, best=False,
    )  # fmt: skip
    assert trust_text(result) == says
