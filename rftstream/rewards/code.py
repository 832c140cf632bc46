"""Code: the program in the answer is run on the problem's tests, in a sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from rftstream.errors import ConfigError, RewardError
from rftstream.rewards.base import RewardInput, Score
from rftstream.rewards.code_asserts import defined_in
from rftstream.rewards.code_program import find_program
from rftstream.rewards.code_tests import (
    CheckTests,
    FunctionTests,
    ProblemTests,
    StdioTests,
    holds_decimals,
    int_keys,
    read_tests,
    reference_solutions,
)
from rftstream.rewards.evaluating import allow_time
from rftstream.rewards.version import config_version
from rftstream.sandbox import cgroups
from rftstream.sandbox.base import MIB, Isolation, Limits, Outcome, Sandbox, SandboxBackend, SandboxError
from rftstream.sandbox.compare import same_value, shown, value_difference
from rftstream.sandbox.imports import USUAL_IMPORTS
from rftstream.sandbox.inside import plain
from rftstream.sandbox.languages import language_name
from rftstream.sandbox.layers import weaknesses
from rftstream.sandbox.local import default_backend
from rftstream.sandbox.place import START_S
from rftstream.sandbox.program_run import GRACE_S
from rftstream.sandbox.remote import RemoteBackend
from rftstream.sandbox.run import COMPILE_LIMITS, CallEnd, ProgramResult, run_check, run_function, run_tests

_REASONS = ("wrong", "crash", "compile", "wall", "cpu", "memory", "output")


class CodeReward:
    """1 if the program passes all tests, or the share of tests that it passes.

    A program's failure is 0 and is counted in a metric by its reason. If the sandbox fails, there is no reward.
    """

    reads_tokens = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.code]`."""

        give: Literal["all", "share"] = "all"
        """`all`: 1 if every test passes. `share`: the share of tests that pass."""
        tests: str = ""
        """The column with the tests. Empty: `tests`, or the column of APPS, TACO, LiveCodeBench, HumanEval or MBPP."""
        language: str = "python"
        """The language of programs, unless the problem has a column `language`."""
        max_tests: Annotated[int, Meta(ge=0)] = 0
        """Largest number of a problem's tests that are run, beginning with the first. 0: all."""
        tolerance: Annotated[float, Meta(ge=0)] = 0.0
        """Greatest difference, relative or absolute, of numbers that count as equal."""
        imports: bool = True
        """Put the usual imports before a Python program (`from typing import *` and others), as the graders of these
        data sets do."""
        solution: str = ""
        """The column with one or several right programs, which `rftstream check` runs on the tests. Empty: `solution`,
        `solutions`, `canonical_solution` or `code`."""
        wall_s: Annotated[float, Meta(gt=0)] = 10.0
        """Seconds for each test; at most ten times as many for all calls of a function together."""
        cpu_s: Annotated[float, Meta(gt=0)] = 10.0
        """Processor seconds for each test."""
        memory_mib: Annotated[int, Meta(ge=32)] = 512
        """Memory of a program."""
        sandbox_url: str = ""
        """A server of `rftstream sandbox serve`. Empty: this machine."""
        auth_token: str = ""
        """The token of that server, as `env:NAME`."""
        isolation: Literal["full", "shared_user"] = "full"
        """`shared_user`: programs run as the verifier's user, for machines on which only root may make user namespaces.
        That is weaker: `check`, `doctor` and the scorer's version name it."""
        wait_s: Annotated[float, Meta(gt=0)] = 600.0
        """Largest number of seconds to wait for the server's answer, in addition to the programs' time. The server may
        have no free place for a while."""

    def __init__(self, config: Config) -> None:
        language_name(config.language)
        self._config = config
        version = config_version("4", replace(config, auth_token="", wait_s=1.0))
        self.version = "+".join([version, *(() if config.sandbox_url else weaknesses(Isolation(config.isolation)))])
        self._remote = (
            RemoteBackend(config.sandbox_url, token=config.auth_token, wait_s=config.wait_s)
            if config.sandbox_url
            else None
        )

    def open(self) -> None:
        """Remove the remains of killed processes' sandboxes on this machine."""
        if self._remote is None:
            cgroups.sweep_all()

    def __call__(self, item: RewardInput) -> Score:
        tests = self._tests(item)
        source = find_program(item.conclusion, tests, self._language(item))
        if source is None:
            return Score(reward=0.0, metrics={"no_program": 1.0}, detail="the answer has no program")
        try:
            passed, results = self._run(source, tests, item)
        except SandboxError as error:
            raise RewardError(str(error)) from None
        finally:
            allow_time(0.0)
        for result in results:
            if result.outcome is Outcome.unscorable:
                raise RewardError(f"code: {result.reason}: {result.detail}")
        share = sum(passed) / len(passed)
        reward = share if self._config.give == "share" else float(all(passed))
        metrics = {f"failed_{reason}": float(any(result.reason == reason for result in results)) for reason in _REASONS}
        metrics |= {"tests_passed": share, "no_program": 0.0}
        return Score(
            reward=reward, metrics=metrics, detail="" if all(passed) else self._first_failure(tests, passed, results)
        )

    def check(self, item: RewardInput) -> None:
        """Raise RewardError if the problem's tests cannot be read, or its language is unknown."""
        self._tests(item)

    def references(self, item: RewardInput) -> list[str]:
        """Return right completions: those with the problem's own right programs. The answer is one if it defines
        something."""
        found = reference_solutions(item.info, self._config.solution)
        if not found and not self._config.solution and item.answer and defined_in(item.answer):
            found = [item.answer]
        return [f"```\n{text}\n```" for text in found]

    def doubts(self, items: Sequence[RewardInput]) -> list[str]:
        """Return a hint about `tolerance` if outputs contain decimals, since right programs may print other digits."""
        if self._config.tolerance:
            return []
        decimal = sum(holds_decimals(self._tests(item)) for item in items)
        if not decimal:
            return []
        return [
            f"code: the outputs of {decimal:,} of {len(items):,} problems hold decimals, and rewards.code.tolerance "
            "is 0, so other last digits are wrong (0.3333 for 0.333333); set it, for example to 1e-6"
        ]

    def _language(self, item: RewardInput) -> str:
        language = str(item.info.get("language") or self._config.language)
        try:
            return language_name(language)
        except ConfigError as error:
            raise RewardError(f"code: {error}") from None

    def _tests(self, item: RewardInput) -> ProblemTests:
        tests = read_tests(item.info, item.answer, item.prompt, column=self._config.tests)
        language = self._language(item)
        if not isinstance(tests, StdioTests) and language != "python":
            raise RewardError(
                f"code: tests that call a function are for Python, and the problem's language is {language}"
            )
        return tests

    def _backend(self, limits: Limits) -> SandboxBackend:
        start_s = self._config.wait_s if self._remote else 2 * START_S
        allow_time(start_s)
        seconds = start_s + max(limits.hard_s, COMPILE_LIMITS.hard_s) + GRACE_S
        return _TimedBackend(self._remote or default_backend(Isolation(self._config.isolation)), seconds)

    def _run(
        self, source: str, tests: ProblemTests, item: RewardInput
    ) -> tuple[Sequence[bool], Sequence[ProgramResult]]:
        most = self._config.max_tests or None
        limits = self._limits(tests, most)
        prelude = USUAL_IMPORTS if self._config.imports else ""
        where: dict[str, Any] = {"prelude": prelude, "limits": limits, "backend": self._backend(limits)}
        match tests:
            case StdioTests():
                given: dict[str, Any] = {"language": self._language(item), "tolerance": self._config.tolerance}
                given |= {"stop_early": self._config.give == "all", "keep_output": False}
                results = run_tests(source, tests.pairs[:most], **given, **where)
                return [result.passed for result in results], results
            case FunctionTests():
                calls, expected = tests.calls[:most], tests.expected[:most]
                result = run_function(source, tests.function, calls, **where)
                ends = result.calls or [CallEnd(passed=False, error="-")] * len(calls)
                passed = [self._is_right(*pair) for pair in zip(ends, expected, strict=True)]
                if result.outcome is Outcome.finished and not all(passed):
                    result = replace(result, reason="wrong")
                return passed, [result]
            case CheckTests():
                result = run_check(source, tests.test, tests.entry_point, context=tests.context, **where)
                return [result.passed], [result]

    def _first_failure(self, tests: ProblemTests, passed: Sequence[bool], results: Sequence[ProgramResult]) -> str:
        """Return which test failed first, with its input, and what was expected and came instead."""
        first = passed.index(False)
        result, count = results[min(first, len(results) - 1)], self._config.max_tests or None
        match tests:
            case StdioTests() if result.reason != "compile":
                which = f"test {first + 1} of {len(tests.pairs[:count])}, input {shown(tests.pairs[first][0])}"
            case FunctionTests() if result.calls:
                call, expected = result.calls[first], tests.expected[first]
                got = value_difference(call.value, expected, tolerance=self._config.tolerance)
                arguments = ", ".join(map(shown, tests.calls[first]))
                which = f"test {first + 1} of {len(tests.calls[:count])}, {tests.function}({arguments})"
                return f"{which}: {f'{call.error}, expected {shown(expected)}' if call.error else got}"
            case _:
                which = result.reason
        return f"{which}: {result.detail.strip()}"

    def _is_right(self, call: CallEnd, expected: object) -> bool:
        """Return whether a call gave the expected value. Some data sets wrap it in a list of one, and JSON turns its
        keys into texts."""
        if call.error:
            return False
        meant = [expected, int_keys(expected)]
        if isinstance(expected, list) and len(expected) == 1:
            meant += [expected[0], int_keys(expected[0])]
        return any(same_value(call.value, one, tolerance=self._config.tolerance) for one in meant)

    def _limits(self, tests: ProblemTests, most: int | None) -> Limits:
        """Return the limits of one run. A program may write a multiple of the expected output."""
        config, times, expected = self._config, 1, 0
        if isinstance(tests, FunctionTests):
            times, expected = min(10, len(tests.calls[:most])), len(plain.encode(tests.expected[:most]))
        elif isinstance(tests, StdioTests):
            expected = max(len(stdout) for _, stdout in tests.pairs[:most])
        return Limits(
            wall_s=config.wall_s * times, cpu_s=config.cpu_s * times, call_s=config.cpu_s,
            memory_bytes=config.memory_mib * MIB, output_bytes=min(48 * MIB, Limits().output_bytes + 10 * expected),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _TimedBackend:
    """A back end that asks the scorer for more time whenever it makes a sandbox: as many seconds as the sandbox may
    take."""

    backend: SandboxBackend
    seconds: float

    def create(self, *, disk_bytes: int = 64 * MIB) -> Sandbox:
        """Return a new sandbox."""
        allow_time(self.seconds)
        return self.backend.create(disk_bytes=disk_bytes)

    def close(self) -> None:
        """End everything that the back end holds."""
        self.backend.close()
