"""PNG pictures of evaluations and runs. Nothing here computes a figure; it draws what the reports hold.

matplotlib is imported inside, with the Agg canvas and no pyplot: no display, no global state.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .evaluate import EvalReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#9aa5b1", "#1f6feb", "#d9480f", "#2b8a3e", "#862e9c", "#e0a100", "#0b7285", "#c2255c")


def draw_evaluation(reports: Mapping[str, EvalReport], path: Path) -> None:
    """Per-position acceptance, and how many tokens each verification produced, for one or more named reports."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(10, 3.8)
    left, right = _axes(figure, 1, 2)
    for (name, report), colour in zip(reports.items(), _colours(len(reports)), strict=True):
        slots = range(1, report.block_size)
        label = f"{name}: {report.pooled:.2f} tokens a verification"
        left.plot(slots, report.per_position, marker="o", color=colour, label=label)
    left.set(title="Drafted slots accepted", xlabel="slots 1 to k", ylabel="share of verifications", ylim=(0, 1))
    left.legend(frameon=False, fontsize=8)
    _produced(right, reports)
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _save(figure, path)


def _produced(axes: "Axes", reports: Mapping[str, EvalReport]) -> None:
    width = 0.8 / len(reports)
    for number, ((name, report), colour) in enumerate(zip(reports.items(), _colours(len(reports)), strict=True)):
        produced = [n for request in report.requests for n in request.produced]
        sizes = range(1, report.block_size + 1)
        shares = [produced.count(n) / max(len(produced), 1) for n in sizes]
        axes.bar([n + (number + 0.5) * width - 0.4 for n in sizes], shares, width, color=colour, label=name)
    axes.set(
        title="Acceptance length, bonus token counted",
        xlabel="tokens produced by a verification",
        ylabel="share of verifications",
    )
    axes.legend(frameon=False, fontsize=8)


def draw_training(steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Loss per step, and tau and tau_chain of the held-out rows where the run evaluated.

    `steps`: mappings with step and loss; `evaluations`: with step, tau and tau_chain.
    """
    figure = _figure(10, 3.8)
    left, right = _axes(figure, 1, 2)
    x, loss = [row["step"] for row in steps], [row["loss"] for row in steps]
    left.plot(x, loss, color=COLOURS[0], linewidth=0.8, label="each step")
    left.plot(x, _smooth(loss), color=COLOURS[1], label="smoothed")
    left.set(title="Training loss", xlabel="step", ylabel="cross-entropy, decayed over slots")
    left.legend(frameon=False, fontsize=8)
    if any("tau" in row for row in steps):
        known = [(row["step"], row["tau"]) for row in steps if "tau" in row]
        right.plot([s for s, _ in known], _smooth([t for _, t in known]), color=COLOURS[0], label="tau, training rows")
    for key, colour in (("tau", COLOURS[1]), ("tau_chain", COLOURS[2])):
        known = [(row["step"], row[key]) for row in evaluations if key in row]
        right.plot(
            [s for s, _ in known], [t for _, t in known], marker="o", color=colour, label=f"{key}, held-out rows"
        )
    right.set(title="Expected acceptance length", xlabel="step", ylabel="tokens, bonus token counted")
    right.legend(frameon=False, fontsize=8)
    _save(figure, path)


def draw_timeline(
    samples: Sequence[Mapping[str, Any]],
    events: Sequence[tuple[float, str]],
    path: Path,
) -> None:
    """A run over time. `samples`: mappings with `t` (seconds), `trainer` and one entry a worker under `workers`
    (records/s), and `ready` (records in the rings); `events`: (seconds, what happened), marked by lines."""
    figure = _figure(10, 5)
    upper, lower = _axes(figure, 2, 1)
    times = [sample["t"] for sample in samples]
    names = sorted({name for sample in samples for name in sample["workers"]})
    for name, colour in zip(names, _colours(len(names) + 1)[1:], strict=True):
        rates = [sample["workers"].get(name, 0.0) for sample in samples]
        upper.plot(times, rates, color=colour, label=f"target worker {name}")
    upper.plot(times, [sample["trainer"] for sample in samples], color="black", linewidth=1.2, label="trainer")
    upper.set(title="Hidden-state records made and trained", ylabel="records/s")
    lower.step(times, [sample["ready"] for sample in samples], color=COLOURS[1], where="post")
    lower.set(title="Records waiting in the rings", xlabel="seconds", ylabel="READY slots")
    for axes in (upper, lower):
        for at, _ in events:
            axes.axvline(at, color=COLOURS[2], linestyle="--", linewidth=1)
    upper.set_ylim(0, 1.25 * max(upper.get_ylim()[1], 0.1))  # room for what happened, above the curves
    for number, (at, what) in enumerate(events):
        left = number % 2 == 0  # a kill is told before its line, the return behind its own
        upper.annotate(
            what,
            (at, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if left else 4, -4),
            textcoords="offset points",
            va="top",
            ha="right" if left else "left",
            fontsize=8,
            color=COLOURS[2],
        )
    upper.legend(frameon=False, fontsize=8, loc="center left")
    _save(figure, path)


def _smooth(values: Sequence[float], keep: float = 0.95) -> list[float]:
    """Exponential moving average, corrected for its start."""
    mean, weight, found = 0.0, 0.0, []
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        found.append(mean / weight)
    return found


def _colours(count: int) -> list[str]:
    return [COLOURS[(i if count > 1 else 1) % len(COLOURS)] for i in range(count)]


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _axes(figure: "Figure", rows: int, columns: int) -> "Sequence[Axes]":
    grid = figure.subplots(rows, columns, sharex=rows > 1)
    for axes in grid:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return list(grid)


def _save(figure: "Figure", path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
