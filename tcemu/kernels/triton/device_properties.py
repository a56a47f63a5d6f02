"""Properties of GPUs that Triton and its users ask for: memory, registers and processors, one row for each target."""

from __future__ import annotations

from typing import NamedTuple


class DeviceProperties(NamedTuple):
    """Properties of the GPUs of one target."""

    shared_bytes: int  # that a block may opt in to
    processors: int  # streaming multiprocessors of one GPU of the target


# Shared memory: CUDA Programming Guide, Technical Specifications per Compute Capability, "maximum amount of shared memory per thread
# block". Processors: of V100, Jetson AGX Xavier, T4, A100, A40, Jetson AGX Orin, L4, H100, B200, B300, Jetson T5000, GeForce RTX 5090 and
# GB10, as NVIDIA announced them; no document was compared. They decide the grids of persistent kernels, never the bits of an instruction.
PROPERTIES: dict[int, DeviceProperties] = {
    70: DeviceProperties(96 * 1024, 80),
    72: DeviceProperties(96 * 1024, 8),
    75: DeviceProperties(64 * 1024, 40),
    80: DeviceProperties(163 * 1024, 108),
    86: DeviceProperties(99 * 1024, 84),
    87: DeviceProperties(163 * 1024, 16),
    88: DeviceProperties(163 * 1024, 16),
    89: DeviceProperties(99 * 1024, 58),
    90: DeviceProperties(227 * 1024, 132),
    100: DeviceProperties(227 * 1024, 148),
    103: DeviceProperties(227 * 1024, 148),
    110: DeviceProperties(227 * 1024, 20),
    120: DeviceProperties(99 * 1024, 170),
    121: DeviceProperties(99 * 1024, 48),
}
REGISTERS = 65536  # 32-bit ones of a processor; of a block at most as many
WARP_SIZE = 32
MAX_THREADS = 1024  # of a block


def triton_properties(capability: int) -> dict[str, int]:
    """Return the properties as Triton's driver returns them; clock rates and bus width are 0, since nothing is timed."""
    row = PROPERTIES[capability]
    return {
        "max_shared_mem": row.shared_bytes,
        "max_num_regs": REGISTERS,
        "multiprocessor_count": row.processors,
        "warpSize": WARP_SIZE,
        "sm_clock_rate": 0,
        "mem_clock_rate": 0,
        "mem_bus_width": 0,
    }
