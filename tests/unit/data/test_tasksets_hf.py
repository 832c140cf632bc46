"""Datasets as Hugging Face has them: saved folders, folders of files, and names on the hub."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftstream.config.loader import from_dict
from rftstream.data.tasksets.datafolder import Wanted, find_split, splits_by_names
from rftstream.errors import ConfigError, pip_install
from tests.loopback import Asked, HttpServer
from tests.suite.each import each
from tests.unit.data.test_tasksets_sources import open_source, user
from tests.unit.data.test_tasksets_tables import parquet, prompts, refusal

CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test-*]
- config_name: socratic
  data_dir: socratic
---
# Grade school math
"""


def asked(source: str, **section: Any) -> list[str]:
    taskset = open_source(source, **section)
    return [user(taskset.problem(index)) for index in range(len(taskset))]


def jsonl(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def save_to_disk(folder: Path, shards: Sequence[list[dict[str, Any]]], split: str | None = None) -> None:
    """As `datasets` 5.2 writes it: streams in the Arrow format, and a state that names them."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(folder / name, table.schema.with_metadata({"huggingface": "{}"})) as stream:
            stream.write_table(table, max_chunksize=2)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "7ef7", "_format_type": None,
             "_split": split}  # fmt: skip
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


# --------------------------------------------------------------------------------------------- save_to_disk


def test_a_saved_dataset(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {n}", "extra": {"n": n}} for n in range(7)]
    save_to_disk(tmp_path / "one", [rows[:5], rows[5:]])
    taskset = open_source(f"hf:{tmp_path}/one")
    assert asked(f"hf:{tmp_path}/one") == [row["prompt"] for row in rows]
    assert taskset.problem(6).info == {"extra": {"n": 6}}
    assert taskset.problem(6).data_source == "one"
    assert open_source(f"hf:{tmp_path}/one", options={"split": "train"}).digest == taskset.digest
    assert "no split 'test'; known: train" in refusal(f"hf:{tmp_path}/one", options={"split": "test"})
    assert "knows no subsets" in refusal(f"hf:{tmp_path}/one", options={"subset": "main"})
    assert "which has no revisions" in refusal(f"hf:{tmp_path}/one", options={"revision": "main"})


def test_a_saved_dataset_with_splits(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("test", 2)):
        save_to_disk(tmp_path / "d" / split, [prompts(count, split)], split)
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert len(asked(f"hf:{tmp_path}/d")) == 3
    assert asked(f"hf:{tmp_path}/d", options={"split": "test"}) == ["test 0", "test 1"]
    assert "no split 'tset'; known: test, train; did you mean 'test'?" in refusal(
        f"hf:{tmp_path}/d", options={"split": "tset"}
    )
    assert "for a part of it set options.skip and options.size" in refusal(
        f"hf:{tmp_path}/d", options={"split": "train[:2]"}
    )


def test_a_saved_dataset_that_is_damaged(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "d", [prompts(2)])
    source = f"hf:{tmp_path}/d"
    data = tmp_path / "d" / "data-00000-of-00001.arrow"
    good = data.read_bytes()
    data.write_bytes(good[: len(good) // 2])
    assert "data-00000-of-00001.arrow: cannot be read as an Arrow file" in refusal(source)
    data.unlink()
    assert "data-00000-of-00001.arrow: no such file" in refusal(source)
    for state in ("{", "[]", "{}", '{"_data_files": [{"filename": "../x"}]}', '{"_data_files": 3}'):
        (tmp_path / "d" / "state.json").write_text(state)
        assert "state.json" in refusal(source)
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["../elsewhere"]}')
    assert "dataset_dict.json: splits is" in refusal(source)


# --------------------------------------------------------------------------------------------- folders


def test_a_folder_beside_the_run_file(tmp_path: Path) -> None:
    jsonl(tmp_path / "data" / "train.jsonl", "a")
    section = {"source": "hf:data"}
    config = from_dict({"run": {"name": "t", "steps": 1}, "model": {"make": {}}, "tasksets": {"t": section},
                        "base": str(tmp_path)})  # fmt: skip
    assert config.tasksets["t"].source == f"hf:{tmp_path}/data"


def test_files_of_every_format(tmp_path: Path) -> None:
    parquet(tmp_path / "parquet" / "train.parquet", prompts(2))
    jsonl(tmp_path / "jsonl" / "train.jsonl", "question 0", "question 1")
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "data.json").write_text(json.dumps(prompts(2), indent=1))
    (tmp_path / "json" / "dataset_info.json").write_text("{}")
    for suffix, text in ((".csv", 'prompt,n\r\nquestion 0,007\r\n"question 1",""\r\n'),
                         (".tsv", "prompt\tn\nquestion 0\t007\nquestion 1\t\n")):  # fmt: skip
        (tmp_path / suffix[1:]).mkdir()
        (tmp_path / suffix[1:] / f"data{suffix}").write_bytes(text.encode())
    for folder in ("parquet", "jsonl", "json", "csv", "tsv"):
        assert asked(f"hf:{tmp_path}/{folder}") == ["question 0", "question 1"], folder
    assert open_source(f"hf:{tmp_path}/csv").problem(0).info == {"n": "007"}


def test_csv_cells_with_lines_and_quotes(tmp_path: Path) -> None:
    text = '\ufeffprompt,answer\n"two\nlines, ""quoted""",1\n\n"ü 中文",2\nlast,3'
    (tmp_path / "x.csv").write_text(text, encoding="utf-8")
    taskset = open_source(f"hf:{tmp_path}")
    problems = [taskset.problem(index) for index in (2, 0, 1)]
    assert [(user(one), one.answer) for one in problems] == [
        ("last", "3"),
        ('two\nlines, "quoted"', "1"),
        ("ü 中文", "2"),
    ]
    for data, said in [
        (b'prompt,answer\n"a\nb",2\na\n', "x.csv:4: found 1 cells, expected 2"),
        (b"question\na\n", "no column 'prompt'; found"),
        (b"prompt;answer\na;b\n", "x.csv: found ';' between the columns, expected ','; save it anew"),
        (b'prompt\n"open', "is not CSV: unexpected end of data"), (b"prompt\n\xff\n", "x.csv:2: not UTF-8"),
        (b"", "no column 'prompt'; found none"), (b"prompt\n", "has no rows"), (b"prompt,prompt\na,b\n", "same name"),
        (b"prompt\n" + b"x" * 200_000, "field larger than field limit"),
    ]:  # fmt: skip
        (tmp_path / "x.csv").write_bytes(data)
        assert said in refusal(f"hf:{tmp_path}")


def test_json_that_is_no_list_of_objects(tmp_path: Path) -> None:
    for text, said in [("[1]", "row 0: found a number, expected an object"), ("[", "not JSON"), ("[]", "is empty"),
                       ('[{"prompt": 1}]', "row 0: the prompt is a number"), ("3", "x.json:1: found a number"),
                       ('[{"question": 1}]', "row 0: no column 'prompt'; found question")]:  # fmt: skip
        (tmp_path / "x.json").write_text(text)
        assert said in refusal(f"hf:{tmp_path}")


def test_subsets_by_the_card(tmp_path: Path) -> None:
    for name in ("main/train-00000-of-00002", "main/train-00001-of-00002", "main/test-00000-of-00001",
                 "socratic/train", "socratic/dev"):  # fmt: skip
        jsonl(tmp_path / f"{name}.jsonl", name)
    (tmp_path / "README.md").write_text(CARD)
    source = f"hf:{tmp_path}"
    assert asked(source, options={"subset": "main"}) == ["main/train-00000-of-00002", "main/train-00001-of-00002"]
    assert asked(source, options={"subset": "main", "split": "test"}) == ["main/test-00000-of-00001"]
    assert asked(source, options={"subset": "socratic", "split": "validation"}) == ["socratic/dev"]
    assert "has the subsets main, socratic; choose one: options = { subset = 'main' }" in refusal(source)
    assert "no subset 'mian'; known: main, socratic; did you mean 'main'?" in refusal(
        source, options={"subset": "mian"}
    )
    assert "no split 'dev'; known: test, train" in refusal(source, options={"subset": "main", "split": "dev"})
    (tmp_path / "main" / "train-00000-of-00002.jsonl").unlink()
    assert "main/train-*-of-00002: 1 of 2 files, number 00000 is missing" in refusal(source, options={"subset": "main"})
    (tmp_path / "main" / "train-00001-of-00002.jsonl").unlink()
    assert "names files for train that are not there" in refusal(source, options={"subset": "main"})
    (tmp_path / "README.md").write_text("---\nconfigs: [\n---\n")
    assert "the part between --- is not YAML" in refusal(source)


def test_subsets_by_folders(tmp_path: Path) -> None:
    for name in ("algebra/train", "algebra/test", "geometry/train"):
        jsonl(tmp_path / f"{name}.jsonl", name)
    assert asked(f"hf:{tmp_path}", options={"subset": "geometry"}) == ["geometry/train"]
    assert asked(f"hf:{tmp_path}") == ["algebra/train", "geometry/train"]
    assert "no subset 'algbra'; known: algebra, geometry" in refusal(f"hf:{tmp_path}", options={"subset": "algbra"})


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        ("data/train-00000-of-00001.parquet data/hard-00000-of-00001.parquet", {"train": 1, "hard": 1}),
        ("train.csv test.csv val.csv", {"train": 1, "validation": 1, "test": 1}),
        ("gsm8k_train.csv gsm8k-test.csv", {"train": 1, "test": 1}),
        ("train/a.csv train/b.csv dev/a.csv", {"train": 2, "validation": 1}),
        ("foo.csv bar.csv", {"train": 2}),
        ("train.csv notes/x.csv", {"train": 1}),
        ("training_set.csv evaluation.csv", {"train": 1, "test": 1}),
        ("trainer.csv contest.csv", {"train": 2}),
        ("x/train/y/a.csv x/test/y/a.csv", {"train": 1, "test": 1}),
        ("train1.csv train2.csv test1.csv", {"train": 2, "test": 1}),
        ("train/test.csv train/x.csv", {"train": 2}),
    ],
)
def test_splits_are_those_that_datasets_finds(names: str, splits: dict[str, int], tmp_path: Path) -> None:
    from datasets import load_dataset_builder

    assert {split: len(files) for split, files in splits_by_names(names.split(), "hf:x").items()} == splits
    folder = tmp_path / "d"
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("prompt\na\n")
    found = load_dataset_builder(str(folder), cache_dir=str(tmp_path / "cache")).config.data_files
    assert {str(split): len(files) for split, files in found.items()} == splits


