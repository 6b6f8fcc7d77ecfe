"""The function that JAX traces in place of the user's: merge, call, split, compare."""

import contextlib
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, NamedTuple, cast

import equinox as eqx

from ._call import Call, Operands
from ._errors import carry_mismatch
from ._jax import config, debug_info
from ._mismatch import Comparison, attributes
from ._split import HOLE, Arrays, Static, names, split
from ._token import Tokens
from ._words import named


class Calling(NamedTuple):
    """How a loop calls the user's functions.

    - `run`: is given the step and the trees that the loop was called with, and returns what
        `lax` expects of the body.
    - `name`: what `lax` calls such a function in its messages.
    - `before`: the names of what `lax` calls it with before anything of ours, such as the
        number of the step: for each argument those of its leaves.
    """

    run: Callable[..., Any]
    name: str
    before: tuple[tuple[str, ...], ...] = ()


class Step:
    """One run of the user's function: what it is given, and what is made of its results."""

    def __init__(self, body: "Body", call: Call, inputs: Sequence[Arrays]):
        self._body = body
        self._call = call
        self._inputs = inputs
        # What is static in the carry must not be changed in place either.
        self._attributes = attributes(call.statics[0][-1])

    @property
    def caller(self) -> str:
        return self._call.caller

    @property
    def function(self) -> Callable[..., Any]:
        return self._call.function

    @property
    def trace_numbers(self) -> bool:
        return self._call.trace_numbers

    def unchanged(self) -> Arrays:
        """The first argument as it is, where there is no carry in it."""
        return self._inputs[0]

    def carry(self, tree: Any) -> Arrays:
        """The carry that was returned, checked against the one that was given.

        All that stands before the carry, such as the arrays of the function, goes round
        with it unchanged: `lax` turns what is forwarded into a constant of the loop.
        """
        state, static = self._inputs[0], self._call.statics[0][-1]
        held = len(state.arrays) - static.num_arrays
        kept, before = state.arrays[:held], state.arrays[held:]
        # A weakly typed carry, such as a Python number, is promoted by `lax` to the type
        # that the body gives it. `lax` then traces the body again, over what is no longer
        # weakly typed.
        rules = Comparison(
            self.trace_numbers,
            weak_fits=True,
            # Then the loop is one of Python's, which may change what it likes.
            any_type=config.jax_disable_jit,
        )
        arrays, mismatches = rules.compare(static, before, tree, "carry")
        mismatches += rules.changed_in_place(static, self._attributes, "carry")
        if mismatches:
            raise carry_mismatch(self.caller, self.function, mismatches)
        return Arrays([*kept, *arrays], state.names)

    def output(self, tree: Any) -> Arrays:
        """Any other result. Its static part travels as the metadata of the node.

        That is the one way in which it comes back when JAX finds the trace in its cache
        and the user's function does not run.
        """
        arrays, static = split(tree, self.trace_numbers, self._call.as_arrays)
        return Arrays(arrays, names(static), _Label(static, self._body, self._call))


class _Label(Static):
    """The static part of an output.

    JAX keeps it for as long as it keeps the body. Leaves that came in with the call are
    therefore left out, and looked up in the call in progress: held here, they would keep
    alive the very things whose death takes the body out of the cache.
    """

    __slots__ = ("_body", "_given")

    def __init__(self, static: Static, body: "Body", call: Call):
        places = {id(leaf): n for n, leaf in enumerate(call.leaves) if leaf is not HOLE}
        kept: list[Any] = []
        # For each leaf that is left out its place in the call; for a bound method that of
        # its receiver, of which there is a new method at each access.
        self._given: list[int | None] = []
        for leaf in static.leaves:
            place, rest = places.get(id(leaf)), leaf
            if place is not None:
                rest = None
            elif isinstance(leaf, types.MethodType):
                place = places.get(id(leaf.__self__))
                rest = leaf if place is None else leaf.__func__
            kept.append(rest)
            self._given.append(place)
        self._body = weakref.ref(body)
        super().__init__(static.treedef, kept)

    @property
    def leaves(self) -> tuple[Any, ...]:
        body = self._body()
        # Between calls there is nothing to tell but which leaf it would be.
        call = body.calls[-1].leaves if body is not None and body.calls else None
        leaves: list[Any] = []
        for rest, place in zip(self._leaves, self._given, strict=True):
            if place is None:
                leaves.append(rest)
            else:
                leaf = place if call is None else call[place]
                leaves.append(leaf if rest is None else types.MethodType(rest, leaf))
        return tuple(leaves)


