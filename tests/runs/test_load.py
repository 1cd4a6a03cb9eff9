"""A finished run can be used: its models are loaded by name, and say what was recorded of them."""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom.core.errors import CheckpointError, ConfigError, DataError
from fedloom.data.arrays import Arrays
from fedloom.data.files import read_digits
from fedloom.data.new_rows import NewRows
from fedloom.runs.export import ABOUT, agree, export, format_of
from fedloom.runs.find import algorithms
from fedloom.runs.overrides import without_idle
from support.blobs import blobs
from support.patients import patients
from support.terminal import fedloom as fedloom_command

pytestmark = pytest.mark.slow


def named() -> Arrays:
    """Three clients with names, each with training rows and 8 test rows of its own."""
    a = blobs((12, 20, 15), test=24)
    client = np.where(a.test, np.arange(len(a.y)) % 3, a.client)
    return a._replace(client=client, clients=("north", "south", "west"))


SMALL: dict[str, Any] = {
    "rounds": 2,
    "partition": {"kind": "natural", "holdout": 0},
    "model": {"kind": "mlp", "widths": [5]},
    "local": {"batch": 8},
    "checkpoint": {"curves": False},
}


@pytest.mark.parametrize("kind", sorted(algorithms(own=False)))
def test_loaded_models_say_what_was_recorded(kind: str, tmp_path: Path) -> None:
    arrays = named()
    done = fedloom.run(data=arrays, out=tmp_path / "run", **without_idle({"algorithm": {"kind": kind}, **SMALL})[0])
    models, last = fedloom.load(tmp_path / "run"), done.records[-1]
    x, y = arrays.x[arrays.test], arrays.y[arrays.test]
    assert arrays.client is not None
    holders = tuple(arrays.clients[k] for k in arrays.client[arrays.test])
    recorded = {name: value for name, value in last.items() if name.endswith("/test/accuracy")}
    assert recorded
    for name, value in recorded.items():
        if name.startswith(("global", "consensus")):
            found = models.evaluate(x, y=np.array(arrays.labels)[y])
        elif name.startswith("personal"):
            rows = NewRows("rows", x, str, np.array(arrays.labels)[y], holders)
            found = models.evaluate(rows, by_client=True)
        else:
            continue
        assert found["accuracy"] == pytest.approx(value, abs=1e-12), name
        assert found["loss"] == pytest.approx(last[name.replace("accuracy", "loss")], rel=1e-4), name


@pytest.mark.parametrize("partition", [{"kind": "iid", "clients": 3}, {"kind": "natural", "clients": 2}])
def test_clients_that_are_not_those_of_the_data_are_not_found_by_its_names(
    tmp_path: Path, partition: dict[str, Any]
) -> None:
    """The data's clients are called 0, 1 and 2; those of the run have the same numbers, and other rows."""
    rng = np.random.default_rng(0)
    lines = [f"{a:.3f},{int(a > 0)},{k % 3}" for k, a in enumerate(rng.normal(size=60))]
    (tmp_path / "sites.csv").write_text("\n".join(["a,label,site", *lines]) + "\n")
    table = {"source": "csv", "path": str(tmp_path / "sites.csv"), "client": "site", "statistics": "own"}
    few: dict[str, Any] = {"data": table, "rounds": 1, "model": "logistic", "checkpoint": {"curves": False}}
    fedloom.run("local_only", out=tmp_path / "split", partition=partition, **few)
    models = fedloom.load(tmp_path / "split")
    with pytest.raises(DataError, match="the clients of the run are other ones"):
        models.predict(table["path"], by_client=True)
    assert models._recipe is not None
    assert models._recipe.own
    assert torch.equal(
        models.client("0").module.prepare.mean, torch.tensor(models._recipe.scaling.mean, dtype=torch.float64)
    )
    fedloom.run("local_only", out=tmp_path / "whole", partition="natural", **few)
    assert len(fedloom.load(tmp_path / "whole").predict(table["path"], by_client=True)) == 60


