"""One run of a federation, at the server: the run folder, the loop and its result, as in a simulation."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fedloom.core import disk
from fedloom.core.errors import FedloomError
from fedloom.data.files import default_root
from fedloom.deploy.contract import Contract, read_contract, refuse_undeployable
from fedloom.deploy.ends import server_end
from fedloom.deploy.fleet import RemoteNodes, Transport, last_inquiry, read_population, shown_metrics, write_population
from fedloom.deploy.site import RUNS, conducted, log_file, read_rules, write_state
from fedloom.deploy.waits import writing
from fedloom.engine import checkpoint
from fedloom.engine.ranks import ALONE
from fedloom.engine.rounds import begin
from fedloom.engine.store import RamStore
from fedloom.runs.changes import changed_data
from fedloom.runs.entry import Resumption, write_first_files
from fedloom.runs.folder import create, held, opened, read_key, storage
from fedloom.runs.loop import InterruptedRun, Progress, drive
from fedloom.runs.prepare import Prepared, share
from fedloom.runs.result import History
from fedloom.runs.settings import as_toml

Say = Callable[[str], None]


class Lines:
    """A listener that prints a line for each round.

    ``evaluated``: how many nodes have evaluated their models after a round, and how many were asked to.
    """

    def __init__(self, say: Say, evaluated: Callable[[int], tuple[int, int]]) -> None:
        self._say, self._evaluated = say, evaluated

    def started(self, prepared: Prepared, folder: Path | None, done: int) -> None:
        self._say(
            f"{prepared.config.kinds['algorithm']} in {folder}: {done} of {prepared.experiment.rounds} rounds done"
        )

    def advanced(self, progress: Progress) -> None:
        words = "  ".join(f"{name} {value:.4f}" for name, value in shown_metrics(progress.metrics).items())
        answered, asked = self._evaluated(progress.round)
        if answered < asked:
            words += f"  (personal: {answered} of {asked} nodes)"
        self._say(f"round {progress.round} of {progress.rounds}  {progress.seconds:.1f} s  {words}")

    def stopping(self) -> None:
        self._say("stopping after this round")


def conduct(home: Path, transport: Transport, run: int, say: Say) -> History | None:
    """Run number ``run`` of the server whose folder is ``home``, from its first round or its last checkpoint.

    Its outcome is recorded in the run folder. A run that was stopped has no history yet.
    """
    with conducted(home):
        return _run_recorded(home, transport, run, _logged(home, run, say))


def _logged(home: Path, run: int, say: Say) -> Say:
    """Print a line, and log it with its time."""
    path = log_file(home, run)

    def both(line: str) -> None:
        say(line)
        disk.make_folder(path.parent)
        with os.fdopen(disk.open_own(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8") as out:
            out.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {line}\n")

    return both


def _run_recorded(home: Path, transport: Transport, run: int, say: Say) -> History | None:
    """The same, with its outcome recorded."""
    write_state(home, run, "running", process=os.getpid())
    try:
        with writing(home, f"fedloom deploy resume {home.parent}"):
            history = _conducted(home, transport, run, say)
            say("completed")
    except InterruptedRun as stop:
        write_state(home, run, "stopped", why=str(stop))
        say(f"stopped: {stop}")
        return None
    except BaseException as error:
        why = str(error) if isinstance(error, FedloomError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):  # the disk may be full
            write_state(home, run, "failed", why=why)
            say(f"failed: {why}" if isinstance(error, FedloomError) else traceback.format_exc())
        raise
    write_state(home, run, "completed")
    return history


def _nodes(contract: Contract, transport: Transport, home: Path) -> RemoteNodes:
    """The nodes; the server's rules decide whether it learns uploads or only their sum."""
    rules = read_rules(home)
    refuse_undeployable(contract.config, secure_sum=rules.secure_sum)
    if not rules.secure_sum:
        return RemoteNodes(contract, transport, home, rules)
    from fedloom.deploy.secure_fleet import SecureNodes

    return SecureNodes(contract, transport, home, rules)


def _conducted(home: Path, transport: Transport, run: int, say: Say) -> History:
    contract, path = read_contract(home), home / RUNS / str(run)
    saved = contract.config.checkpoint.model_copy(update={"every": 1})  # a node keeps no more than two rounds
    config = contract.config._replace(checkpoint=saved)
    nodes = _nodes(contract, transport, home)
    nodes.run, nodes.say = run, say
    begun = (path / "config.toml").is_file()
    population = nodes.greet(read_population(home, run) if begun else None)
    if not begun:
        write_population(home, run, population)
    key = read_key(path) if begun else None
    prepared = server_end(config, share(config, default_root()), population, nodes, key, contract.nodes)
    with held(path, opened if begun else lambda at: create(at, as_toml(config)), ALONE) as folder:
        assert folder is not None
        with storage(path):
            if not begun:
                write_first_files(folder, prepared)
                folder.seal()
            elif (path / "partition.json").is_file():
                changed_data(path, prepared, accept=False)
        history = drive(prepared, folder, Resumption() if begun else None, Lines(say, nodes.evaluated))
    exp = prepared.experiment
    state = checkpoint.load_state(path / "checkpoints", begin(exp), RamStore(exp.federation.clients)).state
    for client, failed in nodes.finish(exp, last_inquiry(exp, state)).items():
        say(f"{contract.nodes[client]}: has not saved its model: {failed.why}")
    return history
