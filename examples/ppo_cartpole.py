"""PPO on CartPole: rollout, advantages, minibatches, epochs and updates are nested scans,
and training is one compiled call. Policy and critic are carried, activations included."""

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


def act(carry, key):
    policy, obs, state, score = carry
    action_key, env_key = jr.split(key)
    log_probs = jax.nn.log_softmax(policy(obs))
    action = jr.categorical(action_key, log_probs)
    step, state = env.step(env_key, state, action)  # resets the environment when done
    done, score = step.terminated | step.truncated, score + step.reward
    carry = policy, step.observation, state, jnp.where(done, 0, score)
    return carry, (obs, action, log_probs[action], step, done, score)


def accumulate(advantage, error_and_decay):
    error, decay = error_and_decay
    advantage = error + decay * advantage
    return advantage, advantage


def play(networks, start, key):
    """Where the environment stands after a rollout, what to learn from it, the returns."""
    policy, critic = networks
    # CartPole counts its steps with a Python int, and rewards with the Python float 1.0:
    # `trace_numbers` makes arrays of both, as `jax.lax.scan` does.
    carry, keys = (policy, *start), jr.split(key, STEPS)
    (_, *end), rows = filter_scan(act, carry, keys, trace_numbers=True)
    obs, action, log_prob, step, done, score = rows
    # Where an episode ended, `step.observation` is the first one of the next episode.
    next_value = jax.vmap(critic)(step.info["_TERMINAL_OBSERVATION"])
    value, next_value = jax.vmap(critic)(obs), jnp.where(step.terminated, 0, next_value)
    error = step.reward + DISCOUNT * next_value - value
    decay = jnp.where(done, 0, DISCOUNT * SMOOTHING)
    _, advantage = filter_scan(accumulate, jnp.array(0.0), (error, decay), reverse=True)
    rows = obs, action, log_prob, advantage, advantage + value
    return end, rows, jnp.where(done, score, jnp.nan)


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


def update(carry, key):
    learner, starts = carry
    keys = jr.split(key, ENVS + EPOCHS)
    play_on = lambda start, key: play(learner[0], start, key)
    starts, rows, returns = jax.vmap(play_on)(starts, keys[:ENVS])
    rows = jax.tree.map(jnp.concatenate, rows)

    def epoch(learner, key):
        order = jr.permutation(key, ENVS * STEPS).reshape(MINIBATCHES, -1)
        return filter_scan(learn, learner, jax.tree.map(lambda x: x[order], rows))

    learner, _ = filter_scan(epoch, learner, keys[ENVS:])
    return (learner, starts), returns


@eqx.filter_jit
def train(key):
    policy_key, critic_key, start_key, key = jr.split(key, 4)
    policy = eqx.nn.MLP(4, 2, 64, 2, jnp.tanh, key=policy_key)
    critic = eqx.nn.MLP(4, "scalar", 64, 2, jnp.tanh, key=critic_key)
    networks = policy, critic
    opt_state = optimiser.init(eqx.filter(networks, eqx.is_inexact_array))
    # A first rollout, so that the episodes are out of step when training begins.
    begin = lambda key: play(networks, (*env.reset(key), 0.0), key)[0]
    starts = jax.vmap(begin)(jr.split(start_key, ENVS))
    carry, keys = ((networks, opt_state), starts), jr.split(key, UPDATES)
    ((networks, _), _), returns = filter_scan(update, carry, keys)
    return networks, returns


def main(seed: int = 0) -> list[Check]:
    _, returns = train(jr.key(seed))
    late = jnp.nanmedian(returns[-(UPDATES // 3) :])
    return [Check("median return, last third of training", float(late), ">", 300)]


if __name__ == "__main__":
    report(main())
