"""Diffrax, Optimistix and Lineax on the loops of this library.

They take their loops from `equinox.internal`. `on_loopax` puts ours in their place.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import diffrax._adjoint
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from loopax import filter_scan, filter_while_loop
from loopax._buffers import Buffer


class Called(NamedTuple):
    """A loop that was put in place of another, as it was asked for."""

    name: str
    kind: str
    checkpoints: Any = None
    buffers: bool = False


class NotRows(Exception):
    """A buffer was used along another axis than its first."""


@jtu.register_pytree_node_class
class ClientBuffer:
    """One of our buffers, or an array, that is used as those of `equinox.internal` are."""

    def __init__(self, of: Any):
        self.of = of

    def tree_flatten(self):
        return (self.of,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)

    shape = property(lambda self: self.of.shape)
    dtype = property(lambda self: self.of.dtype)
    size = property(lambda self: self.of.size)
    at = property(lambda self: _At(self.of))

    def __getitem__(self, index):
        if not isinstance(self.of, Buffer):
            return self.of[index]
        if index is ...:
            # A row that is not written yet is multiplied by zero.
            return jnp.stack([self.of[i] for i in range(len(self.of))])
        return self.of[_row(index)]


class _At:
    def __init__(self, of):
        self._of = of

    def __getitem__(self, index):
        return _Place(self._of, index)


class _Place:
    def __init__(self, of, index):
        self._of = of
        self._index = index

    def set(self, value, *, pred=True):
        if isinstance(self._of, Buffer):
            where = None if pred is True else pred
            return ClientBuffer(self._of.at[_row(self._index)].set(value, where=where))
        place = self._of.at[self._index]
        return ClientBuffer(place.set(jnp.where(pred, value, place.get())))


def _row(index):
    if isinstance(index, tuple) and len(index) == 2 and index[1] == slice(None):
        index = index[0]
    if index is ... or isinstance(index, (tuple, slice)):
        raise NotRows
    return index


def _is_lent(value):
    return isinstance(value, Buffer)


def _is_client(value):
    return isinstance(value, ClientBuffer)


def _wrapped(tree):
    """The carry as the client is to see it."""
    return jtu.tree_map(lambda x: ClientBuffer(x) if _is_lent(x) else x, tree, is_leaf=_is_lent)


def _unwrapped(tree):
    """The carry as our loop is to see it."""
    return jtu.tree_map(lambda x: x.of if _is_client(x) else x, tree, is_leaf=_is_client)


def _picked(buffers):
    """Which leaves are buffers; a buffer of an outer loop is one as a whole."""
    return None if buffers is None else lambda carry: _leaves(buffers(carry))


def _leaves(tree):
    return jtu.tree_leaves(tree, is_leaf=_is_lent)


def _arrays_as_buffers(buffers, carry):
    """The carry with something to be used as a buffer for each array that is one."""
    if buffers is None:
        return carry
    wanted = {id(each) for each in _leaves(buffers(carry))}
    return jtu.tree_map(
        lambda x: ClientBuffer(x) if id(x) in wanted else x, carry, is_leaf=_is_lent
    )


def _as_arrays(tree):
    return jtu.tree_map(jnp.array, tree)


def adapted_while_loop(calls):
    def while_loop(
        cond_fun, body_fun, init_val, *, max_steps=None, buffers=None, kind, checkpoints=None,
        base=16,
    ):  # fmt: skip
        del base
        init = _as_arrays(_unwrapped(init_val))
        if kind != "checkpointed":
            checkpoints = None

        def run(ours):
            def seen(carry):
                return _wrapped(carry if ours else _arrays_as_buffers(buffers, carry))

            return filter_while_loop(
                lambda carry: cond_fun(seen(carry)),
                lambda carry: _as_arrays(_unwrapped(body_fun(seen(carry)))),
                init,
                max_steps=max_steps,
                kind=kind,
                checkpoints=checkpoints,
                buffers=_picked(buffers) if ours else None,
            )

        try:
            out = run(ours=buffers is not None)
            as_buffers = buffers is not None
        except NotRows:
            out = run(ours=False)
            as_buffers = False
        calls.append(Called("while_loop", kind, checkpoints, as_buffers))
        return _wrapped(out)

    return while_loop


def adapted_scan(calls):
    def scan(f, init, xs, length=None, *, buffers=None, kind, checkpoints=None):
        def body(carry, x):
            carry, y = f(_wrapped(carry), x)
            return _as_arrays(_unwrapped(carry)), _as_arrays(y)

        calls.append(Called("scan", kind, checkpoints, buffers is not None))
        carry, ys = filter_scan(
            body,
            _as_arrays(_unwrapped(init)),
            _as_arrays(xs),
            length,
            kind=kind,
            checkpoints=checkpoints if kind == "checkpointed" else None,
            buffers=_picked(buffers) if kind == "checkpointed" else None,
        )
        return _wrapped(carry), ys

    return scan


def adapted_buffer_at_set(original):
    def buffer_at_set(buffer, item, x, *, pred=True, **kwargs):
        if _is_client(buffer):
            return buffer.at[item].set(x, pred=pred)
        return original(buffer, item, x, pred=pred, **kwargs)

    return buffer_at_set


@contextlib.contextmanager
def on_loopax() -> Iterator[list[Called]]:
    """Within, the clients use our loops. Also gives the list of those that were traced."""
    calls: list[Called] = []
    loop = adapted_while_loop(calls)
    patches = [
        (eqxi, "while_loop", loop),
        (eqxi, "scan", adapted_scan(calls)),
        (eqxi, "buffer_at_set", adapted_buffer_at_set(eqxi.buffer_at_set)),
        # These were made of `eqxi.while_loop` on import.
        (diffrax._adjoint, "_inner_loop", jax.named_call(loop, name="inner-loop")),
        (diffrax._adjoint, "_outer_loop", jax.named_call(loop, name="outer-loop")),
    ]
    before = [getattr(module, name) for module, name, _ in patches]
    # What was traced with the other loops.
    jax.clear_caches()
    for module, name, new in patches:
        setattr(module, name, new)
    try:
        yield calls
    finally:
        for (module, name, _), old in zip(patches, before, strict=True):
            setattr(module, name, old)
        jax.clear_caches()
