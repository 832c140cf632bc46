"""Classes stay small enough to be read in one sitting: read off the source."""

from __future__ import annotations

from tests.source import sources

MOST_METHODS = 20
"""Of a class of the package, nested ones included."""


def test_classes_are_small() -> None:
    large = {
        found.name: found.num_methods
        for source in sources("rftstream", "workers")
        for found in source.classes
        if found.name != "Config" and found.num_methods > MOST_METHODS
    }
    assert not large, f"more than {MOST_METHODS} methods; hand over to an object what is not the class's own: {large}"
