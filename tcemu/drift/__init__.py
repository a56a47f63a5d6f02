"""Which operation of two runs parted first, and why. Records of whole runs of torch or JAX, and their comparison.

`record` writes what each operation of a run read and gave. `read_record` opens such a file. The recorder is one file that needs nothing of
tcemu: copy `tcemu/drift/recorder.py` to the machine that runs.
"""

from tcemu.drift.recorder import Recording as Recording
from tcemu.drift.recorder import record as record
from tcemu.drift.records import Operation as Operation
from tcemu.drift.records import Record as Record
from tcemu.drift.records import TensorRecord as TensorRecord
from tcemu.drift.records import read_record as read_record
