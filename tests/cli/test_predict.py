"""`predict`: which model answers, for inputs scaled exactly as they were in training."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torchvision.datasets.folder import default_loader
from torchvision.transforms.functional import to_tensor

import fedmutual
from fedmutual import data
from fedmutual.models import build
from fedmutual.studies import predict
from own_data import RUN, everything, folder, image

pytestmark = pytest.mark.run


@pytest.fixture
def pictures(tmp_path, in_tmp_path):
    """A finished run on a folder of colour images with data.size, mean and std."""
    folder(tmp_path / "images", {"cat": 12, "dog": 12, "owl": 12})
    given = '{ name = "folder", root = "images", size = [8, 9], mean = [0.4, 0.3, 0.6], std = [0.2, 0.1, 0.3] }'
    (tmp_path / "p.toml").write_text(RUN.format(name="p", data=given))
    return fedmutual.run(fedmutual.load_config("p.toml", **{"model.personal": ["mlp", "cnn1"]}), "p")


@pytest.fixture
def digits(small, cli):
    """The folder of a finished run on digits, and an image file of one of them, as stored: 0 to 16."""
    cli("run", small, "--set", "rounds=1", "--out", "r")
    Image.fromarray(load_digits().images[3].astype(np.uint8)).save("three.png")
    return small.parent / "r"


def test_an_image_of_the_training_folder_becomes_the_training_tensor(pictures, monkeypatch):
    inputs = []
    answering = predict.choose_model(pictures.folder)
    net = type("Spy", (torch.nn.Module,), {"forward": lambda self, x: (inputs.append(x), answering.net(x))[1]})()
    monkeypatch.setattr(predict, "choose_model", lambda *_, **__: answering._replace(net=net))
    rows = data.load(pictures.config).clients["1"].private
    x, _ = everything(rows)
    files = [rows.name_row(k) for k in range(len(rows))]
    fedmutual.predict(pictures.folder, files)
    assert torch.equal(torch.cat(inputs), x)


def test_a_photo_is_predicted_upright_and_on_white(pictures, tmp_path):
    pixels = np.arange(8 * 9 * 4).reshape(8, 9, 4).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    Image.fromarray(pixels).save(tmp_path / "photo.png", exif=exif)
    turned = np.rot90(pixels, -1).astype(float)
    opacity = turned[..., 3:] / 255
    seen = turned[..., :3] * opacity + 255 * (1 - opacity)
    Image.fromarray(seen.round().astype(np.uint8)).save(tmp_path / "seen.png")
    pictures.export(tmp_path / "model")
    assert "images to a height and width of 8 x 9 first, bilinear" in (tmp_path / "model" / "README.md").read_text()
    photo, seen_photo = fedmutual.predict(pictures.folder, [tmp_path / "photo.png", tmp_path / "seen.png"])
    assert dict(photo.ranked) == pytest.approx(dict(seen_photo.ranked), abs=1e-3)  # composition may round otherwise


@pytest.mark.parametrize("client", [None, "1"])
def test_probabilities_are_those_of_another_decoder_and_the_weights_of_the_file(pictures, tmp_path, cli, client):
    """The images have the size that the run resizes to, so torchvision's decoder needs no resizing of its own."""
    path = image(tmp_path / "new.png", 77, size=(8, 9))
    raw = to_tensor(default_loader(str(path)))
    mean, std = torch.tensor([0.4, 0.3, 0.6]), torch.tensor([0.2, 0.1, 0.3])
    x = ((raw - mean[:, None, None]) / std[:, None, None])[None]
    file, name, start = ("server", "mlp", "") if client is None else ("clients/1", "cnn1", "personal.")
    state = load_file(pictures.folder / file / "round-1.safetensors")
    net = build(name, (3, 8, 9), 3, torch.Generator())
    net.load_state_dict({k.removeprefix(start): v for k, v in state.items() if k.startswith(start)})
    expected = dict(zip(("cat", "dog", "owl"), net.eval()(x).double().softmax(1)[0].tolist(), strict=True))

    who = [] if client is None else ["--client", client]
    out, _ = cli.run("predict", "p", path, "--json", *who)
    (line,) = [json.loads(text) for text in out.splitlines()]
    assert line["probabilities"] == pytest.approx(expected)
    assert line["class"] == max(expected, key=expected.get)
    assert line["probability"] == line["probabilities"][line["class"]]
    message = "shared model (mlp), round 1" if client is None else "personal model of client '1' (cnn1), round 1"
    assert (line["model"], line["example"]) == (message, str(path))


