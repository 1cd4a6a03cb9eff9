"""The picture of a run: panels that stay readable however many measures were requested."""

from __future__ import annotations

from fedloom.report.curves import draw

EXTRA = ("balanced_accuracy", "f1_macro", "auc", "brier", "ece")


def test_many_measures_are_all_drawn_three_in_a_row() -> None:
    names = [f"global/test/{end}" for end in ("accuracy", "loss", *EXTRA)]
    records = [{"round": k, **dict.fromkeys(names, 0.5), "updates/norm": 1.0} for k in range(3)]
    figure = draw(records, title="fedavg")
    drawn = [axis for axis in figure.axes if axis.axison]
    assert [axis.get_ylabel() for axis in drawn] == ["accuracy", "loss", *EXTRA, "updates"]
    assert {axis.get_subplotspec().get_gridspec().ncols for axis in drawn} == {3}
    first_of_diagnostics = drawn[-1].get_subplotspec()
    assert first_of_diagnostics.colspan.start == 0  # in a row of their own
