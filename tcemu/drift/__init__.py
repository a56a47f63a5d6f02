"""Which operation of two runs parted first, and why. Records of whole runs of torch or JAX, and their comparison.

`record` writes what each operation of a run read and gave; `locate` compares two such records. The recorder is one file that needs nothing
of tcemu: copy `tcemu/drift/recorder.py` to the machine that runs.
"""

from tcemu.drift.bounds import Legitimacy as Legitimacy
from tcemu.drift.causes import Cause as Cause
from tcemu.drift.drift_results import Difference as Difference
from tcemu.drift.drift_results import Drift as Drift
from tcemu.drift.drift_results import Line as Line
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
