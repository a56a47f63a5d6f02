"""Record whole runs of torch or JAX, and find the operation at which two runs diverge first, and its cause.

`record` writes the operands and results of each operation of a run. `locate` compares two such records. The recorder is one file that
does not import tcemu: copy `tcemu/uses/drift/recorder.py` to the machine that runs.
"""
