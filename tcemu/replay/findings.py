"""What a fingerprint found: one recipe, or none and why, with the account of it."""

from __future__ import annotations

from dataclasses import dataclass

from tcemu.linalg.kernel_recipes import KernelRecipe
from tcemu.text import wrapped


@dataclass(frozen=True)
class Finding:
    """One thing that probes showed. calls: of the box, made for it."""

    what: str
    value: str
    calls: int

    def __str__(self) -> str:
        return f"{self.what}: {self.value} [{self.calls} call{'s' if self.calls != 1 else ''}]"


@dataclass(frozen=True)
class Fingerprint:
    """How a black box multiplies, as far as its answers show. `str()` is the account for people.

    recipe: the one order that agrees with every answer; None: undetermined, and `why` says what is known and what would tell more.
    survivors: the orders that agree with every answer and are not one, if they are several. compared: outputs of held-out operands that
    `recipe` gives, every one with the box's bits. calls: of the box.
    """

    box: str
    shape: tuple[int, int, int]
    recipe: KernelRecipe | None
    findings: tuple[Finding, ...]
    calls: int
    compared: int
    survivors: tuple[KernelRecipe, ...] = ()
    why: str = ""

    @property
    def determined(self) -> bool:
        """Exactly one order agrees."""
        return self.recipe is not None

    def __str__(self) -> str:
        m, n, k = self.shape
        said = [f"{self.box}, M = {m}, N = {n}, K = {k}, by {self.calls} calls:"]
        said += [line for f in self.findings for line in wrapped(f"  {f}", indent="    ")]
        if self.recipe is not None:
            return "\n".join([*said, str(self.recipe), f"0 differences in {self.compared:,} outputs of held-out operands."])
        said += wrapped(f"undetermined: {self.why}", indent="  ")
        for survivor in self.survivors[:4]:
            said += ["  " + line for line in str(survivor).splitlines()]
        return "\n".join([*said, *(["  ..."] if len(self.survivors) > 4 else [])])
