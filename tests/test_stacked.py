"""`nn.Stacked`: what `eqx.nn.Sequential` computes, as one scan."""

import copy
import functools
import io
import pathlib
import pickle
import re
import textwrap
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from layers import SIZE, Block, Running, assert_close, copied

import loopax
from loopax.nn import Stacked


KEY = jr.key(0)
X = jnp.linspace(-1.0, 1.0, SIZE)
DEPTH = 6

OPTIONS = {
    "lax": {},
    "unroll": {"unroll": 4},
    "unroll_all": {"unroll": True},
    "checkpointed": {"kind": "checkpointed"},
    "two_checkpoints": {"kind": "checkpointed", "checkpoints": 2},
    "all_checkpoints": {"checkpoints": "all"},
    "bounded": {"kind": "bounded"},
    "remat": {"remat": True},
    "policy": {"remat": jax.checkpoint_policies.dots_saveable},
    "remat_unroll": {"remat": True, "unroll": True},
    "remat_checkpointed": {"remat": True, "kind": "checkpointed"},
}
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.fixture
def stack():
    return Stacked(Block, DEPTH, key=KEY)


def sequential(stack):
    return eqx.nn.Sequential(stack.unstack())


def arrays(tree):
    return eqx.filter(tree, eqx.is_inexact_array)


# -- numbers are those of the layers one after the other --------


@options
@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
def test_the_output_is_that_of_a_sequential(stack, options, wrap):
    stack = stack.with_options(**options)
    assert_close(wrap(stack)(X), sequential(stack)(X))


@options
def test_each_layer_gets_the_key_that_it_gets_in_a_sequential(stack, options):
    stack = stack.with_options(**options)
    key = jr.key(1)
    actual = stack(X, key=key)
    assert_close(actual, sequential(stack)(X, key=key))
    assert not jnp.allclose(actual, stack(X))


@options
def test_gradients_are_those_of_a_sequential(stack, options):
    stack = stack.with_options(**options)

    # JAX 0.7 cannot lower the derivative of a `cond` that random keys go through.
    is_too_old = jax.__version_info__ < (0, 8) and options.get("kind") == "bounded"
    key = None if is_too_old else jr.key(1)

    def loss(model_and_x):
        model, x = model_and_x
        return jnp.sum(jnp.sin(model(x, key=key)))

    of_layers, of_x = eqx.filter_jit(eqx.filter_grad(loss))((stack, X))
    expected, expected_of_x = eqx.filter_grad(loss)((sequential(stack), X))
    assert_close(of_x, expected_of_x)
    assert_close(arrays(list(of_layers)), arrays(list(expected)))


TRANSFORMS = {
    "vmap": jax.vmap,
    "jacfwd": lambda f: jax.vmap(jax.jacfwd(f)),
    "jacrev": lambda f: jax.vmap(jax.jacrev(f)),
    "hessian": lambda f: jax.vmap(jax.hessian(lambda x: jnp.sum(f(x) ** 3))),
    "jvp": lambda f: lambda x: jax.jvp(jax.vmap(f), (x,), (jnp.ones_like(x),)),
    "grad_of_vmap": lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(x) ** 2)),
    "checkpoint": lambda f: jax.vmap(
        jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: f(x))(x)))
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("kind", ["lax", "checkpointed"])
def test_transforms(stack, transform, kind):
    stack = stack.with_options(kind=kind)
    xs = jr.normal(jr.key(2), (3, SIZE))
    assert_close(transform(stack)(xs), transform(sequential(stack))(xs), rtol=1e-4, atol=1e-5)


def test_an_ensemble_of_stacks():
    @eqx.filter_vmap
    def make(key):
        return Stacked(Block, DEPTH, key=key)

    keys = jr.split(KEY, 3)
    out = eqx.filter_vmap(lambda stack: stack(X))(make(keys))
    assert_close(out, jnp.stack([Stacked(Block, DEPTH, key=key)(X) for key in keys]))


def test_with_disable_jit(stack):
    with jax.disable_jit():
        actual = stack(X)
    assert_close(actual, stack(X))


