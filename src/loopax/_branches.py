"""One of several functions, chosen at run time: what cond and switch share."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from jax.core import AbstractValue

from . import _body, _tree
from ._body import Body, Calling, Step, body_for, merge_output
from ._call import Call, Operands, as_tree, views
from ._errors import ArgumentError, branch_mismatch
from ._jax import make_jaxpr
from ._mismatch import Comparison
from ._split import Arrays, split, split_held
from ._static import is_number


# Binds the primitive: it is given what to trace for each branch, and the operands.
Primitive = Callable[[Sequence[Body], Sequence[Arrays]], Arrays]


def choose(
    caller: str,
    primitive: Primitive,
    functions: dict[str, Callable[..., Any]],
    operands: Sequence[Any],
    trace_numbers: bool,
    as_arrays: frozenset[int] = frozenset(),
) -> Any:
    """Calls `primitive` over `functions`, and merges what it returns.

    The functions are by the name of their parameter, for messages.

    `as_arrays` are the leaves of the result that are arrays even where a branch returns a
    number.
    """
    parts = [split_held(as_tree(function)) for function in functions.values()]
    trees = [split(operand, trace_numbers) for operand in operands]
    # The functions go with the first operand, so that each argument has its own name.
    seen, others = views(parts, *trees[:1]), [Operands(tree) for tree in trees[1:]]
    calls = [
        Call(
            caller,
            function,
            trace_numbers,
            view,
            *others,
            as_arrays=as_arrays,
        )
        for function, view in zip(functions.values(), seen, strict=True)
    ]
    calling = Calling(_branch, caller.removeprefix("filter_"))
    bodies = [body_for(calling, call) for call in calls]
    arguments = [
        bodies[0].argument(part, position)
        for position, part in enumerate([seen[0].operands, *others])
    ]
    with contextlib.ExitStack() as stack:
        for body, call in zip(bodies, calls, strict=True):
            stack.enter_context(body.during(call))
        try:
            return merge_output(primitive(bodies, arguments))
        except TypeError as error:
            # Either a branch raised it, or `lax` did, who found that they differ.
            if _raised_in_body(error):
                raise
            results = [_result(body, arguments) for body in bodies]
            places = _numbers_beside_arrays(results)
            if places <= as_arrays:
                rules = Comparison(trace_numbers, numbers_join=True)
                mismatches = [
                    list(rules.differences(results[0], result, "output")) for result in results
                ]
                if not any(mismatches):
                    raise
                raise branch_mismatch(caller, functions, mismatches) from None
    return choose(caller, primitive, functions, operands, trace_numbers, places)


def _branch(step: Step, function: Callable[..., Any], *operands: Any) -> Arrays:
    return step.output(function(*operands))


def _raised_in_body(error: TypeError) -> bool:
    entry = error.__traceback__
    while entry is not None:
        # By name: a runtime type checker may have put a function of its own around it.
        code = entry.tb_frame.f_code
        if code.co_qualname == "Body.__call__" and code.co_filename == _body.__file__:
            return True
        entry = entry.tb_next
    return False


def _result(body: Body, arguments: Sequence[Arrays]) -> Any:
    """What a branch returns, with types for arrays."""
    jaxpr, output = make_jaxpr(body, return_shape=True)(*arguments)
    return output.label.merge(jaxpr.out_avals)


def _numbers_beside_arrays(results: Sequence[Any]) -> frozenset[int]:
    """The leaves that are an array in one branch and a number in another.

    As in `lax`, such a leaf is an array in each.
    """
    leaves = [_tree.leaves(result) for result in results]
    if len({len(each) for each in leaves}) > 1:
        return frozenset()
    return frozenset(
        place
        for place, across in enumerate(zip(*leaves, strict=True))
        if any(map(is_number, across))
        and any(isinstance(leaf, AbstractValue) for leaf in across)
    )


class _NotGiven:
    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN: Any = _NotGiven()


def only_operand(caller: str, operands: tuple[Any, ...], operand: Any) -> tuple[Any]:
    """The operand that was given by name, which `lax` takes in place of all others."""
    if operands:
        raise ArgumentError(f"{caller}: give operands by position, or one as `operand`.")
    return (operand,)
