"""`nn.Stacked` of layers with an `eqx.nn.State`: each layer has its own, as in a sequential."""

import copy
import functools
import io
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from layers import SIZE, Block, Cached, Running, assert_close, copied, in_turn

import loopax
from loopax.nn import Stacked


KEY = jr.key(0)
X = jnp.linspace(-1.0, 1.0, SIZE)
DEPTH = 3

options = pytest.mark.parametrize(
    "options",
    [
        {},
        {"unroll": 2},
        {"kind": "checkpointed"},
        {"kind": "bounded"},
        {"remat": True},
        {"remat": jax.checkpoint_policies.dots_saveable, "unroll": True},
    ],
    ids=["lax", "unroll", "checkpointed", "bounded", "remat", "policy_unroll"],
)


def made(make_layer, depth=DEPTH, **more):
    return eqx.nn.make_with_state(Stacked)(make_layer, depth, key=KEY, **more)


def values(state, layers):
    """What the layers have in the state, one after the other."""
    own = [jax.tree.leaves(state.substate(layer)) for layer in layers]
    assert all(own)
    return own


def for_all(f, axes=(0, None)):
    """Over a batch of examples, with one state for all."""
    return jax.vmap(f, in_axes=axes, out_axes=axes, axis_name="batch")


# -- numbers are those of the layers one after the other --------


@options
def test_alone(options):
    stack, state = made(Cached, **options)
    layers, expected = stack.unstack(copied(state))
    x, y = X, X
    for _ in range(3):
        x, state = stack(x, state)
        y, expected, _ = in_turn(layers, y, expected)
        assert_close(x, y)
    _, state = stack.unstack(state)
    assert_close(values(state, layers), values(expected, layers))


@options
@pytest.mark.parametrize("batch", [1, 2, DEPTH, SIZE, 7])
def test_for_a_batch_with_one_state(options, batch):
    stack, state = made(Running, **options)
    layers, expected = stack.unstack(copied(state))
    sequential = eqx.nn.Sequential(layers)
    xs = ys = jr.normal(jr.key(1), (batch, SIZE))
    for _ in range(2):
        xs, state = for_all(stack)(xs, state)
        ys, expected = for_all(sequential)(ys, expected)
        assert_close(xs, ys)
    _, state = stack.unstack(state)
    assert_close(values(state, layers), values(expected, layers))


@options
@pytest.mark.parametrize("batch", [1, DEPTH, SIZE, 5])
def test_for_a_batch_with_a_state_each(options, batch):
    stack, state = made(Cached, **options)
    layers, _ = stack.unstack(copied(state))
    xs = jr.normal(jr.key(1), (batch, SIZE))
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * batch), state)
    for _ in range(2):
        ys, expected = [], []
        for i in range(batch):
            one = jax.tree.map(lambda leaf, i=i: leaf[i], states)
            y, one, _ = in_turn(layers, xs[i], stack.unstack(one)[1])
            ys.append(y)
            expected.append(values(one, layers))
        xs, states = jax.jit(jax.vmap(stack))(xs, states)
        assert_close(xs, jnp.stack(ys))
        for i in range(batch):
            one = jax.tree.map(lambda leaf, i=i: leaf[i], states)
            assert_close(values(stack.unstack(one)[1], layers), expected[i])


@options
def test_gradients(options):
    stack, state = made(Running, **options)
    layers, apart = stack.unstack(copied(state))
    xs = jr.normal(jr.key(1), (5, SIZE))

    def loss(model, state):
        ys, state = for_all(model)(xs, state)
        ys, state = for_all(model)(jnp.sin(ys), state)
        return jnp.sum(ys**2)

    gradient = eqx.filter_jit(eqx.filter_grad(loss))(stack, copied(state))
    expected = eqx.filter_grad(loss)(eqx.nn.Sequential(layers), copied(apart))
    for actual, of_layer in zip(gradient, expected, strict=True):
        assert_close(
            eqx.filter(actual, eqx.is_inexact_array),
            eqx.filter(of_layer, eqx.is_inexact_array),
            rtol=1e-4,
            atol=1e-5,
        )


def test_gradients_through_the_state():
    stack, state = made(Cached)
    layers, apart = stack.unstack(copied(state))

    def loss(x, run, state):
        _, state = run(x, state)
        y, _ = run(jnp.cos(x), state)
        return jnp.sum(y**3)

    def one_by_one(x, state):
        return in_turn(layers, x, state)[:2]

    assert_close(jax.grad(loss)(X, stack, state), jax.grad(loss)(X, one_by_one, apart))