def test_x_may_be_any_tree(stack):
    class Both(eqx.Module):
        block: Block

        def __call__(self, x):
            return {**x, "h": self.block(x["h"]), "n": x["n"] + 1}

    both = Stacked(lambda key: Both(Block(key=key)), DEPTH, key=KEY)
    out = both({"h": X, "n": jnp.array(0), "name": "a", "act": jax.nn.relu})
    assert_close(out["h"], stack(X))
    assert out["n"] == DEPTH
    assert out["name"] == "a"
    assert out["act"] is jax.nn.relu


# -- how layers are made, and got at --------


def make_by_place(key):
    return Block(key=key)


class Made(Block):
    def __init__(self, key):
        super().__init__(key=key)


@pytest.mark.parametrize(
    "make",
    [
        Block,
        Made,
        make_by_place,
        lambda k: Block(key=k),
        lambda *keys: Block(key=keys[0]),
        lambda **options: Block(**options),
        functools.partial(Block, scale=0.5),
        eqx.Partial(Block, scale=0.5),
    ],
)
def test_a_layer_is_made_for_each_key(make):
    stack = Stacked(make, 3, key=KEY)
    for layer, key in zip(stack, jr.split(KEY, 3), strict=True):
        expected = make_by_place(key).linear
        assert_close(arrays(layer.linear), arrays(expected))


def test_a_layer_is_made_once_and_traced_once():
    made, called = [], []

    class Noted(eqx.Module):
        weight: Any

        def __init__(self, key):
            made.append(1)
            self.weight = jr.normal(key, ())

        def __call__(self, x):
            called.append(1)
            return x * self.weight

    stack = Stacked(Noted, 50, key=KEY)
    stack(X)
    stack(X + 1)
    new = eqx.tree_at(lambda stack: stack.layers.weight, stack, replace_fn=lambda w: 2 * w)
    new(X)
    assert (len(made), len(called)) == (1, 1)


@pytest.mark.optimised
def test_a_program_does_not_grow_with_its_depth():
    def operations(depth):
        stack = Stacked(Block, depth, key=KEY)
        run = eqx.filter_jit(eqx.filter_grad(lambda stack: jnp.sum(stack(X))))
        return run.lower(stack).compile().compiled.as_text().count(" = ")

    assert operations(12) == operations(48)


def test_layers_come_back_as_they_went_in():
    layers = [Block(key=key) for key in jr.split(KEY, DEPTH)]
    stack = Stacked.from_layers(layers)
    assert len(stack) == DEPTH
    assert eqx.tree_equal(stack.unstack(), layers)
    assert eqx.tree_equal(list(stack), layers)
    assert eqx.tree_equal([stack[i] for i in range(DEPTH)], layers)
    assert eqx.tree_equal([stack[i] for i in range(-DEPTH, 0)], layers)
    assert eqx.tree_equal(stack[np.int64(1)], layers[1])
    for same in (eqx.nn.Sequential(layers), tuple(layers), iter(layers), stack):
        assert eqx.tree_equal(Stacked.from_layers(same), stack)


@pytest.mark.parametrize(
    "where",
    [slice(1, 4), slice(None), slice(None, None, 2), slice(None, None, -1), slice(2, 2)],
)
def test_a_slice_is_a_stack(stack, where):
    part = stack.with_options(unroll=2)[where]
    layers = stack.unstack()[where]
    assert isinstance(part, Stacked)
    assert part.options == stack.with_options(unroll=2).options
    assert eqx.tree_equal(list(part), layers)
    assert_close(part(X), eqx.nn.Sequential(layers)(X))


def test_there_is_no_layer_beyond_the_last(stack):
    for index in (DEPTH, -DEPTH - 1):
        with pytest.raises(IndexError, match=f"Stacked: there is no layer {index} of {DEPTH}"):
            stack[index]


def test_no_layers_at_all():
    stack = Stacked(Block, 0, key=KEY)
    assert len(stack) == 0
    assert list(stack) == []
    assert_close(stack(X), X)
    _x, outputs = stack.with_options(all_outputs=True)(X, key=KEY)
    assert outputs.shape == (0, SIZE)


def test_layers_without_arrays():
    stack = Stacked.from_layers([eqx.nn.Lambda(jnp.sin)] * 3)
    assert len(stack) == 3
    assert_close(stack(X), jnp.sin(jnp.sin(jnp.sin(X))))
    assert [layer.fn for layer in stack] == [jnp.sin] * 3
    assert len(stack[1:]) == 2
    assert len(Stacked(lambda key: eqx.nn.Identity(), 5, key=KEY)) == 5


