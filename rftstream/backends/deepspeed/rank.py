"""The process of a rank, which carries out the calls of rank 0 (rank_processes.py).

Rank 0's backend or a launcher starts it. A launcher starts all processes alike; the first of them then becomes the
given command.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from rftstream.backends.base import OptimizerSettings, UpdatePlan
from rftstream.backends.deepspeed.engine import import_deepspeed
from rftstream.backends.deepspeed.heartbeat import BEAT_S, Heartbeat
from rftstream.backends.deepspeed.rank_processes import ELASTIC, FOREVER, RankPlace, is_of_others
from rftstream.backends.deepspeed.rank_training import Rank
from rftstream.backends.deepspeed.settings import CriticStart, RankSettings
from rftstream.backends.deepspeed.wire import algorithm_in, pack, put, rows_in, spec_in, take, unpack
from rftstream.backends.deepspeed.worlds.members import OVER, wait_for_place
from rftstream.backends.torch.training import LearnedBatch
from rftstream.contracts.tasks import Media
from rftstream.errors import ImageError, RftError
from rftstream.models.vision.image_tokens import image_cache

log = logging.getLogger(__name__)


READ: Mapping[str, Callable[[Any], Any]] = {
    "algorithm": algorithm_in,
    "plan": lambda value: msgspec.convert(value, UpdatePlan),
    "rows": rows_in,
}
"""Argument -> the function that reads it from plain values. Arguments that are not listed are plain."""


class _Calls:
    """Carries out the calls of rank 0."""

    def __init__(self, place: RankPlace) -> None:
        self._place = place
        self._store = place.connect()
        self._rank: Any = None
        self._media: dict[str, bytes] = {}
        """The images of the current call, by digest."""

    def carry_out(self, what: str, arguments: dict[str, Any]) -> Any:
        """Call the method of `Rank` with this name, and return the result for rank 0."""
        if what == "open":
            return self._open(**arguments)
        self._media = arguments.pop("media", {})
        read = {name: READ[name](value) if name in READ else value for name, value in arguments.items()}
        result = getattr(self._rank, what)(**read)
        if isinstance(result, LearnedBatch):
            return [learner.passes.part() for learner in result.learners]
        return result if isinstance(result, dict) else None  # rank 0 has gathered tensors itself

    def _open(self, model: Any, optimizer: Any, settings: Any, seed: int, critic: Any) -> None:
        """Make the rank and load its model, and its critic if there is one."""
        spec = spec_in(model)
        self._rank = Rank(
            self._place,
            self._store,
            model=spec,
            optimizer=msgspec.convert(optimizer, OptimizerSettings),
            settings=msgspec.convert(settings, RankSettings),
            seed=seed,
            images=image_cache(spec.folder, self._image),
            critic=msgspec.convert(critic, CriticStart | None),
        )
        self._rank.open()

    def _image(self, media: Media) -> bytes:
        try:
            return self._media[media.digest]
        except KeyError:
            raise ImageError(f"image {media.digest}: rank 0 did not send it") from None


def main() -> None:
    """Become the given command, as rank 0 of a launcher, or serve rank 0 as another rank."""
    place = RankPlace.given()
    if place is None:
        raise SystemExit(
            "rftstream.backends.deepspeed.rank: found no RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, "
            "expected those of a launcher; for ranks on one host set backends.deepspeed.processes instead"
        )
    if place.rank == 0:
        os.execv(sys.executable, [sys.executable, "-m", "rftstream", *sys.argv[1:]])
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # rank 0 says when to end
    code = serve(place)
    sys.stderr.flush()
    os._exit(code)  # threads still wait in torch's store, so a normal exit would end the process by a signal


def serve(place: RankPlace) -> int:
    """Carry out the calls of rank 0 until it sends `end` or a call fails, and return the exit code. The process also
    ends when rank 0 has ended in any way, or is silent. If ranks may change, it waits for a place in a world first, and
    for another one when that world is over."""
    asked_to_end = threading.Event()
    threading.Thread(target=_end_with_rank_0, args=(place.connect(), asked_to_end), daemon=True).start()
    if device := unpack((store := place.connect()).get(ELASTIC)):
        import_deepspeed(device)  # while the others still train
        found = wait_for_place(place, store)
        if found is None:
            return 0
        place, store = found, found.part_of(store)
        threading.Thread(target=_begin_again, args=(place.connect(),), daemon=True).start()
    threading.Thread(target=_end_in_silence, args=(place, place.connect()), daemon=True).start()
    calls = _Calls(place)
    for number, what, arguments in _calls_of(store):
        try:
            result = None if what == "end" else calls.carry_out(what, arguments)
        except Exception as error:
            log.debug("%s", what, exc_info=True)
            text = str(error) if isinstance(error, RftError) else f"{type(error).__name__}: {error}"
            store.set(f"failed/{place.rank}", pack({"what": what, "error": text, "of_others": is_of_others(error)}))
            if place.world:
                threading.Event().wait()  # for the end of the world, or of rank 0
            return 1
        if what == "end":
            asked_to_end.set()
        put(store, f"done/{number}/{place.rank}", result)
        if what == "end":
            return 0
    raise AssertionError("calls have no end")


def _calls_of(store: Any) -> Iterator[tuple[int, str, dict[str, Any]]]:
    number = 0
    while True:
        store.wait([f"call/{number}"], FOREVER)
        what, arguments = take(store, f"call/{number}")
        yield number, what, arguments
        number += 1


def _begin_again(store: Any) -> None:
    """Become a new process when this world is over, whatever this one waits for: in that state it can write nothing of
    the old world, and its network, device and DeepSpeed are as at the start."""
    store.wait([OVER], FOREVER)
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _end_with_rank_0(store: Any, asked_to_end: threading.Event) -> None:
    """End this process when rank 0 is gone, even while it waits for other ranks. That is an error unless rank 0 had
    asked for the end: rank 0 may be gone before this process has shut down."""
    try:
        store.wait(["never"], FOREVER)
    finally:
        os._exit(0 if asked_to_end.is_set() else 1)


def _end_in_silence(place: RankPlace, store: Any) -> None:
    """Beat, and end this process when rank 0 no longer beats. Rank 0's host may be cut off while connections to it stay
    open."""
    store.wait(["silence"], FOREVER)
    silence_s = float(unpack(store.get("silence")))
    heartbeat = Heartbeat(store, place.rank, [0], silence_s=silence_s)
    heartbeat.start()
    while not heartbeat.silent():
        time.sleep(BEAT_S)
        heartbeat.tick()
    log.critical(
        "backend deepspeed: rank %d of %d: rank 0 on %s was not heard of for %g s: it hangs, or its host is gone or "
        "cut off",
        place.rank,
        place.size,
        place.host,
        silence_s,
    )
    os._exit(1)


if __name__ == "__main__":
    main()
