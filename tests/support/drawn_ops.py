"""Instructions of every format and shape of what `fuzz/cuda` draws and compares: `test_draw_kernel` and `test_gpu` loop over them."""

OPS = (
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32",
    "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e3m2.e2m3.f32",
    "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e4m3.f32",
    "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32",
    "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32",
    "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3",
    "wgmma.mma_async.sync.aligned.m64n24k16.f32.f16.f16",
    "wgmma.mma_async.sp.sync.aligned.m64n24k64.f32.e4m3.e5m2",
)
FUSED = (  # and two targets: the steps of one side are as long as the other's, or parts of them; tables of narrow formats
    ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "sm_80", "sm_90a"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", "sm_75", "sm_90a"),
    ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", "sm_120", "sm_89"),
    ("mma.sync.aligned.m16n8k16.row.col.f32.e5m2.e4m3.f32", "sm_120", "sm_120:terms=4"),
    ("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e3m2.e2m3.f32", "sm_120a", "sm_120a:fraction_bits=20"),
    ("wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32", "sm_70", "sm_90"),
)