def test_functions_as_layers():
    assert_close(Stacked.from_layers([jnp.sin, jnp.sin])(X), jnp.sin(jnp.sin(X)))


def test_methods_and_partial_applications_as_layers():
    def make(key):
        return functools.partial(jnp.matmul, jr.normal(key, (SIZE, SIZE)))

    class Scale(eqx.Module):
        gain: Any

        def apply(self, x):
            return self.gain * x

    expected = X
    for key in jr.split(KEY, 2):
        expected = make(key)(expected)
    assert_close(Stacked(make, 2, key=KEY)(X), expected)
    layers = [make(key) for key in jr.split(KEY, 2)]
    assert_close(Stacked.from_layers(layers)(X), expected)
    scales = [Scale(jnp.array(gain)).apply for gain in (2.0, 3.0)]
    assert_close(Stacked.from_layers(scales)(X), 6 * X)


def test_layers_that_are_transformed():
    xs = jnp.stack([X, 2 * X])
    linear = functools.partial(eqx.nn.Linear, SIZE, SIZE)
    stack = Stacked(linear, 2, key=KEY)
    each = Stacked(lambda key: eqx.filter_vmap(linear(key=key)), 2, key=KEY)
    assert_close(each(xs), jax.vmap(stack)(xs))
    each = Stacked(lambda key: eqx.filter_jit(linear(key=key)), 2, key=KEY)
    assert_close(each(X), stack(X))


def test_what_does_not_depend_on_the_key_is_there_for_each_layer():
    class Constant(eqx.Module):
        gain: Any
        table: Any

        def __init__(self, key):
            self.gain = jnp.ones(3)
            self.table = np.arange(3.0, dtype=np.float32)

        def __call__(self, x):
            return x * self.gain + self.table

    stack = Stacked(Constant, 2, key=KEY)
    assert stack.layers.gain.shape == stack.layers.table.shape == (2, 3)
    assert_close(stack(jnp.ones(3)), 1 + 2 * jnp.arange(3.0))


def test_the_examples_in_the_docstrings_run():
    namespace = {"__name__": "example"}
    for documented in (Stacked, Stacked.from_layers, Stacked.with_options):
        blocks = re.findall(r"^( *)```python\n(.*?)^\1```", documented.__doc__, re.S | re.M)
        assert blocks
        for _, code in blocks:
            exec(textwrap.dedent(code), namespace)


def test_it_is_found_in_the_package():
    assert Stacked.__module__ == "loopax.nn"
    assert loopax.nn.Stacked is Stacked


# -- in place of a sequential --------


def test_among_the_layers_of_a_sequential(stack):
    first, last = (eqx.nn.Linear(SIZE, SIZE, key=key) for key in jr.split(KEY))
    model = eqx.nn.Sequential([first, stack, eqx.nn.Lambda(jnp.tanh), last])
    flat = eqx.nn.Sequential([first, sequential(stack), eqx.nn.Lambda(jnp.tanh), last])
    assert_close(model(X), flat(X))
    assert_close(model(X, key=KEY), flat(X, key=KEY))
    assert not model.is_stateful()


def test_of_sequentials_and_of_stacks(stack):
    def make(key):
        one, other = jr.split(key)
        inner = Stacked(Block, 2, key=one, unroll=2)
        return eqx.nn.Sequential([inner, eqx.nn.Lambda(jnp.sin), Block(key=other)])

    outer = Stacked(make, 3, key=KEY)
    flat = [
        eqx.nn.Sequential([sequential(inner), sine, block])
        for inner, sine, block in outer.unstack()
    ]
    assert_close(outer(X), eqx.nn.Sequential(flat)(X))
    assert_close(outer(X, key=KEY), eqx.nn.Sequential(flat)(X, key=KEY))


def test_in_inference_mode():
    class Drop(eqx.Module):
        dropout: eqx.nn.Dropout = eqx.nn.Dropout(0.5)

        def __call__(self, x, *, key=None):
            return self.dropout(x, key=key)

    stack = Stacked(lambda key: Drop(), 3, key=KEY)
    assert not jnp.array_equal(stack(X, key=KEY), X)
    assert jnp.array_equal(eqx.nn.inference_mode(stack)(X, key=KEY), X)


