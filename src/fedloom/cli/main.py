"""The command line: the only place that prints."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text

from fedloom import __version__
from fedloom.core.disk import as_name
from fedloom.core.errors import ConfigError, Fault, FedloomError
from fedloom.core.vocabulary import accuracies, headline, is_summarised
from fedloom.runs.launch import follow_parent

app = typer.Typer(
    name="fedloom",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
data_app = typer.Typer(help="Get, import and list data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")

Root = Annotated[Path | None, typer.Option("--data-root", help="Where data sets lie (or set FEDLOOM_DATA).")]
Ranks = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        metavar="N|auto",
        help="Share out the clients over so many processes on this machine; auto: one for each core, or GPU.",
    ),
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run the code that the file or folder names, though you have not run it before.")
]
NoUserCode = Annotated[
    bool, typer.Option("--no-user-code", help="Refuse all code but fedloom's own (or set FEDLOOM_NO_USER_CODE=1).")
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[EXPERIMENT.toml] [KEY=VALUE]...", help="An experiment file and settings that override it."
    ),
]


def main() -> None:
    """Run the command line; every expected error is one message and an exit code, never a traceback."""
    follow_parent()
    try:
        code = app(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except FedloomError as error:
        if not _follows():  # rank 0 speaks for all
            print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        if not _follows():
            print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os._exit(0)
    except MemoryError as error:
        print(f"error: there is not enough memory ({error})", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        traceback.print_exc()
        if "vmap" in str(error):
            print("\nsteps that cannot be taken side by side can be with engine.executor=loop", file=sys.stderr)
        if _follows():
            print(f"\nthis was rank {os.environ['RANK']}", file=sys.stderr)
            sys.exit(1)
        print("\nthis is a fault of the program, or of code of yours that it ran;", file=sys.stderr)
        print("for an algorithm of yours, `fedloom check FILE.py` says which law it breaks", file=sys.stderr)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fedloom {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Federated learning for unequal data: simulate, compare and reproduce."""


@app.command()
def run(
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; by default a new one below runs/.")] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, as the last line of stdout.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the complete experiment as TOML, and stop.")
    ] = False,
    ranks: Ranks = None,
    trust: Trust = False,
    no_user_code: NoUserCode = False,
    data_root: Root = None,
) -> None:
    """Run one experiment. Without a file: FedAvg on digits, Dirichlet 0.3, 20 clients."""
    from fedloom.data.files import default_root
    from fedloom.engine.ranks import joined
    from fedloom.runs.settings import as_toml
    from fedloom.runs.start import load_config, start

    _own_code(no_user_code)
    with joined().agreed():
        experiment = load_config(*_file_and_overrides(settings or []), trust=trust)
    if print_config:
        if not _follows():
            print(as_toml(experiment), end="")
        return
    _launch(ranks, experiment)
    folder, root = out or Path("runs") / _run_name(experiment), data_root or default_root()
    _watched(json_, lambda watch: start(experiment, out=folder, numbered=out is None, root=root, listener=watch))


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    from_: Annotated[int | None, typer.Option("--from", help="Take the checkpoint of this round.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Go on to so many rounds in all.")] = None,
    forget: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            metavar="CLIENT",
            help="Unlearn this client of a closed form exactly, when it comes next; repeatable.",
        ),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Go on without the lines of metrics.jsonl that are damaged."),
    ] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, as the last line of stdout.")
    ] = False,
    ranks: Ranks = None,
    trust: Trust = False,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Go on although code of yours or model.weights has changed since."),
    ] = False,
    no_user_code: NoUserCode = False,
    data_root: Root = None,
) -> None:
    """Continue a run from its newest checkpoint; what comes out is what would have come without the stop.

    It may go on with another number of ranks.
    """
    from fedloom.runs.resume import resume
    from fedloom.runs.start import load_config

    _own_code(no_user_code)
    if ranks is not None and (run_dir / "config.toml").is_file():
        _launch(ranks, load_config(run_dir / "config.toml", trust=trust))
    _watched(
        json_,
        lambda watch: resume(
            run_dir,
            at=from_,
            rounds=rounds,
            forget=forget or (),
            repair=repair,
            trust=trust,
            accept_changes=accept_changes,
            data_root=data_root,
            listener=watch,
        ),
    )


