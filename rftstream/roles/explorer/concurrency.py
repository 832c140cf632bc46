"""How many rollouts an explorer samples at once with `explorer.max_concurrent = "auto"`: decided by its engine's
measures.

Additive increase, multiplicative decrease (Chiu and Jain, 1989). An engine samples more tokens in a second with more
rollouts, up to a number that depends on model, machine and lengths. Beyond that number it samples equally many (a
knee), or fewer (a cliff), as an engine does that has to compute rollouts again for which it had no memory.

Nothing here looks at a clock: time is the engine's own, in which it had work.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

from rftstream import metrics
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import PolicySpec
from rftstream.config.role_sections import AUTO, ExplorerSection
from rftstream.errors import ConfigError
from rftstream.policies.base import EngineLoad, Policy

log = logging.getLogger(__name__)

MOST = 2048
"""Largest number that is tried."""
SAMPLE_S = 0.25
"""Seconds of the engine's work in one sample of its rate."""
FEWEST, MOST_SAMPLES = 8, 48
"""Samples after which two numbers of rollouts are compared: if the difference is clear, and in any case."""
CLEAR = 2.0
"""Standard errors that make a difference clear."""
WORTH = 0.05
"""Share of an increase that the engine must sample more for it: 5 % of the tokens for twice the rollouts. A decrease
must not cost more than that."""
AT_LEVEL = 0.9
"""Share of the allowed rollouts that must be sampled for the number to grow. With fewer, there are too few tasks."""
MORE = 1.05
"""Factor by which more rollouts must be sampled than before for a larger number to be judged."""
BACKOFF = 0.85
"""Factor by which the number falls when the engine has no room."""
REFUSED = 1.0
"""How often, for each allowed rollout, an engine may have no room in FEWEST samples. It costs some work, which the rate
of tokens shows; with more the number falls at once."""
FEWER = 0.6
"""Factor of a decrease that is tried."""
ROOM, FULL = 0.95, 0.99
"""Share of the engine's memory up to which the number may grow, by what its rollouts take now, and from which on it
falls."""
QUEUE = 0.1
"""Share of the allowed rollouts from which on those that wait in the engine are the ones that it is tried without."""
FALLEN = 0.8
"""Share of the known rate below which it is measured again, and a decrease is tried."""
PATIENCE_S, LONGEST_PATIENCE_S = 15.0, 120.0
"""Seconds between two tries when a number was found. They double with each try that changes nothing."""


def concurrency_controller(settings: ExplorerSection) -> ConcurrencyController | None:
    """Return the controller that the settings ask for, or None for a fixed number. ConfigError if the policy does not
    say how busy its engine is."""
    if settings.max_concurrent != AUTO:
        return None
    if settings.policy != AUTO and not registry.find_spec(PolicySpec, settings.policy).says_load:
        raise ConfigError(
            f"explorer.max_concurrent: got 'auto', but policy {settings.policy!r} does not say how busy its engine is; "
            "set a number"
        )
    return ConcurrencyController(start=settings.first_concurrent, most=MOST)


class SamplingPlaces:
    """The number of rollouts that an explorer may sample at once: fixed, or what a controller decides. The step makes
    it, and calls `look` in each slice of its work."""

    def __init__(
        self,
        settings: ExplorerSection,
        policy: Policy,
        controller: ConcurrencyController | None,
        engine_load: Callable[[], EngineLoad] | None,
    ) -> None:
        """`engine_load`: returns the engine's measures, for the controller."""
        self._settings, self._policy = settings, policy
        self._controller, self._engine_load = controller, engine_load
        self.is_adaptive = controller is not None
        """Whether the number may change."""
        metrics.MAX_CONCURRENT.set(self.limit)

    @property
    def limit(self) -> int:
        """The number. With `yield_after_tokens` as many more rollouts wait for a place."""
        limit = self._settings.first_concurrent if self._controller is None else self._controller.limit
        return min(limit, self._policy.slots) if self._settings.yield_after_tokens else limit

    def look(self, num_sampled: int) -> None:
        """Let the controller see how busy the engine is with this number of rollouts."""
        if self._controller is None or self._engine_load is None:
            return
        before = self._controller.limit
        self._controller.observe(self._engine_load(), num_sampled)
        if self._controller.limit != before:
            metrics.MAX_CONCURRENT.set(self.limit)
            log.info("samples up to %d rollouts at once, no longer %d", self._controller.limit, before)