@pytest.mark.parametrize("pattern", ["/etc/*.json", "https://example.org/*.json", "zip://*.json::x.zip", "../*.json"])
def test_a_card_names_no_files_outside_of_the_folder(tmp_path: Path, pattern: str) -> None:
    jsonl(tmp_path / "outside.json", "a")
    jsonl(tmp_path / "d" / "train.json", "b")
    (tmp_path / "d" / "README.md").write_text(f"---\nconfigs:\n- config_name: a\n  data_files: '{pattern}'\n---\n")
    assert "README.md names files for train that are not there; found train.json" in refusal(f"hf:{tmp_path}/d")


@each(
    ("data_files", "says"),
    [
        ("[{split: train}]", "README.md: data_files: Invalid format for data_files entry"),
        ("[{split: a, path: x.csv}, {split: a, path: y.csv}]", "Some splits are duplicated in data_files: ['a', 'a']"),
        ("3", "README.md: data_files: 'int' object is not iterable; mend it"),
        ("a**.csv", "README.md: 'a**.csv': Invalid pattern"),
    ],
)
def test_a_card_that_says_nothing_sensible(data_files: str, says: str) -> None:
    card = f"---\nconfigs:\n- config_name: a\n  data_files: {data_files}\n---\n"
    with pytest.raises(ConfigError) as error:
        find_split(["x.csv"], card, Wanted(subset=None, split=None), "hf:x")
    assert says in str(error.value)


