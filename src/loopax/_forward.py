"""An identity that says what to do where reverse mode meets a loop without a bound."""

from collections.abc import Sequence
from typing import Any

from jax.core import Tracer

from ._jax import VmapAxis, Zero, primitive, set_jvp


def forward_only(caller: str, given: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """The results of a loop that `jax.lax` differentiates in forward mode only.

    What is among `given` has passed the loop by.
    """
    passed = set(map(id, given))
    which = [id(each) not in passed and isinstance(each, Tracer) for each in arrays]
    if not any(which):
        return list(arrays)
    through = [each for each, is_in in zip(arrays, which, strict=True) if is_in]
    rest = iter(_forward_only.bind(*through, caller=caller))
    return [next(rest) if is_in else a for a, is_in in zip(arrays, which, strict=True)]


def _run(*arrays: Any, caller: str) -> Any:
    return list(arrays)


def _types(*avals: Any, caller: str) -> Any:
    return list(avals), set()


def _jvp(primals: Any, tangents: Any, *, caller: str) -> Any:
    out = _forward_only.bind(*primals, caller=caller)
    moving = [each for each in tangents if not isinstance(each, Zero)]
    rest = iter(_forward_only.bind(*moving, caller=caller) if moving else ())
    return out, [each if isinstance(each, Zero) else next(rest) for each in tangents]


def _batch(_: VmapAxis, arrays: Any, axes: Any, *, caller: str) -> Any:
    return _forward_only.bind(*arrays, caller=caller), axes


def _transpose(cotangents: Any, *arrays: Any, caller: str) -> Any:
    raise ValueError(
        f"{caller}: a loop whose number of steps is not known while tracing runs as "
        f"`jax.lax.while_loop`, which has no reverse mode. {_REPAIRS[caller]}"
    )


_BOUND = (
    "Pass `max_steps`, a bound on the number of steps, or a number of `checkpoints`; in either "
    'case leave out `kind`, or pass kind="checkpointed".'
)
_REPAIRS = {
    "filter_while_loop": _BOUND,
    "filter_fori_loop": _BOUND,
    "filter_scan": 'Leave out `kind`, or pass kind="checkpointed".',
}

_forward_only = primitive("forward_only", _run, _types, _batch, _transpose)
set_jvp(_forward_only, _jvp)
