"""Loops over many devices: sharded by `jit`, by explicit axes, and by hand."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from versions import NEW_NAMES, advice_to_vary, to_vary

import loopax


class Net(eqx.Module):
    weight: jax.Array
    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, x):
        return self.activation(x @ self.weight)


WEIGHT = np.eye(4, dtype=np.float32) / 2
X = np.arange(32, dtype=np.float32).reshape(8, 4) / 10
RING = [(i, (i + 1) % 8) for i in range(8)]


def mesh(kind):
    return jax.make_mesh((8,), ("data",), axis_types=(kind,))


def moved(carry):
    net, x = carry
    return net, net(x)


def scan(options):
    def run(net, x):
        (_, x), ys = loopax.filter_scan(
            lambda carry, _: (moved(carry), carry[1]), (net, x), None, length=4, **options
        )
        return x + ys.sum(0)

    return run


def fori(options):
    return lambda net, x: loopax.filter_fori_loop(
        0, 4, lambda i, carry: moved(carry), (net, x), **options
    )[1]


def counted(carry):
    return (*moved(carry[:2]), carry[2] + 1)


def while_loop(options):
    return lambda net, x: loopax.filter_while_loop(
        lambda carry: carry[2] < 4,
        counted,
        (net, x, jnp.asarray(0)),
        max_steps=6,
        **options,
    )[1]


def until(net, x):
    carry, ys = loopax.filter_scan(
        lambda carry, _: (counted(carry), carry[1]),
        (net, x, jnp.asarray(0)),
        None,
        length=6,
        until=lambda carry: carry[2] >= 4,
    )
    return carry[1] + ys.sum(0)


def buffers(net, x):
    def body(i, carry):
        x = carry["net"](carry["x"])
        return {"net": carry["net"], "x": x, "rows": carry["rows"].at[i].set(x)}

    carry = {"net": net, "x": x, "rows": x * jnp.zeros((4, 1, 1))}
    out = loopax.filter_fori_loop(0, 4, body, carry, buffers=lambda carry: carry["rows"])
    return out["rows"].sum(0)


def cond(net, x):
    yes = net.weight[0, 0] > 0
    _, x = loopax.filter_cond(yes, moved, lambda carry: carry, (net, x))
    return x


def switch(net, x):
    index = jnp.asarray(1)
    _, x = loopax.filter_switch(index, [lambda carry: carry, moved], (net, x))
    return x


def mapped(net, x):
    return loopax.filter_map(lambda column: net.activation(2 * column), x.T).T @ net.weight


def associative(net, x):
    x = x @ net.weight
    elements = (x.T, net.activation)
    return loopax.filter_associative_scan(lambda a, b: (a[0] * b[0] + b[0], a[1]), elements)[
        0
    ].T


KINDS = [{"kind": kind} for kind in ("lax", "checkpointed", "bounded")]
PROGRAMS = {
    **{f"scan {each['kind']}": scan(each) for each in KINDS},
    **{f"fori {each['kind']}": fori(each) for each in KINDS},
    **{f"while {each['kind']}": while_loop(each) for each in KINDS[1:]},
    "until": until,
    "buffers": buffers,
    "cond": cond,
    "switch": switch,
    "map": mapped,
    "associative": associative,
}


def with_gradients(program):
    def loss(weight, x):
        out = program(Net(weight, jnp.tanh), x)
        return jnp.sum(out**2), out

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


def by_hand(program, activation=jnp.tanh):
    def loss(weight, x):
        out = program(Net(weight, activation), x)
        # A row from the next device, and all rows: both have to be differentiated through.
        next_one = jax.lax.ppermute(out, "data", RING)
        everything = jax.lax.all_gather(out, "data", tiled=True)
        per_device = jnp.sum(out * next_one) + jnp.sum(out) * jnp.sum(everything) / 8
        return jax.lax.psum(per_device, "data"), out

    return jax.value_and_grad(loss, (0, 1), has_aux=True)


def expected_by_hand(program, activation=jnp.tanh):
    def loss(weight, x):
        out = program(Net(weight, activation), x)
        total = jnp.sum(out)
        return jnp.sum(out * jnp.roll(out, 1, 0)) + total**2 / 8, out

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


def assert_close(one, other):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), one, other
    )


EXPLICIT = "JAX 0.7 has rules for explicit axes that are not yet those of later versions"


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_sharded_batch(name, kind):
    if kind == AxisType.Explicit and not NEW_NAMES:
        pytest.skip(EXPLICIT)
    expected = with_gradients(PROGRAMS[name])(WEIGHT, X)
    devices = mesh(kind)
    with jax.set_mesh(devices):
        rows = NamedSharding(devices, P("data", None))
        x = jax.device_put(X, rows)
        weight = jax.device_put(WEIGHT, NamedSharding(devices, P()))
        found = with_gradients(PROGRAMS[name])(weight, x)
        assert_close(found, expected)
        (_, out), (_, of_x) = found
        if kind is AxisType.Explicit:
            assert jax.typeof(out) == jax.typeof(x)
            assert jax.typeof(of_x) == jax.typeof(x)
        assert out.sharding.is_equivalent_to(rows, 2)


def check_by_hand(program, activation=jnp.tanh, expected_activation=jnp.tanh):
    specs = (P(), P("data"))
    run = jax.shard_map(
        by_hand(program, activation),
        mesh=mesh(AxisType.Auto),
        in_specs=specs,
        out_specs=(specs, specs),
    )
    expected = expected_by_hand(program, expected_activation)(WEIGHT, X)
    assert_close(jax.jit(run)(WEIGHT, X), expected)


@pytest.mark.parametrize("name", PROGRAMS)
def test_shard_map(name):
    check_by_hand(PROGRAMS[name])


def mixing(x):
    """Of the rows of a device, with that before and with the mean of all."""
    return jnp.tanh(x) + jax.lax.ppermute(x, "data", RING) / 2 + jax.lax.pmean(x, "data")


def mixing_on_one_device(x):
    return jnp.tanh(x) + jnp.roll(x, 1, 0) / 2 + x.mean(0, keepdims=True)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "associative"])
def test_collectives_in_the_body(name):
    check_by_hand(PROGRAMS[name], mixing, mixing_on_one_device)


@pytest.mark.skipif(not NEW_NAMES, reason=EXPLICIT)
def test_one_loop_under_one_mesh_after_another():
    """What is known of types under manual axes is not taken for those under others."""
    program = while_loop({"kind": "checkpointed"})
    check_by_hand(program)
    devices = mesh(AxisType.Explicit)
    with jax.set_mesh(devices):
        x = jax.device_put(X, NamedSharding(devices, P("data", None)))
        found = with_gradients(program)(WEIGHT, x)
    assert_close(found, with_gradients(program)(WEIGHT, X))


def manual(function):
    run = jax.shard_map(
        function, mesh=mesh(AxisType.Auto), in_specs=P("data"), out_specs=P("data")
    )
    return jax.jit(run)(X)


def varying(x):
    return to_vary(x, ("data",))


def test_carry_that_begins_to_vary():
    def sums(start):
        return lambda x: loopax.filter_fori_loop(
            0, 3, lambda i, carry: {"a": carry["a"] + x.sum()}, {"a": start(jnp.zeros(()))}
        )["a"][None]

    with pytest.raises(loopax.MismatchError) as caught:
        manual(sums(lambda x: x))
    (mismatch,) = caught.value.mismatches
    assert mismatch.path == 'carry["a"]'
    assert str(mismatch.before) != str(mismatch.after)
    assert advice_to_vary(("data",)) in str(caught.value)
    np.testing.assert_allclose(manual(sums(varying)), 3 * X.sum(1), rtol=1e-5)


@pytest.mark.parametrize("which", ["cond", "switch"])
def test_branches_that_vary_over_different_axes(which):
    def run(other):
        def one(x):
            branches = [lambda x: other(jnp.zeros(())), lambda x: x.sum()]
            if which == "cond":
                return loopax.filter_cond(jnp.asarray(True), *branches[::-1], x)[None]
            return loopax.filter_switch(jnp.asarray(1), branches, x)[None]

        return one

    with pytest.raises(loopax.MismatchError) as caught:
        manual(run(lambda x: x))
    assert advice_to_vary(("data",)) in str(caught.value)
    np.testing.assert_allclose(manual(run(varying)), X.sum(1), rtol=1e-5)


@pytest.mark.skipif(not NEW_NAMES, reason=EXPLICIT)
def test_carry_and_branches_that_change_their_sharding():
    devices = mesh(AxisType.Explicit)
    with jax.set_mesh(devices):
        x = jax.device_put(X, NamedSharding(devices, P("data", None)))

        def loop(start):
            carry = {"a": start(jnp.zeros((8, 4)))}
            return lambda x: loopax.filter_fori_loop(
                0, 3, lambda i, carry: {"a": carry["a"] + x}, carry
            )["a"]

        def choice(start):
            return lambda x: loopax.filter_cond(
                jnp.asarray(True), lambda x: x, lambda x: start(jnp.zeros((8, 4))), x
            )

        def switch(start):
            branches = [lambda x: x, lambda x: start(jnp.zeros((8, 4))), lambda x: 2 * x]
            return lambda x: loopax.filter_switch(jnp.asarray(0), branches, x)

        programs = [(loop, 'carry["a"]', 3), (choice, "output", 1), (switch, "output", 1)]
        for program, path, times in programs:
            with pytest.raises(loopax.MismatchError) as caught:
                jax.jit(lambda x, program=program: program(lambda a: a)(x))(x)
            (mismatch,) = caught.value.mismatches
            assert mismatch.path == path
            assert "8@data" in str(caught.value)
            assert "jax.sharding.reshard" in str(caught.value)

            def repaired(x, program=program):
                return program(lambda a: jax.sharding.reshard(a, P("data", None)))(x)

            out = jax.jit(repaired)(x)
            assert jax.typeof(out) == jax.typeof(x)
            np.testing.assert_allclose(out, times * X, rtol=1e-6)
