"""The content of the page of a run, a comparison, or a folder of them: sections of cards, tables and charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from fedloom.core.schema import dotted
from fedloom.core.vocabulary import is_cost, is_extra, is_privacy, last_ten, leaf
from fedloom.report import topology
from fedloom.report.comparison.claims import without_number
from fedloom.report.comparison.notes import STARRED, TAGGED
from fedloom.report.page.apart import apart
from fedloom.report.page.language import Language, Say, meaning_in, sentence_in, speaker
from fedloom.report.page.paper_table import caveat_marks, paper_tables
from fedloom.report.page.parts import (
    Card,
    PageCell,
    PageColumn,
    PageLine,
    PageTable,
    number,
    plain,
    shown,
    signed,
    with_spread,
)
from fedloom.report.page.series import (
    MOST_POINTS,
    Curve,
    class_counts,
    first_links,
    lines_for,
    of_comparison,
    of_run,
    of_runs,
)
from fedloom.report.view import (
    AnyView,
    ClientScore,
    ComparisonView,
    FolderView,
    RunView,
    as_setting,
    at_point,
    changes_shown,
    client_name,
    clients_by,
    differing,
    ranked_clients,
    recorded_metrics,
    standing_for,
    summary_of_run,
)
from fedloom.report.words import as_bytes, span

_MOST_CLIENTS, _MOST_SPLITS, _MOST_CLASSES = 500, 24, 30
_MARKS = {"holds": "good", "does not hold": "bad", "undecided": "unsure", "not run": "missing"}


class Split(NamedTuple):
    """The partition, and the results of each client: of all runs that share this split."""

    label: str
    table: PageTable
    counts: dict[str, Any]
    clients: int  # all of them, of which the table may have fewer
    ranked: bool  # whether the table begins with the worst client
    method: str  # of several, the one by which they are ranked


class Content(NamedTuple):
    """Everything on the page, from top to bottom; parts without content are empty."""

    title: str
    kind: str
    facts: tuple[str, ...]
    cards: tuple[Card, ...]
    claims: PageTable | None
    results: tuple[PageTable, ...]
    notes: tuple[str, ...]
    progress: tuple[Card, ...]
    lines: list[dict[str, Any]]
    banded: bool
    thinned: bool
    meanings: tuple[tuple[str, str], ...]
    splits: tuple[Split, ...]
    more_splits: bool
    partition: PageTable | None
    confusion: tuple[tuple[str, PageTable], ...]
    topology: PageTable | None
    links: dict[str, Any]
    colours: str  # what the colours of the partition are
    costs: PageTable
    privacy: PageTable | None
    settings_differ: PageTable | None
    settings: PageTable
    environment_differs: PageTable | None
    environment: PageTable
    log: tuple[str, ...]
    several: bool


class _Spoken(NamedTuple):
    """What is shown, and in which language."""

    say: Say
    language: Language

    def name(self, run: RunView) -> str:
        """The name of a run: in a comparison its method and seed."""
        return f"{run.method}, {self.say('seed')} {run.seed}" if run.method else run.name

    def split(self, run: RunView, axes: Sequence[str]) -> str:
        """The name of a run's split: in a comparison its point of the grid and seed, which all methods share."""
        if not run.method:
            return run.name
        seed = f"{self.say('seed')} {run.seed}"
        return f"{at_point(axes, run.place)}, {seed}" if run.place else seed

    def sentence(self, written: Any) -> str:
        """A sentence that a comparison wrote into its folder."""
        return sentence_in(self.language, str(written))


def content_of(view: AnyView, language: Language) -> Content:
    """The page of a run, a comparison or a folder."""
    words = _Spoken(speaker(language), language)
    if isinstance(view, RunView):
        content = _run(view, words)
    elif isinstance(view, ComparisonView):
        content = _comparison(view, words)
    else:
        content = _folder(view, words)
    return content._replace(notes=(*map(words.sentence, changes_shown(view)), *content.notes))


# -- one run ---------------------------------------------------------------------------------------
def _run(run: RunView, words: _Spoken) -> Content:
    metric = standing_for([run])
    results = (_metrics(run, words),) if run.records else ()
    blank = _blank([run], of_run(run), words)
    return blank._replace(
        title=run.name,
        kind=words.say("Run"),
        facts=_facts([run], words),
        cards=_cards(run, metric, words),
        results=results,
        notes=tuple(map(words.sentence, _list(run.partition.get("notes")))),
        progress=_run_progress(run, words),
        log=_log(run) if run.state == "unfinished" else (),
    )


