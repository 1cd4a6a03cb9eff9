"""Measures of predictions, against scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedloom.core.quality import class_measures, confusion, ece, number_measures

metrics = pytest.importorskip("sklearn.metrics")


@pytest.mark.parametrize("classes", [2, 4])
def test_measures_of_classes(classes: int) -> None:
    rng = np.random.default_rng(classes)
    y = rng.choice(classes, 200, p=[0.9 if c == 0 else 0.1 / (classes - 1) for c in range(classes)])
    logits = torch.from_numpy(rng.normal(size=(200, classes)).round(1) + 1.5 * np.eye(classes)[y])
    found, chances = class_measures(logits, torch.from_numpy(y)), logits.softmax(1).numpy()
    best = chances.argmax(1)
    assert found["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(y, best))
    assert found["f1_macro"] == pytest.approx(metrics.f1_score(y, best, average="macro"))
    area = (
        metrics.roc_auc_score(y, chances[:, 1])
        if classes == 2
        else metrics.roc_auc_score(y, chances, multi_class="ovr")
    )
    assert found["auc"] == pytest.approx(area)
    assert found["brier"] == pytest.approx(((chances - np.eye(classes)[y]) ** 2).sum(1).mean())
    table = confusion(torch.from_numpy(y), torch.from_numpy(best), classes)
    assert table.tolist() == metrics.confusion_matrix(y, best).tolist()


def test_calibration() -> None:
    sure = torch.tensor([[0.7, 0.3]] * 10)
    assert ece(sure, torch.tensor([0] * 7 + [1] * 3)) == pytest.approx(0, abs=1e-6)
    assert ece(sure, torch.tensor([1] * 10)) == pytest.approx(0.7)


def test_measures_of_numbers() -> None:
    rng = np.random.default_rng(0)
    y = rng.normal(size=50)
    said = y + 0.3 * rng.normal(size=50)
    found = number_measures(torch.from_numpy(said), torch.from_numpy(y))
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(y, said))
    assert found["rmse"] == pytest.approx(metrics.root_mean_squared_error(y, said))
    assert found["r2"] == pytest.approx(metrics.r2_score(y, said))