def test_the_terminal_shows_the_answering_model_and_the_next_classes(digits, cli):
    out, _ = cli.run("predict", digits, "three.png", "--client", 2)
    best = fedmutual.predict(digits, ["three.png"], "2")[0]
    assert "answered by: personal model of client '2' (mlp), round 1" in out
    assert f"three.png {best.label} " in " ".join(out.split())
    assert f"{best.ranked[1][0]} {100 * best.ranked[1][1]:.1f}" in out


def test_a_model_file_is_read_with_its_run(digits, cli):
    by_file = fedmutual.predict(digits / "clients/1/round-1.safetensors", ["three.png"])
    assert by_file == fedmutual.predict(digits, ["three.png"], "1")
    assert fedmutual.predict(digits / "server/round-1.safetensors", ["three.png"]) == fedmutual.predict(
        digits, ["three.png"]
    )
    shutil.copy(digits / "server/round-1.safetensors", "alone.safetensors")
    shutil.copy(digits / "server/round-1.safetensors", digits / "server/round-9.safetensors")
    for model, options, sentence in (
        ("alone.safetensors", [], "alone.safetensors: is no model file in a run's folder"),
        (digits / "server/round-9.safetensors", [], "is not the saved round of"),
        (digits / "server/round-1.safetensors", ["--client", "1"], "the file already names the client; remove --client"),
        ("nowhere", [], "nowhere: is neither a run's folder nor a model file in a run's folder"),
    ):
        code, out, err = cli("predict", model, "three.png", *options)
        assert (code, out) == (2, ""), err
        assert sentence in err


def test_a_client_without_a_personal_model_uses_the_shared_model(small, cli, digits):
    cli("run", small, "--set", "rounds=1", "--set", "algorithm.name=fedavg", "--out", "a")
    (prediction,) = fedmutual.predict("a", ["three.png"], "2")
    assert prediction.model == "shared model (mlp), round 1, for client '2', which has no personal model"
    assert prediction.ranked == fedmutual.predict("a", ["three.png"])[0].ranked
    assert "a: there is no client 'north'; there are 0, 1, 2" in cli.fail("predict", "a", "three.png", "--client", "north")


