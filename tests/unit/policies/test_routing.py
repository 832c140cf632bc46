"""Which server a rollout gets: by hand, and over many groups."""

from collections import Counter

import pytest

from rftstream.policies.openai.routing import FAILURES, LEAST_LOAD, LONGEST_PAUSE_S, CircuitBreaker, Router, ranked

NAMES = [f"http://host-{number}:8000/v1" for number in range(4)]
KEYS = [f"sums/0/{number}/0" for number in range(2000)]


def idle(names=NAMES):
    return dict.fromkeys(names, 0)


def test_the_order_depends_on_key_and_names_alone():
    assert ranked("sums/0/3/0", NAMES) == ranked("sums/0/3/0", NAMES[::-1])
    assert ranked("a", ["x", "y", "z"]) == ["x", "y", "z"], "another release decides the same"


def test_each_server_has_its_share_and_one_that_goes_moves_no_other():
    first = {key: ranked(key, NAMES)[0] for key in KEYS}
    assert all(400 < count < 600 for count in Counter(first.values()).values())
    without = {key: ranked(key, NAMES[1:])[0] for key in KEYS}
    moved = {key for key in KEYS if without[key] != first[key]}
    assert moved == {key for key in KEYS if first[key] == NAMES[0]}
    assert all(without[key] == ranked(key, NAMES)[1] for key in moved)


def test_siblings_begin_at_one_server_and_stay():
    router = Router(1.25)
    places = {router.place(f"g/{sibling}", "g", idle()) for sibling in range(8)}
    assert places == {ranked("g", NAMES)[0]}


def test_a_full_server_gets_no_further_rollout_and_keeps_its_own():
    router, (first, second, *_) = Router(1.25), ranked("g", NAMES)
    assert router.place("g/0", "g", idle()) == first
    loads = idle() | {first: 20, second: 9}
    # 1.25 times the mean of 30 requests on 4 servers is 9.4: nine are below the bound, and 20 are not.
    assert router.place("g/1", "g", loads) == second
    assert router.place("g/0", "g", loads) == first
    assert router.place("g/1", "g", idle()) == second, "it does not come back: what it has computed is there"


def test_a_server_with_few_requests_is_never_too_full():
    router, first = Router(1.0), ranked("g", NAMES)[0]
    assert router.place("g/0", "g", idle() | {first: LEAST_LOAD - 1}) == first
    assert router.place("g/1", "g", idle() | {first: LEAST_LOAD}) != first


def test_the_bound_holds_whatever_the_groups():
    router, loads = Router(1.25), idle()
    for number in range(400):
        loads[router.place(f"g/{number}", "g", loads)] += 1  # the worst case: all are of one group
    assert max(loads.values()) <= 1.25 * 100 + 1


def test_a_rollout_whose_server_may_not_be_asked_moves_once():
    router, (first, second, third, _) = Router(1.25), ranked("g", NAMES)
    assert router.place("g/0", "g", idle()) == first
    others = idle([name for name in NAMES if name != first])
    assert router.place("g/0", "g", others) == second
    assert router.place("g/0", "g", idle()) == second
    assert router.place("g/0", "g", idle(), avoid={second}) == first, "the next one that has not failed at it"
    assert router.place("g/0", "g", idle([third]), avoid={third}) == third, "there is no other"


@pytest.fixture
def breaker():
    now = [0.0]
    opened = CircuitBreaker(lambda: now[0])
    opened.__dict__["later"] = lambda seconds: now.__setitem__(0, now[0] + seconds)
    return opened


def test_a_server_that_fails_again_and_again_is_left_alone_until_a_probe_is_answered(breaker):
    for _ in range(FAILURES - 1):
        breaker.failed()
    breaker.answered()
    for _ in range(FAILURES - 1):
        breaker.failed()
        assert not breaker.is_open
    breaker.failed()
    assert breaker.is_open and not breaker.is_due
    breaker.later(1.0)
    assert breaker.is_due
    breaker.probe_failed()
    assert not breaker.is_due and breaker.num_pauses == 2
    breaker.answered()
    assert breaker.is_open, "it was asked before"
    breaker.later(2.0)
    breaker.probe_answered()
    assert not breaker.is_open and breaker.num_pauses == 0


def test_one_failure_may_be_enough_and_pauses_have_an_end(breaker):
    breaker.failed(is_enough=True)
    for _ in range(2000):  # a server may be away for a day
        breaker.later(1.5 * LONGEST_PAUSE_S)
        assert breaker.is_due
        breaker.probe_failed()


def test_a_server_is_left_alone_for_as_long_as_it_wants(breaker):
    breaker.failed(after_s=7.0)
    breaker.later(6.9)
    assert breaker.is_open and not breaker.is_due
    breaker.later(0.2)
    assert breaker.is_due
