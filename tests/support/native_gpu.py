"""An H200 that is none: what `tcemu.native` launches is run by the emulation, or by texts compiled for a CPU."""

import re

import tcemu
from support import native_on_cpu
from support.emulated_gpu import EmulatedGpu
from tcemu.arithmetic.kernels import calls, launch
from tcemu.native import instruction, mma, products, units, wgmma
from tcemu.operations import launches, serving
from tcemu.silicon import launch as run

LOOKED_UP = (launches, products, serving, run)  # modules that ask for the GPU's target


def here(monkeypatch, target="sm_90a"):
    """A GPU of this target is here. What it would launch is not."""
    for module in LOOKED_UP:
        monkeypatch.setattr(module, "target_here", lambda: target)
    route = launch.Route("sm", "90", "")
    for module in (launch, launches, units):
        monkeypatch.setattr(module, "route", lambda: route)


def emulated(monkeypatch):
    """A GPU whose statements and products of fragments are the emulation's. Returns the names of what was launched."""
    here(monkeypatch)
    launched = []
    monkeypatch.setattr(calls, "_sharded", lambda call, alone: call)

    def statement(self, *words):
        launched.append(str(self.op))
        with tcemu.execution("emulated"):
            return EmulatedGpu(self.target)(self.op, self.form, dict(self.immediates), dict(zip(self.read, words, strict=True)))

    def walk(entry, blocks, result, shape, a, b, c):
        op = tcemu.parse(re.search(r'asm volatile\("(mma\S+) ', entry.text)[1])
        launched.append(str(op))
        d = c
        with tcemu.execution("emulated"):
            for step in range(a.shape[2]):
                d = tcemu.mma(op, a[:, :, None, step], b[:, None, :, step], d, target="sm_90a")
        return (d,)

    def product(self, *operands):
        launched.append(str(self.op))
        return tiled(self, *operands)

    monkeypatch.setattr(instruction.Statement, "__call__", statement)
    monkeypatch.setattr(mma, "launch", walk)
    tiled = wgmma.Product.__call__
    monkeypatch.setattr(wgmma.Product, "__call__", product)
    monkeypatch.setattr(wgmma, "launch", native_on_cpu.launch)
    return launched
