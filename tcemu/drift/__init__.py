"""Record whole runs of torch or JAX, and find the operation at which two runs diverge first, and its cause.

`record` writes the operands and results of each operation of a run. `locate` compares two such records. The recorder is one file that
does not import tcemu: copy `tcemu/drift/recorder.py` to the machine that runs.
"""

from tcemu.drift.bounds import Legitimacy as Legitimacy
from tcemu.drift.causes import Cause as Cause
from tcemu.drift.drift_results import Difference as Difference
from tcemu.drift.drift_results import Drift as Drift
from tcemu.drift.drift_results import Line as Line
from tcemu.drift.identification import Identification as Identification
from tcemu.drift.identification import IdentifiedOperation as IdentifiedOperation
from tcemu.drift.identification import identify as identify
from tcemu.drift.invariance import BatchChange as BatchChange
from tcemu.drift.invariance import Invariance as Invariance
from tcemu.drift.invariance import invariance as invariance
from tcemu.drift.locate import locate as locate
from tcemu.drift.recorder import Recording as Recording
from tcemu.drift.recorder import record as record
from tcemu.drift.records import Operation as Operation
from tcemu.drift.records import Record as Record
from tcemu.drift.records import TensorRecord as TensorRecord
from tcemu.drift.records import read_record as read_record
