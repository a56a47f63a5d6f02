"""The special registers that PTX has, with their types (PTX ISA, section 10). What tcemu gives for them: `special_values`."""

_VECTORS = ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
_WORDS = (
    "laneid", "warpid", "nwarpid", "smid", "nsmid", "cluster_ctarank", "cluster_nctarank",
    *(f"lanemask_{which}" for which in ("eq", "le", "lt", "ge", "gt")),
    "clock", "clock_hi", "globaltimer_lo", "globaltimer_hi", *(f"pm{at}" for at in range(8)), *(f"envreg{at}" for at in range(32)),
    "total_smem_size", "aggr_smem_size", "dynamic_smem_size",
    *(f"reserved_smem_offset_{which}" for which in ("begin", "end", "cap", "0", "1")),
)  # fmt: skip
_LONG = ("gridid", "clock64", "globaltimer", "current_graph_exec", *(f"pm{at}_64" for at in range(8)))

SPECIAL = {
    **{f"%{name}.{axis}": "u32" for name in _VECTORS for axis in "xyzw"},
    **{f"%{name}": "u32" for name in _WORDS},
    **{f"%{name}": "u64" for name in _LONG},
    "%is_explicit_cluster": "pred",
}
