"""Fuzzing: compare two implementations of an instruction on generated operands, and infer the arithmetic of a black box."""
