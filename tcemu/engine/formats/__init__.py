"""Number formats: the meaning of the bits of one element. `tcemu.engine.layouts.packing` says where the element sits in a register.

`number_formats` lists the formats and `rounding` the rounding modes. `coding` decodes and encodes codes; `float_arrays` converts between
codes and arrays of numbers. Codes are raw bits in the smallest unsigned dtype that holds them (uint8, uint16, uint32); a 64-bit code is
uint32[..., 2], low word first. All arithmetic here is integer arithmetic, so every backend treats subnormals and rounding the same.
"""
