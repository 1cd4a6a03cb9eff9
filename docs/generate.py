"""Writes pages of the documentation: settings and algorithms from their classes, reproduction from results/.

python docs/generate.py            write the pages
python docs/generate.py --check    check whether they are up to date, and exit with 1 if not
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedloom.algorithm.capabilities import Adapts, defaults_of
from fedloom.compare.foreseen import has_common_model
from fedloom.compare.pages import RecipeReport, recipes_in, report_of
from fedloom.core.errors import ConfigError
from fedloom.core.fields import default_words, toml_word, type_words
from fedloom.core.schema import explained, kinds
from fedloom.data.partition import Partition
from fedloom.data.sources import Source
from fedloom.engine.topology.network import Topology
from fedloom.models.net import NetSpec, parameters
from fedloom.runs.catalogue import costs
from fedloom.runs.find import algorithms
from fedloom.runs.settings import SECTIONS, Basics

HERE = Path(__file__).parent
ROOT = HERE.parent
MADE = "<!-- Made by docs/generate.py from the classes: change those, then run it again. -->"
MEASURED = "<!-- Made by docs/generate.py from results/ and experiments/: collect results, then run it again. -->"

# The meaning of keys that their classes do not explain; a description in the class takes precedence.
MEANING = {
    "rounds": "how many rounds the run has",
    "partition.natural.clients": "merge the data's clients into this number; unset: as many as the data has",
    "model.widths": "sizes of the hidden layers",
    "model.padding": "`same` pads the convolutions by 2, `valid` does not",
    "model.norm": "kind of normalisation; `batch` has running statistics",
    "model.groups": "groups of GroupNorm, at most",
    "model.buffers": "running statistics of BatchNorm: averaged by the server, or kept by each client",
    "model.width": "channels of the first stage",
    "model.stem": "first layers: one 3x3 convolution, or ImageNet's that divides the size by four",
    "model.growth": "channels that each layer adds",
}

HEAD = """# Configuration

{made}

An experiment is a TOML file of sections. Every key has a default, so an empty file is a valid experiment:
FedAvg on digits. A key on the command line overrides the file, `section.key=value`:

```console
$ fedloom run experiment.toml local.lr=0.05 cohort.size=5
$ fedloom run experiment.toml algorithm.kind=fedopt algorithm.rule=yogi
$ fedloom run experiment.toml --print-config
```

- `--print-config` prints the experiment with its defaults filled in. A key that is unset is left out.
- A section that is chosen by name may be only that name: `model = "logistic"`, or `model=logistic` on the command line.
- When the command line changes a section's kind, keys that the new kind does not have are dropped, and the run reports
  them.
- A key that has no effect with the others is refused: "only if" says when it has one. When the command line removes the
  effect of a key in the file, the key is dropped, and the run reports it.
- An unknown key, a wrong type or a value out of bounds is an error that names the place, the value and the closest
  valid name. The exit code is 2, and nothing is written.
- From Python the sections are keyword arguments: `fedloom.run("fedavg", rounds=20, local={{"lr": 0.05}})`.

Some settings are valid alone and refused together: a cohort larger than the number of clients;
`cohort.sampling = "proportional"` with `algorithm.weighting = "samples"`, which would count data twice; a `cohort` for
an algorithm without a server, which trains every node in every round; a `topology` for one with a server.
"""

OWN = """## Your own

