"""A child of the scorer: `python -m rftstream.rewards.child PARENT_PID PAGE_FD`. It may hang or die; nobody minds.

Rewards run in its main thread. What they print goes to stderr, their stdin is empty, and when the parent dies they do.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

import msgspec

from rftstream.errors import ConfigError, MissingChecker, RewardError
from rftstream.rewards.base import RewardInput, Score
from rftstream.rewards.frames import IDLE, PAGE_BYTES, Frames, Item, Ready, Result, Setup, pack, write_page

READ_BYTES = 1 << 20
FLUSH_S = 0.005
"""Results are kept back at most so long, to be sent together."""
MAX_DETAIL = 2000
PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, page_fd = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    requests, replies = _take_pipes()
    page = mmap.mmap(page_fd, PAGE_BYTES)
    os.close(page_fd)
    faulthandler.enable()
    frames = Frames()
    bodies: list[bytes] = []
    while not bodies:
        bodies += _read(requests, frames)
    rewards = _set_up(msgspec.msgpack.decode(bodies.pop(0), type=Setup), replies)
    decoder = msgspec.msgpack.Decoder(list[Item])
    while True:
        for body in bodies:
            _score_all(decoder.decode(body), rewards, page, replies)
        bodies = _read(requests, frames)


def score_one(reward: Any, item: RewardInput) -> tuple[Score | None, str | None, str]:
    """A score, or the reason and the detail why there is none."""
    if isinstance(reward, MissingChecker):
        return None, "missing_checker", str(reward)
    try:
        return reward(item), None, ""
    except MissingChecker as error:
        return None, "missing_checker", str(error)
    except RewardError as error:
        return None, "error", str(error)[-MAX_DETAIL:]
    except SystemExit as error:
        return None, "error", f"the reward called sys.exit({error.code!r})"
    except Exception:
        return None, "error", traceback.format_exc(limit=-8)[-MAX_DETAIL:]


def _score_all(items: list[Item], rewards: Mapping[str, Any], page: mmap.mmap, replies: int) -> None:
    results: list[Result] = []
    flush_at = time.monotonic() + FLUSH_S
    for item in items:
        now = time.monotonic()
        if now >= flush_at:
            write_page(page, IDLE, 0.0)
            _write(replies, pack(results))
            results = []
            now = time.monotonic()
            flush_at = now + FLUSH_S
        write_page(page, item.number, now)
        results.append(Result(item.number, *score_one(rewards[item.reward], item.input)))
    write_page(page, IDLE, 0.0)
    _write(replies, pack(results))


def _set_up(setup: Setup, replies: int) -> Mapping[str, Any]:
    from rftstream.config import from_dict
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
    _write(replies, pack(Ready(rewards=names)))
    return rewards


def _die_with(parent: int) -> None:
    """On Linux the kernel ends this process with its parent, even when a reward hangs; elsewhere stdin's end does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(0)


def _take_pipes() -> tuple[int, int]:
    """The protocol's own descriptors; what rewards and their children see as stdin and stdout is something else."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _read(requests: int, frames: Frames) -> list[bytes]:
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
