"""Recorded batches on a real broker are trained again: compared, and into a new run, there and on this machine."""

from __future__ import annotations

import pytest

from tests.e2e.test_resume import digests
from tests.e2e.workplace import FAKE, Workplace, sets

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.law("replay")]


def test_batches_are_trained_again_from_a_broker(place: Workplace, servers: str, run_id: object) -> None:
    name: str = run_id()  # type: ignore[operator]
    place.write("tiny.toml", FAKE.replace('"tiny"', f'"{name}"') + f'kind = "kafka"\nservers = "{servers}"\n')
    run = f"runs/{name}"
    first = place.call("run", "tiny.toml", "--json", *sets("trainer.shares=2"))
    assert first.code == 0, first.err
    source = place.view(run)
    compared = place.call("replay", run, "--json")
    assert compared.code == 0, compared.out
    assert (compared.result["equal"], compared.result["num_digests"]) == (True, 7)

    for into, begin, more in ((f"{run}-same", 0, ()), (f"{run}-here", 3, sets("transport.kind=embedded"))):
        done = place.call("replay", run, "--from", str(begin), "--into", into, "--json", *more)
        assert done.code == 0, done.err
        assert (done.result["num_batches"], done.result["version"]) == (6 - begin, 6)
        view = place.view(into)
        assert digests(view) == digests(source)
        report = view.assert_nothing_lost()
        assert (report.groups.admitted, report.groups.trained) == (12, 12)
    again = place.call("replay", run, "--into", f"{run}-same", "--json")
    assert (again.code, again.result["reason"]) == (0, "steps"), again.err
    other = place.call("replay", run, "--into", f"{run}-same", *sets("trainer.lr=1"))
    assert other.code == 2
    assert "was begun with other settings: trainer.lr" in other.err
