"""Record whole runs of torch or JAX, and find the operation at which two runs diverge first, and its cause.

`record` writes the operands and results of each operation of a run. `locate` compares two such records. The recorder is one file that
does not import tcemu: copy `tcemu/uses/drift/recorder.py` to the machine that runs.
"""

from tcemu.uses.drift.bounds import Legitimacy as Legitimacy
from tcemu.uses.drift.causes import Cause as Cause
from tcemu.uses.drift.drift_results import Difference as Difference
from tcemu.uses.drift.drift_results import Drift as Drift
from tcemu.uses.drift.drift_results import Line as Line
from tcemu.uses.drift.identification import Identification as Identification
from tcemu.uses.drift.identification import IdentifiedOperation as IdentifiedOperation
from tcemu.uses.drift.identification import identify as identify
from tcemu.uses.drift.invariance import BatchChange as BatchChange
from tcemu.uses.drift.invariance import Invariance as Invariance
from tcemu.uses.drift.invariance import invariance as invariance
from tcemu.uses.drift.locate import locate as locate
from tcemu.uses.drift.prediction import PredictedOperation as PredictedOperation
from tcemu.uses.drift.prediction import Prediction as Prediction
from tcemu.uses.drift.prediction import predict as predict
from tcemu.uses.drift.recorder import Recording as Recording
from tcemu.uses.drift.recorder import record as record
from tcemu.uses.drift.records import Operation as Operation
from tcemu.uses.drift.records import Record as Record
from tcemu.uses.drift.records import TensorRecord as TensorRecord
from tcemu.uses.drift.records import read_record as read_record
