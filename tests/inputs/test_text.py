"""Text: read from files and tables, as hashed words or by a tokenizer from disk, trained on and predicted."""

import hashlib
import runpy

import numpy as np
import pandas as pd
import pytest

import fedmutual
from fedmutual import Site, UserError
from fedmutual.config import DataConfig
from fedmutual.data.prepared import prepare
from fedmutual.data.saved import read_rows, read_saved
from fedmutual.data.table import read_table
from fedmutual.data.targets import read_targets
from fedmutual.data.text import encode_texts, hash_tokens
from input_kinds import EMBEDDING, QUICK
from own_data import config, npz

pytestmark = pytest.mark.run


def notes(seed, n=80):
    """Short texts that say their class, and a number."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % 2)
    texts = [
        " ".join(rng.permutation(["seen", "today", *(["fever", "Cough!"] if label else ["well", "rested"])])) for label in y
    ]
    return pd.DataFrame({"note": texts, "age": rng.normal(size=n).round(3), "y": y})


READING = {"length": 6, "words": 500}


@pytest.mark.parametrize("kind", ["csv", "npz", "datasets"])
def test_text_of_a_file_trains_and_is_predicted(kind, tmp_path, in_tmp_path):
    (tmp_path / "text_net.py").write_text(EMBEDDING)
    table, path = notes(0), tmp_path / f"notes.{kind}"
    data = {"name": kind, "root": str(path), "label": "y", "text": ["note"]}
    if kind == "csv":
        table.to_csv(path, index=False)
    elif kind == "npz":
        data = npz(path, x=table["note"].to_numpy(str), y=table["y"].to_numpy())
    else:
        pytest.importorskip("datasets").Dataset.from_pandas(table).save_to_disk(data["root"])
        data["inputs"] = ["age"]
    tables = {"model": {"shared": "text_net:Net"}, "training": {"batch_size": 8, "local_epochs": 4}, "rounds": 3}
    run = fedmutual.run(config(data=data | READING, optimizer={"name": "adam", "lr": 0.05}, **tables), tmp_path / "run")
    scores = run.history().query("metric == 'accuracy' and model == 'global'")["value"]
    assert scores.iloc[-1] == 1
    assert [p.label for p in fedmutual.predict(run.folder, path)] == [str(label) for label in table["y"]]
    scored = run.score(path)
    assert scored.values["accuracy"] == 1
    assert scored.training_rows >= 64
    if kind == "datasets":
        pytest.importorskip("datasets").Dataset.from_pandas(table[["note", "age"]].head(3)).save_to_disk("new")
        assert len(fedmutual.predict(run.folder, "new")) == 3
        with pytest.raises(UserError, match="there is no column 'y'"):
            run.score("new")
        pytest.importorskip("datasets").load_from_disk(data["root"]).train_test_split(0.5).save_to_disk("both")
        with pytest.raises(UserError, match="has the splits 'train', 'test'; name the folder of one: both/test"):
            run.score("both")
        assert run.score("both/test").values["accuracy"] == 1


def test_series_of_a_saved_folder_have_one_length(tmp_path):
    saved = pytest.importorskip("datasets")
    rows = {"ids": [[1, 2], [3], [4, 5], [1]], "y": [0, 1, 0, 1]}
    saved.Dataset.from_dict(rows).save_to_disk(tmp_path / "train")
    splits = {"train": saved.Dataset.from_dict(rows), "test": saved.Dataset.from_dict({"ids": [[1, 2, 3]], "y": [1]})}
    saved.DatasetDict(splits).save_to_disk(tmp_path / "both")
    config = DataConfig(name="datasets", root=tmp_path / "both", label="y")
    source = read_saved(config)
    assert [part.x.with_form("ids").take([0]).tolist() for part in source.parts] == [[[1, 2, 0]], [[1, 2, 3]]]
    assert read_rows(tmp_path / "train", config, (4,), labelled=False)["x"].tolist()[:2] == [[1, 2, 0, 0], [3, 0, 0, 0]]


def test_text_of_a_table_in_memory_trains_and_is_scored(tmp_path, in_tmp_path):
    (tmp_path / "text_net.py").write_text(EMBEDDING)
    sites = {i: Site(train=notes(0).iloc[k::2], label="y") for k, i in enumerate("ab")}
    arguments = QUICK | {"rounds": 3, "local_epochs": 4, "optimizer": "adam", "lr": 0.05}
    arguments["settings"] = {"data.text": ["note"], **{f"data.{k}": v for k, v in READING.items()}}
    run = fedmutual.federate(sites, "fml", runpy.run_path("text_net.py")["Net"](), **arguments)
    assert run.score(notes(5), label="y").values["accuracy"] == 1


@pytest.mark.parametrize("library", ["tokenizers", "transformers"])
def test_a_tokenizer_from_disk_gives_its_ids(library, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[PAD]": 0, "[UNK]": 1, "well": 2, "ill": 3}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if library == "tokenizers":
        made.enable_truncation(2)  # another length than data.length
        path = tmp_path / "tokenizer.json"
        made.save(str(path))
    else:
        path = tmp_path / "saved"
        fast = pytest.importorskip("transformers").PreTrainedTokenizerFast
        fast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(str(path))
    read = encode_texts(np.array(["ill well other", "", "well well well well"]), DataConfig(tokenizer=str(path), length=3))
    assert read["input_ids"].tolist() == [[3, 2, 1], [0, 0, 0], [2, 2, 2]]
    assert read["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 1]]
    with pytest.raises(UserError, match="there is no file"):
        encode_texts(np.array(["ill"]), DataConfig(tokenizer=str(tmp_path / "other")))


def test_hashed_words_have_fixed_ids():
    """blake2b of "ill", in 8 bytes, by hashlib: its remainder by 99, plus 1."""
    digest = int.from_bytes(hashlib.blake2b(b"ill", digest_size=8).digest(), "big")
    assert hash_tokens("Ill, ILL", 100)[::2] == [1 + digest % 99] * 2


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("発熱と咳。MRI正常", [*"発熱と咳。", "mri", *"正常"]),  # no blanks between words
        ("ไข้", [*"ไข้"]),
        ("नमस्ते दुनिया", ["नमस्ते", "दुनिया"]),  # vowel signs belong to their word
        ("열이 난다", ["열이", "난다"]),
        ("Fie\u0301vre", ["fi\u00e9vre"]),  # as macOS writes é
        ("\t\n", []),
    ],
)
def test_words_of_any_script_have_ids(text, tokens):
    assert hash_tokens(text, 1000) == [hash_tokens(token, 1000)[0] for token in tokens]
    assert len(hash_tokens(text, 1000)) == len(tokens)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_numbers_in_a_text_are_as_written_whatever_the_other_rows_hold(kind, tmp_path):
    read = []
    for k, last in enumerate(["2021", None]):
        path = tmp_path / f"{k}.{kind}"
        table = pd.DataFrame({"code": ["007", "1.50", last], "y": [0, 1, 0]})
        table.to_csv(path, index=False, sep=";") if kind == "csv" else table.to_parquet(path)
        settings = config(data={"name": kind, "root": str(path), "label": "y", "text": ["code"], "length": 3}).data
        read.append(read_table(settings).train.x.take([0, 1])["input_ids"].tolist())
    assert read == [[[*hash_tokens("007", 30000), 0, 0], hash_tokens("1.50", 30000)]] * 2


def test_text_alone_teaches_numbers(tmp_path):
    notes(0).drop(columns="age").to_csv(tmp_path / "notes.csv", index=False)
    about = {"name": "csv", "root": str(tmp_path / "notes.csv"), "label": "y", "text": ["note"], **READING}
    assert prepare(config(data=about, training={"task": "regression"}))[""].space.classes == ("y",)


def test_missing_text_of_a_saved_folder_has_no_word(tmp_path):
    saved = pytest.importorskip("datasets")
    saved.Dataset.from_dict({"note": ["ill", None], "more": ["now", None], "y": [0, 1]}).save_to_disk(tmp_path / "saved")
    about = DataConfig(name="datasets", root=tmp_path / "saved", label="y", text=("note", "more"), length=2)
    assert read_saved(about).train.x.take([1])["input_ids"].tolist() == [[0, 0]]


def test_a_saved_folder_may_have_several_columns_of_labels(tmp_path):
    saved = pytest.importorskip("datasets")
    rows = saved.Dataset.from_dict({"x": [[0.5, 1.5], [2.5, 3.5]], "ill": [0, 1], "old": [1, None]})
    saved.DatasetDict({"train": rows, "validation": rows}).save_to_disk(tmp_path / "saved")
    about = DataConfig(name="datasets", root=tmp_path / "saved", label=("ill", "old"), unlabelled=True)
    source = read_saved(about)
    names, (targets,) = read_targets(source, about, "labels", ("y",))
    assert names == ("ill", "old")
    np.testing.assert_array_equal(targets, [[0, 1], [1, np.nan]])
    assert source.train.x.take([0]).tolist() == [[0.5, 1.5]]  # and no column of labels
    assert source.notes == (f"{tmp_path / 'saved'}: splits 'validation' are not read; only 'train' and 'test' are",)


@pytest.mark.parametrize(
    ("label", "cells", "words"),
    [
        (
            ("ill", "old"),
            [[0, 1], [1, 0]],
            "column 'ill' holds lists; each column of several in data.label has one value",
        ),
        (("ill", "old"), [[0, 1], [1]], "column 'ill' holds lists of unequal length"),
        ("ill", [[0, 1], [1]], "column 'ill' holds lists of unequal length"),
    ],
)
def test_lists_of_a_saved_folder_that_are_no_labels_are_refused(label, cells, words, tmp_path):
    saved = pytest.importorskip("datasets")
    saved.Dataset.from_dict({"x": [[0.5], [2.5]], "ill": cells, "old": [1, 0]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match=words):
        read_saved(DataConfig(name="datasets", root=tmp_path / "saved", label=label))
