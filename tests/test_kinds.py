"""Which kind of loop runs, and what is said of arguments that ask for none."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import loopax


ONE = jnp.float32(1.0)


def halve(x):
    return x / 2


def is_large(x):
    return x > 0.1


def while_loop(x=ONE, **options):
    return loopax.filter_while_loop(is_large, halve, x, **options)


def fori_loop(x=ONE, lower=0, upper=4, **options):
    return loopax.filter_fori_loop(lower, upper, lambda i, x: halve(x), x, **options)


def scan(x=ONE, length=4, **options):
    return loopax.filter_scan(lambda x, _: (halve(x), x), x, length=length, **options)


def primitives(function, *args):
    """The names of all primitives in a program, those of inner ones too."""
    found, jaxprs = set(), [jax.make_jaxpr(function)(*args).jaxpr]
    while jaxprs:
        for eqn in jaxprs.pop().eqns:
            found.add(eqn.primitive.name)
            for value in jax.tree.leaves(list(eqn.params.values())):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    jaxprs.append(inner)
    return found


# -- which kind --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "options", "expected", "others"),
    [
        (while_loop, {}, "while", {"loop", "scan"}),
        (while_loop, {"kind": "lax"}, "while", {"loop", "scan"}),
        (while_loop, {"kind": "lax", "max_steps": 5}, "while", {"loop", "scan"}),
        (while_loop, {"max_steps": 5}, "loop", {"while", "scan"}),
        (while_loop, {"checkpoints": 5}, "loop", {"while", "scan"}),
        (while_loop, {"kind": "bounded", "max_steps": 5}, "scan", {"while", "loop"}),
        (fori_loop, {}, "scan", {"loop"}),
        (fori_loop, {"kind": "lax"}, "scan", {"loop"}),
        (fori_loop, {"kind": "checkpointed"}, "loop", {"scan"}),
        (fori_loop, {"checkpoints": 2}, "loop", {"scan"}),
        (fori_loop, {"max_steps": 5}, "loop", {"scan"}),
        (fori_loop, {"kind": "bounded"}, "scan", {"loop"}),
        (scan, {}, "scan", {"loop", "while"}),
        (scan, {"kind": "lax"}, "scan", {"loop", "while"}),
        (scan, {"kind": "checkpointed"}, "loop", {"scan", "while"}),
        (scan, {"checkpoints": "all"}, "loop", {"scan", "while"}),
        (scan, {"until": is_large}, "loop", {"scan", "while"}),
        (scan, {"until": is_large, "kind": "lax"}, "while", {"scan", "loop"}),
        (scan, {"until": is_large, "kind": "bounded"}, "scan", {"loop", "while"}),
    ],
)
def test_the_loop_is_of_the_kind_that_was_asked_for(run, options, expected, others):
    found = primitives(lambda x: run(x, **options), ONE)
    assert expected in found
    assert not others & found


@pytest.mark.parametrize(
    ("checkpoints", "saved"), [(None, 4), (1, 1), (3, 3), (100, 16), ("all", 16)]
)
def test_as_many_carries_are_saved_as_there_are_checkpoints(checkpoints, saved):
    def loss(x):
        return jnp.sum(while_loop_of(x, checkpoints))

    def while_loop_of(x, checkpoints):
        return loopax.filter_while_loop(
            lambda x: jnp.all(x > 0.1), halve, x, max_steps=16, checkpoints=checkpoints
        )

    text = str(jax.make_jaxpr(jax.grad(loss))(jnp.ones(7)))
    assert f"f32[{saved},7]" in text


def test_max_steps_ends_the_loop():
    assert while_loop(max_steps=2) == 0.25
    assert while_loop(max_steps=0) == 1.0
    assert while_loop(max_steps=50) == while_loop()
    for kind in ("lax", "checkpointed", "bounded"):
        assert while_loop(max_steps=2, kind=kind) == 0.25
        assert while_loop(max_steps=0, kind=kind) == 1.0


# -- a bound that is reached ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lax", "checkpointed", "bounded"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_loop_that_throws_says_which_it_is(kind, compiled):
    run = eqx.filter_jit(while_loop) if compiled else while_loop
    with pytest.raises(
        RuntimeError, match=r"`halve` \(test_kinds.py:\d+\) was called max_steps=2"
    ):
        jax.block_until_ready(run(max_steps=2, kind=kind, throw=True))
    assert run(max_steps=4, kind=kind, throw=True) == while_loop()


def test_a_loop_that_throws_can_be_differentiated():
    assert jax.grad(lambda x: while_loop(x, max_steps=4, throw=True))(ONE) == 1 / 16


def test_a_fori_loop_with_more_steps_than_its_bound_is_an_error():
    with pytest.raises(
        loopax.ArgumentError, match="there are 4 steps from 0 to 4, and `max_st"
    ):
        fori_loop(max_steps=3)
    run = eqx.filter_jit(lambda upper: fori_loop(upper=upper, max_steps=3))
    assert run(jnp.array(3)) == 1 / 8
    with pytest.raises(RuntimeError, match="there are more steps from `lower` to `upper`"):
        jax.block_until_ready(run(jnp.array(4)))


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize("run", [while_loop, fori_loop, scan])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "fast"}, "`kind` must be one of 'lax', 'checkpointed', 'bounded', or None"),
        ({"kind": "lax", "checkpoints": 3}, '`checkpoints` is for kind="checkpointed"'),
        ({"checkpoints": 0}, "`checkpoints` must be at least 1, but is 0"),
        ({"checkpoints": -2}, "`checkpoints` must be at least 1, but is -2"),
        ({"checkpoints": "some"}, "`checkpoints` must be an integer"),
        ({"checkpoints": True}, "`checkpoints` must be an integer"),
        ({"checkpoints": 2.0}, "`checkpoints` must be"),
        ({"kind": 3}, "`kind` must be"),
        ({"buffers": 3}, "`buffers` must be"),
    ],
)
def test_arguments_that_ask_for_no_kind_are_refused(run, options, message):
    with pytest.raises(loopax.ArgumentError) as caught:
        run(**options)
    assert message in str(caught.value)
    assert f"filter_{run.__name__}" in str(caught.value)


@pytest.mark.parametrize("run", [while_loop, fori_loop])
@pytest.mark.parametrize("bound", [-1, 2**31, 1.5, True, "3", jnp.array([3])])
def test_a_bound_that_is_none_is_refused(run, bound):
    with pytest.raises(loopax.ArgumentError, match="`max_steps` must be"):
        run(max_steps=bound)


def test_a_bound_must_be_known_while_tracing():
    with pytest.raises(loopax.ArgumentError, match="known while tracing"):
        jax.jit(lambda n: while_loop(max_steps=n))(3)


def test_a_kind_that_needs_a_bound_says_how_to_give_one():
    with pytest.raises(loopax.ArgumentError, match=r"needs a bound .* Pass `max_steps`\."):
        while_loop(kind="bounded")
    with pytest.raises(loopax.ArgumentError, match=r"or a number of `checkpoints`\. Pass `max"):
        while_loop(kind="checkpointed")
    with pytest.raises(loopax.ArgumentError, match="or a number of `checkpoints`"):
        while_loop(checkpoints="all")
    with pytest.raises(loopax.ArgumentError, match="or bounds that are known while tracing"):
        jax.jit(lambda n: fori_loop(upper=n, kind="checkpointed"))(3)
    with pytest.raises(loopax.ArgumentError, match="`throw` is for a loop with `max_steps`"):
        while_loop(throw=True)


def test_only_what_lax_runs_can_be_unrolled():
    with pytest.raises(loopax.ArgumentError, match='`unroll` is for kind="lax"'):
        scan(kind="checkpointed", unroll=2)
    with pytest.raises(loopax.ArgumentError, match='`unroll` is for kind="lax"'):
        fori_loop(kind="bounded", unroll=2)


def test_until_must_return_a_boolean_scalar():
    for wrong in (lambda x: x, lambda x: jnp.ones(2, bool), lambda x: None):
        with pytest.raises(loopax.ArgumentError, match="must return a boolean scalar"):
            scan(until=wrong)


# -- where there is no reverse mode ----------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        while_loop,
        lambda x: while_loop(x, kind="lax", max_steps=9),
        lambda x: scan(x, kind="lax", until=lambda x: x < 0.1)[0],
        lambda x: jax.jit(lambda n: fori_loop(x, upper=n))(3),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_reverse_mode_of_a_loop_of_lax_names_what_has_it(run, compiled):
    gradient = jax.jit(jax.grad(run)) if compiled else jax.grad(run)
    with pytest.raises(
        ValueError, match=r"no reverse mode\. (Pass `max_steps`|Leave out).*checkpointed"
    ):
        gradient(ONE)
    assert jnp.isfinite(jax.jvp(run, (ONE,), (ONE,))[1])


def test_what_a_loop_of_lax_passes_on_can_be_differentiated():
    def run(x):
        x, _ = loopax.filter_while_loop(
            lambda c: c[1] < 3, lambda c: (c[0], c[1] + 1), (x, jnp.array(0))
        )
        return 2 * x

    assert jax.grad(run)(ONE) == 2
    assert jax.jit(jax.grad(run))(ONE) == 2


# -- what is one for all lanes ------------------------------------------------------------


def mean_of_lanes(carry):
    """What layers with a state for the whole batch do."""
    x, mean = carry
    return jnp.sin(x) + mean, 0.5 * mean + jax.lax.pmean(x, "lanes")


SHARED = {
    "scan": lambda carry, **options: loopax.filter_scan(
        lambda carry, _: (mean_of_lanes(carry), carry[1]), carry, length=3, **options
    ),
    "nested": lambda carry, **options: loopax.filter_scan(
        lambda carry, _: loopax.filter_scan(
            lambda carry, _: (mean_of_lanes(carry), carry[1]), carry, length=2, **options
        ),
        carry,
        length=3,
        **options,
    ),
    "cond": lambda carry, **options: loopax.filter_scan(
        lambda carry, i: (
            loopax.filter_cond(i > 0, mean_of_lanes, lambda carry: carry, carry),
            carry[1],
        ),
        carry,
        jnp.arange(3),
        **options,
    ),
    "fori": lambda carry, **options: (
        loopax.filter_fori_loop(0, 3, lambda _, carry: mean_of_lanes(carry), carry, **options),
        jnp.array(0.0),
    ),
}


@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
@pytest.mark.parametrize("loop", SHARED.values(), ids=SHARED)
def test_what_is_one_for_all_lanes_stays_so(loop, kind):
    xs = jnp.linspace(0.0, 1.0, 5)

    def run(xs, mean, **options):
        def one(x, mean):
            (x, mean), means = loop((x, mean), **options)
            return x, (mean, means)

        over = jax.vmap(one, in_axes=(0, None), out_axes=(0, None), axis_name="lanes")
        return over(xs, mean)

    def loss(xs, mean, **options):
        ys, (mean, means) = run(xs, mean, **options)
        return jnp.sum(ys**2) + mean + jnp.sum(jnp.sin(means))

    mean = jnp.array(0.5)
    for function in (run, jax.grad(loss, (0, 1))):
        actual, expected = function(xs, mean, kind=kind), function(xs, mean)
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            assert a.shape == b.shape
            assert jnp.allclose(a, b, rtol=1e-5)


def test_a_while_loop_keeps_apart_what_is_one_for_all_lanes():
    def run(xs, **options):
        def one(x):
            return loopax.filter_while_loop(
                lambda carry: carry[2] < 3,
                lambda carry: (*mean_of_lanes(carry[:2]), carry[2] + 1),
                (x, jnp.array(0.5), jnp.array(0)),
                **options,
            )

        return jax.vmap(one, out_axes=(0, None, None), axis_name="lanes")(xs)

    xs = jnp.linspace(0.0, 1.0, 5)
    for a, b in zip(run(xs, max_steps=4), run(xs), strict=True):
        assert a.shape == b.shape
        assert jnp.allclose(a, b)
