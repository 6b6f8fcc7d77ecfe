"""What is asked of a jaxpr, and done to it."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax

from .._jax import ClosedJaxpr, Jaxpr, Literal, make_jaxpr


def trace(function: Callable[..., Any], *arguments: Any) -> tuple[Any, list[Any]]:
    """The jaxpr of a function, and what it closes over, which is its first operands."""
    closed = make_jaxpr(function)(*arguments)
    jaxpr = closed.jaxpr
    return rearranged(jaxpr, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars), closed.consts


def rearranged(jaxpr: Any, invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """The jaxpr with its inputs in another order, and other outputs."""
    return jaxpr.replace(
        constvars=[],
        invars=list(invars),
        outvars=list(outvars),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def reached(
    jaxpr: Any,
    inputs: Sequence[bool],
    carries: Callable[[Any], bool] = lambda aval: True,
) -> list[bool]:
    """Which outputs may depend on the inputs that are marked.

    Only through values that `carries` admits. Too many at worst: an operation with a loop or a
    branch in it counts as one that mixes all of its operands.
    """
    marked = {var for var, mark in zip(jaxpr.invars, inputs, strict=True) if mark}

    def is_marked(atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in marked

    for eqn in jaxpr.eqns:
        marks = [is_marked(atom) for atom in eqn.invars]
        if not any(marks) and not _differs_by_itself(eqn):
            continue
        inner = _called(eqn)
        if eqn.primitive.name == "read_row":
            # The buffer comes back as it was.
            outs = [True, marks[0]]
        elif inner is not None:
            outs = reached(inner, marks, carries)
        else:
            outs = [True] * len(eqn.outvars)
        marked.update(
            var for var, out in zip(eqn.outvars, outs, strict=True) if out and carries(var.aval)
        )
    return [is_marked(atom) for atom in jaxpr.outvars]


def _differs_by_itself(eqn: Any) -> bool:
    """Whether lanes may get different results, although the operands are the same."""
    return eqn.primitive.name in _DIFFERENT or any(
        _differs_by_itself(each)
        for inner in _jaxprs(list(eqn.params.values()))
        for each in inner.eqns
    )


_DIFFERENT = {"axis_index", "all_to_all", "reduce_scatter"}


def _called(eqn: Any) -> Any:
    """The jaxpr that an equation only calls, on the same operands and with the same results."""
    if eqn.primitive.name not in _CALLS:
        return None
    closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    inner = getattr(closed, "jaxpr", closed)
    if inner is None:
        return None
    same = len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars)
    return inner if same else None


def _calling(eqn: Any, inner: Any) -> Any:
    """The equation with another jaxpr that it calls."""
    name = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
    closed = eqn.params[name]
    if isinstance(closed, ClosedJaxpr) and closed.jaxpr is not closed:
        inner = closed.replace(jaxpr=inner)
    return eqn.replace(params={**eqn.params, name: inner})


_CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "checkpoint",
    "remat2",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
}


def has_rule(jaxpr: Any) -> bool:
    """Whether a function with a `jax.custom_vjp` is called, or in a loop or a branch."""
    return any(
        eqn.primitive.name.startswith("custom_vjp_call")
        or any(map(has_rule, _jaxprs(list(eqn.params.values()))))
        for eqn in jaxpr.eqns
    )


def is_differentiable(aval: Any) -> bool:
    """Whether values of a type have tangents."""
    return aval.to_tangent_aval().dtype != jax.dtypes.float0


def rewritten(
    jaxpr: Any,
    inputs: Sequence[bool],
    change: Callable[[Any, Sequence[bool]], tuple[Any, Sequence[bool]] | None],
) -> tuple[Any, list[bool]]:
    """The jaxpr with some equations changed, and which of its outputs are marked.

    `change` gets each equation that has an operand that is marked, and which of them are. It
    returns the equation to take instead, and which of the results are marked, or `None` for an
    equation that it does not know. What an equation only calls is gone through likewise.
    """
    marked = {var for var, mark in zip(jaxpr.invars, inputs, strict=True) if mark}

    def is_marked(atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in marked

    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        marks = [is_marked(atom) for atom in eqn.invars]
        new = eqn
        if any(marks):
            outs: Sequence[bool] = [False] * len(eqn.outvars)
            inner = _called(eqn)
            changed = change(eqn, marks)
            if changed is not None:
                new, outs = changed
            elif inner is not None:
                inner, outs = rewritten(inner, marks, change)
                new = _calling(eqn, inner)
            marked.update(var for var, out in zip(eqn.outvars, outs, strict=True) if out)
        eqns.append(new)
    return jaxpr.replace(eqns=eqns), [is_marked(atom) for atom in jaxpr.outvars]


def without_callbacks(jaxpr: Any) -> Any:
    """The jaxpr without what only has an effect outside, such as what it prints."""
    effects = _effects_of_callbacks(jaxpr)
    return _silent(jaxpr, effects) if effects else jaxpr


def _effects_of_callbacks(jaxpr: Any) -> set[Any]:
    effects: set[Any] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _CALLBACKS:
            if eqn.outvars:
                raise NotImplementedError(
                    "A loop whose body uses the result of `io_callback` cannot be "
                    'differentiated, unless it is of kind="lax": its steps are run again, and '
                    "would not get the same result again."
                )
            effects |= eqn.effects
        for inner in _jaxprs(list(eqn.params.values())):
            effects |= _effects_of_callbacks(inner)
    return effects


def _silent(value: Any, effects: set[Any]) -> Any:
    """A jaxpr, or several of them in a parameter, without callbacks and their effects."""
    if isinstance(value, (tuple, list)):
        silent = [_silent(each, effects) for each in cast(Any, value)]
        return tuple(silent) if isinstance(value, tuple) else silent
    if isinstance(value, ClosedJaxpr) and value.jaxpr is not value:
        return value.replace(jaxpr=_silent(value.jaxpr, effects))
    if not isinstance(value, Jaxpr):
        return value
    eqns = [eqn for eqn in value.eqns if eqn.primitive.name not in _CALLBACKS]
    return value.replace(
        eqns=[_with_parameters(eqn, effects) if eqn.effects & effects else eqn for eqn in eqns],
        effects=value.effects - effects,
    )


def _with_parameters(eqn: Any, effects: set[Any]) -> Any:
    params = {
        name: _silent(value, effects) if _jaxprs(value) else value
        for name, value in eqn.params.items()
    }
    return eqn.replace(params=params, effects=eqn.effects - effects)


def _jaxprs(value: Any) -> list[Any]:
    """The jaxprs in a parameter of an equation."""
    if isinstance(value, (tuple, list)):
        return [inner for each in cast(Any, value) for inner in _jaxprs(each)]
    inner = getattr(value, "jaxpr", value) if isinstance(value, ClosedJaxpr) else value
    return [inner] if isinstance(inner, Jaxpr) else []


_CALLBACKS = {"debug_callback", "debug_print", "io_callback"}


def spared(jaxpr: Any, count: int) -> tuple[list[Any], Any]:
    """What to keep of the first `count` outputs, and the jaxpr that makes all of them of it.

    An output that is one elementwise operation away from others is made anew of those.
    """
    outs = [var for var in jaxpr.outvars[:count] if not isinstance(var, Literal)]
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    kept = dict.fromkeys(outs)
    eqns: list[Any] = []
    for var in dict.fromkeys(outs):
        eqn = made_by.get(var)
        if eqn is None or eqn.primitive.name not in _ELEMENTWISE:
            continue
        others = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        if all(atom in kept and atom is not var for atom in others):
            del kept[var]
            eqns.append(eqn)
    anew = rearranged(jaxpr.replace(eqns=eqns), list(kept), jaxpr.outvars[:count])
    return list(kept), anew


_ELEMENTWISE = {
    "abs",
    "add",
    "convert_element_type",
    "eq",
    "ge",
    "gt",
    "integer_pow",
    "le",
    "lt",
    "max",
    "min",
    "mul",
    "ne",
    "neg",
    "not",
    "select_n",
    "sign",
    "square",
    "sub",
}