Wherever a kind is named, `path/to/file.py:Name` is your own. The other keys in the section are passed to it. Classes
may also be named as `package.module:Name`: an installed one, or one in the working folder. A file may import modules in
its folder, unless an installed module has that name. Code that a file or folder names needs your consent: see
[trust](trust.md#configurations-and-run-folders-of-others).

| section | what the name refers to |
|---|---|
| `data.source` | a function that returns `(x, y)` arrays; it may have the parameters `root` and `seed` |
| `partition.kind` | a function that returns the client of each row, or a list with the rows of each client; \
it may have the parameters `y`, `clients` and `classes` (their numbers), `rng`, `x` and `client` (of each row, \
if the data names clients) |
| `model.kind` | an `nn.Module` class; it may have the parameters `shape` and `classes` |
| `local.optimizer` | a function of settings that returns a `fedloom.core.optim.Optimizer`: see below |
| `task.loss` | a function `f(outputs, y, ...)` of outputs `[B, C]` and labels `[B]` that returns \
the loss of each row `[B]` |
| `aggregation.rule` | a function `f(uploads, weights, ...)` of a row for each upload `[K, P]` \
and their weights `[K]` that returns one row `[P]`: see [trust](trust.md#a-rule-of-your-own) |
| `cohort.sampling` | a function that returns the clients of a round, each once; it may have the \
parameters `round` (from 0), `rng`, `clients` (their number), `size` and \
`sizes` (training examples of each client): see below |
| `evaluate.metrics` | functions `f(outputs, y)` that return one number: see below |
| `algorithm.kind` | a subclass of `fedloom.Algorithm`; a file in the folder `algorithms/` is found by its bare name |

All but metrics may have further arguments. These are keys of the section: `task.loss=own.py:focal task.gamma=3`.

A **metric** is called once for the outputs `[n, C]` and labels `[n]` of all rows that are evaluated together: the
common test set for `global/test/top3`, the rows of each client for `personal/pre_fit/test/top3`. It need not be a mean
over rows. It is not called where an output is not finite. In regression, outputs and labels are those that the loss
is given. Its best value is the highest, unless its name is one of the words `loss`, `mae`, `rmse`, `brier` and `ece`,
or begins with one and then has no letter: less of `loss_top` and `rmse10` is better, and more of `lossless`.

A **sampling** knows the round and draws from `rng`, whose numbers depend on the seed and the round only. So all methods
of a comparison have the same clients in each round, which are known before the run: that is what resuming, several
processes and forecasts rest on. A sampling cannot see losses or models. A choice by loss, as in Power-of-Choice, is
written as a method: draw the candidates here, let them report their loss, and let the server use only the uploads it
wants ([an example](write-a-method.md#what-a-method-can-do-beyond-this)). All candidates then train and send, and are
counted as doing so.

An `Optimizer(init, update)` is two functions: `init(x)` returns the state before the first step, and `update(g, state,
x, lr)` the next `(x, state)`. Its own settings are the function's arguments, and keys of the section `local`.

Examples of the functions that are given data are in [write a method](write-a-method.md#not-a-whole-method).
"""

DATA = """Images are kept as bytes and normalised when they are read. A row is a test row if the data marks it; else
`test` of each class is drawn. Published sets are searched below `--data-root`, else `FEDLOOM_DATA`, else the user's
cache folder; they are downloaded only by `fedloom data get NAME`. `data = "mine.npz"` is short for `source = "npz"`
with that `path`, and so for `.csv`, `.parquet`, and for a folder of images, if the path has a slash (`pictures/`)."""

PARTITION = """Rows that are not test rows are assigned to clients. Every partition takes bounded time: it draws
once, then repairs violations (such as a client below `min_size`), and the repair is printed and recorded.
Rows that are moved change the label mixes: the note says how heterogeneous the split was before, and is now. A
comparison has it below its tables. With `min_size = 1` only clients without any row get one."""

MODEL = """Nets adapt to the shape of the data. The table has the number of parameters with ten classes and default
settings; a dash means that the image is too small for the net.

`freeze` names parts of the net that are not trained: a child such as `body`, or `body.conv1`, or one parameter. Frozen
parts are not sent, counted in bytes or noised, with any algorithm, and are in evaluation mode (BatchNorm does not
change, dropout does nothing). The net that a run saves is complete. With `freeze = "body"` and no augmentation,
features are computed once, before the first round. The body is then loaded from `weights`, and
`weights_part = "body"` leaves out a head that is for other classes."""

SHAPES = ((1, 8, 8), (1, 28, 28), (3, 32, 32))


def configuration() -> str:
    """The page of every section and key."""
    sources, partitions = kinds(Source, "fedloom.data.sources"), kinds(Partition, "fedloom.data.partition")
    models, topologies = kinds(NetSpec, "fedloom.models"), kinds(Topology, "fedloom.engine.topology")
    parts = [
        HEAD.format(made=MADE),
        "## Outside any section\n",
        _table("", Basics),
        "\n## data\n",
        DATA + "\n",
        _chosen("data", "source", Source, sources, default="digits"),
        "\n## partition\n",
        PARTITION + "\n",
        _chosen("partition", "kind", Partition, partitions, default="dirichlet"),
        "\n## model\n",
        MODEL + "\n",
        _sizes(models),
        _chosen("model", "kind", NetSpec, models, default="mlp"),
        *_sections("local", "cohort"),
        "\n## algorithm\n",
        "Each algorithm is described in [algorithms.md](algorithms.md).\n",
        _chosen("algorithm", "kind", None, algorithms(own=False), default="fedavg"),
        "\n## topology\n",
        "Which nodes exchange models in a network without a server; weights are Metropolis weights.\n",
        _chosen("topology", "kind", Topology, topologies, default="ring"),
        *_sections(*(name for name in SECTIONS if name not in ("local", "cohort"))),
        "\n" + OWN,
    ]
    return "\n".join(parts)


def _sections(*names: str) -> list[str]:
    """Sections that are not chosen by name."""
    found = []
    for name in names:
        cls = SECTIONS[name]
        found += [f"\n## {name}\n", _markdown(cls.__doc__ or "") + "\n", _table(name, cls)]
    return found


def algorithm_page() -> str:
    """The page of every algorithm in the package."""
    found = algorithms(own=False)
    parts = [
        "# Algorithms\n",
        MADE + "\n",
        "Each is one file in `src/fedloom/algorithms/`, named as in `algorithm.kind`. The text below is the file's\n"
        "own; `fedloom describe NAME` prints it. All obey the laws that `fedloom check NAME` tests.\n",
        "| name | family | a client keeps | what is evaluated |\n|---|---|---|---|",
    ]
    for name, cls in found.items():
        kept = costs(cls)[2].partition("each client ")[2]
        parts.append(f"| [`{name}`](#{name}) | {cls.family} | {kept} | {_evaluated(cls)} |")
    for name, cls in found.items():
        module = sys.modules[cls.__module__]
        parts += [f"\n## {name}\n", _markdown(module.__doc__ or ""), ""]
        if cls.model_fields:
            parts += [_table(f"algorithm.{name}", cls), ""]
        for section, settings in defaults_of(cls()).items():
            said = ", ".join(f"`{section}.{key} = {toml_word(value)}`" for key, value in settings.items())
            parts.append(f"- part of the method, unless you set it: {said}")
        parts += [f"- {line}" for line in costs(cls) if line]
        parts.append(f"- run it: `fedloom run algorithm.kind={name}`")
    return "\n".join(parts) + "\n"


def _evaluated(cls: Any) -> str:
    """Which models an evaluation measures, according to the algorithm's traits."""
    alg = cls()
    if alg.family == "gossip":
        return "the average model, every node, and each node's model on its own data"
    when = "after" if alg.traits.served == "post_fit" else "before"
    if alg.family == "personal":
        own = f"each client's own model, {when} its local training"
    elif isinstance(alg, Adapts):
        own = "a fine-tuned copy on each client's data"
    else:
        own = "the same on each client's data"
    return f"the server's model, and {own}" if has_common_model(alg) else own


def _chosen(section: str, key: str, base: type[BaseModel] | None, found: dict[str, Any], default: str) -> str:
    """A section that is chosen by name: the keys that all kinds have, then those of each kind."""
    names = ", ".join(f"`{name}`" for name in sorted(found))
    lines = [
        f"| key | type | default | meaning |\n|---|---|---|---|\n| `{key}` | name | `{toml_word(default)}` | {names} |"
    ]
    common = base.model_fields if base is not None else {}
    lines += [_row(section, name, field) for name, field in common.items()]
    for name, cls in sorted(found.items()):
        mine = {k: f for k, f in cls.model_fields.items() if k not in common or f.default != common[k].default}
        about = "" if section == "algorithm" else _markdown(cls.__doc__ or "")
        lines.append(f"\n### {section}: {name}" + (f"\n\n{about}" if about else ""))
        if mine:
            lines.append("\n| key | type | default | meaning |\n|---|---|---|---|")
            lines += [_row(section, k, field, name) for k, field in mine.items()]
        elif section == "algorithm":
            lines.append("\nNo further settings.")
    return "\n".join(lines)


def _sizes(found: dict[str, Any]) -> str:
    """How many parameters each net has, counted without allocating them."""
    heads = [" x ".join(map(str, shape)) for shape in SHAPES]
    lines = [f"| kind | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for name, cls in sorted(found.items()):
        counts = []
        for shape in SHAPES:
            try:
                with torch.device("meta"):
                    counts.append(f"{parameters(cls().build(shape, 10)):,}")
            except ConfigError:
                counts.append("-")
        lines.append(f"| `{name}` | {' | '.join(counts)} |")
    return "\n".join(lines) + "\n"


def _table(section: str, cls: type[BaseModel]) -> str:
    rows = [_row(section, name, field) for name, field in cls.model_fields.items()]
    return "\n".join(["| key | type | default | meaning |\n|---|---|---|---|", *rows])


def _row(section: str, name: str, field: FieldInfo, kind: str = "") -> str:
    kind_of = type_words(field, _code).replace("|", "\\|")
    return f"| `{name}` | {kind_of} | {default_words(field, _code)} | {_meaning(section, name, field, kind)} |"


def _meaning(section: str, name: str, field: FieldInfo, kind: str) -> str:
    if field.description:
        return explained(field).replace("|", "\\|")
    places = [f"{section}.{kind}.{name}", f"{section}.{name}", name if not section else ""]
    found = next((MEANING[place] for place in places if place in MEANING), "")
    if not found:
        raise SystemExit(f"docs/generate.py: {places[1]} has no meaning; describe it in its class, or in MEANING")
    return explained(field, found)


def _code(value: str) -> str:
    return f"`{value}`"


def _markdown(doc: str) -> str:
    """A docstring as Markdown: indented pseudo-code becomes a block, and what is quoted as code stays so."""
    first, _, rest = doc.strip().partition("\n")
    lines, out, code = [first, *_dedented(rest)], [], False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not code:
            out += ["```text"]
        if code and line and not indented:
            out[-1:] = ["```", ""] if not out[-1] else [out[-1], "```"]
        elif line.startswith("``") and out and out[-1].endswith("."):
            out.append("")
        code = indented or (code and not line)
        out.append((line[4:] if indented else line).replace("``", "`"))
    return "\n".join([*out, "```"] if code else out).rstrip()


def _dedented(text: str) -> list[str]:
    lines = text.split("\n") if text else []
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[margin:].rstrip() for line in lines]


# -- reproduction ----------------------------------------------------------------------------------
PAPERS = {"fedalr": "FedALR", "pfedala": "pFedALA", "relaxation": "FedProx + Relaxation", "law_afl": "LAW-AFL",
          "dfedgam": "DFedGAM"}  # fmt: skip
VERDICTS = {"holds": "hold", "does not hold": "do not hold", "undecided": "are undecided", "not run": "are not run"}

INDEX = """# What was measured

{made}

Measured results next to the papers', with seeds, spread and a verdict on every claim, one page for each paper. A
paper's number is a claim, not a target: nothing was tuned towards it. Tables, curves and verdicts are generated from
results that [`fedloom collect`](compare.md#collecting-results) keeps below `results/`; only the discussions are written
manually. A claim is decided by a 95 % confidence interval over seeds, so one seed decides nothing.

| paper | recipes with results | cells | claims: hold | do not hold | undecided | not run |
|---|--:|--:|--:|--:|--:|--:|
{papers}

## The queue

Recipes are run in this order. `fedloom collect experiments/queue.txt --missing` lists the missing cells. A cell that
several recipes share is run once: it counts in each of them, and once in the table above.

| recipe | about | cells | seeds |
|---|---|--:|--:|
{queue}
"""

PAPER = """# {paper}: what was measured

{made}

[All papers](../reproduction.md), [caveats](../papers.md#{anchor}),
[recipes](../../experiments/README.md#{anchor}). Values are means ± sample standard deviations over seeds.

Claims: {claims}.

## Discussion

{discussion}

{sections}"""


@cache
def reports() -> tuple[RecipeReport, ...]:
    """Every recipe in the order of the queue, with what has been measured of it."""
    return tuple(
        report_of(recipe, ROOT / "results", "../../results")
        for recipe in recipes_in(ROOT / "experiments" / "queue.txt")
    )


def index_page() -> str:
    """The page with links to those of the papers, and the queue."""
    papers = [_paper_row(key, name) for key, name in PAPERS.items()]
    queue = [f"| [{r.name}](../experiments/{r.name}.toml) | {r.title} | {len(r.there)} of {len(r.cells)} "
             f"| {r.seeds[0]} of {r.seeds[1]} |" for r in reports()]  # fmt: skip
    return INDEX.format(made=MEASURED, papers="\n".join(papers), queue="\n".join(queue))


def _paper_row(key: str, name: str) -> str:
    mine = [r for r in reports() if r.name.startswith(f"{key}/")]
    counts = _verdicts(mine)
    there, cells = (len(frozenset().union(*each)) for each in ([r.there for r in mine], [r.cells for r in mine]))
    ran = sum(bool(r.text) for r in mine)
    numbers = [f"{ran} of {len(mine)}", f"{there} of {cells}", *(str(counts[verdict]) for verdict in VERDICTS)]
    return f"| [{name}](reproduction/{_file(key)}) | {' | '.join(numbers)} |"


def _verdicts(mine: list[RecipeReport]) -> Counter[str]:
    return sum((Counter(r.verdicts) for r in mine), Counter())


def _file(key: str) -> str:
    return f"{key.replace('_', '-')}.md"


def paper_page(key: str) -> str:
    """The page of one paper."""
    mine = [r for r in reports() if r.name.startswith(f"{key}/")]
    counts = _verdicts(mine)
    sections = [
        f"## {r.name.partition('/')[2]}\n\n{r.title}\n\n[Recipe](../../experiments/{r.name}.toml).\n\n{r.text}"
        for r in mine
        if r.text
    ]
    waiting = [f"- [{r.name.partition('/')[2]}](../../experiments/{r.name}.toml): {r.title} {len(r.cells)} cells."
               for r in mine if not r.text]  # fmt: skip
    sections += ["## Not run yet\n\n" + "\n".join(waiting) + "\n"] if waiting else []
    return PAPER.format(
        paper=PAPERS[key],
        made=MEASURED,
        anchor=PAPERS[key].lower().replace(" ", "-").replace("+", ""),
        claims=", ".join(f"{counts[verdict]} {words}" for verdict, words in VERDICTS.items()),
        discussion=_read(HERE / "reproduction" / "discussion" / _file(key)).strip(),
        sections="\n".join(sections),
    )


PAGES = {"configuration.md": configuration, "algorithms.md": algorithm_page, "reproduction.md": index_page} | {
    f"reproduction/{_file(key)}": partial(paper_page, key) for key in PAPERS
}


def main() -> int:
    """Write the pages, or with --check compare them."""
    stale = [name for name, page in PAGES.items() if _read(HERE / name) != page()]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"docs/{name} is out of date: python docs/generate.py")
        return 1 if stale else 0
    (HERE / "reproduction").mkdir(exist_ok=True)
    for name in stale:
        (HERE / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"wrote docs/{name}")
    return 0


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
