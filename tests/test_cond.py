"""`filter_cond`."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

import loopax


NETS = [eqx.nn.MLP(2, 2, width, 1, key=jr.key(width)) for width in (3, 5)]
X = jnp.array([0.5, -1.0])
ONE = jnp.ones(())


@pytest.mark.parametrize("pred", [True, np.True_, jnp.asarray(True), 1, 2.5, jnp.asarray(3)])
def test_any_true_scalar_takes_the_first_branch(pred):
    assert loopax.filter_cond(pred, lambda x: x + 1, lambda x: x - 1, ONE) == 2


@pytest.mark.parametrize("pred", [False, np.False_, jnp.asarray(False), 0, 0.0])
def test_any_false_scalar_takes_the_second_branch(pred):
    assert loopax.filter_cond(pred, lambda x: x + 1, lambda x: x - 1, ONE) == 0


@pytest.mark.parametrize("pred", [True, False])
def test_modules_are_branches_and_operands(pred):
    want = NETS[0](X) if pred else NETS[1](X)
    got = loopax.filter_cond(jnp.asarray(pred), *NETS, X)
    assert jnp.allclose(got, want)
    apply = [lambda a, b, x: a(x), lambda a, b, x: b(x)]
    assert jnp.allclose(loopax.filter_cond(jnp.asarray(pred), *apply, *NETS, X), want)


def test_a_module_comes_out_with_its_static_part():
    doubled = jax.tree.map(lambda a: 2 * a if eqx.is_array(a) else a, NETS[0])
    out = loopax.filter_cond(jnp.asarray(False), lambda: NETS[0], lambda: doubled)
    assert out.activation is NETS[0].activation
    assert eqx.tree_equal(out, doubled)


def test_a_number_beside_an_array_is_an_array():
    out = loopax.filter_cond(jnp.asarray(True), lambda: (1, "a"), lambda: (jnp.asarray(2), "a"))
    assert eqx.is_array(out[0])
    assert out[0] == 1
    assert out[1] == "a"


def test_equal_numbers_stay_numbers():
    assert type(loopax.filter_cond(jnp.asarray(True), lambda: 1.5, lambda: 1.5)) is float


def test_numbers_are_arrays_when_traced():
    out = loopax.filter_cond(jnp.asarray(False), lambda: 1, lambda: 2, trace_numbers=True)
    assert eqx.is_array(out)
    assert out == 2


def test_gradients_reach_modules_and_operands_as_by_hand():
    def loss(pred, cond, nets, x):
        return jnp.sum(cond(pred, *nets, x) ** 2)

    for pred in (True, False):
        ours = eqx.filter_grad(
            lambda nets, pred=pred: loss(jnp.asarray(pred), loopax.filter_cond, nets, X)
        )(NETS)
        want = eqx.filter_grad(lambda nets, pred=pred: jnp.sum(nets[0 if pred else 1](X) ** 2))(
            NETS
        )
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(want), strict=True):
            assert jnp.allclose(a, b, atol=1e-6)


def test_the_branch_that_is_not_taken_leaks_no_nan():
    def root(x):
        return loopax.filter_cond(x > 0, lambda x, _: jnp.sqrt(x), lambda x, _: 0 * x, x, "t")

    grads = jax.vmap(jax.grad(root))(jnp.array([4.0, 0.0]))
    assert jnp.allclose(grads, jnp.array([0.25, 0.0]))


def test_a_state_is_used_once():
    class Counter(eqx.Module):
        index: eqx.nn.StateIndex

        def __init__(self):
            self.index = eqx.nn.StateIndex(jnp.zeros(()))

        def __call__(self, state):
            return state.set(self.index, state.get(self.index) + 1)

    counter, state = eqx.nn.make_with_state(Counter)()
    out = loopax.filter_cond(jnp.asarray(True), counter, lambda state: state, state)
    assert out.get(counter.index) == 1
    states = jax.vmap(
        lambda pred: loopax.filter_cond(pred, counter, lambda state: state, state)
    )(jnp.array([True, False]))
    assert states.get(counter.index).tolist() == [1, 0]


def test_an_operand_may_be_given_by_name():
    for branch in (loopax.filter_cond, lax.cond):
        assert branch(True, lambda x: x + 1, lambda x: x, operand=ONE) == 2


def test_operands_by_name_and_by_position_do_not_mix():
    with pytest.raises(TypeError, match="operand"):
        loopax.filter_cond(True, lambda x: x, lambda x: x, 1.0, operand=2.0)


def test_each_branch_may_have_an_operand_of_its_own():
    for branch in (loopax.filter_cond, lax.cond):
        assert branch(True, X, lambda x: x[0], X, lambda x: x[1]) == 0.5
        assert branch(False, X, lambda x: x[0], X, lambda x: x[1]) == -1


def test_branches_are_traced_once_whatever_their_weights():
    traces = []

    class Scale(eqx.Module):
        factor: jax.Array

        def __call__(self, x):
            traces.append(self)
            return self.factor * x

    def other(x):
        traces.append(None)
        return x

    for factor in (2.0, 3.0, 4.0):
        out = loopax.filter_cond(jnp.asarray(True), Scale(jnp.asarray(factor)), other, X)
        assert jnp.allclose(out, factor * X)
    assert len(traces) == 2


def test_one_function_in_both_branches_is_traced_once():
    traces = []

    def branch(x):
        traces.append(x)
        return x

    loopax.filter_cond(jnp.asarray(True), branch, branch, X)
    assert len(traces) == 1


def test_what_a_branch_raises_is_raised_and_the_branch_runs_once():
    runs = []

    def broken(x):
        runs.append(x)
        return x + "a"

    with pytest.raises(TypeError, match="str"):
        loopax.filter_cond(jnp.asarray(True), broken, lambda x: x, X)
    assert len(runs) == 1


def test_partials_and_methods_are_branches():
    class Env:
        gain = 3.0

        def act(self, x):
            return self.gain * x

    pred = jnp.asarray(True)
    assert jnp.allclose(loopax.filter_cond(pred, Env().act, lambda x: x, X), 3 * X)
    times = functools.partial(jnp.multiply, jnp.asarray(5.0))
    assert jnp.allclose(loopax.filter_cond(pred, times, lambda x: x, X), 5 * X)


def test_operands_are_traced_as_numbers_on_request():
    def branch(x):
        return isinstance(x, jax.core.Tracer)

    for traced in (True, False):
        seen = loopax.filter_cond(jnp.asarray(True), branch, branch, 1, trace_numbers=traced)
        assert seen == traced


def test_numbers_that_differ_beside_numbers_that_meet_arrays_are_traced_on_request():
    def run(**options):
        return loopax.filter_cond(
            jnp.asarray(False), lambda: (1.0, 1), lambda: (ONE, 2), **options
        )

    assert run(trace_numbers=True) == (1, 2)
    with pytest.raises(loopax.MismatchError) as caught:
        run()
    assert [each.path for each in caught.value.mismatches] == ["output[1]"]


@pytest.mark.parametrize(
    ("first", "second", "trace_numbers"), [(1, 2, True), (1.0, ONE, False), (1.0, ONE, True)]
)
def test_only_what_differs_is_named_not_numbers_that_are_arrays(first, second, trace_numbers):
    with pytest.raises(loopax.MismatchError) as caught:
        loopax.filter_cond(
            jnp.asarray(True),
            lambda: (first, X),
            lambda: (second, X[0]),
            trace_numbers=trace_numbers,
        )
    assert [each.path for each in caught.value.mismatches] == ["output[1]"]


def test_what_a_branch_raises_comes_out_as_the_same_object():
    error = TypeError("mine")

    def broken(_):
        raise error

    with pytest.raises(TypeError) as caught:
        loopax.filter_cond(jnp.asarray(True), broken, lambda x: x, X)
    assert caught.value is error
    assert error.__context__ is None


@pytest.mark.parametrize("name", ["cond", "switch"])
def test_jax_names_the_function_and_the_operand_in_its_messages(name):
    def branch(first, second):
        return first if second["flag"] else first + 1

    operands = (X, {"flag": jnp.asarray(True)})
    calls = {
        "cond": lambda: loopax.filter_cond(jnp.asarray(True), branch, branch, *operands),
        "switch": lambda: loopax.filter_switch(jnp.asarray(0), [branch, branch], *operands),
    }
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        calls[name]()
    assert f"for {name}" in str(caught.value)
    assert "second['flag']" in str(caught.value)
