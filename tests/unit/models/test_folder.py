import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rftstream.config.loader import from_dict
from rftstream.config.sections import MakeModel, ModelSection
from rftstream.errors import ConfigError
from rftstream.models.folders.folder import model_digests, model_here, prepare_model
from rftstream.models.folders.made import make_as_recorded
from rftstream.models.rendering import open_renderer
from tests.unit import tiny


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_made_model_follows_from_recipe_and_seed(tmp_path):
    first, same = tiny.make(tmp_path / "a", seed=1), tiny.make(tmp_path / "b", seed=1)
    other = tiny.make(tmp_path / "c", seed=2)
    assert contents(first.folder) == contents(same.folder)
    assert first.name == same.name != other.name
    assert model_digests(first) == model_digests(same)
    assert model_digests(first)["model"] != model_digests(other)["model"]
    assert model_digests(first)["tokenizer"] == model_digests(other)["tokenizer"]


def test_it_is_made_once(tmp_path):
    spec = tiny.make(tmp_path)
    marked = spec.folder / "model.safetensors"
    times = marked.stat().st_mtime_ns
    assert tiny.make(tmp_path) == spec
    assert marked.stat().st_mtime_ns == times
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    with pytest.raises(ConfigError, match="another recipe: seed 0 -> 1; take back"):
        tiny.make(tmp_path, seed=1)


