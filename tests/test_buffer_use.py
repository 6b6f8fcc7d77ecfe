"""What is said of a buffer that is used as something else."""

import jax.numpy as jnp
import pytest

import loopax


HISTORY = jnp.zeros((4, 2))


def scan(body, buffers=lambda carry: carry, init=HISTORY, **options):
    return loopax.filter_scan(body, init, jnp.arange(4), buffers=buffers, **options)[0]


def refused(body, **options):
    texts = set()
    for kind in ("lax", "checkpointed", "bounded"):
        with pytest.raises(loopax.ArgumentError) as caught:
            scan(body, kind=kind, **options)
        texts.add(str(caught.value))
    (text,) = texts
    return text


@pytest.mark.parametrize(
    "use",
    [
        lambda b: b + 1,
        lambda b: 1 - b,
        lambda b: jnp.sum(b),
        lambda b: jnp.where(True, b, b),
        lambda b: list(b),
    ],
)
def test_a_buffer_is_no_array(use):
    with pytest.raises(TypeError, match=r"buffer|Buffer"):
        scan(lambda b, i: (b, use(b)))


@pytest.mark.parametrize("index", [slice(1, 3), None, 1.5, jnp.arange(2), (0, 1), True, "a"])
@pytest.mark.parametrize("read", [False, True])
def test_rows_are_picked_by_one_integer(index, read):
    def body(b, i):
        return (b, b[index]) if read else (b.at[index].set(0.0), None)

    assert "`i` must be an integer, the number of a row along the first axis" in refused(body)


def test_rows_have_the_shape_and_the_type_of_the_buffer():
    text = refused(lambda b, i: (b.at[i].set(jnp.ones(3)), None))
    assert "a row has the shape (2,), and the value is float32[3]" in text
    text = refused(lambda b, i: (b.at[i].set(jnp.ones(2, complex)), None))
    assert "the rows are float32, and the value is complex64[2]. Cast it" in text
    assert jnp.all(scan(lambda b, i: (b.at[i].set(i), None))[:, 0] == jnp.arange(4))


@pytest.mark.parametrize("how", ["add", "multiply", "get", "apply"])
def test_rows_can_only_be_set(how):
    text = refused(lambda b, i: (getattr(b.at[i], how)(1.0), None))
    assert f"buffer.at[i].{how}: a row can only be set" in text


@pytest.mark.parametrize("where", [2, jnp.ones(2, bool), 0.5])
def test_where_is_a_boolean_scalar(where):
    text = refused(lambda b, i: (b.at[i].set(1.0, where=where), None))
    assert "`where` must be a boolean scalar" in text


def test_a_buffer_that_was_written_since_is_refused():
    def reads(b, i):
        b.at[i].set(1.0)
        return b, b[i]

    def returns(b, i):
        b.at[i].set(1.0)
        return b, None

    for body in (reads, returns):
        assert "used after a row of it was written" in refused(body)


def test_the_body_must_return_the_buffer():
    text = refused(lambda b, i: (HISTORY, None))
    assert "the body was given a buffer, and must return it" in text
    assert "returned a buffer outside of the carry" in refused(lambda b, i: (b, b))


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        (lambda c: c["nothing"], "`buffers` must pick arrays out of the carry"),
        (lambda c: c["name"], "must pick arrays out of the carry, but picked"),
        (lambda c: (c["h"], c["h"]), "picked an array twice"),
        (lambda c: c["n"], "which has no rows"),
        (lambda c: jnp.zeros(3), "must pick arrays out of the carry, but picked"),
    ],
)
def test_buffers_must_pick_arrays_out_of_the_carry(buffers, message):
    init = {"h": HISTORY, "name": "a", "n": jnp.array(0)}
    for kind in ("checkpointed", "bounded"):
        with pytest.raises(loopax.ArgumentError) as caught:
            scan(lambda c, i: (c, None), buffers=buffers, init=init, kind=kind)
        assert message in str(caught.value)


def test_an_index_beyond_the_end_writes_nothing_and_reads_the_nearest_row():
    for kind in ("lax", "checkpointed", "bounded"):
        out = scan(lambda b, i: (b.at[2 * i].set(1.0), None), kind=kind)
        assert out[:, 0].tolist() == [1.0, 0.0, 1.0, 0.0]
        out = scan(lambda b, i: (b.at[-1 - i].set(i), None), kind=kind)
        assert out[:, 0].tolist() == [3.0, 2.0, 1.0, 0.0]
        out = scan(lambda b, i: (b.at[i].set(b[i + 7] + i), None), kind=kind)
        assert out[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_buffer_without_rows_is_never_written():
    out = scan(lambda b, i: (b.at[i].set(1.0), None), init=jnp.zeros((0, 2)))
    assert out.shape == (0, 2)


def test_a_mismatch_elsewhere_in_the_carry_is_reported_with_its_path():
    def body(carry, i):
        return {"h": carry["h"].at[i].set(1.0), "phase": "late"}, None

    with pytest.raises(loopax.MismatchError) as caught:
        scan(body, lambda c: c["h"], {"h": HISTORY, "phase": "early"})
    assert [m.path for m in caught.value.mismatches] == ['carry["phase"]']


def test_a_buffer_says_what_it_is():
    seen = []

    def body(b, i):
        seen.append((repr(b), b.shape, b.dtype, b.ndim, b.size, len(b)))
        return b, None

    scan(body)
    assert seen[0] == ("Buffer(float32[4,2])", (4, 2), jnp.float32, 2, 8, 4)
