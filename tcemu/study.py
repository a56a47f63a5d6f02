"""Studies: sweeps over arithmetics with named errors, published claims reproduced, and the error of a width as a smooth function.

`surrogate` and `expected_error` estimate what an accumulator's width costs, for gradients. `tcemu.study.accuracy` measures.
"""

from tcemu.uses.study import accuracy
from tcemu.uses.study.accuracy import MEASURES
from tcemu.uses.study.claims import get_claim, list_claims, read_outcome
from tcemu.uses.study.claims.claim_types import Claim, Outcome, Quantity
from tcemu.uses.study.surrogate import ErrorEstimate, expected_error, surrogate
from tcemu.uses.study.sweeps import Sweep, normal, sweep, uniform

__all__ = [
    "MEASURES", "Claim", "ErrorEstimate", "Outcome", "Quantity", "Sweep", "accuracy", "expected_error", "get_claim", "list_claims",
    "normal", "read_outcome", "surrogate", "sweep", "uniform",
]  # fmt: skip
