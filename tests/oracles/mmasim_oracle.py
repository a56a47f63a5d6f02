"""mmasim 2.1.1 (MIT, Microsoft) as an oracle for AMD's units: an optional package, which needs torch."""

import sys
from types import ModuleType

import numpy as np
import pytest

from tcemu.engine.isa.other_makers import OTHER_TARGETS, Unit

FAMILIES = {"gfx908": "CDNA1", "gfx90a": "CDNA2", "gfx942": "CDNA3"}
VIEWS = {8: np.uint8, 16: np.int16, 32: np.int32}


def simulates(op: Unit, target: str) -> bool:
    """Whether mmasim has the instruction. Its multiply-adds of f32 and f64 are a compiled program, and left out."""
    return target in FAMILIES and OTHER_TARGETS[target].architecture == FAMILIES[target] and op.a.name not in ("f32", "f64")


def simulator(op: Unit, target: str):
    """The instruction as a function of codes: a, b [N, K] and c [N] -> [N]. Skips the test where mmasim is not installed."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("mmasim")
    # mmasim compiles a C++ program for multiply-adds when it is imported; no instruction asked here uses it
    stub = ModuleType("mmasim.arithmetic.fma")
    stub.MMA_FMA = object
    sys.modules.setdefault("mmasim.arithmetic.fma", stub)
    import mmasim.arithmetic

    mmasim.arithmetic.fma = sys.modules["mmasim.arithmetic.fma"]
    from mmasim.amd.sim import MFMA

    dtypes = {"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "e4m3fnuz": torch.float8_e4m3fnuz}
    dtypes |= {"e5m2fnuz": torch.float8_e5m2fnuz, "f32": torch.float32}
    unit = MFMA(FAMILIES[target], op.name.removeprefix("v_mfma_"))

    def tensor(fmt, codes):
        return torch.from_numpy(np.ascontiguousarray(codes).view(VIEWS[fmt.bits])).view(dtypes[fmt.name])

    def simulate(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return unit.dpa(tensor(op.a, a), tensor(op.b, b), tensor(op.d, c)).view(torch.int32).numpy().view(np.uint32)

    return simulate
