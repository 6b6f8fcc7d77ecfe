"""A whole training loop in one scan: model and optimiser state are the carry.

The data are scikit-learn's handwritten digits, 8 by 8 pixels.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from checks import Check, report
from jaxtyping import Array
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from loopax import filter_scan


BATCH, EPOCHS = 64, 40


def make_model(key: Array) -> eqx.nn.Sequential:
    keys = jr.split(key, 2)
    return eqx.nn.Sequential(
        [
            eqx.nn.Linear(64, 128, key=keys[0]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Dropout(0.2),
            eqx.nn.Linear(128, 10, key=keys[1]),
        ]
    )


@eqx.filter_value_and_grad
def loss(model, images, labels, key):
    keys = jr.split(key, len(images))
    logits = jax.vmap(lambda image, key: model(image, key=key))(images, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@eqx.filter_jit
def train(model, images, labels, key):
    """The trained model, and the loss of every step."""
    shuffle_key, dropout_key = jr.split(key)
    batches_per_epoch = len(images) // BATCH
    steps = EPOCHS * batches_per_epoch
    optimiser = optax.adamw(optax.cosine_decay_schedule(3e-3, steps))
    opt_state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    def step(carry, indices_and_key):
        model, opt_state = carry
        indices, key = indices_and_key
        value, grads = loss(model, images[indices], labels[indices], key)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimiser.update(grads, opt_state, params)
        return (eqx.apply_updates(model, updates), opt_state), value

    shuffle = jax.vmap(lambda key: jr.permutation(key, len(images)))
    order = shuffle(jr.split(shuffle_key, EPOCHS))[:, : batches_per_epoch * BATCH]
    xs = order.reshape(steps, BATCH), jr.split(dropout_key, steps)
    (model, _), losses = filter_scan(step, (model, opt_state), xs)
    return model, losses


def accuracy(model, images, labels) -> float:
    logits = jax.vmap(eqx.nn.inference_mode(model))(images)
    return float(jnp.mean(jnp.argmax(logits, axis=1) == labels))


def main(seed: int = 0) -> list[Check]:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")  # grey values from 0 to 16
    train_x, test_x, train_y, test_y = map(
        jnp.asarray, train_test_split(images, labels, random_state=0, stratify=labels)
    )
    model_key, train_key = jr.split(jr.key(seed))
    model, _ = train(make_model(model_key), train_x, train_y, train_key)
    return [Check("test accuracy", accuracy(model, test_x, test_y), ">", 0.95)]


if __name__ == "__main__":
    report(main())