@pytest.mark.parametrize("kind", [None, "checkpointed"])
def test_every_output_comes_along_with_the_state(kind):
    stack, state = made(Cached, all_outputs=True, kind=kind)
    layers, apart = stack.unstack(copied(state))
    (x, outputs), state = stack(X, state)
    y, _, expected = in_turn(layers, X, apart)
    assert_close(x, y)
    assert_close(outputs, jnp.stack(expected))
    assert isinstance(state, eqx.nn.State)


def test_in_reverse_each_layer_keeps_its_state():
    stack, state = made(Cached, reverse=True)
    layers, apart = stack.unstack(copied(state))
    x, state = stack(X, state)
    y, apart, _ = in_turn(layers[::-1], X, apart)
    assert_close(x, y)
    assert_close(values(stack.unstack(state)[1], layers), values(apart, layers))


def test_other_arguments_come_after_the_state():
    class Adds(Cached):
        def __call__(self, x, state, shift, *, gain=1.0):
            x, state = super().__call__(x, state)
            return gain * x + shift, state

    stack, state = made(Adds)
    layers, apart = stack.unstack(copied(state))
    y, _, _ = in_turn(layers, X, apart, 0.5 * X, gain=2.0)
    assert_close(stack(X, copied(state), 0.5 * X, gain=2.0)[0], y)
    assert_close(stack(X, shift=0.5 * X, gain=2.0, state=state)[0], y)


# -- models that hold stacks --------


class Odd(eqx.Module):
    """The model of Equinox's issue 934: a stack between other layers, one with a state too."""

    first: eqx.nn.Linear
    layers: Any
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key, stacked):
        first, layers, last = jr.split(key, 3)
        self.first = eqx.nn.Linear(2, SIZE, key=first)
        self.layers = Stacked(Cached, DEPTH, key=layers)
        if not stacked:
            self.layers = self.layers.unstack()
        self.norm = eqx.nn.BatchNorm(SIZE, "batch", mode="batch")
        self.last = eqx.nn.Linear(SIZE, 1, key=last)

    def __call__(self, x, state):
        x = jnp.tanh(self.first(x))
        if isinstance(self.layers, list):
            x, state, _ = in_turn(self.layers, x, state)
        else:
            x, state = self.layers(x, state)
        x, state = self.norm(x, state)
        return self.last(x), state


@pytest.mark.parametrize("batch", [1, 2, DEPTH, SIZE, 5, 8])
def test_the_model_of_issue_934_at_every_size_of_a_batch(batch):
    xs = jr.normal(jr.key(1), (batch, 2))

    def two_calls(stacked):
        model, state = eqx.nn.make_with_state(Odd)(KEY, stacked)
        states = jax.tree.map(lambda leaf: jnp.stack([leaf] * batch), state)

        @eqx.filter_jit
        def run(model, xs, states):
            return jax.vmap(model, axis_name="batch")(xs, states)

        _, states = run(model, xs, states)
        ys, states = run(model, xs + 1, states)
        return ys, states.get(model.norm.batch_state_index), states, model

    ys, norm, states, model = two_calls(stacked=True)
    expected, expected_norm, others, flat = two_calls(stacked=False)
    assert_close(ys, expected)
    assert_close(norm, expected_norm)
    seen = states.get(model.layers.layers.seen)
    for i, layer in enumerate(flat.layers):
        assert_close(seen[:, i], others.get(layer.seen))


def test_inside_a_sequential():
    def make(key):
        one, other = jr.split(key)
        return eqx.nn.Sequential([Stacked(Running, DEPTH, key=one), Block(key=other)])

    model, state = eqx.nn.make_with_state(make)(KEY)
    stack, block = model
    layers, apart = stack.unstack(copied(state))
    flat = eqx.nn.Sequential([*layers, block])
    xs = jr.normal(jr.key(1), (5, SIZE))
    ys, state = for_all(model)(xs, state)
    expected, apart = for_all(flat)(xs, apart)
    assert model.is_stateful()
    assert_close(ys, expected)
    assert_close(values(stack.unstack(state)[1], layers), values(apart, layers))


def test_of_sequentials_and_of_stacks():
    def make(key):
        one, other = jr.split(key)
        inner = Stacked(Running, 2, key=one)
        return eqx.nn.Sequential([inner, eqx.nn.Lambda(jnp.sin), Running(key=other)])

    outer, state = made(make)
    assert outer.is_stateful()
    blocks, apart = outer.unstack(copied(state))
    flat = []
    for inner, sine, last in blocks:
        layers, apart = inner.unstack(apart)
        flat += [*layers, sine, last]
    xs = jr.normal(jr.key(1), (5, SIZE))
    ys, state = for_all(outer)(xs, state)
    expected, _ = for_all(eqx.nn.Sequential(flat))(xs, apart)
    assert_close(ys, expected)


