"""`check` tells nothing of problems that the pipeline leaves out."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.preflight.test_check import Write, fine, write

__all__ = ["write"]


def test_problems_that_the_pipeline_leaves_out_are_not_told_of(write: Write, tmp_path: Path) -> None:
    """What the warnings advise ends them: their operators are asked, and of the others none."""
    rows = [("1+1=", "2"), ("2+1=", ""), ("2+2=", "4"), ("1+1=", "2"), ("3+1=", "4")]
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"prompt": p, "answer": a, "level": p[0]}) for p, a in rows)
    )
    (tmp_path / "own_left_out.py").write_text("def near(completion, answer):\n    return completion == answer\n")
    source = {"source": "jsonl:rows.jsonl", "reward": "own_left_out:near"}
    settings = {"tasksets": {"train": {**source, "options": {"skip": 1}}},
                "evaluations": {"held-out": {**source, "options": {"size": 1}}}}  # fmt: skip
    report = fine(write(["1+1="], **settings))
    said = " ".join(report.warnings)
    assert "1 of 4 rows have no answer" in said and r"op = 'regex', field = 'answer', need = '\S'" in said
    assert "1 of its 1 problems are trained on, too" in said
    pipeline = [{"op": "regex", "field": "answer", "need": r"\S"}, {"op": "dedupe", "similarity": 1.0}]
    report = fine(
        write(["1+1="], pipeline=[*pipeline, {"op": "curriculum", "stages": [["3"], ["1", "2"]]}], **settings)
    )
    assert not any("no answer" in one or "trained on, too" in one for one in report.warnings)
    assert "4 problems, 2 of them left out by the pipeline" in report.to_text()
    assert "trained on, too" not in report.to_text()
