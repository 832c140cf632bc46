"""Reward models: of a folder by the real loading path, and served by a small server of our own. What has no finite
output, is too long or is not answered has no score."""

import json
import math

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from rftstream.config.loader import from_dict
from rftstream.errors import ConfigError, RewardError, RewardTimeout
from rftstream.models.classifiers import read_classifier
from rftstream.preflight.checks.check import check
from rftstream.preflight.memory import MAIN
from rftstream.rewards import classifier
from rftstream.rewards.reward_model import ModelReward
from rftstream.rewards.scorer import ProcessScorer
from tests.configs import small_run
from tests.suite.each import each
from tests.unit import tiny
from tests.unit.reward_inputs import reward_input
from tests.unit.rewards.scoring import replies_of


def item(completion="5", prompt="2+3=", **changes):
    messages = ({"role": "user", "content": prompt}, {"role": "assistant", "content": completion})
    return reward_input(completion, "6", **{"prompt": prompt, "messages": messages, "data_source": "", **changes})


def make_classifier(folder, *, labels=1, kind="AutoModelForSequenceClassification", **settings):
    """A random classifier with the files of a made model; its sizes are those of the tests' policies."""
    import transformers

    spec = tiny.make(folder, characters="0123456789+=", context=32)
    config = transformers.AutoConfig.from_pretrained(spec.folder, num_labels=labels, **settings)
    torch.manual_seed(7)
    model = getattr(transformers, kind).from_config(config).float().eval()
    model.save_pretrained(spec.folder)
    return spec.folder, model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_classifier(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    return make_classifier(tmp_path_factory.mktemp("three"), labels=3, id2label={0: "bad", 1: "fair", 2: "good"},
                           label2id={"bad": 0, "fair": 1, "good": 2})  # fmt: skip


@pytest.fixture(autouse=True)
def forget():
    classifier.load_model.cache_clear()


def of_folder(folder, **settings):
    return ModelReward(ModelReward.Config(path=folder.name, **settings), base=str(folder.parent))


def expected(made, text):
    """What transformers says of one text alone, with its own tokenizer."""
    from transformers import AutoTokenizer

    folder, model = made
    with torch.no_grad():
        ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return model(input_ids=ids).logits[0].tolist()


# ------------------------------------------------------------------------------------------------ a folder


def test_a_folder_scores_what_transformers_scores(made):
    """Alone and among others, whatever their lengths and however many go together."""
    items = [item("5"), item("12345678901234"), item("", "7"), item("3+3=6", "0")]
    wanted = [expected(made, one.prompt + one.completion)[0] for one in items]
    for size in (1, 3, 16):
        scores = of_folder(made[0], batch_size=size).score_all(items)
        assert [score.reward for score in scores] == pytest.approx(wanted, abs=1e-5)
        assert [dict(score.metrics) for score in scores] == [{"score": score.reward} for score in scores]
    assert len(set(wanted)) == 4
    assert of_folder(made[0])(items[0]).reward == pytest.approx(wanted[0], abs=1e-5)


def test_many_rollouts_take_few_passes_sorted_by_length(made, monkeypatch):
    shapes = []
    forward = torch.nn.Module.__call__

    def seen(self, **given):
        shapes.append(tuple(given["input_ids"].shape))
        return forward(self, **given)

    reward = of_folder(made[0], batch_size=2)
    reward.open()
    monkeypatch.setattr(type(reward._local.model._model), "__call__", seen)
    reward.score_all([item("1"), item("123456"), item("12"), item("12345")])
    assert shapes == [(2, 6), (2, 10)]


def test_labels_activation_offset_and_scale(labelled):
    logits = expected(labelled, "2+3=5")
    weights = [math.exp(one) for one in logits]
    assert of_folder(labelled[0], label="good")(item()).reward == pytest.approx(logits[2], abs=1e-5)
    found = of_folder(labelled[0], label=1, activation="softmax", offset=0.5, scale=4.0)(item())
    assert found.reward == pytest.approx(4 * (weights[1] / sum(weights) - 0.5), abs=1e-5)
    assert found.metrics["score"] == pytest.approx(logits[1], abs=1e-5)
    found = of_folder(labelled[0], label=0, activation="sigmoid")(item())
    assert found.reward == pytest.approx(1 / (1 + math.exp(-logits[0])), abs=1e-5)


def test_a_text_of_ones_own(made):
    score = of_folder(made[0], text="{answer}={completion}+{prompt}")(item("5", "1+"))
    assert score.reward == pytest.approx(expected(made, "6=5+1+")[0], abs=1e-5)


def test_a_text_is_read_as_the_tokenizers_file_says(tmp_path):
    """Llama 3's class in transformers makes another tokenizer of bytes."""
    folder, _ = make_classifier(tmp_path)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*alphabet, "<s>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    begin = ("<s>", len(alphabet))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[begin])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    held = read_classifier(folder, where="test")
    texts = classifier.ClassifierTexts(held, text="{prompt}", chat_template=None, rendering=None)
    found = texts.of_item(item(), " 1 + é")
    assert found == [vocabulary["<s>"], *(vocabulary[one] for one in "Ġ1Ġ+ĠÃ©")]


def test_a_chat_template_of_ones_own(made):
    (made[0].parent / "other.jinja").write_text("{% for one in messages %}{{ one.content }}={% endfor %}")
    score = of_folder(made[0], chat_template="other.jinja")(item())
    assert score.reward == pytest.approx(expected(made, "2+3==5=")[0], abs=1e-5)


def test_a_turn_ends_with_its_token(made):
    """`turn`: as demonstrations are written. Here the end is the padding, too, so transformers reads the same place."""
    ids = of_folder(made[0], rendering="turn")._local._tokens(item())
    assert ids == [*of_folder(made[0])._local._tokens(item()), 0]
    trailing = item(messages=(*item().messages, {"role": "user", "content": "7"}))
    assert of_folder(made[0], rendering="turn")._local._tokens(trailing) == ids


def test_what_is_too_long_is_never_cut_in_silence(made):
    reward = of_folder(made[0], max_tokens=6)
    outcomes = reward.score_all([item("12"), item("123")])
    assert outcomes[0].reward == pytest.approx(expected(made, "2+3=12")[0], abs=1e-5)
    assert "the conversation has 7 tokens, expected at most 6" in str(outcomes[1])
    left = of_folder(made[0], max_tokens=6, too_long="cut_left").score_all([item("12"), item("123")])
    assert [score.metrics["cut"] for score in left] == [0.0, 1.0]
    assert left[1].reward == pytest.approx(expected(made, "+3=123")[0], abs=1e-5)
    right = of_folder(made[0], max_tokens=6, too_long="cut_right")(item("123"))
    assert right.reward == pytest.approx(expected(made, "2+3=12")[0], abs=1e-5)
    assert isinstance(of_folder(made[0]).score_all([item("1" * 40)])[0], RewardError)  # its context is 32


def test_what_is_not_finite_has_no_score(tmp_path):
    folder, _ = make_classifier(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][weights["model.embed_tokens.weight"].shape[0] - 1] = math.nan  # of `=`
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    fine, spoilt = of_folder(folder).score_all([item("5", "2"), item("5", "2=")])
    assert math.isfinite(fine.reward)
    assert isinstance(spoilt, RewardError)
    assert "the model gave [nan], expected finite numbers" in str(spoilt)


def test_a_character_that_its_tokenizer_refuses_spoils_one_rollout_only(made):
    fine, refused = of_folder(made[0]).score_all([item(), item("x")])
    assert math.isfinite(fine.reward)
    assert "has no token for 'x'" in str(refused)


def test_its_version_is_that_of_the_files(tmp_path):
    folder, _ = make_classifier(tmp_path)
    version = of_folder(folder).version
    assert version == of_folder(folder, batch_size=2, threads=2).version
    assert version != of_folder(folder, offset=1.0).version
    template = folder.parent / "own.jinja"
    template.write_text((folder / "chat_template.jinja").read_text())
    own = of_folder(folder, chat_template="own.jinja").version
    template.write_text(template.read_text() + "=")
    assert own != of_folder(folder, chat_template="own.jinja").version
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"][0, 0] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert version != of_folder(folder).version


@each(("settings", "says"), [
    ({}, "expected url and model of a served reward model, or the path"),
    ({"url": "http://127.0.0.1:1", "path": "tiny"}, "expected url and model"),
    ({"path": "nowhere"}, r"rewards\.reward_model\.path: .*nowhere: found no config.json"),
    ({"path": "tiny", "label": 1}, "got 1, expected below 1"),
    ({"path": "tiny", "label": "good"}, "has no label 'good', known: LABEL_0"),
    ({"path": "tiny", "max_tokens": 64}, "max_tokens: got 64, expected at most 32, the context"),
    ({"path": "tiny", "chat_template": "no.jinja"}, "chat_template: .*no.jinja: no such file"),
    ({"url": "http://127.0.0.1:1", "model": "m", "label": "good"}, "a server's outputs have no names"),
    ({"url": "http://127.0.0.1:1", "model": "m", "text": "x", "endpoint": "score"}, "takes prompt and completion"),
    ({"url": "http://127.0.0.1:1", "model": "m", "max_tokens": 5}, "means nothing for a served model"),
    ({"url": "http://127.0.0.1:1", "model": "m", "too_long": "cut_left"}, "truncate_prompt_tokens"),
])  # fmt: skip
def test_settings_that_name_no_reward_model(made, settings, says):
    with pytest.raises(ConfigError, match=says):
        ModelReward(ModelReward.Config(**settings), base=str(made[0].parent))


def test_several_labels_need_one_named(labelled):
    with pytest.raises(ConfigError, match=r"has 3 labels \(bad, fair, good\), expected one"):
        of_folder(labelled[0])


def test_a_folder_without_a_head_is_found_before_the_run(tmp_path):
    spec = tiny.make(tmp_path)
    with pytest.raises(ConfigError, match="is a LlamaForCausalLM, which has no classifier head"):
        of_folder(spec.folder)


def test_a_folder_without_a_chat_template_is_told_so(tmp_path):
    folder, model = make_classifier(tmp_path)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"has no chat template.*or set `text`"):
        of_folder(folder)
    score = of_folder(folder, text="{prompt}{completion}")(item())
    assert score.reward == pytest.approx(expected((folder, model), "2+3=5")[0], abs=1e-5)