def test_buffers_and_frozen_parts_are_those_of_each_client(tmp_path: Path) -> None:
    settings = SMALL | {
        "model": {"kind": "support.ala:Normed", "buffers": "local"},
        "local": {"batch": 4, "drop_last": True},
    }
    arrays = named()
    done = fedloom.run("fedavg", data=arrays, out=tmp_path / "bn", **settings)
    models = fedloom.load(tmp_path / "bn")
    assert arrays.client is not None
    holders = tuple(arrays.clients[k] for k in arrays.client[arrays.test])
    rows = NewRows("rows", arrays.x[arrays.test], str, np.array(arrays.labels)[arrays.y[arrays.test]], holders)
    found = models.evaluate(rows, by_client=True)["loss"]
    assert found == pytest.approx(done.records[-1]["personal/pre_fit/test/loss"], rel=1e-4)
    north, south = (models.client(name).module.net.get_buffer("norm.running_mean") for name in ("north", "south"))
    assert not torch.equal(north, south)
    frozen = SMALL | {"model": {"kind": "random_features", "width": 16}}
    done = fedloom.run("local_only", data=arrays, out=tmp_path / "rf", **frozen)
    rows = rows._replace(at="again")
    found = fedloom.load(tmp_path / "rf").evaluate(rows, by_client=True)["accuracy"]
    assert found == pytest.approx(done.records[-1]["personal/post_fit/test/accuracy"])


def test_exported_nets_say_the_same(tmp_path: Path) -> None:
    path = patients(tmp_path, 120)
    data = {"source": "csv", "path": str(path), "label": "ill", "client": "hospital", "drop": ["patient"]}
    fedloom.run("fedavg", data=data, rounds=1, model="logistic", checkpoint={"curves": False}, out=tmp_path / "r")
    models = fedloom.load(tmp_path / "r")
    assert export(models, tmp_path / "m.pt2", "pt2") <= 1e-5
    rows = torch.from_numpy(models.rows(path).x)
    with torch.no_grad():
        said = torch.export.load(tmp_path / "m.pt2").module()(rows)
        assert torch.allclose(said, models.module(rows), atol=1e-5)
    onnxruntime = pytest.importorskip("onnxruntime")
    assert export(models, tmp_path / "m.onnx", "onnx") <= 1e-4
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    assert np.allclose(session.run(None, {"rows": rows.numpy()})[0], said.numpy(), atol=1e-3)


def test_the_name_of_an_exported_file_fits_its_format() -> None:
    assert format_of(None, None) == "pt2"
    assert format_of("onnx", None) == format_of("onnx", Path("/dev/null")) == "onnx"
    assert format_of(None, Path("m.onnx")) == format_of("onnx", Path("m.ONNX")) == "onnx"
    assert format_of(None, Path("m.pt2")) == format_of("pt2", Path("m.pt2")) == "pt2"
    with pytest.raises(ConfigError, match=r"--out: new.csv does not end in \.pt2 or \.onnx \(such as new\.pt2\)"):
        format_of(None, Path("new.csv"))
    with pytest.raises(ConfigError, match=r"x\.onnx does not end in \.pt2, as --format pt2 does \(such as x\.pt2\)"):
        format_of("pt2", Path("x.onnx"))


def test_an_exported_file_describes_itself_and_the_example_in_the_documents_predicts_the_same(tmp_path: Path) -> None:
    path = patients(tmp_path, 120)
    (tmp_path / "new.csv").rename(tmp_path / "new_patients.csv")
    data = {"source": "csv", "path": str(path), "label": "ill", "client": "hospital", "drop": ["patient"]}
    fedloom.run("fedavg", data=data, rounds=1, model="logistic", checkpoint={"curves": False}, out=tmp_path / "r")
    models = fedloom.load(tmp_path / "r")
    export(models, tmp_path / "hospital-a.pt2", "pt2")
    page = Path(__file__).parents[2].joinpath("docs", "tables.md").read_text()
    (example,) = (block for block in page.split("```") if "extra_files" in block)
    made: dict[str, Any] = {}
    with contextlib.chdir(tmp_path):
        exec(example.removeprefix("python\n"), made)
        said = models.predict_proba("new_patients.csv")
    assert "" in (row.split(",")[4] for row in (tmp_path / "new_patients.csv").read_text().splitlines())  # a gap
    assert np.allclose(made["chances"].detach().numpy(), said, atol=1e-5)
    about = made["about"]
    assert (about["labels"], about["outputs"]) == (["no", "yes"], "logits")
    assert about["inputs"] == list(models.inputs)
    assert about["columns"][0] == {
        "name": "admitted",
        "kind": "date",
        "missing": "NaN",
        "unit": "days since 1970-01-01",
    }
    assert about["columns"][2]["fill"] == "never"
    onnxruntime = pytest.importorskip("onnxruntime")
    export(models, tmp_path / "m.onnx", "onnx")
    kept = onnxruntime.InferenceSession(str(tmp_path / "m.onnx")).get_modelmeta().custom_metadata_map
    assert json.loads(kept["fedloom.json"]) == about