def test_transformers_loads_it(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = tiny.make(tmp_path, layers=3, width=48, heads=2, context=40, characters="ab =ü\n")
    model, report = AutoModelForCausalLM.from_pretrained(spec.folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.dtype == torch.float32
    assert (model.config.vocab_size, model.config.num_hidden_layers, model.config.hidden_size) == (7, 3, 48)
    assert (model.config.max_position_embeddings, model.config.eos_token_id) == (40, 0)
    tokenizer = AutoTokenizer.from_pretrained(spec.folder)
    assert tokenizer.encode("ab =ü\n<eos>") == [1, 2, 3, 4, 5, 6, 0]
    assert tokenizer.decode([1, 2, 3, 4, 5, 6, 0], skip_special_tokens=True) == "ab =ü\n"
    with torch.no_grad():
        entropy = torch.distributions.Categorical(logits=model(torch.tensor([[3, 4, 5]])).logits).entropy()
    assert float(entropy.min()) > 0.95 * float(torch.tensor(7.0).log())  # nearly uniform


def test_every_token_of_a_made_model_can_be_read_but_the_end(tmp_path):
    """Whatever is sampled, by transformers itself too, is what a reader of the text sees."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = tiny.make(tmp_path, characters="0123456789+=")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(spec.folder), AutoTokenizer.from_pretrained(spec.folder)
    assert [tokenizer.decode([token]) for token in range(model.config.vocab_size)] == ["<eos>", *"0123456789+="]
    asked = tokenizer(["1+2=", "3+4="], return_tensors="pt")
    torch.manual_seed(0)
    said = model.generate(**asked, max_new_tokens=12, do_sample=True)[:, 4:].tolist()
    for tokens in said:
        length = tokens.index(0) if 0 in tokens else len(tokens)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        assert len(text) == length and not set(tokens[length:]) - {0}
    assert open_renderer(spec).pieces(said[0])[0][0], "and our own views read it, too"


def test_a_model_that_was_made_with_padding_stays_what_it_was(tmp_path):
    """Runs that were begun before go on: their folder is taken as it is, and made again as it was where it is gone."""
    section = ModelSection(make=MakeModel(width=32))
    recorded = {
        "model": "sha256:485fe53c77ed36e3728ff2b5afabfe2ece9d9a3be6ddf97dced88d35af36373f",
        "tokenizer": "sha256:10d0a4e901e03cee64f64e73831976338391cbb62bf30a35c8271a93e2ab5d11",
    }
    make_as_recorded(section, tmp_path / "model", 0, recorded)
    spec = prepare_model(section, tmp_path / "model", 0)
    assert spec.name == "made-194f2aea"
    assert recorded.items() <= model_digests(spec).items()
    assert open_renderer(spec).encode("1?<pad>") == (4, 2, 0)
    new = prepare_model(section, tmp_path / "new", 0)
    make_as_recorded(section, tmp_path / "same", 0, model_digests(new))
    assert contents(tmp_path / "same") == contents(new.folder)
    make_as_recorded(section, tmp_path / "other", 0, {"tokenizer": "sha256:0"})
    assert not (tmp_path / "other").exists()


def test_a_model_is_read_where_it_lies(tmp_path):
    """And neither made nor fetched by who only wants to read what it said."""
    section = ModelSection(make=MakeModel(width=32))
    assert model_here(section, tmp_path / "model") is None
    made = prepare_model(section, tmp_path / "model", 0)
    found = model_here(section, tmp_path / "model")
    assert found is not None and open_renderer(found).digest == open_renderer(made).digest
    assert model_here(ModelSection(path=str(made.folder)), tmp_path / "none").folder == made.folder
    assert model_here(ModelSection(path="nobody/nothing"), tmp_path / "none") is None
    assert model_here(ModelSection(path="fake"), tmp_path / "none").name == "fake"


def test_bad_recipes_are_said(tmp_path):
    for make, message in ((MakeModel(width=30, heads=4), "heads"), (MakeModel(characters="aa"), "each character")):
        with pytest.raises(ConfigError, match=message):
            prepare_model(ModelSection(make=make), tmp_path / "x", 0)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(ConfigError, match="in the way"):
        prepare_model(ModelSection(make=MakeModel()), tmp_path / "taken", 0)


def test_a_folder_is_taken_as_it_is(tmp_path):
    made = tiny.make(tmp_path)
    section = ModelSection(path=str(made.folder), dtype="float16", context=8, chat_template="{{ 1 }}")
    spec = prepare_model(section, tmp_path / "unused", 0, device="cuda:1", threads=3)
    assert (spec.name, spec.folder, spec.dtype, spec.context) == ("tiny", made.folder.resolve(), "float16", 8)
    assert (spec.device, spec.threads, spec.chat_template) == ("cuda:1", 3, "{{ 1 }}")
    assert not (tmp_path / "unused").exists()
    assert model_digests(spec)["chat_template"] != model_digests(made)["chat_template"]
    assert model_digests(spec) == model_digests(dataclasses.replace(made, chat_template="{{ 1 }}"))
    given = prepare_model(dataclasses.replace(section, chat_template_kwargs={"a": 1}), tmp_path / "unused", 0)
    assert given.chat_template_kwargs == {"a": 1}
    assert model_digests(given)["chat_template"] != model_digests(spec)["chat_template"]


@pytest.mark.parametrize(("path", "says"), [
    ("./nowhere", r"model\.path: ./nowhere: no such folder; give a"),
    ("/nowhere/at/all", r"model\.path: /nowhere/at/all: no such folder; give a"),
    ("a/b/c", r"model\.path: a/b/c: no such folder; give a"),
    ("nobody/nothing", "could not be fetched from the hub"), (".", r"has no config\.json"),
    ("sft", r'runs/sft is a run, whose weights init_from = "runs/sft" takes; else give a'),
    ("kept/SmolLM-135M", r"hub \(.*\); did you mean SmolLM2-135M\? Or give a"),
])  # fmt: skip
def test_a_path_without_a_model_is_said(tmp_path, monkeypatch, path, says):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept" / "SmolLM2-135M").mkdir(parents=True)
    (tmp_path / "runs" / "sft").mkdir(parents=True)
    with pytest.raises(ConfigError, match=says):
        prepare_model(ModelSection(path=path), tmp_path, 0)


def test_a_model_is_sought_beside_the_run_file(tmp_path, monkeypatch):
    (tmp_path / "examples").mkdir()
    values = {"run": {"name": "one", "steps": 1}, "tasksets": {"sums": {"source": "arithmetic"}},
              "base": str(tmp_path / "examples")}  # fmt: skip
    monkeypatch.chdir("/")
    there = tmp_path / "models" / "SmolLM2-135M-Instruct"
    for path in ("../models/SmolLM2-135M-Instruct", str(there)):
        config = from_dict({**values, "model": {"path": path}})
        assert config.model.path == str(there)
        with pytest.raises(ConfigError, match=rf"path: {there}: no .* by `rftstream convert smollm2 {there}`, or give"):
            prepare_model(config.model, tmp_path, 0)
    there.mkdir(parents=True)
    assert from_dict({**values, "model": {"path": "../models/SmolLM2-135M-Instruct"}}).model.path == str(there)
    monkeypatch.chdir(tmp_path / "models")
    assert from_dict({**values, "model": {"path": "./SmolLM2-135M-Instruct"}}).model.path == "./SmolLM2-135M-Instruct"
    assert from_dict({**values, "model": {"path": "owner/name"}}).model.path == "owner/name"


def test_weights_that_may_run_code_are_refused(tmp_path):
    made = tiny.make(tmp_path)
    section = ModelSection(path=str(made.folder))
    (made.folder / "pytorch_model.bin").write_bytes(b"beside the others it is left alone")
    assert prepare_model(section, tmp_path, 0).folder == made.folder.resolve()
    (made.folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has its weights in pytorch_model\.bin, expected safetensors"):
        prepare_model(section, tmp_path, 0)


def test_the_fake_needs_no_folder(tmp_path):
    spec = prepare_model(ModelSection(path="fake"), tmp_path / "none", 0)
    assert spec.name == "fake"
    assert model_digests(spec).keys() == {"model", "tokenizer", "chat_template"}


def test_damaged_json_is_said(tmp_path):
    made = tiny.make(tmp_path)
    (made.folder / "tokenizer_config.json").write_text("{")
    (made.folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="not JSON"):
        model_digests(dataclasses.replace(made))


def test_it_is_light():
    heavy = "{'torch', 'tokenizers', 'transformers'}"
    code = f"import sys, rftstream.models.folders.folder; assert not {heavy} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


@pytest.mark.slow
@pytest.mark.heavy("a real model is read from GGUF, written, and sampled from")
def test_smollm2_is_converted_to_an_ordinary_folder(tmp_path):
    from transformers import AutoTokenizer

    from rftstream.contracts.tasks import ChatMessage
    from rftstream.models.rendering import open_renderer

    folder = tmp_path / "smollm2"
    done = subprocess.run(
        [sys.executable, "-m", "rftstream", "convert", "smollm2", str(folder)], check=True,
        cwd=Path(__file__).parents[3], capture_output=True, text=True,
    )  # fmt: skip
    phases = re.findall(r"^(\d of 4: .*|converting smollm2 to .*) \.\.\.$", done.stderr, re.MULTILINE)
    assert done.stdout == f"{folder}\n" and len(phases) == 5, "it is told what takes a minute"
    assert "%|" not in done.stderr and "\r" not in done.stderr, "there is no terminal for a bar"
    spec = prepare_model(ModelSection(path=str(folder)), tmp_path, 0)
    renderer = open_renderer(spec)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert renderer.stop_token_ids == {2}
    assert renderer.context == 8192
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for question in ("What is the capital of France?", "a  123\n\n  Grüße 中文 🙂"):
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
        assert text.endswith(f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        ids = renderer.render([ChatMessage(role="user", content=question)])
        assert list(ids) == tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    asked = renderer.render([ChatMessage(role="user", content="What is the capital of France?")])
    policy = tiny.policy(spec)
    policy._versions.append(tiny.name(0))
    policy.submit(tiny.request(0, asked, max_tokens=32, temperature=0.0))
    completion = tiny.drain(policy)["r0"]
    assert "Paris" in renderer.decode(completion.token_ids)
    assert completion.finish_reason == "stop"
