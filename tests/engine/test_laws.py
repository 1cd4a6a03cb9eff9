"""Every algorithm on disk, the package's and the example in the documentation, against every law."""

from __future__ import annotations

import random
from typing import Annotated, Any, Literal

import pytest
import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithm import Algorithm, Inbox, Model
from fedloom.algorithms.fedala import FedALA
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.scaffold import Scaffold
from fedloom.core import rng
from fedloom.core.schema import when
from fedloom.engine import laws, variation
from fedloom.runs.find import algorithms
from support import shared_laws

KINDS = algorithms(own=False)
FEW = ("fedavg", "scaffold", "dpsgd")  # a server, clients that keep state, a network: the others are slow
COSTLY = ("law_afl",)  # so many settings that the law of settings takes minutes: `fedloom check` is for them


@pytest.mark.usefixtures("shared_laws")
@shared_laws.BUT_SETTINGS
@pytest.mark.parametrize("kind", [k if k in FEW else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_law(kind: str, law) -> None:
    assert laws.verdict(law, KINDS[kind]) == ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in COSTLY])
def test_settings_have_an_effect(kind: str) -> None:
    assert laws.LAWS[-1] is laws.settings_have_an_effect
    assert laws.verdict(shared_laws.settings_have_an_effect, KINDS[kind]) == ""


class Writes(FedAvg):
    """Breaks the law of arguments: writes into the model it was sent."""

    def gradient(self, x, batch, down, mine):
        g = super().gradient(x, batch, down, mine)
        down.w.mul_(0.5)
        return g


class Rewrites(FedAvg):
    """The same, in a way that a second call does not show."""

    def start(self, down, mine, work):
        work.examples.fill_(1.0)
        return down.w


class Halves(FedAvg):
    """Breaks the law of arguments: writes into the uploads' sum, which diagnostics read afterwards."""

    def update(self, server: Model, inbox: Inbox) -> Model:
        inbox.total.dw.mul_(0.5)
        return super().update(server, inbox)


class Guesses(FedAvg):
    """Breaks the law of resumption: a client is served other numbers each time."""

    def serve(self, down, mine):
        return down.w * (1 + 0.01 * random.random())


class Remembers(FedAvg):
    """Breaks the law of resumption: keeps state outside the state."""

    def update(self, server: Model, inbox: Inbox) -> Model:
        seen = _memory.setdefault("rounds", 0)
        _memory["rounds"] = seen + 1
        return Model(super().update(server, inbox).w * (1 + 0.01 * seen))


class Grows(FedAvg):
    """Breaks the law of form: the server's state changes its type."""

    def update(self, server: Model, inbox: Inbox) -> Model:
        return Model(super().update(server, inbox).w.double())


class Sleeps(FedAvg):
    """Breaks the law that training changes something."""

    def update(self, server: Model, inbox: Inbox) -> Model:
        return server


class Biased(FedAvg):
    """Breaks the law of neutrality: claims to be FedAvg and is not."""

    def update(self, server: Model, inbox: Inbox) -> Model:
        return Model(super().update(server, inbox).w * 0.999)


class Branches(FedAvg):
    """Breaks the law of lanes: branches on the value of a tensor."""

    def gradient(self, x, batch, down, mine):
        g = super().gradient(x, batch, down, mine)
        return g if float(batch.progress) < 0.5 else 0 * g


class Undeclared(Scaffold):
    """Breaks the law of mirrors: its server keeps the mean of its clients' variates, and it does not say so."""

    @property
    def traits(self):
        return super().traits._replace(mirrored=False)


class Thaws(FedAvg):
    """Breaks the law of frozen parts: its server writes into them."""

    def update(self, server: Model, inbox: Inbox) -> Model:
        for x in self.task.fixed:
            x.mul_(0.9)
        return super().update(server, inbox)


class Idles(FedAvg):
    """Breaks the law of settings: nobody asks for what it is set to."""

    strength: int = Field(1, ge=1, le=2)


class Forgets(FedAvg):
    """Breaks the law of settings: one of them has an effect only beside another, and does not say so."""

    mode: Literal["plain", "damped"] = "damped"
    damping: float = Field(0.5, gt=0, le=1)

    def mean(self, inbox):
        return super().mean(inbox) * (self.damping if self.mode == "damped" else 0.9)


class Declares(Forgets):
    """The same, which says so."""

    damping: Annotated[float, when(mode="damped")] = Field(0.5, gt=0, le=1)


def beside_everything(cls):
    """The law of settings, beside every choice that another setting offers."""
    laws.settings_have_an_effect(cls, most=None)


_memory: dict[str, int] = {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "law"),
    [
        (Writes, laws.arguments_are_unchanged),
        (Rewrites, laws.arguments_are_unchanged),
        (Halves, laws.arguments_are_unchanged),
        (Guesses, laws.resumed_is_never_crashed),
        (Remembers, laws.ram_is_disk),
        (Grows, laws.state_keeps_its_shape),
        (Sleeps, laws.training_changes_something),
        (Biased, laws.neutral_is_fedavg),
        (Branches, laws.batched_is_alone),
        (Idles, laws.settings_have_an_effect),
        (Undeclared, laws.mirrors_are_declared),
        (Thaws, laws.frozen_parts_stay),
    ],
)
def test_a_law_can_be_broken(cls: type[Algorithm], law) -> None:
    assert laws.verdict(law, cls) != ""


