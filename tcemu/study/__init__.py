"""Studies of numerics: sweeps over arithmetics with named errors, published claims reproduced, and what a width costs, estimated.

`surrogate` and `expected_error` estimate what an accumulator's width costs, smoothly, for gradients. `tcemu.study.accuracy` measures.
"""

from tcemu.study.claims import claim as claim
from tcemu.study.claims import published as published
from tcemu.study.claims.claim import Claim as Claim
from tcemu.study.claims.claim import Outcome as Outcome
from tcemu.study.claims.claim import Quantity as Quantity
from tcemu.study.measures import MEASURES as MEASURES
from tcemu.study.operands import normal as normal
from tcemu.study.operands import uniform as uniform
from tcemu.study.surrogate import Error as Error
from tcemu.study.surrogate import expected_error as expected_error
from tcemu.study.surrogate import surrogate as surrogate
from tcemu.study.sweeps import Sweep as Sweep
from tcemu.study.sweeps import sweep as sweep

__all__ = [
    "MEASURES", "Claim", "Error", "Outcome", "Quantity", "Sweep",
    "claim", "expected_error", "normal", "published", "surrogate", "sweep", "uniform",
]  # fmt: skip
