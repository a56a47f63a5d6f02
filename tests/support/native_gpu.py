"""An H200 that is none: what `tcemu.engine.backends.native` launches is run by the emulation, or by texts compiled for a CPU."""

import re
from dataclasses import replace

import tcemu
from support import native_on_cpu
from support.emulated_gpu import EmulatedGpu
from tcemu.engine.backends import batched_calls as calls
from tcemu.engine.backends import dispatch
from tcemu.engine.backends.cuda import xla_launch as launch
from tcemu.engine.backends.native import mma_products as mma
from tcemu.engine.backends.native import native_statement as instruction
from tcemu.engine.backends.native import units
from tcemu.engine.backends.native import wgmma_products as wgmma
from tcemu.uses.silicon import silicon_run as run

LOOKED_UP = (units, run)  # modules that ask for the GPU's target


def launched_name(op):
    """The spelling of a launched product; the N of a wgmma does not matter, since the kernel has an N of its own."""
    return str(replace(op, n=64)) if op.family == "wgmma" else str(op)


def pretend_gpu(monkeypatch, target="sm_90a"):
    """A GPU of this target is here. What it would launch is not."""
    for module in LOOKED_UP:
        monkeypatch.setattr(module, "gpu_target", lambda: target)
    route = launch.Route("sm", "90", "")
    for module in (launch, units):
        monkeypatch.setattr(module, "route", lambda: route)
    native, *_, portable = dispatch.BACKENDS
    monkeypatch.setattr(dispatch, "BACKENDS", (native, portable))


def emulate_gpu(monkeypatch):
    """A GPU whose statements and products of fragments are the emulation's. Returns the names of what was launched."""
    pretend_gpu(monkeypatch)
    launched = []
    monkeypatch.setattr(calls, "_sharded", lambda call, alone: call)

    def statement(self, *words):
        launched.append(str(self.op))
        with tcemu.execution("emulated"):
            return EmulatedGpu(self.target)(self.op, self.form, dict(self.immediates), dict(zip(self.input_names, words, strict=True)))

    def portable(entry, blocks, result, shape, a, b, c):
        op = tcemu.parse(re.search(r'asm volatile\("(mma\S+) ', entry.text)[1])
        launched.append(str(op))
        d = c
        with tcemu.execution("emulated"):
            for step in range(a.shape[2]):
                d = tcemu.mma(op, a[:, :, None, step], b[:, None, :, step], d, target="sm_90a")
        return (d,)

    def product(self, *operands):
        launched.append(launched_name(self.op))
        return tiled(self, *operands)

    monkeypatch.setattr(instruction.Statement, "__call__", statement)
    monkeypatch.setattr(mma, "launch", portable)
    tiled = wgmma.WgmmaReduction.__call__
    monkeypatch.setattr(wgmma.WgmmaReduction, "__call__", product)
    monkeypatch.setattr(wgmma, "launch", native_on_cpu.launch)
    return launched
