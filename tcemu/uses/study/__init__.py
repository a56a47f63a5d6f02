"""Studies: sweeps over arithmetics with named errors, published claims reproduced, and the error of a width as a smooth function.

`surrogate` and `expected_error` estimate what an accumulator's width costs, for gradients. `tcemu.uses.study.accuracy` measures.
"""
