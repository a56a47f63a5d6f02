"""PyTorch: products of tensors by a recipe, modules whose products are replaced, and a list of all products of a run (extra `torch`).

A thin wrapper of `tcemu.matmul` and recipes: torch tensors go in and come out by DLPack, and the bits are those of JAX.
"""
