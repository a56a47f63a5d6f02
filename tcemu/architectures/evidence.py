"""How it is known what a target computes: levels, and the evidence of a row."""

from typing import NamedTuple

LEVELS = {
    "silicon": "0 mismatches against words that we recorded on hardware",
    "published": "0 mismatches against recordings published by others",
    "literature": "stated in the literature, without words to compare",
    "lowering": "read from the machine code that NVIDIA's assembler makes",
    "assumed": "inferred from a neighbouring target or instruction",
}


class Evidence(NamedTuple):
    """How a row is known: a level, one of `LEVELS`, and where that can be checked."""

    level: str
    source: str
    words: int = 0  # output words compared, none of them different