def _facts(runs: Sequence[RunView], words: _Spoken) -> tuple[str, ...]:
    """What the runs have in common, in a few words."""
    say = words.say
    known = {
        "algorithm": [run.algorithm for run in runs],
        "data": [_data_of(run) for run in runs],
        "model": [str(run.settings.get("model.kind", "?")) for run in runs],
        "partition": [str(run.settings.get("partition.kind", "?")) for run in runs],
    }
    found = [f"{say(label)}: {values[0]}" for label, values in known.items() if len(set(values)) == 1]
    clients = {r.partition.get("clients") for r in runs if r.partition}
    if len(clients) == 1 and None not in clients:
        found.append(f"{say('clients')}: {clients.pop():,}")
    rounds = {r.rounds for r in runs}
    return (*found, f"{say('rounds')}: {rounds.pop():,}") if len(rounds) == 1 else tuple(found)


def _data_of(run: RunView) -> str:
    """The name of a run's data: of a file its name, not its kind."""
    path = str(run.settings.get("data.path") or "")
    return PurePath(path).name or str(run.settings.get("data.source", "?"))


def _cards(run: RunView, metric: str, words: _Spoken) -> tuple[Card, ...]:
    say, found = words.say, [Card(words.say("state"), words.say(run.state), mark=run.state)]
    of = summary_of_run(run, metric) if metric else None
    if of is not None:
        mean = f"{_mean_of([run], words)}: {shown(of.mean_last_10, metric)}"
        hint = f"{say('best')}: {shown(of.best, metric)} · {mean}"
        found.append(Card(metric, shown(of.last, metric), hint, "main"))
    column, clients = ranked_clients(run)
    if len(clients) > 1:
        kinds = say(_KINDS[_is_regression(run)].several)
        for label, each in (("worst client", clients[0]), ("best client", clients[-1])):
            hint = f"{say(column)} · {say('rows')}: {each.line['rows']} · {kinds}: {each.line.get('classes', '?')}"
            found.append(Card(say(label), f"{each.client}: {shown(each.value, column)}", hint))
    if run.last:
        up, down = (float(run.last.get(f"bytes/{way}", 0)) for way in ("up", "down"))
        found.append(
            Card(say("sent by nodes"), as_bytes(up))
            if run.topology
            else Card(say("uploaded"), as_bytes(up), f"{say('downloaded')} {as_bytes(down)}")
        )
    if run.timings:
        found.append(Card(say("time"), span(run.seconds), f"{say('rounds')}: {run.round:,}"))
    return tuple(found)


def _metrics(run: RunView, words: _Spoken) -> PageTable:
    """The last, best and mean of every metric."""
    lines = []
    for name in recorded_metrics([run]):
        of = summary_of_run(run, name)
        if of is not None and not is_cost(name):
            lines.append(PageLine((PageCell(name), *(number(value, name) for value in of))))
    return PageTable((PageColumn(words.say("metric")), *_means([run], words)), tuple(lines))


def _mean_of(runs: Sequence[RunView], words: _Spoken) -> str:
    """What the mean of the last evaluations is of: of fewer than ten, it is that of all."""
    name, count = last_ten(sum(line["round"] > 0 for line in run.evaluations) or 1 for run in runs if run.evaluations)
    return words.say(name).format(count)


def _run_progress(run: RunView, words: _Spoken) -> tuple[Card, ...]:
    if run.state != "unfinished":
        return ()
    say, left, count = words.say, run.seconds_left, f"{run.round:,} / {run.rounds:,}"
    if run.stopped:
        return (Card(say("stopped after round"), count, f"{say('continue with')}: {say(run.stopped)}"),)
    return (Card(say("round"), count), *([Card(say("time left"), span(left))] if left is not None else []))


def _log(run: RunView, last: int = 40) -> tuple[str, ...]:
    """The newest rounds, the last one first."""
    took = {line["round"]: sum(float(line.get(k, 0)) for k in ("train", "evaluate", "record")) for line in run.timings}
    metric, out = standing_for([run]), []
    for line in reversed(run.records[-last:]):
        parts = [f"{run.name}: " * bool(run.method) + f"{line['round']:,}/{run.rounds:,}"]
        if isinstance(line.get(metric), int | float):
            parts.append(f"{metric} {shown(float(line[metric]), metric)}")
        if line["round"] in took:
            parts.append(f"{took[line['round']]:.2f} s")
        if line.get("excluded"):
            parts.append(f"excluded: {line['excluded']}")
        out.append("  ·  ".join(parts))
    return tuple(out)


