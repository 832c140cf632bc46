"""Constants that bound something, and where each is reached. A new one needs a row; settings have theirs in
tests/e2e/test_bounds.py."""

from __future__ import annotations

import ast
from pathlib import Path

import rftstream
from rftstream.contracts.codec import headers_of
from rftstream.contracts.dead import MAX_ERROR, DeadLetter
from rftstream.roles.feeder.cursor import MAX_REASONS, OTHER, OperatorCounts

ROOT = Path(rftstream.__file__).parent
ROOMS = ("contracts", "transport", "service", "roles")

HERE = "tests/unit/test_constants.py"
REACHED: dict[str, str] = {
    "contracts/arrays.py MAX_RANK": "tests/contracts/test_contract_damage.py",
    "contracts/checks.py MAX_DEPTH": "tests/contracts/test_contract_damage.py",
    "contracts/dead.py MAX_ERROR": HERE,
    "contracts/tasks.py _MAX_SEED": "tests/contracts/test_contract_damage.py",
    "contracts/topics.py MAX_DEAD_BYTES": "tests/contracts/test_contract_limits.py",
    "contracts/topics.py MAX_RECORD_BYTES": "tests/contracts/test_contract_limits.py",
    "roles/explorer/agent_launcher.py MAX_NUMBERS": "tests/unit/environments/hosts/test_launched.py",
    "roles/explorer/agent_launcher.py MAX_STARTS": "tests/unit/environments/hosts/test_launched.py",
    "roles/explorer/fit_to_record.py MAX_BODY_BYTES": "tests/flow/test_explorer.py",
    "roles/feeder/cursor.py MAX_REASONS": HERE,
    "roles/feeder/step.py MAX_TASKS_A_TRANSACTION": "tests/e2e/test_bounds.py",
    "service/outcomes_in_force.py MAX_ITEMS": "tests/unit/service/test_summaries.py",
    "service/versions_in_force.py MAX_ITEMS": "tests/unit/service/test_summaries.py",
    "service/versions_in_force.py MAX_RUNS": "tests/unit/service/test_summaries.py",
    "service/dead_letters.py MAX_LETTER_BYTES": "tests/flow/test_explorer.py",
    "transport/base.py MAX_METADATA_BYTES": "rftstream/testing/conformance_transactions.py",
    "transport/kafka/feed.py MAX_HELD_BYTES": "tests/broker/test_kafka_own.py",
}
"""Constant -> the file whose tests reach it."""

NOT_REACHED: dict[str, str] = {
    "contracts/codec.py _MAX_ACCEPTED": "a cache, which takes no more then",
    "roles/explorer/agent_loop.py MAX_REMEMBERED": "forgets the oldest of 100,000 ended rollouts",
    "roles/explorer/partials.py MAX_HELD_BYTES": "64 MiB of pieces; those above are read from the log",
    "roles/feeder/step.py MAX_DRAWS_A_TRANSACTION": "only says where a transaction ends",
    "roles/trainer/assembly.py MAX_CHOICES": "twelve forged twins in one batch; the batch is then incomplete",
    "service/reading.py MAX_RECORDS": "only says how many come at once",
    "service/results.py MAX_TRANSACTION_BYTES": "only says where a transaction ends",
    "service/results.py MAX_TRANSACTION_RECORDS": "only says where a transaction ends",
    "service/role_claim.py MAX_OVERTAKEN": "gives the role up to the one that is replaced",
    "service/role_claim.py MAX_WAIT_S": "a pause",
    "service/service.py MAX_BACKOFF_S": "a pause",
    "service/service.py MAX_IDLE_S": "a pause",
    "service/summaries.py MAX_RECORDS_A_LOOK": "only says how many are read back at once",
    "transport/kafka/connection.py MAX_SAID": "cuts a text",
    "transport/kafka/producer.py MAX_UNSENT_BYTES": "a transaction above it is sent in parts",
}
"""Constant -> what happens there, and so why no test goes that far."""


def test_every_bound_has_a_row() -> None:
    found = set()
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.parse(file.read_text()).body:
                if not isinstance(node, ast.Assign | ast.AnnAssign):
                    continue
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
                found |= {f"{file.relative_to(ROOT)} {name}" for name in names if "MAX" in name.split("_")}
    known = REACHED.keys() | NOT_REACHED.keys()
    assert found - known == set(), "no row"
    assert known - found == set(), "no such constant"
    assert not [place for place in REACHED.values() if not (ROOT.parent / place).exists()]


def test_reasons_beyond_the_most_are_counted_together() -> None:
    counts = OperatorCounts()
    for number in range(MAX_REASONS + 2):
        counts.skip("sums", "operator", f"reason {number}")
    reasons = counts.skipped["sums"]["operator"]
    assert (len(reasons), reasons[OTHER], sum(reasons.values())) == (MAX_REASONS + 1, 2, MAX_REASONS + 2)


def test_the_header_of_a_dead_letter_is_cut() -> None:
    letter = DeadLetter(
        topic="tasks", partition=0, offset=1, key=b"", value=b"", headers=(), role="explorer", reason="x",
        detail="e" * (MAX_ERROR + 1), tries=1,
    )  # fmt: skip
    assert dict(headers_of(letter, "run"))["error"] == b"e" * MAX_ERROR
