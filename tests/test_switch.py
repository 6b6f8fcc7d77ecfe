"""`filter_switch`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

import loopax


NETS = [eqx.nn.MLP(2, 1, width, 1, key=jr.key(width)) for width in (3, 5, 7)]
X = jnp.array([0.5, -1.0])


@pytest.mark.parametrize("index", [-3, 0, 1, 2, 7])
@pytest.mark.parametrize("kind", [int, np.int64, jnp.asarray])
def test_the_index_is_clamped(index, kind):
    want = NETS[min(max(index, 0), 2)](X)
    assert jnp.allclose(loopax.filter_switch(kind(index), NETS, X), want)


def test_under_vmap_each_lane_has_its_own_branch():
    out = jax.vmap(lambda i: loopax.filter_switch(i, NETS, X))(jnp.arange(3))
    assert jnp.allclose(out, jnp.stack([net(X) for net in NETS]), atol=1e-6)


def test_gradients_reach_the_branch_that_was_taken_alone():
    grads = eqx.filter_grad(
        lambda nets: jnp.sum(loopax.filter_switch(jnp.asarray(1), nets, X))
    )(NETS)
    want = eqx.filter_grad(lambda net: jnp.sum(net(X)))(NETS[1])
    for a, b in zip(jax.tree.leaves(grads[1]), jax.tree.leaves(want), strict=True):
        assert jnp.allclose(a, b, atol=1e-6)
    for other in (grads[0], grads[2]):
        assert all(jnp.all(leaf == 0) for leaf in jax.tree.leaves(other))


def test_one_branch_is_simply_called():
    assert jnp.allclose(loopax.filter_switch(5, NETS[:1], X), NETS[0](X))


def test_static_operands_and_results_go_through():
    branches = [lambda t, x: (t, x), lambda t, x: (t, 2 * x)]
    tag, out = loopax.filter_switch(jnp.asarray(1), branches, "a", X)
    assert tag == "a"
    assert jnp.allclose(out, 2 * X)


def test_a_number_beside_arrays_is_an_array_in_each():
    branches = [lambda: 1.0, lambda: jnp.asarray(2.0), lambda: 3.0]
    for index, want in enumerate((1.0, 2.0, 3.0)):
        out = loopax.filter_switch(jnp.asarray(index), branches)
        assert eqx.is_array(out)
        assert out == want


def test_of_three_branches_the_one_that_differs_is_in_the_mismatch():
    branches = [lambda: "a", lambda: "b", lambda: "a"]
    with pytest.raises(loopax.MismatchError) as caught:
        loopax.filter_switch(jnp.asarray(0), branches)
    (mismatch,) = caught.value.mismatches
    assert (mismatch.path, mismatch.before, mismatch.after) == ("output", "a", "b")


def test_no_branches_are_refused():
    with pytest.raises(ValueError, match="empty"):
        loopax.filter_switch(0, [])


def test_it_is_that_of_lax_on_arrays():
    branches = [jnp.sin, jnp.cos, lambda x: x]
    for index in range(3):
        ours = loopax.filter_switch(index, branches, X, trace_numbers=True)
        assert jnp.array_equal(ours, lax.switch(index, branches, X))


def test_many_branches_are_traced_once_each_and_not_again():
    traces = []

    class Scale(eqx.Module):
        factor: jax.Array

        def __call__(self, x):
            traces.append(self)
            return self.factor * x

    for start in range(2):
        scales = [Scale(jnp.asarray(float(start + n))) for n in range(6)]
        out = loopax.filter_switch(jnp.asarray(4), scales, X)
        assert jnp.allclose(out, (start + 4) * X)
    assert len(traces) == 6


def test_the_operand_may_be_given_by_name():
    assert jnp.allclose(loopax.filter_switch(jnp.asarray(1), NETS, operand=X), NETS[1](X))
