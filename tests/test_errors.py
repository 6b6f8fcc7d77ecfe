"""What the user reads when something is wrong: whole messages, compared as text.

`message` writes `here` for this file and a line of it, and so texts stay when lines move.
"""

import collections
import enum
import functools
import os
import pickle
import re
import traceback
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from versions import VARIES, advice_to_vary

import loopax


XS = jnp.ones(3)
F3 = jnp.zeros(3)
SHORT = jnp.zeros(2)

STATIC = "Anything that is not an array is static: it keeps one value for the whole loop."


def message(call, kind=loopax.MismatchError):
    """What `call` raises, as text."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return re.sub(r"test_errors\.py:\d+", "here", str(caught.value))


def text(*lines):
    return "\n".join(lines)


def must_return(caller, function="`step` (here)"):
    return f"{caller}: {function} must return the carry it was given, up to array values, but:"


def scan_to(before, after, **options):
    """What a scan says whose body returns `after` for `before`."""

    def step(carry, x):
        return after, None

    return message(lambda: loopax.filter_scan(step, before, XS, **options))


class Pair(collections.namedtuple("Pair", ["first", "second"])):
    __slots__ = ()


class Mode(enum.Enum):
    TRAIN = "train"
    TEST = "test"


class Layer(eqx.Module):
    weight: Any
    activation: Any = None
    use_bias: Any = eqx.field(static=True, default=True)

    def advance(self, carry, x):
        return SHORT, None

    def __call__(self, carry, x):
        return SHORT, None


class OtherLayer(eqx.Module):
    weight: Any


class Agent:
    def __repr__(self):
        return "<Agent>"

    def advance(self, carry, x):
        return SHORT, None

    def __call__(self, carry, x):
        return SHORT, None


class Thing:
    """Not callable."""

    def __init__(self, text="<Thing>"):
        self.text = text

    def __repr__(self):
        if self.text is None:
            raise RuntimeError("no text")
        return self.text


class OtherThing(Thing):
    pass


class Table:
    """A node with metadata, and with fields that come and go."""

    def __init__(self, title=None, **fields):
        self.title = title
        self.fields = fields


jtu.register_pytree_with_keys(
    Table,
    lambda table: (
        [(jtu.GetAttrKey(name), child) for name, child in table.fields.items()],
        (table.title, tuple(table.fields)),
    ),
    lambda data, children: Table(data[0], **dict(zip(data[1], children, strict=True))),
)


def relu(x):
    return x


def tanh(x):
    return x


def scaled_by(factor):
    return lambda x: factor * x


# -- the whole of one message ------------------------------------------------------------


def test_a_rollout_that_goes_wrong_in_four_places():
    net = Layer(jnp.ones(2), activation=relu)
    carry = {
        "policy": net,
        "n_steps": 0,
        "momentum": jnp.zeros(32),
        "info": {"reward": jnp.zeros(())},
    }

    def step(carry, x):
        return {
            "policy": Layer(carry["policy"].weight, activation=tanh),
            "n_steps": carry["n_steps"] + 1,
            "momentum": carry["momentum"].astype(jnp.bfloat16),
            "info": {**carry["info"], "truncated": x > 0},
        }, x

    assert message(lambda: loopax.filter_scan(step, carry, XS)) == text(
        "filter_scan: `step` (here) must return the carry it was given, up to array "
        "values, but:",
        "",
        '  carry["info"]                                      came back with a new '
        'key "truncated"',
        '  carry["momentum"]            was float32[32]       came back as bfloat16[32]',
        '  carry["n_steps"]             was 0 (int)           came back as 1 (int)',
        '  carry["policy"].activation   was <function relu>   came back as <function tanh>',
        "",
        "Anything that is not an array is static: it keeps one value for the whole loop.",
        '  * carry["info"]: start with the key "truncated" in place, or do not add it '
        "in the loop.",
        '  * carry["momentum"]: cast it back with .astype(jnp.float32), or start from '
        "bfloat16.",
        '  * carry["n_steps"] is a Python int. To change it in the loop, start from '
        "an array, jnp.asarray(0), or pass trace_numbers=True.",
        '  * carry["policy"].activation: to choose between functions in the loop, '
        "carry an index and call loopax.filter_switch.",
    )


# -- static leaves -----------------------------------------------------------------------


def test_a_counter_that_is_a_python_int():
    assert scan_to({"n": 0}, {"n": 1}) == text(
        must_return("filter_scan"),
        "",
        '  carry["n"]   was 0 (int)   came back as 1 (int)',
        "",
        STATIC,
        '  * carry["n"] is a Python int. To change it in the loop, start from an '
        "array, jnp.asarray(0), or pass trace_numbers=True.",
    )


def test_a_counter_that_becomes_an_array():
    assert scan_to({"n": 0}, {"n": jnp.asarray(1)}) == text(
        must_return("filter_scan"),
        "",
        '  carry["n"]   was 0 (int)   came back as int32[]',
        "",
        STATIC,
        '  * carry["n"] is a Python int. To change it in the loop, start from an '
        "array, jnp.asarray(0), or pass trace_numbers=True.",
    )


def test_a_python_float():
    assert scan_to([0.5, XS], [0.25, XS]) == text(
        must_return("filter_scan"),
        "",
        "  carry[0]   was 0.5 (float)   came back as 0.25 (float)",
        "",
        STATIC,
        "  * carry[0] is a Python float. To change it in the loop, start from an "
        "array, jnp.asarray(0.5), or pass trace_numbers=True.",
    )


def test_a_flag():
    assert scan_to({"done": False}, {"done": jnp.asarray(True)}) == text(
        must_return("filter_scan"),
        "",
        '  carry["done"]   was False (bool)   came back as bool[]',
        "",
        STATIC,
        '  * carry["done"] is a Python bool. Set flags outside of the loop. To change '
        "it in the loop, start from an array, jnp.asarray(False).",
    )


def test_true_for_one():
    assert scan_to({"n": 1}, {"n": True}) == text(
        must_return("filter_scan"),
        "",
        '  carry["n"]   was 1 (int)   came back as True (bool)',
        "",
        STATIC,
        '  * carry["n"] is a Python int. To change it in the loop, start from an '
        "array, jnp.asarray(1), or pass trace_numbers=True.",
    )


def test_a_number_that_becomes_a_string():
    assert scan_to({"n": 1}, {"n": "1"}) == text(
        must_return("filter_scan"),
        "",
        '  carry["n"]   was 1 (int)   came back as "1"',
        "",
        STATIC,
        '  * carry["n"] is a Python int. To change it in the loop, start from an '
        "array, jnp.asarray(1), or pass trace_numbers=True.",
    )


def test_a_bare_carry():
    assert scan_to(0, 1) == text(
        must_return("filter_scan"),
        "",
        "  carry   was 0 (int)   came back as 1 (int)",
        "",
        STATIC,
        "  * carry is a Python int. To change it in the loop, start from an array, "
        "jnp.asarray(0), or pass trace_numbers=True.",
    )


def test_a_string():
    assert scan_to({"phase": "early"}, {"phase": "late"}) == text(
        must_return("filter_scan"),
        "",
        '  carry["phase"]   was "early"   came back as "late"',
        "",
        STATIC,
        '  * carry["phase"]: keep what changes in an array, or leave it out.',
    )


def test_a_string_that_becomes_an_array():
    assert scan_to({"phase": "early"}, {"phase": F3}) == text(
        must_return("filter_scan"),
        "",
        '  carry["phase"]   was "early"   came back as float32[3]',
        "",
        STATIC,
        '  * carry["phase"]: return what was there before, or start from an array.',
    )


def test_a_string_that_becomes_none():
    assert scan_to({"phase": "early"}, {"phase": None}) == text(
        must_return("filter_scan"),
        "",
        '  carry["phase"]   was "early"   came back as None',
        "",
        STATIC,
        '  * carry["phase"]: keep what changes in an array, or leave it out.',
    )


def test_none_that_becomes_an_array():
    assert scan_to({"hidden": None}, {"hidden": F3}) == text(
        must_return("filter_scan"),
        "",
        '  carry["hidden"]   was None   came back as float32[3]',
        "",
        STATIC,
        '  * carry["hidden"]: None is static too. Start from an array, '
        "jnp.zeros((3,), jnp.float32).",
    )


def test_none_that_becomes_a_boolean_array():
    assert scan_to({"mask": None}, {"mask": jnp.zeros((2, 2), bool)}) == text(
        must_return("filter_scan"),
        "",
        '  carry["mask"]   was None   came back as bool[2,2]',
        "",
        STATIC,
        '  * carry["mask"]: None is static too. Start from an array, jnp.zeros((2, '
        "2), jnp.bool_).",
    )


def test_none_that_becomes_a_key():
    assert scan_to({"key": None}, {"key": jr.key(0)}) == text(
        must_return("filter_scan"),
        "",
        '  carry["key"]   was None   came back as key<fry>[]',
        "",
        STATIC,
        '  * carry["key"]: None is static too. Start from random keys of type key<fry>[].',
    )


def test_none_that_becomes_a_number():
    assert scan_to({"n": None}, {"n": 1}) == text(
        must_return("filter_scan"),
        "",
        '  carry["n"]   was None   came back as 1 (int)',
        "",
        STATIC,
        '  * carry["n"]: None is static too. Start from what the body returns.',
    )


def test_none_that_becomes_a_tree():
    assert scan_to({"hidden": None}, {"hidden": {"h": F3, "c": F3}}) == text(
        must_return("filter_scan"),
        "",
        '  carry["hidden"]   was None   came back as a dict with keys "c", "h"',
        "",
        STATIC,
        '  * carry["hidden"]: None is static too. Start from what the body returns.',
    )


def test_a_tree_that_becomes_none():
    assert scan_to({"hidden": (F3, F3)}, {"hidden": None}) == text(
        must_return("filter_scan"),
        "",
        '  carry["hidden"]   was a tuple of length 2   came back as None',
        "",
        STATIC,
        '  * carry["hidden"]: return what was there before, or start from what the '
        "body returns.",
    )


def test_a_function_for_another():
    assert scan_to(Layer(F3, relu), Layer(F3, tanh)) == text(
        must_return("filter_scan"),
        "",
        "  carry.activation   was <function relu>   came back as <function tanh>",
        "",
        STATIC,
        "  * carry.activation: to choose between functions in the loop, carry an "
        "index and call loopax.filter_switch.",
    )


def test_a_function_of_jax_for_another():
    assert scan_to(Layer(F3, jax.nn.relu), Layer(F3, jnp.tanh)) == text(
        must_return("filter_scan"),
        "",
        "  carry.activation   was <function relu>   came back as <function tanh>",
        "",
        STATIC,
        "  * carry.activation: to choose between functions in the loop, carry an "
        "index and call loopax.filter_switch.",
    )


def test_two_lambdas():
    before, after = Layer(F3, lambda x: x), Layer(F3, lambda x: -x)
    assert scan_to(before, after) == text(
        must_return("filter_scan"),
        "",
        "  carry.activation   was <function <lambda>>   came back as another "
        "<function <lambda>>",
        "",
        STATIC,
        "  * carry.activation: to choose between functions in the loop, carry an "
        "index and call loopax.filter_switch.",
    )


def test_functions_of_one_name_in_other_places():
    def before(x):
        return x

    def after(x):
        return -x

    after.__name__ = "before"
    assert scan_to({"f": before}, {"f": after}) == text(
        must_return("filter_scan"),
        "",
        '  carry["f"]   was <function before> (here)   came back as <function before> (here)',
        "",
        STATIC,
        '  * carry["f"]: to choose between functions in the loop, carry an index and '
        "call loopax.filter_switch.",
    )


def test_a_function_made_anew_over_another_value():
    assert scan_to({"f": scaled_by(1)}, {"f": scaled_by(2)}) == text(
        must_return("filter_scan"),
        "",
        '  carry["f"]   was <function <lambda>>   came back as another <function <lambda>>',
        "",
        STATIC,
        '  * carry["f"]: it was made anew, over other values. Make it once, outside '
        "of the loop, or carry those values as arrays.",
    )


def test_a_method_of_another_object():
    assert scan_to({"f": Agent().advance}, {"f": Agent().advance}) == text(
        must_return("filter_scan"),
        "",
        '  carry["f"]   was <method advance>   came back as another <method advance>',
        "",
        STATIC,
        '  * carry["f"]: it is a method of another object. Return the one that was there.',
    )


def test_a_partial_with_another_argument():
    before, after = functools.partial(max, 1), functools.partial(max, 2)
    assert scan_to({"f": before}, {"f": after}) == text(
        must_return("filter_scan"),
        "",
        '  carry["f"]   was <function max> with 1   came back as <function max> with 2',
        "",
        STATIC,
        '  * carry["f"]: not a PyTree, and so one static value. Make it an '
        "eqx.Module, so that the arrays in it are seen, or return the same object.",
    )


def test_a_function_that_becomes_an_array():
    assert scan_to({"f": relu}, {"f": F3}) == text(
        must_return("filter_scan"),
        "",
        '  carry["f"]   was <function relu>   came back as float32[3]',
        "",
        STATIC,
        '  * carry["f"]: return what was there before, or start from an array.',
    )


def test_a_class_for_another():
    assert scan_to({"dtype": jnp.float32}, {"dtype": jnp.bfloat16}) == text(
        must_return("filter_scan"),
        "",
        '  carry["dtype"]   was <class float32>   came back as <class bfloat16>',
        "",
        STATIC,
        '  * carry["dtype"]: not a PyTree, and so one static value. Make it an '
        "eqx.Module, so that the arrays in it are seen, or return the same object.",
    )


def test_a_member_of_an_enumeration():
    assert scan_to({"mode": Mode.TRAIN}, {"mode": Mode.TEST}) == text(
        must_return("filter_scan"),
        "",
        "  carry[\"mode\"]   was <Mode.TRAIN: 'train'>   came back as <Mode.TEST: 'test'>",
        "",
        STATIC,
        '  * carry["mode"]: not a PyTree, and so one static value. Make it an '
        "eqx.Module, so that the arrays in it are seen, or return the same object.",
    )


def test_objects_that_read_the_same():
    assert scan_to({"a": Thing()}, {"a": Thing()}) == text(
        must_return("filter_scan"),
        "",
        '  carry["a"]   was <Thing>   came back as another <Thing>',
        "",
        STATIC,
        '  * carry["a"]: not a PyTree, and so one static value. Make it an '
        "eqx.Module, so that the arrays in it are seen, or return the same object.",
    )


def test_objects_of_other_types_that_read_the_same():
    assert scan_to({"a": Thing()}, {"a": OtherThing()}) == text(
        must_return("filter_scan"),
        "",
        '  carry["a"]   was <Thing> (Thing)   came back as <Thing> (OtherThing)',
        "",
        STATIC,
        '  * carry["a"]: keep what changes in an array, or leave it out.',
    )


def test_callable_objects_that_read_the_same():
    assert scan_to({"a": Agent()}, {"a": Agent()}) == text(
        must_return("filter_scan"),
        "",
        '  carry["a"]   was <Agent>   came back as another <Agent>',
        "",
        STATIC,
        '  * carry["a"]: not a PyTree, and so one static value. Make it an '
        "eqx.Module, so that the arrays in it are seen, or return the same object.",
    )


def test_objects_with_a_long_text():
    before, after = Thing("a" * 100), Thing("b\n" * 100)
    assert scan_to({"a": before}, {"a": after}) == text(
        must_return("filter_scan"),
        "",
        '  carry["a"]   was '
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...   came back as "
        "b b b b b b b b b b b b b b b b b b b b b b b b b b b b b...",
        "",
        STATIC,
        '  * carry["a"]: not a PyTree, and so one static value. Make it an '
        "eqx.Module, so that the arrays in it are seen, or return the same object.",
    )


def test_objects_without_a_text():
    assert scan_to({"a": Thing(None)}, {"a": Thing("<Thing>")}) == text(
        must_return("filter_scan"),
        "",
        '  carry["a"]   was <Thing>   came back as another <Thing>',
        "",
        STATIC,
        '  * carry["a"]: not a PyTree, and so one static value. Make it an '
        "eqx.Module, so that the arrays in it are seen, or return the same object.",
    )


# -- arrays ------------------------------------------------------------------------------


def test_an_array_that_becomes_a_string():
    assert scan_to({"h": F3}, {"h": "late"}) == text(
        must_return("filter_scan"),
        "",
        '  carry["h"]   was float32[3]   came back as "late"',
        "",
        STATIC,
        '  * carry["h"]: return an array of type float32[3] there.',
    )


def test_an_array_that_becomes_none():
    assert scan_to({"h": F3}, {"h": None}) == text(
        must_return("filter_scan"),
        "",
        '  carry["h"]   was float32[3]   came back as None',
        "",
        STATIC,
        '  * carry["h"]: return an array of type float32[3] there.',
    )


def test_an_array_of_another_dtype():
    assert scan_to({"m": F3}, {"m": F3.astype("bfloat16")}) == text(
        must_return("filter_scan"),
        "",
        '  carry["m"]   was float32[3]   came back as bfloat16[3]',
        "",
        '  * carry["m"]: cast it back with .astype(jnp.float32), or start from bfloat16.',
    )


def test_an_array_of_integers_that_becomes_one_of_booleans():
    assert scan_to({"m": jnp.zeros(3, "int32")}, {"m": F3 > 0}) == text(
        must_return("filter_scan"),
        "",
        '  carry["m"]   was int32[3]   came back as bool[3]',
        "",
        '  * carry["m"]: cast it back with .astype(jnp.int32), or start from bool.',
    )


def test_an_array_of_booleans_that_becomes_one_of_integers():
    assert scan_to({"m": F3 > 0}, {"m": jnp.zeros(3, "int32")}) == text(
        must_return("filter_scan"),
        "",
        '  carry["m"]   was bool[3]   came back as int32[3]',
        "",
        '  * carry["m"]: cast it back with .astype(jnp.bool_), or start from int32.',
    )


def test_an_array_of_another_shape():
    assert scan_to({"h": F3}, {"h": jnp.zeros((4, 3))}) == text(
        must_return("filter_scan"),
        "",
        '  carry["h"]   was float32[3]   came back as float32[4,3]',
        "",
        '  * carry["h"]: an array keeps its shape for the whole loop. Return shape '
        "(3,), or start from shape (4, 3).",
    )


def test_an_array_of_another_shape_and_dtype():
    assert scan_to({"h": F3}, {"h": jnp.zeros((4, 3), "int32")}) == text(
        must_return("filter_scan"),
        "",
        '  carry["h"]   was float32[3]   came back as int32[4,3]',
        "",
        '  * carry["h"]: cast it back with .astype(jnp.float32), or start from int32.',
        '  * carry["h"]: an array keeps its shape for the whole loop. Return shape '
        "(3,), or start from shape (4, 3).",
    )


def test_an_array_that_becomes_a_number():
    assert scan_to({"h": F3}, {"h": 1.0}) == text(
        must_return("filter_scan"),
        "",
        '  carry["h"]   was float32[3]   came back as float32[]',
        "",
        '  * carry["h"]: an array keeps its shape for the whole loop. Return shape '
        "(3,), or start from shape ().",
    )


def test_an_array_of_the_dtype_before_weakly():
    assert scan_to({"n": jnp.zeros((), "int32")}, {"n": 1.5}) == text(
        must_return("filter_scan"),
        "",
        '  carry["n"]   was int32[]   came back as float32[]',
        "",
        '  * carry["n"]: cast it back with .astype(jnp.int32), or start from float32.',
    )


def test_a_weakly_typed_array_that_becomes_a_vector():
    assert scan_to({"n": jnp.asarray(0)}, {"n": F3}) == text(
        must_return("filter_scan"),
        "",
        '  carry["n"]   was int32[]   came back as float32[3]',
        "",
        '  * carry["n"]: an array keeps its shape for the whole loop. Return shape '
        "(), or start from shape (3,).",
    )


def test_a_typed_key_that_becomes_a_legacy_key():
    assert scan_to({"key": jr.key(0)}, {"key": jr.PRNGKey(0)}) == text(
        must_return("filter_scan"),
        "",
        '  carry["key"]   was key<fry>[]   came back as uint32[2]',
        "",
        '  * carry["key"]: keep to one kind of random key. jax.random.key makes typed '
        "keys, jax.random.PRNGKey makes arrays of integers.",
    )


def test_a_legacy_key_that_becomes_a_typed_key():
    keys = jr.split(jr.key(0), 2)
    assert scan_to({"key": jr.PRNGKey(0)}, {"key": keys}) == text(
        must_return("filter_scan"),
        "",
        '  carry["key"]   was uint32[2]   came back as key<fry>[2]',
        "",
        '  * carry["key"]: keep to one kind of random key. jax.random.key makes typed '
        "keys, jax.random.PRNGKey makes arrays of integers.",
    )


def test_a_key_of_another_kind():
    before, after = jr.key(0), jr.key(0, impl="rbg")
    assert scan_to({"key": before}, {"key": after}) == text(
        must_return("filter_scan"),
        "",
        '  carry["key"]   was key<fry>[]   came back as key<rbg>[]',
        "",
        '  * carry["key"]: keep to one implementation of random keys, their `impl`.',
    )


def test_a_carry_that_does_not_vary_over_a_manual_axis():
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(AxisType.Auto,))

    def run(xs):
        def step(carry, x):
            return {**carry, "total": carry["total"] + x}, None

        carry = {"total": jnp.zeros(()), "name": "sum"}
        return loopax.filter_scan(step, carry, xs)[0]["total"][None]

    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"))
    assert message(lambda: mapped(XS)) == text(
        must_return("filter_scan"),
        "",
        f'  carry["total"]   was float32[]   came back as float32[]{{{VARIES}batch}}',
        "",
        '  * carry["total"]: start from a value that varies over the same axes, '
        f"{advice_to_vary(('batch',))}.",
    )


def test_a_carry_of_another_sharding():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        xs = jax.device_put(jnp.ones((3, 4)), P(None, "x"))

        def step(carry, x):
            return {**carry, "h": carry["h"] + x}, None

        carry = {"h": jnp.zeros(4), "name": "sum"}
        assert message(lambda: loopax.filter_scan(step, carry, xs)) == text(
            must_return("filter_scan"),
            "",
            '  carry["h"]   was float32[4]   came back as float32[4@x]',
            "",
            '  * carry["h"]: start from a value with the same sharding, by '
            "jax.device_put, or change it back in the body, by jax.sharding.reshard.",
        )


# -- structure ---------------------------------------------------------------------------


def test_a_static_field():
    assert scan_to([Layer(F3)], [Layer(F3, use_bias=False)]) == text(
        must_return("filter_scan"),
        "",
        "  carry[0].use_bias   was True (bool)   came back as False (bool)",
        "",
        STATIC,
        "  * carry[0].use_bias: it is declared static, and so is part of the "
        "structure. What is to change has to be an array in an ordinary field.",
    )


def test_a_static_field_that_holds_a_function():
    before, after = Layer(F3, use_bias=relu), Layer(F3, use_bias=tanh)
    assert scan_to({"net": before}, {"net": after}) == text(
        must_return("filter_scan"),
        "",
        '  carry["net"].use_bias   was <function relu>   came back as <function tanh>',
        "",
        STATIC,
        '  * carry["net"].use_bias: it is declared static, and so is part of the '
        "structure. What is to change has to be an array in an ordinary field.",
    )


def test_metadata_of_another_kind_of_node():
    assert scan_to({"t": Table("a", x=F3)}, {"t": Table("b", x=F3)}) == text(
        must_return("filter_scan"),
        "",
        "  carry[\"t\"]   had metadata ('a', ('x',))   came back with metadata ('b', ('x',))",
        "",
        STATIC,
        '  * carry["t"]: metadata are part of the structure. Keep them as they are.',
    )


def test_a_new_field_and_a_missing_one():
    assert scan_to({"t": Table(x=F3)}, {"t": Table(y=F3)}) == text(
        must_return("filter_scan"),
        "",
        '  carry["t"]   came back without the field x',
        '  carry["t"]   came back with a new field y',
        "",
        STATIC,
        '  * carry["t"]: return the field x too, or leave it out from the start.',
        '  * carry["t"]: start with the field y in place, or do not add it in the loop.',
    )


def test_a_list_that_becomes_a_tuple():
    assert scan_to({"l": [F3, 1]}, {"l": (F3, 1)}) == text(
        must_return("filter_scan"),
        "",
        '  carry["l"]   was a list of length 2   came back as a tuple of length 2',
        "",
        STATIC,
        '  * carry["l"]: return what was there before, or start from what the body returns.',
    )


def test_a_tuple_that_becomes_a_dict():
    assert scan_to({"l": (F3,)}, {"l": {"a": F3, "b": F3}}) == text(
        must_return("filter_scan"),
        "",
        '  carry["l"]   was a tuple of length 1   came back as a dict with keys "a", "b"',
        "",
        STATIC,
        '  * carry["l"]: return what was there before, or start from what the body returns.',
    )


def test_a_namedtuple_that_becomes_a_tuple():
    assert scan_to(Pair(F3, F3), (F3, F3)) == text(
        must_return("filter_scan"),
        "",
        "  carry   was a Pair   came back as a tuple of length 2",
        "",
        STATIC,
        "  * carry: return what was there before, or start from what the body returns.",
    )


def test_a_module_of_another_class():
    assert scan_to({"net": Layer(F3)}, {"net": OtherLayer(F3)}) == text(
        must_return("filter_scan"),
        "",
        '  carry["net"]   was a Layer   came back as an OtherLayer',
        "",
        STATIC,
        '  * carry["net"]: return what was there before, or start from what the body returns.',
    )


def test_an_array_that_becomes_a_tree():
    assert scan_to({"h": F3}, {"h": {}}) == text(
        must_return("filter_scan"),
        "",
        '  carry["h"]   was float32[3]   came back as {}',
        "",
        STATIC,
        '  * carry["h"]: return what was there before, or start from what the body returns.',
    )


def test_a_tree_that_becomes_an_array():
    assert scan_to({"h": {}}, {"h": F3}) == text(
        must_return("filter_scan"),
        "",
        '  carry["h"]   was {}   came back as float32[3]',
        "",
        STATIC,
        '  * carry["h"]: return what was there before, or start from what the body returns.',
    )


def test_a_list_that_grows():
    assert scan_to({"log": []}, {"log": [F3]}) == text(
        must_return("filter_scan"),
        "",
        '  carry["log"]   had length 0   came back with length 1',
        "",
        STATIC,
        '  * carry["log"]: a list or tuple keeps its length. To collect something at '
        "each step, return it as the y of a scan, or write into an array.",
    )


def test_a_tuple_that_shrinks():
    assert scan_to((F3, F3, F3), (F3, F3)) == text(
        must_return("filter_scan"),
        "",
        "  carry   had length 3   came back with length 2",
        "",
        STATIC,
        "  * carry: a list or tuple keeps its length. To collect something at each "
        "step, return it as the y of a scan, or write into an array.",
    )


def test_a_new_key():
    before, after = {"info": {"a": F3}}, {"info": {"a": F3, "truncated": F3}}
    assert scan_to(before, after) == text(
        must_return("filter_scan"),
        "",
        '  carry["info"]   came back with a new key "truncated"',
        "",
        STATIC,
        '  * carry["info"]: start with the key "truncated" in place, or do not add it '
        "in the loop.",
    )


def test_a_missing_key():
    before, after = {"info": {1: F3, 3: F3}}, {"info": {1: F3}}
    assert scan_to(before, after) == text(
        must_return("filter_scan"),
        "",
        '  carry["info"]   came back without the key 3',
        "",
        STATIC,
        '  * carry["info"]: return the key 3 too, or leave it out from the start.',
    )


# -- several at once ---------------------------------------------------------------------


def test_columns_are_aligned():
    before = {"a": 0, "long name": "x" * 10, "n": jnp.zeros(()), "t": [1]}
    after = {"a": 1, "long name": "y" * 20, "n": F3, "t": [1, 2]}
    assert scan_to(before, after) == text(
        must_return("filter_scan"),
        "",
        '  carry["a"]           was 0 (int)        came back as 1 (int)',
        '  carry["long name"]   was "xxxxxxxxxx"   came back as "yyyyyyyyyyyyyyyyyyyy"',
        '  carry["n"]           was float32[]      came back as float32[3]',
        '  carry["t"]           had length 1       came back with length 2',
        "",
        STATIC,
        '  * carry["a"] is a Python int. To change it in the loop, start from an '
        "array, jnp.asarray(0), or pass trace_numbers=True.",
        '  * carry["long name"]: keep what changes in an array, or leave it out.',
        '  * carry["n"]: an array keeps its shape for the whole loop. Return shape '
        "(), or start from shape (3,).",
        '  * carry["t"]: a list or tuple keeps its length. To collect something at '
        "each step, return it as the y of a scan, or write into an array.",
    )


def test_paths_that_need_the_same_are_named_together():
    before = {"a": 0, "b": 0, "c": "x", "d": "x"}
    after = {"a": 1, "b": 2, "c": "y", "d": "z"}
    assert scan_to(before, after) == text(
        must_return("filter_scan"),
        "",
        '  carry["a"]   was 0 (int)   came back as 1 (int)',
        '  carry["b"]   was 0 (int)   came back as 2 (int)',
        '  carry["c"]   was "x"       came back as "y"',
        '  carry["d"]   was "x"       came back as "z"',
        "",
        STATIC,
        '  * carry["a"], carry["b"] are each a Python int. To change them in the '
        "loop, start from an array, jnp.asarray(0), or pass trace_numbers=True.",
        '  * carry["c"], carry["d"]: keep what changes in an array, or leave it out.',
    )


def test_of_many_paths_that_need_the_same_three_are_named():
    assert scan_to([0] * 5, [1] * 5) == text(
        must_return("filter_scan"),
        "",
        "  carry[0]   was 0 (int)   came back as 1 (int)",
        "  carry[1]   was 0 (int)   came back as 1 (int)",
        "  carry[2]   was 0 (int)   came back as 1 (int)",
        "  carry[3]   was 0 (int)   came back as 1 (int)",
        "  carry[4]   was 0 (int)   came back as 1 (int)",
        "",
        STATIC,
        "  * carry[0], carry[1], carry[2] and 2 more are each a Python int. To change "
        "them in the loop, start from an array, jnp.asarray(0), or pass "
        "trace_numbers=True.",
    )


def test_arrays_only():
    before, after = [F3, F3], [F3.astype("int32"), jnp.zeros(2)]
    assert scan_to(before, after) == text(
        must_return("filter_scan"),
        "",
        "  carry[0]   was float32[3]   came back as int32[3]",
        "  carry[1]   was float32[3]   came back as float32[2]",
        "",
        "  * carry[0]: cast it back with .astype(jnp.float32), or start from int32.",
        "  * carry[1]: an array keeps its shape for the whole loop. Return shape "
        "(3,), or start from shape (2,).",
    )


# -- who is at fault ---------------------------------------------------------------------


def test_a_while_loop():
    def step(carry):
        return "late"

    call = functools.partial(loopax.filter_while_loop, lambda c: True, step, "early")
    assert message(call) == text(
        must_return("filter_while_loop"),
        "",
        '  carry   was "early"   came back as "late"',
        "",
        STATIC,
        "  * carry: keep what changes in an array, or leave it out.",
    )


def test_a_fori_loop():
    def step(i, carry):
        return "late"

    call = functools.partial(loopax.filter_fori_loop, 0, 3, step, "early")
    assert message(call) == text(
        must_return("filter_fori_loop"),
        "",
        '  carry   was "early"   came back as "late"',
        "",
        STATIC,
        "  * carry: keep what changes in an array, or leave it out.",
    )


def step(carry, x):
    return SHORT, None


def step_on(carry, x, last, *, keyword=None):
    return SHORT, None


def test_a_function_is_shown_with_its_file_and_line():
    with pytest.raises(loopax.MismatchError) as caught:
        loopax.filter_scan(step, F3, XS)
    place = f"{os.path.basename(__file__)}:{step.__code__.co_firstlineno}"
    assert str(caught.value).startswith(f"filter_scan: `step` ({place}) must return")


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (lambda carry, x: (SHORT, None), "`<lambda>` (here)"),
        (functools.partial(step_on, last=1), "`step_on` (here)"),
        (functools.partial(functools.partial(step_on, last=1)), "`step_on` (here)"),
        (jtu.Partial(step_on, last=1), "`step_on` (here)"),
        (eqx.Partial(step_on, last=1), "`step_on` (here)"),
        (functools.partial(Layer.advance, Layer(F3)), "`Layer.advance` (here)"),
        (Agent().advance, "`Agent.advance` (here)"),
        (Agent(), "`Agent.__call__` (here)"),
        (Layer(F3).advance, "`Layer.advance` (here)"),
        (Layer(F3), "`Layer.__call__` (here)"),
        (eqx.Partial(Layer(F3)), "`Layer.__call__` (here)"),
        (jax.jit(step), "`step` (here)"),
        (jax.checkpoint(step), "`step` (here)"),
        (eqx.filter_jit(step), "`step` (here)"),
        (eqx.filter_checkpoint(step), "`step` (here)"),
    ],
)
def test_any_callable_is_shown_by_the_name_it_was_given(body, shown):
    said = message(lambda: loopax.filter_scan(body, F3, XS))
    assert said.partition("\n")[0] == must_return("filter_scan", shown)


def test_the_same_is_said_while_jit_is_disabled():
    expected = scan_to({"n": 0}, {"n": 1})
    with jax.disable_jit():
        assert scan_to({"n": 0}, {"n": 1}) == expected


def test_the_same_is_said_inside_of_jit():
    expected = scan_to({"n": 0}, {"n": 1})
    said = []
    jax.eval_shape(lambda: said.append(scan_to({"n": 0}, {"n": 1})))
    assert said == [expected]


def test_the_same_is_said_at_the_second_call():
    def step(carry, x):
        return "late", None

    first, second = (message(lambda: loopax.filter_scan(step, "early", XS)) for _ in range(2))
    assert first == second


# -- what a function has to return -------------------------------------------------------


def scan_returning(result):
    def step(carry, x):
        return result

    return message(lambda: loopax.filter_scan(step, F3, XS), loopax.ArgumentError)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "None"),
        (F3, "float32[3]"),
        (1.0, "1.0 (float)"),
        ("ab", '"ab"'),
        (relu, "<function relu>"),
        ((F3,), "a tuple of length 1"),
        ((F3, F3, F3), "a tuple of length 3"),
        ([], "a list of length 0"),
        ({"carry": F3, "y": F3}, 'a dict with keys "carry", "y"'),
        (Layer(F3), "a Layer"),
    ],
)
def test_the_body_of_a_scan_must_return_a_pair(result, said):
    assert scan_returning(result) == (
        "filter_scan: `step` (here) must return a pair (carry, y), but returned "
        f"{said}. If there is nothing to collect, return (carry, None)."
    )


def test_a_list_of_two_is_a_pair():
    carry, ys = loopax.filter_scan(lambda c, x: [c, x], F3, XS)
    assert carry.tolist() == [0, 0, 0]
    assert ys.tolist() == [1, 1, 1]


def while_asking(answer):
    def again(carry):
        return answer

    return message(
        lambda: loopax.filter_while_loop(again, lambda c: c, F3), loopax.ArgumentError
    )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (jnp.zeros(3, bool), "bool[3]. Reduce it, with jnp.any or jnp.all."),
        (np.zeros((2, 2), bool), "bool[2,2]. Reduce it, with jnp.any or jnp.all."),
        (F3, "float32[3]. Compare it with something, and reduce it, with jnp.any or jnp.all."),
        (jnp.asarray(1), "int32[]. Compare it with something."),
        (jnp.asarray(1.0), "float32[]. Compare it with something."),
        (1, "1 (int). Compare it with something."),
        (0.5, "0.5 (float). Compare it with something."),
        (None, "None."),
        ("yes", '"yes".'),
        (relu, "<function relu>."),
        ((jnp.asarray(True), F3), "a tuple of length 2."),
        ([jnp.asarray(True)], "a list of length 1."),
        ({"go": jnp.asarray(True)}, 'a dict with keys "go".'),
    ],
)
def test_a_predicate_must_return_a_boolean_scalar(answer, said):
    assert while_asking(answer) == (
        f"filter_while_loop: `again` (here) must return a boolean scalar, but returned {said}"
    )


def test_a_key_is_no_predicate():
    assert while_asking(jr.key(0)) == (
        "filter_while_loop: `again` (here) must return a boolean scalar, but returned "
        "key<fry>[]."
    )


@pytest.mark.parametrize("answer", [False, np.bool_(False), jnp.asarray(False)])
def test_any_boolean_scalar_is_a_predicate(answer):
    assert loopax.filter_while_loop(lambda c: answer, lambda c: c, "a") == "a"


# -- the number of steps -----------------------------------------------------------------


def scan_over(xs, kind=loopax.LengthError, **options):
    def step(carry, x):
        return carry, None

    return message(lambda: loopax.filter_scan(step, F3, xs, **options), kind)


def test_arrays_of_other_lengths():
    xs = {"reward": jnp.ones((4, 2)), "mask": np.ones(3, bool), "name": "a"}
    assert scan_over(xs) == text(
        "filter_scan: the arrays in `xs` must be of one length, but:",
        "",
        '  xs["mask"]     bool[3]        has length 3 along axis 0',
        '  xs["reward"]   float32[4,2]   has length 4 along axis 0',
    )


def test_arrays_of_other_lengths_along_other_axes():
    xs = (jnp.ones((3, 4)), jnp.ones((3, 5)), jnp.ones((3, 3)))
    assert scan_over(xs, in_axes=(1, -1, None)) == text(
        "filter_scan: the arrays in `xs` must be of one length, but:",
        "",
        "  xs[0]   float32[3,4]   has length 4 along axis 1",
        "  xs[1]   float32[3,5]   has length 5 along axis -1",
    )


def test_a_length_that_the_arrays_do_not_have():
    assert scan_over({"a": jnp.ones(3)}, length=4) == text(
        "filter_scan: `length` is 4, and the arrays in `xs` must agree, but:",
        "",
        '  xs["a"]   float32[3]   has length 3 along axis 0',
    )


def test_neither_arrays_nor_a_length():
    assert scan_over(None) == text(
        "filter_scan: there are no arrays in `xs` to go along. Pass the number of steps "
        "as `length`.",
    )
    for xs in [{"name": "a", "n": 1}, [], "ab", relu]:
        assert scan_over(xs) == scan_over(None)


@pytest.mark.parametrize("xs", [[1, 2, 3], 3, 1.0, True, {"a": [0.5]}])
def test_numbers_to_scan_over(xs):
    assert scan_over(xs) == text(
        "filter_scan: there are no arrays in `xs` to go along. Python numbers are "
        "static; make arrays of them, with jnp.asarray. Or pass the number of steps as "
        "`length`.",
    )


def test_a_range_to_scan_over():
    assert scan_over(range(3)) == text(
        "filter_scan: there are no arrays in `xs` to go along. It is range(0, 3); make "
        "arrays of what it holds first. Or pass the number of steps as `length`.",
    )


# JAX warns of iterators itself, and is to refuse them one day.
@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
def test_an_iterator_to_scan_over():
    xs = iter([F3, F3])
    assert scan_over(xs) == text(
        f"filter_scan: there are no arrays in `xs` to go along. It is {xs!r}; make "
        "arrays of what it holds first. Or pass the number of steps as `length`.",
    )


def test_numbers_and_ranges_to_go_along_elsewhere():
    for call, root in [
        (functools.partial(loopax.filter_map, relu), "xs"),
        (functools.partial(loopax.filter_associative_scan, relu), "elems"),
        (loopax.filter_unstack, "tree"),
    ]:
        name = getattr(call, "func", call).__name__
        none = f"{name}: there are no arrays in `{root}` to go along."
        assert message(lambda: call([1, 2]), loopax.LengthError) == (
            f"{none} Python numbers are static; make arrays of them, with jnp.asarray."
        )
        assert message(lambda: call(range(2)), loopax.LengthError) == (
            f"{none} It is range(0, 2); make arrays of what it holds first."
        )


def test_a_negative_length():
    assert scan_over(None, length=-1) == text(
        "filter_scan: `length` must not be negative, got -1.",
    )
    assert scan_over(XS, length=-1) == scan_over(None, length=-1)


def test_a_scalar_to_scan_over():
    xs = {"a": jnp.ones(3), "b": (jnp.asarray(1.0),)}
    assert scan_over(xs, loopax.ArgumentError) == text(
        'filter_scan: xs["b"][0] is float32[], which has no axis 0 to go along. To '
        "pass it whole, give it None in `in_axes`, or let the body close over it.",
    )


def test_an_axis_that_is_not_there():
    said = scan_over((jnp.ones(3),), loopax.ArgumentError, in_axes=1)
    assert said == text(
        "filter_scan: xs[0] is float32[3], which has no axis 1 to go along. To pass "
        "it whole, give it None in `in_axes`, or let the body close over it.",
    )


def test_axes_that_are_no_integers():
    said = scan_over((jnp.ones(3),), loopax.ArgumentError, in_axes=("a",))
    assert said == text(
        "filter_scan: `in_axes` must hold integers and None, got 'a'.",
    )


def test_axes_of_another_structure():
    said = scan_over((jnp.ones(3),), loopax.ArgumentError, in_axes={"a": 0})
    assert said == text(
        "filter_scan: `in_axes` must be an integer, None, or a PyTree of those, a prefix "
        "of `xs`, got {'a': 0}.",
    )


def test_an_output_that_lacks_the_axis_to_stack_along():
    def step(carry, x):
        return carry, {"y": x}

    assert wrong(lambda: loopax.filter_scan(step, F3, XS, out_axes=3)) == text(
        'filter_scan: ys["y"] is float32[3] once it is stacked, which has no axis 3 to '
        "stack along. See `out_axes`.",
    )


def test_an_output_that_is_not_to_be_stacked():
    def step(carry, x):
        return carry, x

    assert message(
        lambda: loopax.filter_scan(step, F3, XS, out_axes=None), loopax.ArgumentError
    ) == text(
        "filter_scan: `out_axes` has None for an array, but what every step returns "
        "anew has to be stacked along some axis.",
    )


# -- arguments of the wrong type ---------------------------------------------------------


def wrong(call):
    return message(call, loopax.ArgumentError)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"f": None}, "`f` must be callable, but is None."),
        ({"f": F3}, "`f` must be callable, but is float32[3]."),
        ({"f": {"a": 1}}, '`f` must be callable, but is a dict with keys "a".'),
        ({"length": "3"}, '`length` must be an integer or None, but is "3".'),
        (
            {"length": (3,)},
            "`length` must be an integer or None, but is a tuple of length 1.",
        ),
        ({"reverse": "yes"}, '`reverse` must be a boolean, but is "yes".'),
        ({"reverse": 1}, "`reverse` must be a boolean, but is 1 (int)."),
        ({"unroll": "all"}, '`unroll` must be an integer, but is "all".'),
        ({"trace_numbers": 1}, "`trace_numbers` must be a boolean, but is 1 (int)."),
        ({"trace_numbers": None}, "`trace_numbers` must be a boolean, but is None."),
    ],
)
def test_scan_refuses_arguments_of_the_wrong_type(arguments, said):
    good = {"f": step, "init": F3, "xs": XS}
    assert wrong(lambda: loopax.filter_scan(**{**good, **arguments})) == (
        f"filter_scan: {said}"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"cond_fun": True}, "`cond_fun` must be callable, but is True (bool)."),
        ({"cond_fun": jnp.asarray(True)}, "`cond_fun` must be callable, but is bool[]."),
        ({"body_fun": None}, "`body_fun` must be callable, but is None."),
        ({"body_fun": "body"}, '`body_fun` must be callable, but is "body".'),
        ({"trace_numbers": "yes"}, '`trace_numbers` must be a boolean, but is "yes".'),
    ],
)
def test_while_refuses_arguments_of_the_wrong_type(arguments, said):
    good = {"cond_fun": lambda c: True, "body_fun": relu, "init_val": F3}
    assert wrong(lambda: loopax.filter_while_loop(**{**good, **arguments})) == (
        f"filter_while_loop: {said}"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"lower": "0"}, '`lower` must be an integer, but is "0".'),
        ({"lower": None}, "`lower` must be an integer, but is None."),
        ({"upper": [3]}, "`upper` must be an integer, but is a list of length 1."),
        ({"upper": None}, "`upper` must be an integer, but is None."),
        ({"upper": 1j}, "`upper` must be an integer, but is 1j (complex)."),
        ({"lower": jr.key(0)}, "`lower` must be an integer, but is key<fry>[]."),
        ({"body_fun": 3}, "`body_fun` must be callable, but is 3 (int)."),
        ({"unroll": "all"}, '`unroll` must be an integer or None, but is "all".'),
        ({"trace_numbers": 0}, "`trace_numbers` must be a boolean, but is 0 (int)."),
    ],
)
def test_fori_refuses_arguments_of_the_wrong_type(arguments, said):
    good = {"lower": 0, "upper": 3, "body_fun": lambda i, c: c, "init_val": F3}
    assert wrong(lambda: loopax.filter_fori_loop(**{**good, **arguments})) == (
        f"filter_fori_loop: {said}"
    )


@pytest.mark.parametrize("name", ["lower", "upper"])
def test_a_bound_must_be_a_scalar(name):
    good = {"lower": 0, "upper": 3, "body_fun": lambda i, c: c, "init_val": "a"}
    assert wrong(lambda: loopax.filter_fori_loop(**{**good, name: jnp.zeros(2, int)})) == (
        f"filter_fori_loop: `{name}` must be an integer, a scalar, but is int32[2]."
    )


def test_positional_arguments_are_checked_too():
    assert wrong(lambda: loopax.filter_scan(3, F3, XS)) == wrong(
        lambda: loopax.filter_scan(f=3, init=F3, xs=XS)
    )
    assert wrong(lambda: loopax.filter_fori_loop(0, "3", step, F3)) == wrong(
        lambda: loopax.filter_fori_loop(lower=0, upper="3", body_fun=step, init_val=F3)
    )


def test_a_missing_argument_is_named_by_python():
    with pytest.raises(TypeError, match=r"missing .*'init'"):
        loopax.filter_scan(step)


def test_an_unknown_argument_is_named_by_python():
    with pytest.raises(TypeError, match=r"unexpected .*'max_iter'"):
        loopax.filter_while_loop(step, step, F3, max_iter=3)


# -- branches that disagree --------------------------------------------------------------


def cond_between(one_returns, two_returns, **options):
    """What a cond says whose branches return these."""

    def one():
        return one_returns

    def two():
        return two_returns

    return message(lambda: loopax.filter_cond(jnp.asarray(True), one, two, **options))


def switch_between(one_returns, two_returns, three_returns, **options):
    def one():
        return one_returns

    def two():
        return two_returns

    def three():
        return three_returns

    branches = [one, two, three]
    return message(lambda: loopax.filter_switch(jnp.asarray(0), branches, **options))


def test_branches_with_other_strings():
    assert cond_between({"phase": "early"}, {"phase": "late"}) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output["phase"]   "early"   from true_fun `one` (here)',
        '                    "late"    from false_fun `two` (here)',
        "",
        '  * output["phase"]: anything that is not an array is static, and must not '
        "depend on which branch runs. Return an array there, or the same from each "
        "branch.",
    )


def test_branches_with_other_numbers():
    assert cond_between({"rate": 0.5}, {"rate": 0.25}) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output["rate"]   0.5 (float)    from true_fun `one` (here)',
        "                   0.25 (float)   from false_fun `two` (here)",
        "",
        '  * output["rate"]: Python numbers are static. To return different ones, '
        "return arrays, jnp.asarray(0.5), or pass trace_numbers=True.",
    )


def test_branches_of_which_one_returns_true_for_one():
    assert cond_between({"n": 1}, {"n": True}) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output["n"]   1 (int)       from true_fun `one` (here)',
        "                True (bool)   from false_fun `two` (here)",
        "",
        '  * output["n"]: Python numbers are static. To return different ones, return '
        "arrays, jnp.asarray(1), or pass trace_numbers=True.",
    )


def test_a_branch_with_a_number_and_one_with_a_string():
    assert cond_between({"n": 1}, {"n": "1"}) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output["n"]   1 (int)   from true_fun `one` (here)',
        '                "1"       from false_fun `two` (here)',
        "",
        '  * output["n"]: anything that is not an array is static, and must not '
        "depend on which branch runs. Return an array there, or the same from each "
        "branch.",
    )


def test_branches_with_other_functions():
    assert cond_between(Layer(F3, relu), Layer(F3, tanh)) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        "  output.activation   <function relu>   from true_fun `one` (here)",
        "                      <function tanh>   from false_fun `two` (here)",
        "",
        "  * output.activation: anything that is not an array is static, and must not "
        "depend on which branch runs. Return an array there, or the same from each "
        "branch.",
    )


def test_branches_with_functions_of_one_code():
    assert cond_between({"f": scaled_by(1)}, {"f": scaled_by(2)}) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output["f"]   <function <lambda>>           from true_fun `one` (here)',
        "                another <function <lambda>>   from false_fun `two` (here)",
        "",
        '  * output["f"]: anything that is not an array is static, and must not '
        "depend on which branch runs. Return an array there, or the same from each "
        "branch.",
    )


def test_branches_with_partials():
    assert cond_between(functools.partial(max, 1), functools.partial(max, 2)) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        "  output   <function max> with 1   from true_fun `one` (here)",
        "           <function max> with 2   from false_fun `two` (here)",
        "",
        "  * output: anything that is not an array is static, and must not depend on "
        "which branch runs. Return an array there, or the same from each branch.",
    )


def test_branches_with_arrays_of_other_shapes():
    assert cond_between({"h": F3}, {"h": SHORT}) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output["h"]   float32[3]   from true_fun `one` (here)',
        "                float32[2]   from false_fun `two` (here)",
        "",
        '  * output["h"]: return arrays of one shape.',
    )


def test_branches_with_arrays_of_other_dtypes():
    assert cond_between({"h": F3}, {"h": F3.astype("int32")}) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output["h"]   float32[3]   from true_fun `one` (here)',
        "                int32[3]     from false_fun `two` (here)",
        "",
        '  * output["h"]: return arrays of one dtype; .astype casts.',
    )


def test_branches_with_arrays_of_other_shapes_and_dtypes():
    assert cond_between(F3, SHORT.astype("int32")) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        "  output   float32[3]   from true_fun `one` (here)",
        "           int32[2]     from false_fun `two` (here)",
        "",
        "  * output: return arrays of one dtype; .astype casts.",
        "  * output: return arrays of one shape.",
    )


def test_branches_with_keys_of_either_kind():
    assert cond_between(jr.key(0), jr.PRNGKey(0)) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        "  output   key<fry>[]   from true_fun `one` (here)",
        "           uint32[2]    from false_fun `two` (here)",
        "",
        "  * output: keep to one kind of random key. jax.random.key makes typed keys, "
        "jax.random.PRNGKey makes arrays of integers.",
        "  * output: return arrays of one shape.",
    )


def test_a_branch_with_an_array_and_one_with_none():
    assert cond_between({"h": F3}, {"h": None}) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output["h"]   float32[3]   from true_fun `one` (here)',
        "                None         from false_fun `two` (here)",
        "",
        '  * output["h"]: anything that is not an array is static, and must not '
        "depend on which branch runs. Return an array there, or the same from each "
        "branch.",
    )


def test_a_branch_with_none_and_one_with_an_array():
    assert cond_between({"h": None}, {"h": F3}) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output["h"]   None         from true_fun `one` (here)',
        "                float32[3]   from false_fun `two` (here)",
        "",
        '  * output["h"]: anything that is not an array is static, and must not '
        "depend on which branch runs. Return an array there, or the same from each "
        "branch.",
    )


def test_a_branch_with_an_array_and_one_with_a_string():
    assert cond_between({"h": F3}, {"h": "late"}) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output["h"]   float32[3]   from true_fun `one` (here)',
        '                "late"       from false_fun `two` (here)',
        "",
        '  * output["h"]: anything that is not an array is static, and must not '
        "depend on which branch runs. Return an array there, or the same from each "
        "branch.",
    )


def test_a_branch_with_a_number_and_one_with_a_vector():
    assert cond_between({"n": 1.0}, {"n": F3}) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output["n"]   float32[]    from true_fun `one` (here)',
        "                float32[3]   from false_fun `two` (here)",
        "",
        '  * output["n"]: return arrays of one shape.',
    )


def test_a_branch_with_a_vector_and_one_with_a_number():
    assert cond_between({"n": F3}, {"n": 1.0}) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output["n"]   float32[3]   from true_fun `one` (here)',
        "                float32[]    from false_fun `two` (here)",
        "",
        '  * output["n"]: return arrays of one shape.',
    )


def test_branches_with_other_static_fields():
    assert cond_between([Layer(F3)], [Layer(F3, use_bias=False)]) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        "  output[0].use_bias   True (bool)    from true_fun `one` (here)",
        "                       False (bool)   from false_fun `two` (here)",
        "",
        "  * output[0].use_bias: anything that is not an array is static, and must "
        "not depend on which branch runs. Return an array there, or the same from "
        "each branch.",
    )


def test_branches_with_other_metadata():
    assert cond_between(Table("a", x=F3), Table("b", x=F3)) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        "  output   metadata ('a', ('x',))   from true_fun `one` (here)",
        "           metadata ('b', ('x',))   from false_fun `two` (here)",
        "",
        "  * output: anything that is not an array is static, and must not depend on "
        "which branch runs. Return an array there, or the same from each branch.",
    )


def test_a_branch_with_a_list_and_one_with_a_tuple():
    assert cond_between({"l": [F3, 1]}, {"l": (F3, 1)}) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output["l"]   a list of length 2    from true_fun `one` (here)',
        "                a tuple of length 2   from false_fun `two` (here)",
        "",
        '  * output["l"]: return the same structure from each branch.',
    )


def test_branches_with_lists_of_other_lengths():
    assert cond_between({"log": [F3]}, {"log": [F3, F3]}) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output["log"]   length 1   from true_fun `one` (here)',
        "                  length 2   from false_fun `two` (here)",
        "",
        '  * output["log"]: return the same structure from each branch.',
    )


def test_branches_of_which_the_second_has_a_key_more():
    assert cond_between([{"a": F3}], [{"a": F3, "b": F3}]) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output[0]   no key "b"    from true_fun `one` (here)',
        '              the key "b"   from false_fun `two` (here)',
        "",
        "  * output[0]: return the same structure from each branch.",
    )


def test_branches_of_which_the_second_has_a_key_less():
    assert cond_between([{"a": F3, "b": F3}], [{"a": F3}]) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output[0]   the key "b"   from true_fun `one` (here)',
        '              no key "b"    from false_fun `two` (here)',
        "",
        "  * output[0]: return the same structure from each branch.",
    )


def test_branches_with_other_keys():
    assert cond_between({"a": F3}, {"b": F3}) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output   the key "a"   from true_fun `one` (here)',
        '           no key "a"    from false_fun `two` (here)',
        '           no key "b"    from true_fun `one` (here)',
        '           the key "b"   from false_fun `two` (here)',
        "",
        "  * output: return the same structure from each branch.",
    )


def test_branches_with_other_fields():
    assert cond_between(Table(x=F3), Table(y=F3)) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        "  output   the field x   from true_fun `one` (here)",
        "           no field x    from false_fun `two` (here)",
        "           no field y    from true_fun `one` (here)",
        "           the field y   from false_fun `two` (here)",
        "",
        "  * output: return the same structure from each branch.",
    )


def test_branches_with_modules_of_other_classes():
    assert cond_between({"net": Layer(F3)}, {"net": OtherLayer(F3)}) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output["net"]   a Layer         from true_fun `one` (here)',
        "                  an OtherLayer   from false_fun `two` (here)",
        "",
        '  * output["net"]: return the same structure from each branch.',
    )


def test_a_branch_with_a_tree_and_one_with_an_array():
    assert cond_between({"h": {"a": F3}}, {"h": F3}) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output["h"]   a dict with keys "a"   from true_fun `one` (here)',
        "                float32[3]             from false_fun `two` (here)",
        "",
        '  * output["h"]: return the same structure from each branch.',
    )


def test_a_branch_with_none_and_one_with_a_tree():
    assert cond_between({"h": None}, {"h": {"a": F3}}) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output["h"]   None                   from true_fun `one` (here)',
        '                a dict with keys "a"   from false_fun `two` (here)',
        "",
        '  * output["h"]: return the same structure from each branch.',
    )


def test_branches_that_disagree_in_many_places():
    one = {"h": F3, "log": [F3], "n": 1, "phase": "early", "same": "s"}
    two = {"h": SHORT, "log": [F3, F3], "n": 2, "phase": "late", "same": "s", "z": 1}
    assert cond_between(one, two) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output["h"]       float32[3]    from true_fun `one` (here)',
        "                    float32[2]    from false_fun `two` (here)",
        '  output["log"]     length 1      from true_fun `one` (here)',
        "                    length 2      from false_fun `two` (here)",
        '  output["n"]       1 (int)       from true_fun `one` (here)',
        "                    2 (int)       from false_fun `two` (here)",
        '  output["phase"]   "early"       from true_fun `one` (here)',
        '                    "late"        from false_fun `two` (here)',
        '  output            no key "z"    from true_fun `one` (here)',
        '                    the key "z"   from false_fun `two` (here)',
        "",
        '  * output["h"]: return arrays of one shape.',
        '  * output["log"], output: return the same structure from each branch.',
        '  * output["n"]: Python numbers are static. To return different ones, return '
        "arrays, jnp.asarray(1), or pass trace_numbers=True.",
        '  * output["phase"]: anything that is not an array is static, and must not '
        "depend on which branch runs. Return an array there, or the same from each "
        "branch.",
    )


def test_disagreements_that_need_the_same_are_named_together():
    assert cond_between(["a"] * 5 + [1, 1], ["b"] * 5 + [2, 2]) == text(
        "filter_cond: the branches must return the same, up to array values, but:",
        "",
        '  output[0]   "a"       from true_fun `one` (here)',
        '              "b"       from false_fun `two` (here)',
        '  output[1]   "a"       from true_fun `one` (here)',
        '              "b"       from false_fun `two` (here)',
        '  output[2]   "a"       from true_fun `one` (here)',
        '              "b"       from false_fun `two` (here)',
        '  output[3]   "a"       from true_fun `one` (here)',
        '              "b"       from false_fun `two` (here)',
        '  output[4]   "a"       from true_fun `one` (here)',
        '              "b"       from false_fun `two` (here)',
        "  output[5]   1 (int)   from true_fun `one` (here)",
        "              2 (int)   from false_fun `two` (here)",
        "  output[6]   1 (int)   from true_fun `one` (here)",
        "              2 (int)   from false_fun `two` (here)",
        "",
        "  * output[0], output[1], output[2] and 2 more: anything that is not an "
        "array is static, and must not depend on which branch runs. Return an array "
        "there, or the same from each branch.",
        "  * output[5], output[6]: Python numbers are static. To return different "
        "ones, return arrays, jnp.asarray(1), or pass trace_numbers=True.",
    )


def test_of_three_branches_the_second_disagrees():
    assert switch_between({"phase": "a"}, {"phase": "b"}, {"phase": "a"}) == text(
        "filter_switch: the branches must return the same, up to array values, but:",
        "",
        '  output["phase"]   "a"   from branches[0] `one` (here), branches[2] `three` (here)',
        '                    "b"   from branches[1] `two` (here)',
        "",
        '  * output["phase"]: anything that is not an array is static, and must not '
        "depend on which branch runs. Return an array there, or the same from each "
        "branch.",
    )


def test_of_three_branches_the_first_disagrees():
    assert switch_between({"h": F3}, {"h": SHORT}, {"h": SHORT}) == text(
        "filter_switch: the branches must return the same, up to array values, but:",
        "",
        '  output["h"]   float32[3]   from branches[0] `one` (here)',
        "                float32[2]   from branches[1] `two` (here), branches[2] "
        "`three` (here)",
        "",
        '  * output["h"]: return arrays of one shape.',
    )


def test_of_three_branches_all_disagree():
    assert switch_between("a", "b", "c") == text(
        "filter_switch: the branches must return the same, up to array values, but:",
        "",
        '  output   "a"   from branches[0] `one` (here)',
        '           "b"   from branches[1] `two` (here)',
        '           "c"   from branches[2] `three` (here)',
        "",
        "  * output: anything that is not an array is static, and must not depend on "
        "which branch runs. Return an array there, or the same from each branch.",
    )


def test_three_branches_with_numbers_and_a_vector():
    assert switch_between({"n": 1}, {"n": 2}, {"n": F3}) == text(
        "filter_switch: the branches must return the same, up to array values, but:",
        "",
        '  output["n"]   int32[]      from branches[0] `one` (here), branches[1] `two` (here)',
        "                float32[3]   from branches[2] `three` (here)",
        "",
        '  * output["n"]: return arrays of one dtype; .astype casts.',
        '  * output["n"]: return arrays of one shape.',
    )


def test_of_three_branches_each_disagrees_in_another_place():
    one, two, three = {"h": F3, "s": "x"}, {"h": SHORT, "s": "x"}, {"h": F3, "s": "y"}
    assert switch_between(one, two, three) == text(
        "filter_switch: the branches must return the same, up to array values, but:",
        "",
        '  output["h"]   float32[3]   from branches[0] `one` (here), branches[2] '
        "`three` (here)",
        "                float32[2]   from branches[1] `two` (here)",
        '  output["s"]   "x"          from branches[0] `one` (here), branches[1] `two` (here)',
        '                "y"          from branches[2] `three` (here)',
        "",
        '  * output["h"]: return arrays of one shape.',
        '  * output["s"]: anything that is not an array is static, and must not '
        "depend on which branch runs. Return an array there, or the same from each "
        "branch.",
    )


def test_branches_are_shown_by_their_names():
    branches = [Agent().advance, Layer(F3), lambda carry, x: (SHORT, 1), jax.jit(step)]
    assert message(lambda: loopax.filter_switch(1, branches, F3, F3)) == text(
        "filter_switch: the branches must return the same, up to array values, but:",
        "",
        "  output[1]   None      from branches[0] `Agent.advance` (here), branches[1] "
        "`Layer.__call__` (here), branches[3] `step` (here)",
        "              1 (int)   from branches[2] `<lambda>` (here)",
        "",
        "  * output[1]: anything that is not an array is static, and must not depend "
        "on which branch runs. Return an array there, or the same from each branch.",
    )


def test_the_same_is_said_of_branches_inside_of_jit_and_at_the_second_call():
    expected = cond_between({"n": 0}, {"n": 1})
    said = []
    jax.eval_shape(lambda: said.append(cond_between({"n": 0}, {"n": 1})))
    assert said == [expected]
    assert cond_between({"n": 0}, {"n": 1}) == expected


def test_branches_agree_when_what_they_return_is_made_anew():
    def branch():
        return {"f": scaled_by(1), "nan": float("nan"), "h": F3}

    out = loopax.filter_cond(jnp.asarray(True), branch, lambda: branch())
    assert out["f"](2) == 2


# -- what to choose by -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pred", "said"),
    [
        (None, "None"),
        (F3, "float32[3]"),
        (np.zeros(1, bool), "bool[1]"),
        ("yes", '"yes"'),
        (jr.key(0), "key<fry>[]"),
        (jr.PRNGKey(0), "uint32[2]"),
        (1j, "1j (complex)"),
        (relu, "<function relu>"),
        ((True,), "a tuple of length 1"),
        ({"go": True}, 'a dict with keys "go"'),
    ],
)
def test_a_pred_must_be_a_scalar(pred, said):
    assert wrong(lambda: loopax.filter_cond(pred, lambda: 1, lambda: 1)) == (
        f"filter_cond: `pred` must be a boolean or a real number, a scalar, but is {said}."
    )


@pytest.mark.parametrize("pred", [True, 1, 0.5, np.bool_(True), np.float32(1), jnp.asarray(3)])
def test_any_real_scalar_is_a_pred(pred):
    assert loopax.filter_cond(pred, lambda: F3, lambda: F3 + 1).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (None, "None"),
        (jnp.zeros(3, int), "int32[3]"),
        ("1", '"1"'),
        (jr.key(0), "key<fry>[]"),
        (1.0, "1.0 (float)"),
        (jnp.asarray(1.0), "float32[]"),
        (np.float32(1), "float32[]"),
        (True, "True (bool)"),
        (jnp.asarray(True), "bool[]"),
        ((1,), "a tuple of length 1"),
    ],
)
def test_an_index_must_be_an_integer_scalar(index, said):
    assert wrong(lambda: loopax.filter_switch(index, [lambda: 1, lambda: 1])) == (
        f"filter_switch: `index` must be an integer, a scalar, but is {said}."
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((None, relu), "`true_fun` must be callable, but is None."),
        ((relu, 3), "`false_fun` must be callable, but is 3 (int)."),
        ((relu, F3), "`false_fun` must be callable, but is float32[3]."),
        (("f", "g"), '`true_fun` must be callable, but is "f".'),
        (([relu], relu), "`true_fun` must be callable, but is a list of length 1."),
    ],
)
def test_cond_refuses_branches_that_are_no_functions(arguments, said):
    assert wrong(lambda: loopax.filter_cond(True, *arguments, F3)) == f"filter_cond: {said}"


@pytest.mark.parametrize(
    ("branches", "said"),
    [
        ([relu, None], "`branches[1]` must be callable, but is None."),
        ([relu, relu, F3], "`branches[2]` must be callable, but is float32[3]."),
        ([relu, "f", None], '`branches[1]` must be callable, but is "f".'),
        (None, "`branches` must be a sequence, but is None."),
        (relu, "`branches` must be a sequence, but is <function relu>."),
        ({0: relu}, "`branches` must be a sequence, but is a dict with keys 0."),
        (F3, "`branches` must be a sequence, but is float32[3]."),
    ],
)
def test_switch_refuses_branches_that_are_no_functions(branches, said):
    assert wrong(lambda: loopax.filter_switch(0, branches, F3)) == f"filter_switch: {said}"


@pytest.mark.parametrize("branches", [[], ()])
def test_no_branches(branches):
    call = lambda: loopax.filter_switch(0, branches, F3)
    assert message(call, loopax.LengthError) == (
        "filter_switch: `branches` is empty; there is nothing to choose."
    )


@pytest.mark.parametrize("trace_numbers", [1, None, "yes"])
def test_whether_to_trace_numbers_is_a_boolean(trace_numbers):
    said = re.compile(
        r"filter_(\w+): `trace_numbers` must be a boolean, but is \S+( \(int\))?\."
    )
    for call in [
        functools.partial(loopax.filter_cond, True, relu, relu, F3),
        functools.partial(loopax.filter_switch, 0, [relu], F3),
        functools.partial(loopax.filter_map, relu, F3),
        functools.partial(loopax.filter_associative_scan, jnp.add, F3),
        functools.partial(loopax.filter_stack, [F3]),
        functools.partial(loopax.filter_unstack, F3),
    ]:
        match = said.fullmatch(wrong(lambda: call(trace_numbers=trace_numbers)))
        assert call.func.__name__ == f"filter_{match[1]}"


# -- rows to map over --------------------------------------------------------------------


@pytest.mark.parametrize("xs", [None, {"name": "a", "n": 1}, [], "ab"])
def test_no_rows_to_map_over(xs):
    assert message(lambda: loopax.filter_map(relu, xs), loopax.LengthError) == (
        "filter_map: there are no arrays in `xs` to go along."
    )


def test_rows_of_other_lengths_to_map_over():
    xs = {"reward": jnp.ones((4, 2)), "mask": np.ones(3, bool), "name": "a"}
    assert message(lambda: loopax.filter_map(relu, xs), loopax.LengthError) == text(
        "filter_map: the arrays in `xs` must be of one length, but:",
        "",
        '  xs["mask"]     bool[3]        has length 3 along axis 0',
        '  xs["reward"]   float32[4,2]   has length 4 along axis 0',
    )


def test_a_scalar_to_map_over():
    assert wrong(lambda: loopax.filter_map(relu, {"a": F3, "b": jnp.asarray(1.0)})) == text(
        'filter_map: xs["b"] is float32[], which has no axis 0 to go along. To pass it '
        "whole, let the function close over it.",
    )


def test_a_negative_size_of_batches():
    assert message(
        lambda: loopax.filter_map(relu, F3, batch_size=-2), loopax.LengthError
    ) == text(
        "filter_map: `batch_size` must not be negative, got -2.",
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"f": None}, "`f` must be callable, but is None."),
        ({"f": (relu,)}, "`f` must be callable, but is a tuple of length 1."),
        ({"batch_size": "2"}, '`batch_size` must be an integer or None, but is "2".'),
        (
            {"batch_size": [2]},
            "`batch_size` must be an integer or None, but is a list of length 1.",
        ),
    ],
)
def test_map_refuses_arguments_of_the_wrong_type(arguments, said):
    good = {"f": relu, "xs": F3}
    assert wrong(lambda: loopax.filter_map(**{**good, **arguments})) == f"filter_map: {said}"


# -- elements of an associative scan -----------------------------------------------------


def combined_into(after, before=None, **options):
    """What an associative scan says whose operation returns `after(element)`."""

    def then(left, right):
        return after(left)

    elems = {"a": F3, "phase": "early", "n": 0} if before is None else before
    return message(lambda: loopax.filter_associative_scan(then, elems, **options))


def test_an_element_with_another_string():
    assert combined_into(lambda left: {**left, "phase": "late"}) == text(
        "filter_associative_scan: `then` (here) must return an element like those it "
        "was given, up to array values, but:",
        "",
        '  elems["phase"]   was "early"   came back as "late"',
        "",
        STATIC,
        '  * elems["phase"]: keep what changes in an array, or leave it out.',
    )


def test_an_element_with_another_number():
    assert combined_into(lambda left: {**left, "n": left["n"] + 1}) == text(
        "filter_associative_scan: `then` (here) must return an element like those it "
        "was given, up to array values, but:",
        "",
        '  elems["n"]   was 0 (int)   came back as 1 (int)',
        "",
        STATIC,
        '  * elems["n"] is a Python int. To change it in the loop, start from an '
        "array, jnp.asarray(0), or pass trace_numbers=True.",
    )


def test_an_element_of_another_dtype():
    assert combined_into(lambda left: {**left, "a": left["a"].astype("int32")}) == text(
        "filter_associative_scan: `then` (here) must return an element like those it "
        "was given, up to array values, but:",
        "",
        '  elems["a"]   was float32[1]   came back as int32[1]',
        "",
        '  * elems["a"]: cast it back with .astype(jnp.float32), or start from int32.',
    )


def test_an_element_of_another_shape():
    assert combined_into(lambda left: {**left, "a": left["a"].sum()}) == text(
        "filter_associative_scan: `then` (here) must return an element like those it "
        "was given, up to array values, but:",
        "",
        '  elems["a"]   was float32[1]   came back as float32[]',
        "",
        '  * elems["a"]: an array keeps its shape for the whole loop. Return shape '
        "(1,), or start from shape ().",
    )


def test_an_element_with_a_new_key():
    assert combined_into(lambda left: {**left, "z": 1}) == text(
        "filter_associative_scan: `then` (here) must return an element like those it "
        "was given, up to array values, but:",
        "",
        '  elems   came back with a new key "z"',
        "",
        STATIC,
        '  * elems: start with the key "z" in place, or do not add it in the loop.',
    )


def test_an_element_that_becomes_none():
    assert combined_into(lambda left: None) == text(
        "filter_associative_scan: `then` (here) must return an element like those it "
        "was given, up to array values, but:",
        "",
        '  elems   was a dict with keys "a", "n", "phase"   came back as None',
        "",
        STATIC,
        "  * elems: return what was there before, or start from what the body returns.",
    )


def test_an_element_that_differs_in_many_places():
    assert combined_into(lambda left: {"a": left["a"] > 0, "phase": F3, "n": 1}) == text(
        "filter_associative_scan: `then` (here) must return an element like those it "
        "was given, up to array values, but:",
        "",
        '  elems["a"]       was float32[1]   came back as bool[1]',
        '  elems["n"]       was 0 (int)      came back as 1 (int)',
        '  elems["phase"]   was "early"      came back as float32[3]',
        "",
        STATIC,
        '  * elems["a"]: cast it back with .astype(jnp.float32), or start from bool.',
        '  * elems["n"] is a Python int. To change it in the loop, start from an '
        "array, jnp.asarray(0), or pass trace_numbers=True.",
        '  * elems["phase"]: return what was there before, or start from an array.',
    )


@pytest.mark.parametrize("elems", [None, {"name": "a", "n": 1}, ()])
def test_no_elements(elems):
    call = lambda: loopax.filter_associative_scan(relu, elems)
    assert message(call, loopax.LengthError) == (
        "filter_associative_scan: there are no arrays in `elems` to go along."
    )


def test_elements_of_other_lengths():
    elems = (jnp.ones((3, 4)), {"b": jnp.ones((3, 5))})
    call = lambda: loopax.filter_associative_scan(relu, elems, axis=-1)
    assert message(call, loopax.LengthError) == text(
        "filter_associative_scan: the arrays in `elems` must be of one length, but:",
        "",
        "  elems[0]        float32[3,4]   has length 4 along axis -1",
        '  elems[1]["b"]   float32[3,5]   has length 5 along axis -1',
    )


def test_elements_without_the_axis():
    call = lambda: loopax.filter_associative_scan(relu, {"a": F3}, axis=1)
    assert wrong(call) == text(
        'filter_associative_scan: elems["a"] is float32[3], which has no axis 1 to go '
        "along. To pass it whole, let the function close over it.",
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"fn": None}, "`fn` must be callable, but is None."),
        ({"fn": "add"}, '`fn` must be callable, but is "add".'),
        ({"reverse": "yes"}, '`reverse` must be a boolean, but is "yes".'),
        ({"axis": "0"}, '`axis` must be an integer, but is "0".'),
        ({"axis": None}, "`axis` must be an integer, but is None."),
    ],
)
def test_associative_scan_refuses_arguments_of_the_wrong_type(arguments, said):
    good = {"fn": jnp.add, "elems": F3}
    assert wrong(lambda: loopax.filter_associative_scan(**{**good, **arguments})) == (
        f"filter_associative_scan: {said}"
    )


# -- trees to stack, and to take apart ---------------------------------------------------


def stacking(*trees, **options):
    return message(lambda: loopax.filter_stack(trees, **options))


def test_stacking_other_strings():
    assert stacking({"s": "x"}, {"s": "x"}, {"s": "y"}) == text(
        "filter_stack: the trees must be like `trees[0]`, up to array values, but:",
        "",
        '  trees[2]["s"]   has "y"   where trees[0] has "x"',
        "",
        "Leave out what else differs, or make it an array.",
    )


def test_stacking_other_numbers():
    assert stacking({"h": F3, "n": 1}, {"h": F3, "n": 2}) == text(
        "filter_stack: the trees must be like `trees[0]`, up to array values, but:",
        "",
        '  trees[1]["n"]   has 2 (int)   where trees[0] has 1 (int)',
        "",
        "Leave out what else differs, or make it an array.",
    )


def test_stacking_other_functions():
    assert stacking(Layer(F3, relu), Layer(F3, tanh)) == text(
        "filter_stack: the trees must be like `trees[0]`, up to array values, but:",
        "",
        "  trees[1].activation   has <function tanh>   where trees[0] has <function relu>",
        "",
        "Leave out what else differs, or make it an array.",
    )


def test_stacking_other_static_fields():
    assert stacking(Layer(F3), Layer(F3, use_bias=False)) == text(
        "filter_stack: the trees must be like `trees[0]`, up to array values, but:",
        "",
        "  trees[1].use_bias   has False (bool)   where trees[0] has True (bool)",
        "",
        "Leave out what else differs, or make it an array.",
    )


def test_stacking_arrays_of_other_shapes():
    assert stacking([F3], [SHORT]) == text(
        "filter_stack: the trees must be like `trees[0]`, up to array values, but:",
        "",
        "  trees[1][0]   has float32[2]   where trees[0] has float32[3]",
        "",
        "Arrays must be of one shape and dtype.",
    )


def test_stacking_arrays_of_other_dtypes():
    assert stacking(F3, F3.astype("int32")) == text(
        "filter_stack: the trees must be like `trees[0]`, up to array values, but:",
        "",
        "  trees[1]   has int32[3]   where trees[0] has float32[3]",
        "",
        "Arrays must be of one shape and dtype.",
    )


def test_stacking_an_array_and_none():
    assert stacking({"h": F3}, {"h": None}) == text(
        "filter_stack: the trees must be like `trees[0]`, up to array values, but:",
        "",
        '  trees[1]["h"]   has None   where trees[0] has float32[3]',
        "",
        "Leave out what else differs, or make it an array.",
    )


def test_stacking_a_number_and_an_array():
    assert stacking({"n": 1.0}, {"n": jnp.asarray(1.0)}) == text(
        "filter_stack: the trees must be like `trees[0]`, up to array values, but:",
        "",
        '  trees[1]["n"]   has float32[]   where trees[0] has 1.0 (float)',
        "",
        "Leave out what else differs, or make it an array.",
    )


def test_stacking_keys_of_other_kinds():
    assert stacking(jr.key(0), jr.key(0, impl="rbg")) == text(
        "filter_stack: the trees must be like `trees[0]`, up to array values, but:",
        "",
        "  trees[1]   has key<rbg>[]   where trees[0] has key<fry>[]",
        "",
        "Arrays must be of one shape and dtype.",
    )


def test_stacking_lists_of_other_lengths():
    assert stacking([F3], [F3, F3]) == text(
        "filter_stack: the trees must be like `trees[0]`, up to array values, but:",
        "",
        "  trees[1]   has length 2   where trees[0] has length 1",
        "",
        "Leave out what else differs, or make it an array.",
    )


def test_stacking_a_dict_and_a_list():
    assert stacking({"h": F3}, [F3]) == text(
        "filter_stack: the trees must be like `trees[0]`, up to array values, but:",
        "",
        '  trees[1]   has a list of length 1   where trees[0] has a dict with keys "h"',
        "",
        "Trees must be of one structure.",
    )


def test_stacking_dicts_with_other_keys():
    assert stacking({"a": F3}, {"b": F3}) == text(
        "filter_stack: the trees must be like `trees[0]`, up to array values, but:",
        "",
        '  trees[1]   has no key "a"    where trees[0] has the key "a"',
        '  trees[1]   has the key "b"   where trees[0] has no key "b"',
        "",
        "Leave out what else differs, or make it an array.",
    )


def test_stacking_modules_of_other_classes():
    assert stacking(Layer(F3), OtherLayer(F3)) == text(
        "filter_stack: the trees must be like `trees[0]`, up to array values, but:",
        "",
        "  trees[1]   has an OtherLayer   where trees[0] has a Layer",
        "",
        "Trees must be of one structure.",
    )


def test_stacking_another_class_and_another_number():
    assert stacking({"h": [F3], "n": 1}, {"h": (F3,), "n": 2}) == text(
        "filter_stack: the trees must be like `trees[0]`, up to array values, but:",
        "",
        '  trees[1]["h"]   has a tuple of length 1   where trees[0] has a list of length 1',
        '  trees[1]["n"]   has 2 (int)               where trees[0] has 1 (int)',
        "",
        "Trees must be of one structure.",
        "Leave out what else differs, or make it an array.",
    )


def test_stacking_traced_numbers_of_other_types():
    assert stacking({"n": 1}, {"n": 0.5}, trace_numbers=True) == text(
        "filter_stack: the trees must be like `trees[0]`, up to array values, but:",
        "",
        '  trees[1]["n"]   has float32[]   where trees[0] has int32[]',
        "",
        "Arrays must be of one shape and dtype.",
    )


def test_stacking_trees_that_differ_in_many_places():
    first = {"h": F3, "phase": "early", "n": 1}
    assert stacking(first, {**first, "phase": "late"}, {**first, "h": SHORT, "n": 2}) == text(
        "filter_stack: the trees must be like `trees[0]`, up to array values, but:",
        "",
        '  trees[1]["phase"]   has "late"       where trees[0] has "early"',
        '  trees[2]["h"]       has float32[2]   where trees[0] has float32[3]',
        '  trees[2]["n"]       has 2 (int)      where trees[0] has 1 (int)',
        "",
        "Arrays must be of one shape and dtype.",
        "Leave out what else differs, or make it an array.",
    )


@pytest.mark.parametrize("trees", [[], ()])
def test_no_trees_to_stack(trees):
    assert message(lambda: loopax.filter_stack(trees), loopax.LengthError) == (
        "filter_stack: `trees` is empty; there is nothing to stack."
    )


@pytest.mark.parametrize(
    ("trees", "said"),
    [
        (None, "None"),
        (F3, "float32[3]"),
        ({"a": F3}, 'a dict with keys "a"'),
        (Layer(F3), "a Layer"),
    ],
)
def test_trees_to_stack_must_be_a_sequence(trees, said):
    assert wrong(lambda: loopax.filter_stack(trees)) == (
        f"filter_stack: `trees` must be a sequence, but is {said}."
    )


@pytest.mark.parametrize("tree", [None, {"name": "a", "n": 1}, []])
def test_no_arrays_to_take_apart(tree):
    assert message(lambda: loopax.filter_unstack(tree), loopax.LengthError) == (
        "filter_unstack: there are no arrays in `tree` to go along."
    )


def test_arrays_of_other_lengths_to_take_apart():
    tree = {"a": F3, "b": Layer(jnp.zeros((4, 2)))}
    assert message(lambda: loopax.filter_unstack(tree), loopax.LengthError) == text(
        "filter_unstack: the arrays in `tree` must be of one length, but:",
        "",
        '  tree["a"]          float32[3]     has length 3 along axis 0',
        '  tree["b"].weight   float32[4,2]   has length 4 along axis 0',
    )


def test_a_scalar_to_take_apart():
    assert wrong(lambda: loopax.filter_unstack({"a": F3, "b": jnp.asarray(1.0)})) == text(
        'filter_unstack: tree["b"] is float32[], which has no axis 0 to go along. To '
        "pass it whole, let the function close over it.",
    )


# -- in the words of lax -----------------------------------------------------------------


def said_by(function, *args, **kwargs):
    with pytest.raises((TypeError, ValueError)) as caught:
        function(*args, **kwargs)
    return caught.value


def both(name, *args, **kwargs):
    ours = getattr(loopax, f"filter_{name}")
    return (
        said_by(ours, *args, trace_numbers=True, **kwargs),
        said_by(getattr(jax.lax, name), *args, **kwargs),
    )


def assert_says_both(name, ours, theirs):
    """First what we say, and then what `lax` says, which others may look for."""
    assert str(ours).startswith(f"filter_{name}: ")
    assert str(ours).endswith(f"\n\njax.lax.{name} says: {theirs}")


CHOOSE = jnp.asarray(0)


def to_vector(*args):
    return {"n": F3}


def to_list(*args):
    return [F3]


def to_vector_and_y(*args):
    return {"n": F3}, None


@pytest.mark.parametrize("before", [{"n": 0}, {"n": jnp.zeros(2)}])
def test_with_traced_numbers_arrays_mismatch_in_the_words_of_lax_too(before):
    for name, args in [
        ("scan", (to_vector_and_y, before, XS)),
        ("while_loop", (lambda c: True, to_vector, before)),
        ("fori_loop", (0, 3, to_vector, before)),
        ("scan", (lambda *_: ([F3], None), before, XS)),
        ("while_loop", (lambda c: True, to_list, before)),
        ("fori_loop", (0, 3, to_list, before)),
        ("cond", (CHOOSE, to_vector, to_list, before)),
        ("cond", (CHOOSE, to_vector, lambda c: {"n": SHORT}, before)),
        ("switch", (CHOOSE, [to_vector, to_list], before)),
        ("switch", (CHOOSE, [to_vector, lambda c: {"n": SHORT}], before)),
    ]:
        ours, theirs = both(name, *args)
        assert_says_both(name, ours, theirs)
        assert type(ours) is loopax.MismatchError
        assert isinstance(theirs, TypeError)
        assert len(ours.mismatches) == 1


def test_with_traced_numbers_elements_mismatch_in_the_words_of_lax_too():
    ours, theirs = both("associative_scan", lambda a, b: (a, b), F3)
    # It is no mismatch to `lax`, which fails on the way out.
    assert type(ours) is type(theirs) is ValueError
    assert str(ours) == str(theirs)


def test_with_traced_numbers_a_number_that_becomes_a_key_is_a_mismatch():
    ours, theirs = both("scan", lambda c, x: (jr.key(0), None), 0, XS)
    # `lax` fails while it promotes the number, before it comes to its own message.
    assert type(theirs) is ValueError
    assert "not a valid dtype for JAX type promotion" in str(theirs)
    assert isinstance(ours, loopax.MismatchError)
    assert "carry   was int32[]   came back as key<fry>[]" in str(ours)


def test_the_words_of_lax_for_a_carry():
    ours, _ = both("scan", to_vector_and_y, {"n": jnp.zeros(2)}, XS)
    assert "jax.lax.scan says: scan body function carry input and carry output" in str(ours)
    assert "['n'] has type float32[2]" in str(ours)
    (mismatch,) = ours.mismatches
    assert mismatch.path == 'carry["n"]'
    assert mismatch.kind == "array"


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "kind"),
    [
        ("scan", (lambda c, x: c, F3, XS), {}, loopax.ArgumentError),
        ("scan", (step, F3, (jnp.ones(3), jnp.ones(4))), {}, loopax.LengthError),
        ("scan", (step, F3, 1.0), {}, ValueError),
        ("scan", (step, F3, XS), {"length": 4}, loopax.LengthError),
        ("scan", (step, F3, None), {}, loopax.LengthError),
        ("while_loop", (lambda c: F3, relu, F3), {}, loopax.ArgumentError),
        ("while_loop", (lambda c: 1, relu, F3), {}, loopax.ArgumentError),
        ("while_loop", (lambda c: (True, True), relu, F3), {}, loopax.ArgumentError),
        ("scan", (3, F3, XS), {}, loopax.ArgumentError),
        ("while_loop", (3, relu, F3), {}, loopax.ArgumentError),
        ("fori_loop", (0, 3, None, F3), {}, loopax.ArgumentError),
        ("cond", (None, relu, relu, F3), {}, loopax.ArgumentError),
        ("cond", (F3, relu, relu, F3), {}, loopax.ArgumentError),
        ("cond", ("yes", relu, relu, F3), {}, loopax.ArgumentError),
        ("cond", (True, relu, 3, F3), {}, loopax.ArgumentError),
        ("switch", (1.0, [relu, relu], F3), {}, loopax.ArgumentError),
        ("switch", (F3, [relu, relu], F3), {}, loopax.ArgumentError),
        ("switch", (0, [], F3), {}, loopax.LengthError),
        ("switch", (0, [relu, None], F3), {}, loopax.ArgumentError),
        ("map", (relu, (jnp.ones(3), jnp.ones(4))), {}, loopax.LengthError),
        ("map", (relu, 1.0), {}, ValueError),
        ("map", (relu, None), {}, loopax.LengthError),
        ("associative_scan", (jnp.add, (jnp.ones(3), jnp.ones(4))), {}, loopax.LengthError),
        ("associative_scan", (None, F3), {}, loopax.ArgumentError),
    ],
)
def test_with_traced_numbers_all_else_is_refused_in_the_words_of_lax_too(
    name, args, kwargs, kind
):
    ours, theirs = both(name, *args, **kwargs)
    assert type(ours) is kind
    assert isinstance(ours, type(theirs))
    if kind is type(theirs):
        # It is the wrong type to us and the wrong value to `lax`, whose class counts.
        assert str(ours) == str(theirs)
    else:
        assert_says_both(name, ours, theirs)


def test_with_traced_numbers_the_words_are_ours_when_lax_has_none():
    options = {"kind": loopax.ArgumentError, "trace_numbers": True}
    assert scan_over(jnp.asarray(1.0), **options) == text(
        "filter_scan: xs is float32[], which has no axis 0 to go along. To pass it whole, "
        "give it None in `in_axes`, or let the body close over it.",
    )


def test_with_traced_numbers_the_words_are_ours_when_lax_could_not_take_the_arguments():
    before, after = {"n": F3, "phase": "early"}, {"n": jnp.zeros(2), "phase": "late"}
    assert scan_to(before, after, trace_numbers=True) == scan_to(before, after)


def test_with_traced_numbers_the_words_are_ours_when_lax_has_no_such_parameter():
    def step(carry, x):
        return jnp.zeros(2), None

    assert message(
        lambda: loopax.filter_scan(step, F3, XS, in_axes=0, trace_numbers=True)
    ) == text(
        must_return("filter_scan"),
        "",
        "  carry   was float32[3]   came back as float32[2]",
        "",
        "  * carry: an array keeps its shape for the whole loop. Return shape (3,), "
        "or start from shape (2,).",
    )


# -- what is changed in place, long lists, lists of trees ---------------------------------


class Gym:
    def __init__(self):
        self.t = 0

    def step(self, action):
        self.t += 1
        return self.t * action


def test_an_object_that_is_changed_in_place():
    def play(env, action):
        return env, env.step(action)

    assert message(lambda: loopax.filter_scan(play, Gym(), XS)) == text(
        must_return("filter_scan", "`play` (here)"),
        "",
        "  carry.t   was 0 (int)   came back as 1 (int)",
        "",
        STATIC,
        "  * carry.t: changed in place, in an object that is not a PyTree. A body runs once, "
        "while it is traced. Make the object an eqx.Module, with arrays for what changes, "
        "and return a new one.",
    )


def test_an_object_that_is_changed_in_place_is_a_mismatch_of_an_attribute():
    error = caught(lambda: loopax.filter_scan(lambda e, a: (e, e.step(a)), Gym(), XS))
    assert type(error) is loopax.MismatchError
    assert [(m.path, m.kind, m.before, m.after) for m in error.mismatches] == [
        ("carry.t", "attribute", 0, 1)
    ]


def test_of_very_many_mismatches_the_first_are_listed():
    assert scan_to([0] * 100, [1] * 100) == text(
        must_return("filter_scan"),
        "",
        *(f"  {f'carry[{i}]':<9}   was 0 (int)   came back as 1 (int)" for i in range(30)),
        "  ... and 70 more, see `mismatches`",
        "",
        STATIC,
        "  * carry[0], carry[1], carry[2] and 97 more are each a Python int. To change "
        "them in the loop, start from an array, jnp.asarray(0), or pass "
        "trace_numbers=True.",
    )


def test_of_very_many_mismatches_all_are_kept():
    after = [1] * 100
    error = caught(lambda: loopax.filter_scan(lambda c, x: (after, None), [0] * 100, XS))
    assert [m.path for m in error.mismatches] == [f"carry[{i}]" for i in range(100)]


def test_thirty_mismatches_are_all_listed():
    lines = scan_to([0] * 30, [1] * 30).split("\n")
    assert lines[2:33] == [
        *(f"  {f'carry[{i}]':<9}   was 0 (int)   came back as 1 (int)" for i in range(30)),
        "",
    ]


def test_very_many_mismatches_that_need_different_things():
    # What is to be done is not limited, as the rows are.
    assert scan_to(list(range(100, 140)), list(range(200, 240))) == text(
        must_return("filter_scan"),
        "",
        *(
            f"  {f'carry[{i}]':<9}   was {100 + i} (int)   came back as {200 + i} (int)"
            for i in range(30)
        ),
        "  ... and 10 more, see `mismatches`",
        "",
        STATIC,
        *(
            f"  * carry[{i}] is a Python int. To change it in the loop, start from an "
            f"array, jnp.asarray({100 + i}), or pass trace_numbers=True."
            for i in range(40)
        ),
    )


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_trees_to_scan_over(kind):
    xs = kind([Layer(jnp.ones((2, 3))), Layer(jnp.ones((4, 3)))])
    assert scan_over(xs) == text(
        "filter_scan: the arrays in `xs` must be of one length, but:",
        "",
        "  xs[0].weight   float32[2,3]   has length 2 along axis 0",
        "  xs[1].weight   float32[4,3]   has length 4 along axis 0",
        "",
        "To go over a list of like trees, stack them: loopax.filter_stack(xs).",
    )


# -- the exceptions themselves -----------------------------------------------------------


def caught(call):
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def mismatch_error():
    return caught(lambda: loopax.filter_scan(step, "early", XS))


def argument_error():
    return caught(lambda: loopax.filter_scan(3, "early", XS))


def length_error():
    return caught(lambda: loopax.filter_scan(step, "early"))


def test_mismatches_and_wrong_arguments_are_type_errors():
    assert isinstance(mismatch_error(), TypeError)
    assert isinstance(argument_error(), TypeError)


def test_a_wrong_number_of_steps_is_a_value_error():
    assert isinstance(length_error(), ValueError)


def test_a_mismatch_error_holds_the_mismatches_in_the_order_of_the_text():
    def step(carry, x):
        return {"a": 1, "b": F3, "c": "late"}, None

    before = {"a": 0, "b": jnp.zeros(2), "c": "early"}
    error = caught(lambda: loopax.filter_scan(step, before, XS))
    assert isinstance(error.mismatches, tuple)
    assert [(m.path, m.kind, m.before, m.after) for m in error.mismatches] == [
        ('carry["a"]', "value", 0, 1),
        ('carry["b"]', "array", jax.typeof(jnp.zeros(2)), jax.typeof(F3)),
        ('carry["c"]', "value", "early", "late"),
    ]
    places = [str(error).index(m.path) for m in error.mismatches]
    assert places == sorted(places)


def test_a_mismatch_error_survives_pickling():
    error = mismatch_error()
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is loopax.MismatchError
    assert str(again) == str(error)
    assert again.mismatches == error.mismatches


@pytest.mark.parametrize("make", [argument_error, length_error])
def test_the_other_errors_survive_pickling(make):
    error = make()
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


@pytest.mark.parametrize("make", [mismatch_error, argument_error, length_error])
def test_errors_are_named_as_users_find_them(make):
    kind = type(make())
    assert getattr(loopax, kind.__name__) is kind
    assert f"{kind.__module__}.{kind.__qualname__}" == f"loopax.{kind.__name__}"


# -- tracebacks --------------------------------------------------------------------------

PACKAGE = os.path.dirname(os.path.abspath(loopax.__file__))


def frames(error):
    """The files in the traceback of `error`, and in those of what led to it."""
    files = []
    while error is not None:
        files += [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return files


def of_package(files):
    return [file for file in files if os.path.dirname(os.path.abspath(file)) == PACKAGE]


class Broken(Exception):
    pass


def broken(*args):
    raise Broken("by the user")


FAILING = {
    "scan, mismatch": mismatch_error,
    "while, mismatch": lambda: caught(
        lambda: loopax.filter_while_loop(lambda c: True, lambda c: "late", "early")
    ),
    "fori, mismatch": lambda: caught(
        lambda: loopax.filter_fori_loop(0, 3, lambda i, c: "late", "early")
    ),
    "mismatch of arrays": lambda: caught(
        lambda: loopax.filter_scan(to_vector_and_y, {"n": 0}, XS, trace_numbers=True)
    ),
    "mismatch, while jit is disabled": lambda: caught(
        jax.disable_jit()(lambda: loopax.filter_scan(step, "early", XS))
    ),
    "mismatch, inside of jit": lambda: caught(
        lambda: jax.jit(lambda xs: loopax.filter_scan(step, "early", xs)[1])(XS)
    ),
    "wrong argument": argument_error,
    "no length": length_error,
    "not a pair": lambda: caught(lambda: loopax.filter_scan(relu, F3, XS)),
    "no predicate": lambda: caught(lambda: loopax.filter_while_loop(lambda c: 1, relu, F3)),
    "scan, broken body": lambda: caught(lambda: loopax.filter_scan(broken, "a", XS)),
    "while, broken body": lambda: caught(
        lambda: loopax.filter_while_loop(lambda c: True, broken, "a")
    ),
    "while, broken predicate": lambda: caught(
        lambda: loopax.filter_while_loop(broken, lambda c: c, "a")
    ),
    "fori, broken body": lambda: caught(lambda: loopax.filter_fori_loop(0, 3, broken, "a")),
    "broken body, inside of jit": lambda: caught(
        lambda: jax.jit(lambda xs: loopax.filter_scan(broken, "a", xs)[1])(XS)
    ),
    "broken body, in a loop in a loop": lambda: caught(
        lambda: loopax.filter_scan(
            lambda c, x: (loopax.filter_fori_loop(0, 3, broken, c), x), "a", XS
        )
    ),
    "cond, mismatch": lambda: caught(
        lambda: loopax.filter_cond(jnp.asarray(True), lambda: "a", lambda: "b")
    ),
    "switch, mismatch of arrays": lambda: caught(
        lambda: loopax.filter_switch(jnp.asarray(0), [lambda: F3, lambda: SHORT])
    ),
    "associative scan, mismatch": lambda: caught(
        lambda: loopax.filter_associative_scan(lambda a, b: "a", F3)
    ),
    "stack, mismatch": lambda: caught(lambda: loopax.filter_stack(["a", "b"])),
    "cond, wrong pred": lambda: caught(lambda: loopax.filter_cond(None, relu, relu, F3)),
    "switch, no branches": lambda: caught(lambda: loopax.filter_switch(0, [])),
    "map, no rows": lambda: caught(lambda: loopax.filter_map(relu, None)),
    "unstack, no rows": lambda: caught(lambda: loopax.filter_unstack(None)),
    "cond, broken branch": lambda: caught(
        lambda: loopax.filter_cond(jnp.asarray(True), relu, broken, F3)
    ),
    "switch, broken branch": lambda: caught(
        lambda: loopax.filter_switch(jnp.asarray(0), [relu, broken], F3)
    ),
    "map, broken function": lambda: caught(lambda: loopax.filter_map(broken, F3)),
    "map in batches, broken function": lambda: caught(
        lambda: loopax.filter_map(broken, F3, batch_size=2)
    ),
    "associative scan, broken operation": lambda: caught(
        lambda: loopax.filter_associative_scan(broken, F3)
    ),
    "lax refuses": lambda: caught(
        lambda: loopax.filter_scan(lambda c, x: (c, x), F3, XS, unroll=-1)
    ),
}


@pytest.mark.parametrize("make", FAILING.values(), ids=FAILING.keys())
def test_tracebacks_have_no_frame_of_the_package(make):
    assert jax.config.jax_traceback_filtering != "off"
    error = make()
    assert of_package(frames(error)) == []
    assert __file__ in frames(error)


@pytest.mark.parametrize("make", FAILING.values(), ids=FAILING.keys())
def test_tracebacks_are_whole_when_filtering_is_off(make):
    jax.config.update("jax_traceback_filtering", "off")
    try:
        error = make()
    finally:
        jax.config.update("jax_traceback_filtering", "auto")
    assert of_package(frames(error)) != []


def test_the_last_frame_of_an_exception_of_the_body_is_that_of_the_body():
    error = FAILING["scan, broken body"]()
    assert type(error) is Broken
    last = traceback.extract_tb(error.__traceback__)[-1]
    assert (last.filename, last.name) == (__file__, "broken")


def test_the_last_frame_of_a_mismatch_is_that_of_the_call():
    entries = traceback.extract_tb(mismatch_error().__traceback__)
    # The tests run with the types of all arguments checked, by a wrapper with a frame.
    last = [entry for entry in entries if "jaxtyping" not in entry.filename][-1]
    assert last.filename == __file__
    assert "loopax.filter_scan(step" in last.line


def test_of_many_arrays_of_other_lengths_the_few_come_first():
    xs = {f"leaf{n}": jnp.ones(5 if n == 500 else 4) for n in range(1000)}
    with pytest.raises(loopax.LengthError) as caught:
        loopax.filter_scan(lambda c, x: (c, x), 0.0, xs)
    lines = str(caught.value).splitlines()
    assert lines[2].split() == [
        'xs["leaf500"]',
        "float32[5]",
        "has",
        "length",
        "5",
        "along",
        "axis",
        "0",
    ]
    assert len(lines) == 33
    assert lines[-1] == "  ... and 970 more"


class Speed(enum.IntEnum):
    LOW = 1
    HIGH = 2


@pytest.mark.parametrize(
    ("before", "after", "was", "start"),
    [
        (Speed.LOW, Speed.HIGH, "<Speed.LOW: 1> (Speed)", "jnp.asarray(1)"),
        # Python writes no integers of thousands of digits.
        (10**5000, 10**5000 + 1, "<int> (int)", "jnp.asarray(...)"),
    ],
    ids=["of an enumeration", "with thousands of digits"],
)
def test_a_number_that_python_does_not_write_as_one(before, after, was, start):
    said = message(lambda: loopax.filter_scan(lambda c, _: ([after], None), [before], length=2))
    assert f"  carry[0]   was {was}   came back as " in said
    assert f"start from an array, {start}, or pass trace_numbers=True." in said


class Mute:
    def __repr__(self):
        raise RuntimeError("written")


def test_what_cannot_be_written_is_told_by_its_type():
    said = message(
        lambda: loopax.filter_scan(lambda c, _: ([Mute()], None), [Mute()], length=2)
    )
    assert "  carry[0]   was <Mute>   came back as another <Mute>" in said


@pytest.mark.parametrize("size", [3, 3000])
def test_one_value_among_many_in_an_array_of_strings(size):
    before = np.array(["abc"] * size)
    after = before.copy()
    after[2] = "zzz"

    def run(after):
        return loopax.filter_scan(lambda c, _: ([after], None), [before], length=2)

    run(before.copy())
    assert "carry[0]" in message(lambda: run(after))