def test_exported_outputs_may_be_apart_by_rounding_whatever_their_size() -> None:
    ours = torch.tensor([0.5, 2.5e6])
    assert agree(ours * (1 + 1e-6), ours)
    assert not agree(ours + 0.01, ours[:1])
    assert not agree(ours * torch.nan, ours)


TINY: dict[str, Any] = {"rounds": 1, "model": "logistic", "checkpoint": {"curves": False}, "partition": {"clients": 3}}


@pytest.fixture(scope="module")
def of_pixels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learned from bytes."""
    folder = tmp_path_factory.mktemp("pixels") / "run"
    fedloom.run(out=folder, **TINY)
    return folder


def test_pixels_in_another_unit_are_refused(of_pixels: Path, tmp_path: Path) -> None:
    models, digits = fedloom.load(of_pixels), read_digits()
    assert models.values == (0, 255)
    said = models.predict(digits.x)
    assert (models.predict(digits.x.astype(np.float64)) == said).all()  # the same numbers as another type
    shares = digits.x.astype(np.float32) / 255
    told = r"values are 0 to 1, but those that the model learned from are 0 to 255 \(multiply them by 255\)"
    for use in (models.predict, models.predict_proba, lambda x: models.evaluate(x, digits.y)):
        with pytest.raises(DataError, match=told):
            use(shares)
    np.savez(tmp_path / "shares.npz", x=shares, y=digits.y)
    with pytest.raises(DataError, match=r"shares\.npz: " + told):
        models.evaluate(tmp_path / "shares.npz")
    for other in ((shares - 0.13) / 0.31, 257.0 * digits.x):  # as torchvision's Normalize makes them; 16 bits
        with pytest.raises(DataError, match="scale them as the rows of training were scaled"):
            models.predict(other)


def test_what_may_be_a_dark_picture_is_a_warning(of_pixels: Path) -> None:
    models, x = fedloom.load(of_pixels), read_digits().x
    with pytest.warns(UserWarning, match="values are 0 to 15, but .* learned from are 0 to 255") as told:
        models.predict(x // 16 * 1.0)  # much as scikit-learn's load_digits has them
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match="values are 0 to 1, but"):
        models.predict(x // 255)  # bytes, all of them almost black
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models.predict(0 * x)
        models.predict(x[:0])
        models.predict(x // 2 + 100)


def test_shares_are_what_a_model_of_shares_takes(tmp_path: Path) -> None:
    digits = read_digits()
    shares = digits.x.astype(np.float32) / 255
    fedloom.run(data=(shares, digits.y), out=tmp_path / "r", **TINY)
    models = fedloom.load(tmp_path / "r")
    assert models.values == (0, 1)
    with pytest.raises(DataError, match=r"values are 0 to 255, .* are 0 to 1 \(divide them by 255\)"):
        models.predict(digits.x)
    fedloom.run(data=(2 * shares - 1, digits.y), out=tmp_path / "signed", **TINY)
    with pytest.warns(UserWarning, match="values are 0 to 1, but .* are -1 to 1"):
        fedloom.load(tmp_path / "signed").predict(shares)


def test_features_have_no_limits_and_are_warned_of(tmp_path: Path) -> None:
    fedloom.run(data=(named().x, named().y), out=tmp_path / "r", **TINY)
    models = fedloom.load(tmp_path / "r")
    with pytest.warns(UserWarning, match="but those that the model learned from are"):
        models.predict(1000 * named().x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models.predict(10 * named().x)


def test_a_record_without_limits_is_of_an_earlier_version(of_pixels: Path, tmp_path: Path) -> None:
    shutil.copytree(of_pixels, tmp_path / "old")
    record = json.loads((tmp_path / "old" / "model.json").read_text())
    (tmp_path / "old" / "model.json").write_text(json.dumps({k: v for k, v in record.items() if k != "values"}))
    (tmp_path / "old" / "manifest.json").unlink()
    assert fedloom.load(tmp_path / "old").values == (0, 255)  # bytes could not be anything else


def test_exported_files_say_what_they_take(of_pixels: Path, tmp_path: Path) -> None:
    models = fedloom.load(of_pixels)
    assert models.values is not None
    export(models, tmp_path / "m.pt2", "pt2")
    about = {ABOUT: ""}
    torch.export.load(tmp_path / "m.pt2", extra_files=about)
    wanted = {
        "inputs": [1, 8, 8],
        "values": [0, 255],
        "columns": [],
        "outputs": "logits",
        "labels": list(models.labels),
    }
    assert json.loads(about[ABOUT]) == wanted
    onnxruntime = pytest.importorskip("onnxruntime")
    export(models, tmp_path / "m.onnx", "onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    assert json.loads(session.get_modelmeta().custom_metadata_map[ABOUT]) == wanted


def test_what_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a run folder"):
        fedloom.load(tmp_path)
    few = SMALL | {"checkpoint": {"personal": "none"}, "rounds": 1}
    fedloom.run("ditto", data=named(), out=tmp_path / "r", **few)
    models = fedloom.load(tmp_path / "r")
    assert models.predict(named().x).shape == (71,)
    with pytest.raises(CheckpointError, match=r"checkpoint\.personal=all"):
        models.client("north")
    with pytest.raises(DataError, match=r"each row must have the shape \(4,\)"):
        models.predict(np.zeros((3, 5)))
    text = (tmp_path / "r" / "model.json").read_text()
    (tmp_path / "r" / "model.json").write_text(text.replace("north", "nord"))
    with pytest.raises(CheckpointError, match="has changed since the run wrote it"):
        fedloom.load(tmp_path / "r")


_TWO_FILES = {
    "net.py": """
