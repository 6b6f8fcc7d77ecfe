"""Diffrax and Optimistix on our loops: the same numbers, and the same derivatives."""

import diffrax
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax
import numpy as np
import optimistix
import pytest
from clients import on_loopax
from versions import NEW_NAMES, enable_x64

import loopax


@pytest.fixture(autouse=True)
def _double_precision():
    with enable_x64():
        yield


def same_on_ours(function, *arguments, rtol=1e-9):
    """Compares `function` on the loops of Equinox with itself on ours.

    Returns the loops that were traced in their place.
    """
    want = jax.jit(function)(*arguments)
    with on_loopax() as calls:
        got = jax.jit(function)(*arguments)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    leaves = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    for a, b in leaves:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.all(np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-12)
    # What is zero or nothing throughout is no test.
    assert any(np.any(b != 0) for _, b in leaves)
    return calls


def kinds(calls):
    return {call.kind for call in calls}


def are_nested(calls, *checkpoints):
    """Whether there were loops with so many checkpoints each, and all of them had buffers."""
    checkpointed = [call for call in calls if call.kind == "checkpointed"]
    asked = {call.checkpoints for call in checkpointed}
    return asked == set(checkpoints) and all(call.buffers for call in checkpointed)


# -- diffrax ------------------------------------------------------------------------------

TS = np.linspace(0, 3, 7)
Y0 = np.array([1.0, 0.3])
PARAMETERS = np.array([1.2, 0.9, 0.1])
TSIT5_STAGES, KVAERNO5_STAGES = 7, 7


def pendulum(t, y, parameters):
    a, b, c = parameters
    return jnp.stack([a * y[1], -b * jnp.sin(y[0]) - c * y[1] + 0.1 * jnp.cos(t)])


def solved(y0, parameters, vector_field=pendulum, **options):
    options = {
        "solver": diffrax.Tsit5(),
        "stepsize_controller": diffrax.PIDController(rtol=1e-4, atol=1e-6),
        "max_steps": 64,
        "dt0": None,
        **options,
    }
    term = diffrax.ODETerm(vector_field)
    return diffrax.diffeqsolve(term, t0=0.0, t1=3.0, y0=y0, args=parameters, **options)


def loss_of(sol):
    """Of all that was saved. What was not is infinite."""
    saved = jax.tree.leaves((sol.ts, sol.ys))
    if sol.interpolation is not None:
        saved.append(jax.vmap(sol.evaluate)(jnp.linspace(0.1, 2.9, 5)))
    parts = [jnp.where(jnp.isfinite(each), jnp.sin(each), 0.0) for each in saved]
    return sum(
        jnp.sum(part * jnp.cos(jnp.arange(part.size)).reshape(part.shape)) for part in parts
    )


def solve_and_gradients(**options):
    """The loss, what was saved, and the gradients with respect to `y0` and parameters."""

    def loss(y0, parameters):
        sol = solved(y0, parameters, **options)
        saved = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), (sol.ts, sol.ys))
        return loss_of(sol), (saved, sol.stats["num_accepted_steps"], sol.stats["num_steps"])

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


def test_diffrax_has_the_same_gradients_with_respect_to_a_network():
    net = eqx.nn.MLP(2, 2, width_size=8, depth=1, activation=jnp.tanh, key=jr.key(0))
    arrays, static = eqx.partition(net, eqx.is_array)

    def field(t, y, arrays):
        return eqx.combine(arrays, static)(y)

    calls = same_on_ours(solve_and_gradients(vector_field=field), Y0, arrays)
    assert are_nested(calls, None, TSIT5_STAGES)


def test_diffrax_has_the_same_gradients_where_an_inner_loop_writes_to_buffers_of_the_outer():
    run = solve_and_gradients(saveat=diffrax.SaveAt(ts=TS))
    calls = same_on_ours(run, Y0, PARAMETERS)
    assert are_nested(calls, None, len(TS), TSIT5_STAGES)


