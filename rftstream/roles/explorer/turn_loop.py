"""The turn loop: it asks the environment, samples from the policy, and passes the turn to the environment, until the
environment ends the rollout.

Explorer and evaluator drive many rollouts at once with one policy. Environments run beside the sampling
(environments/calls.py), so that a slow reply delays only its own rollout.

A rollout is kept as segments. The prompt of the next turn consists of the existing tokens and the new ones, so sampled
tokens are never tokenised again. If the renderer cannot prove that the existing tokens stay the same (an agent rewrote
its context, a template changes earlier turns), a new segment begins.

A rollout can be paused, and saved piece by piece. Any process that has the pieces can continue it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rftstream import metrics
from rftstream.contracts.rollouts import RolloutStatus, StoredState, Turn
from rftstream.contracts.tasks import Problem, Sampling
from rftstream.environments.base import Environment, Reply
from rftstream.environments.calls import EnvironmentCalls
from rftstream.models.rendering import Renderer
from rftstream.policies.base import Completion, Policy, SampleRequest, form_of
from rftstream.roles.explorer.attempt import (
    CUT_SHORT,
    Attempt,
    FailureLog,
    find_oddity,
    recordable_call,
    without_more,
)
from rftstream.roles.explorer.environment_session import (
    CallFailure,
    EnvironmentSession,
    KeepMedia,
    Opening,
    StateKeeper,
    add_reply,
)
from rftstream.roles.explorer.open_rollout import Increment, OpenRollout, Phase, RolloutView
from rftstream.roles.explorer.saved.pieces import SavedRollout, go_on_from

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
"""Seconds between two checks for rollouts that exceed their time limit."""

MakeEnvironment = Callable[[str, str, Problem, int], Environment]
"""(place in the run file that names the environment, its name, problem, seed) -> environment."""


class TurnLoop:
    """Many rollouts with one policy. `workers/` makes one for an explorer's or an evaluator's step. The step calls
    `start` for each rollout, and `step` again and again, which returns ended rollouts. In between a rollout may be
    saved, paused (until `go_on`), cut short or aborted.

    A rollout takes these steps. Its environment starts (`_opened`). `_ask` renders the conversation, `_submit` passes
    it to the policy, `_on_completion` asks the environment for an answer, and `_on_reply` takes the answer. These steps
    repeat until `_end`."""

    def __init__(
        self,
        *,
        policy: Policy,
        renderer: Renderer,
        make_environment: MakeEnvironment,
        context: int | None,
        now: Callable[[], float],
        calls: EnvironmentCalls | None = None,
        is_immediate: Callable[[str], bool] = lambda name: False,
        has_one_turn: Callable[[str], bool] = lambda name: False,
        reply_timeout_s: float = math.inf,
        rollout_timeout_s: float = 0.0,
        keep: KeepMedia | None = None,
        version_of: Callable[[str, str], str] = lambda where, name: "",
    ) -> None:
        """`calls` runs the calls of environments; with None they run in this thread. `is_immediate` tells whether
        environments of a name never block. `has_one_turn` tells whether they end with the first completion.
        `reply_timeout_s` is the time limit of `calls`, shown in errors. `rollout_timeout_s` is 0 for no limit. `keep`
        moves images from environments to the store; with None they stay in the messages. `version_of` returns the
        digest of an environment that was made, by its place and name."""
        self._keep, self._version_of = keep, version_of
        self.policy = policy
        self.renderer = renderer
        self.calls = calls or EnvironmentCalls(now=now)
        self._make_environment = make_environment
        self._is_immediate, self._has_one_turn = is_immediate, has_one_turn
        self._reply_timeout_s = reply_timeout_s
        self._rollout_timeout_s = rollout_timeout_s
        self._context = context if context is not None else math.inf
        self._now = now
        self._look_at = -math.inf
        self._open: dict[str, OpenRollout] = {}
        self._finished: list[Attempt] = []
        self._failures = FailureLog()

    @property
    def num_open(self) -> int:
        """Number of rollouts that have not ended, with paused ones."""
        return len(self._open)

    def idle_s(self) -> float:
        """Return the seconds for which `step` has nothing to do except the policy's work. Environments may answer
        earlier."""
        if self._finished:
            return 0.0
        return min(self.calls.idle_s(), LOOK_EVERY_S if self._rollout_timeout_s and self._open else math.inf)

    def start(
        self,
        key: str,
        *,
        problem: Problem,
        sampling: Sampling,
        seed: int,
        environment: str,
        where: str,
        truncate: bool = False,
        renderer: Renderer | None = None,
        saved: SavedRollout | None = None,
        on_resumed: Callable[[bool], None] = lambda goes_on: None,
        name: str = "",
        group: str = "",
        min_version: int = 0,
        states: StateKeeper | None = None,
    ) -> None:
        """Begin a rollout, or continue it from `saved`. `on_resumed` is then called with True if it continues, and with
        False if it starts over because its environment could not continue.

        `environment` is the environment's name. `where` is the place in the run file that names it, and that may have
        settings for it. With `truncate`, a prompt longer than the context is cut from the left; otherwise the attempt
        fails. `renderer` is for a chat template other than the loop's. `name` identifies the rollout in log lines; by
        default it is the key. `group` is the common name of the rollouts of one problem. `min_version` is the oldest
        version that may sample a token. `states` stores large states of the environment; with None all states are
        returned unchanged."""

        def make_session() -> EnvironmentSession:
            return EnvironmentSession(
                self.calls.open(is_immediate=self._is_immediate(environment)),
                lambda: self._make_environment(where, environment, problem, seed),
                name=environment,
                timeout_s=self._reply_timeout_s,
                version=partial(self._version_of, where, environment),
                states=states,
                keep=self._keep,
            )

        state = self._open[key] = OpenRollout(
            key=key,
            session=make_session(),
            problem=problem,
            sampling=sampling,
            seed=seed,
            messages=list(problem.messages),
            started_at=self._now(),
            truncate=truncate,
            renderer=renderer or self.renderer,
            name=name or key,
            group=group,
            min_version=min_version,
            context=self._context,
            has_one_turn=self._has_one_turn(environment),
        )
        opened = partial(self._opened, state, saved, on_resumed, make_session)
        if saved is None:
            state.session.begin(opened)
        else:
            state.session.resume(saved.environment_state, saved.messages, opened)

    def _opened(
        self,
        state: OpenRollout,
        saved: SavedRollout | None,
        on_resumed: Callable[[bool], None],
        make_session: Callable[[], EnvironmentSession],
        opening: Opening | CallFailure,
    ) -> None:
        """Ask for the first turn, or continue the saved rollout. Start over if the environment cannot continue."""
        if isinstance(opening, Opening):
            state.tools = (*state.problem.tools, *opening.tools)
        if saved is None and isinstance(opening, CallFailure):
            self._fail(state, opening.text, opening.error)
        elif isinstance(opening, CallFailure):
            log.warning("%s: its environment cannot go on: %s; it is begun anew", state.name, opening.text)
            on_resumed(False)
            state.session.close(partial(self._failures.of_call, state.name))
            state.session = make_session()
            state.session.begin(partial(self._opened, state, None, on_resumed, make_session))
        elif saved is None:
            state.messages = list(opening.messages)
            self._ask(state, num_said=0)
        else:
            go_on_from(state, saved)
            on_resumed(True)
            if (ended := state.end_of_saved()) is not None:
                self._on_completion(state, without_more(state.key, ended))
            else:
                self._submit(state)

    def abort(self, key: str) -> None:
        """Abort a rollout. `step` returns nothing for it."""
        state = self._open.pop(key, None)
        if state is not None:
            self.policy.abort(key)
            state.session.close(partial(self._failures.of_call, state.name))

    def close(self) -> None:
        """Abort all rollouts, and end the calls of their environments."""
        for key in list(self._open):
            self.abort(key)
        self.calls.close()

    # ------------------------------------------------------------------------------------------ unfinished ones

    def view(self, key: str) -> RolloutView:
        """Return a read-only view of a rollout."""
        return RolloutView(self._open.get(key), self.policy.so_far(key))

    def save(self, key: str) -> Increment | None:
        """Return the rollout's new part since the last save; None if there is none, or if it cannot be saved now.

        If the environment must be asked for its state, call again once the rollout is not `is_calling` any more."""
        state, so_far = self._open[key], self.policy.so_far(key)

        def on_state(found: bytes | StoredState | CallFailure | None) -> None:
            if isinstance(found, CallFailure):
                log.warning("%s: its environment cannot be saved: %s", state.name, found.text)
            state.state_turn = state.turn
            state.environment_state = None if isinstance(found, CallFailure) else found
            held, state.held = state.held, None
            if isinstance(found, CallFailure) and found.timed_out:
                self._give_up(state, found.text)
            elif held is not None:
                self._on_completion(state, held)

        if state.lacks_state(so_far) and not state.session.is_busy:
            state.session.save(on_state)
        if key not in self._open or (state.session.is_busy and state.phase is Phase.sampling):
            return None
        return state.increment(so_far)

    def pause(self, key: str) -> bool:
        """Let the policy forget the rollout until `go_on`. A running call of its environment continues. Return False if
        the rollout is about to finish and therefore is not paused."""
        state, so_far = self._open[key], self.policy.so_far(key)
        if so_far is not None:
            self.policy.abort(key)
            state.carry(so_far)
        elif state.is_in_policy:
            return False
        state.is_paused = True
        return True

    def go_on(self, key: str) -> None:
        """Resume sampling of a paused rollout."""
        state = self._open[key]
        state.is_paused = False
        if state.phase is Phase.sampling and state.held is None:
            self._submit(state)

    def cut(self, key: str, reason: str) -> None:
        """End the rollout with its tokens so far, with the status `truncated`."""
        so_far = self.policy.so_far(key)
        if so_far is not None:
            self.policy.abort(key)
            self._on_completion(self._open[key], replace(so_far, finish_reason=reason))

    def step(self) -> list[Attempt]:
        """Process answers of environments, and do one slice of the policy's work. Return the rollouts that ended."""
        if self._open or self.calls.num_running:
            self.calls.poll()
        if self._open:
            for completion in self.policy.step():
                state = self._open.get(completion.request_id)
                if state is not None:
                    self._on_completion(state, completion)
            if self._rollout_timeout_s and self._now() >= self._look_at:
                self._look_at = self._now() + LOOK_EVERY_S
                for state in list(self._open.values()):
                    if self._now() - state.started_at >= self._rollout_timeout_s:
                        self._give_up(state, f"not finished within {self._rollout_timeout_s:g} s")
        finished, self._finished = self._finished, []
        return finished

    # ------------------------------------------------------------------------------------------ turns

    def _ask(self, state: OpenRollout, *, num_said: int) -> None:
        """Render the conversation for the next turn. The last `num_said` tokens belong to the previous turn."""
        try:
            prompt = state.next_prompt(num_said)
        except Exception as error:  # a template or a tokenizer may reject the environment's messages
            self._fail(state, f"the messages cannot be rendered: {error!r}", error)
            return
        if prompt.break_reason is not None:
            metrics.SEGMENT_BREAKS.labels(prompt.break_reason.value).inc()
        if self._context - prompt.length < 1:
            if state.turns:
                self._end(state, RolloutStatus.truncated, None)
                return
            if not state.truncate:
                why = f"a prompt of {prompt.length} tokens leaves no room in the context of {self._context}"
                self._end(state, RolloutStatus.failed, why)
                return
            if prompt.images:
                why = f"a prompt of {prompt.length} tokens with images cannot be cut to the context of {self._context}"
                self._end(state, RolloutStatus.failed, why)
                return
            keep = max(1, int(self._context) - state.sampling.max_tokens)
            prompt = replace(prompt, token_ids=prompt.token_ids[-min(keep, int(self._context) - 1) :])
        state.ask(prompt)
        self._submit(state)

    def _submit(self, state: OpenRollout) -> None:
        """Submit a turn to the policy, unless the rollout is paused. The last segment is the prompt, with the tokens of
        this turn so far."""
        state.phase = Phase.sampling
        if state.is_paused:
            return
        self.policy.submit(
            SampleRequest(
                request_id=state.key,
                token_ids=tuple(state.segments[-1].token_ids),
                sampling=state.sampling,
                seed=state.seed + state.turn,
                max_tokens=state.num_left,
                num_sampled=state.carried,
                sampler_state=state.sampler_state,
                images=tuple(state.segments[-1].images),
                group_id=state.group,
                rollout_id=state.name,
                may_go_on=not state.has_one_turn,
                messages=tuple(state.messages),
                min_version=state.min_version,
                constraint=form_of(state.sampling),
            )
        )

    def _on_completion(self, state: OpenRollout, completion: Completion) -> None:
        """Ask the environment for its answer to the finished turn."""
        if state.session.is_busy:  # its state is being saved, and only one call may run
            state.held = completion
            return
        if completion.finish_reason == "error":
            self._fail(state, completion.error or "the policy failed")
            return
        if odd := find_oddity(completion):
            self._fail(state, f"the policy gave {odd}")
            return
        state.carry(completion)
        if state.gives_up is not None:
            self._give_up(state, state.gives_up)
            return
        state.phase = Phase.replying
        segment, count = state.segments[-1].token_ids, state.carried
        said = state.renderer.parse(
            segment[: len(segment) - count],
            state.carried_ids,
            tools=state.tools,
            finish_reason=completion.finish_reason,
            turn=state.turn,
        )
        if said.tool_calls:
            said = replace(said, tool_calls=tuple(map(recordable_call, said.tool_calls)))
        state.said = said
        state.session.reply(said, lambda reply: self._on_reply(state, reply))

    def _on_reply(self, state: OpenRollout, reply: Reply | CallFailure) -> None:
        """Process the answer to a turn: the rollout ends, or the next turn is sampled."""
        if isinstance(reply, CallFailure):
            if reply.timed_out:
                self._give_up(state, reply.text)
            else:
                state.end_turn()
                self._fail(state, reply.text, reply.error)
            return
        said, ids = state.said, state.carried_ids
        assert said is not None
        state.posted = add_reply(state.posted, reply, state.turn, state.session.version)
        state.metrics = metrics.named_by_people(reply.metrics, kept=state.metrics)
        state.end_turn(reward=reply.reward if reply.reward is not None and math.isfinite(reply.reward) else None)
        truncated = said.finish_reason in CUT_SHORT
        if reply.done or truncated:
            self._end(state, RolloutStatus.truncated if truncated else RolloutStatus.completed, None)
            return
        if reply.rewrite is None:
            state.messages += (state.renderer.as_chat_message(said, ids), *reply.messages)
        else:
            state.messages = list(reply.rewrite)
        state.turns.extend(Turn(role=message.role, content=message.content) for message in reply.messages)
        state.turn += 1
        if state.num_tokens >= state.sampling.max_tokens:
            self._end(state, RolloutStatus.truncated, None)
            return
        self._ask(state, num_said=len(ids))

    def _give_up(self, state: OpenRollout, text: str) -> None:
        """End the rollout with its tokens so far, since it or its environment took too long. A rollout without sampled
        tokens has failed."""
        so_far = self.policy.so_far(state.key)
        if so_far is None and state.is_in_policy and not state.gives_up:
            state.gives_up = text
            return
        self.policy.abort(state.key)
        held = state.held if state.held is not None and not find_oddity(state.held) else None
        state.give_up_turn(so_far if so_far is not None else held)
        self._end(state, RolloutStatus.truncated if state.num_tokens else RolloutStatus.failed, text)

    def _fail(self, state: OpenRollout, text: str, error: BaseException | None = None) -> None:
        self._failures.say(state.name, text, error)
        self._end(state, RolloutStatus.failed, text)

    def _end(self, state: OpenRollout, status: RolloutStatus, error: str | None) -> None:
        self._open.pop(state.key, None)
        state.session.close(partial(self._failures.of_call, state.name))
        self._finished.append(
            Attempt(
                key=state.key,
                status=status,
                turns=tuple(state.turns),
                segments=tuple(segment.close() for segment in state.segments),
                num_tokens=state.num_tokens,
                error=error,
                metrics=state.metrics,
                started_at=state.started_at,
                posted=state.posted,
            )
        )