@app.command()
def compare(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COMPARISON.toml | ALGORITHM...] [KEY=VALUE]...",
            help="A comparison file, or algorithms, and settings that override it.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many seeds: 0, 1, ... (3 unless the file says).")
    ] = None,
    grid: Annotated[list[str] | None, typer.Option(help="An axis: KEY=VALUE,VALUE,... (may be repeated).")] = None,
    baseline: Annotated[str | None, typer.Option(help="The method to test against; by default the first.")] = None,
    metric: Annotated[str | None, typer.Option(help="The metric to judge by; by default the first accuracy.")] = None,
    target: Annotated[float | None, typer.Option(help="Report what it took to reach this value.")] = None,
    x: Annotated[
        Literal["rounds", "seconds", "bytes", "busiest", "gradients"] | None,
        typer.Option(help="What curves are drawn against; by default what is equal. Seconds are simulated."),
    ] = None,
    equal: Annotated[
        Literal["rounds", "gradients", "bytes", "busiest"] | None,
        typer.Option(help="What methods spend alike: each has the rounds that this allows; by default rounds."),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="The method whose spending is everybody's budget; by default the baseline.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="The budget itself, in gradients or in MB, instead of a reference.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder; by default one below runs/.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Cells side by side; by default as many as fit.")] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, as the last line of stdout.")
    ] = False,
    trust: Trust = False,
    no_user_code: NoUserCode = False,
    data_root: Root = None,
) -> None:
    """Compare algorithms over seeds, and over a grid of settings; the same command goes on after an interruption.

    fedloom compare fedavg fedprox --seeds 3 --grid partition.alpha=0.1,1.0 rounds=30
    """
    from fedloom.compare.crew import InterruptedComparison
    from fedloom.compare.plan import plan
    from fedloom.compare.run import run as run_comparison
    from fedloom.engine.ranks import is_rank

    if is_rank():
        why = "a comparison starts processes of its own"
        raise ConfigError([Fault("torchrun", why, "run it without torchrun, and see --jobs")])
    _own_code(no_user_code)
    options = {"seeds": seeds, "baseline": baseline, "metric": metric, "target": target, "x": x}
    options |= {"equal": equal, "reference": reference, "budget": budget}
    given = {k: v for k, v in options.items() if v is not None}
    table, name = _comparison(words or [], grid or [], given, trust=trust)
    planned = plan(table)
    folder = out or Path("runs") / f"compare-{as_name(table.get('name') or name or planned.name)}"
    watch = GridWatch(Console(stderr=json_, highlight=False, soft_wrap=True))
    try:
        done = run_comparison(planned, folder, data_root=data_root, jobs=jobs, trust=trust, watcher=watch)
    except InterruptedComparison as stop:
        watch.close()
        watch.say(f"stopped and saved with {stop.done} of {stop.cells} cells done; the same command goes on from here")
        raise typer.Exit(130) from stop
    finally:
        watch.close()
    watch.ended(done)
    if json_:
        print(json.dumps(done.as_json()))
    if done.failures:
        raise typer.Exit(1)