def test_a_stateless_stack_hands_the_state_on():
    _, state = made(Cached)
    stack = Stacked(Block, DEPTH, key=KEY)
    x, same = stack(X, state)
    assert same is state
    assert_close(x, stack(X))


def test_a_layer_may_say_that_it_has_no_state_after_all():
    class Maybe(eqx.nn.StatefulLayer):
        weight: Any

        def is_stateful(self):
            return False

        def __call__(self, x, *, key=None):
            return x * self.weight

    stack = Stacked.from_layers([Maybe(jnp.array(2.0))] * 2)
    assert not stack.is_stateful()
    assert_close(stack(X), 4 * X)


def test_under_a_loop_of_tokens():
    stack, state = made(Cached)
    layers, apart = stack.unstack(copied(state))

    def step(state, x):
        y, state = stack(x, state)
        return state, y

    xs = jr.normal(jr.key(1), (6, SIZE))
    state, ys = loopax.filter_scan(step, state, xs)
    for x, y in zip(xs, ys, strict=True):
        expected, apart, _ = in_turn(layers, x, apart)
        assert_close(y, expected)
    assert_close(values(stack.unstack(state)[1], layers), values(apart, layers))


# -- states to and from a sequential --------


def sequential():
    layers = [Running(key=key) for key in jr.split(KEY, DEPTH)]
    return eqx.nn.make_with_state(eqx.nn.Sequential)(layers)


def test_a_trained_sequential_becomes_a_stack_and_comes_back():
    model, state = sequential()
    xs = jr.normal(jr.key(1), (5, SIZE))
    _, state = for_all(model)(xs, state)
    stack, stacked = Stacked.from_layers(model, copied(state))
    ys, stacked_after = for_all(stack)(xs, copied(stacked))
    expected, after = for_all(model)(xs, copied(state))
    assert_close(ys, expected)
    # Exactly, without a trace of the stack.
    layers, back = stack.unstack(stacked)
    assert eqx.tree_equal(eqx.nn.Sequential(layers), model)
    assert_close(values(back, layers), values(state, model.layers), rtol=0, atol=0)
    assert set(keys_of(back)) == set(keys_of(state))
    assert_close(values(stack.unstack(stacked_after)[1], layers), values(after, layers))


def keys_of(state):
    return jax.tree.structure(state).node_data()[1]


def test_the_rest_of_the_state_is_left_alone():
    model, state = eqx.nn.make_with_state(Odd)(KEY, stacked=True)
    layers, apart = model.layers.unstack(copied(state))
    assert len(keys_of(apart)) == len(keys_of(state)) + 2 * (DEPTH - 1)
    stack, together = Stacked.from_layers(layers, copied(apart))
    assert len(keys_of(together)) == len(keys_of(state))
    flat = eqx.tree_at(lambda model: model.layers, model, layers)
    other = eqx.tree_at(lambda model: model.layers, model, stack)

    def outputs(model, state):
        run = jax.vmap(model, in_axes=(0, None), axis_name="batch")
        return run(jnp.ones((2, 2)), state)[0]

    expected = outputs(model, state)
    assert_close(outputs(flat, apart), expected)
    assert_close(outputs(other, together), expected)


def test_part_of_a_stack_with_its_state():
    stack, state = made(Cached, 5)
    _x, state = stack(X, state)
    layers, apart = stack.unstack(state)
    part, together = Stacked.from_layers(layers[1:3], copied(apart))
    y, _, _ = in_turn(layers[1:3], X, apart)
    assert_close(part(X, together)[0], y)
    assert eqx.tree_equal(part, stack[1:3])


@pytest.mark.parametrize("depth", [1, DEPTH])
def test_all_layers_of_a_stack_are_that_stack_with_its_state(depth):
    stack, state = made(Cached, depth)
    _, state = stack(X, state)
    expected = stack(X, copied(state))
    layers, apart = stack.unstack(copied(state))
    for same in (Stacked.from_layers(layers), stack[:], Stacked.from_layers(list(stack[:]))):
        assert eqx.tree_equal(same, stack)
        assert_close(same(X, copied(state))[0], expected[0])
    again, together = Stacked.from_layers(layers, apart)
    assert eqx.tree_equal(again, stack)
    assert_close(again(X, together)[0], expected[0])