def test_without_a_complete_shared_model_the_clients_are_named(small, cli, digits):
    cli("run", small, "--set", "rounds=1", "--set", "algorithm.name=centralised", "--out", "c")
    (prediction,) = fedmutual.predict("c/clients/pooled/round-1.safetensors", ["three.png"])
    assert prediction.model == "model of all data in one place (mlp), round 1"
    cli("run", small, "--set", "rounds=1", "--set", "algorithm.name=independent", "--out", "i")
    err = cli.fail("predict", "i", "three.png")
    assert "i: this run has no complete global model, because nothing is shared" in err
    assert "(`fedmutual predict --client ID`): 0, 1, 2" in err
    assert fedmutual.predict("i", ["three.png"], "0")[0].model == "personal model of client '0' (mlp), round 1"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: Image.new("L", (9, 8)).save("x.png"),
            "x.png is 8 x 9 pixels and the model takes 8 x 8; resize it, or train",
        ),
        (lambda: Image.new("RGB", (8, 8)).save("x.png"), "x.png is in colour and the model learned from gray images"),
        (lambda: Image.new("L", (8, 8), 200).save("x.png"), "x.png has pixels up to 200, and the model learned"),
        (lambda: open("x.png", "w").close(), "x.png cannot be read as an image"),
        (lambda: None, "x.png cannot be read as an image"),
    ],
)
def test_an_image_that_does_not_fit_is_refused_in_a_sentence(digits, cli, make, sentence):
    make()
    code, out, err = cli("predict", digits, "three.png", "x.png")
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_rows_of_a_table_are_matched_by_column(tmp_path, in_tmp_path, cli):
    rng = np.random.default_rng(0)
    rows = [(rng.normal(k % 2, 0.2), rng.normal(), "ill" if k % 2 else "well") for k in range(60)]
    (tmp_path / "t.csv").write_text("pulse,age,label\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    text = RUN.format(name="t", data='{ name = "csv", root = "t.csv" }')
    (tmp_path / "t.toml").write_text(text)
    run = fedmutual.run(fedmutual.load_config("t.toml"), "t")
    (tmp_path / "new.csv").write_text("age,name,pulse\n0.5,Ann,1.1\n-0.5,Bob,0.1\n")
    predictions = fedmutual.predict("t", ["new.csv"])
    p = run.global_model()(torch.tensor([[1.1, 0.5], [0.1, -0.5]])).softmax(1)
    assert [dict(f.ranked)["well"] for f in predictions] == pytest.approx(
        p[:, run.summary["data"]["classes"].index("well")].tolist()
    )
    assert [f.example for f in predictions] == ["line 2 of new.csv", "line 3 of new.csv"]
    assert fedmutual.predict("t", "new.csv") == predictions
    (tmp_path / "bad.csv").write_text("age,name\n0.5,Ann\n")
    Image.new("L", (2, 1)).save("x.png")
    for file, sentence in (
        ("bad.csv", "bad.csv: there is no column 'pulse', which the model learned from; it has 'age', 'name'"),
        ("x.png", "x.png: the model learned from data of another kind; give it a CSV file with the columns 'pulse', 'age'"),
    ):
        assert sentence in cli.fail("predict", "t", file)


def test_arrays_are_taken_as_the_run_took_them(digits, cli):
    """The run's own reader holds digits as uint8 [n, 8, 8]: an npz of them says what an image file says."""
    np.savez("new.npz", x=load_digits().images[3:5].astype(np.uint8))
    predictions = fedmutual.predict(digits, ["new.npz"])
    assert [f.example for f in predictions] == ["row 0 of 'x' in new.npz", "row 1 of 'x' in new.npz"]
    assert dict(predictions[0].ranked) == pytest.approx(dict(fedmutual.predict(digits, ["three.png"])[0].ranked))
    np.savez("bad.npz", x=np.zeros((2, 7, 8)))
    assert "row 0 of 'x' in bad.npz is 7 x 8 pixels and the model takes 8 x 8" in cli.fail("predict", digits, "bad.npz")
    _, _, err = cli("predict", digits, "new.csv")
    assert "new.csv: the model learned from data of another kind; give it images" in err


def test_an_npz_file_to_predict_needs_the_inputs_alone(tmp_path, in_tmp_path, cli):
    """The run's groups, and whatever other arrays the file holds, are not read."""
    digits = load_digits()
    np.savez("d.npz", x=digits.images, y=digits.target, patient=np.arange(len(digits.target)) // 4)
    given = '{ name = "npz", root = "d.npz", group_by = "patient" }'
    (tmp_path / "g.toml").write_text(RUN.format(name="g", data=given))
    run = fedmutual.run(fedmutual.load_config("g.toml"), "g")
    np.savez("new.npz", x=digits.images[:3], x_test=digits.images[:3], domain=["a"])
    assert [p.label for p in fedmutual.predict("g", "new.npz")] == [*run.predict(digits.images[:3]).idxmax(axis=1)]
    np.savez("none.npz", images=digits.images[:3])
    assert "none.npz: there is no array 'x'; it has 'images'" in cli.fail("predict", "g", "none.npz")


OWN = """
name = "own"
rounds = 1
data = {{ name = "npz", root = "d.npz", classes = ["0", "1", "2"] }}
algorithm = {{ name = "{algorithm}" }}
model = {{ shared = "cnn1"{part} }}
training = {{ local_epochs = 1, batch_size = 32, task = "{task}" }}
engine = {{ device = "cpu" }}

[clients.north]
data = {{ mean = [0.3], std = [0.4] }}

[clients.south]
data = {{ mean = [{mean}], std = [0.4] }}
"""


@pytest.fixture
def make_run(tmp_path, in_tmp_path):
    """Make a run of two clients with data of their own, and rows to ask it about."""
    digits = load_digits()
    is_kept = digits.target < 3
    np.savez("d.npz", x=(digits.images[is_kept] * 15).astype(np.uint8), y=digits.target[is_kept])
    np.savez("new.npz", x=(digits.images[3:4] * 15).astype(np.uint8))

    def make(algorithm="fml", part="", mean=0.3, task="classification"):
        text = OWN.format(algorithm=algorithm, part=part, mean=mean, task=task)
        (tmp_path / "o.toml").write_text(
            text if task == "classification" else text.replace(', classes = ["0", "1", "2"]', "")
        )
        return fedmutual.run(fedmutual.load_config("o.toml"), "o")

    return make


def test_a_client_that_keeps_a_part_uses_its_own_fork(make_run):
    run = make_run("fedavg", ', part = "features"')
    (prediction,) = fedmutual.predict("o", ["new.npz"], "south")
    assert prediction.model == "client 'south''s fork of the shared model (cnn1), round 1"
    x = (torch.from_numpy(np.load("new.npz")["x"])[None].float() / 255 - 0.3) / 0.4
    p = run.meme("south")(x).double().softmax(1)[0].tolist()
    assert dict(prediction.ranked) == pytest.approx(dict(zip(("0", "1", "2"), p, strict=True)))


def test_a_shared_model_of_inputs_that_are_scaled_differently_does_not_answer(make_run, cli):
    make_run(mean=0.5)
    assert "o: each client scales its inputs differently" in cli.fail("predict", "o", "new.npz")
    assert fedmutual.predict("o", "new.npz", "south")[0].model == "personal model of client 'south' (cnn1), round 1"
    about = json.loads((path := Path("o/environment.json")).read_text())
    about["clients"]["south"]["scaling"] = about["clients"]["north"]["scaling"] | {"augment": "crop-flip"}
    path.write_text(json.dumps(about))  # augmentation is no difference in scaling
    assert fedmutual.predict("o", "new.npz")[0].model == "shared model (cnn1), round 1"


def test_a_damaged_environment_is_one_error_sentence(digits, cli):
    (digits / "environment.json").write_text('{"format": 1, "pooled": false, "models": 3, "clients": {}}')
    assert "r/environment.json: is damaged: models: " in cli.fail("predict", "r", "three.png", "--client", "1")
    (digits / "environment.json").write_text('{"format": 1}')
    with pytest.raises(fedmutual.RunError, match="is damaged: clients"):
        fedmutual.Run("r").global_model()


def test_a_client_that_learns_numbers_predicts_a_number(make_run):
    run = make_run(task="regression")
    (prediction,) = fedmutual.predict("o", "new.npz", "north")
    x = (torch.from_numpy(np.load("new.npz")["x"])[None].float() / 255 - 0.3) / 0.4
    assert prediction.numbers == pytest.approx(run.personal_model("north")(x)[0].tolist())
    assert (prediction.kind, prediction.ranked) == ("numbers", ())


def test_the_best_round_answers_where_it_is_asked_for(small, cli, digits):
    """Steps that become far too large: the last round's weights are not the best."""
    steps = ("--set", "optimizer.lr.start=0.05", "--set", "optimizer.lr.end=30.0", "--set", "optimizer.lr.shape=linear")
    cli.run("run", small, "--set", "rounds=3", *steps, "--set", "records.keep_best=true", "--out", "b")
    run = fedmutual.Run("b")
    for client, kind in (("1", "personal model of client '1' (mlp)"), (None, "shared model (mlp)")):
        client_option = ("--client", client) if client else ()
        (best,) = fedmutual.predict("b", ["three.png"], client, best=True)
        assert best.model == f"{kind}, its best round, {run.best_round(client)}"
        assert best.ranked != fedmutual.predict("b", ["three.png"], client)[0].ranked
        file = Path("b", f"clients/{client}" if client else "server", "best.safetensors")
        assert fedmutual.predict(file, ["three.png"]) == [best]
        assert f"answered by: {best.model}\n" in cli("predict", "b", "three.png", "--best", *client_option)[1]
    assert "no best weights are kept here; a run keeps them with records.keep_best = true" in cli.fail(
        "predict", digits, "three.png", "--best"
    )
