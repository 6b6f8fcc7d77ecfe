"""What gradients through loops cost, beside the alternatives: `python benchmarks/reverse.py`.

For each row the competitors are compiled and run in turn, in one process: the time of the
gradient, the temporary memory of the compiled program, and the time to trace, lower and compile
it. Each is shown as it is and as a ratio to the first of the row. Medians over rounds in which
all of them alternate. Before that they are checked to compute the same.

The body is `x -> tanh(W @ x)`, in float32, and the gradient that of `sum(x**2)` of the last `x`
with respect to `W` and the first `x`.
"""

import functools
import gc
import math
import re
import statistics
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from measure import Claim, claims, figure, options, plot, table

import loopax


# With this seed `x` settles neither at zero nor at a fixed point of zero gradient, at any of
# the widths, so that there is something to compare.
SEED = 5

# In seconds. What one call may take to be timed in all rounds, and to be timed at all; what a
# compilation may take to be repeated; about how long one sample is; what one row may take.
SLOW, LIMIT = 0.4, 6.0
SLOW_COMPILE = 1.5
SAMPLE = 0.02
BUDGET = 4.0


class Entry(NamedTuple):
    """One competitor of a row.

    - `make`: makes the function, a new one each time, so that nothing remembers it.
    - `same`: entries of a row for which this is equal compute the same.
    - `skip`: why it does not take part.
    """

    name: str
    make: Callable[[], Callable[..., Any]] | None = None
    args: tuple[Any, ...] = ()
    same: Hashable = None
    skip: str = ""


class Cost(NamedTuple):
    """In seconds and bytes."""

    time: float
    memory: int
    compile: float


# -- loops: `(step, x, stop, bound) -> x` ------------------------------------------------

Loop = Callable[..., Any]


def ours(**options: Any) -> Loop:
    def run(step: Any, x: Any, stop: Any, bound: int) -> Any:
        return loopax.filter_while_loop(
            lambda s: s[0] < stop,
            lambda s: (s[0] + 1, step(s[1])),
            (jnp.int32(0), x),
            max_steps=bound,
            **options,
        )[1]

    return run


def equinox(all_saved: bool = False, kind: str = "checkpointed") -> Loop:
    def run(step: Any, x: Any, stop: Any, bound: int) -> Any:
        return eqxi.while_loop(
            lambda s: s[0] < stop,
            lambda s: (s[0] + 1, step(s[1])),
            (jnp.int32(0), x),
            max_steps=bound,
            kind=kind,
            checkpoints=bound if all_saved else None,
        )[1]

    return run


def scan_of_cond(step: Any, x: Any, stop: Any, bound: int) -> Any:
    def one(x: Any, i: Any) -> Any:
        return lax.cond(i < stop, step, lambda x: x, x), None

    return lax.scan(one, x, jnp.arange(bound))[0]


def ours_scan(**options: Any) -> Loop:
    def run(step: Any, x: Any, stop: Any, bound: int) -> Any:
        return loopax.filter_scan(lambda x, _: (step(x), None), x, None, bound, **options)[0]

    return run


def equinox_scan(all_saved: bool = False) -> Loop:
    def run(step: Any, x: Any, stop: Any, bound: int) -> Any:
        return eqxi.scan(
            lambda x, _: (step(x), None),
            x,
            None,
            bound,
            kind="checkpointed",
            checkpoints="all" if all_saved else None,
        )[0]

    return run


def lax_scan(step: Any, x: Any, stop: Any, bound: int) -> Any:
    return lax.scan(lambda x, _: (step(x), None), x, None, bound)[0]


def checkpointed_scan(step: Any, x: Any, stop: Any, bound: int) -> Any:
    return lax.scan(jax.checkpoint(lambda x, _: (step(x), None)), x, None, bound)[0]