# -- a comparison ----------------------------------------------------------------------------------
def _comparison(view: ComparisonView, words: _Spoken) -> Content:
    say, metric = words.say, str(view.summary.get("metric") or standing_for(view.cells))
    blank = _blank(view.cells, of_comparison(view, metric), words, view.axes)
    decided = [each for each in _list(view.summary.get("claims")) if isinstance(each, Mapping)]
    written = [*_list(_choice(view).get("notes")), *_list(view.summary.get("notes"))]
    return blank._replace(
        title=view.name,
        kind=say("Comparison"),
        facts=_facts(view.cells, words) if view.cells else (),
        cards=_comparison_cards(view, metric, decided, words),
        claims=_claims(decided, words) if decided else None,
        results=(*paper_tables(view, say), *_selected(view, words), *_results(view, words)),
        notes=tuple(words.sentence(TAGGED if note == STARRED else note) for note in written),
        progress=_comparison_progress(view, words),
        log=tuple(line for cell in view.cells if cell.state == "unfinished" for line in _log(cell, 5)),
    )


def _comparison_cards(
    view: ComparisonView, metric: str, decided: Sequence[Mapping[str, Any]], words: _Spoken
) -> tuple[Card, ...]:
    say, found = words.say, []
    for row in _best_rows(view)[:4]:
        chosen = row.get("chosen")
        known = {**row, **chosen} if isinstance(chosen, Mapping) else row
        where = ", ".join(f"{axis} = {known.get(axis)}" for axis in view.axes)
        value = with_spread(row.get("mean_last_10"), row.get("mean_last_10_std"), str(row.get("metric"))).text
        hint = " · ".join(part for part in (f"{_mean_of(_counted(view), words)}: {value}", where) if part)
        found.append(Card(f"{say('rank')} 1", str(row.get("algorithm")), hint, "main"))
    for verdict, mark in _MARKS.items():
        count = sum(each.get("verdict") == verdict for each in decided)
        if count:
            found.append(Card(say("Claims"), f"{count} {say(verdict)}", mark=mark))
    done = sum(cell.state == "done" for cell in view.cells)
    return (*found, Card(say("cells done"), f"{done:,} / {view.planned:,}", metric))


def _best_rows(view: ComparisonView) -> list[Mapping[str, Any]]:
    """The methods of rank 1: where settings were chosen on validation rows, with the chosen ones."""
    whole = _list(_choice(view).get("table")) or _list(view.summary.get("table"))
    return [row for row in whole if isinstance(row, Mapping) and row.get("rank") == 1]


def _claims(decided: Sequence[Mapping[str, Any]], words: _Spoken) -> PageTable:
    heads = tuple(PageColumn(words.say(head)) for head in ("verdict", "claim", "source", "differences"))
    lines = []
    for each in decided:
        verdict = str(each.get("verdict"))
        scale = 100 if each.get("points") else 1
        unknown = without_number(str(each.get("statistic")))
        gaps = [
            _difference(gap, scale, unknown, words)
            for gap in _list(each.get("differences"))
            if isinstance(gap, Mapping)
        ]
        cells = (
            PageCell(words.say(verdict), mark=_MARKS.get(verdict, "")),
            PageCell(words.sentence(each.get("claim"))),
        )
        lines.append(PageLine((*cells, PageCell(str(each.get("source", ""))), PageCell("; ".join(gaps)))))
    return PageTable(heads, tuple(lines))


def _difference(gap: Mapping[str, Any], scale: int, unknown: str, words: _Spoken) -> str:
    mean, low, high = (gap.get(key) for key in ("mean", "low", "high"))
    what = words.sentence(gap.get("what"))
    if not isinstance(mean, int | float):
        return f"{what}: {words.say('not run' if gap.get('verdict') == 'not run' else unknown)}"
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        shown = f"{what}: {scale * mean:+z.4g} ({words.say('one seed')})"
    else:
        shown = f"{what}: {scale * mean:+z.4g} [{scale * low:+z.4g}, {scale * high:+z.4g}]"
    return f"{shown}, {words.say('seeds lost')}: {gap['lost']}" if gap.get("lost") else shown


def _counted(view: ComparisonView) -> Sequence[RunView]:
    """The runs whose values are in the tables: one that diverged or still runs may have fewer evaluations."""
    return [cell for cell in view.cells if cell.state == "done"] or view.cells