from layers import Wide
from torch import nn


class Own(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), Wide(64, classes))

    def forward(self, x):
        return self.layers(x)
""",
    "layers.py": "from torch import nn\n\n\nclass Wide(nn.Linear):\n    pass\n",
}


@pytest.mark.slow
def test_a_net_of_the_users_own_is_found_wherever_it_is_loaded(tmp_path: Path) -> None:
    """In the folder where the run began; else in the copies that the run keeps, which need trust as any new code."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    for name, text in _TWO_FILES.items():
        (tmp_path / "here" / name).write_text(text)
    began = fedloom_command("run", "model=net.py:Own", "rounds=1", "--out", "r", cwd=tmp_path / "here")
    assert began.code == 0, began.err
    x = np.zeros((3, 1, 8, 8), np.float32)
    np.savez(tmp_path / "there" / "new.npz", x=x)
    said = fedloom_command("predict", "../here/r", "new.npz", "--out", "a.csv", cwd=tmp_path / "there")
    assert (said.code, said.err) == (0, "")
    shutil.copytree(tmp_path / "here" / "r", tmp_path / "there" / "copy")
    shutil.rmtree(tmp_path / "here")
    refused = fedloom_command("predict", "copy", "new.npz", cwd=tmp_path / "there")
    assert refused.code == 2
    assert "code/net.py that you have not run before (if you trust it, add --trust" in refused.err
    again = fedloom_command("predict", "copy", "new.npz", "--trust", "--out", "b.csv", cwd=tmp_path / "there")
    assert again.code == 0, again.err
    assert (tmp_path / "there" / "a.csv").read_text() == (tmp_path / "there" / "b.csv").read_text()