def nested_scan(step: Any, x: Any, stop: Any, bound: int) -> Any:
    inner = _divisor(bound)

    @jax.checkpoint
    def steps(x: Any, _: Any) -> Any:
        return lax.scan(lambda x, _: (step(x), None), x, None, inner)[0], None

    return lax.scan(steps, x, None, bound // inner)[0]


def haliax_scan(step: Any, x: Any, stop: Any, bound: int) -> Any:
    """`haliax.fold(..., remat="nested")`, as written in haliax 1.4.

    haliax 1.3 has no nested checkpointing, and neither can be imported with every JAX that
    this library supports. The steps are those of its `scan` and `multilevel_scan`, without
    the names of axes: the step keeps its carry by name, and the outer scan is unrolled.
    """
    outer = _divisor(bound)
    policy = jax.checkpoint_policies.save_only_these_names("carry")

    @functools.partial(eqx.filter_checkpoint, policy=policy, prevent_cse=False)
    def one(x: Any, _: Any) -> Any:
        return step(checkpoint_name(x, "carry")), None

    xs = jnp.arange(bound).reshape(outer, bound // outer)
    return lax.scan(jax.remat(functools.partial(lax.scan, one)), x, xs, unroll=True)[0]


def _divisor(length: int) -> int:
    """The divisor that is closest to the square root."""
    root = math.sqrt(length)
    divisors = [n for n in range(1, length + 1) if length % n == 0]
    return min(divisors, key=lambda n: abs(n - root))


# -- gradients ---------------------------------------------------------------------------


def weights(width: int) -> tuple[Any, Any]:
    key_w, key_x = jax.random.split(jax.random.key(SEED))
    w = jax.random.normal(key_w, (width, width)) / math.sqrt(width)
    return w, jax.random.normal(key_x, (width,))


def loss_of(run: Loop, bound: int) -> Callable[..., Any]:
    def loss(w: Any, x: Any, stop: Any) -> Any:
        return jnp.sum(run(lambda x: jnp.tanh(w @ x), x, stop, bound) ** 2)

    return loss


def gradient(run: Loop, bound: int) -> Callable[[], Callable[..., Any]]:
    return lambda: jax.grad(loss_of(run, bound), (0, 1))


def vmap_of_grad(run: Loop, bound: int) -> Callable[[], Callable[..., Any]]:
    return lambda: jax.vmap(jax.grad(loss_of(run, bound), (0, 1)), (None, 0, 0))


def grad_of_vmap(run: Loop, bound: int) -> Callable[[], Callable[..., Any]]:
    def make() -> Callable[..., Any]:
        lanes = jax.vmap(loss_of(run, bound), (None, 0, 0))
        return jax.grad(lambda w, x, stop: jnp.sum(lanes(w, x, stop)), (0, 1))

    return make


def forward(run: Loop, bound: int) -> Callable[[], Callable[..., Any]]:
    return lambda: lambda w, x, stop: run(lambda x: jnp.tanh(w @ x), x, stop, bound)


# -- rows --------------------------------------------------------------------------------

WHILE = {
    "loopax": ours(),
    'loopax, checkpoints="all"': ours(checkpoints="all"),
    "loopax, bounded": ours(kind="bounded"),
    "equinox": equinox(),
    "equinox, checkpoints=max_steps": equinox(all_saved=True),
    "equinox, bounded": equinox(kind="bounded"),
    "lax.scan of lax.cond": scan_of_cond,
}
FIXED = {
    "lax.scan": lax_scan,
    "lax.scan of jax.checkpoint": checkpointed_scan,
    "jax.checkpoint of lax.scan, in lax.scan": nested_scan,
    "haliax, nested": haliax_scan,
}


def while_row(width: int, bound: int, stop: int | None = None, **skips: str) -> list[Entry]:
    w, x = weights(width)
    args = (w, x, jnp.int32(bound if stop is None else stop))
    loops = WHILE if stop is not None else {**WHILE, **FIXED}
    entries = []
    for name, run in loops.items():
        skip = skips.get(run.__name__, "")
        if run in (nested_scan, haliax_scan) and not 2 * _divisor(bound) ** 2 > bound:
            skip = f"{bound} has no divisor near its square root"
        entries.append(Entry(name, gradient(run, bound), args, skip=skip))
    return entries


def early_row(bound: int, stop: int) -> list[Entry]:
    w, x = weights(16)
    return [
        Entry(
            f"{name}, {what}, {steps} steps",
            how(run, bound),
            (w, x, jnp.int32(steps)),
            same=(what, steps),
        )
        for what, how in (("gradient", gradient), ("forward", forward))
        for name, run in (("loopax", ours()), ("equinox", equinox()))
        for steps in (stop, bound)
    ]


def lanes_row(how: Callable[..., Any], lanes: int, bound: int) -> list[Entry]:
    w, _ = weights(16)
    xs = jax.random.normal(jax.random.key(SEED), (lanes, 16))
    # In no order.
    stops = np.random.default_rng(0).permutation(np.linspace(10, bound, lanes).astype(np.int32))
    args = (w, xs, jnp.asarray(stops))
    return [Entry(name, how(run, bound), args) for name, run in WHILE.items()]


def length_row(prime: int, square: int) -> list[Entry]:
    w, x = weights(16)
    loops = {
        'loopax, kind="checkpointed"': ours_scan(kind="checkpointed"),
        'loopax, checkpoints="all"': ours_scan(kind="checkpointed", checkpoints="all"),
        'loopax, kind="bounded"': ours_scan(kind="bounded"),
        "equinox": equinox_scan(),
        'equinox, checkpoints="all"': equinox_scan(all_saved=True),
        **FIXED,
    }
    entries = []
    for name, run in loops.items():
        for length in (prime, square):
            nested = run in (nested_scan, haliax_scan) and length == prime
            skip = f"{length} is prime" if nested else ""
            make, args = gradient(run, length), (w, x, jnp.int32(length))
            entries.append(Entry(f"{name}, {length}", make, args, length, skip))
    return entries


def filled_by_ours(kind: str) -> Callable[..., Any]:
    def run(step: Any, x: Any, buffer: Any, numbers: Any) -> Any:
        carry, _ = loopax.filter_scan(
            step, (x, buffer), numbers, kind=kind, buffers=lambda carry: carry[1]
        )
        return carry[1]

    return run


def filled_by_lax(step: Any, x: Any, buffer: Any, numbers: Any) -> Any:
    return lax.scan(step, (x, buffer), numbers)[0][1]


def filled_by_equinox(step: Any, x: Any, buffer: Any, numbers: Any) -> Any:
    length = len(numbers)

    def one(state: Any) -> Any:
        i, x, buffer = state
        (x, buffer), _ = step((x, buffer), i + numbers[0])
        return i + 1, x, buffer

    return eqxi.while_loop(
        lambda state: True,
        one,
        (jnp.int32(0), x, buffer),
        max_steps=length,
        kind="checkpointed",
        checkpoints=length,
        buffers=lambda state: state[2],
    )[2]


def buffer_gradient(run: Any, n: int, reads: bool) -> Callable[[], Callable[..., Any]]:
    def make() -> Callable[..., Any]:
        def loss(w: Any, x: Any) -> Any:
            def step(carry: Any, i: Any) -> Any:
                x, buffer = carry
                x = jnp.tanh(w @ (buffer[i - 1] if reads else x))
                return (x, buffer.at[i].set(x)), None

            buffer = jnp.zeros((n, len(x))).at[0].set(x)
            # Numpy's, so that nobody has to find out what is constant.
            return jnp.sum(run(step, x, buffer, np.arange(1, n, dtype=np.int32)) ** 2)

        return jax.grad(loss, (0, 1))

    return make


def buffer_row(width: int, n: int, reads: bool) -> list[Entry]:
    args = weights(width)
    loops = {
        'loopax, buffers, kind="lax"': filled_by_ours(kind="lax"),
        'loopax, buffers, kind="checkpointed"': filled_by_ours(kind="checkpointed"),
        "lax.scan, .at[i].set": filled_by_lax,
        "equinox, buffers, checkpoints=n": filled_by_equinox,
    }
    entries = []
    for name, run in loops.items():
        # "all buffers will be write-only whilst inside the loop"
        skip = "its buffers cannot be read" if reads and run is filled_by_equinox else ""
        for times, label in ((1, "n"), (2, "2n")):
            make = buffer_gradient(run, times * n, reads)
            entries.append(Entry(f"{name}, {label}", make, args, label, skip))
    return entries


def rows(quick: bool) -> dict[str, Callable[[], list[Entry]]]:
    n = 4000
    unrolled = "the outer scan is unrolled: minutes to compile"
    each = {
        "256 steps": lambda: while_row(16, 256),
        "1000 steps": lambda: while_row(16, 1000),
        "4096 steps": lambda: while_row(16, 4096),
        "65536 steps": lambda: while_row(16, 65536, haliax_scan=unrolled),
        "width 4, 1000 steps": lambda: while_row(4, 1000),
        "width 256, 1000 steps": lambda: while_row(256, 1000),
        "width 1024, 256 steps": lambda: while_row(1024, 256),
        "stop at 50 of 1000": lambda: while_row(16, 1000, 50),
        "stop at 300 of 4096": lambda: while_row(16, 4096, 300),
        "stop at 300 or 4096 of 4096": lambda: early_row(4096, 300),
        "vmap of grad, 64 lanes of 10 to 1024": lambda: lanes_row(vmap_of_grad, 64, 1024),
        "grad of vmap, 64 lanes of 10 to 1024": lambda: lanes_row(grad_of_vmap, 64, 1024),
        "scan of 4093 or 4096": lambda: length_row(4093, 4096),
    }
    for width in (16, 64):
        for reads in (False, True):
            name = f"buffer {'read' if reads else 'written'}, n = {n}, width {width}"
            each[name] = functools.partial(buffer_row, width, n, reads)
    if quick:
        each = {name: each[name] for name in list(each)[:2]}
    return each


# -- measuring ---------------------------------------------------------------------------


def timed(function: Callable[[], Any], calls: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(function())
    return (time.perf_counter() - start) / calls


def compiled(entry: Entry) -> tuple[float, Any]:
    gc.collect()
    start = time.perf_counter()
    program = jax.jit(entry.make()).lower(*entry.args).compile()
    return time.perf_counter() - start, program


def measured(
    entries: list[Entry], rounds: int, compilations: int
) -> tuple[dict[str, Cost], dict[str, str]]:
    """The costs, and remarks on those that have none or less of it."""
    notes = {entry.name: entry.skip for entry in entries if entry.skip}
    entries = [entry for entry in entries if not entry.skip]
    compiling = {entry.name: [] for entry in entries}
    programs = {}
    for number in range(compilations):
        for entry in entries:
            if number and compiling[entry.name][0] > SLOW_COMPILE:
                notes[entry.name] = "compiled once"
                continue
            seconds, programs[entry.name] = compiled(entry)
            compiling[entry.name].append(seconds)

    calls, results = {}, {}
    for entry in entries:
        call = functools.partial(programs[entry.name], *entry.args)
        results[entry.name] = jax.tree.map(np.asarray, call())
        calls[entry.name] = call
    check(entries, results)

    times = {name: [] for name in calls}
    first = {name: timed(call) for name, call in calls.items()}
    for name, seconds in first.items():
        if seconds > LIMIT:
            notes[name] = "one call only"
            times[name].append(seconds)
    usual = {name: seconds for name, seconds in first.items() if seconds <= LIMIT}
    each = {name: max(1, round(SAMPLE / seconds)) for name, seconds in usual.items()}
    fast = sum(seconds * each[name] for name, seconds in usual.items() if seconds <= SLOW)
    rounds = max(3, min(rounds, int(BUDGET / max(fast, 1e-9))))
    names = list(usual)
    for number in range(rounds):
        gc.collect()
        # Another one begins each round, so that nobody always follows the same.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if usual[name] <= SLOW or number < 3:
                times[name].append(timed(calls[name], each[name]))
    costs = {
        name: Cost(
            statistics.median(times[name]),
            programs[name].memory_analysis().temp_size_in_bytes,
            statistics.median(compiling[name]),
        )
        for name in calls
    }
    return costs, notes


def check(entries: list[Entry], results: dict[str, Any]) -> None:
    """Compares what was computed."""
    firsts: dict[Any, tuple[str, Any]] = {}
    for entry in entries:
        result = jax.tree.leaves(results[entry.name])
        name, expected = firsts.setdefault(entry.same, (entry.name, result))
        for a, b in zip(result, expected, strict=True):
            scale = np.abs(b).max()
            if not np.allclose(a, b, rtol=1e-3, atol=1e-3 * scale):
                raise SystemExit(f"{entry.name} and {name} do not compute the same")
        if not np.abs(result[0]).max() > 1e-6:
            raise SystemExit(f"{entry.name}: nothing to compare, it is all zero")


# -- showing -----------------------------------------------------------------------------

HEAD = ("", "ms", "ratio", "MB", "ratio", "compile ms", "ratio", "")


def show(title: str, names: list[str], costs: dict[str, Cost], notes: dict[str, str]) -> None:
    base = costs[names[0]]
    lines = []
    for name in names:
        line = [name]
        if name in costs:
            for value, unit, of in zip(costs[name], (1e3, 1e-6, 1e3), base, strict=True):
                line += [figure(value * unit), figure(value / of) if of else "-"]
        else:
            line += ["-"] * 6
        lines.append([*line, notes.get(name, "")])
    print(f"## {title}\n\n{table(HEAD, lines)}\n", flush=True)


def plots(found: dict[str, dict[str, Cost]], folder: Any) -> None:
    """Time and memory against the number of steps."""
    lines: dict[str, dict[str, list[tuple[float, float]]]] = {"time": {}, "memory": {}}
    for row, costs in found.items():
        if re.fullmatch(r"\d+ steps", row):
            for name in PLOTTED:
                if name in costs:
                    steps = int(row.split()[0])
                    for of, unit in (("time", 1e3), ("memory", 1e-6)):
                        value = unit * getattr(costs[name], of)
                        lines[of].setdefault(name, []).append((steps, value))
    for of, unit in (("time", "ms"), ("memory", "MB")):
        label = f"{of} of the gradient ({unit})"
        print(plot(folder, f"reverse-{of}", "steps", label, lines[of]))


PLOTTED = (
    "loopax",
    "loopax, bounded",
    "equinox",
    "equinox, bounded",
    "lax.scan",
    "jax.checkpoint of lax.scan, in lax.scan",
)


# -- claims ------------------------------------------------------------------------------


def claimed(found: dict[str, dict[str, Cost]]) -> list[Claim]:
    """What is claimed of the rows that were measured."""
    out = []

    def claim(
        what: str, row: str, left: str, right: str, limit: float, of: str = "time"
    ) -> None:
        costs = found.get(row, {})
        if left in costs and right in costs:
            one, other = (getattr(costs[name], of) for name in (left, right))
            out.append(Claim(f"{what}: {of}", one / other if other else math.inf, limit))

    for row in ("1000 steps", "4096 steps"):
        for of, limit in (("time", 1 / 3), ("memory", 1), ("compile", 1 / 2)):
            claim(f"{row}: against equinox", row, "loopax", "equinox", limit, of)
    for row in found:
        if "lanes" in row:
            for of, limit in (("time", 1 / 2), ("memory", 1)):
                claim(f"{row}: against equinox", row, "loopax", "equinox", limit, of)
    row = "width 256, 1000 steps"
    claim(f"{row}: against equinox", row, "loopax", "equinox", 1)
    ours_all, theirs_all = 'loopax, checkpoints="all"', "equinox, checkpoints=max_steps"
    for row in found:
        claim(f"{row}: all saved, against equinox", row, ours_all, theirs_all, 1)
    row = "stop at 300 or 4096 of 4096"
    for what in ("gradient", "forward"):
        left, right = (f"loopax, {what}, {steps} steps" for steps in (300, 4096))
        claim(f"300 of 4096 steps against all, {what}", row, left, right, 1 / 10)
    for row in found:
        if not row.startswith("buffer"):
            continue
        for kind in ("lax", "checkpointed"):
            name, lax_name = f'loopax, buffers, kind="{kind}"', "lax.scan, .at[i].set"
            what = f'{row}: kind="{kind}"'
            claim(f"{what}, 2n against n", row, f"{name}, 2n", f"{name}, n", 2.3)
            label, limit = ("2n", 1 / 10) if "buffer read" in row else ("n", 1 / 20)
            what = f"{what}, against lax.scan at {label}"
            claim(what, row, f"{name}, {label}", f"{lax_name}, {label}", limit)
    row, name = "scan of 4093 or 4096", 'loopax, kind="checkpointed"'
    for what, right, of, limit in (
        ("against 4096", f"{name}, 4096", "memory", 1.2),
        ("against lax.scan", "lax.scan, 4093", "memory", 1 / 20),
        ("against lax.scan", "lax.scan, 4093", "time", 2),
    ):
        claim(f"scan of 4093 {what}", row, f"{name}, 4093", right, limit, of)
    return out


def main() -> None:
    chosen = options(__doc__)
    rounds, compilations = (5, 1) if chosen.quick else (21, 3)
    # What is imported and set up at the first use counts for nobody.
    for run in (*WHILE.values(), *FIXED.values()):
        w, x = weights(4)
        compiled(Entry("", gradient(run, 16), (w, x, np.int32(16))))
    gc.disable()
    found = {}
    for row, make in rows(chosen.quick).items():
        entries = make()
        found[row], notes = measured(entries, rounds, compilations)
        show(row, [entry.name for entry in entries], found[row], notes)
    plots(found, chosen.plots)
    print(claims(claimed(found)))


if __name__ == "__main__":
    main()
