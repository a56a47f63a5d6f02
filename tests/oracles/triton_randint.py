"""Prints Triton's randint(seed, 0..255, 7) as unsigned numbers: `TRITON_INTERPRET=1 python triton_randint.py SEED`, on a CPU."""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(out, seed):
    offsets = tl.arange(0, 256)
    tl.store(out + offsets, tl.randint(seed, offsets, n_rounds=7))


words = torch.zeros(256, dtype=torch.int32)
kernel[(1,)](words, int(sys.argv[1]))
print(*(word & 0xFFFFFFFF for word in words.tolist()))
