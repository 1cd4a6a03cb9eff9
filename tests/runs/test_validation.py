"""Rows for validation: drawn by address, evaluated as test rows are, and never trained on."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedloom.core.errors import ConfigError
from fedloom.deploy.contract import refuse_undeployable
from fedloom.runs.overrides import without_idle
from fedloom.runs.prepare import share
from fedloom.runs.settings import as_table, config_hash, parse
from fedloom.runs.start import start

UNUSED = Path("unused")


def config_of(kind: str, **more: Any) -> Any:
    settings = {"rounds": 2, "partition": {"clients": 5}, "local": {"batch": 64}, "evaluate": {"validation": 0.3}}
    return parse(without_idle(settings | {"algorithm": {"kind": kind}, "model": "mlp"} | more)[0])


def test_each_client_keeps_a_share_of_its_training_rows(tmp_path: Path) -> None:
    config = config_of("fedavg")
    shared = share(config, UNUSED)
    plain = share(config_of("fedavg", evaluate={}), UNUSED)
    assert shared.validation is not None
    assert plain.validation is None
    assert np.array_equal(shared.held_out, plain.held_out)
    assert not (shared.validation & shared.held_out).any()
    for client in range(shared.clients):
        rows = int(((shared.owner == client) & ~shared.held_out).sum())
        assert int(shared.validation[shared.owner == client].sum()) == ceil(0.3 * rows)
    assert np.array_equal(shared.validation, share(config, UNUSED).validation)  # the same whenever it is asked
    start(config, out=tmp_path / "run", root=UNUSED)
    kept = load_file(tmp_path / "run" / "partition.safetensors")
    assert np.array_equal(kept["validation"].astype(bool), shared.validation)
    assert shared.described()["sha256"] != plain.described()["sha256"]


@pytest.mark.parametrize("kind", ["fedavg", "ditto", "perfedavg", "dfedavg", "analytic"])
def test_no_method_learns_from_validation_rows(kind: str) -> None:
    """Whatever is in them, the models are the same to the last bit; only the metrics of validation differ."""
    config = config_of(kind)
    arrays = config.data.load(UNUSED, config.basics.seed)
    aside = share(config, UNUSED, arrays).validation
    assert aside is not None
    x = arrays.x.copy()
    x[np.flatnonzero(~arrays.test)[aside]] = x.max() - x[np.flatnonzero(~arrays.test)[aside]]
    one, other = (start(config, out=None, root=UNUSED, arrays=a) for a in (arrays, arrays._replace(x=x)))
    names = list(one.records[-1])
    validated = [name for name in names if "/validation/" in name]
    assert len(validated) >= 4
    assert any(name.startswith("personal/") for name in validated)
    for before, after in zip(one.records, other.records, strict=True):
        assert [n for n in names if before.get(n) != after.get(n) and n not in validated] == []
    losses = [name for name in validated if name.endswith("/loss")]
    assert all(one.records[-1][name] != other.records[-1][name] for name in losses)


def test_one_common_model_scores_alike_on_all_rows_and_client_by_client() -> None:
    last = start(config_of("fedavg"), out=None, root=UNUSED).records[-1]
    assert last["global/validation/accuracy"] == pytest.approx(last["personal/pre_fit/validation/accuracy"])
    assert last["global/validation/loss"] == pytest.approx(last["personal/pre_fit/validation/loss"])


def test_without_a_share_nothing_changes_and_no_cell_has_another_name() -> None:
    plain, zero = config_of("fedavg", evaluate={}), config_of("fedavg", evaluate={"validation": 0.0})
    assert config_hash(plain) == config_hash(zero) != config_hash(config_of("fedavg"))
    assert as_table(zero)["evaluate"]["validation"] == 0.0
    assert not any("validation" in name for name in start(plain, out=None, root=UNUSED).records[-1])


def test_a_share_that_no_client_can_spare_is_refused_and_so_is_a_deployment() -> None:
    lonely = config_of("fedavg", partition={"clients": 1438, "kind": "iid", "holdout": 0.0})
    with pytest.raises(ConfigError, match=r"evaluate.validation: no client has enough rows"):
        start(lonely, out=None, root=UNUSED)
    with pytest.raises(ConfigError, match=r"evaluate.validation: needs the rows"):
        refuse_undeployable(config_of("fedavg"))
