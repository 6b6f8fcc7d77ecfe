"""Calls with fresh closures leave nothing behind."""

import collections
import gc
import os
import resource

import jax
import jax.numpy as jnp
import pytest

import loopax
from loopax import _body, _call, _split, _token


X = jnp.arange(3.0)
XS = jnp.ones((2, 3))

# Each is given a value that the body closes over.
FUNCTIONS = {
    "scan": lambda a: loopax.filter_scan(lambda c, x: (c * a, x + a), X, XS),
    "checkpointed scan": lambda a: loopax.filter_scan(
        lambda c, x: (c * a, x + a), X, XS, kind="checkpointed"
    ),
    "while": lambda a: loopax.filter_while_loop(lambda c: c[0] + a[0] < 99, lambda c: c + 1, X),
    "fori": lambda a: loopax.filter_fori_loop(0, 2, lambda i, c: c * a, X),
    "cond": lambda a: loopax.filter_cond(a[0] > 0, lambda x: x + a, lambda x: x - a, X),
    "switch": lambda a: loopax.filter_switch(
        jnp.asarray(1), [lambda x: x, lambda x: x + a, lambda x: x - a], X
    ),
    "map": lambda a: loopax.filter_map(lambda x: x * a, XS),
    "associative_scan": lambda a: loopax.filter_associative_scan(lambda x, y: x + y * a, XS),
}


class Broken(Exception):
    pass


def raises(_):
    raise Broken


WRONG = {
    "mismatch": (
        loopax.MismatchError,
        lambda a: loopax.filter_scan(lambda c, _: ({**c, "n": 1}, None), {"a": a, "n": 0}, XS),
    ),
    "broken body": (
        Broken,
        lambda a: loopax.filter_scan(lambda c, x: raises(a), X, XS),
    ),
    "branches that differ": (
        loopax.MismatchError,
        lambda a: loopax.filter_cond(a[0] > 0, lambda x: x + a, lambda x: "a", X),
    ),
}

KINDS = (_body.Body, _body.Step, _call.Call, _split.Static, _split.Arrays, _token.Tokens)


def left():
    """What of ours is alive, and how many arrays."""
    gc.collect()
    found = collections.Counter(
        type(each).__name__ for each in gc.get_objects() if isinstance(each, KINDS)
    )
    found["bodies"] = len(_body._bodies)
    found["arrays"] = len(jax.live_arrays())
    return found


def fresh(k):
    return X + k


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_is_left_of_calls_with_fresh_closures(name):
    def run(k):
        a = fresh(k)
        jax.eval_shape(lambda: FUNCTIONS[name](a))
        if k % 20 == 0:
            FUNCTIONS[name](a)

    for k in range(3):
        run(k)
    before = left()
    for k in range(100):
        run(k)
    assert left() == before


@pytest.mark.parametrize("name", WRONG)
def test_nothing_is_left_of_calls_that_fail(name):
    error, call = WRONG[name]

    def run(k):
        with pytest.raises(error):
            call(fresh(k))

    for k in range(3):
        run(k)
    before = left()
    for k in range(50):
        run(k)
    assert left() == before


def test_of_a_body_that_raises_no_more_is_left_than_by_lax():
    # JAX keeps what a trace that failed had made a constant of.
    def growth(scan):
        before = left()["arrays"]
        for k in range(20):
            a = fresh(k)
            with pytest.raises(Broken):
                scan(lambda c, x, a=a: raises(c * a), X, XS)
        return left()["arrays"] - before

    for scan in (jax.lax.scan, loopax.filter_scan):
        growth(scan)
    assert growth(loopax.filter_scan) <= growth(jax.lax.scan)


CALLS = int(os.environ.get("LOOPAX_CALLS", "0"))


def resident():
    """The memory of this process in MB."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


@pytest.mark.skipif(CALLS < 2000, reason="minutes: LOOPAX_CALLS=20000")
def test_memory_does_not_grow_with_fresh_closures():
    def run(k):
        a = fresh(k)
        loopax.filter_scan(lambda c, x: (c * a, x + a), X, XS)

    for k in range(1000):
        run(k)
    before = resident()
    for k in range(CALLS - 1000):
        run(k)
    assert resident() - before < 10
