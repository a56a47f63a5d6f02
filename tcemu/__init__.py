"""NVIDIA's tensor-core instructions, bit for bit, as pure JAX functions over thousands of simulated warps."""
