"""The contract: how much there is of it, and what a class written for an earlier one is told."""

from __future__ import annotations

import inspect
import re
from typing import Any, ClassVar

import pytest
import torch
from pydantic import BaseModel

from fedloom import FedAvg
from fedloom.algorithm import (
    Adapts,
    Algorithm,
    Configures,
    Diagnoses,
    GossipFacts,
    HasPhases,
    Inbox,
    Phase,
    Surveys,
    Traits,
)
from fedloom.algorithm.capabilities import (
    CAPABILITIES,
    adaptation_of,
    contributions_of,
    defaults_of,
    diagnostics_of,
    has_survey,
    phases_of,
    warnings_of,
)
from fedloom.algorithm.renamed import MEMBERS
from fedloom.algorithms.scaffold import Scaffold
from fedloom.runs.find import algorithms

METHOD = {"init", "send", "join", "start", "loss", "gradient", "step", "finish", "weight", "update", "serve"}
METHOD |= {"global_model"}


def public(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def test_a_method_is_a_dozen_functions_and_little_else() -> None:
    mine = public(Algorithm) - set(dir(BaseModel)) - {"model_config"}
    assert mine - METHOD == {"bind", "setup", "task", "optimizer", "traits", "family", "fedavg_when", "fedavg_as"}
    assert all(inspect.getdoc(getattr(Algorithm, name)) for name in METHOD)


def test_capabilities_share_no_name_with_the_contract_nor_with_each_other() -> None:
    names = [name for cls in CAPABILITIES for name in public(cls)]
    assert len(names) == len(set(names))
    assert not set(names) & public(Algorithm)
    assert not set(names) & set(MEMBERS)


@pytest.mark.parametrize("name", sorted(set(MEMBERS) - {"sizes", "first_lr", "seed"}))
def test_a_class_with_an_old_name_gets_an_error_with_the_new_one(name: str) -> None:
    for body in ({name: False}, {name: lambda self: None}, {name: property(lambda self: None)}):
        with pytest.raises(TypeError, match=f"Own defines '{name}'.*{re.escape(MEMBERS[name])}"):
            type("Own", (FedAvg,), {"__module__": __name__, **body})
    with pytest.raises(TypeError, match=f"Own defines '{name}'"):
        type("Own", (FedAvg,), {"__module__": __name__, "__annotations__": {name: ClassVar[bool]}, name: True})


@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_so_is_code_that_reads_one(name: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(MEMBERS[name])):
        getattr(FedAvg(), name)


def test_a_setting_may_be_called_as_a_part_of_the_setup() -> None:
    class Own(FedAvg):
        seed: int = 3

    assert Own().seed == 3


@pytest.mark.parametrize(
    ("name", "base"),
    [(name, cls.__name__) for cls in CAPABILITIES for name in sorted(public(cls))],
)
def test_a_function_that_the_engine_would_not_call_is_refused(name: str, base: str) -> None:
    with pytest.raises(TypeError, match=f"Own defines '{name}'.*from fedloom.algorithm import {base}"):
        type("Own", (FedAvg,), {"__module__": __name__, name: lambda self: None})


def test_a_function_with_other_arguments_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Own.start is called as start\(down, mine, work\)"):
        type("Own", (FedAvg,), {"__module__": __name__, "start": lambda self, down, mine: down.w})
    with pytest.raises(TypeError, match=r"Own.bind is called as bind\(setup\)"):
        type("Own", (FedAvg,), {"__module__": __name__, "bind": lambda self, task, optimizer: self})
    type("Own", (FedAvg,), {"__module__": __name__, "start": lambda self, *given: given[0].w})


def test_a_setting_hides_no_function_of_a_capability() -> None:
    with pytest.raises(TypeError, match="the setting 'survey' hides the function"):

        class Own(FedAvg, Surveys):
            survey: int = 3  # type: ignore[assignment]


def test_columnwise_may_be_a_constant() -> None:
    class Own(FedAvg, GossipFacts):
        columnwise = True  # type: ignore[assignment]

    assert Own().columnwise


# -- what the engine asks ---------------------------------------------------------------------------
def test_a_plain_method_trains_in_one_phase_and_says_nothing_more() -> None:
    alg: Any = FedAvg()
    assert phases_of(alg) == (Phase(alg.step),)
    assert adaptation_of(alg) == ()
    assert not has_survey(alg)
    assert defaults_of(alg) == {}
    assert warnings_of(alg, 1.0, 1) == []
    assert diagnostics_of(alg, None, None, None) == {}  # type: ignore[arg-type]


def test_a_capability_is_asked_for() -> None:
    class Own(FedAvg, HasPhases, Adapts, Configures, Diagnoses):
        def adaptation(self) -> tuple[Phase, ...]:
            return (Phase(self.step, name="tune", epochs=2),)

        def defaults(self) -> Any:
            return {"local": {"epochs": 3}}

        def warnings(self, lr: float, rounds: int) -> list[str]:
            return [f"{lr} {rounds}"]

        def diagnostics(self, before: Any, inbox: Any, after: Any) -> Any:
            return {"own/after": after}

    alg: Any = Own()
    assert phases_of(alg) == (Phase(alg.step),)
    assert [phase.name for phase in adaptation_of(alg)] == ["tune"]
    assert defaults_of(alg) == {"local": {"epochs": 3}}
    assert warnings_of(alg, 0.5, 7) == ["0.5 7"]
    assert diagnostics_of(alg, 1, None, 2) == {"own/after": 2}  # type: ignore[arg-type]


def test_a_survey_may_depend_on_settings() -> None:
    assert [has_survey(Scaffold(option=option)) for option in ("I", "II")] == [True, False]


def test_contributions_of_a_server_that_reads_every_upload_are_unknown() -> None:
    class Own(FedAvg):
        @property
        def traits(self) -> Traits:
            return super().traits._replace(each_upload=True)

    one = torch.ones(())
    inbox: Any = Inbox((), one, one, one, one, weights=torch.ones(3))
    assert contributions_of(Own(), None, inbox, None) is None
    assert contributions_of(FedAvg(), None, inbox, None) is inbox.weights


def test_facts_of_a_class_are_short() -> None:
    """No method repeats the type of its family, and each is an Algorithm, or a variant of one other method."""
    found = algorithms(own=False)
    methods = {name: [c for c in cls.__mro__ if c in found.values()] for name, cls in found.items()}
    # Its paper adds relaxation to FedProx, which adds a term to FedAvg.
    assert [name for name, line in methods.items() if len(line) > 2] == ["relaxation"]
    assert {cls.family for cls in found.values()} == {"server", "personal", "closed_form", "gossip"}
    for cls in found.values():
        assert isinstance(cls().traits, Traits)


def test_methods_say_whether_they_have_the_setting_that_errors_name() -> None:
    named = {name for name, cls in algorithms(own=False).items() if "weighting" in cls.model_fields}
    assert {name for name, cls in algorithms(own=False).items() if cls().traits.has_weighting} == named


def test_clients_have_a_model_in_common_if_they_send_and_share_a_whole_one() -> None:
    assert Traits().common_model
    assert not Traits(communicates=False).common_model
    assert not Traits(has_global_model=False).common_model