def _results(view: ComparisonView, words: _Spoken) -> tuple[PageTable, ...]:
    """A table for each point of the grid."""
    groups = _by_place(_list(view.summary.get("table")), view.axes)
    return tuple(_result(view, at_point(view.axes, place), rows, words) for place, rows in groups.items())


def _choice(view: ComparisonView) -> Mapping[str, Any]:
    """What a comparison chose on validation rows, if it did."""
    found = view.summary.get("selected")
    return found if isinstance(found, Mapping) else {}


def _selected(view: ComparisonView, words: _Spoken) -> tuple[PageTable, ...]:
    """A table of what was chosen, for each point of the axes that were not chosen over."""
    over = _list(_choice(view).get("over"))
    axes = [axis for axis in view.axes if axis not in over]
    groups, title = _by_place(_list(_choice(view).get("table")), axes), words.say("chosen by validation")
    captions = {place: ", ".join(part for part in (title, at_point(axes, place)) if part) for place in groups}
    return tuple(_result(view, captions[place], rows, words) for place, rows in groups.items())


def _by_place(rows: Sequence[Any], axes: Sequence[str]) -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if isinstance(row, Mapping):
            groups.setdefault(tuple(str(row.get(axis)) for axis in axes), []).append(row)
    return groups


_MEANS = ("last", "best", "mean_last_10")
_OPTIONAL = {
    "difference": "difference",
    "difference_low": "95 % interval",
    "p": "p",
    "paper": "paper",
    "rounds_to_target": "rounds to target",
}


# The number by which a column is known to be of use, where it is another one: a target that no seed reached is told.
_KNOWN = {"rounds_to_target": "reached_target"}


def _means(runs: Sequence[RunView], words: _Spoken) -> list[PageColumn]:
    """The heads of the columns of ``_MEANS``."""
    return [PageColumn(head, True) for head in (words.say("last"), words.say("best"), _mean_of(runs, words))]


def _result(view: ComparisonView, caption: str, rows: Sequence[Mapping[str, Any]], words: _Spoken) -> PageTable:
    say = words.say
    more = [key for key in _OPTIONAL if any(isinstance(row.get(_KNOWN.get(key, key)), int | float) for row in rows)]
    columns = [
        PageColumn(say("method")),
        PageColumn(say("rank"), True),
        *_means(_counted(view), words),
    ]
    validated = any(isinstance(row.get("validation"), int | float) for row in rows)
    columns += [PageColumn(say("validation"), True)] if validated else []
    columns += [PageColumn(say(_OPTIONAL[key]), True) for key in more] + [PageColumn(say("seeds"), True)]
    lines = []
    for row in rows:
        metric, method = str(row.get("metric")), str(row.get("algorithm"))
        tag = say("baseline") if method == view.summary.get("baseline") else ""
        cells = [PageCell(method, tag=tag), number(row.get("rank"))]
        cells += [with_spread(row.get(key), row.get(f"{key}_std"), metric) for key in _MEANS]
        cells += [_validated(row, say)] if validated else []
        cells += [_optional(key, row, metric, view, say) for key in more]
        lost = [f"{row.get(key)} {say(key)}" for key in ("diverged", "failed") if row.get(key)]
        cells.append(number(row.get("seeds"))._replace(tag=", ".join(lost)))
        lines.append(PageLine(tuple(cells), "first" if row.get("rank") == 1 else ""))
    return PageTable(tuple(columns), tuple(lines), caption, sortable=True)


def _optional(key: str, row: Mapping[str, Any], metric: str, view: ComparisonView, say: Say) -> PageCell:
    """The cell of a column that not all comparisons have."""
    if key == "rounds_to_target":
        return _until_target(row, say)
    if key == "difference":
        return signed(row.get(key), metric)
    if key == "difference_low":
        low, high = (signed(row.get(end), metric) for end in (key, "difference_high"))
        return low if low.value is None or high.value is None else low._replace(text=f"[{low.text}, {high.text}]")
    if key == "paper":
        return number(row.get(key), metric)._replace(tag=caveat_marks(view, row))
    return _p_value(row.get(key))