def test_stacks_of_stacks_are_those_stacks_with_their_state():
    outer, state = made(lambda key: Stacked(Cached, 2, key=key))
    expected = outer(X, copied(state))[0]
    same = Stacked.from_layers([Stacked.from_layers(inner.unstack()) for inner in outer])
    assert eqx.tree_equal(same, outer)
    assert_close(same(X, state)[0], expected)


@pytest.mark.parametrize(
    "take",
    [
        lambda layers: layers[:2],
        lambda layers: layers[::-1],
        lambda layers: [*layers, layers[0]],
    ],
    ids=["some", "reversed", "more"],
)
def test_other_layers_than_all_of_a_stack_have_no_values_in_its_state(take):
    stack, state = made(Cached)
    part = Stacked.from_layers(take(stack.unstack()))
    text = message(loopax.ArgumentError, lambda: part(X, state))
    assert "take their values along if the state is passed to `unstack`" in text


def test_new_layers_become_a_model_with_states():
    layers = [Running(key=key) for key in jr.split(KEY, DEPTH)]
    stack, state = eqx.nn.make_with_state(Stacked.from_layers)(layers)
    flat, apart = eqx.nn.make_with_state(eqx.nn.Sequential)(layers)
    xs = jr.normal(jr.key(1), (5, SIZE))
    assert_close(for_all(stack)(xs, state)[0], for_all(flat)(xs, apart)[0])


def test_layers_that_were_never_given_to_make_with_state():
    stack = Stacked(Cached, DEPTH, key=KEY)
    state = eqx.nn.State(stack)
    layers = stack.unstack()
    apart = eqx.nn.State(layers)
    assert len(keys_of(apart)) == 2 * DEPTH
    assert_close(stack(X, state)[0], in_turn(layers, X, apart)[0])


def test_single_layers_have_a_state_each():
    stack, state = made(Cached)
    layers, apart = stack.unstack(state)
    assert [eqx.tree_equal(stack[i], layers[i]) for i in range(DEPTH)] == [True] * DEPTH
    markers = [str(layer.seen.marker) for layer in layers]
    assert markers == [f"Stacked.layers.seen[{i}]" for i in range(DEPTH)]
    assert len(set(markers)) == DEPTH
    assert "Stacked.layers.seen[1]=f32[8,4]" in repr(apart)


def test_first_values_may_be_numbers_and_trees_of_all_sorts():
    class Mixed(eqx.Module):
        index: eqx.nn.StateIndex

        def __init__(self, key):
            first = {"n": 0, "on": False, "key": key, "none": jnp.zeros((0, 3)), "x": 1.5}
            self.index = eqx.nn.StateIndex(first)

        def __call__(self, x, state):
            old = state.get(self.index)
            key, _ = jr.split(old["key"])
            new = {**old, "n": old["n"] + 1, "on": ~old["on"], "key": key, "x": old["x"] / 2}
            return x + new["n"] + new["x"] + new["on"], state.set(self.index, new)

    layers = [Mixed(key) for key in jr.split(KEY, DEPTH)]
    for stack, state in (made(Mixed), eqx.nn.make_with_state(Stacked.from_layers)(layers)):
        apart, states = stack.unstack(copied(state))
        x = y = X
        for _ in range(3):
            x, state = stack(x, state)
            y, states, _ = in_turn(apart, y, states)
        assert_close(x, y)
        again = values(stack.unstack(state)[1], apart)
        for ours, theirs in zip(again, values(states, apart), strict=True):
            assert eqx.tree_equal(ours, theirs)


def test_an_index_may_be_in_a_layer_twice():
    class Twice(eqx.Module):
        one: eqx.nn.StateIndex
        again: eqx.nn.StateIndex

        def __init__(self, key):
            self.one = self.again = eqx.nn.StateIndex(jnp.array(1.0))

        def __call__(self, x, state):
            state = state.set(self.one, 2 * state.get(self.again))
            return x + state.get(self.again), state

    stack = Stacked(Twice, 2, key=KEY)
    state = eqx.nn.State(stack)
    x, state = stack(X, state)
    assert_close(x, X + 4)
    layers, apart = stack.unstack(state)
    back, together = Stacked.from_layers(layers, apart)
    assert_close(back(X, together)[0], X + 8)


def test_saved_and_loaded():
    stack, state = made(Running)
    xs = jr.normal(jr.key(1), (5, SIZE))
    _, state = for_all(stack)(xs, state)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, (stack, state))
    file.seek(0)
    like = eqx.nn.make_with_state(Stacked)(Running, DEPTH, key=jr.key(7))
    loaded, loaded_state = eqx.tree_deserialise_leaves(file, like)
    assert_close(for_all(loaded)(xs, loaded_state), for_all(stack)(xs, state), 0, 0)


