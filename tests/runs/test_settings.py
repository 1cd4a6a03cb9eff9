"""A setting that has no effect is refused where it is written, by one rule for all sections."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field

from fedloom.compare.plan import plan
from fedloom.core.errors import ConfigError
from fedloom.core.schema import GIVEN, Spec, other_than, over, read, when
from fedloom.runs.catalogue import settings_of
from fedloom.runs.overrides import override
from fedloom.runs.resume import resume
from fedloom.runs.settings import as_table, as_toml, parse
from fedloom.runs.start import run


class Sample(Spec):
    presets: ClassVar = {"preset": {"smooth": {"mode": "ema"}, "none": {}}}

    preset: Literal["none", "smooth"] = "none"
    mode: Literal["ema", "mean", "last"] = "last"
    beta: Annotated[float, when(mode="ema")] = Field(0.9, ge=0, lt=1, description="memory")
    slope: Annotated[float, when(beta=over(0.95))] = 1.0
    clip: float | None = None
    most: Annotated[int, when(clip=GIVEN) | when(mode=other_than("ema", "last"))] = 4


@pytest.mark.parametrize(
    ("written", "faults"),
    [
        ({}, []),
        ({"mode": "ema", "beta": 0.5}, []),
        ({"beta": 0.9}, ["s.beta: has an effect only with mode = ema, and mode is last (got 0.9) (leave it out)"]),
        ({"preset": "smooth", "beta": 0.5}, []),
        ({"preset": "smooth", "mode": "mean", "beta": 0.5}, ["s.preset: stands for mode = ema", "s.beta: has"]),
        ({"mode": "ema", "slope": 2.0}, ["s.slope: has an effect only with beta > 0.95, and beta is 0.9 (got 2.0)"]),
        ({"mode": "ema", "beta": 0.96, "slope": 2.0}, []),
        ({"most": 1}, ["s.most: has an effect only with clip set, or with mode other than ema or last, and clip is"]),
        ({"most": 1, "clip": 1.0}, []),
        ({"most": 1, "mode": "mean"}, []),
        # One fault does not hide another, and does not make up one.
        ({"clip": "x", "beta": 0.5}, ["s.clip: should be", "s.beta: has an effect only with"]),
        ({"mode": "x", "beta": 0.5}, ["s.mode: should be"]),
    ],
)
def test_what_was_written_has_an_effect_or_is_refused(written: dict[str, Any], faults: list[str]) -> None:
    found = [str(fault) for fault in read(Sample, written, "s")[1]]
    assert len(found) == len(faults)
    assert all(fault.startswith(said) for fault, said in zip(sorted(found), sorted(faults), strict=True))


def test_presets_and_defaults_were_not_written() -> None:
    assert Sample(preset="smooth").model_fields_set == {"preset"}
    assert Sample(preset="smooth") == Sample(preset="smooth", mode="ema")


def test_a_condition_on_what_is_no_setting_is_an_error_of_the_class() -> None:
    with pytest.raises(TypeError, match="'x' is of use only with 'modus', which is no setting"):

        class Wrong(Spec):
            x: Annotated[int, when(modus="a")] = 1


def test_a_page_says_when_a_setting_has_an_effect() -> None:
    assert {s.name: s.meaning for s in settings_of(Sample)}["beta"] == "memory; only with mode = ema"


def test_a_complete_experiment_holds_only_what_has_an_effect() -> None:
    config = parse({"local": {"optimizer": "adam", "steps": 3}, "cohort": {"sampling": "all"}})
    table = as_table(config)
    assert not {"momentum", "nesterov", "epochs", "decay", "step_every"} & set(table["local"])
    assert "size" not in table["cohort"]
    assert parse(tomllib.loads(as_toml(config))).local == config.local


def test_what_an_override_makes_useless_is_left_out_and_said_to_be() -> None:
    file = {"local": {"momentum": 0.9, "lr": 0.2}}
    table, notes = override(file, ["local.optimizer=adam"])
    assert table["local"] == {"optimizer": "adam", "lr": 0.2}
    assert notes == [
        "local.momentum has an effect only with optimizer = sgd or rmsprop, and optimizer is adam; it was left out"
    ]
    # Neither what was asked for just now nor what was useless before.
    for table, said in (({}, ["local.optimizer=adam", "local.momentum=0.9"]), ({"local": {"eps": 1.0}}, ["rounds=3"])):
        with pytest.raises(ConfigError, match="has an effect only with optimizer"):
            parse(*override(table, said))


def test_a_method_s_own_defaults_are_left_out_where_they_have_no_effect() -> None:
    assert parse({"algorithm": "dfedavgm", "local": {"optimizer": "adam"}}).local.momentum == 0.0


def test_a_comparison_shares_what_has_an_effect_somewhere() -> None:
    compare = {"algorithms": ["fedavg"], "seeds": [0], "grid": {"local.optimizer": ["sgd", "adam"]}}
    planned = plan({"local": {"momentum": 0.9}, "compare": compare})
    assert [cell.config.local.momentum for cell in planned.cells] == [0.9, 0.0]
    with pytest.raises(ConfigError, match=r"local\.eps: has an effect only with"):
        plan({"local": {"eps": 0.9}, "compare": compare | {"grid": {"local.optimizer": ["sgd", "asgd"]}}})


def test_a_run_of_a_version_that_wrote_every_setting_is_resumed(tmp_path: Path) -> None:

    run("fedavg", data="digits", rounds=1, partition={"clients": 3}, local={"steps": 1}, out=tmp_path / "run")
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace("[local]", "[local]\nepochs = 1\nstep_every = 100"))
    assert resume(tmp_path / "run", rounds=2).rounds == 2
