"""An adaptive Runge-Kutta solver in one while loop, its controller in the carry."""

from collections.abc import Callable
from dataclasses import replace

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from checks import Check, double_precision, report
from jaxtyping import Array
from scipy.integrate import solve_ivp

from loopax import filter_while_loop


# Dormand and Prince (1980): the weights of earlier slopes in each stage; the step last.
STAGES = (
    (),
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
ERROR = (71 / 57600, 0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)


class Controller(eqx.Module):
    """Settings and a norm, which stay as they are; the last error, which changes."""

    last_error: Array
    tolerance: float
    safety: float = 0.9
    limits: tuple[float, float] = (0.2, 5.0)
    norm: Callable = jnp.linalg.norm

    def judge(self, error, y, next_y):
        scale = self.tolerance * (1 + jnp.maximum(jnp.abs(y), jnp.abs(next_y)))
        error = jnp.maximum(self.norm(error / scale), 1e-10)
        factor = self.safety * error ** (-0.7 / 5) * self.last_error ** (0.4 / 5)
        last_error = jnp.where(error <= 1, error, self.last_error)
        successor = replace(self, last_error=last_error)
        return error <= 1, factor.clip(*self.limits), successor


class Solution(eqx.Module):
    field: Callable
    controller: Controller
    end: float
    step_size: Array
    count: Array
    ts: Array
    ys: Array

    def unfinished(self):
        return (self.ts[self.count] < self.end) & (self.count < len(self.ts) - 1)

    def advance(self):
        t, y = self.ts[self.count], self.ys[self.count]
        h, slopes, next_y = jnp.minimum(self.step_size, self.end - t), [], y
        for weights in STAGES:
            next_y = y + h * sum(w * k for w, k in zip(weights, slopes, strict=True))
            slopes.append(jnp.stack(self.field(t + h * sum(weights), next_y)))
        error = h * sum(w * k for w, k in zip(ERROR, slopes, strict=True))
        accept, factor, controller = self.controller.judge(error, y, next_y)
        count = self.count + accept  # a rejected step writes back what was there
        ts = self.ts.at[count].set(jnp.where(accept, t + h, t))
        ys = self.ys.at[count].set(jnp.where(accept, next_y, y))
        return Solution(self.field, controller, self.end, h * factor, count, ts, ys)


@eqx.filter_jit
def solve(field, y0, end, controller, max_steps=2000) -> Solution:
    ts, ys = jnp.zeros(max_steps), jnp.zeros((max_steps, len(y0))).at[0].set(y0)
    start = Solution(field, controller, end, jnp.array(1e-3), jnp.array(0), ts, ys)
    return filter_while_loop(Solution.unfinished, Solution.advance, start)


def van_der_pol(t, y):
    return y[1], 5 * (1 - y[0] ** 2) * y[1] - y[0]


def main(tolerance: float = 1e-6) -> list[Check]:
    with double_precision():
        # The controller bounds the error of one step. Leave room for them to add up.
        controller = Controller(jnp.array(1.0), tolerance / 100)
        solution = solve(van_der_pol, jnp.array([2.0, 0.0]), 20.0, controller)
        taken = slice(solution.count + 1)
        ts, ys = np.asarray(solution.ts[taken]), np.asarray(solution.ys[taken])
    precise = {"method": "DOP853", "rtol": 1e-12, "atol": 1e-12}
    wanted = solve_ivp(van_der_pol, (0, 20), ys[0], t_eval=ts, **precise).y.T
    error = np.max(np.abs(ys - wanted) / (1 + np.abs(wanted)))
    reached = Check("time reached", float(ts[-1]), "==", 20)
    return [reached, Check("distance to solve_ivp", float(error), "<=", tolerance)]


if __name__ == "__main__":
    report(main())