def test_diffrax_has_the_same_gradients_under_vmap_with_all_that_it_can_save():
    saveat = diffrax.SaveAt(
        subs=[diffrax.SubSaveAt(ts=TS, t0=True), diffrax.SubSaveAt(steps=2)], dense=True
    )
    # Lanes that take different numbers of steps, each of which rejects others.
    y0 = Y0 * np.array([[0.1], [1.0], [30.0]])
    run = jax.vmap(solve_and_gradients(saveat=saveat), in_axes=(0, None))
    calls = same_on_ours(run, y0, PARAMETERS)
    assert are_nested(calls, None, len(TS), TSIT5_STAGES)


def test_diffrax_has_the_same_gradients_with_an_implicit_solver_where_each_step_is_saved():
    saveat = diffrax.SaveAt(steps=True, dense=True)
    run = solve_and_gradients(solver=diffrax.Kvaerno5(), saveat=saveat)
    # With JAX 0.7 one number of 128 is 2.4e-9 off, which is 8e-11 where the largest is 1.1.
    calls = same_on_ours(run, Y0, PARAMETERS, rtol=1e-9 if NEW_NAMES else 5e-9)
    assert are_nested(calls, None, KVAERNO5_STAGES)
    # The root finder of each stage.
    assert "lax" in kinds(calls)


def test_diffrax_has_the_same_gradients_with_checkpoints_and_no_bound():
    # Fewer than there are steps.
    adjoint = diffrax.RecursiveCheckpointAdjoint(checkpoints=4)
    run = solve_and_gradients(adjoint=adjoint, max_steps=None)
    calls = same_on_ours(run, Y0, PARAMETERS)
    assert are_nested(calls, 4, TSIT5_STAGES)


def test_diffrax_has_the_same_forward_derivatives():
    def derivative(y0, parameters):
        saveat, adjoint = diffrax.SaveAt(ts=TS), diffrax.ForwardMode()

        def run(*arguments):
            return solved(*arguments, saveat=saveat, adjoint=adjoint).ys

        return jax.jvp(run, (y0, parameters), (y0 + 1, parameters - 1))

    assert kinds(same_on_ours(derivative, Y0, PARAMETERS)) == {"lax"}


def test_diffrax_has_the_same_derivatives_both_ways_with_a_bounded_loop():
    def loss(parameters):
        adjoint = diffrax.DirectAdjoint()
        return loss_of(solved(Y0, parameters, max_steps=32, adjoint=adjoint))

    def both(parameters):
        return jax.grad(loss)(parameters), jax.jvp(loss, (parameters,), (1 + parameters,))

    assert kinds(same_on_ours(both, PARAMETERS)) == {"bounded"}


class Waves(diffrax.AbstractBrownianPath):
    """What stands for a Brownian path, and takes less time to compile."""

    t0 = 0.0
    t1 = 1.0
    levy_area = diffrax.SpaceTimeLevyArea

    def evaluate(self, t0, t1=None, left=True, use_levy=False):
        w = jnp.sin(40 * t1) - jnp.sin(40 * t0)
        area = diffrax.SpaceTimeLevyArea(dt=t1 - t0, W=w, H=w * jnp.cos(30 * t0))
        return area if use_levy else w


def test_diffrax_has_the_same_gradients_of_a_stochastic_equation_with_a_scan_in_it():
    noise = diffrax.ControlTerm(lambda t, y, p: 0.1 * p[0] * jnp.cos(y), Waves())
    terms = diffrax.MultiTerm(diffrax.ODETerm(pendulum), noise)

    def loss(y0, parameters):
        solver = diffrax.SPaRK()
        sol = diffrax.diffeqsolve(terms, solver, 0.0, 1.0, 0.1, y0, parameters, max_steps=16)
        return loss_of(sol)

    calls = same_on_ours(jax.value_and_grad(loss, argnums=(0, 1)), Y0, PARAMETERS)
    assert {call.name for call in calls} == {"while_loop", "scan"}
    assert kinds(calls) == {"checkpointed"}


# -- optimistix ----------------------------------------------------------------------------


