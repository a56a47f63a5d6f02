"""`Evidence`: how it is known what a target computes, as fields, and the same in words."""

from typing import NamedTuple

LEVELS = {
    "silicon": "0 mismatches against words that we recorded on hardware",
    "published": "0 mismatches against recordings published by others",
    "literature": "stated in the literature, without words to compare",
    "lowering": "read from the machine code that NVIDIA's assembler makes",
    "assumed": "inferred from a neighbouring target or instruction",
}


class Spellings(NamedTuple):
    """The spellings that were recorded, where those were not all."""

    recorded: int
    all: int
    which: str


class Evidence(NamedTuple):
    """How it is known what a target computes. `source` says it in words.

    The level says which fields there are. silicon: `gpus` to `spellings`. published: `gpus`, `family`, `recorded`, `operands`, `papers`,
    and `k` with `step` where the words show less than the instructions. literature: `papers`, perhaps `assembler`. lowering: `assembler`
    and `note`. assumed: `note`.
    """

    level: str  # one of LEVELS
    gpus: tuple[str, ...] = ()  # on which words were recorded
    driver: str = ""  # of that GPU
    assembler: tuple[str, ...] = ()  # versions of ptxas: that made the recorded code, or whose machine code was read
    family: str = ""  # of the recordings: the name of their file
    recorded: int = 0  # output words, none of them different
    compared: int = 0  # further outputs that `tcemu verify` compared on the GPU: tests/golden/verified_h200.txt
    spellings: Spellings | None = None  # those recorded; None: all
    operands: str = ""  # the types of the recorded operands, and of the result if that is not f32
    k: int = 0  # of the recorded products, where instructions with a larger K belong to the row too; 0: where none do
    step: int = 0  # how much of a larger K is summed in one step, by the last of the papers
    papers: tuple[str, ...] = ()  # who says so, and what, where that is not plain
    note: str = ""  # the reason, or what was seen

    @property
    def golden(self) -> str:
        """The file of the recorded words, from the root of the repository; "" without any."""
        return f"tests/golden/{self.family}.npz" if self.family else ""

    @property
    def source(self) -> str:
        """Where the level comes from and where it can be checked, in words."""
        if self.level == "silicon":
            return self._recorded()
        if self.level == "published":
            return self._published()
        *most, last = self.assembler or ("",)
        read = f"machine code of ptxas {', '.join(most)}{' and ' if most else ''}{last}" if last else ""
        return ": ".join(filter(None, ["; ".join(filter(None, [read, *self.papers])), self.note]))

    def _recorded(self) -> str:
        covered = f"; {self.spellings.recorded} of {self.spellings.all} spellings, {self.spellings.which}" if self.spellings else ""
        setting = f"one {' and '.join(self.gpus)}, driver {self.driver}, ptxas {', '.join(self.assembler)}"
        return f"{setting}{covered}; {self.compared / 1e9:.1f}e9 more compared; tests/golden, family {self.family}"

    def _published(self) -> str:
        recorder, *others = self.papers
        reach = beyond = ""
        if self.k:
            chained = self.step == self.k
            reach = f", one step of K = {self.k}" if chained else f", K = {self.k}"
            larger = "a larger K as a chain of such steps" if chained else f"K = {self.step} as one step"
            beyond = f"; {larger}: {', '.join(others)}"
        return f"{' and '.join(self.gpus)}, {self.operands}{reach}: {recorder}{beyond}; {self.golden}"
