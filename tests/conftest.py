"""What all tests share: eight devices, and programs that are compiled quickly."""

import jax


# JAX wants to know before anything runs.
jax.config.update("jax_num_cpu_devices", 8)


def pytest_runtest_setup(item):
    # To compile takes half of the time, and most programs run once.
    quickly = item.get_closest_marker("optimised") is None
    jax.config.update("jax_disable_most_optimizations", quickly)