def test_without_datasets_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(tmp_path / "train.jsonl", "a")
    monkeypatch.setitem(sys.modules, "datasets.data_files", None)
    assert "needs the package datasets" in refusal(f"hf:{tmp_path}")
    assert pip_install("rftstream[data]") in refusal(f"hf:{tmp_path}")


@pytest.mark.slow
@settings(deadline=None)  # the first one imports datasets
@given(names=st.lists(st.text("train-est/0._of", min_size=1, max_size=12).map(lambda name: name + ".csv"), unique=True),
       card=st.text("-\n :[]configs_ame*{", max_size=40))  # fmt: skip
def test_any_names_and_any_card_give_some_of_the_files_or_a_reason(names: list[str], card: str) -> None:
    try:
        _, files = find_split(names, card, Wanted(subset=None, split=None), "hf:x")
    except ConfigError as error:
        assert str(error).startswith("hf:x")
    else:
        assert files
        assert set(files) <= set(names)


def test_folders_without_data(tmp_path: Path) -> None:
    source = f"hf:{tmp_path}"
    assert "no data there (it is empty)" in refusal(source)
    (tmp_path / "gsm8k.py").write_text("raise SystemExit('run')")
    assert "found a script (gsm8k.py) and no data" in refusal(source)
    assert "scripts are never run" in refusal(source)
    (tmp_path / "train.jsonl.gz").touch()
    assert "found only packed files (train.jsonl.gz)" in refusal(source)
    assert "gsm8k.py: is a file, expected a folder" in refusal(f"{source}/gsm8k.py")
    assert "no such folder; give a folder, or a name on the hub" in refusal(f"{source}/none")