@pytest.mark.slow
def test_a_setting_that_says_when_it_has_an_effect_obeys() -> None:
    assert "'damping' has no effect with mode = plain" in laws.verdict(beside_everything, Forgets)
    assert laws.verdict(laws.settings_have_an_effect, Declares) == ""


class Rarely(FedAvg):
    """Has a setting that is felt at its last value only."""

    share: float = Field(5.0, gt=0, le=100)

    def mean(self, inbox):
        return super().mean(inbox) * (0.9 if self.share == 100 else 1.0)


@pytest.mark.slow
def test_every_value_is_tried_until_one_is_felt() -> None:
    assert list(variation.others(Rarely, "share", {})).index(100.0) >= 2  # not among the first
    assert laws._is_felt(Rarely, "share", {}, {})


@pytest.mark.slow
def test_the_share_of_data_for_ala_has_an_effect_where_later_rounds_take_one_batch() -> None:
    """In the start phase, on clients with more than a batch: 100 % has to be tried, since less is a batch."""
    around = {"later_passes": "step"}
    assert 100.0 in variation.others(FedALA, "sample_percent", around)
    few, all_of_it = (
        laws._Observed(laws._observe(FedALA, around | more, "plain")) for more in ({}, {"sample_percent": 100.0})
    )
    assert laws._differ(few, all_of_it)


# -- what is said of code that torch cannot map over clients -----------------------------------------
class Branches(FedAvg):
    """Does one thing or another, by what a tensor holds."""

    def loss(self, x: Any, batch: Any, down: Any, mine: Any) -> Tensor:
        value = super().loss(x, batch, down, mine)
        return value if value > 1 else 2 * value


class Rolls(FedAvg):
    """Draws random numbers of its own."""

    def loss(self, x: Any, batch: Any, down: Any, mine: Any) -> Tensor:
        return super().loss(x + torch.rand_like(x), batch, down, mine)


class Keyed(FedAvg):
    """Draws them as it is told to."""

    def loss(self, x: Any, batch: Any, down: Any, mine: Any) -> Tensor:
        chance = rng.unit(rng.fold(batch.key, torch.arange(len(x))))
        return super().loss(x + 0.01 * chance, batch, down, mine)


@pytest.mark.parametrize(
    ("cls", "line", "fix"),
    [
        (Branches, "return value if value > 1 else 2 * value", "write torch.where(condition, a, b) instead"),
        (Rolls, "return super().loss(x + torch.rand_like(x), batch, down, mine)", "rng.unit(rng.fold(batch.key, "),
    ],
)
def test_a_line_that_torch_cannot_map_is_named_with_the_fix(cls: type[FedAvg], line: str, fix: str) -> None:
    said = laws.verdict(laws.lane_count_is_irrelevant, cls)
    assert f"{__file__}, line " in said
    assert f"in loss: {line}\n" in said
    assert fix in said
    assert "vmap" not in said


class Unasked(FedAvg):
    """Reads the uploads one by one, but does not say so."""

    def update(self, server: Model, inbox: Inbox) -> Model:
        return Model(server.w + inbox.uploads.dw.mean(0))


class Unsurveyed(FedAvg):
    """Reads a survey that it does not make."""

    def finish(self, x, down, mine, work):
        return super().finish(x + 0 * work.survey.mean(), down, mine, work)


@pytest.mark.parametrize(
    ("cls", "fix"), [(Unasked, "_replace(each_upload=True)"), (Unsurveyed, "inherits from Surveys")]
)
def test_what_a_method_has_not_asked_for_is_named_with_the_fix(cls: type[FedAvg], fix: str) -> None:
    said = laws.verdict(laws.lane_count_is_irrelevant, cls)
    assert f"{__file__}, line " in said
    assert fix in said


@pytest.mark.slow
def test_the_fix_for_random_numbers_works() -> None:
    assert laws.verdict(laws.batched_is_alone, Keyed) == ""


@pytest.mark.slow
def test_a_class_that_is_not_fedavg_gets_an_error_that_names_what_it_inherits() -> None:
    assert "it inherits fedavg_when: set fedavg_when = None" in laws.verdict(laws.neutral_is_fedavg, Keyed)


class Undressed(FedAvg):
    """Uploads what is not a tree."""

    def finish(self, x, down, mine, work):
        return {"dw": x - down.w}, mine


@pytest.mark.parametrize("law", [laws.batched_is_alone, laws.frozen_parts_stay])
def test_a_wrong_result_is_said_as_in_a_run(law) -> None:
    assert "in Undressed.finish: returned a dict of 'dw' as the upload (write" in laws.verdict(law, Undressed)