def test_a_layer_that_wants_a_key_gets_none_if_there_is_none():
    class Wants(eqx.Module):
        def __call__(self, x, *, key):
            return x if key is None else x + 1

    assert_close(Stacked(lambda key: Wants(), 2, key=KEY)(X), X)
    assert_close(Stacked(lambda key: Wants(), 2, key=KEY)(X, key=KEY), X + 2)


def test_a_layer_needs_no_key_if_there_is_none():
    class Keyless(eqx.Module):
        def __call__(self, x):
            return x + 1

    stack = Stacked(lambda key: Keyless(), 2, key=KEY)
    assert_close(stack(X), X + 2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'key'"):
        stack(X, key=KEY)


# -- options --------


@options
def test_every_output_comes_along(stack, options):
    x, outputs = stack.with_options(all_outputs=True, **options)(X)
    expected, y = [], X
    for layer in stack:
        y = layer(y)
        expected.append(y)
    assert_close(outputs, jnp.stack(expected))
    assert_close(x, expected[-1])


@pytest.mark.parametrize("kind", [None, "checkpointed", "bounded"])
def test_in_reverse_the_last_layer_comes_first_and_keeps_its_key(stack, kind):
    keys = jr.split(KEY, DEPTH)
    y, expected = X, []
    for layer, key in reversed(list(zip(stack, keys, strict=True))):
        y = layer(y, key=key)
        expected.insert(0, y)
    run = stack.with_options(reverse=True, kind=kind, all_outputs=True)
    x, outputs = run(X, key=KEY)
    assert_close(x, y)
    assert_close(outputs, jnp.stack(expected))
    assert_close(outputs[0], x)


def test_other_arguments_go_to_every_layer(stack):
    y = X
    for layer in stack:
        y = layer(y, jnp.ones(SIZE), gain=jnp.array(2.0))
    assert_close(stack(X, jnp.ones(SIZE), gain=jnp.array(2.0)), y)
    gradient = jax.grad(lambda shift: jnp.sum(stack(X, shift)))(jnp.ones(SIZE))
    assert jnp.all(gradient != 0)


def test_arguments_may_be_static():
    class Chosen(eqx.Module):
        weight: Any

        def __call__(self, x, function, *, twice=False):
            assert isinstance(twice, bool)
            return function(x * self.weight) * (2 if twice else 1)

    stack = Stacked.from_layers([Chosen(jnp.array(w)) for w in (1.0, 2.0)])
    assert_close(stack(X, jnp.sin), jnp.sin(2 * jnp.sin(X)))
    assert_close(stack(X, jnp.cos, twice=True), 2 * jnp.cos(4 * jnp.cos(X)))


def test_options_may_be_given_at_each_place(stack):
    assert stack.options.unroll == 1
    assert Stacked(Block, DEPTH, key=KEY, unroll=np.int32(3)).options.unroll == 3
    assert Stacked.from_layers(stack.unstack(), remat=True).options.remat is True
    new = stack.with_options(unroll=2).with_options(reverse=True)
    assert (new.options.unroll, new.options.reverse) == (2, True)
    assert stack.options.reverse is False


def memory(stack):
    xs = jnp.ones((256, 32))
    run = eqx.filter_jit(eqx.filter_grad(lambda stack: jnp.sum(jax.vmap(stack)(xs))))
    return run.lower(stack).compile().compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.optimised
def test_remat_and_checkpoints_save_memory():
    stack = Stacked(lambda key: eqx.nn.MLP(32, 32, 512, 3, key=key), 32, key=KEY)
    plain = memory(stack)
    assert memory(stack.with_options(remat=True)) < plain / 5
    assert memory(stack.with_options(kind="checkpointed")) < plain / 5
    save_all = jax.checkpoint_policies.everything_saveable
    assert memory(stack.with_options(remat=save_all)) > plain / 2


# -- what else is done with a model --------


def test_saved_and_loaded(stack):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, stack)
    file.seek(0)
    loaded = eqx.tree_deserialise_leaves(file, Stacked(Block, DEPTH, key=jr.key(7)))
    assert eqx.tree_equal(loaded, stack)
    assert jnp.array_equal(loaded(X), stack(X))


