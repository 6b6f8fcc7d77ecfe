"""The compiled program is that of the partition written by hand, byte for byte."""

import re

import equinox as eqx
import jax
import pytest
from programs import HAND, NET, OURS, PROGRAMS, XS


def optimised(program):
    arrays, static = eqx.partition(NET, eqx.is_array)

    def run(arrays, xs):
        return eqx.filter(program(eqx.combine(arrays, static), xs), eqx.is_array)

    text = jax.jit(run).lower(arrays, XS).compile().as_text()
    # Where each operation was written is all that may differ.
    text = re.sub(r",?\s*(metadata|stack_frame_id|frontend_attributes)=\{[^}]*\}", "", text)
    text = re.sub(r"\b(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "", text)
    return text


@pytest.mark.parametrize("program", PROGRAMS)
def test_optimised_hlo_is_that_of_the_partition_by_hand(program):
    assert optimised(program(OURS)) == optimised(program(HAND))