# --------------------------------------------------------------------------------------------- the hub

COMMIT = "5f0d0d8d84b1bd4e8b1a7f3d3b0c8f2a1b2c3d4e"


class Hub(HttpServer):
    """One dataset, `someone/sums`, as the hub serves it."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.fetched: list[str] = []
        super().__init__(self.told)

    def told(self, asked: Asked) -> object:
        file = asked.path.removeprefix(f"/datasets/someone/sums/resolve/{COMMIT}/")
        if asked.path.startswith("/api/datasets/someone/sums/tree/"):
            return [{"type": "file", "path": n, "size": len(d), "oid": "0"} for n, d in self.files.items()]
        if asked.path.startswith("/api/datasets/someone/sums"):
            return {"id": "someone/sums", "sha": COMMIT, "siblings": [{"rfilename": n} for n in self.files]}
        if file not in self.files:
            return 404, {}, {"X-Error-Code": "RepoNotFound"}
        if asked.method == "GET":
            self.fetched.append(file)
        return 200, self.files[file], {"ETag": f'"{zlib.crc32(self.files[file]):x}"', "X-Repo-Commit": COMMIT}


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client reads its address when it is imported."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    table = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(prompts(3)), table)
    files = {
        "README.md": CARD.encode(), "sums.py": b"raise SystemExit('run')", "main/test-0.jsonl": b'{"prompt": "t"}\n',
        "main/train-00000-of-00001.parquet": table.getvalue().to_pybytes(),
    }  # fmt: skip
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with Hub(files) as server:
        point_at(server.url, monkeypatch)
        yield server


@pytest.mark.slow
def test_a_name_on_the_hub(hub: Hub) -> None:
    source, options = "hf:someone/sums", {"subset": "main"}
    assert asked(source, options=options) == ["question 0", "question 1", "question 2"]
    assert sorted(hub.fetched) == ["README.md", "main/train-00000-of-00001.parquet"], "what is wanted, and no script"
    assert open_source(source, options={**options, "revision": COMMIT}).problem(0).data_source == "someone/sums"
    assert "has the subsets main, socratic" in refusal(source)
    assert "no split 'dev'; known: test, train" in refusal(source, options={**options, "split": "dev"})
    assert "hf:nobody/nothing: no such folder here, and the hub did not give it" in refusal("hf:nobody/nothing")
    assert "give the folder" in refusal("hf:nobody/nothing")


@pytest.mark.slow
def test_without_a_network_what_is_in_the_cache_serves(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    source, options = "hf:someone/sums", {"subset": "main"}
    digest = open_source(source, options=options).digest
    point_at("http://127.0.0.1:1", monkeypatch)
    assert open_source(source, options={**options, "revision": COMMIT}).digest == digest
    assert open_source(source, options=options).digest == digest
    assert "in the cache: README.md names files for test that" in refusal(source, options={**options, "split": "test"})
    assert "hf:someone/other: no such folder here, and the hub did not give it" in refusal("hf:someone/other")