def _until_target(row: Mapping[str, Any], say: Say) -> PageCell:
    """The mean number of rounds until the target; none unless all seeds reached it, or the worst method looks fast."""
    count, took, spread = (row.get(key) for key in ("reached_target", "rounds_to_target", "rounds_to_target_std"))
    if not isinstance(count, int):
        return PageCell("–")
    of = sum(row.get(key) or 0 for key in ("seeds", "diverged", "failed"))
    if count < of or not isinstance(took, int | float):
        return PageCell("–", tag=say("{}/{} seeds").format(count, of))
    return PageCell(f"{took:.1f}" + (f" ± {spread:.1f}" if isinstance(spread, int | float) else ""), float(took))


def _p_value(value: Any) -> PageCell:
    cell = number(value)
    if cell.value is None:
        return cell
    return cell._replace(text="<0.001" if cell.value < 0.001 else f"{cell.value:.3f}")


def _validated(row: Mapping[str, Any], say: Say) -> PageCell:
    """The value on validation rows, with the settings that were chosen by it, or whether this point was."""
    chosen = row.get("chosen")
    tag = ", ".join(f"{k} = {v}" for k, v in chosen.items()) if isinstance(chosen, Mapping) else say("chosen")
    found = with_spread(row.get("validation"), row.get("validation_std"), str(row.get("chosen_by")))
    return found._replace(tag=tag if chosen else "")


def _comparison_progress(view: ComparisonView, words: _Spoken) -> tuple[Card, ...]:
    ended = sum(cell.state in ("done", "diverged", "failed") for cell in view.cells)
    if ended >= view.planned:
        return ()
    hint = f"{words.say('stopped; continue with')}: {words.say('repeat the command')}" if view.stopped else ""
    cards = [Card(words.say("cells done"), f"{ended:,} / {view.planned:,}", hint)]
    busy = [cell for cell in view.cells if cell.state == "unfinished"]
    cards += [Card(words.name(cell), f"{cell.round:,} / {cell.rounds:,}", ", ".join(cell.place)) for cell in busy[:8]]
    rounds, spent = sum(cell.round for cell in view.cells), sum(cell.seconds for cell in view.cells)
    if rounds and spent and not view.stopped:
        all_rounds = view.planned * sum(cell.rounds for cell in view.cells) / len(view.cells)
        cards.append(Card(words.say("time left"), span(spent / rounds * (all_rounds - rounds) / max(1, len(busy)))))
    return tuple(cards)


# -- a folder --------------------------------------------------------------------------------------
def _folder(view: FolderView, words: _Spoken) -> Content:
    runs, say = view.runs, words.say
    blank = _blank(runs, of_runs(runs), words)
    tables = [_listed(runs, words), *_also_measured(runs, words)] if runs else []
    tables += [_listed_comparisons(view.comparisons, words)] if view.comparisons else []
    unfinished = [run for run in runs if run.state == "unfinished"]
    return blank._replace(
        title=view.name or " · ".join(run.name for run in runs),
        kind=say("Overview of runs"),
        facts=_facts(runs, words) if runs else (),
        results=tuple(tables),
        progress=tuple(card for run in unfinished for card in _run_progress(run, words)),
        log=tuple(line for run in unfinished for line in _log(run, 5)),
    )


def _listed(runs: Sequence[RunView], words: _Spoken) -> PageTable:
    metric, say = standing_for(runs), words.say
    heads = [PageColumn(say("name")), PageColumn(say("algorithm")), PageColumn(say("data")), PageColumn(say("state"))]
    heads += [PageColumn(say("seed"), True), PageColumn(say("rounds"), True), PageColumn(say("metric"))]
    heads += _means(runs, words)
    lines = []
    for run in runs:
        own = metric if metric in run.last else standing_for([run])
        of = summary_of_run(run, own) if own else None
        cells = [PageCell(run.name), PageCell(run.algorithm), PageCell(_data_of(run))]
        cells += [PageCell(say(run.state), mark=run.state), number(run.seed), number(run.round), PageCell(own or "–")]
        lines.append(PageLine((*cells, *(number(value, own) for value in of or (None,) * 3))))
    return PageTable(tuple(heads), tuple(lines), sortable=True)


def _also_measured(runs: Sequence[RunView], words: _Spoken) -> list[PageTable]:
    """What else says how good the models of the first table are, such as ``evaluate.metrics``, side by side."""
    place = standing_for(runs).rpartition("/")[0]
    names = [name for name in recorded_metrics(runs) if is_extra(name) and name.rpartition("/")[0] == place]
    if not names:
        return []
    lines = []
    for run in runs:
        found = [summary_of_run(run, name) for name in names]
        means = (number(of and of.mean_last_10, name) for of, name in zip(found, names, strict=True))
        lines.append(PageLine((PageCell(run.name), *means)))
    heads = (PageColumn(words.say("name")), *(PageColumn(leaf(name), True) for name in names))
    return [PageTable(heads, tuple(lines), f"{place}: {_mean_of(runs, words)}", sortable=True)]


