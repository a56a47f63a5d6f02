"""Studies of numerics: sweeps over arithmetics with named errors, and published claims reproduced."""

from tcemu.study.claims import claim as claim
from tcemu.study.claims import published as published
from tcemu.study.claims.claim import Claim as Claim
from tcemu.study.claims.claim import Outcome as Outcome
from tcemu.study.claims.claim import Quantity as Quantity
from tcemu.study.measures import MEASURES as MEASURES
from tcemu.study.operands import normal as normal
from tcemu.study.operands import uniform as uniform
from tcemu.study.sweeps import Sweep as Sweep
from tcemu.study.sweeps import sweep as sweep

__all__ = ["MEASURES", "Claim", "Outcome", "Quantity", "Sweep", "claim", "normal", "published", "sweep", "uniform"]
