"""Triton: kernels run without a GPU, as the user wrote them (extra `triton`).

`emulated("H100")` compiles every launch by Triton's own compiler for that GPU and runs its PTX by `tcemu.ptx`, bit for bit. `interpreted`
runs Triton's interpreter with `tl.dot` in the bits of the GPU's tensor cores, which is faster and less exact. `python -m tcemu.triton
--target H100 SCRIPT` runs a whole program.
"""
