"""What the benchmarks share: programs that run in turn, and tables in Markdown."""

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


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
    times: dict[str, list[float]] = {name: [] for name in programs}
    order = random.Random(0)  # noqa: S311
    # No collection falls into one of them by chance.
    gc.disable()
    try:
        for _ in range(rounds):
            names = [name for name in programs if sum(times[name]) * calls < limit]
            for name in order.sample(names, len(names)):
                program = programs[name]
                start = time.perf_counter()
                for _ in range(calls):
                    program()
                times[name].append((time.perf_counter() - start) / calls)
            gc.collect()
    finally:
        gc.enable()
    return {name: statistics.median(each) for name, each in times.items()}


def seconds(value: float) -> str:
    """A time, in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown, with all columns but the first to the right."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
