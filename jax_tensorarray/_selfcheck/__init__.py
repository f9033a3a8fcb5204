"""The main job, `python -m jax_tensorarray`: check and time loops over a buffer, in plain JAX and in this library."""
