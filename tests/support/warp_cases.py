"""Drawn registers for the kernel that takes them, and calls that need no more than these."""

import jax.numpy as jnp
import numpy as np

import tcemu
from tcemu.formats import from_float

F16_F32, F16_F16 = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16"
SPARSE = "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32"
MXF8 = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e4m3.e2m1.f32.ue8m0"
NVF4 = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
KINDS = (  # of steps, operands and orders, each with a target
    (F16_F32, "sm_90"), (F16_F32, "sm_80"), (F16_F16, "sm_90"), (SPARSE, "sm_90"), (MXF8, "sm_120a"), (NVF4, "sm_120a"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", "sm_90"), ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", "sm_90"),
    ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32", "sm_89"), ("mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16", "sm_90"),
    ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32", "sm_70"),
    ("mma.sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.tf32.tf32.f32", "sm_90"),
)  # fmt: skip


def registers(rng, op, name, batch, raw):
    fmt = op.operand_format(op.accumulator_operand if name == "c" else name)
    if raw:
        lanes = (32,) if op.warps == 1 else (op.warps, 32)
        return rng.integers(0, 1 << 32, (*batch, *lanes, op.register_count(name)), dtype=np.uint64).astype(np.uint32)
    shape = ((op.matrix_count,) if op.matrix_count > 1 else ()) + op.matrix_shape(name)
    return np.asarray(tcemu.pack(op, name, from_float(fmt, rng.normal(0, 3, (*batch, *shape)))))


def byte_words(rng, least, most, *shape):
    """Registers of four bytes from `least` to `most`."""
    return rng.integers(least, most + 1, (*shape, 4)).astype(np.uint8).view(np.uint32)[..., 0]


def mma_call(spelling, target, raw, batch=(3,)):
    """mma or mma_sp of drawn operands, as a function of a, b and c; and these."""
    op, rng = tcemu.parse(spelling), np.random.default_rng(len(spelling))
    given = {"target": target}
    if op.sparse:
        given |= {"e": byte_words(rng, 0, 255, *batch, 32), "selector": int(rng.choice(op.selectors))}
    if op.scaling:
        near = 0x7F if str(op.scaling.format) == "ue8m0" else 0x38
        for side, threads in (("a", op.scaling.thread_ids["a"]), ("b", op.scaling.thread_ids["b"])):
            given[f"scale_{side}"] = byte_words(rng, *((0, 255) if raw else (near - 2, near + 2)), *batch, 32)
            given[f"selector_{side}"] = int(rng.choice(op.scaling.byte_ids)), int(rng.choice(threads))
    call = tcemu.mma_sp if op.sparse else tcemu.mma
    return lambda *abc, **more: call(op, *abc, **given | more), [registers(rng, op, name, batch, raw) for name in "abc"]


def wgmma_call(spelling, in_memory, raw, batch=2):
    """wgmma of drawn operands, as a function of d, the descriptor of B and shared memory; and these."""
    op, rng = tcemu.parse(spelling), np.random.default_rng(len(spelling) + raw)
    size = 4 * op.n * op.k * op.b.bits // 32 + 4096
    shared = rng.integers(0, 1 << 32, (batch, size), dtype=np.uint64).astype(np.uint32)
    if not raw:
        codes = from_float(op.a, rng.normal(0, 3, (batch, size * 32 // op.a.bits)))
        shared = np.ascontiguousarray(codes).view(np.uint32)
    b = tcemu.layouts.descriptor(0, 128, 256, 0)
    given = {"target": "sm_90a", "scale_d": jnp.asarray([True, False])[:batch], "imm_scale_a": -1 if op.a.exponent_bits else 1}
    if op.sparse:
        given |= {"sp_meta": byte_words(rng, 0, 255, batch, 4, 32), "sp_sel": int(op.selectors[-1])}
    given |= {"a_desc": tcemu.layouts.descriptor(64, 128, 256, 0)} if in_memory else {"a": registers(rng, op, "a", (batch,), raw)}
    return lambda d: tcemu.wgmma(op, d, b, shared, **given), [registers(rng, op, "d", (batch,), raw)]
