"""The model of `transformer.py`: a decoder-only transformer with rotary attention.

Its blocks are one `nn.Stacked`, so that its depth is one scan. Each block keeps the keys and
values that it has seen in an `eqx.nn.State`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

from loopax.nn import Stacked


LETTERS = "\n" + "".join(map(chr, range(32, 127)))
CONTEXT, WIDTH, HEADS, DEPTH = 96, 64, 4, 4


def rotated(x: Array, positions: Array) -> Array:
    """Turns pairs of numbers in `x`, of shape `(tokens, heads, size)`, by where they stand.

    Rotary position embedding: https://arxiv.org/abs/2104.09864.
    """
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 1e3 ** (-jnp.arange(half) / half)
    a, b, cos, sin = x[..., :half], x[..., half:], jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


class Block(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    mlp: eqx.nn.MLP
    cache: eqx.nn.StateIndex

    def __init__(self, key: Array):
        keys = jr.split(key, 3)
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(2)]
        self.qkv = eqx.nn.Linear(WIDTH, 3 * WIDTH, key=keys[0])
        self.out = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=keys[2])
        empty = jnp.zeros((CONTEXT, HEADS, WIDTH // HEADS))
        self.cache = eqx.nn.StateIndex((empty, empty))

    def __call__(self, x: Array, state: eqx.nn.State, positions: Array, *, cached: bool):
        h = jax.vmap(self.qkv)(jax.vmap(self.norms[0])(x))
        q, k, v = jnp.split(h.reshape(len(x), HEADS, -1), 3, -1)
        q, k = rotated(q, positions), rotated(k, positions)
        if cached:
            keys, values = state.get(self.cache)
            k, v = keys.at[positions].set(k), values.at[positions].set(v)
            state = state.set(self.cache, (k, v))
        before = jnp.arange(len(k)) <= positions[:, None]
        h = jax.nn.dot_product_attention(q, k, v, mask=before[None])
        x = x + jax.vmap(self.out)(h.reshape(len(x), WIDTH))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x)), state


class Model(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: Stacked[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key: Array):
        keys = jr.split(key, 3)
        self.embed = eqx.nn.Embedding(len(LETTERS), WIDTH, key=keys[0])
        self.blocks = Stacked(Block, DEPTH, key=keys[1])
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, len(LETTERS), key=keys[2])

    def __call__(self, tokens: Array, state: eqx.nn.State, start=0, cached=False):
        positions = start + jnp.arange(len(tokens))
        x = jax.vmap(self.embed)(tokens)
        x, state = self.blocks(x, state, positions, cached=cached)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x)), state
