"""A child process of the scorer: `python -m rftstream.rewards.child PARENT_PID PAGE_FD`. It may hang or die without
harm.

Rewards run in the child's main thread, but for those that ask served models (at_once.py). Their output goes to stderr,
and their stdin is empty. The child dies when its parent dies.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import itertools
import logging
import math
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec

from rftstream.errors import ConfigError, MissingChecker, NoReward, RewardError, RewardTimeout
from rftstream.frames import FrameReader
from rftstream.rewards.at_once import ScoringThreads, WorkPage
from rftstream.rewards.away import is_away
from rftstream.rewards.base import RewardInput, Score
from rftstream.rewards.breaker import SLOW_SHARE, is_slow
from rftstream.rewards.evaluating import watch_allowances, watch_evaluations
from rftstream.rewards.event_loop import caught
from rftstream.rewards.frames import (
    MAX_FRAME_BYTES,
    PACKAGE,
    PAGE_BYTES,
    TRACE_AT,
    TRACE_SIGNAL,
    Ready,
    Result,
    ScoreItem,
    ScoreOutcome,
    Setup,
    pack,
    waited_s,
)
from rftstream.rewards.functions import BatchFailed

READ_BYTES = 1 << 20
FLUSH_S = 0.005
"""Largest number of seconds that results are held back, to be sent together."""
MAX_DETAIL = 2000
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Score the items that arrive on stdin, until stdin ends."""
    parent, page_fd = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    requests, replies = _take_pipes()
    page = mmap.mmap(page_fd, PAGE_BYTES)
    os.set_inheritable(page_fd, False)
    os.lseek(page_fd, TRACE_AT, os.SEEK_SET)
    faulthandler.enable()
    faulthandler.register(TRACE_SIGNAL, file=page_fd, all_threads=True)
    frames = FrameReader(MAX_FRAME_BYTES)
    bodies: list[bytes] = []
    while not bodies:
        bodies += _read(requests, frames)
    setup = msgspec.msgpack.decode(bodies.pop(0), type=Setup)
    work = WorkPage(page, setup.slow_s / SLOW_SHARE)
    watch_evaluations(work.evaluates)
    watch_allowances(work.allow)
    rewards = _set_up(setup, replies)
    scoring = Scoring(rewards, work, replies, setup.slow_s)
    decoder = msgspec.msgpack.Decoder(list[ScoreItem])
    try:
        while True:
            for body in bodies:
                scoring.score_all(decoder.decode(body))
            scoring.threads.wait_for(requests)
            bodies = _read(requests, frames)
    except (SystemExit, BrokenPipeError):
        scoring.threads.leave()
        raise
    except Exception:
        traceback.print_exc()
        os._exit(1)  # threads may wait for answers, and for calls that are made no more


class Scoring:
    """Scores the items of a child, and writes their results. `main` makes it, and calls `score_all` for each list."""

    def __init__(self, rewards: Mapping[str, Any], page: WorkPage, replies: int, slow_s: float = math.inf) -> None:
        self._rewards = rewards
        self._page = page
        self._replies = replies
        self._slow_s = slow_s
        self._writing = threading.Lock()
        self.threads = ScoringThreads(page)

    def score_all(self, items: list[ScoreItem]) -> None:
        """Score the items. Those of rewards that score rollouts at the same time only begin. After a slow failure, or
        where a service is away, the reward's other items go back untried: the parent decides whether to try them
        now."""
        in_order = []
        for item in items:
            if num_threads := getattr(self._rewards[item.reward], "num_concurrent", 0):
                self.threads.submit(item.reward, num_threads, functools.partial(self._score_in_thread, item))
            else:
                in_order.append(item)
        if in_order:
            self._score_in_order(in_order)

    def _score_in_order(self, items: list[ScoreItem]) -> None:
        results: list[Result] = []
        suspicious: set[str] = set()
        delay_s, flush_at = waited_s(), time.monotonic() + FLUSH_S
        for batch in _batches(items, self._rewards):
            if time.monotonic() >= flush_at:
                self._page.rest()
                self._write(results)
                results = []
                self.threads.make_calls()
                # The kernel is asked now and then only, since asking takes longer than comparing two texts.
                delay_s, flush_at = waited_s(), time.monotonic() + FLUSH_S
            if batch[0].reward in suspicious:
                results += [Result(item.number, [], tried=False) for item in batch]
                continue

            first, inputs = batch[0], [one for item in batch for one in item.inputs]

            def begin(place: int, count: int, batch: Sequence[ScoreItem] = batch, delay_s: float = delay_s) -> None:
                group = batch[0].numbers
                number, count = (batch[0].number, 1) if group else (batch[place].number, count)
                self._page.begin(number, count, delay_s=delay_s)

            began = time.monotonic()
            reward = self._rewards[first.reward]
            found = score_items(reward, inputs, begin, over_limit=first.over_limit, group=first.group)
            seconds = time.monotonic() - began
            if seconds >= self._slow_s:
                seconds -= waited_s() - delay_s
            if any(one.score is None and (one.away or is_slow(one.reason, seconds, self._slow_s)) for one in found):
                suspicious.add(first.reward)
            outcomes = iter(found)
            results += [
                Result(item.number, list(itertools.islice(outcomes, len(item.inputs))), seconds) for item in batch
            ]
        self._page.rest()
        self._write(results)

    def _score_in_thread(self, item: ScoreItem) -> None:
        began = time.monotonic()
        try:
            with self._page.inside(item.number):
                found = score_items(
                    self._rewards[item.reward],
                    item.inputs,
                    over_limit=item.over_limit,
                    in_main=functools.partial(self.threads.in_main, item.number),
                )
            self._write([Result(item.number, found, time.monotonic() - began)])
        except BaseException:  # of ours: a thread that ended in silence would owe its result for ever
            traceback.print_exc()
            os._exit(1)

    def _write(self, results: list[Result]) -> None:
        with self._writing:
            _write(self._replies, pack(results))


