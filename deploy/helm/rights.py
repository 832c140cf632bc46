"""The rights of the users of a run, for the KafkaUsers of the chart: rftstream/files/rights.json.

Nothing in it is written by hand: it is what `rftstream topics acls` says. docs/generate.py writes it.
"""

from __future__ import annotations

import json
from pathlib import Path

from rftstream.config import loader
from rftstream.runs.access import rights_of, user_kinds

FILE = Path(__file__).parent / "rftstream" / "files" / "rights.json"
RUN = {"run": {"name": "any", "steps": 1}, "model": {"path": "any"}, "tasksets": {"any": {"source": "arithmetic"}}}
"""Which topic a synthesiser reads stands in the run file; the chart adds it."""


def to_json() -> str:
    """Return the rights of each kind of user."""
    config = loader.from_dict(RUN)
    rights = {
        kind: [
            {
                "resource": right.resource.value,
                "name": right.name,
                "prefixed": right.prefixed,
                "operations": [operation.value for operation in right.operations],
            }
            for right in rights_of(kind, config)
        ]
        for kind in user_kinds()
    }
    return json.dumps(rights, indent=1) + "\n"
