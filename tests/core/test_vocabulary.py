"""The names of metrics mean the same everywhere."""

from __future__ import annotations

import pytest

from fedloom.core.vocabulary import (
    accuracies,
    bytes_exchanged,
    headline,
    is_cost,
    is_evaluation,
    is_ours,
    is_privacy,
    is_share,
    lower_is_better,
    matching,
    meaning,
)


def test_what_stands_for_a_run_is_its_first_place_and_what_privacy_was_spent() -> None:
    names = ["round", "personal/pre_fit/test/accuracy", "personal/pre_fit/test/accuracy_std"]
    names += ["personal/pre_fit/test/loss", "global/test/accuracy", "global/test/loss", "privacy/epsilon"]
    assert headline(names) == ["personal/pre_fit/test/loss", "personal/pre_fit/test/accuracy", "privacy/epsilon"]
    assert accuracies(names) == ["personal/pre_fit/test/accuracy", "global/test/accuracy"]
    assert headline(["round", "privacy/epsilon"]) == ["privacy/epsilon"]


def test_a_star_stands_for_one_part_of_a_name() -> None:
    names = ["personal/pre_fit/test/accuracy", "personal/test/accuracy", "personal/a/b/test/accuracy"]
    assert list(matching("personal/*/test/accuracy", names)) == names[:1]
    assert list(matching("personal/test/accuracy", names)) == names[1:2]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("global/test/accuracy", "the server's model on the common test set: share of rows"),
        ("personal/post_fit/test/loss_worst10", "after local training: mean loss (task.loss), mean of the worst tenth"),
        ("bytes/up", "communication: bytes sent"),
        ("fedalr/eta_mean", ""),
    ],
)
def test_names_have_a_meaning_in_words(name: str, says: str) -> None:
    assert says in meaning(name)
    assert bool(meaning(name)) == is_ours(name)


def test_names_of_a_method_that_begin_like_a_measure_are_not_one() -> None:
    less = ["global/test/loss", "nodes/test/mae_max", "personal/pre_fit/test/accuracy_std", "bytes/up"]
    less += ["work/gradients", "bad_clients/weight_mean", "bad_clients/weight_share", "mine/loss_mean"]
    less += ["hessian/top", "privacy/epsilon_simulated"]
    more = ["global/test/accuracy", "personal/pre_fit/test/accuracy_worst10", "nodes/test/accuracy_min"]
    more += ["mine/downstream_accuracy", "mine/uptake", "mine/losslessness", "mine/upper_bound", "mine/recall"]
    less += ["global/test/loss_top", "global/test/rmse10", "personal/pre_fit/test/brier_2", "global/validation/mae-50"]
    more += ["global/test/lossless", "global/test/maeve", "global/test/eceA", "global/test/top_loss"]
    assert [name for name in [*less, *more] if lower_is_better(name)] == less


def test_what_a_run_has_spent() -> None:
    names = ["global/test/loss", "bytes/up", "work/gradients", "time/simulated", "privacy/epsilon"]
    assert [name for name in names if is_cost(name)] == names[1:4]
    assert [name for name in names if is_privacy(name)] == names[4:]
    assert bytes_exchanged({"bytes/up": 10, "bytes/down": 5}) == 15
    assert bytes_exchanged({"bytes/up": 10}) == 10


def test_shares_and_evaluations() -> None:
    assert is_share("nodes/test/accuracy_min")
    assert not is_share("global/test/auc_micro_logits")
    assert is_evaluation({"round": 3, "bytes/up": 10})
    assert not is_evaluation({"round": 3, "excluded": [1]})
