"""Settings of built-in parts that bound something, and where each is reached. A new one needs a row. Those of sections
have theirs in tests/e2e/test_bounds.py, constants in tests/unit/test_constants.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from rftstream.config.parts import registry
from rftstream.data.operators.draws import SolveRate
from rftstream.data.operators.texts import detect
from rftstream.rewards.math import MathReward
from tests.e2e.test_bounds import bounds_in
from tests.suite.each import each
from tests.unit.data.test_task_operators import draw_of, facts_of
from tests.unit.rewards.test_code import reward_input, score

HERE = "tests/unit/config/test_part_bounds.py"
NO_BOUND = "no bound"
_UNIT = "tests/unit"

REACHED: dict[str, str] = {
    "algorithm.chord mu_decay_steps mu_warmup_steps": f"{_UNIT}/algorithms/test_imitation.py",
    "algorithm.dr_grpo row_tokens": f"{_UNIT}/algorithms/test_numbers.py",
    "algorithm.gspo row_tokens": f"{_UNIT}/algorithms/test_numbers.py",
    "algorithm.ppo critic.warmup_batches": f"{_UNIT}/algorithms/test_ppo.py",
    "backend.deepspeed max_logits_bytes sequence_parallel": f"{_UNIT}/backends/test_deepspeed_sequence.py",
    "backend.deepspeed processes timeout_s": f"{_UNIT}/backends/test_deepspeed.py",
    "backend.deepspeed last_call_s min_ranks": f"{_UNIT}/backends/test_deepspeed_elastic.py",
    "backend.deepspeed start_timeout_s": NO_BOUND + " of its own: a time that only a broken launch reaches",
    "backend.fake elements nan_at": f"{_UNIT}/backends/test_fake.py",
    "backend.fake fillers": NO_BOUND + ": the tensors of a made-up model",
    "backend.fake step_s": NO_BOUND,
    "backend.torch max_logits_bytes profile": f"{_UNIT}/backends/test_torch.py",
    "environment.agent patience_s": f"{_UNIT}/environments/test_called.py",
    "environment.agent timeout_s": f"{_UNIT}/environments/hosts/test_agents.py",
    "environment.attempts max_attempts": f"{_UNIT}/environments/test_attempts.py",
    "environment.harbor agent_timeout_s": NO_BOUND + " of its own: a time that the task or its user gives",
    "environment.harbor disk_mb memory_mb pids places": "tests/engines/test_docker_places.py",
    "environment.hosted idle_timeout_s processes start_timeout_s timeout_s":
        f"{_UNIT}/environments/hosts/test_hosted.py",
    "environment.hosted_agent idle_timeout_s processes start_timeout_s timeout_s":
        f"{_UNIT}/environments/hosts/test_hosted.py",
    "environment.served max_concurrent": NO_BOUND + " of its own: requests at once, the others wait",
    "environment.served timeout_s tries": f"{_UNIT}/environments/test_served.py",
    "environment.tools max_calls max_result_chars max_turns timeout_s": f"{_UNIT}/environments/test_tools.py",
    "operator.amplify min_wrong": f"{_UNIT}/data/test_experience_operators.py",
    "operator.budget first_size max_size min_size": f"{_UNIT}/data/test_task_operators.py",
    "operator.curriculum groups stages": f"{_UNIT}/data/test_task_operators.py",
    "operator.dedupe ngram": f"{_UNIT}/data/test_experience_operators.py",
    "operator.dedupe num_hashes rows": f"{_UNIT}/data/test_dedupe.py",
    "operator.gibberish window": f"{_UNIT}/data/test_experience_operators.py",
    "operator.hindsight cool_down max_held max_staleness max_uses per_batch": "tests/flow/test_reuse.py",
    "operator.hindsight per_group": "tests/simulation/pipelines.py",
    "operator.language min_letters": HERE,
    "operator.length max_characters": "tests/flow/test_pipelines.py",
    "operator.length min_characters": "tests/simulation/pipelines.py",
    "operator.mixture groups": f"{_UNIT}/data/test_task_operators.py",
    "operator.outliers min_values": f"{_UNIT}/data/test_experience_operators.py",
    "operator.repetition ngram": f"{_UNIT}/data/test_experience_operators.py",
    "operator.replay cool_down max_held max_staleness max_uses per_batch": "tests/flow/test_reuse.py",
    "operator.shape ngram": f"{_UNIT}/data/test_experience_operators.py",
    "operator.solve_rate min_scored": HERE,
    "operator.stale max_age": f"{_UNIT}/data/test_experience_operators.py",
    "policy.fake batch_size tokens_per_s": f"{_UNIT}/policies/test_fake.py",
    "policy.fake values_beside": NO_BOUND + ": how many values are made up for a token",
    "policy.hf batch_size": f"{_UNIT}/policies/test_hf.py",
    "policy.hf prefill_tokens turn_tokens": f"{_UNIT}/policies/test_cache.py",
    "policy.openai batch_size": f"{_UNIT}/policies/test_openai_updates.py",
    "policy.openai timeout_s tries": f"{_UNIT}/policies/test_openai_servers.py",
    "policy.vllm batch_size": "tests/engines/test_vllm_served.py",
    "policy.vllm sleep_after_s": f"{_UNIT}/policies/test_vllm_engine.py",
    "reward.code cpu_s wall_s": f"{_UNIT}/rewards/test_code.py",
    "reward.code max_tests memory_mib": HERE,
    "reward.code wait_s": NO_BOUND + ": a time that only a broken sandbox reaches",
    "reward.judge asks max_tokens": f"{_UNIT}/rewards/test_judge.py",
    "reward.judge max_concurrent timeout_s tries": f"{_UNIT}/rewards/test_judge_forms.py",
    "reward.judge cache_mib": f"{_UNIT}/rewards/test_judge_cache.py",
    "reward.ruler asks max_tokens": f"{_UNIT}/rewards/test_judge.py",
    "reward.ruler max_concurrent timeout_s tries": f"{_UNIT}/rewards/test_judge_forms.py",
    "reward.ruler cache_mib": f"{_UNIT}/rewards/test_judge_cache.py",
    "reward.tournament asks max_tokens": f"{_UNIT}/rewards/test_judge.py",
    "reward.tournament max_concurrent timeout_s tries": f"{_UNIT}/rewards/test_judge_forms.py",
    "reward.tournament cache_mib": f"{_UNIT}/rewards/test_judge_cache.py",
    "reward.tournament seed": NO_BOUND + ": the bracket that is drawn",
    "reward.best_of_n top": f"{_UNIT}/rewards/test_compared.py",
    "reward.diversity n": f"{_UNIT}/rewards/test_compared.py",
    "reward.length_penalty hard soft": f"{_UNIT}/rewards/test_composite.py",
    "reward.math float_rounding": HERE,
    "reward.ngram_penalty n": NO_BOUND + ": the length of what is compared",
    "reward.reward_model batch_size max_tokens timeout_s tries": f"{_UNIT}/rewards/test_reward_model.py",
    "reward.reward_model label threads": NO_BOUND,
    "reward.reward_model max_concurrent": NO_BOUND + " of its own: requests at once, the others wait",
    "reward.teacher max_concurrent timeout_s tries": f"{_UNIT}/rewards/test_teacher.py",
    "taskset.arithmetic high low terms": NO_BOUND + ": the numbers of problems that are made",
    "taskset.arithmetic seed": NO_BOUND,
    "taskset.arithmetic size skip": "tests/golden/arithmetic.py",
    "taskset.gymnasium size start_timeout_s timeout_s": f"{_UNIT}/environments/hosts/test_named.py",
    "taskset.nemo_gym size start_timeout_s timeout_s": f"{_UNIT}/environments/hosts/test_named.py",
    "taskset.openenv size start_timeout_s timeout_s": f"{_UNIT}/environments/hosts/test_named.py",
    "taskset.ors size start_timeout_s timeout_s": f"{_UNIT}/environments/hosts/test_named.py",
    "taskset.textarena size start_timeout_s timeout_s": f"{_UNIT}/environments/hosts/test_named.py",
    "taskset.verifiers size start_timeout_s timeout_s": f"{_UNIT}/environments/hosts/test_named.py",
    "taskset.csv shuffle_seed": NO_BOUND + ": which order it is",
    "taskset.csv size skip": f"{_UNIT}/data/test_tasksets_sources.py",
    "taskset.hf shuffle_seed": NO_BOUND + ": which order it is",
    "taskset.hf size skip": f"{_UNIT}/data/test_tasksets_hf.py",
    "taskset.jsonl shuffle_seed": NO_BOUND + ": which order it is",
    "taskset.jsonl size skip": f"{_UNIT}/data/test_tasksets_sources.py",
    "taskset.parquet shuffle_seed": NO_BOUND + ": which order it is",
    "taskset.parquet size skip": f"{_UNIT}/data/test_tasksets_sources.py",
    "taskset.reasoning_gym seed size": NO_BOUND + ": how many problems are made",
    "taskset.squares most seed size skip": NO_BOUND + ": the problems that are made",
}  # fmt: skip
"""Part and its settings -> the file whose tests reach them, or why there is nothing to reach."""


def test_every_setting_of_a_part_that_bounds_something_has_a_row() -> None:
    found = {
        f"{kind}.{name}.{setting}"
        for kind in registry.KINDS
        for name in registry.table(kind)
        if (config := getattr(registry.resolve(kind, name), "Config", None)) is not None
        for setting in bounds_in(config, "")
    }
    known = {f"{row.split()[0]}.{setting}": place for row, place in REACHED.items() for setting in row.split()[1:]}
    assert found - known.keys() == set(), "no row"
    assert known.keys() - found == set(), "no such setting"
    unnamed = [
        f"{setting}: {place}"
        for setting, place in known.items()
        if not place.startswith(NO_BOUND) and setting.rpartition(".")[2] not in Path(place).read_text(encoding="utf-8")
    ]
    assert unnamed == []


# --------------------------------------------------------------------------------------------- reached here


@each(("min_letters", "language"), [(0, "en"), (16, "en"), (17, "en"), (18, "unknown")])
def test_a_language_needs_so_many_letters(min_letters: int, language: str) -> None:
    assert detect("this is how it is said", min_letters) == language


@each(("min_scored", "is_kept"), [(1, False), (3, False), (4, False), (5, True), (1000, True)])
def test_a_solve_rate_needs_so_many_rollouts(min_scored: int, is_kept: bool) -> None:
    facts = facts_of((0, [1.0, 1.0, 1.0, 1.0]))
    operator = SolveRate(SolveRate.Config(min_scored=min_scored, explore=0.0))
    assert (type(operator.decide(draw_of(), facts, 0)).__name__ != "Skip") == is_kept


@each(("places", "is_right"), [(0, True), (2, True), (3, True), (4, False), (9, False)])
def test_decimals_are_compared_to_so_many_places(places: int, is_right: bool) -> None:
    reward = MathReward(MathReward.Config(float_rounding=places))
    item = reward_input(r"\boxed{5000.12349}", "5000.12341", info={}, prompt="", data_source="")
    assert reward(item).reward == float(is_right)


@pytest.mark.slow
@pytest.mark.parametrize(("max_tests", "share"), [(0, 2 / 3), (1, 1.0), (2, 1.0), (3, 2 / 3), (99, 2 / 3)])
def test_only_so_many_tests_are_run(max_tests: int, share: float) -> None:
    tests = {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["1\n", "2\n", "4\n"]}
    given = score("```python\nprint(input())\n```", {"tests": tests}, max_tests=max_tests, give="share")
    assert given.reward == pytest.approx(share)


@pytest.mark.slow
@pytest.mark.parametrize(("memory_mib", "reward"), [(32, 0.0), (128, 0.0), (512, 1.0), (4096, 1.0)])
def test_a_program_has_so_much_memory(memory_mib: int, reward: float) -> None:
    """It takes 200 MiB."""
    program = "```python\nheld = bytearray(200 << 20)\nprint(input())\n```"
    given = score(program, {"tests": {"inputs": ["1\n"], "outputs": ["1\n"]}}, memory_mib=memory_mib)
    assert given.reward == reward
