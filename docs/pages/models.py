"""docs/models.md: how each family of transformers is trained and sampled, from the tables that the tests hold."""

from __future__ import annotations

from pages.markdown import table
from tests import families


def computed() -> str:
    cached = families.PACKED - families.WITHOUT_CACHE
    groups = (
        ("packed", "packed, over a cache that siblings and turns share", cached),
        ("packed", "each token takes a pass over its row", families.WITHOUT_CACHE),
        ("padded, or each row by itself", "each token takes a pass over its row", families.SLOWER),
        ("refused", "refused", set(families.REFUSED)),
        ("not tried", "transformers does not make them by default", families.UNMADE),
    )
    rows = [(trainer, sampler, str(len(names)), ", ".join(sorted(names))) for trainer, sampler, names in groups]
    return table(("trainer", "sampler `hf`", "", "families"), rows)