@app.command()
def partition(
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Draw the picture here (.png or .svg).")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    trust: Trust = False,
    no_user_code: NoUserCode = False,
    data_root: Root = None,
) -> None:
    """Share out a data set, print how unequal it came out, and draw each client by class.

    A bare name is a partition: fedloom partition shards data=cifar10 partition.clients=100
    """
    from fedloom.data.files import default_root
    from fedloom.report import partition as report
    from fedloom.runs.prepare import share
    from fedloom.runs.start import load_config

    _own_code(no_user_code)
    words = [f"partition.kind={w}" if _is_word(w) else w for w in settings or []]
    experiment = load_config(*_file_and_overrides(words), trust=trust)
    shared = share(experiment, data_root or default_root())
    described = shared.described()
    picture = out or Path(as_name(f"partition-{experiment.kinds['partition']}-{shared.arrays.name}.png"))
    title = f"{shared.arrays.name}, {experiment.kinds['partition']}, {shared.clients} clients"
    if picture.suffix not in (".png", ".svg"):
        raise ConfigError([Fault("--out", f"a picture ends in .png or .svg (got {picture.name})")])
    report.draw(shared.labels, shared.owner, shared.clients, shared.arrays.labels, picture, title)
    if json_:
        print(json.dumps(described | {"picture": str(picture)}))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in report.table(shared.summary()):
        table.add_row(name, value)
    console = Console()
    console.print(table)
    for note in shared.notes:
        console.print(f"repair: {note}", highlight=False, markup=False)
    console.print(f"fingerprint {described['sha256'][:16]}", highlight=False)
    console.print(f"drawn in {picture}", highlight=False, markup=False)


