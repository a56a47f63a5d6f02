"""Softmax, norms, activations and rotary embeddings as kernels compute them, bit for bit: the kernel is a value."""
