"""Compiled functions of CuTe DSL, run as they are: the host code of a function makes its launches, and `tcemu.ptx` runs the kernels."""
