"""Loops that can be differentiated in reverse mode: forwards, tangents and cotangents.

`LOOP` is a while loop as a primitive. Its derivative is made of two others:

- `SAVING` is the same loop. It also returns the carries at some of its steps.
- `LINEAR` is the derivative of a loop, a linear map from tangents to tangents, at the carries
    that were saved. Transposed it maps cotangents to cotangents: it goes through the steps
    backwards, and computes the carries between two that were saved anew.

What `SAVING` and `LINEAR` compute is written in terms of loops. Where that is differentiated in
turn they are such primitives too, which is how there is a second derivative, of any kind; where
it is compiled they are `jax.lax.while_loop`s.

Under `jax.vmap` the lanes of a loop go in lockstep. They share a counter, which runs until no
lane is active. A lane that has stopped is given its last carry but one again, for which the
body is known to be defined, and nothing comes of it: its cotangent is zero there. Neither
the saved carries nor the buffers are selected from.
"""

from . import rules as _rules
from .bounded import bounded_loop as bounded_loop
from .loop import default_slots as default_slots, loop as loop, settled as settled


del _rules