@app.command("list")
def list_(
    family: Annotated[
        Literal["algorithms", "optimizers", "datasets", "partitions", "models", "topologies"], typer.Argument()
    ],
    json_: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """List what there is: algorithms, optimizers, datasets, partitions, models or topologies."""
    from fedloom.runs import catalogue

    found = catalogue.entries(family)
    if json_:
        print(json.dumps([entry._asdict() for entry in found]))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for entry in found:
        table.add_row(entry.name, entry.summary + (f"  [{entry.origin}]" if entry.origin != "fedloom" else ""))
    Console().print(table, markup=False)


@app.command()
def describe(
    name: Annotated[str, typer.Argument(help="An algorithm, optimizer, data set, partition, model or topology.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KIND KEY=VALUE...]", help="Only of the network: describe topology.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Draw the network here (.png or .svg).")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    no_user_code: NoUserCode = False,
) -> None:
    """Say what something is: its paper and pseudo-code, its settings with bounds and defaults, what it costs.

    The word topology and a kind measure a network: fedloom describe topology ring nodes=16 --out ring.png
    """
    from fedloom.runs import catalogue

    _own_code(no_user_code, name, *(settings or []))
    if name == "topology":
        _describe_topology(settings or [], out, json_)
        return
    if settings or out is not None:
        given = (settings or ["--out"])[0]
        raise ConfigError([Fault(given, "is only for networks", f"as in fedloom describe topology {name} nodes=16")])
    page = catalogue.describe(name)
    if json_:
        print(json.dumps(page.as_json()))
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{page.name} ({page.family})\n")
    console.print(page.text.rstrip())
    if page.settings:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("setting", "type", "default", "meaning"):
            least = {"type": 16, "meaning": 28}.get(column)
            table.add_column(column, overflow="fold", no_wrap=column == "setting", min_width=least)
        for setting in page.settings:
            table.add_row(setting.name, setting.kind, setting.default, setting.meaning)
        console.print()
        console.print(table)
    for line in page.costs:
        console.print(line)


def _describe_topology(words: list[str], out: Path | None, json_: bool) -> None:
    from fedloom.engine.topology.facts import faults
    from fedloom.report import topology as report
    from fedloom.runs import network as networks
    from fedloom.runs.overrides import override
    from fedloom.runs.settings import topology_of

    kinds, pairs = [w for w in words if "=" not in w], [w for w in words if "=" in w]
    if len(kinds) > 1:
        raise ConfigError([Fault(kinds[1], "a second kind", "settings are written key=value")])
    given, _ = override({}, [w.removeprefix("topology.") for w in pairs])
    nodes, seed = (given.pop(key, usual) for key, usual in (("nodes", 16), ("seed", 0)))
    if not isinstance(nodes, int) or not isinstance(seed, int) or nodes < 2 or seed < 0:
        raise ConfigError([Fault("nodes", f"nodes=2 or more, and seed=0 or more (got {nodes!r} and {seed!r})")])
    network = topology_of(given | ({"kind": kinds[0]} if kinds else {}))
    wrong = faults(network, nodes, seed)
    if wrong:
        raise ConfigError(wrong)
    described = networks.described(network, nodes, seed)
    if out is not None:
        networks.draw_topology(network, nodes, seed, out)
    if json_:
        print(json.dumps(described | ({"picture": str(out)} if out is not None else {})))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in report.table(described):
        table.add_row(name, value)
    console = Console(highlight=False, markup=False)
    console.print(table)
    for note in described["notes"]:
        console.print(f"note: {note}")
    if out is not None:
        console.print(f"drawn in {out}")


@app.command()
def check(
    algorithm: Annotated[str, typer.Argument(help="A name, file.py, file.py:Class or package.module:Class.")],
    json_: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    no_user_code: NoUserCode = False,
) -> None:
    """Put an algorithm, yours or ours, to the laws that every algorithm here obeys."""
    from fedloom.engine import laws
    from fedloom.runs.find import find_algorithm

    _own_code(no_user_code, algorithm)
    cls = find_algorithm(algorithm, "algorithm")
    verdicts = [(law, laws.verdict(law, cls)) for law in laws.LAWS]
    broken = [law for law, fault in verdicts if fault]
    if json_:
        print(json.dumps({law.__name__: fault or "holds" for law, fault in verdicts}))
    else:
        for law, fault in verdicts:
            print(f"{'BROKEN' if fault else 'holds ':6}  {laws.title(law)}" + (f"\n        {fault}" if fault else ""))
        print(f"\n{len(verdicts) - len(broken)} of {len(verdicts)} laws hold for {algorithm}")
    if broken:
        raise typer.Exit(1)


@app.command()
def doctor() -> None:
    """Check this machine: versions, devices, data, and one real round of training."""
    from fedloom.runs import health

    failed = 0
    for finding in health.findings():
        failed += not finding.ok
        print(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.what}: {finding.detail}", flush=True)
    if failed:
        raise typer.Exit(1)


@data_app.command("list")
def data_list(data_root: Root = None, json_: Annotated[bool, typer.Option("--json")] = False) -> None:
    """List the published data sets, and which of them are here."""
    from fedloom.data.files import default_root, missing_files
    from fedloom.data.published import PUBLISHED

    root = data_root or default_root()
    found = {"digits": True, **{name: not missing_files(p.layout, root) for name, p in PUBLISHED.items()}}
    if json_:
        print(json.dumps({"root": str(root), "present": found}))
        return
    print(f"data root: {root}")
    for name, here in found.items():
        print(f"  {name:15} {'here' if here else f'not here: fedloom data get {name}'}")


@data_app.command("get")
def data_get(name: Annotated[str, typer.Argument()], data_root: Root = None) -> None:
    """Download a data set from its publisher, checked, and resumed where it broke off."""
    from fedloom.data import download
    from fedloom.data.files import default_root

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task(name, total=None, amount="")

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, amount=f"{done / 1e6:.1f} of {total / 1e6:.1f} MB")

        where = download.get(name, data_root or default_root(), report=report)
    print(f"{name}: complete and checked, in {where}")


@data_app.command("import")
def data_import(
    name: Annotated[str, typer.Argument()],
    directory: Annotated[Path, typer.Argument(help="The folder with the publisher's files.")],
    data_root: Root = None,
) -> None:
    """Take a data set from files that are already on this machine."""
    from fedloom.data import download
    from fedloom.data.files import default_root

    where = download.import_files(name, directory, data_root or default_root())
    print(f"{name}: format, sizes and labels checked, and copied to {where}")


def _own_code(refused: bool, *named: str) -> None:
    """Refuse all code but fedloom's own, or let the code run that these words of the command line name."""
    from fedloom.core import usercode

    if refused:
        usercode.refuse_all()
    usercode.vouch(named)


def _file_and_overrides(words: list[str]) -> tuple[Path | None, list[str]]:
    files = [w for w in words if "=" not in w]
    if len(files) > 1:
        raise ConfigError([Fault(files[1], "a second experiment file", "settings are written key=value")])
    return (Path(files[0]) if files else None), [w for w in words if "=" in w]


def _is_word(text: str) -> bool:
    return "=" not in text and not text.endswith(".toml")


def _comparison(
    words: list[str], grid: list[str], options: dict[str, Any], *, trust: bool
) -> tuple[dict[str, Any], str]:
    """The table of a comparison from the words of a command line, and the name of its file."""
    from fedloom.core import usercode
    from fedloom.runs.overrides import override, value_of
    from fedloom.runs.settings import read_toml

    files = [w for w in words if "=" not in w and w.endswith(".toml")]
    kinds = [w for w in words if _is_word(w)]
    if len(files) > 1:
        raise ConfigError([Fault(files[1], "a second comparison file", "settings are written key=value")])
    given = read_toml(Path(files[0])) if files else {}
    usercode.vouch([kinds, given if trust else {}])
    table, _ = override(given, [w for w in words if "=" in w])
    chosen = table.setdefault("compare", {})
    if not isinstance(chosen, dict):
        raise ConfigError([Fault("compare", f"should be a table of settings (got {chosen!r})")])
    if kinds or "algorithms" not in chosen:
        chosen["algorithms"] = kinds
    axes = {}
    for axis in grid:
        key, equals, text = axis.partition("=")
        if not equals:
            raise ConfigError([Fault("--grid", f"is not of the form key=value,value (got '{axis}')")])
        value = value_of(text)
        axes[key] = value if isinstance(value, list) else [value_of(v.strip()) for v in text.split(",")]
    usercode.vouch(axes)
    if axes:
        chosen["grid"] = {**chosen.get("grid", {}), **axes}
    return {**table, "compare": {**chosen, **options}}, Path(files[0]).stem if files else ""


def _run_name(experiment: Any) -> str:
    kinds = experiment.kinds
    return as_name(experiment.basics.name or f"{kinds['algorithm']}-{kinds['data']}-seed{experiment.basics.seed}")


def _follows() -> bool:
    """Whether this is a rank that neither prints nor writes, since rank 0 does."""
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and size.isdecimal() and 0 < int(rank) < int(size)):
        return False  # or somebody's mistake, of which no rank 0 would tell
    from fedloom.engine.ranks import MEETING

    return "MASTER_ADDR" in os.environ or MEETING in os.environ


