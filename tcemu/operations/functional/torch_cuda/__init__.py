"""PyTorch's operators as its CUDA kernels compute them, as values: launches, the order of sums, functions and roundings."""