def test_copied_and_pickled():
    model, state = sequential()
    stack, state = Stacked.from_layers(model, state)
    assert eqx.tree_equal(copy.deepcopy(stack), stack)
    assert eqx.tree_equal(copy.deepcopy(state), state)
    again, its_state = pickle.loads(pickle.dumps((stack, state)))
    assert eqx.tree_equal(again, stack)
    layers, _ = again.unstack(its_state)
    assert eqx.tree_equal(eqx.nn.Sequential(layers), model)


# -- what is wrong is said --------


def message(error, run):
    with pytest.raises(error) as caught:
        run()
    return str(caught.value)


def test_without_a_state():
    stack, _ = made(Cached)
    assert message(loopax.ArgumentError, lambda: stack(X)).startswith(
        "Stacked: `Cached.__call__` (layers.py:"
    )
    assert message(loopax.ArgumentError, lambda: stack(X)).endswith(
        ") has a state. Make the model with eqx.nn.make_with_state, and call this with the "
        "state that it returns, right after `x`: x, state = stacked(x, state)."
    )


def test_with_the_state_of_another_model():
    stack, state = made(Cached)
    layers, apart = stack.unstack(state)
    for run in (
        lambda: stack(X, apart),
        lambda: stack.unstack(apart),
        lambda: Stacked.from_layers(layers, made(Running)[1]),
    ):
        text = message(loopax.ArgumentError, run)
        assert "`state` has no values for `Cached.__call__` (layers.py:" in text
        assert "eqx.nn.make_with_state that made this model" in text


def test_a_layer_of_a_stack_with_the_state_of_the_stack():
    stack, state = made(Cached)
    for layer in (stack[1], stack.unstack()[1], list(stack)[1]):
        text = message(KeyError, lambda layer=layer: layer(X, state))
        assert text == (
            "<'Stacked.layers.position[1]' of a layer taken out of a stack: its values are in "
            "the state that `stack.unstack(state)` returns with the layers>"
        )


def test_a_batch_of_states_without_vmap():
    stack, state = made(Cached)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 7), state)
    text = message(loopax.ArgumentError, lambda: stack(X, states))
    assert text == (
        "Stacked: `state` has float32[7,3,8,4], whose first axis is not that of the 3 layers. "
        "A batch of states is for jax.vmap to take apart: jax.vmap(stacked)(x, state), or "
        "eqx.filter_vmap over stacked.unstack(state)."
    )
    # Nor is the axis of the batch taken for that of the layers here.
    text = message(loopax.ArgumentError, lambda: stack.unstack(states))
    assert text.startswith("Stacked.unstack: `state` has float32[7,3,8,4], whose first axis ")


def test_a_state_may_be_used_once():
    stack, state = made(Cached)
    stack(X, state)
    assert "old state" in message(ValueError, lambda: stack(X, state))


def test_a_layer_that_returns_no_state():
    class Forgets(Cached):
        def __call__(self, x, state):
            return super().__call__(x, state)[0]

    stack, state = made(Forgets)
    text = message(loopax.ArgumentError, lambda: stack(X, state))
    assert text.startswith("Stacked: `Forgets.__call__` (test_stacked_state.py:")
    assert text.endswith(
        ") has a state, and so must return a pair (x, state), but returned float32[4]."
    )


def test_layers_and_states_made_at_once():
    make = eqx.nn.make_with_state(Cached)
    text = message(loopax.ArgumentError, lambda: Stacked(make, 3, key=KEY))
    assert text == (
        "Stacked: a layer must be callable, but `make_layer` returned a tuple of length 2. Let "
        "it return the layer alone, and make the whole model with eqx.nn.make_with_state: that "
        "is what collects the states."
    )


def test_unlike_layers_with_states():
    model, _ = sequential()
    fresh = Running(key=KEY)
    with pytest.raises(loopax.MismatchError) as caught:
        Stacked.from_layers([*model, fresh])
    assert {mismatch.path for mismatch in caught.value.mismatches} == {
        "layers[3].calls.init",
        "layers[3].linear.uv_index.init",
        "layers[3].norm.batch_counter.init",
        "layers[3].norm.batch_state_index.init",
    }


def test_dropped_in_by_a_partial():
    make = functools.partial(Stacked, Cached, DEPTH, unroll=True)
    stack, state = eqx.nn.make_with_state(make)(key=KEY)
    assert stack.options.unroll is True
    assert_close(stack(X, copied(state)), stack.with_options(unroll=1)(X, state))
