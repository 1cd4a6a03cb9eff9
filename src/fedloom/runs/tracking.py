"""Evaluations sent to TensorBoard, MLflow or Weights & Biases, where ``track`` names them.

Each writes where it always does: TensorBoard into the run folder, MLflow into ``mlflow.db`` of the working folder (or
where ``MLFLOW_TRACKING_URI`` says), Weights & Biases offline into ``wandb/`` (see ``WANDB_DIR`` and ``WANDB_MODE``). No
number of a run depends on it, and a tracker that fails does not end the run.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedloom.core.errors import ConfigError, Fault
from fedloom.core.schema import dotted
from fedloom.core.vocabulary import is_evaluation
from fedloom.runs.folder import write_text
from fedloom.runs.prepare import Prepared
from fedloom.runs.settings import Config, as_table, as_toml

_IDENTITIES = "tracking.json"  # by which trackers find a resumed run again
_MODULES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
_MOST = 100  # settings that MLflow takes at once
_FAILED = "has failed; the run continues without it"


class _About(NamedTuple):
    """The run that is tracked."""

    config: Config
    path: Path | None  # its folder
    done: int  # rounds that were done before
    identity: str  # under which a tracker knows it already

    @property
    def name(self) -> str:
        return self.path.name if self.path is not None else self.config.basics.name or self.config.kinds["algorithm"]


class _Tracker(Protocol):
    identity: str

    def log(self, round_: int, metrics: Mapping[str, float]) -> None: ...

    def end(self, outcome: str) -> None: ...


def refuse_missing_trackers(config: Config) -> None:
    """Refuse to begin if a tracker is not installed."""
    missing = [name for name in config.basics.track if find_spec(_MODULES[name]) is None]
    faults = [Fault("track", f"{name} is not installed", f"pip install 'fedloom[{name}]'") for name in missing]
    if faults:
        raise ConfigError(faults)


def is_tracker_failure(note: str) -> bool:
    """Whether a note on a round says that a tracker has failed."""
    return _FAILED in note


class Tracking:
    """What every evaluation is sent to."""

    def __init__(self, names: Iterable[str], about: Callable[[str], _About]) -> None:
        self._trackers: dict[str, _Tracker] = {}
        self._notes: list[str] = []
        for name in names:
            try:
                self._trackers[name] = _TRACKERS[name](about(name))
            except Exception as error:
                self._failed(name, error)

    def identities(self) -> dict[str, str]:
        """By which trackers find the run again."""
        return {name: tracker.identity for name, tracker in self._trackers.items()}

    def track(self, line: Mapping[str, Any]) -> None:
        """Send an evaluation to all trackers; other lines are none."""
        if is_evaluation(line):
            metrics = {name: value for name, value in line.items() if name not in ("round", "excluded")}
            self._each(lambda tracker: tracker.log(line["round"], metrics))

    def end(self, outcome: str) -> None:
        """Report to the trackers how the run ended, once."""
        self._each(lambda tracker: tracker.end(outcome))
        self._trackers.clear()

    def new_notes(self) -> tuple[str, ...]:
        """What a user should know, once."""
        said, self._notes = tuple(self._notes), []
        return said

    def _each(self, act: Callable[[_Tracker], None]) -> None:
        """Call every tracker; one that fails is dropped, and the run continues."""
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:
                del self._trackers[name]
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        self._notes.append(f"{name} {_FAILED}: {why}")


@contextmanager
def tracking(prepared: Prepared, path: Path | None, done: int) -> Iterator[Tracking]:
    """The trackers of a run from here to its end; only rank 0 uses them. One that cannot start is dropped."""
    config = prepared.config
    names: tuple[str, ...] = config.basics.track if prepared.experiment.ranks.rank == 0 else ()
    known = _identities(path)
    tracked = Tracking(names, lambda name: _About(config, path, done, known.get(name, "")))
    if path is not None and (found := tracked.identities()):
        write_text(path / _IDENTITIES, json.dumps(known | found) + "\n")
    try:
        yield tracked
    except BaseException as error:
        tracked.end("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise
    tracked.end("FINISHED")


def _identities(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    with suppress(OSError, ValueError):
        found = json.loads((path / _IDENTITIES).read_bytes())
        return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}
    return {}


class _TensorBoard:
    def __init__(self, about: _About) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = about.path / "tensorboard" if about.path is not None else Path("runs") / "tensorboard" / about.name
        again = {"purge_step": about.done + 1} if about.done else {}  # later rounds are dropped
        self.identity = str(folder)
        self._writer: Any = SummaryWriter(str(folder), **again)
        self._writer.add_text("settings", f"```toml\n{as_toml(about.config)}\n```", about.done)

    def log(self, round_: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, round_)
        self._writer.flush()

    def end(self, outcome: str) -> None:  # noqa: ARG002
        self._writer.close()


class _MLflow:
    def __init__(self, about: _About) -> None:
        for name, usual in (("DISABLE_TELEMETRY", "true"), ("LOGGING_LEVEL", "WARNING")):
            os.environ.setdefault(f"MLFLOW_{name}", usual)
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self._client: Any = MlflowClient(
            os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{Path('mlflow.db').absolute()}")
        )
        self.identity = about.identity
        with suppress(MlflowException):
            if about.identity:
                self._client.update_run(about.identity, status="RUNNING")
                return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedloom")
        known = self._client.get_experiment_by_name(name)
        home = known.experiment_id if known is not None else self._client.create_experiment(name)
        self.identity = self._client.create_run(home, run_name=about.name).info.run_id
        self._settings(dotted(as_table(about.config)))

    def _settings(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        found = [Param(key, str(value)) for key, value in settings.items()]
        for first in range(0, len(found), _MOST):
            self._client.log_batch(self.identity, params=found[first : first + _MOST])

    def log(self, round_: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self.identity, metrics=[Metric(k, float(v), now, round_) for k, v in metrics.items()])

    def end(self, outcome: str) -> None:
        self._client.set_terminated(self.identity, outcome)


class _Wandb:
    def __init__(self, about: _About) -> None:
        import wandb

        self.identity = about.identity or uuid.uuid4().hex[:8]
        usual: dict[str, Any] = {"mode": "offline", "project": "fedloom"}
        self._run: Any = wandb.init(
            **{key: value for key, value in usual.items() if f"WANDB_{key.upper()}" not in os.environ},
            id=self.identity,
            name=about.name,
            config=as_table(about.config),
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )

    def log(self, round_: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=round_)

    def end(self, outcome: str) -> None:
        self._run.finish(exit_code=0 if outcome == "FINISHED" else 1)


_TRACKERS: dict[str, Callable[[_About], _Tracker]] = {
    "tensorboard": _TensorBoard,
    "mlflow": _MLflow,
    "wandb": _Wandb,
}
