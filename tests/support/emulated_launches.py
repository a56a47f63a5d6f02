"""Devices that stand where a GPU would when recorded launches are repeated: the emulation, and emulations with faults."""

import os
import time
from pathlib import Path

import numpy as np

from tcemu import ptx
from tcemu.base.errors import Unsupported


class EmulatedDevice:
    """Repeats a launch by `tcemu.ptx.run`. `fault(launch, arrays)` may change what it leaves."""

    target, name = "sm_90a", "emulation"

    def __init__(self, fault=None):
        self.fault = fault

    def __call__(self, launch, case):
        module = ptx.parse(launch.text)
        args = launch.arguments(module.functions[launch.entry].parameters, case)
        made = ptx.run(
            module, entry=launch.entry, grid=launch.grid, block=launch.block, args=args, target=launch.target, cluster=launch.cluster,
            shared_bytes=launch.shared_bytes, cooperative=launch.cooperative, fmad=launch.fmad,
        )  # fmt: skip
        arrays = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in made]
        for each in launch.references:
            if each.holder is not None:
                arrays[each.holder][each.byte : each.byte + 8] = 0
        if self.fault is not None:
            self.fault(launch, arrays)
        return arrays


def honest():
    """Leaves the recorded words."""
    note_call("opened")
    return EmulatedDevice(lambda launch, arrays: note_call(launch.entry))


def faulty():
    """Makes the fault that a kernel's name says."""
    return EmulatedDevice(make_fault)


def absent():
    """Stands where no GPU is."""
    raise Unsupported("gpu: none answers here")


def make_fault(launch, arrays):
    if launch.entry == "flips":
        arrays[-1][4] ^= 1
    if launch.entry == "wavers":
        arrays[-1][0] = int(time.monotonic_ns() >> 8) & 0xFF | 0x80
        time.sleep(0.01)
    if launch.entry == "dies":
        os._exit(9)
    if launch.entry == "faults":
        raise RuntimeError("an illegal memory access was encountered")
    if launch.entry == "hangs":
        time.sleep(600)


def note_call(text):
    """Add a line to the file of $LAUNCH_CALLS."""
    with Path(os.environ["LAUNCH_CALLS"]).open("a") as file:
        file.write(text + "\n")
