"""The two ends of a deployment as experiments: the server's, without any client's rows, and one node's, with its own.

Both are made from the same settings, so that nets, addresses of randomness and sums are those of a simulation. Both
know how many examples every node has, because cohorts, weights and privacy depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.core.errors import DataError
from fedloom.data.arrays import Arrays
from fedloom.data.column_check import ColumnCheck
from fedloom.data.federation import Federation, counted, federate
from fedloom.data.partition import held_out_rows
from fedloom.data.proxy import without
from fedloom.engine.fleet import Fleet
from fedloom.runs.prepare import Prepared, Shared, assembled, run_device
from fedloom.runs.settings import Config
from fedloom.trust.noise import Key


class Population(NamedTuple):
    """How many examples every node has."""

    train: tuple[int, ...]  # [N]
    test: tuple[int, ...]  # [N] held out by the node itself


class OwnRows(NamedTuple):
    """A node's data."""

    arrays: Arrays
    held_out: NDArray[np.bool_]  # [n] kept for the node's own test
    checks: tuple[ColumnCheck, ...] = ()  # how the columns of its table compare with the contract's

    @property
    def train(self) -> int:
        return int((~self.held_out).sum())

    @property
    def test(self) -> int:
        return int(self.held_out.sum())


def rows_of_client(shared: Shared, client: int) -> OwnRows:
    """The part of common data that a partition assigns to one client."""
    mine = np.zeros(len(shared.arrays.y), np.bool_)
    mine[np.flatnonzero(~shared.arrays.test)[shared.owner == client]] = True
    arrays = without(shared.arrays, ~mine)._replace(client=None)
    if arrays.recipe is not None:
        arrays = arrays._replace(recipe=arrays.recipe.of_client(shared.names[client]))
    return OwnRows(arrays, shared.held_out[shared.owner == client])


def rows_of_node(arrays: Arrays, holdout: float, seed: int) -> OwnRows:
    """A node's own data, of which it holds some out."""
    owner = np.zeros(len(arrays.y), np.int64)
    return OwnRows(arrays._replace(client=None), held_out_rows(owner, 1, holdout, seed))


def server_end(
    config: Config,
    shared: Shared,
    population: Population,
    fleet: Fleet,
    key: Key | None = None,
    names: tuple[str, ...] = (),
) -> Prepared:
    """The server's experiment: of ``shared``, its own data, only test rows and the proxy are used.

    ``names``: what the nodes are called in the run's tables.
    """
    device, clients = run_device(config), len(population.train)
    arrays = _tests_of(shared.arrays)
    one = (np.zeros(1, np.int64), clients, np.zeros(1, np.bool_))
    fed = federate(arrays, *one, device=device, augment=config.data.augment)
    blank = torch.zeros(1, dtype=torch.int64)
    fed = fed._replace(train=counted(blank, None, population.train), test=counted(blank, None, population.test))
    known = Shared(arrays, *_dealt(population), clients, (), shared.proxy, elsewhere=True, called=names)
    prepared = assembled(config, known, fed, device, 1, key)
    return prepared._replace(experiment=replace(prepared.experiment, fleet=fleet))


def node_end(config: Config, own: OwnRows, client: int, population: Population) -> Prepared:
    """The experiment of the node with this number."""
    have = (own.train, own.test)
    began_with = (population.train[client], population.test[client])
    if have != began_with:
        raise DataError(
            f"this node has {have[0]} training and {have[1]} test rows, but the run began with {began_with}"
        )
    device, clients = run_device(config), len(population.train)
    owner = np.full(len(own.held_out), client)
    arrays = own.arrays._replace(test=np.zeros(len(owner), np.bool_))
    fed: Federation = federate(arrays, owner, clients, own.held_out, device=device, augment=config.data.augment)
    fed = fed._replace(train=counted(fed.train.rows, client, population.train))
    known = Shared(
        arrays, *_dealt(population), clients, (), without(arrays, np.ones(len(owner), np.bool_)), elsewhere=True
    )
    prepared = assembled(config, known, fed, device, 1)
    return prepared._replace(experiment=replace(prepared.experiment, at_client=True))


def _tests_of(arrays: Arrays) -> Arrays:
    """The test rows, after one blank row with the form of an example."""
    rows = np.flatnonzero(arrays.test)
    x = np.concatenate([np.zeros_like(arrays.x[:1]), arrays.x[rows]])
    y = np.concatenate([np.zeros(1, np.int64), arrays.y[rows]])
    target = arrays.target
    if target is not None:
        target = np.concatenate([np.zeros_like(target[:1]), target[rows]])
    return arrays._replace(x=x, y=y, test=np.arange(len(y)) > 0, client=None, target=target)


def _dealt(population: Population) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The owner of each row of all nodes, and whether it is held out."""
    sizes = np.array([population.train, population.test]).T  # [N, 2]
    owner = np.repeat(np.arange(len(sizes)), sizes.sum(1))
    return owner, np.concatenate([np.arange(a + b) >= a for a, b in sizes.tolist()])


def population_of(parts: Sequence[tuple[int, int]]) -> Population:
    """The population, from the number of training and test rows of each node."""
    return Population(tuple(train for train, _ in parts), tuple(test for _, test in parts))