def residual(y, parameters):
    a, b, c = parameters
    return jnp.stack([y[0] + a * y[1] ** 3 / 9 - b, y[1] - c * jnp.cos(y[0])])


def towards(y, parameters):
    return y - 0.7 * residual(y, parameters)


def energy(y, parameters):
    return jnp.sum(residual(y, parameters) ** 2) + 0.01 * jnp.sum(y**4)


def misfit(y, parameters):
    return jnp.concatenate([residual(y, parameters), 0.1 * y])


TOLERANCE = {"rtol": 1e-7, "atol": 1e-7}
PROBLEMS = {
    "root_find": (optimistix.root_find, residual, optimistix.Newton(**TOLERANCE)),
    "fixed_point": (
        optimistix.fixed_point,
        towards,
        optimistix.FixedPointIteration(**TOLERANCE),
    ),
    "minimise": (optimistix.minimise, energy, optimistix.BFGS(**TOLERANCE)),
    "least_squares": (
        optimistix.least_squares,
        misfit,
        optimistix.LevenbergMarquardt(**TOLERANCE),
    ),
}
ADJOINTS = {
    "checkpointed": optimistix.RecursiveCheckpointAdjoint(),
    "lax": optimistix.ImplicitAdjoint(),
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("kind", ADJOINTS)
def test_optimistix_has_the_same_solutions_and_gradients(problem, kind):
    find, function, solver = PROBLEMS[problem]

    def loss(y0, parameters):
        sol = find(function, solver, y0, parameters, max_steps=64, adjoint=ADJOINTS[kind])
        return jnp.sum(jnp.sin(sol.value)), (sol.value, sol.stats["num_steps"])

    run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    assert kinds(same_on_ours(run, Y0, PARAMETERS)) == {kind}


def test_optimistix_has_the_same_gradients_under_vmap_with_few_checkpoints():
    adjoint = optimistix.RecursiveCheckpointAdjoint(checkpoints=3)
    solver = optimistix.FixedPointIteration(**TOLERANCE)

    def loss(y0, parameters):
        sol = optimistix.fixed_point(towards, solver, y0, parameters, adjoint=adjoint)
        return jnp.sum(jnp.sin(sol.value)), sol.stats["num_steps"]

    run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    y0 = Y0 * np.array([[0.1], [1.0], [2.0]])
    calls = same_on_ours(jax.vmap(run, in_axes=(0, None)), y0, PARAMETERS)
    assert {(call.kind, call.checkpoints) for call in calls} == {("checkpointed", 3)}


def test_lineax_has_the_same_solution_where_rows_are_along_the_last_axis():
    matrix = jnp.eye(5) + 0.3 * jr.normal(jr.key(0), (5, 5))

    def solve(vector):
        operator = lineax.MatrixLinearOperator(matrix)
        solver = lineax.GMRES(rtol=1e-9, atol=1e-9)
        return lineax.linear_solve(operator, vector, solver).value

    calls = same_on_ours(jax.vmap(solve), jnp.eye(5)[:2])
    # Buffers of ours have rows along the first axis only.
    assert {(call.kind, call.buffers) for call in calls} == {("lax", False)}


# -- the adapter --------------------------------------------------------------------------


def test_the_clients_are_on_their_own_loops_before_and_after():
    original = eqxi.while_loop, diffrax._adjoint._outer_loop
    with on_loopax():
        assert eqxi.while_loop is not original[0]
        assert diffrax._adjoint._outer_loop is not original[1]
    assert (eqxi.while_loop, diffrax._adjoint._outer_loop) == original


def test_the_comparison_fails_where_our_loop_is_wrong(monkeypatch):
    def one_step_less(cond_fun, body_fun, init_val, *, max_steps, **options):
        return loopax.filter_while_loop(cond_fun, body_fun, init_val, max_steps=2, **options)

    monkeypatch.setattr("clients.filter_while_loop", one_step_less)
    solver = optimistix.FixedPointIteration(**TOLERANCE)

    def solve(y0):
        return optimistix.fixed_point(towards, solver, y0, PARAMETERS, throw=False).value

    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        same_on_ours(solve, Y0)
