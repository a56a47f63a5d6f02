"""The instructions that take values and give values, thread by thread: integers, logic, floats, comparisons, conversions, moves."""
