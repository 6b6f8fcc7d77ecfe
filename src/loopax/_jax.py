"""What loopax takes from JAX and Equinox: what is private, and what has types of its own.

Private are:

- `typematch`, by which `jax.lax` decides whether a carry has kept its type. There is no public
  form of it, and a copy would drift: it knows of sharding, of manual axes, of memory spaces.
- `register_exclusion`, by which JAX and its libraries keep their own lines out of the
  locations of operations, which profiles and messages show.
- `_trace` of a tracer, by which a value that must not leave the function that is being traced
  is told from one that may.
- `__fun_debug_info__` (see `debug_info`), the attribute of a function in which `jax.lax` looks
  for what to call its arguments. Without it, `lax` writes the path of each of them at each
  call, also when there is nothing to trace: a sixth of an eager call.
- `fancy_primitive_batchers`, the table of those rules of `jax.vmap` that are told the name of
  the axis, and `no_axis_name`, what stands there if it has none. Without the name no body
  could use a collective over that axis.
- `util.cache`, a cache that has what traces depend on, such as the mesh, in its key.

The others are public, but annotated in ways that leave a strict type checker with unknowns.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.api_util
import jax.core
import jax.extend.core
import numpy as np
from jax._src import core, source_info_util, util
from jax._src.interpreters import batching
from jax.interpreters import ad, mlir


_jax: Any = jax
_eqx: Any = eqx
_core: Any = jax.core
_api_util: Any = jax.api_util
_extended: Any = jax.extend.core
_ad: Any = ad
_mlir: Any = mlir
_batching: Any = batching
_util: Any = util

lax = _jax.lax
jnp = _jax.numpy
checkpoint = _jax.checkpoint
jit = _jax.jit
jvp = _jax.jvp
vjp = _jax.vjp
vmap = _jax.vmap
typeof = _jax.typeof
make_jaxpr = _jax.make_jaxpr
config = _jax.config
PyTreeDef = _jax.tree_util.PyTreeDef
partition = _eqx.partition
combine = _eqx.combine
tree_at = _eqx.tree_at

Primitive = _extended.Primitive
Jaxpr = _extended.Jaxpr
ClosedJaxpr = _extended.ClosedJaxpr
Literal = _extended.Literal
ShapedArray = _core.ShapedArray
eval_jaxpr = _core.eval_jaxpr
Zero = _ad.Zero
UndefinedPrimal = _ad.UndefinedPrimal
instantiate_zeros = _ad.instantiate_zeros


def key_data(arrays: Sequence[Any]) -> list[Any]:
    """Of keys of `jax.random` what they are made of, and other arrays as they are."""
    return [_jax.random.key_data(each) if _is_key(each) else each for each in arrays]


def with_keys(data: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """What `key_data` was made of, with keys where there are keys in `like`."""
    return [
        _jax.random.wrap_key_data(new, impl=_jax.random.key_impl(each))
        if _is_key(each)
        else new
        for new, each in zip(data, like, strict=True)
    ]


def _is_key(array: Any) -> bool:
    return jnp.issubdtype(typeof(array).dtype, jax.dtypes.prng_key)


def error_if(arrays: list[Any], failed: Any, message: str) -> list[Any]:
    """`eqx.error_if`, which takes no keys of `jax.random`, nor values that vary over an axis.

    It chooses between the arrays and what a callback returns, which is of another type than
    they are under `jax.shard_map`. So a number goes through it, and the arrays depend on that.
    """
    token = _eqx.error_if(jnp.zeros(()), failed, message)
    # With `EQX_ON_ERROR=nan` it comes back as not a number.
    return [jnp.where(token == 0, each, _wrong_value(each)) for each in arrays]


def _wrong_value(array: Any) -> Any:
    if jnp.issubdtype(array.dtype, jnp.inexact):
        return jnp.full_like(array, jnp.nan)
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    return jnp.zeros_like(array)


def cached_type(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function from types to types, cached.

    What JAX finds for a type depends on the mesh that is set, and on which of its axes are
    manual, none of which a type without sharding shows.
    """
    return _util.cache()(function)


def typematch(before: Any, after: Any) -> bool:
    """Whether `lax` takes one type for the other. It ignores weak types."""
    return bool(core.typematch(before, after))


