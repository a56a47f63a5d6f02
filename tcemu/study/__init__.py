"""Studies: sweeps over arithmetics with named errors, published claims reproduced, and the error of a width as a smooth function.

`surrogate` and `expected_error` estimate what an accumulator's width costs, for gradients. `tcemu.study.accuracy` measures.
"""

from tcemu.study.accuracy import MEASURES as MEASURES
from tcemu.study.claims import get_claim as get_claim
from tcemu.study.claims import list_claims as list_claims
from tcemu.study.claims import read_outcome as read_outcome
from tcemu.study.claims.claim_types import Claim as Claim
from tcemu.study.claims.claim_types import Outcome as Outcome
from tcemu.study.claims.claim_types import Quantity as Quantity
from tcemu.study.surrogate import ErrorEstimate as ErrorEstimate
from tcemu.study.surrogate import expected_error as expected_error
from tcemu.study.surrogate import surrogate as surrogate
from tcemu.study.sweeps import Sweep as Sweep
from tcemu.study.sweeps import normal as normal
from tcemu.study.sweeps import sweep as sweep
from tcemu.study.sweeps import uniform as uniform

__all__ = [
    "MEASURES",
    "Claim",
    "ErrorEstimate",
    "Outcome",
    "Quantity",
    "Sweep",
    "expected_error",
    "get_claim",
    "list_claims",
    "normal",
    "read_outcome",
    "surrogate",
    "sweep",
    "uniform",
]  # fmt: skip
