"""The arithmetic of a step, once: plain functions over lane values, which every backend renders for its machine.

`values` has the operations. `decoding` takes codes apart, `rounding` rounds sums and encodes them, `specials` applies rule 8, `bounded`
has the steps whose operands the formats or a guard bound, `general` those of any numbers, `groups` those of block-scaled groups,
`anchored` those whose sums begin at a large power of two, `kept_floats` those of factors kept as floats, `quantizing` the division and
rounding of a quantiser, and `forms` decides which of them serves a model.
"""
