"""A setting that has no effect is refused where it is written, by one rule for all sections."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field

from fedloom.compare.plan import plan
from fedloom.core.errors import ConfigError
from fedloom.core.schema import GIVEN, Spec, conditions, kinds, other_than, over, read, when
from fedloom.data.partition import Partition
from fedloom.deploy.site import read_section
from fedloom.engine.topology.network import Topology
from fedloom.models.net import NetSpec
from fedloom.runs.catalogue import settings_of
from fedloom.runs.overrides import idle, override, read_pairs
from fedloom.runs.resume import resume
from fedloom.runs.settings import SECTIONS, as_table, as_toml, config_hash, parse, read_toml
from fedloom.runs.start import run


def test_a_file_may_begin_with_a_mark_of_its_encoding(tmp_path: Path) -> None:
    """As some editors on Windows write it."""
    text = "rounds = 3\n\n[node]\nname = 'a'\n"
    (tmp_path / "e.toml").write_text(text, encoding="utf-8-sig")
    assert read_toml(tmp_path / "e.toml")["rounds"] == 3
    assert read_section(tmp_path / "e.toml", Named, "node").name == "a"


class Named(Spec):
    name: str


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
        ({"beta": 0.9}, ["s.beta: has an effect only if mode is ema, but mode is last (got 0.9) (leave it out)"]),
        ({"preset": "smooth", "beta": 0.5}, []),
        ({"preset": "smooth", "mode": "mean", "beta": 0.5}, ["s.preset: stands for mode = ema", "s.beta: has"]),
        (
            {"mode": "ema", "slope": 2.0},
            ["s.slope: has an effect only if beta is above 0.95, but beta is 0.9 (got 2.0)"],
        ),
        ({"mode": "ema", "beta": 0.96, "slope": 2.0}, []),
        (
            {"most": 1},
            [
                "s.most: has an effect only if clip is set, or if mode is neither ema nor last, "
                "but clip is not set and mode is last (got 1)"
            ],
        ),
        ({"most": 1, "clip": 1.0}, []),
        ({"most": 1, "mode": "mean"}, []),
        # One fault does not hide another, and does not make up one.
        ({"clip": "x", "beta": 0.5}, ["s.clip: should be", "s.beta: has an effect only if"]),
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
    with pytest.raises(TypeError, match="'x' has an effect only with 'modus', which is not a setting"):

        class Wrong(Spec):
            x: Annotated[int, when(modus="a")] = 1


def test_a_page_says_when_a_setting_has_an_effect() -> None:
    assert {s.name: s.meaning for s in settings_of(Sample)}["beta"] == "memory; only if mode is ema"


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
        "local.momentum has an effect only if optimizer is sgd or rmsprop, but optimizer is adam; it was left out"
    ]
    # Neither what was asked for just now nor what was useless before.
    for table, said in (({}, ["local.optimizer=adam", "local.momentum=0.9"]), ({"local": {"eps": 1.0}}, ["rounds=3"])):
        with pytest.raises(ConfigError, match="has an effect only if optimizer"):
            parse(*override(table, said))


def test_a_method_s_own_defaults_are_left_out_where_they_have_no_effect() -> None:
    assert parse({"algorithm": "dfedavgm", "local": {"optimizer": "adam"}}).local.momentum == 0.0


def test_a_comparison_shares_what_has_an_effect_somewhere() -> None:
    compare = {"algorithms": ["fedavg"], "seeds": [0], "grid": {"local.optimizer": ["sgd", "adam"]}}
    planned = plan({"local": {"momentum": 0.9}, "compare": compare})
    assert [cell.config.local.momentum for cell in planned.cells] == [0.9, 0.0]
    with pytest.raises(ConfigError, match=r"local\.eps: has an effect only if"):
        plan({"local": {"eps": 0.9}, "compare": compare | {"grid": {"local.optimizer": ["sgd", "asgd"]}}})


def test_what_a_method_has_in_other_sections_is_left_out_where_the_grid_makes_it_useless() -> None:
    forging = {"kind": "law_afl", "quality": "report", "with": {"corruption.forge": True}}
    compare: dict[str, Any] = {"algorithms": ["fedavg", forging], "seeds": [0], "grid": {"corruption.share": [0, 0.2]}}
    planned = plan({"compare": compare})
    assert [c.config.corruption.forge for c in planned.cells if c.method.kind == "law_afl"] == [False, True]
    with pytest.raises(ConfigError, match=r"corruption\.forge: has an effect only if share is above 0"):
        plan({"compare": compare | {"grid": {"corruption.share": [0]}}})


def test_local_training_of_a_method_that_has_none_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        parse({"algorithm": "analytic", "local": {"lr": 1.0, "batch": 5}, "task": {"class_weights": "balanced"}})
    assert [fault.where for fault in refused.value.faults] == ["local.lr", "local.batch", "task.class_weights"]
    assert "only if clients take local steps, but those of this algorithm take none" in str(refused.value)
    plain = parse({"algorithm": "analytic", "model": "logistic"})
    assert "local" not in as_table(plain)
    assert parse(tomllib.loads(as_toml(plain))) == plain
    assert (
        config_hash(plain) == "7de08e00ce53135e681e587d8a081b1f1a770f8f45e70364d11c48f8b84b6b3d"
    )  # of runs that were made when it was written down


def test_a_closed_form_shares_a_comparison_with_methods_that_train() -> None:
    compare: dict[str, Any] = {"algorithms": ["fedavg", "analytic"], "seeds": [0], "grid": {"local.steps": [1, 2]}}
    planned = plan({"local": {"lr": 0.3}, "compare": compare})
    assert [(cell.config.local.lr, cell.config.local.steps) for cell in planned.cells if cell.place[0] == "2"] == [
        (0.3, 2),
        (0.1, None),
    ]
    assert len({cell.hash for cell in planned.cells}) == 3  # the closed form is computed once
    for refused in ({"local": {"lr": 0.3}, "compare": compare | {"grid": {}}}, {"compare": compare}):
        refused["compare"]["algorithms"] = ["analytic"]
        with pytest.raises(ConfigError, match=r"local\.(lr|steps): has an effect only if clients take local steps"):
            plan(refused)


def test_memory_that_plain_sgd_does_not_have_is_refused() -> None:
    for state in ("reset", "persist"):
        with pytest.raises(ConfigError, match=r"local\.state: has an effect only if optimizer is not sgd, or if mom"):
            parse({"local": {"state": state}})
    assert parse({"algorithm": "fedala"}).local.state == "reset"
    assert parse({"algorithm": "fedala", "local": {"momentum": 0.1}}).local.state == "persist"


def test_momentum_of_a_single_step_without_memory_is_refused() -> None:
    for table in ({"algorithm": "dpsgd", "local": {"momentum": 0.5}}, {"local": {"steps": 1, "momentum": 0.5}}):
        with pytest.raises(ConfigError, match=r"local\.momentum: has no effect on the one step of a round"):
            parse(table)
    for more in ({"state": "persist"}, {"nesterov": True}, {"steps": 2}):
        parse({"algorithm": "dpsgd", "local": {"momentum": 0.5, **more}})
    parse({"algorithm": "fedrep", "model": "mlp", "local": {"steps": 1, "momentum": 0.5}})


def test_a_setting_of_another_kind_is_said_to_be_one() -> None:
    with pytest.raises(ConfigError, match=r"fresh_steps: is a setting of matching, random, random_dir"):
        parse({"algorithm": "dpsgd", "topology": {"kind": "ring", "fresh_steps": True}})


def test_a_key_that_takes_a_list_says_of_what() -> None:
    with pytest.raises(ConfigError) as error:
        parse({"evaluate": {"auc": True, "metrics": ["f1"]}})
    assert "auc: should be a list of micro_logits | micro_softmax | macro_present (got True)" in str(error.value)
    assert "evaluate.metrics: there is no metric 'f1', known: auc, balanced_accuracy," in str(error.value)


def test_a_confusion_matrix_need_not_be_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.metrics: .* needs no setting: it is written to confusion\.json"):
        parse(override({}, ["evaluate.metrics=auc,confusion"])[0])


@pytest.mark.parametrize(("text", "widths"), [("64", (64,)), ("32,16", (32, 16)), ("[32]", (32,))])
def test_a_list_of_numbers_needs_no_brackets(text: str, widths: tuple[int, ...]) -> None:
    found = parse(override({"model": {"kind": "mlp"}}, [f"model.widths={text}"])[0])
    assert found.model.widths == widths


def test_a_word_in_a_list_of_numbers_is_named_as_it_was_written() -> None:
    with pytest.raises(ConfigError, match=r"model\.widths\.1: should be a valid integer \(got 'x'\)"):
        parse(override({"model": {"kind": "mlp"}}, ["model.widths=32,x"])[0])


def test_a_list_of_words_needs_no_quotes_which_a_shell_takes_away() -> None:
    given = read_pairs(["evaluate.diagnostics=[updates, weights]", "a=[1, b]", 'b=["x", y]', "c=[]"])
    assert list(given.values()) == [["updates", "weights"], [1, "b"], ["x", "y"], []]


@pytest.mark.parametrize(
    "given", [{"a": 1.0}, {"iid": True, "u_mode": "per_class"}, {"iid": True, "b": 1.0}, {"iid": True, "ab_as": "std"}]
)
def test_what_no_row_of_synthetic_data_depends_on_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{list(given)[-1]}: has an effect only if"):
        parse({"data": {"source": "synthetic", **given}, "partition": "natural"})


def test_a_run_of_a_version_that_wrote_every_setting_is_resumed(tmp_path: Path) -> None:

    run("fedavg", data="digits", rounds=1, partition={"clients": 3}, local={"steps": 1}, out=tmp_path / "run")
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace("[local]", "[local]\nepochs = 1\nstep_every = 100"))
    assert resume(tmp_path / "run", rounds=2).rounds == 2


# -- every section ---------------------------------------------------------------------------------
NETWORK = {"algorithm": {"kind": "dpsgd"}}
LONELY = {"algorithm": {"kind": "local_only"}}
CLOSED = {"algorithm": {"kind": "analytic"}}
# Each setting that is not always of use, in an experiment where it has no effect.
WITHOUT_EFFECT: dict[str, dict[str, Any]] = {
    "cohort.size": {"cohort": {"sampling": "all"}},
    "engine.compile": {"engine": {"executor": "loop"}},
    "evaluate.clients": {"evaluate": {"personal": False}},
    "evaluate.diagnostics": NETWORK,
    "evaluate.train": NETWORK,
    "evaluate.nodes": {},
    "evaluate.pre_mix": {},
    "local.epochs": {"local": {"steps": 3}},
    "local.drop_last": {"local": {"batch": 0}},
    "local.wrap_last": {"local": {"batch": 0}},
    "local.momentum": {"local": {"optimizer": "adam"}},
    **{f"local.{key}": CLOSED for key in ("lr", "optimizer", "weight_decay", "clip", "steps", "batch", "schedule")},
    "system.policy": {},
    "system.unit": {"system": {"stragglers": 0.1, "policy": "partial"}},  # with one local epoch
    "system.up": LONELY,
    "system.down": LONELY,
    "system.latency": LONELY,
    "system.link_spread": LONELY,
    "system.overlap_upload": {"algorithm": {"kind": "pfedala", "wait_mode": "fixed"}},
    "system.speed": {"system": {"speeds": [1.0] * 20}},
    "system.speed_spread": {"system": {"speeds": [1.0] * 20}},
    "system.speeds": CLOSED,
    "system.slow": CLOSED,
    "system.jitter": CLOSED,
    "proxy.balanced": {"proxy": {"size": 10, "imbalance": 0.5}},
    "partition.guard": {"partition": {"kind": "dirichlet", "per": "client"}},
    "partition.redraws": {"partition": {"kind": "dirichlet", "per": "client"}},
    "model.groups": {"model": {"kind": "resnet20", "norm": "batch"}},
    "model.buffers": {"model": {"kind": "resnet20"}},
    "task.class_weights": {"task": {"kind": "regression"}},
}
KINDS = {
    "partition": kinds(Partition, "fedloom.data.partition"),
    "model": kinds(NetSpec, "fedloom.models"),
    "topology": kinds(Topology, "fedloom.engine.topology.kinds"),
}
# Settings that always have an effect. A new one belongs here, or says with ``when`` in which settings it has one.
ALWAYS = {
    "aggregation": {"rule"},
    "checkpoint": {"every", "personal", "curves"},
    "cohort": {"sampling"},
    "corruption": {"share", "clients"},
    "engine": {"device", "executor", "lanes", "store", "threads", "precision"},
    "evaluate": {"every", "validation", "personal", "work", "flatness", "auc", "metrics", "participants"},
    "local": set(),
    "privacy": {"clip", "feature_clip", "noise", "epsilon", "concentration"},
    "proxy": {"size"},
    "system": {"stragglers", "dropout", "aggregation", "deadline"},
    "task": {"kind", "loss"},
}


def conditional() -> Iterator[tuple[str, str, type[Spec]]]:
    """Every setting with a condition, a kind of its section that has it, and the class of that."""
    for section, cls in SECTIONS.items():
        yield from ((f"{section}.{key}", "", cls) for key in conditions(cls))
    for section, named in KINDS.items():
        first = {key: (kind, cls) for kind, cls in reversed(named.items()) for key in conditions(cls)}
        yield from ((f"{section}.{key}", kind, cls) for key, (kind, cls) in first.items())


@pytest.mark.parametrize(
    ("name", "kind", "cls"), [pytest.param(*c, id=f"{c[0]} {c[1]}".strip()) for c in conditional()]
)
def test_a_setting_without_effect_is_refused_in_every_section(name: str, kind: str, cls: type[Spec]) -> None:
    section, _, key = name.partition(".")
    table = {place: dict(given) for place, given in WITHOUT_EFFECT.get(name, {}).items()}
    table |= {"algorithm": {"kind": "dpsgd"}} if section == "topology" else {}
    own = table.setdefault(section, {})
    own |= {"kind": kind} if kind else {}
    default = cls.model_fields[key].get_default(call_default_factory=True)
    unset = 0.5 if section == "local" else 3
    own[key] = {"evaluate.diagnostics": ["updates"], "local.steps": 3}.get(name, unset if default is None else default)
    with pytest.raises(ConfigError, match=f"{section}.{key}: has an effect only if"):
        parse(table)
    del own[key]
    parse(table)


@pytest.mark.parametrize("kind", ["analytic", "proxy_ridge", "law_afl"])
def test_how_fast_devices_compute_is_refused_where_no_client_takes_a_step(kind: str) -> None:
    """Their time is that of the network, which a deadline can still cut short."""
    pace = {"speed": 9.0, "speed_spread": 1.0, "slow": [1], "slow_factor": 2.0, "jitter": 0.5}
    with pytest.raises(ConfigError) as refused:
        parse({"algorithm": kind, "system": pace})
    assert [fault.where for fault in refused.value.faults] == [f"system.{key}" for key in pace]
    assert "only if clients take local steps, but those of this algorithm take none" in str(refused.value)
    parse({"algorithm": kind, "system": {"deadline": 9.0, "aggregation": 1.0, "up": 5.0, "stragglers": 0.1}})
    parse({"algorithm": {"kind": "law_afl", "schedule": "per_round"}, "system": pace})


@pytest.mark.parametrize("section", sorted(SECTIONS))
def test_every_setting_has_an_effect_always_or_says_when(section: str) -> None:
    cls = SECTIONS[section]
    assert set(cls.model_fields) - set(conditions(cls)) == ALWAYS[section]


@pytest.mark.parametrize(
    "table",
    [
        {"algorithm": "dpsgd", "evaluate": {"nodes": 3, "pre_mix": False, "clients": 4}, "topology": {"kind": "ring"}},
        {"evaluate": {"clients": 3, "train": True, "diagnostics": ["updates"]}},
        {"algorithm": "feddf", "proxy": {"source": "test", "balanced": False}},
        {"proxy": {"size": 50, "imbalance": 0.5}},
        {"algorithm": {"kind": "pfedala", "wait_mode": "clock"}, "system": {"overlap_upload": False}},
        {"system": {"stragglers": 0.5, "policy": "partial", "unit": "step", "slow": [1]}, "local": {"epochs": 2}},
        {"system": {"slow": [1], "slow_factor": 2.0, "up": 1.0, "link_spread": 0.5}},
        {"algorithm": "fedprox", "system": {"stragglers": 0.5, "unit": "step"}, "local": {"epochs": 2}},
        {"algorithm": "dpsgd", "topology": {"kind": "random", "gossip_steps": 2, "fresh_steps": True}},
        {"data": {"source": "synthetic", "a": 1.0, "u_mode": "per_class"}, "partition": "natural"},
        {
            "algorithm": {"kind": "fedavg", "weighting": "uniform"},
            "privacy": {
                "clip": 1.0,
                "noise": 1.0,
                "delta": 1e-6,
                "heterogeneity": "entropy",
                "slope": 2.0,
                "most": 3.0,
            },
        },
        {"corruption": {"share": 0.2, "kind": "model_sign_flip", "kappa": 2.0}},
        {"algorithm": {"kind": "law_afl", "quality": "report"}, "corruption": {"share": 0.2, "forge": True}},
        {"corruption": {"clients": [1], "kind": "feature_noise", "feature_std": 2.0}},
        {"aggregation": {"rule": "multi_krum", "bad": 0.2, "chosen": 3}},
        {"model": {"kind": "resnet20", "norm": "batch", "buffers": "local"}},
        {"partition": {"kind": "dirichlet", "guard": True, "redraws": 3}},
    ],
    ids=str,
)
def test_settings_with_an_effect_are_taken(table: dict[str, Any]) -> None:
    config = parse(table)
    assert as_table(parse(tomllib.loads(as_toml(config)))) == as_table(config)


def test_a_complete_file_has_no_setting_without_effect() -> None:
    for table in ({"system": {"speed_spread": 1.0}}, {"algorithm": "dpsgd"}, {"algorithm": "feddf"}):
        assert idle(tomllib.loads(as_toml(parse(table)))) == {}


def test_a_published_set_is_itself_whatever_folder_lies_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mnist").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse({"data": "mnist"}).kinds["data"] == "mnist"
    assert parse({"data": "./mnist"}).kinds["data"] == "images"