def debug_info(
    name: str,
    function: Callable[..., Any],
    signature: Any,
    arguments: Sequence[Sequence[str]],
) -> Any:
    """What JAX says of a function and its arguments, as the attribute of that name.

    - `name`: of the operation that traces it, as in "while_body".
    - `signature`: of the function, if it is known.
    - `arguments`: for each of them where its leaves stand in it.
    """
    # JAX is asked for the name of each argument, not once more where its leaves are.
    info = _api_util.debug_info(name, function, (0,) * len(arguments), {}, signature=signature)
    if len(info.arg_names or ()) != len(arguments):
        # The function brings its own, of other arguments.
        return info._replace(arg_names=None)
    pairs = zip(info.arg_names, arguments, strict=True)
    return info._replace(arg_names=tuple(a + leaf for a, leaves in pairs for leaf in leaves))


def same_trace(one: Any, other: Any) -> bool:
    """Whether two values belong to the same trace, so that one may stand for the other."""
    return getattr(one, "_trace", None) is getattr(other, "_trace", None)


def hide_source(directory: str) -> None:
    """Makes JAX note the user's line as the source of an operation, not one of ours."""
    source_info_util.register_exclusion(directory)


def primitive(
    name: str,
    run: Callable[..., Any],
    types: Callable[..., Any],
    batch: Callable[..., Any],
    transpose: Callable[..., Any] | None = None,
) -> Any:
    """A primitive with several results.

    - `run`: what it computes, in terms of other operations.
    - `types`: from the types of its operands to those of its results, and its effects.
    - `batch`: its rule under `jax.vmap`, `(axis, operands, axes, **parameters)`, where `axis`
        is a `VmapAxis`.
    - `transpose`: its rule of transposition, as JAX has them. For that of differentiation see
        `set_jvp`.
    """
    made = Primitive(name)
    made.multiple_results = True

    def eager(*operands: Any, **parameters: Any) -> Any:
        return jit(functools.partial(run, **parameters))(*operands)

    def batcher(axis: Any, operands: Any, axes: Any, **parameters: Any) -> Any:
        over = VmapAxis(axis)
        if not over.is_named and all(place is None for place in axes):
            out = made.bind(*operands, **parameters)
            return out, [None] * len(out)
        return batch(over, operands, axes, **parameters)

    made.def_impl(eager)
    made.def_effectful_abstract_eval(types)
    _mlir.register_lowering(made, _mlir.lower_fun(run, multiple_results=True))
    _batching.fancy_primitive_batchers[made] = batcher
    if transpose is not None:
        _ad.primitive_transposes[made] = transpose
    return made


def set_jvp(primitive: Any, rule: Callable[..., Any]) -> None:
    """Sets the rule by which a primitive is differentiated, as JAX has them."""
    _ad.primitive_jvps[primitive] = rule


class VmapAxis:
    """The axis that `jax.vmap` maps over, as a value that can be compared."""

    def __init__(self, axis: Any):
        self.size: int = axis.size
        self.is_named = axis.name is not core.no_axis_name and axis.name is not None
        self._options: tuple[tuple[str, Any], ...] = (
            ("axis_size", axis.size),
            ("axis_name", axis.name if self.is_named else None),
            ("spmd_axis_name", axis.spmd_name),
        )

    def vmap(
        self, function: Callable[..., Any], in_axes: Any, out_axes: Any
    ) -> Callable[..., Any]:
        def with_axis(_: Any, *arguments: Any) -> Any:
            return function(*arguments)

        options = dict(self._options)
        mapped = vmap(with_axis, in_axes=(0, *in_axes), out_axes=out_axes, **options)
        # `jax.vmap` wants something that has the axis.
        return functools.partial(mapped, np.zeros(self.size, bool))

    def reaches(
        self,
        function: Callable[..., Any],
        values: Sequence[Any],
        axes: Sequence[int | None],
        has: Sequence[Any],
    ) -> list[bool]:
        """Which results of a function have the axis, if those of its arguments do that `has`.

        `axes` are where the values have it now. One that has none, but is to have it, is taken
        to be the same for all.
        """
        found: list[bool] = []

        def noting(mapped: Any, arguments: Any) -> Any:
            out = function(*arguments)
            found[:] = [same_trace(mapped, each) for each in out]
            return out

        def over_axis(values: Any) -> Any:
            moved = [
                self.to_front(*each) if mark else each[0]
                for *each, mark in zip(values, axes, has, strict=True)
            ]
            in_axes = [0 if mark else None for mark in has]
            options = dict(self._options)
            return vmap(noting, (0, in_axes), **options)(np.zeros(self.size, bool), moved)

        make_jaxpr(over_axis)(values)
        return found

    def to_front(self, value: Any, place: int | None) -> Any:
        """A value with the axis as its first; the same for all if it does not have it."""
        if place is None:
            return jnp.broadcast_to(value, (self.size, *jnp.shape(value)))
        return jnp.moveaxis(value, place, 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VmapAxis) and self._options == other._options

    def __hash__(self) -> int:
        return hash(self._options)
