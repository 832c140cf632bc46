"""docs/laws.md: which tests hold which law, and which mutants show that the tests would notice."""

from __future__ import annotations

from pages.markdown import table
from tests import law_coverage
from tests.law_coverage import LAWS, STOREYS, MarkedFile


def laws() -> str:
    marked, mutants = law_coverage.find_marked(), law_coverage.find_mutants()
    counts = [
        (f"[{law}](#{law})", says, *(sum(len(file.tests) for file in marked[law][storey]) or "" for storey in STOREYS),
         len(mutants[law]) or "")
        for law, says in LAWS.items()
    ]  # fmt: skip
    parts = [table(("law", "what holds", *STOREYS, "mutants"), [list(map(str, row)) for row in counts])]
    for law, says in LAWS.items():
        rows = [(storey, ", ".join(map(_file, files))) for storey, files in marked[law].items() if files]
        rows += [("mutants", ", ".join(f"`{name}`" for name in mutants[law]))] if mutants[law] else []
        parts += [f"### {law}", says, table(("storey", "tests"), rows)]
    return "\n\n".join(parts)


def _file(file: MarkedFile) -> str:
    return f"`{file.path}` {len(file.tests)}"
