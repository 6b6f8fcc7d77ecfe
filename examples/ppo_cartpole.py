"""PPO on CartPole as nested scans, from rollout to training, in one compiled call."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from checks import Check, report
from jaxnasium.envs import CartPole

from loopax import filter_scan


ENVS, STEPS, UPDATES, EPOCHS, MINIBATCHES = 16, 128, 100, 4, 4
DISCOUNT, SMOOTHING, CLIP = 0.99, 0.95, 0.2
rate = optax.linear_schedule(2.5e-3, 0, UPDATES * EPOCHS * MINIBATCHES)
optimiser = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate))
env = CartPole()


def act(carry, keys):
    policy, (obs, state) = carry
    log_probs = jax.nn.log_softmax(policy(obs))
    action = jr.categorical(keys[0], log_probs)
    step, next_state = env.step(keys[1], state, action)  # resets itself when done
    row = obs, action, log_probs[action], step, state.time + 1
    return (policy, (step.observation, next_state)), row


def play(networks, start, key):
    def accumulate(advantage, error_and_done):
        error, done = error_and_done
        advantage = error + DISCOUNT * SMOOTHING * (1 - done) * advantage
        return advantage, advantage

    (policy, critic), keys = networks, jr.split(key, (STEPS, 2))
    # CartPole counts with Python ints, and its reward is a float: make them arrays.
    (_, start), rows = filter_scan(act, (policy, start), keys, trace_numbers=True)
    obs, action, log_prob, step, time = rows
    done = step.terminated | step.truncated
    # Where an episode ended, `step.observation` is the first one of the next episode.
    next_obs = step.info["_TERMINAL_OBSERVATION"]
    value, next_value = jax.vmap(critic)(obs), jax.vmap(critic)(next_obs)
    error = step.reward + DISCOUNT * (1 - step.terminated) * next_value - value
    _, advantage = filter_scan(accumulate, jnp.array(0.0), (error, done), reverse=True)
    rows = obs, action, log_prob, advantage, advantage + value
    return start, rows, jnp.where(done, time, jnp.nan)  # each step's reward is 1


def loss(networks, rows):
    (policy, critic), (obs, action, old_log_prob, advantage, target) = networks, rows
    log_probs = jax.nn.log_softmax(jax.vmap(policy)(obs))
    ratio = jnp.exp(log_probs[jnp.arange(len(action)), action] - old_log_prob)
    advantage = jax.nn.standardize(advantage)
    gain = jnp.minimum(ratio * advantage, ratio.clip(1 - CLIP, 1 + CLIP) * advantage)
    return jnp.mean((jax.vmap(critic)(obs) - target) ** 2 / 2 - gain)


def learn(learner, rows):
    networks, opt_state = learner
    grads = eqx.filter_grad(loss)(networks, rows)
    updates, opt_state = optimiser.update(grads, opt_state)
    return (eqx.apply_updates(networks, updates), opt_state), None


def update(carry, keys):
    def epoch(learner, key):
        order = jr.permutation(key, ENVS * STEPS).reshape(MINIBATCHES, -1)
        batches = jax.tree.map(lambda x: jnp.concatenate(x)[order], rows)
        return filter_scan(learn, learner, batches)

    (networks, opt_state), starts = carry
    play_all = jax.vmap(lambda start, key: play(networks, start, key))
    starts, rows, returns = play_all(starts, keys[:ENVS])
    learner, _ = filter_scan(epoch, (networks, opt_state), keys[ENVS:])
    return (learner, starts), returns


@eqx.filter_jit
def train(key):
    policy_key, critic_key, start_key, key = jr.split(key, 4)
    policy = eqx.nn.MLP(4, 2, 64, 2, jnp.tanh, key=policy_key)
    critic = eqx.nn.MLP(4, "scalar", 64, 2, jnp.tanh, key=critic_key)
    networks = policy, critic
    opt_state = optimiser.init(eqx.filter(networks, eqx.is_inexact_array))
    # A first rollout, so that the episodes are out of step when training begins.
    begin = jax.vmap(lambda key: play(networks, env.reset(key), key)[0])
    carry = (networks, opt_state), begin(jr.split(start_key, ENVS))
    return filter_scan(update, carry, jr.split(key, (UPDATES, ENVS + EPOCHS)))


def main(seed: int = 0) -> list[Check]:
    _, returns = train(jr.key(seed))
    late = jnp.nanmedian(returns[-(UPDATES // 3) :])
    return [Check("median return, last third of training", float(late), ">", 300)]


if __name__ == "__main__":
    report(main())
