"""Ranks on several hosts find the interface over which they reach each other."""

from __future__ import annotations

import psutil
import pytest

from rftstream.backends.deepspeed.rank_processes import interface_towards

pytestmark = pytest.mark.slow

PORT = 29500


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
        assert interface_towards(address, PORT) == name


def test_an_address_that_is_none_has_no_interface() -> None:
    assert interface_towards("no address", PORT) is None