def test_subclasses_keep_what_they_add():
    class Named(Stacked):
        name: Any

        def __init__(self, name):
            super().__init__(Block, DEPTH, key=KEY)
            self.name = name

    named = Named("a")
    for other in (named, named[1:3], named.with_options(unroll=2)):
        assert type(other) is Named
        assert other.name == "a"
    assert_close(named(X), Stacked(Block, DEPTH, key=KEY)(X))


def test_copied_and_pickled():
    stack = Stacked(functools.partial(eqx.nn.Linear, SIZE, SIZE), DEPTH, key=KEY, remat=True)
    assert eqx.tree_equal(copy.deepcopy(stack), stack)
    assert eqx.tree_equal(pickle.loads(pickle.dumps(stack)), stack)


def test_made_in_the_abstract():
    shape = eqx.filter_eval_shape(lambda key: Stacked(Block, DEPTH, key=key), KEY)
    assert shape.layers.linear.weight.shape == (DEPTH, SIZE, SIZE)
    assert eqx.filter_eval_shape(lambda stack: stack(X), shape).shape == (SIZE,)


def over_the_layers():
    return NamedSharding(Mesh(np.array(jax.devices()), ("layers",)), P("layers"))


@pytest.mark.parametrize("name", ["lax", "checkpointed", "remat"])
def test_sharded_along_the_layers(name):
    @eqx.filter_jit
    def run(stack):
        return eqx.filter_value_and_grad(lambda stack: jnp.sum(stack(X) ** 2))(stack)

    stack = Stacked(Block, 24, key=KEY, **OPTIONS[name])
    sharded = eqx.filter_shard(stack, over_the_layers())
    assert len(sharded.layers.linear.weight.addressable_shards) == 8
    value, gradient = run(sharded)
    wanted = run(stack)
    assert_close((value, gradient), wanted)
    updated = eqx.apply_updates(sharded, jax.tree.map(lambda g: -0.1 * g, gradient))
    expected = eqx.apply_updates(stack, jax.tree.map(lambda g: -0.1 * g, wanted[1]))
    assert_close(eqx.filter(updated, eqx.is_array), eqx.filter(expected, eqx.is_array))
    assert_close(
        eqx.filter(sharded.unstack(), eqx.is_array), eqx.filter(stack.unstack(), eqx.is_array)
    )


def test_a_few_layers_on_each_device():
    def local(stack, x):
        assert len(stack) == 3
        for device in range(8):
            y = jax.lax.pcast(x, "layers", to="varying") if hasattr(jax.lax, "pcast") else x
            y = jnp.where(jax.lax.axis_index("layers") == device, stack(y), 0.0)
            x = jax.lax.psum(y, "layers")
        return x

    stack = Stacked(Block, 24, key=KEY)
    dynamic, static = eqx.partition(stack, eqx.is_array)
    pipeline = jax.shard_map(
        lambda dynamic, x: local(eqx.combine(dynamic, static), x),
        mesh=over_the_layers().mesh,
        in_specs=(P("layers"), P()),
        out_specs=P(),
        check_vma=hasattr(jax.lax, "pcast"),
    )
    assert_close(jax.jit(pipeline)(dynamic, X), stack(X))


