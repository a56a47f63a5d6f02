"""PTX kernels run without a GPU, bit for bit.

`parse` reads PTX, `compile` makes it from CUDA C++, `run` launches a kernel, `compare` finds where two targets diverge.

`run(trace=Tracepoint(...))` records registers and memory at a line. Text that is not PTX raises `PtxError`.
"""