def _listed_comparisons(found: Sequence[ComparisonView], words: _Spoken) -> PageTable:
    say, lines = words.say, []
    for each in found:
        methods = dict.fromkeys(cell.method for cell in each.cells)
        done = sum(cell.state == "done" for cell in each.cells)
        first = ", ".join(dict.fromkeys(str(row.get("algorithm")) for row in _best_rows(each)))
        cells = [PageCell(each.name), PageCell(", ".join(methods)), PageCell(f"{done:,} / {each.planned:,}", done)]
        lines.append(PageLine((*cells, PageCell(str(each.summary.get("metric", "–"))), PageCell(first or "–"))))
    heads = [say("Comparison"), say("method"), say("cells done"), say("metric"), f"{say('rank')} 1"]
    return PageTable(tuple(map(PageColumn, heads)), tuple(lines), sortable=True)


# -- parts of all pages ----------------------------------------------------------------------------
def _blank(runs: Sequence[RunView], curves: Sequence[Curve], words: _Spoken, axes: Sequence[str] = ()) -> Content:
    """The parts that do not depend on the kind of page."""
    lines, splits = lines_for(curves), _splits(runs, words, axes)
    first = next((run for run in runs if run.topology), None)
    private = next((run for run in runs if run.privacy), None)
    named = dict.fromkeys(curve.metric for curve in curves)
    return Content(
        title="",
        kind="",
        facts=(),
        cards=(),
        claims=None,
        results=(),
        notes=(),
        progress=(),
        lines=lines,
        banded=any(line["sd"] for line in lines),
        thinned=any(len(run.evaluations) > MOST_POINTS for run in runs),
        meanings=tuple((name, said) for name in named if (said := meaning_in(words.language, name))),
        splits=splits[:_MOST_SPLITS],
        more_splits=len(splits) > _MOST_SPLITS,
        partition=_partition(runs, words, axes),
        confusion=_confusions(runs, words),
        topology=plain(
            [(words.say(k), v) for k, v in topology.table(first.topology)], words.say("property"), words.say("value")
        )
        if first
        else None,
        links=first_links(first) if first else {},
        colours=words.say(_KINDS[bool(runs) and all(map(_is_regression, runs))].colours),
        costs=_costs(runs, words),
        privacy=_privacy(private, words) if private else None,
        settings_differ=apart([(r, r.settings) for r in runs], differing(runs), axes, words.say),
        settings=_all([r.settings for r in runs], words),
        environment_differs=_environment_differs(runs, axes, words),
        environment=_all([dotted(r.environment) for r in runs], words),
        log=(),
        several=len(runs) > 1,
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _splits(runs: Sequence[RunView], words: _Spoken, axes: Sequence[str]) -> tuple[Split, ...]:
    """The clients of each split: in a comparison all methods of a seed share one, else every run has its own."""
    groups: dict[str, list[RunView]] = {}
    for run in runs:
        label = words.split(run, axes)
        if run.clients:
            groups.setdefault(label, []).append(run)
    return tuple(_split(label, group, words) for label, group in groups.items())


def _split(label: str, runs: Sequence[RunView], words: _Spoken) -> Split:
    first, method = runs[0], runs[0].method if len(runs) > 1 else ""
    ranked = bool(ranked_clients(first)[0])
    return Split(label, _clients(runs, words), class_counts(first), len(first.clients), ranked, method)


def _clients(runs: Sequence[RunView], words: _Spoken) -> PageTable:
    """A row for each client, the worst first: its data, and the result of each method on its own held-out rows.

    The lowest tenth is marked: of one run the rows, of several methods the cells of each.
    """
    say, first = words.say, runs[0]
    column, ranked = ranked_clients(first)
    place = {each.line["client"]: k for k, each in enumerate(ranked)}
    own = [{line["client"]: line for line in run.clients} for run in runs]
    low = [_lowest_tenth(clients_by(column, run)) if column else frozenset() for run in runs]
    heads = _client_columns(runs, column, words)
    lines = []
    for line in sorted(first.clients, key=lambda line: place.get(line["client"], len(ranked)))[:_MOST_CLIENTS]:
        worst = len(runs) == 1 and line["client"] in low[0]
        share = _float(line.get("largest_share"))
        cells = [_client_cell(line, say("lowest tenth") if worst else ""), *_numbers(line, "rows", "classes")]
        cells.append(PageCell(f"{line.get('largest_class', '')} ({share:.0%})" if share else "–", share))
        values = [_float(each.get(line["client"], {}).get(column)) for each in own] if column else []
        for value, lowest in zip(values, low, strict=False):
            cell = number(value, column)._replace(bar=value if column == "accuracy" else None)
            marked = len(runs) > 1 and line["client"] in lowest
            cells.append(cell._replace(mark="worst", tag=say("lowest tenth")) if marked else cell)
        cells += [number(_float(line.get("loss")))] if len(heads) > len(cells) else []
        lines.append(PageLine(tuple(cells), "worst" if worst else ""))
    return PageTable(tuple(heads), tuple(lines), sortable=True)


def _client_columns(runs: Sequence[RunView], column: str, words: _Spoken) -> list[PageColumn]:
    """The heads of the table of clients: their data, ``column`` of each method, and of one run the loss."""
    say, first = words.say, runs[0]
    kinds = _KINDS[_is_regression(first)]
    heads = [
        PageColumn(say("client")),
        PageColumn(say("rows"), True),
        PageColumn(say(kinds.several), True),
        PageColumn(say(kinds.largest)),
    ]
    heads += [PageColumn(run.method or say(column), True) for run in runs] if column else []
    if len(runs) == 1 and column != "loss" and "loss" in first.clients[0]:
        heads.append(PageColumn(say("loss"), True))
    return heads


def _lowest_tenth(ranked: Sequence[ClientScore]) -> frozenset[str]:
    """The clients of the lowest tenth, at least one of several."""
    count = max(1, len(ranked) // 10) if len(ranked) > 1 else 0
    return frozenset(each.line["client"] for each in ranked[:count])


def _client_cell(line: Mapping[str, str], tag: str) -> PageCell:
    return PageCell(client_name(line), tag=tag)


def _numbers(line: Mapping[str, str], *keys: str) -> list[PageCell]:
    return [number(_float(line.get(key))) for key in keys]


def _float(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


class _Kinds(NamedTuple):
    """What the classes of a partition are called."""

    several: str
    largest: str
    colours: str


# A regression has no classes: its partition counts rows in bins of the target.
_KINDS = {
    False: _Kinds("classes", "largest class", "Each bar is a client; colours are classes."),
    True: _Kinds("bins", "largest bin", "Each bar is a client; colours are bins of the target."),
}


def _is_regression(run: RunView) -> bool:
    return run.settings.get("task.kind") == "regression"


_PARTITION = {
    "clients": "{clients:,}",
    "rows": "{rows:,}",
    "rows per client": "{size_min:,} to {size_max:,}, median {size_median:,g}",
    "inequality of sizes (Gini)": "{size_gini:.2f}",
    "classes per client": "{classes_min} to {classes_max} of {classes}, mean {classes_mean:.1f}",
    "effective classes per client": "{effective_classes:.2f}",
    "share of the largest class": "{top_share:.0%}",
    "heterogeneity": "{heterogeneity:.2f}{most}",
}


def _partition(runs: Sequence[RunView], words: _Spoken, axes: Sequence[str]) -> PageTable | None:
    """The numbers of every partition among the runs."""
    seen: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for run in runs:
        label = words.split(run, axes)
        if run.partition:
            seen.setdefault(label, (label, run.partition))
    if not seen:
        return None
    chosen = list(seen.values())[:_MOST_SPLITS]
    binned = all(map(_is_regression, runs))
    said = {k: words.say(k.replace("classes", "bins").replace("class", "bin") if binned else k) for k in _PARTITION}
    lines = [
        PageLine((PageCell(said[k]), *(PageCell(_formatted(words.say(form), _bounded(p, words))) for _, p in chosen)))
        for k, form in _PARTITION.items()
    ]
    return PageTable(
        (PageColumn(words.say("property")), *(PageColumn(label, True) for label, _ in chosen)), tuple(lines)
    )


def _bounded(partition: Mapping[str, Any], words: _Spoken) -> dict[str, Any]:
    """The numbers of a partition, with the largest heterogeneity in words; runs of earlier versions did not say."""
    most = partition.get("heterogeneity_most")
    return {**partition, "most": words.say(" of at most {:.2f}").format(most) if isinstance(most, float) else ""}


def _formatted(form: str, values: Mapping[str, Any]) -> str:
    try:
        return form.format(**values)
    except (KeyError, ValueError, TypeError):
        return "–"


def _confusions(runs: Sequence[RunView], words: _Spoken) -> tuple[tuple[str, PageTable], ...]:
    """The confusion matrices that were recorded, each cell shaded by its share of the row."""
    out = []
    for run in runs[:_MOST_SPLITS]:
        rows, labels = _list(run.confusion.get("counts")), [str(x) for x in _list(run.confusion.get("labels"))]
        fits = 0 < len(rows) == len(labels) <= _MOST_CLASSES and all(len(_list(row)) == len(labels) for row in rows)
        if fits:
            heads = (
                PageColumn(f"{words.say('true')} \\ {words.say('predicted')}"),
                *(PageColumn(x, True) for x in labels),
            )
            lines = []
            for label, row in zip(labels, rows, strict=True):
                total = sum(n for n in row if isinstance(n, int | float)) or 1
                shares = [
                    number(n)._replace(bar=n / total if isinstance(n, int | float) else 0.0, mark="heat") for n in row
                ]
                lines.append(PageLine((PageCell(label), *shares)))
            out.append((" · ".join((words.name(run), *run.place)), PageTable(heads, tuple(lines))))
    return tuple(out)


def _costs(runs: Sequence[RunView], words: _Spoken) -> PageTable:
    """Bytes, computation and time of every run."""
    say = words.say
    keys = {"bytes/up": "sent", "bytes/down": "received", "bytes/busiest": "busiest end"}
    times = {"train": "training", "evaluate": "evaluation", "record": "recording"}
    heads = [
        PageColumn(say("name")),
        PageColumn(say("rounds"), True),
        *(PageColumn(say(head), True) for head in keys.values()),
    ]
    heads += [PageColumn(say("gradients"), True), PageColumn(say("simulated time"), True)]
    heads += [PageColumn(say(head), True) for head in times.values()]
    lines = []
    for run in runs:
        end, where = run.last, ", ".join(run.place)
        cells = [PageCell(words.name(run) + (f" ({where})" if where else "")), number(run.round)]
        cells += [_sized(end.get(key)) for key in keys] + [number(end.get("work/gradients"))]
        cells.append(_timed(end.get("time/simulated")))
        cells += [_timed(sum(float(line.get(k, 0.0)) for line in run.timings) if run.timings else None) for k in times]
        lines.append(PageLine(tuple(cells)))
    return PageTable(tuple(heads), tuple(lines), sortable=len(runs) > 1)


def _sized(value: Any) -> PageCell:
    return PageCell(as_bytes(value), float(value)) if isinstance(value, int | float) else PageCell("–")


def _timed(value: Any) -> PageCell:
    if not isinstance(value, int | float):
        return PageCell("–")
    return PageCell(f"{value:.2f} s" if value < 10 else span(value), float(value))


def _privacy(run: RunView, words: _Spoken) -> PageTable:
    spent = {name: value for name, value in run.last.items() if is_privacy(name)}
    rows = [(name, f"{value:.4g}") for name, value in spent.items()]
    rows += [
        (words.say(k), as_setting(run.privacy[k]))
        for k in ("unit", "relation", "delta", "warning")
        if run.privacy.get(k)
    ]
    return plain(rows, words.say("property"), words.say("value"))


def _all(tables: Sequence[Mapping[str, Any]], words: _Spoken) -> PageTable:
    """Every key with its value, or with all values where runs differ."""
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = []
    for key in keys:
        values = list(dict.fromkeys(as_setting(table[key]) for table in tables if key in table))
        rows.append((key, " | ".join(values[:6]) + (" | …" if len(values) > 6 else "")))
    return plain(rows, words.say("setting"), words.say("value"))


def _environment_differs(runs: Sequence[RunView], axes: Sequence[str], words: _Spoken) -> PageTable | None:
    tables = [(run, dotted(run.environment)) for run in runs if run.environment]
    own = ("config_hash", "net_sha256", "message_bytes", "lanes", "executor", "steps", "parameters", "files")
    keys = dict.fromkeys(key for _, table in tables for key in table)
    differ = [
        k for k in keys if not k.startswith(own) and len({as_setting(table.get(k, "")) for _, table in tables}) > 1
    ]
    return apart(tables, differ, axes, words.say)
