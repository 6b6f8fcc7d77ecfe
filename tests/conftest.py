"""What all tests share: eight devices, which JAX wants to know before anything runs."""

import jax


jax.config.update("jax_num_cpu_devices", 8)
