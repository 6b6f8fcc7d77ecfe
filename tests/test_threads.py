"""Threads that call at once get the right numbers, of one trace."""

import concurrent.futures
import gc
import threading
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax
from loopax import _body


THREADS = 8
XS = jnp.arange(4.0)


class Net(eqx.Module):
    weight: jax.Array
    activation: object = jnp.tanh


def counted(function):
    """The function, and a list with an entry for each time that it is traced."""
    traces = []

    def run(*arguments):
        traces.append(None)
        # Whoever waits for the interpreter comes in here, in the middle of the trace.
        time.sleep(0.001)
        return function(*arguments)

    return run, traces


def step(net, x):
    return eqx.tree_at(lambda n: n.weight, net, net.activation(net.weight * x)), x * net.weight


def advance(net):
    return step(net, jnp.asarray(0.5))[0]


def as_it_is(net):
    return net


def goes_on(net):
    return net.weight > 0.05


# Each takes what is counted and a Net, and returns what depends on both.
FUNCTIONS = {
    "scan": (step, lambda f, net: loopax.filter_scan(f, net, XS)),
    "checkpointed scan": (
        step,
        lambda f, net: loopax.filter_scan(f, net, XS, kind="checkpointed"),
    ),
    "while": (
        advance,
        lambda f, net: loopax.filter_while_loop(goes_on, f, net),
    ),
    "bounded while": (
        advance,
        lambda f, net: loopax.filter_while_loop(goes_on, f, net, max_steps=16, kind="bounded"),
    ),
    "fori": (
        lambda i, net: advance(net),
        lambda f, net: loopax.filter_fori_loop(0, 3, f, net),
    ),
    "cond": (advance, lambda f, net: loopax.filter_cond(net.weight > 0, f, as_it_is, net)),
    "switch": (
        advance,
        lambda f, net: loopax.filter_switch(jnp.asarray(1), [as_it_is, f, as_it_is], net),
    ),
    "map": (
        lambda pair: step(pair[0], pair[1])[1],
        lambda f, net: loopax.filter_map(
            f, (eqx.tree_at(lambda n: n.weight, net, net.weight * jnp.ones(4)), XS)
        ),
    ),
    "associative_scan": (
        lambda a, b: jax.tree.map(lambda x, y: x * y + y, a, b),
        lambda f, net: loopax.filter_associative_scan(f, XS * net.weight),
    ),
}

TRANSFORMS = {
    "eager": lambda run: run,
    "filter_jit": eqx.filter_jit,
    "grad": lambda run: eqx.filter_jit(eqx.filter_grad(lambda net: total(run(net)))),
    "vmap": lambda run: eqx.filter_jit(
        lambda net: eqx.filter_vmap(lambda w: run(with_weight(net, w)))(net.weight * XS)
    ),
}


def with_weight(net, weight):
    return eqx.tree_at(lambda n: n.weight, net, weight)


def total(tree):
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))


def together(run, arguments):
    """What each thread gets, all having started at once, while garbage is collected."""
    start = threading.Barrier(THREADS + 1)
    done = threading.Event()

    def call(argument):
        start.wait()
        return run(argument)

    def collect():
        start.wait()
        while not done.wait(0.01):
            gc.collect()

    with concurrent.futures.ThreadPoolExecutor(THREADS + 1) as pool:
        collecting = pool.submit(collect)
        calls = [pool.submit(call, argument) for argument in arguments]
        try:
            results = [each.result() for each in calls]
        finally:
            done.set()
        collecting.result()
    return results


def arrays(tree):
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


def assert_equal(found, expected):
    for a, b in zip(arrays(found), arrays(expected), strict=True):
        np.testing.assert_array_equal(a, b)


NETS = [Net(jnp.asarray(0.3 + 0.05 * k)) for k in range(THREADS)]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_threads_at_once_trace_no_oftener_than_one_alone(name, transform):
    if (name, transform) == ("while", "grad"):
        pytest.skip("has no gradient without a bound")
    function, call = FUNCTIONS[name]

    def run(function):
        return TRANSFORMS[transform](lambda net: call(function, net))

    alone, traces_alone = counted(function)
    expected = list(map(run(alone), NETS))
    shared, traces = counted(function)
    found = together(run(shared), NETS)
    for a, b in zip(found, expected, strict=True):
        assert_equal(a, b)
    assert len(traces) == len(traces_alone)


def test_threads_that_fill_the_cache_with_fresh_closures_get_their_own_numbers(monkeypatch):
    monkeypatch.setattr(_body, "_bodies", {})
    monkeypatch.setattr(_body, "_CAPACITY", 3)

    def run(number):
        got = []
        for k in range(5):
            value = jnp.asarray(float(100 * number + k))
            got.append(loopax.filter_scan(lambda c, x, a=value: (c + a, x * a), value, XS))
        return got

    found = together(run, range(THREADS))
    for number, results in enumerate(found):
        for k, (carry, ys) in enumerate(results):
            value = 100 * number + k
            assert carry == 5 * value
            np.testing.assert_array_equal(ys, np.arange(4) * value)
    assert len(_body._bodies) <= 3


def test_each_thread_is_told_of_its_own_mismatch():
    def change(carry, _):
        key = next(iter(carry))
        return {key: carry[key] + 1}, None

    def run(number):
        with pytest.raises(loopax.MismatchError) as caught:
            loopax.filter_scan(change, {f"of {number}": number}, XS, trace_numbers=False)
        return [each.path for each in caught.value.mismatches]

    found = together(run, range(THREADS))
    assert found == [[f'carry["of {n}"]'] for n in range(THREADS)]


def test_threads_write_to_buffers_of_their_own():
    def run(number):
        def write(buffer, i):
            return buffer.at[i].set(jnp.float32(number) * i), None

        return loopax.filter_scan(write, jnp.zeros(4), jnp.arange(4), buffers=lambda c: c)

    for number, (buffer, _) in enumerate(together(run, range(THREADS))):
        np.testing.assert_array_equal(buffer, np.arange(4) * number)
