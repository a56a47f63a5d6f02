"""JAX functions as XLA compiles them for a GPU, run without it."""
