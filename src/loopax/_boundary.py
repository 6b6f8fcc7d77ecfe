"""What each public function is wrapped in: checks of its arguments, short tracebacks."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from beartype.door import is_bearable

from . import _tree
from ._errors import MismatchError, Refusal, wrong_argument
from ._static import is_dynamic, type_of
from ._traceback import hide_own_frames


_Function = TypeVar("_Function", bound=Callable[..., Any])


def public(
    namesake: Callable[..., Any] | None = None,
    functions: tuple[str, ...] = (),
    trees: tuple[str, ...] = (),
) -> Callable[[_Function], _Function]:
    """Makes a function the public one.

    - `namesake`: the function of `jax.lax` that it stands in for, if any.
    - `functions`: the parameters that are functions, or sequences of functions.
    - `trees`: the parameters that are trees, to be split.
    """

    def decorator(function: _Function) -> _Function:
        names = _positional(function)
        hints = _hints(function)
        known = {name: _known_types(hint) for name, hint in hints.items()}
        caller = function.__qualname__.removesuffix(".__init__").removesuffix(".__call__")

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                try:
                    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
                        if name not in hints or type(value) in known[name]:
                            continue
                        if not is_bearable(value, hints[name]):
                            raise wrong_argument(caller, name, hints[name], value)
                    return function(*args, **kwargs)
                except Refusal as refusal:
                    # One that comes from a call within the user's function has been seen to.
                    settled, refusal.settled = refusal.settled, True
                    if settled or namesake is None or kwargs.get("trace_numbers") is not True:
                        raise
                    raise _with_words_of(
                        namesake, function, functions, trees, args, kwargs, refusal
                    ) from None
            except Exception as error:
                hide_own_frames(error)
                raise

        return cast(_Function, call)

    return decorator


def _positional(function: Callable[..., Any]) -> list[str]:
    """The parameters that arguments without a name go to, one each."""
    parameters = inspect.signature(function).parameters.values()
    each = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in each]


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    hints = {
        parameter.name: parameter.annotation
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    untyped = (Any, inspect.Parameter.empty)
    return {
        name: hint
        for name, hint in hints.items()
        if hint not in untyped and not isinstance(hint, TypeVar)
    }


def _known_types(hint: Any) -> frozenset[type]:
    """Types of which every value is of that kind, so that it need not be asked."""
    common: tuple[Any, ...] = (0, True, "", None, _known_types)
    return frozenset(type_of(value) for value in common if is_bearable(value, hint))


def _with_words_of(
    namesake: Callable[..., Any],
    function: Callable[..., Any],
    functions: tuple[str, ...],
    trees: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    refusal: Refusal,
) -> Exception:
    """`refusal` with what `namesake` says, if the arguments hold nothing unknown to that.

    With `trace_numbers=True` each function then is its namesake, so that whoever looks for
    the words of that has to find them.
    """
    signature = inspect.signature(function)
    ours = signature.parameters.keys() - inspect.signature(namesake).parameters.keys()
    bound = signature.bind(*args, **kwargs)
    if bound.arguments.keys() & ours != {"trace_numbers"}:
        return refusal
    for name, value in bound.arguments.items():
        leaves = _tree.leaves(value)
        if name in functions and any(is_dynamic(leaf, False) for leaf in leaves):
            return refusal
        if name in trees and not all(is_dynamic(leaf, True) for leaf in leaves):
            return refusal
    try:
        namesake(*args, **{k: v for k, v in kwargs.items() if k != "trace_numbers"})
    except (TypeError, ValueError) as error:
        if any(text in str(error) for text in _NOT_ABOUT_IT):
            return refusal
        if not isinstance(refusal, type(error)):
            return error
        # In some versions of JAX the function is a private one with a public name.
        said = f"{refusal}\n\njax.lax.{namesake.__name__.lstrip('_')} says: {error}"
        if isinstance(refusal, MismatchError):
            said_so = MismatchError(said, refusal.mismatches)
        else:
            said_so = type(refusal)(said)
        said_so.settled = True
        return said_so
    except Exception:
        # No message, but a failure to give one.
        return refusal
    return refusal


# What `lax` says if a function returns something static, which is no fault here; and if it
# tries to promote a number to a random key, before it sees that the carry has changed.
_NOT_ABOUT_IT = ("not a valid JAX type", "not a valid dtype for JAX type promotion")