def score_items(
    reward: Any,
    items: Sequence[RewardInput],
    begin: Callable[[int, int], None] = lambda place, count: None,
    **more: Any,
) -> list[ScoreOutcome]:
    """Return for each item a score, or the reason and the detail of its absence. `more`: further arguments of
    `CompositeReward.score_all`.

    If a batch fails as a whole, its items are tried one by one, so that only the bad item has no score. `begin` is
    called before each try with the index of its first item and the number of its items.
    """
    if isinstance(reward, MissingChecker):
        return [_reply(reward)] * len(items)
    begin(0, len(items))
    outcomes = _scored(reward, items, **more)
    for place, outcome in enumerate(outcomes):
        if isinstance(outcome, BatchFailed) and len(items) > 1 and more.get("group") is None:
            begin(place, 1)
            outcomes[place] = _scored(reward, [items[place]])[0]
    return [_reply(outcome) for outcome in outcomes]


def _scored(reward: Any, items: Sequence[RewardInput], **more: Any) -> list[Score | BaseException]:
    """Return the outcome of each item. Every exception becomes an outcome, so that a reward cannot end the child."""
    outcomes = caught(reward.score_all, items, **more)
    return [outcomes] * len(items) if isinstance(outcomes, BaseException) else outcomes


def _reply(outcome: Score | BaseException) -> ScoreOutcome:
    match outcome:
        case Score():
            return ScoreOutcome(outcome)
        case MissingChecker():
            return ScoreOutcome(None, "missing_checker", str(outcome)[-MAX_DETAIL:])
        case NoReward():
            return ScoreOutcome(None, "no_reward", str(outcome)[-MAX_DETAIL:])
        case RewardTimeout():
            return ScoreOutcome(None, "timeout", str(outcome)[-MAX_DETAIL:])
        case RewardError():
            return ScoreOutcome(None, "error", str(outcome)[-MAX_DETAIL:], is_away(outcome))
        case SystemExit():
            return ScoreOutcome(None, "error", f"the reward called sys.exit({repr(outcome.code)[:MAX_DETAIL]})")
        case _:
            error = outcome.with_traceback(_of_the_user(outcome.__traceback__))
            detail = "".join(traceback.format_exception(error, limit=-8))[-MAX_DETAIL:]
            return ScoreOutcome(None, "error", detail, is_away(error))


def _of_the_user(frames: TracebackType | None) -> TracebackType | None:
    """Return the frames without our own ones before the first of the user's; all if there is none of the user's."""
    first = frames
    while first is not None and first.tb_frame.f_code.co_filename.startswith(PACKAGE):
        first = first.tb_next
    return first or frames


def _batches(items: Sequence[ScoreItem], rewards: Mapping[str, Any]) -> Iterator[Sequence[ScoreItem]]:
    """Yield neighbouring items of one batched reward together, and every other item alone, as well as groups."""
    for name, group in itertools.groupby(items, key=lambda item: item.reward):
        reward = rewards[name]
        if getattr(reward, "batched", False) and not getattr(reward, "group", False):
            yield list(group)
        else:
            yield from ([item] for item in group)


def _set_up(setup: Setup, replies: int) -> Mapping[str, Any]:
    from rftstream.config.loader import from_dict
    from rftstream.rewards.resolve import build_rewards

    sys.path[:] = setup.path
    base = str(setup.config.get("base", "."))
    if base not in sys.path:
        sys.path.insert(0, base)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    try:
        rewards = build_rewards(from_dict(setup.config))
    except ConfigError as error:
        _write(replies, pack(Ready(error=str(error))))
        raise SystemExit(2) from None
    except Exception:
        _write(replies, pack(Ready(error=f"rewards: cannot be built:\n{traceback.format_exc(limit=-8)[-MAX_DETAIL:]}")))
        raise SystemExit(2) from None
    names = {
        name: ("", "") if isinstance(reward, MissingChecker) else (reward.scorer, reward.version)
        for name, reward in rewards.items()
    }
    batched = [name for name, reward in rewards.items() if getattr(reward, "batched", False)]
    concurrent = {name: most for name, reward in rewards.items() if (most := getattr(reward, "num_concurrent", 0))}
    grouped = [name for name, reward in rewards.items() if getattr(reward, "group", False)]
    without = [name for name, reward in rewards.items() if not getattr(reward, "reads_tokens", True)]
    given = [name for name, reward in rewards.items() if getattr(reward, "takes_given", False)]
    ready = Ready(
        rewards=names, batched=batched, concurrent=concurrent, grouped=grouped, without_tokens=without, given=given
    )
    _write(replies, pack(ready))
    return rewards


def _die_with(parent: int) -> None:
    """End this process when its parent ends. On Linux the kernel does so even if a reward hangs; on other systems the
    end of stdin does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(0)


def _take_pipes() -> tuple[int, int]:
    """Return descriptors reserved for the protocol. Rewards get an empty stdin, and stderr as stdout."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _read(requests: int, frames: FrameReader) -> list[bytes]:
    data = os.read(requests, READ_BYTES)
    if not data:
        raise SystemExit(0)
    return frames.feed(data)


def _write(replies: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(replies, view) :]


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os._exit(0)
