"""What the benchmarks share: programs that run in turn, tables in Markdown, and plots."""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


def options(doc: str, **defaults: int) -> Any:
    """The options of a benchmark, on the command line.

    All have `--quick`, for fewer and smaller rows, and `--plots`, the folder to put plots in.
    Those of `defaults` are numbers.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plots", type=Path, metavar="FOLDER")
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N")
    return parser.parse_args()


# -- time --------------------------------------------------------------------------------


def in_turn(
    programs: Mapping[str, Callable[[], Any]],
    rounds: int,
    limit: float = 60.0,
    calls: int = 1,
) -> dict[str, float]:
    """The median time of a call of each program, in seconds.

    In each round all of them run once, in an order of its own, so that what else the machine
    does befalls all alike, and none always runs after the same other one. Those that are so
    slow that the rounds would take longer than `limit` seconds run in fewer of them. A time is
    that of so many `calls`, for what is too short to be timed by itself.
    """

    def timed(program: Callable[[], Any]) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            program()
        return (time.perf_counter() - start) / calls

    return sampled(
        {name: lambda program=program: timed(program) for name, program in programs.items()},
        rounds,
        limit / calls,
    )


def sampled(
    samples: Mapping[str, Callable[[], float]], rounds: int, limit: float = 60.0
) -> dict[str, float]:
    """As `in_turn`, of what returns a time by itself."""
    times: dict[str, list[float]] = {name: [] for name in samples}
    order = random.Random(0)  # noqa: S311
    # No collection falls into one of them by chance.
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            names = [name for name in samples if sum(times[name]) < limit]
            for name in order.sample(names, len(names)):
                # Python's stack comes in pieces, and calls across the end of one are slow.
                # Where that is differs between programs by chance, so all run at many depths.
                times[name].append(below(number % 24, samples[name]))
            gc.collect()
    finally:
        gc.enable()
    return {name: statistics.median(each) for name, each in times.items()}


def below(frames: int, function: Callable[[], float]) -> float:
    """Calls `function` with so many more frames on the stack."""
    return below(frames - 1, function) if frames else function()


# -- results -----------------------------------------------------------------------------


def seconds(value: float) -> str:
    """A time, in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{figure(value / size)} {unit}"
    return f"{figure(value / 1e-9)} ns"


def figure(value: float) -> str:
    """A number, to three digits."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown, with all columns but the first to the right."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(
        f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in line)} |" for line in lines
    )


class Claim(NamedTuple):
    """That a figure is no greater than `limit`, or, if `at_least`, no less."""

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


# Under this heading the report looks for what a benchmark claims.
CLAIMS = "## What is claimed"


def claims(all_of_them: Iterable[Claim]) -> str:
    """What is claimed of the figures, with what they are in this run."""
    rows = [
        (
            claim.what,
            figure(claim.value),
            f"{'at least' if claim.at_least else 'at most'} {figure(claim.limit)}",
            "yes" if claim.holds else "**no**",
        )
        for claim in all_of_them
    ]
    return f"{CLAIMS}\n\n{table(['', 'measured', 'claimed', 'holds'], rows)}"


# -- plots -------------------------------------------------------------------------------

# Colours that can be told apart by those who do not see all of them (M. Okabe and K. Ito,
# "Color universal design", 2008), without the yellow, which is too light on white.
_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"]

# Text and lines that can be read on white and on black.
_INK = "#808080"


def plot(
    folder: Path | None,
    name: str,
    x_label: str,
    y_label: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    level: float | None = None,
) -> str:
    """Draws lines over two logarithmic axes, and returns the picture in Markdown.

    - `folder`: where to put it. Without one there is no picture.
    - `level`: where to draw a horizontal line, such as a limit.
    """
    if folder is None:
        return ""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    # Words remain words, and the same figures give the same file.
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
    }
    with plt.rc_context(style):
        picture, axes = plt.subplots(figsize=(7, 4))
        for (label, points), colour in zip(lines.items(), _COLOURS, strict=False):
            axes.plot(*zip(*points, strict=True), "o-", label=label, color=colour, ms=4)
        if level is not None:
            axes.axhline(level, color=_INK, ls=":", lw=1)
        axes.set(xscale="log", yscale="log", xlabel=x_label, ylabel=y_label)
        axes.grid(color=_INK, alpha=0.25, lw=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
        picture.tight_layout()
        folder.mkdir(parents=True, exist_ok=True)
        picture.savefig(folder / f"{name}.svg", transparent=True, metadata={"Date": None})
        plt.close(picture)
    return f"![{y_label} against {x_label}]({name}.svg)\n"