def _launch(wanted: str | None, experiment: Any) -> None:
    """Start so many ranks and end when they have ended; one process goes on by itself."""
    if wanted is None:
        return
    from fedloom.engine.ranks import is_rank
    from fedloom.runs import launch
    from fedloom.runs.prepare import pick_device

    if is_rank():
        raise ConfigError([Fault("--ranks", f"torchrun has started the ranks already (got {wanted})", "leave it out")])
    cohort = experiment.cohort.size if experiment.algorithm.family != "gossip" else None
    clients = getattr(experiment.partition, "clients", None)
    ranks = launch.count(wanted, pick_device(experiment.engine.device), cohort, clients)
    if ranks > 1:
        code, lost = launch.launch(launch.without_ranks(sys.argv[1:]), ranks)
        if lost:
            print(lost, file=sys.stderr)
        raise typer.Exit(code)


def _watched(as_json: bool, work: Callable[[Any], Any]) -> None:
    from fedloom.runs.loop import InterruptedRun, Silence

    if _follows():
        try:
            work(Silence())
        except InterruptedRun as stop:
            raise typer.Exit(130) from stop
        return
    watch = Watch(Console(stderr=as_json, highlight=False, soft_wrap=True))
    try:
        history = work(watch)
    except InterruptedRun as stop:
        watch.close()
        watch.say(f"stopped and saved after round {stop.round}; go on with: fedloom resume {stop.run_dir}")
        raise typer.Exit(130) from stop
    finally:
        watch.close()
    watch.ended(history)
    if as_json:
        print(json.dumps(history.as_json()))


