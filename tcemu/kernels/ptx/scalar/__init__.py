"""Scalar instructions, which map values to values thread by thread: integers, logic, floats, comparisons, conversions, moves."""
