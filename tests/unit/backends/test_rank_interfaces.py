"""Ranks on several hosts find the interface over which they reach each other."""

from __future__ import annotations

import psutil
import pytest

from rftstream.backends.deepspeed.rank_processes import RankPlace

pytestmark = pytest.mark.slow


def interface(host: str) -> str | None:
    return RankPlace(rank=1, size=2, local_rank=0, host=host, port=29500).interface()


def addresses() -> dict[str, str]:
    """Return an IPv4 address of each interface that is up."""
    up = psutil.net_if_stats()
    return {
        name: one.address
        for name, found in psutil.net_if_addrs().items()
        for one in found
        if one.family.name == "AF_INET" and up[name].isup
    }


def test_a_host_reaches_itself_over_the_interface_of_the_address() -> None:
    mine = addresses()
    assert mine
    for name, address in mine.items():
        assert interface(address) == (None if address.startswith("127.") else name)


def test_an_address_that_is_none_has_no_interface() -> None:
    assert interface("no address") is None
