"""Studies: what an arithmetic costs, measured or estimated.

`surrogate` and `expected_error` estimate what an accumulator's width costs, smoothly, for gradients. `tcemu.study.accuracy` measures.
"""

from tcemu.study.surrogate import Error as Error
from tcemu.study.surrogate import expected_error as expected_error
from tcemu.study.surrogate import surrogate as surrogate