def test_a_head_that_is_not_in_the_files_is_not_made_up(tmp_path):
    folder, _ = make_classifier(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack score\.weight, which would be random numbers"):
        of_folder(folder).open()


def test_a_pickled_model_is_not_read(tmp_path):
    folder, _ = make_classifier(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"has no weights, expected \*\.safetensors"):
        of_folder(folder)


def test_problems_longer_than_its_context_are_found_before_the_run(made):
    reward = of_folder(made[0], max_tokens=4)
    with pytest.raises(RewardError, match="the prompt alone has 4 tokens, expected fewer than 4"):
        reward.check(item(messages=({"role": "user", "content": "2+3="},)))
    reward.check(item(messages=({"role": "user", "content": "2+3"},)))


@each(("settings", "longest", "says"), [
    ({}, 32, True), ({}, 31, False), ({"max_tokens": 8}, 8, True), ({"too_long": "cut_left"}, 32, False),
])  # fmt: skip
def test_check_says_that_completions_may_be_longer_than_its_context(made, settings, longest, says):
    config = small_run(
        run={"name": "t", "steps": 1}, sampling={"max_tokens": longest},
        tasksets={"t": {"source": "arithmetic", "reward": "reward_model"}}, explorer={"policy": "fake"},
        trainer={"backend": "fake"}, rewards={"reward_model": {"path": str(made[0]), **settings}},
    )  # fmt: skip
    report = check(config)
    assert not report.errors
    found = [one for one in report.warnings if one.startswith("tasksets.t.reward: reads conversations of up to")]
    assert len(found) == says


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_check_counts_the_memory_of_a_folder(made, dtype, width):
    """Once for tasksets with the same model, in each process that scores: those of two verifiers and of the
    evaluator."""
    section = {"source": "arithmetic", "reward": "reward_model"}
    config = from_dict({
        "run": {"name": "t", "steps": 1}, "model": {"make": {"characters": "0123456789+= "}},
        "sampling": {"max_tokens": 20}, "tasksets": {"t": section, "u": section}, "evaluations": {"e": section},
        "verifier": {"count": 2, "processes": 3},
        "rewards": {"reward_model": {"path": str(made[0]), "dtype": dtype, "batch_size": 8}},
    })  # fmt: skip
    report = check(config)
    assert not report.errors
    roles = {role.role: role for role in report.memory.roles}
    assert (roles["verifier"].count, roles["scorer"].count) == (2, 9)
    held = roles["scorer"].parts[MAIN]
    assert held["reward models"] == width * sum(one.numel() for one in made[1].parameters())
    longest = max(line.longest for line in report.tasksets) + 20
    of_products = 3 * 32 + 2 * 32 + 2 * 32 + 4 * 64
    assert held["their activations"] == 8 * min(longest, 32) * (4 * 4 * 32 + width * of_products)
    assert "9 scorers" in report.to_text()


# ------------------------------------------------------------------------------------------------ an endpoint


def usual(body):
    return {"data": [{"index": 0, "label": "LABEL_0", "probs": [0.75], "num_classes": 1}]}


def served(server, **settings):
    url = server.url.removesuffix("/v1")
    return ModelReward(ModelReward.Config(**{"url": url, "model": "judge-7b", "tries": 2, **settings}))


def test_the_conversation_is_sent_and_the_probability_comes_back(server):
    call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = (*item().messages, {"role": "assistant", "content": "", "tool_calls": [call]})
    reward = served(server, api_key="sk-secret", scale=2.0, offset=0.5, extra={"use_activation": False})
    score = reward(item(messages=messages))
    assert (score.reward, dict(score.metrics)) == (0.5, {"score": 0.75})
    ((path, body),) = server.requests
    assert path == "/classify"
    assert (body["model"], body["use_activation"]) == ("judge-7b", False)
    assert "temperature" not in body
    assert body["messages"][:2] == list(item().messages)
    assert json.loads(body["messages"][2]["tool_calls"][0]["function"]["arguments"]) == {"a": 2}
    assert server.keys == ["Bearer sk-secret"]


@pytest.mark.parametrize(("endpoint", "answer", "settings", "reward"), [
    ("pooling", {"data": [{"index": 0, "object": "pooling", "data": [-3.5]}]}, {}, -3.5),
    ("pooling", {"data": [{"data": [[0.1], [0.2], [1.5]]}]}, {}, 1.5),
    ("pooling", {"data": [{"data": [0.0, 2.0]}]}, {"label": 1, "activation": "softmax"}, 1 / (1 + math.exp(-2))),
    ("score", {"data": [{"index": 0, "object": "score", "score": 0.25}]}, {}, 0.25),
    ("classify", {"data": [{"probs": [0.9, 0.1]}]}, {"label": 0}, 0.9),
])  # fmt: skip
def test_forms_of_answers(server, endpoint, answer, settings, reward):
    server.answers.append((200, answer))
    assert served(server, endpoint=endpoint, **settings)(item()).reward == pytest.approx(reward)
    ((path, body),) = server.requests
    assert path == f"/{endpoint}"
    if endpoint == "score":
        assert (body["text_1"], body["text_2"]) == ("2+3=", "5")


def test_a_text_stands_for_the_conversation(server):
    served(server, text="Q: {prompt} A: {completion}")(item())
    assert server.requests[0][1]["input"] == "Q: 2+3= A: 5"


@pytest.mark.parametrize(("answer", "says"), [
    ((200, {"choices": [{"message": {"content": "I like it."}}]}), r"no data\[0\].probs in the server's answer"),
    ((200, {"data": []}), r"no data\[0\].probs"),
    ((200, {"data": [{"probs": ["high"]}]}), r"no data\[0\].probs"),
    ((200, {"data": [{"probs": [None]}]}), r"no data\[0\].probs"),
    ((200, {"data": [{"probs": [0.1, 0.9]}]}), "got 2 outputs, expected one; set `label`"),
    ((200, b'{"data": [{"probs": [NaN]}]}'), r"the model gave \[nan\], expected finite"),
    ((200, b"not at all"), "reward_model: "),
    ((400, {"error": {"message": "too long"}}), "400: too long; is its context longer than the conversation"),
    ((401, {"error": "wrong key sk-secret"}), r"401: wrong key \*\*\*"),
])  # fmt: skip
def test_what_is_no_score(server, answer, says):
    server.answers.append(answer)
    with pytest.raises(RewardError, match=says) as error:
        served(server, api_key="sk-secret")(item())
    assert "sk-secret" not in str(error.value)


def test_a_busy_server_is_asked_again_and_then_given_up(server):
    server.answers += [(429, {"error": "slow down"}, {"Retry-After": "0"})]
    assert served(server)(item()).reward == 0.75
    server.answers += [(429, {"error": "slow down"}), (None, b"")]
    with pytest.raises(RewardError, match="after 2 tries"):
        served(server)(item())


def test_a_silent_server_is_a_timeout(server):
    server.hold.clear()
    with pytest.raises(RewardTimeout, match=r"within 0.05 s .rewards.reward_model.timeout_s"):
        served(server, timeout_s=0.05)(item())
    server.hold.set()


# ------------------------------------------------------------------------------------------------ in the verifier


@pytest.mark.slow
def test_a_child_of_the_verifier_loads_it_once_and_scores_many(made):
    config = small_run(
        run={"name": "t", "steps": 1}, tasksets={"t": {"source": "arithmetic", "reward": "reward_model"}},
        rewards={"reward_model": {"path": str(made[0])}}, verifier={"tries": 1, "timeout_s": 120.0},
    )  # fmt: skip
    items = [*(item(str(number)) for number in range(8)), item("x")]
    *scored, failed = replies_of(ProcessScorer(config), items, "t")
    for number, reply in enumerate(scored):
        assert reply.score.reward == pytest.approx(expected(made, f"2+3={number}")[0], abs=1e-5)
        assert reply.scorer_version == of_folder(made[0]).version
    assert (failed.score, failed.reason) == (None, "error")
    assert "has no token for 'x'" in failed.detail