class Watch:
    """Shows a run: a live bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: Any = None
        self._said, self._began, self._done, self._clients = 0.0, 0.0, 0, 0
        self._excluded, self._missed, self._idle = 0, 0, 0
        self._deaf = False

    def say(self, text: str) -> None:
        self._show(text)

    def _show(self, thing: Any) -> None:
        """Print, unless nobody reads any more: a reader who leaves must not end the run."""
        if self._deaf:
            return
        try:
            self._console.print(thing, markup=False)
        except BrokenPipeError:
            self._deaf = True
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  the interpreter flushes it at exit

    def started(self, prepared: Any, folder: Path | None, done: int) -> None:
        import torch

        exp, shared = prepared.experiment, prepared.shared
        for note in prepared.config.notes:
            self.say(f"note: {note}")
        device = f"{exp.device} ({torch.get_num_threads()} threads)" if exp.device.type == "cpu" else str(exp.device)
        device += f" · {exp.ranks.size} ranks" if exp.ranks.size > 1 else ""
        place = f" · {folder}" if folder else ""
        steps = {"eager": "", "graph": ", recorded", "compiled": ", compiled and recorded"}[exp.task.capture]
        exact = exp.task.precision == "fp32" or (exp.device.type == "cpu" and exp.task.precision == "tf32")
        steps += "" if exact else f" · {exp.task.precision}"
        how = f"{exp.executor} ({prepared.reason}){steps}"
        self.say(f"fedloom {__version__} · {device} · {how} · seed {exp.seed}{place}")
        s = shared.summary()
        trained, whole = exp.task.size, exp.task.whole
        parameters = f"{trained:,} parameters" if trained == whole else f"{trained:,} of {whole:,} parameters trained"
        self.say(
            f"{shared.arrays.name}: {s.rows:,} rows on {s.clients:,} clients ({s.size_min} to {s.size_max}, median "
            f"{s.size_median:g}) · {s.classes_mean:.1f} of {s.classes} classes each · heterogeneity "
            f"{s.heterogeneity:.2f} · {len(exp.federation.common):,} test rows · {parameters}"
        )
        for note in shared.notes:
            self.say(f"partition: {note}")
        if shared.bad:
            self.say(f"bad clients: {len(shared.bad):,} of {shared.clients:,} ({shared.badness})")
        if exp.guard is not None:
            self.say(f"privacy: {exp.guard.summary(exp.rounds)}")
        if exp.topology is not None:
            self._network(exp)
        if done:
            self.say(f"resumed after round {done} of {exp.rounds}")
        if forget := getattr(exp.algorithm, "forget", ()):
            self.say(f"to be forgotten: clients {list(forget)}")
        self._began, self._done = time.perf_counter(), done
        if self._console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("round {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.fields[now]}"),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("rounds", total=exp.rounds, completed=done, now="")
            self._bar.start()

    def _network(self, exp: Any) -> None:
        from fedloom.engine.topology.facts import facts

        found = facts(exp.topology, exp.federation.clients, exp.seed, tuple(exp.federation.train.sizes.tolist()))
        low, high = found.degree_min, found.degree_max
        degree = f"{low}" if low == high else f"{low} to {high}"
        self.say(f"{found.kind}: {degree} neighbours each · psi {found.psi:.4f} in a gossip step")
        for note in found.notes:
            self.say(f"topology: {note}")

    def advanced(self, progress: Any) -> None:
        self._clients += progress.clients
        now = time.perf_counter()
        elapsed = now - self._began
        pace = (progress.round - self._done) / elapsed
        left = (progress.rounds - progress.round) / pace
        shown = [f"{_short(n)} {_brief(v)}" for n, v in _headline(progress.metrics)]
        text = "  ".join([*shown, f"{self._clients / elapsed:,.3g} clients/s", f"{_span(left)} left"])
        for note in progress.notes:
            self.say(f"round {progress.round}: {note}")
        if progress.excluded:
            self._excluded += len(progress.excluded)
            self.say(f"round {progress.round}: left out clients {list(progress.excluded)}: their work was not finite")
        if progress.late and progress.late == progress.clients:
            self._missed += 1
        self._idle += not progress.clients
        if self._bar is not None:
            self._bar.update(self._task, completed=progress.round, now=text)
        elif now - self._said >= 2.0 or progress.round == progress.rounds:
            self._said = now
            self.say(f"round {progress.round}/{progress.rounds}  {text}")

    def stopping(self) -> None:
        self.say("finishing this round, then saving (again to stop at once)")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _sketch(self, history: Any) -> None:
        """The course of the first accuracy in one line of text."""
        frame = history.metrics
        names = accuracies(frame)
        if not names or len(frame) < 3:
            return
        values = [v for v in frame[names[0]].tolist() if not math.isnan(v)]
        picked = [values[round(i * (len(values) - 1) / 49)] for i in range(50)] if len(values) > 50 else values
        line = "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * v))] for v in picked)
        self.say(f"\n{names[0]}  {line}  {values[-1]:.1%}")

    def ended(self, history: Any) -> None:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("metric", "last", "best", "mean of last 10"):
            table.add_column(column, justify="left" if column == "metric" else "right")
        for name, value in history.summary.items():
            if is_summarised(name):
                table.add_row(name, *(f"{v:.4f}" for v in value))
        self._show(table)
        self._sketch(history)
        if self._excluded:
            self.say(f"{self._excluded} client updates were not finite and left out")
        if self._missed:
            self.say(f"in {self._missed} rounds no client met system.deadline, and the model stayed as it was")
            self._missed = 0
        if self._idle:
            of = "the only round" if history.rounds == 1 else f"{self._idle} of {history.rounds} rounds"
            self.say(f"warning: in {of} nobody trained (all clients were late or lost), and the model stayed as it was")
        up, down = (history.records[-1].get(f"bytes/{way}", 0) for way in ("up", "down"))
        pace = f"{history.rounds} round{'' if history.rounds == 1 else 's'} in {history.seconds:.1f} s"
        among = up and not down  # in a network, where there is no server to receive from
        sent = f"nodes sent {_bytes(up)}" if among else f"clients sent {_bytes(up)} and received {_bytes(down)}"
        self.say(f"{pace} · {sent}")
        if history.run_dir is None:
            return
        run = history.run_dir
        self.say(f"\n{run}/metrics.jsonl   every evaluation\n{run}/curves.png      the curves")
        model = "model.safetensors" if (run / "model.safetensors").exists() else "personal.safetensors"
        self.say(f"{run}/{model}")
        other = "fedopt" if history.algorithm != "fedopt" else "fedavg"
        further = f"  fedloom resume {run} --rounds {2 * history.rounds}\n"
        further = "" if (run / "privacy.json").exists() else further  # whose noise may be for just so many rounds
        self.say(
            f"\nnext:\n{further}"
            f"  fedloom run {run}/config.toml algorithm.kind={other}\n"
            f"  fedloom describe {history.algorithm}"
        )


class GridWatch:
    """Shows a comparison: a live bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: Any = None
        self._said = time.perf_counter()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def started(self, planned: Any, folder: Path, jobs: int, standing: Any) -> None:
        methods, places, seeds = len(planned.methods), len(planned.places), len(planned.spec.seeds)
        grid = f" x {places} places of the grid" if planned.axes else ""
        self.say(f"fedloom {__version__} · {methods} methods{grid} x {seeds} seeds · {jobs} side by side · {folder}")
        for note in planned.notes:
            self.say(f"note: {note}")
        if standing.reused:
            self.say(f"{standing.reused} of {standing.cells} cells are done already")
        if self._console.is_terminal and standing.reused < standing.cells:
            columns = (
                SpinnerColumn(),
                TextColumn("cells {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.fields[now]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("cells", total=standing.cells, completed=standing.done, now="")
            self._bar.start()

    def moved(self, standing: Any) -> None:
        left = "" if standing.seconds_left is None else f"{_span(standing.seconds_left)} left"
        running = "; ".join(f"{name} {done}/{rounds}" for name, done, rounds in standing.running)
        now = "  ".join(part for part in (left, running) if part)
        clock, ended = time.perf_counter(), standing.ended.partition("\n")[0]
        if self._bar is not None:
            self._bar.update(self._task, completed=standing.done, now=now)
            if ended and not ended.endswith(": done"):
                self.say(ended)
        elif ended or clock - self._said >= 10.0:
            self._said = clock
            told = (f"cells {standing.done}/{standing.cells}", ended, left if ended else now)
            self.say("  ".join(part for part in told if part))

    def stopping(self) -> None:
        self.say("finishing the rounds at work, then saving (again to stop at once)")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def ended(self, done: Any) -> None:
        from fedloom.report.comparison.notes import notes
        from fedloom.report.comparison.text import narrowed, sections

        console = self._console if self._console.is_terminal else Console(file=self._console.file, width=250)
        for whole in sections(done.question, done.rows):
            section = narrowed(whole, console.width)
            table = Table(box=None, pad_edge=False, header_style="bold")
            for index, column in enumerate(section.header):
                table.add_column(Text(column), justify="right" if index else "left", no_wrap=True)
            for index, line in enumerate(section.lines):
                table.add_row(*(Text(word) for word in line), style="bold" if index == section.best else None)
            self.say(f"\n{section.title}" if section.title else "")
            console.print(table)
        self.say("")
        for note in notes(done.question, done.rows):
            self.say(note)
        if done.sheet is not None:
            self._layout(done.sheet, console)
        for why in dict.fromkeys(done.failures.values()):
            cells = [cell for cell, reason in done.failures.items() if reason == why]
            more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
            self.say(f"failed: {cells[0]}{more}: {why}")
        folder = done.folder
        self.say(f"\n{folder}/table.md      every column; also as .csv and .tex\n{folder}/curves.png    also as .svg")
        if done.sheet is not None:
            self.say(f"{folder}/layout.md     the table in its layout; also as .csv, .tex, .png and .svg")
        self.say(f"{done.cells}/        a run folder for each cell, listed in cells.csv")

    def _layout(self, sheet: Any, console: Console) -> None:
        """The tables in the layout of the recipe, side by side as far as the terminal is wide."""
        from fedloom.report.comparison.sheet_text import across, legend
        from fedloom.report.comparison.sheet_text import lines as lines_of

        header = ["\n".join(column) for column in sheet.columns]
        for block in sheet.blocks:
            lines = lines_of(sheet, block)
            self.say(f"\n{block.title}" if block.title else "")
            for group in across(header, lines, console.width):
                table = Table(box=None, pad_edge=False, header_style="bold")
                table.add_column(Text(sheet.layout.rows), no_wrap=True)
                for i in group:
                    table.add_column(Text(header[i]), justify="right", no_wrap=True)
                for line in lines:
                    label = Text(f"  {line.label}" if line.is_paper else line.label)
                    table.add_row(label, *(_cell(line.cells[i]) for i in group), style="dim" if line.is_paper else None)
                console.print(table)
        self.say("")
        for note in legend(sheet):
            self.say(note)


def _cell(words: Any) -> Text:
    """The numbers of a cell, the best of their column in bold."""
    return Text(" / ").join(Text(word.text, style="bold" if word.best else "") for word in words)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _headline(metrics: dict[str, Any]) -> list[tuple[str, float]]:
    """The values that stand for a run in one line."""
    return [(name, metrics[name]) for name in headline(metrics)]


def _brief(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1e4 else f"{value:.2e}"


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _span(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


if __name__ == "__main__":
    main()
