"""docs/models.md: how each family of transformers is trained and sampled, from the tables that the tests hold."""

from __future__ import annotations

from pages.markdown import table
from tests import families


def computed() -> str:
    cached = families.PACKED - families.WITHOUT_CACHE
    over_row = "each token takes a pass over its row"
    shared, padded = "packed, over a cache that siblings and turns share", "padded, or each row by itself"
    slow = families.SLOWER - families.STATES - families.OWN_ATTENTION
    groups = (
        ("packed", shared, cached),
        ("packed", over_row, families.WITHOUT_CACHE),
        (padded, shared, families.OWN_ATTENTION),
        (padded, "plain batches, over a cache with states", families.STATES),
        (padded, over_row, slow),
        ("refused", "refused", set(families.REFUSED)),
        ("not tried", "transformers does not make them by default", families.UNMADE),
    )
    rows = [(trainer, sampler, str(len(names)), ", ".join(sorted(names))) for trainer, sampler, names in groups]
    return table(("trainer", "sampler `hf`", "", "families"), rows)