def test_states_sharded_along_the_layers():
    stack, state = eqx.nn.make_with_state(Stacked)(Running, 8, key=KEY)
    xs = jr.normal(jr.key(1), (5, SIZE))

    @eqx.filter_jit
    def run(stack, state):
        over_batch = jax.vmap(stack, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        return over_batch(xs, state)

    expected = run(stack, copied(state))
    over = over_the_layers()
    assert_close(run(eqx.filter_shard(stack, over), eqx.filter_shard(state, over)), expected)


# -- what is wrong is said --------


class Holder:
    """No PyTree, and so static."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return "Holder"


def message(error, run):
    with pytest.raises(error) as caught:
        run()
    return str(caught.value)


UNLIKE = (
    "Layers that are not alike go before or after the stack, in an eqx.nn.Sequential; or each "
    "of the stacked layers is a block of unlike ones."
)


def test_unlike_layers_are_told_by_index_and_path():
    unlike = [{}, {}, {"activation": jax.nn.relu}, {"scale": 1.5}, {"name": "last"}]
    layers = [Block(key=KEY, **each) for each in unlike]
    text = message(loopax.MismatchError, lambda: Stacked.from_layers(layers))
    assert text == (
        "Stacked.from_layers: the layers must be like `layers[0]`, up to array values, but:\n"
        "\n"
        "  layers[2].activation   has <function relu>   where layers[0] has <function tanh>\n"
        "  layers[3].scale        has 1.5 (float)       where layers[0] has 0.5 (float)\n"
        '  layers[4].name         has "last"            where layers[0] has "block"\n'
        "\n"
        "Leave out what else differs, or make it an array.\n" + UNLIKE
    )


def test_layers_of_another_size_are_told_by_index_and_path():
    layers = [Block(key=KEY), Block(key=KEY, size=2)]
    with pytest.raises(loopax.MismatchError) as caught:
        Stacked.from_layers(layers)
    assert {m.path for m in caught.value.mismatches} >= {
        "layers[1].linear.weight",
        "layers[1].linear.in_features",
    }


def test_a_layer_that_returns_another_x():
    stack = Stacked(functools.partial(eqx.nn.Linear, 4, 5), 3, key=KEY)
    text = message(loopax.MismatchError, lambda: stack(X))
    assert text.startswith("Stacked: `Linear.__call__` (_linear.py:")
    assert text.partition(") ")[2] == (
        "must return an `x` like the one it was given, up to array values, for the next layer "
        "to go on with, but:\n"
        "\n"
        "  x   was float32[4]   came back as float32[5]\n"
        "\n"
        "  * x: an array keeps its shape from layer to layer. Return shape (4,), or start from "
        "shape (5,).\n"
        "\n" + UNLIKE
    )


def test_a_number_for_x(stack):
    text = message(
        loopax.MismatchError, lambda: Stacked.from_layers([eqx.nn.Lambda(jnp.sin)])(1.0)
    )
    assert "x is a Python float. To change it in the layers, start from an array, " in text
    assert "trace_numbers" not in text


@pytest.mark.parametrize(
    ("run", "error", "text"),
    [
        (
            lambda: Stacked(Block, 2, key=KEY, depth_unroll=2),
            loopax.ArgumentError,
            "Stacked: there is no option `depth_unroll`, but unroll, reverse, kind, "
            "checkpoints, remat, all_outputs. Did you mean `unroll`? What is meant for the "
            "layers goes to them when they are made, or called.",
        ),
        (
            lambda: Stacked(Block, 2, key=KEY, unroll="all"),
            loopax.ArgumentError,
            'Stacked: `unroll` must be an integer, but is "all".',
        ),
        (
            lambda: Stacked(Block, 2, key=KEY, remat="dots"),
            loopax.ArgumentError,
            'Stacked: `remat` must be a boolean or callable, but is "dots".',
        ),
        (
            lambda: Stacked(Block, 2, key=KEY, kind="nested"),
            loopax.ArgumentError,
            "Stacked: `kind` must be one of 'lax', 'checkpointed', 'bounded', or None, but is "
            '"nested".',
        ),
        (
            lambda: Stacked(Block, 2, key=KEY, kind="bounded", unroll=2),
            loopax.ArgumentError,
            'Stacked: `unroll` is for kind="lax"; kind="bounded" has none.',
        ),
        (
            lambda: Stacked(Block, 2.5, key=KEY),
            loopax.ArgumentError,
            "Stacked: `depth` must be an integer, but is 2.5 (float).",
        ),
        (
            lambda: Stacked(Block, -1, key=KEY),
            loopax.LengthError,
            "Stacked: `depth` must not be negative, got -1.",
        ),
        (
            lambda: Stacked(Block, 2, key=0),
            loopax.ArgumentError,
            "Stacked: `key` must be an array, but is 0 (int). A random key is made by "
            "jax.random.key(0).",
        ),
        (
            lambda: Stacked([Block(key=KEY), Block(key=KEY)]),
            loopax.ArgumentError,
            "Stacked: `make_layer` must be callable, but is a list of length 2. To stack "
            "layers that there are, call Stacked.from_layers.",
        ),
        (
            lambda: Stacked(lambda key: jnp.ones(3), 2, key=KEY),
            loopax.ArgumentError,
            "Stacked: a layer must be callable, but `make_layer` returned float32[3].",
        ),
        (
            lambda: Stacked.from_layers([]),
            loopax.LengthError,
            "Stacked.from_layers: `layers` is empty; there is nothing to stack.",
        ),
        (
            lambda: Stacked.from_layers(Block(key=KEY)),
            loopax.ArgumentError,
            "Stacked.from_layers: `layers` must be an iterable, but is a Block.",
        ),
        (
            lambda: Stacked.from_layers([jnp.ones(3)]),
            loopax.ArgumentError,
            "Stacked.from_layers: a layer must be callable, but `layers` holds float32[3].",
        ),
        (
            lambda: Stacked(Block, 2, key=KEY)(X, key=0),
            loopax.ArgumentError,
            "Stacked: `key` must be an array or None, but is 0 (int). A random key is made by "
            "jax.random.key(0).",
        ),
    ],
)
def test_a_wrong_argument_is_named(run, error, text):
    assert message(error, run) == text


def test_arrays_of_several_lengths(stack):
    broken = eqx.tree_at(lambda s: s.layers.linear.bias, stack, jnp.zeros((2, SIZE)))
    text = message(loopax.LengthError, lambda: broken(X))
    assert text.splitlines()[0] == "Stacked: the arrays in `layers` must be of one length, but:"
    assert "  layers.linear.bias     float32[2,4]     has length 2 along axis 0" in text


@pytest.mark.parametrize(
    "returned", [[1, 2], (1,), {"a": 2}, None, lambda x: x + 1, Holder(1), 1.5]
)
@pytest.mark.parametrize("given", [[1], {"b": 2}, jnp.tanh, jnp.ones(3), True, None])
def test_what_a_layer_returns_is_not_told_in_words_of_loops(given, returned):
    if returned is given:
        returned = 0
    stack = Stacked.from_layers([lambda x: returned])
    text = message(loopax.MismatchError, lambda: stack(given))
    assert not re.search(r"\bloop\b|\bbody\b|\bscan\b|trace_numbers", text), text


def test_a_layer_that_changes_an_object_in_place():
    class Counts(eqx.Module):
        def __call__(self, x):
            x["log"].value += 1
            return x

    stack = Stacked.from_layers([Counts()] * 2)
    text = message(loopax.MismatchError, lambda: stack({"log": Holder(1)}))
    assert text.startswith("Stacked: `Counts.__call__` (test_stacked.py:")
    assert '  x["log"].value   was 1 (int)   came back as 2 (int)\n' in text
    assert "A layer runs once, while it is traced." in text


def test_layers_of_several_classes():
    layers = [eqx.nn.Linear(4, 4, key=KEY), eqx.nn.MLP(4, 4, 4, 1, key=KEY)]
    assert message(loopax.MismatchError, lambda: Stacked.from_layers(layers)) == (
        "Stacked.from_layers: the layers must be like `layers[0]`, up to array values, but:\n"
        "\n"
        "  layers[1]   has an MLP   where layers[0] has a Linear\n"
        "\n"
        "Trees must be of one structure.\n" + UNLIKE
    )


@pytest.mark.parametrize(
    "layer",
    [
        eqx.nn.Linear(SIZE, SIZE, key=KEY),
        eqx.nn.Identity(),
        eqx.nn.Lambda(jnp.sin),
        eqx.nn.Sequential([eqx.nn.Identity()]),
        Block(key=KEY),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_layer_in_place_of_what_makes_one(layer):
    text = message(loopax.ArgumentError, lambda: Stacked(layer, 3, key=KEY))
    name = type(layer).__name__
    assert text.startswith(
        "Stacked: `make_layer` is called with a key alone, make_layer(key=key), but "
        f"`{name}.__call__` ("
    )
    assert text.endswith(
        ") needs `x` too. If it is a layer itself, pass what makes it instead: a class, or a "
        "function of a key. To stack layers that there are, call Stacked.from_layers."
    )


def test_what_makes_a_layer_of_more_than_a_key():
    text = message(loopax.ArgumentError, lambda: Stacked(eqx.nn.Linear, 3, key=KEY))
    assert text.startswith(
        "Stacked: `make_layer` is called with a key alone, make_layer(key=key), but `Linear` "
    )
    assert text.endswith(
        "needs `in_features`, `out_features` too. Give it the rest first, by functools.partial "
        "or a lambda: lambda key: Linear(..., key=key)."
    )


def test_a_layer_without_a_key_in_place_of_what_makes_one():
    class Halve(eqx.Module):
        def __call__(self, x):
            return x / 2

    with pytest.raises(TypeError) as caught:
        Stacked(Halve(), 3, key=KEY)
    said = "Stacked: `make_layer` is a Halve, and was called with a key, to make a layer."
    assert any(note.startswith(said) for note in caught.value.__notes__)


def test_a_module_may_make_layers():
    class Factory(eqx.Module):
        scale: float

        def __call__(self, key, /):
            return Block(key=key, scale=self.scale)

    expected = Stacked(lambda key: Block(key=key, scale=0.1), 3, key=KEY)
    assert eqx.tree_equal(Stacked(Factory(0.1), 3, key=KEY), expected)


def test_an_error_in_a_layer_is_the_users_own():
    class Fails(eqx.Module):
        weight: Any

        def __call__(self, x):
            raise ZeroDivisionError("in the layer")

    with pytest.raises(ZeroDivisionError, match="in the layer") as caught:
        Stacked.from_layers([Fails(jnp.ones(()))] * 2)(X)
    files = [entry.path.name for entry in caught.traceback]
    assert files[-1] == pathlib.Path(__file__).name
    assert not any(name.startswith("_stacked") for name in files)


# -- calls in a hurry --------------------------------------------------------------------


LINEAR = lambda key: eqx.nn.Linear(3, 3, key=key)
THREE = Stacked(LINEAR, 3, key=jr.key(0))


@pytest.mark.parametrize("index", ["a", 1.5, True, None, (1, 2), jnp.ones(2)], ids=repr)
def test_a_layer_is_taken_by_an_integer(index):
    with pytest.raises(loopax.ArgumentError, match="Stacked: `index` must be an integer that"):
        THREE[index]


def test_a_layer_is_not_taken_by_what_is_not_known_yet():
    with pytest.raises(loopax.ArgumentError, match="`index` must be an integer that is known"):
        jax.jit(lambda index: THREE[index](jnp.ones(3)))(1)


@pytest.mark.parametrize("depth", [True, 2.5, "three"])
def test_a_depth_is_an_integer(depth):
    with pytest.raises(loopax.ArgumentError, match="Stacked: `depth` must be an integer"):
        Stacked(LINEAR, depth, key=jr.key(0))


def test_keys_are_split_by_the_stack():
    keys = jr.split(jr.key(0), 3)
    wanted = r"Stacked: `key` must be one random key, such as jax.random.key\(0\), .* key<fry>"
    with pytest.raises(loopax.ArgumentError, match=wanted):
        Stacked(LINEAR, 3, key=keys)
    with pytest.raises(loopax.ArgumentError, match=wanted):
        THREE(jnp.ones(3), key=keys)


def test_an_option_that_is_misspelt_is_guessed():
    with pytest.raises(loopax.ArgumentError, match="Did you mean `unroll`"):
        Stacked(LINEAR, 3, key=jr.key(0), unrol=2)


def test_an_option_in_a_call_is_for_the_layers_which_may_know_it():
    with pytest.raises(TypeError) as caught:
        THREE(jnp.ones(3), all_outputs=True)
    assert "call stacked.with_options(all_outputs=True)" in "".join(caught.value.__notes__)

    class Flips(eqx.Module):
        def __init__(self, key):
            pass

        def __call__(self, x, reverse):
            return -x if reverse else x

    assert Stacked(Flips, 3, key=jr.key(0))(1.0 * jnp.ones(()), reverse=True) == -1


@pytest.mark.parametrize("remat", [jax.checkpoint, eqx.filter_checkpoint])
def test_a_policy_is_not_the_function_that_takes_one(remat):
    with pytest.raises(loopax.ArgumentError, match="`remat` is True to do what"):
        THREE.with_options(remat=remat)
