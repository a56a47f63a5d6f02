"""`Evidence`: how the arithmetic of a target is known, as fields and in words."""

from typing import NamedTuple

from tcemu.engine.architectures.bibliography import make_bibtex

LEVELS = {
    "silicon": "0 mismatches against words that we recorded or compared on hardware",
    "published": "0 mismatches against recordings published by others",
    "literature": "stated in the literature, without words to compare",
    "lowering": "read from the machine code that NVIDIA's assembler makes",
    "assumed": "inferred from a neighbouring target or instruction",
}


class Spellings(NamedTuple):
    """The recorded part of an instruction family's spellings."""

    recorded: int  # number of recorded spellings
    all: int  # number of all spellings
    which: str  # description of the recorded spellings


class Evidence(NamedTuple):
    """The evidence for the arithmetic of a target; `source` is its text.

    The level decides which fields are set. silicon: `gpus` to `spellings`. published: `gpus`, `family`, `recorded`, `operands`, `papers`,
    and `k` with `step` if the row also has instructions with a larger K than the recorded products. literature: `papers`, and `assembler`
    if machine code was read. lowering: `assembler` and `note`. assumed: `note`.
    """

    level: str  # one of LEVELS
    gpus: tuple[str, ...] = ()  # GPUs on which words were recorded
    driver: str = ""  # driver version of the recording GPU
    assembler: tuple[str, ...] = ()  # versions of ptxas that made the recorded code, or whose machine code was read
    family: str = ""  # name of the file of recordings; without a suffix, an .npz
    recorded: int = 0  # recorded output words, all equal to the model's
    compared: int = 0  # further outputs that `tcemu verify` compared, on an H100 and an H200: tests/golden/verified_*.txt
    spellings: Spellings | None = None  # recorded spellings; None: all
    operands: str = ""  # types of the recorded operands, and of the result if it is not f32
    k: int = 0  # K of the recorded products if the row also has instructions with a larger K; otherwise 0
    step: int = 0  # part of a larger K that is summed in one step, according to the last of the papers
    papers: tuple[str, ...] = ()  # authors or publications, with their claim if it needs explanation
    note: str = ""  # reason or observation

    @property
    def golden(self) -> str:
        """Path of the file of recorded words from the root of the repository; "" without recordings."""
        return f"tests/golden/{self.family}{'' if '.' in self.family else '.npz'}" if self.family else ""

    @property
    def source(self) -> str:
        """The reason for the level, and where it can be checked, in words."""
        if self.level == "silicon":
            return self._describe_recordings()
        if self.level == "published":
            return self._describe_publications()
        *most, last = self.assembler or ("",)
        machine_code = f"machine code of ptxas {', '.join(most)}{' and ' if most else ''}{last}" if last else ""
        return ": ".join(filter(None, ["; ".join(filter(None, [machine_code, *self.papers])), self.note]))

    def bibtex(self) -> str:
        """Return BibTeX entries of tcemu and of the publications on which this evidence rests."""
        return make_bibtex(self.source)

    def _describe_recordings(self) -> str:
        coverage = f"; {self.spellings.recorded} of {self.spellings.all} spellings, {self.spellings.which}" if self.spellings else ""
        software = f", driver {self.driver}, ptxas {', '.join(self.assembler)}" if self.driver else ""
        setting = f"one {' and '.join(self.gpus)}{software}"
        compared = f"; {self.compared / 1e9:.1f}e9 more compared" if self.compared else ""
        return f"{setting}{coverage}{compared}; tests/golden, family {self.family}" + (f"; {self.note}" if self.note else "")

    def _describe_publications(self) -> str:
        recorder, *others = self.papers
        recorded_k = larger_k = ""
        if self.k:
            chained = self.step == self.k
            recorded_k = f", one step of K = {self.k}" if chained else f", K = {self.k}"
            rule = "a larger K as a chain of such steps" if chained else f"K = {self.step} as one step"
            larger_k = f"; {rule}: {', '.join(others)}"
        agreeing = "" if self.k else "".join(f"; {paper}" for paper in others)
        return f"{' and '.join(self.gpus)}, {self.operands}{recorded_k}: {recorder}{larger_k}; {self.golden}{agreeing}"


def published(gpus: tuple[str, ...], family: str, operands: str, recorded: int, *papers: str) -> Evidence:
    """Return the evidence of words that others published: the first of the papers; the others agree."""
    return Evidence(level="published", gpus=gpus, family=family, recorded=recorded, operands=operands, papers=papers)


def assumed(reason: str) -> Evidence:
    return Evidence(level="assumed", note=reason)
