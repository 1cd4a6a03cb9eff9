"""Data passed in Python: parts with classes of their own, objects, and forms that are nearly right."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import Dataset

from fedloom.core.errors import DataError
from fedloom.data.handed import from_anything

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 4)).astype(np.float32), np.arange(12) % 2
PIXELS = RNG.integers(0, 256, (12, 1, 3, 3), np.uint8)


class Named(Dataset[Any]):
    """A torch data set with names of its classes, unless there are none."""

    def __init__(self, y: Any, classes: list[str] | None = None, x: Any = X) -> None:
        self.x, self.y = x, y
        if classes is not None:
            self.classes = classes

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], int(self.y[i])


def refusal(data: Any) -> str:
    with pytest.raises(DataError) as caught:
        from_anything(data)
    return str(caught.value)


@pytest.mark.parametrize("form", [tuple, list], ids=["train and test", "clients"])
def test_classes_of_several_data_sets_are_joined_by_name(form: Any) -> None:
    """The second data set numbers the same classes the other way round, and has a third."""
    both = from_anything(form([Named(Y, ["a", "b"]), Named(2 - Y, ["c", "b", "a"])]))
    assert both.labels == ("a", "b", "c")
    assert (both.y[:12] == Y).all()
    assert (both.y[12:] == Y).all()
    alike = from_anything(form([Named(Y, ["b", "a"]), Named(Y)]))
    assert alike.labels == ("b", "a")


def test_classes_that_cannot_be_joined_are_refused() -> None:
    a, b = Named(Y, ["a", "b"]), Named(Y, ["b", "a"])
    assert "data 'data', 2: its classes have no names" in refusal([a, b, Named(Y)])
    assert "data 'data', 1, row 1: the label must be in 0..1 (got 2)" in refusal([a, Named(2 * Y, ["b", "a"])])


def test_pixels_and_scaled_numbers_are_not_joined() -> None:
    told = refusal([(PIXELS, Y), (PIXELS / np.float32(255), Y)])
    assert "data 'data', 1: pixels of type float32, the first part has uint8" in told
    numbers = from_anything([(X.astype(np.uint8), Y), (X, Y)])  # which mean the same in both types
    assert numbers.shape == (4,)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([(row, label) for row, label in zip(X, Y, strict=True)], "data=(x, y))"),
        (((X, Y), (X, Y)), "a tuple of 2 data sets is not a known form (use a list"),
        ((Named(Y), Named(Y), Named(Y)), "a tuple of 3 data sets is not a known form (use a list"),
        ((X[:, :0], Y), "its rows have no features"),
        (([[1, 2], [3]], [0, 1]), "x is not an array"),
        ([(X, Y[:-1]), (X[:-1], Y)], "x and y must have equally many rows"),
        ((np.ma.masked_less(X, 0), Y), "x has masked values"),
        ((X, np.ma.masked_equal(Y, 1)), "y has masked values"),
        ([(np.ma.masked_less(X, 0), Y)], "data 'data', 0: x has masked values"),
    ],
)
def test_forms_that_are_nearly_right_are_refused(data: Any, told: str) -> None:
    assert told in refusal(data)


def test_an_array_whose_mask_hides_nothing_is_taken() -> None:
    assert (from_anything((np.ma.masked_greater(X, 99), Y)).x == X).all()


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_deep_images_of_data_sets_are_refused(mode: str) -> None:
    """All levels above 255 would become white."""
    kinds = {"I;16": np.uint16, "I": np.int32, "F": np.float32}
    images = [Image.fromarray(np.full((4, 4), 3000, kinds[mode]))] * 12
    assert images[0].mode == mode
    assert f"row 0: has more than 8 bits in a pixel (mode {mode})" in refusal(Named(Y, x=images))


def test_labels_may_be_objects() -> None:
    words = np.array(["u", "v"], dtype=object)[Y]
    assert from_anything((X, words)).labels == ("u", "v")
    assert (from_anything((X, Y.astype(object))).y == Y).all()
    words[3] = None
    assert "row 3: the label must be a whole number or a word (got None)" in refusal((X, words))
    words[3] = float("nan")
    assert "row 3: the label must be a whole number or a word (got nan)" in refusal((X, words))
    assert "row 3: the label is missing" in refusal((X, words.tolist()))


def test_numbers_in_columns_of_objects_are_numbers() -> None:
    pandas = pytest.importorskip("pandas")
    columns = {"d": [Decimal(k) / 4 for k in range(12)], "n": np.arange(12, dtype=object), "t": list("001122334455")}
    frame = pandas.DataFrame({**columns, "label": Y})
    found = from_anything({"frame": frame, "standardise": False}).x
    assert found[:, 0].tolist() == [k / 4 for k in range(12)]
    assert found[:, 1].tolist() == list(range(12))
    assert found[:, 2].tolist() == [k // 2 for k in range(12)]
