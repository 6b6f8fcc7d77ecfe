"""A language model whose depth is one scan: trained, and then run through its caches.

It learns the documentation of Python's standard library, letter by letter, and then writes
some. Training is one `filter_scan`, and so is writing; `language_model.py` has the model.
"""

import importlib
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from checks import Check, distance, report
from jaxtyping import Array
from language_model import CONTEXT, LETTERS, WIDTH, Model

from loopax import filter_scan


MODULES = """argparse collections csv datetime decimal difflib email.message functools inspect
itertools logging optparse os pathlib random shutil socket statistics string subprocess tarfile
tempfile textwrap threading unittest zipfile ipaddress""".split()  # noqa: SIM905
BATCH = 16


def text() -> Array:
    """What modules say of themselves, their members, and the members of those, as tokens."""
    modules = [importlib.import_module(name) for name in MODULES]
    members = [each for module in modules for _, each in sorted(vars(module).items())]
    inner = [each for one in members if inspect.isclass(one) for each in vars(one).values()]
    docs = [getattr(each, "__doc__", None) for each in (*modules, *members, *inner)]
    docs = dict.fromkeys(inspect.cleandoc(doc) for doc in docs if isinstance(doc, str))
    letters = (letter for letter in "\n\n".join(docs) if letter in LETTERS)
    return jnp.asarray([*map(LETTERS.index, letters)], jnp.int32)


def loss(model: Model, state: eqx.nn.State, tokens: Array) -> Array:
    logits, _ = jax.vmap(model, in_axes=(0, None))(tokens[:, :-1], state)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@eqx.filter_jit
def train(model: Model, state: eqx.nn.State, tokens: Array, steps: int, key: Array):
    rate = optax.warmup_cosine_decay_schedule(0.0, 4e-3, 50, steps)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

    def step(carry, key):
        model, optimiser_state = carry
        at = jr.randint(key, (BATCH, 1), 0, len(tokens) - CONTEXT)
        batch = tokens[at + jnp.arange(CONTEXT)]
        value, gradient = eqx.filter_value_and_grad(loss)(model, state, batch)
        updates, optimiser_state = optimiser.update(gradient, optimiser_state)
        return (eqx.apply_updates(model, updates), optimiser_state), value

    start = model, optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    (model, _), losses = filter_scan(step, start, jr.split(key, steps))
    return model, losses


@eqx.filter_jit
def write(model: Model, state: eqx.nn.State, key: Array) -> tuple[Array, Array]:
    """Letters, each drawn after those before it, and the logits of each."""

    def step(carry, at):
        state, token = carry
        logits, state = model(token[None], state, at, cached=True)
        new = jr.categorical(jr.fold_in(key, at), logits[0] / 0.7)
        return (state, new), (token, logits[0])

    _, (tokens, logits) = filter_scan(step, (state, jnp.array(0)), jnp.arange(CONTEXT))
    return tokens, logits


def main(seed: int = 0, steps: int = 1500, bound: float = 1.6) -> list[Check]:
    model_key, train_key, write_key = jr.split(jr.key(seed), 3)
    model, state = eqx.nn.make_with_state(Model)(model_key)
    model, losses = train(model, state, text(), steps, train_key)
    written, logits = write(model, state, write_key)
    print("  " + "".join(LETTERS[i] for i in written).strip().replace("\n", "\n  "))
    layers, apart = model.blocks.unstack(state)
    x = y = jr.normal(write_key, (CONTEXT, WIDTH))
    positions = jnp.arange(CONTEXT)
    for layer in layers:
        y, apart = layer(y, apart, positions, cached=True)
    x, state = model.blocks(x, state, positions, cached=True)
    at_once, _ = model(written, state)
    return [
        Check("loss at first: no better than chance", float(losses[0]), ">", 4.4),
        Check("loss in the end", float(losses[-50:].mean()), "<=", bound),
        Check("through the caches: distance", distance(logits, at_once), "<=", 1e-4),
        Check("blocks one by one: distance", distance(x, y), "<=", 1e-4),
    ]


if __name__ == "__main__":
    report(main())