class Body:
    """What JAX traces, and remembers the trace of.

    There is one for each function and static part of everything that it is called with,
    so that JAX knows it again. It holds none of them itself. While calls are in progress it
    takes them from there; which call does not matter, since all are alike.
    """

    def __init__(self, calling: Calling, call: Call):
        self.__name__ = self.__qualname__ = named(call.function)
        self._calling = calling
        self._local: Any = threading.local()
        self._signature: inspect.Signature | None = None
        self._debug_info: Any = None
        self._names = [
            tuple(name for static in statics for name in names(static))
            for statics in call.statics
        ]
        # References that take the body out of the cache when what it is for dies.
        self.evicting: list[Any] = []
        # What was compiled for this body: see `_kinds.compiled`.
        self.programs: dict[Hashable, Any] = {}

    @property
    def calls(self) -> list[Call]:
        """The calls in progress in this thread, the latest last."""
        return self._local.__dict__.setdefault("calls", [])

    # These make JAX name the user's function and its arguments, not this class.

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return _with_code(self._function("__wrapped__"))

    @property
    def __signature__(self) -> inspect.Signature:
        if self._signature is None:
            self._signature = _signature(self._function("__signature__"))
        return self._signature

    @property
    def __fun_debug_info__(self) -> Any:
        # Without it JAX would make the same anew at each call, traced already or not.
        if self._debug_info is None:
            self._debug_info = debug_info(
                self._calling.name,
                _with_code(self._function("__fun_debug_info__")),
                getattr(self, "__signature__", None),
                [*self._calling.before, *self._names],
            )
        return self._debug_info

    def _function(self, attribute: str) -> Callable[..., Any]:
        if not self.calls:
            raise AttributeError(attribute)
        return self.calls[-1].function

    @contextlib.contextmanager
    def during(self, call: Call) -> Generator[None]:
        self.calls.append(call)
        try:
            yield
        finally:
            self.calls.remove(call)

    def argument(self, operands: Operands, position: int = 0) -> Arrays:
        """`operands` as the argument of that position."""
        return self.node(operands.arrays, position)

    def node(self, arrays: Sequence[Any], position: int = 0) -> Arrays:
        """The argument of that position, over these arrays."""
        return Arrays(arrays, self._names[position])

    def __call__(self, *inputs: Any) -> Any:
        call = self.calls[-1]
        nodes = [value for value in inputs if isinstance(value, Arrays)]
        others = [value for value in inputs if not isinstance(value, Arrays)]
        return self._calling.run(Step(self, call, nodes), *others, *call.merge(nodes))


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """The parameters of a function, with nothing of the user's, which would be kept alive."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        raise AttributeError("signature") from None
    absent = inspect.Parameter.empty
    return inspect.Signature(
        [
            each.replace(annotation=absent, default=absent if each.default is absent else None)
            for each in signature.parameters.values()
        ]
    )


def _with_code(function: Any) -> Callable[..., Any]:
    """The function that is called in the end, which has a name and a place in a file."""
    while isinstance(function, functools.partial):
        function = cast(Any, function).func
    return cast(Any, function).__call__ if isinstance(function, eqx.Module) else function


def merge_output(output: Arrays) -> Any:
    """The tree that `Step.output` split, while its call lasts."""
    return output.label.merge(output.arrays)


# -- the cache ---------------------------------------------------------------------------

# Bodies that JAX may have a trace of, the latest last. An entry goes when any function or
# object that it was made for dies, or when the table is full.
_bodies: dict[Hashable, Body] = {}
_lock = threading.RLock()
_CAPACITY = 4096


def body_for(calling: Calling, call: Call) -> Body:
    """The body for a call: the same object as for the last call like it."""
    tokens = Tokens()
    try:
        key = (calling, call.token(tokens))
    except Exception:
        # There is none, or what the call was given does not let itself be asked.
        return Body(calling, call)
    with _lock:
        body = _bodies.pop(key, None)
        if body is None:
            body = Body(calling, call)
            body.evicting = [_evict(key, value) for value in tokens.watched]
            if len(_bodies) >= _CAPACITY:
                # In one go, and without a word if it is gone: others go at any moment, when
                # what they are for dies, in whichever thread.
                _bodies.pop(list(_bodies)[0], None)  # noqa: RUF015
        _bodies[key] = body
        return body


def _evict(key: Hashable, value: Any) -> Any:
    return weakref.ref(value, lambda _: _bodies.pop(key, None))
