"""Studies: sweeps over arithmetics with named errors, published claims reproduced, and the error of a width as a smooth function.

`surrogate` and `expected_error` estimate what an accumulator's width costs, for gradients. `tcemu.uses.study.accuracy` measures.
"""

from tcemu.uses.study.accuracy import MEASURES as MEASURES
from tcemu.uses.study.claims import get_claim as get_claim
from tcemu.uses.study.claims import list_claims as list_claims
from tcemu.uses.study.claims import read_outcome as read_outcome
from tcemu.uses.study.claims.claim_types import Claim as Claim
from tcemu.uses.study.claims.claim_types import Outcome as Outcome
from tcemu.uses.study.claims.claim_types import Quantity as Quantity
from tcemu.uses.study.surrogate import ErrorEstimate as ErrorEstimate
from tcemu.uses.study.surrogate import expected_error as expected_error
from tcemu.uses.study.surrogate import surrogate as surrogate
from tcemu.uses.study.sweeps import Sweep as Sweep
from tcemu.uses.study.sweeps import normal as normal
from tcemu.uses.study.sweeps import sweep as sweep
from tcemu.uses.study.sweeps import uniform as uniform

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