@dataclass(frozen=True, slots=True)
class _Rate:
    """The tokens that an engine samples in a second with a number of rollouts."""

    limit: int
    """Rollouts that were allowed."""
    rollouts: float
    """Rollouts that were sampled."""
    tokens: float
    error: float
    """Standard error, as a share of the rate."""


class ConcurrencyController:
    """Decides how many rollouts may be sampled at once. The worker makes it; the explorer's step calls `observe` in
    each slice of its work, and begins rollouts while there are fewer than `limit`.

    It compares two numbers, one after the other: the one that is known (`_base`), and a larger or smaller one. From
    `start` on it doubles the number while that is worth it. Then it adds equal steps, and halves the step after each
    that was not worth it. When steps are small it rests, and tries more and fewer rollouts now and then. If the engine
    has no room, the number falls at once, and the number that was too large is not tried again before the next rest is
    over. A restarted process begins again from `start`."""

    def __init__(self, *, start: int, most: int = MOST) -> None:
        """`most`: the largest number that is tried."""
        self._most = most
        self.limit = min(start, most)
        """Number of rollouts that may be sampled at once."""
        self._base: _Rate | None = None
        """The rate that a try is compared with; None until it is measured."""
        self._is_trial = False
        self._doubles = True
        self._step = 0
        self._ceiling = most + 1
        """The smallest number that was too large."""
        self._patience_s, self._rests_until, self._looks_up = PATIENCE_S, 0.0, False
        self._num_refused = 0
        self._has_descended = False
        """Whether fewer rollouts were better in the try before this one, too."""
        self._was_cut = False
        """Whether the number has fallen, and more rollouts than that are still being sampled."""
        self._counts_from: tuple[float, int] | None = None
        """The engine's seconds and tokens at the beginning of the current sample; None while too few or too many
        rollouts are sampled."""
        self._settled_at = 0.0
        """The engine's seconds from which on the number of rollouts shows in its tokens."""
        self._begin_level()

    def observe(self, load: EngineLoad, num_sampled: int) -> None:
        """Take the engine's measures. `num_sampled`: rollouts that are being sampled now."""
        self._was_cut = self._was_cut and num_sampled > self.limit
        if self._was_cut:
            self._num_refused = load.num_refused
        has_no_room = load.num_refused - self._num_refused > REFUSED * self.limit or load.memory >= FULL
        if has_no_room and not self._was_cut:
            self._cut(max(1, int(min(self.limit, max(num_sampled, 1)) * BACKOFF)), load)
        if not self._counts(num_sampled):
            self._counts_from = None
        elif self._counts_from is None:
            self._counts_from, self._settled_at = (load.busy_s, load.num_tokens), load.busy_s + SAMPLE_S + load.lag_s
        elif load.busy_s < self._settled_at:
            self._counts_from = (load.busy_s, load.num_tokens)
        elif load.busy_s - self._counts_from[0] >= SAMPLE_S:
            since_s, tokens = self._counts_from
            self._counts_from = (load.busy_s, load.num_tokens)
            if load.num_tokens > tokens:
                self._rates.append((load.num_tokens - tokens) / (load.busy_s - since_s))
                self._waiting.append(load.num_waiting)
                self._rollouts.append(num_sampled)
                for samples in (self._rates, self._waiting, self._rollouts):
                    del samples[:-MOST_SAMPLES]
                self._num_samples += 1
                if self._num_samples % FEWEST == 0:
                    self._num_refused = load.num_refused
                if self._num_samples >= FEWEST:
                    self._decide(load)

    def _counts(self, num_sampled: int) -> bool:
        """Return whether a sample with this number of rollouts says something about the number that is allowed."""
        if num_sampled > self.limit:
            return False  # they become fewer as they finish
        is_more = self._is_trial and self._base is not None and num_sampled > MORE * self._base.rollouts
        return is_more or num_sampled >= AT_LEVEL * self.limit

    # ------------------------------------------------------------------------------------------ what it decides

    def _decide(self, load: EngineLoad) -> None:
        now = self._measured()
        if self._base is None or not self._is_trial:
            if self._base is not None and now.tokens < FALLEN * self._base.tokens:
                self._base, self._patience_s = None, PATIENCE_S
                self._rests_until, self._looks_up = load.busy_s, True
                self._begin_level()
                return
            if self._base is None or load.busy_s >= self._rests_until:
                self._base = now
            if load.busy_s >= self._rests_until:
                self._try_next(load)
        else:
            base = self._base
            gain = math.log(now.tokens / base.tokens) - WORTH * math.log(now.rollouts / base.rollouts)
            error = math.hypot(now.error, base.error)
            if abs(gain) > CLEAR * error or self._num_samples >= MOST_SAMPLES:
                self._end_trial(now, base, load, is_better=gain > 0, error=error)

    def _end_trial(self, now: _Rate, base: _Rate, load: EngineLoad, *, is_better: bool, error: float) -> None:
        """Keep the number that was tried, or go back to the known one."""
        change = math.log(now.tokens / base.tokens)
        is_clear, went_up, doubled = abs(change) > CLEAR * error, now.limit > base.limit, self._doubles
        self._is_trial = False
        if is_better:
            self._base = now
            if is_clear and not doubled:
                self._patience_s = PATIENCE_S
            if not went_up:
                self._has_descended = True
                self._try_fewer(load)
            elif doubled or is_clear:
                self._try_next(load)
            else:
                self._rest(load)
            return
        if went_up:
            self._doubles, self._step = False, max(1, base.limit // 4) if doubled else self._step // 2
            if doubled:  # between both it may be best, or with even fewer, if it makes no difference
                self._try((base.limit + now.limit) // 2 if is_clear else round(base.limit * FEWER))
                return
        self._base = None
        self._set(base.limit)
        if not went_up and self._has_descended:
            self._step = max(1, base.limit // 4)
        elif not went_up or self._step < max(1, base.limit // 16):
            self._rest(load)
        self._has_descended = False

    def _try_fewer(self, load: EngineLoad) -> None:
        """Try fewer rollouts: without those that the engine has no place for, if there are any."""
        waiting = fmean(self._waiting) if self._waiting else 0.0
        fewer = self.limit - waiting if waiting > QUEUE * self.limit else self.limit * FEWER
        if self.limit > 1:
            self._try(round(fewer))
        else:
            self._rest(load)

    def _try_next(self, load: EngineLoad) -> None:
        """Try the next number: more rollouts, or after a rest in turns more and fewer."""
        assert self._base is not None, "it was measured"
        if self._base.rollouts < AT_LEVEL * self.limit:
            self._rest(load)
            return
        if self._rests_until:
            self._rests_until, self._looks_up = 0.0, not self._looks_up
            self._ceiling = self._most + 1
            if not self._looks_up:
                self._try_fewer(load)
                return
            self._step = max(1, self.limit // 8)
        wanted = self.limit + (self.limit if self._doubles else self._step)
        if load.memory > 0:
            wanted = min(wanted, int(self.limit * ROOM / load.memory))
        if wanted >= self._ceiling:
            wanted = (self.limit + self._ceiling) // 2
        if wanted - self.limit < max(1, self.limit // 16):
            self._doubles = False
            self._rest(load)
        else:
            self._try(wanted)

    def _try(self, limit: int) -> None:
        limit = max(1, min(limit, self._most))
        if limit != self.limit:
            self._is_trial = True
            self._set(limit)

    def _cut(self, limit: int, load: EngineLoad) -> None:
        """Fall to a number because the engine has no room for more."""
        self._ceiling = self.limit
        self._doubles, self._step, self._base, self._is_trial = False, max(1, limit // 8), None, False
        self._was_cut = True
        self._set(limit)

    def _rest(self, load: EngineLoad) -> None:
        self._rests_until = load.busy_s + self._patience_s
        self._patience_s = min(2 * self._patience_s, LONGEST_PATIENCE_S)

    def _set(self, limit: int) -> None:
        self.limit = limit
        self._begin_level()

    def _begin_level(self) -> None:
        self._rates: list[float] = []
        self._waiting: list[int] = []
        self._rollouts: list[int] = []
        self._num_samples = 0
        self._counts_from = None

    def _measured(self) -> _Rate:
        middle = median(self._rates)
        spread = median(abs(rate - middle) for rate in self._rates)
        # 1.48: from the median's deviation to the standard deviation; 1.25: from the mean's error to the median's.
        return _Rate(
            self.limit, median(self._rollouts), middle, 1.25 * 1.48 * spread / middle / math.sqrt(len(self._rates))
        )
