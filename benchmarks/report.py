"""The results for people and for programs: tables, one JSON file, one picture. Measures nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from contestants import HOLDFAST, RAW, SAFETENSORS, TORCH_DCP, TORCH_DCP_4, TORCH_SAVE
from machine import Machine
from peak_memory import Peak
from race import Race
from verdicts import Verdict, fetch_verdicts, peak_verdicts, race_verdicts, ratio

_COLOURS = {
    RAW: "#b8bcc4",
    HOLDFAST: "#0b6e4f",
    TORCH_DCP: "#c8553d",
    TORCH_DCP_4: "#e09f7d",
    TORCH_SAVE: "#8d6a9f",
    SAFETENSORS: "#3d6fa5",
}
_COMPARED = (RAW, TORCH_DCP, SAFETENSORS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """One whole run."""

    machine: Machine
    caches: str
    quick: bool
    races: list[Race]
    peaks: list[Peak]

    def verdicts(self) -> list[Verdict]:
        """Every promise that this run can judge."""
        of_races = [verdict for race in self.races for verdict in (*race_verdicts(race), *fetch_verdicts(race))]
        return of_races + peak_verdicts(self.peaks)


def print_results(results: Results, console: Console) -> None:
    """Tables of speeds, of holdfast's ratios, and of promises kept or not."""
    for race in results.races:
        console.print(_speed_table(race))
        if HOLDFAST in race.names():
            console.print(_ratio_table(race))
    verdicts = results.verdicts()
    if verdicts:
        console.print(_verdict_table(verdicts))
        missed = sum(not verdict.passed for verdict in verdicts)
        console.print(f"{len(verdicts) - missed} of {len(verdicts)} promises kept")
    if results.quick:
        console.print("[yellow]A quick run only shows that everything works; its numbers mean nothing.[/]")


def _speed_table(race: Race) -> Table:
    table = Table(
        title=f"{race.state}: {_size(race)}; GB/s, medians of {race.rounds}",
        title_justify="left",
    )
    table.add_column("contestant")
    for phase in race.phases:
        table.add_column(phase, justify="right")
    for name in _in_fixed_order(race):
        cells = [_number(race.speed(phase, name), scale=1e-9) for phase in race.phases]
        table.add_row(name, *cells, style="bold green" if name == HOLDFAST else None)
    return table


def _ratio_table(race: Race) -> Table:
    table = Table(title=f"{race.state}: holdfast's speed over that of", title_justify="left")
    table.add_column("")
    compared = [other for other in _COMPARED if other in race.names()]
    for other in compared:
        table.add_column(other, justify="right")
    for phase in race.phases:
        table.add_row(phase, *(_number(ratio(race, phase, other), unit="x") for other in compared))
    return table


def _verdict_table(verdicts: list[Verdict]) -> Table:
    table = Table(title="promises", title_justify="left")
    table.add_column("what")
    table.add_column("measured", justify="right")
    table.add_column("required", justify="right")
    table.add_column("")
    for verdict in verdicts:
        mark = "[green]PASS[/]" if verdict.passed else "[bold red]FAIL[/]"
        table.add_row(verdict.what, verdict.measured, verdict.required, mark)
    return table


def _size(race: Race) -> str:
    ranks = f" on {race.ranks} ranks" if race.ranks > 1 else ""
    return f"{race.tensors:,} tensors, {race.total / 1e9:.2f} GB{ranks}"


def _number(value: float | None, *, scale: float = 1.0, unit: str = "") -> str:
    return "-" if value is None else f"{value * scale:.2f}{unit}"


def _in_fixed_order(race: Race) -> list[str]:
    return [name for name in _COLOURS if name in race.names()]


def write_json(results: Results, path: Path) -> None:
    """Everything measured, round by round, with the medians and verdicts made from it."""
    document = {
        "machine": asdict(results.machine),
        "caches": results.caches,
        "quick": results.quick,
        "races": [
            asdict(race)
            | {
                "bytes_per_second": {
                    phase: {name: speed for name in race.names() if (speed := race.speed(phase, name)) is not None}
                    for phase in race.phases
                }
            }
            for race in results.races
        ],
        "peaks": [asdict(peak) for peak in results.peaks],
        "verdicts": [asdict(verdict) for verdict in results.verdicts()],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def write_plot(results: Results, path: Path) -> None:
    """Grouped bars of GB/s, one panel for each race, two in a row; a last one alone takes the whole row."""
    if not results.races:
        return
    mpl.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    columns = min(2, len(results.races))
    rows = -(-len(results.races) // columns)
    figure = Figure(figsize=(6.6 * columns, 4.3 * rows + 0.3), layout="constrained")
    grid = figure.add_gridspec(rows, columns)
    panels: list[Axes] = []
    for number, race in enumerate(results.races):
        row, column = divmod(number, columns)
        is_alone = column == 0 and number == len(results.races) - 1
        panels.append(figure.add_subplot(grid[row, column : columns if is_alone else column + 1]))
        _draw(race, panels[-1])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    machine = results.machine
    figure.suptitle(
        f"{machine.cores} cores, {machine.file_system}, torch {machine.packages['torch']}; "
        "saves are durable, loads are in place",
        fontsize=9,
        color="#555555",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def _draw(race: Race, panel: Axes) -> None:
    names = _in_fixed_order(race)
    width = 0.84 / len(names)
    for number, name in enumerate(names):
        bars = [(place, speed / 1e9) for place, phase in enumerate(race.phases) if (speed := race.speed(phase, name))]
        positions = [place + (number - (len(names) - 1) / 2) * width for place, _ in bars]
        drawn = panel.bar(positions, [speed for _, speed in bars], width * 0.94, label=name, color=_COLOURS[name])
        weight = "bold" if name == HOLDFAST else "normal"
        panel.bar_label(drawn, fmt="%.2f", fontsize=7, padding=2, fontweight=weight)
    panel.set_xticks(range(len(race.phases)), [phase.replace(", ", "\n") for phase in race.phases])
    panel.set_ylabel("GB/s")
    panel.set_title(_size(race), loc="left", fontweight="bold")
    panel.grid(axis="y", color="#e6e6e6")
    panel.set_axisbelow(True)
