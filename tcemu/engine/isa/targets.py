"""Targets, what each has, and the names of the GPUs that have them.

`resolve_target` is the only place where a name becomes a target: "H100", "h200" and "sm_90a" all become "sm_90a".

To add a GPU of a known target: its name in `GPU_NAMES`. To add a target: a row of `TARGETS`, and its GPUs in `GPU_NAMES`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from re import fullmatch, split
from typing import Any, NamedTuple

from tcemu.base.errors import Unsupported
from tcemu.engine.formats.number_formats import UE4M3, UE5M3, UE8M0, Format
from tcemu.engine.isa.grammar import shorten_text
from tcemu.engine.isa.other_makers import OTHER_TARGETS, find_other_target
from tcemu.engine.isa.syntax_table import Version
from tcemu.engine.isa.tcgen05_kinds import FP4_KINDS, KINDS

BlockScale = tuple[Format, int]  # type of a block scale, and elements of a row that share one


class TargetName(NamedTuple):
    number: int  # ten times the compute capability, such as 90
    suffix: str = ""  # "a": features of this architecture alone; "f": features of its family, since PTX ISA 8.8

    @property
    def family(self) -> int:
        """Number of the family: the major compute capability."""
        return self.number // 10


def parse_target_name(name: str) -> TargetName:
    """Return the parts of a target's name, also of one that tcemu does not know: (90, "a") for "sm_90a".

    Args:
        name: Name of a target of NVIDIA, such as "sm_90a".

    Raises:
        ValueError: The text is no target's name.
    """
    match = fullmatch(r"sm_(\d+)([af]?)", name)
    if match is None:
        raise ValueError(f"target {shorten_text(name)!r}: expected a name such as sm_90a")
    return TargetName(int(match[1]), match[2])


@dataclass(frozen=True, eq=False)
class Target:
    """A target and its capabilities. Code asks for them, never for a name.

    The instructions of a target are rows of `tcemu.engine.isa.syntax_table` and `tcemu.engine.isa.statement_table`, its arithmetic is in
    `tcemu.engine.architectures`.
    """

    name: str  # "sm_90a"
    since: Version  # PTX ISA version that introduced the target: the notes of .target, which the assembler follows
    library_unit: str = "mma"  # unit by which libraries multiply: "mma", "wgmma" or "tcgen05"
    shared_kib: int = 227  # KiB of shared memory of a block at most
    has_clusters: bool = False  # a launch may have clusters of blocks
    map_types: int = 12  # largest element type of a tensor map that tensormap.replace writes
    loads_all_rows: bool = False  # ldmatrix reads a row at the address of every lane, also where `op` has fewer rows
    tensor_columns: int = 0  # columns of tensor memory; 0: the target has none
    depths: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # K of dense tcgen05.mma by kind
    block_scales: frozenset[BlockScale] = frozenset()  # of tcgen05.mma
    public: str = ""  # what is public of a target whose arithmetic nobody has published; "": the arithmetic is modelled

    @property
    def number(self) -> int:
        """Ten times the compute capability, such as 90."""
        return parse_target_name(self.name).number

    @property
    def suffix(self) -> str:
        """ "a", "f" or ""."""
        return parse_target_name(self.name).suffix

    def multiplies(self, kind: str, k: int, scale: BlockScale | None) -> bool:
        """Return True if tcgen05.mma of a kind has this K and this type of block scales.

        Args:
            kind: One of `tcemu.engine.isa.tcgen05_kinds.KINDS`.
            k: K of the dense instruction.
            scale: Type and size of the blocks; None without block scales.
        """
        return k in self.depths.get(kind, ()) and (scale is None or scale in self.block_scales)


def _targets(number: int, since: Mapping[str, Version], **capabilities: Any) -> Iterator[Target]:
    """Yield the targets of a number, by suffix. They have the capabilities, which do not differ by suffix."""
    for suffix, version in since.items():
        yield Target(f"sm_{number}{suffix}", version, **capabilities)


# K and block scales of the targets with tensor memory
DEPTHS = {kind: (row.k,) for kind, row in KINDS.items()}
WITH_K_96 = DEPTHS | {kind: (64, 96) for kind in FP4_KINDS}  # 9.7.16.4.2: which only the instruction descriptor shows
BLOCK_SCALES = frozenset({(UE8M0, 32), (UE8M0, 16), (UE4M3, 16)})  # table 44
_NEWER: dict[str, Any] = {"has_clusters": True, "map_types": 15}
_TENSOR_MEMORY = _NEWER | {"library_unit": "tcgen05", "tensor_columns": 512, "depths": DEPTHS, "block_scales": BLOCK_SCALES}


def _tensor_memory_targets(number: int, base: Version, **exact: Any) -> Iterator[Target]:
    """Yield the targets of a number with tensor memory, which those with a suffix have; `exact`: capabilities of the one with "a"."""
    yield Target(f"sm_{number}", base, **_NEWER)
    yield Target(f"sm_{number}f", max(base, (8, 8)), **_TENSOR_MEMORY)
    yield Target(f"sm_{number}a", base, **_TENSOR_MEMORY | exact)


# Rubin. CUTLASS 4.8 (mma_traits_sm107.hpp, mma_sm107_umma.hpp) has the K and the block scales, each of both sizes of blocks; 576 columns:
# its tensor-memory allocator. ptxas 13.5 takes its statements as it takes those of sm_103, and .target sm_107 from PTX ISA 9.4 on
_RUBIN_PUBLIC = (
    "PTX ISA 9.4 and CUTLASS 4.8 name FP8 products of K = 64, FP4 products of K = 96 and 128, block scales of ue5m3 and 576 columns of "
    "tensor memory; nobody has published whether a step of K = 64 or 128 is one sum"
)
_RUBIN: dict[str, Any] = _TENSOR_MEMORY | {
    "tensor_columns": 576, "public": _RUBIN_PUBLIC,
    "depths": DEPTHS | {"f8f6f4": (32, 64), "mxf8f6f4": (32, 64), "mxf4nvf4": (64, 128)},
    "block_scales": BLOCK_SCALES | {(UE4M3, 32), (UE5M3, 32), (UE5M3, 16)},
}  # fmt: skip
_RUBIN_EXACT: dict[str, Any] = _RUBIN | {"depths": {**_RUBIN["depths"], "mxf4": (64, 96), "mxf4nvf4": (64, 96, 128)}}

# KiB of shared memory: CUDA C++ programming guide, technical specifications per compute capability
TARGETS: dict[str, Target] = {target.name: target for target in (
    Target("sm_70", (6, 0), shared_kib=96), Target("sm_72", (6, 1), shared_kib=96),
    Target("sm_75", (6, 3), shared_kib=64, loads_all_rows=True),
    Target("sm_80", (7, 0), shared_kib=163), Target("sm_86", (7, 1), shared_kib=99), Target("sm_87", (7, 4), shared_kib=163),
    Target("sm_88", (9, 0)), Target("sm_89", (7, 8), shared_kib=99),
    Target("sm_90", (7, 8), has_clusters=True), Target("sm_90a", (8, 0), library_unit="wgmma", has_clusters=True),
    *_tensor_memory_targets(100, (8, 6)),
    *_tensor_memory_targets(103, (8, 8), depths=WITH_K_96),
    Target("sm_107", (9, 4), public=_RUBIN_PUBLIC, **_NEWER), Target("sm_107f", (9, 4), **_RUBIN),
    Target("sm_107a", (9, 4), **_RUBIN_EXACT),
    *_tensor_memory_targets(110, (9, 0)),
    *_targets(120, {"": (8, 7), "f": (8, 8), "a": (8, 7)}, shared_kib=99, **_NEWER),
    *_targets(121, {"": (8, 8), "f": (8, 8), "a": (8, 8)}, shared_kib=99, **_NEWER),
)}  # fmt: skip
DEFAULT_TARGET, DEFAULT_SCALED_TARGET = "sm_90a", "sm_100a"  # of functions and commands; with block scales
RENAMED_TARGETS = {"sm_101": "sm_110", "sm_101f": "sm_110f", "sm_101a": "sm_110a"}  # 9.7.14.5.15, Target ISA Notes


class GpuGeneration(NamedTuple):
    """The GPUs of one compute capability."""

    architecture: str  # name of the architecture, such as "Hopper"
    names: tuple[str, ...]  # product names


# GPUs by compute capability. Source: https://developer.nvidia.com/cuda-gpus; 7.0, 7.2: https://developer.nvidia.com/cuda-legacy-gpus.
# GPUs of 7.5 without tensor cores (GTX 16, T1000 and smaller) are left out. These names are not in NVIDIA's list: H20, whose 9.0 is from
# NVIDIA's MIG User Guide, Supported GPUs; Rubin, whose 10.7 is CUTLASS's; names of a product family, such as "Jetson Orin"; names of a
# machine, such as "Jetson Thor"; variants for a cloud, a country or a power limit, which have the chip of their neighbour here: H800,
# A800, A10G, A10M, T4G, V100S, L20, L2, RTX 4090 D, B100.
# The names of the architectures are from the CUDA Programming Guide; for Thor, from the MIG User Guide.
GPU_NAMES: dict[tuple[int, int], GpuGeneration] = {
    (7, 0): GpuGeneration("Volta", ("V100", "Quadro GV100", "TITAN V", "V100S")),
    (7, 2): GpuGeneration("Volta", ("Jetson AGX Xavier", "Jetson Xavier NX", "Jetson Xavier")),
    (7, 5): GpuGeneration("Turing", (
        "T4", "Quadro RTX 8000", "Quadro RTX 6000", "Quadro RTX 5000", "Quadro RTX 4000", "Quadro RTX 3000", "TITAN RTX",
        "GeForce RTX 2080 Ti", "GeForce RTX 2080", "GeForce RTX 2070", "GeForce RTX 2060", "T4G",
    )),
    (8, 0): GpuGeneration("Ampere", ("A100", "A30", "A800")),
    (8, 6): GpuGeneration("Ampere", (
        "A40", "A10", "A16", "A2", "A10G", "A10M", "RTX A6000", "RTX A5000", "RTX A4000", "RTX A3000", "RTX A2000",
        "GeForce RTX 3090 Ti", "GeForce RTX 3090", "GeForce RTX 3080 Ti", "GeForce RTX 3080", "GeForce RTX 3070 Ti", "GeForce RTX 3070",
        "GeForce RTX 3060 Ti", "GeForce RTX 3060", "GeForce RTX 3050 Ti", "GeForce RTX 3050",
    )),
    (8, 7): GpuGeneration("Ampere", ("Jetson AGX Orin", "Jetson Orin NX", "Jetson Orin Nano", "Jetson Orin")),
    (8, 9): GpuGeneration("Ada", (
        "L4", "L40", "L40S", "RTX 6000 Ada", "RTX 5000 Ada", "RTX 4500 Ada", "RTX 4000 Ada", "RTX 4000 SFF Ada", "RTX 2000 Ada",
        "GeForce RTX 4090", "GeForce RTX 4080", "GeForce RTX 4070 Ti", "GeForce RTX 4070", "GeForce RTX 4060 Ti", "GeForce RTX 4060",
        "GeForce RTX 4050", "L20", "L2", "GeForce RTX 4090 D",
    )),
    (9, 0): GpuGeneration("Hopper", ("H100", "H200", "GH200", "H20", "H800")),
    (10, 0): GpuGeneration("Blackwell", ("B200", "GB200", "B100")),
    (10, 3): GpuGeneration("Blackwell", ("B300", "GB300")),
    (10, 7): GpuGeneration("Rubin", ("Rubin", "Vera Rubin")),
    (11, 0): GpuGeneration("Blackwell", ("Jetson T5000", "Jetson T4000", "Jetson Thor", "Jetson AGX Thor")),
    (12, 0): GpuGeneration("Blackwell", (
        "RTX PRO 6000 Blackwell", "RTX PRO 5000 Blackwell", "RTX PRO 4500 Blackwell", "RTX PRO 4000 Blackwell", "RTX PRO 2000 Blackwell",
        "GeForce RTX 5090", "GeForce RTX 5080", "GeForce RTX 5070 Ti", "GeForce RTX 5070", "GeForce RTX 5060 Ti", "GeForce RTX 5060",
        "GeForce RTX 5050",
    )),
    (12, 1): GpuGeneration("Blackwell", ("GB10", "DGX Spark")),
}  # fmt: skip
# words that drivers and shops add to a product's name, as in "NVIDIA H100 80GB HBM3" or "Tesla V100-SXM2-16GB"
_IGNORED_WORDS = (
    r"nvidia|tesla|gpu|architecture|generation|edition|server|workstation|max|q|sff|laptop|lovelace|grace|super|"
    r"\d+gb|sxm\d?|pcie|nvl\d*|hbm\w*"
)
# Accelerators without the tensor cores of tcemu, by a pattern of their names in lower case, without the words above
_OTHER_ACCELERATORS = (
    (r"(apple )?m[1-5]( (pro|ultra|max))?|apple.*", "is made by Apple"),
    (r"(sm|compute|cc|compute capability)?[ _]?[1-6]\.?\d", "is older than Volta and has no tensor cores"),
    (r"[kmp]\d{1,3}\w?( \w+)?|kepler|maxwell|pascal|titan (x|xp|black|z)", "is older than Volta and has no tensor cores"),
    (r"quadro ([kmp]\d+\w?|gp100)", "is older than Volta and has no tensor cores"),
    (r"(geforce )?(gtx|gt|mx|gts) ?\d+.*|t(400|500|550|600|1000|1200)", "has no tensor cores"),
    (r"(amd )?(instinct )?mi ?\d+\w*|(amd )?(instinct|radeon).*|(amd )?rx ?\d+.*|gfx\d\w+|cdna ?\d*|rdna ?\d*", "is made by AMD"),
    (r"(intel )?(gaudi|arc|ponte|data center|xe|max \d+).*", "is made by Intel"),
    (r"(google )?(cloud )?tpu.*|v[2-7][ep]?|trillium|ironwood", "is made by Google"),
    (r"(aws )?(trainium|inferentia).*|trn\d.*|inf\d.*", "is made by Amazon"),
)
_BRANDS = ("geforce", "quadro", "jetson", "ada", "blackwell")  # words of a product's name that people leave out


def capability_target(major: int, minor: int) -> str:
    """Return the target with the most instructions for a compute capability, such as "sm_90a" for 9.0.

    Args:
        major: Major number of the compute capability.
        minor: Minor number of the compute capability.

    Raises:
        Unsupported: The compute capability is unknown.
    """
    names = [name for name in (f"sm_{major}{minor}a", f"sm_{major}{minor}") if name in TARGETS]
    if not names:
        raise Unsupported(f"gpu: unknown compute capability sm_{major}{minor}; tcemu knows {', '.join(TARGETS)}")
    return names[0]


def gpus() -> dict[str, str]:
    """Return the target of every GPU that tcemu knows by name: {"V100": "sm_70", ..., "H100": "sm_90a", ...}.

    Every argument `target` accepts these names. Upper and lower case, spaces, hyphens and underscores make no difference. Words such as
    "NVIDIA", "GeForce" or "80GB" may be added or left out. The name of an architecture, such as "Hopper", is accepted if all its GPUs have
    the same target. So is a compute capability, such as "9.0", and an architecture of nvcc, such as "compute_90".

    Source: NVIDIA's list of compute capabilities, developer.nvidia.com/cuda-gpus.
    """
    return {name: capability_target(*capability) for capability, products in GPU_NAMES.items() for name in products.names}


def resolve_target(name: str) -> str:
    """Return the target that a name means: "sm_90a" for itself and for "H100", "h200", "NVIDIA GH200 480GB" or "Hopper".

    Machines of other makers have targets too: "MI300X" is "gfx942" (`tcemu.engine.isa.other_makers`).

    Args:
        name: Target, GPU or architecture.

    Raises:
        Unsupported: The name is unknown, or it may mean several targets. The message lists the nearest names or the targets.
        TypeError: `name` is no string.
    """
    if not isinstance(name, str):
        raise TypeError(f"target: expected a string such as 'sm_90a' or 'H100', got {type(name).__name__}")
    return name if name in TARGETS or name in OTHER_TARGETS else _resolve_gpu_name(name)


def library_unit(target: str) -> str:
    """Return the unit by which libraries multiply on a target: "mma", "wgmma" or "tcgen05"; "" for another maker's machine.

    Args:
        target: Target, as `resolve_target` returns it.

    Source: CUTLASS and cuBLAS use wgmma on sm_90a and tcgen05 wherever PTX has it.
    """
    return TARGETS[target].library_unit if target in TARGETS else ""


Meanings = dict[str, list[str]]  # GPUs with a name, by the target that the name may mean


@cache
def _gpu_names() -> dict[str, Meanings]:
    """Return the meanings of every normalised name. A GPU's full name has no other meaning."""
    full: dict[str, Meanings] = {_normalized(target): {target: []} for target in TARGETS}
    short: dict[str, Meanings] = {}
    for capability, products in GPU_NAMES.items():
        target = capability_target(*capability)
        for name in products.names:
            full.setdefault(_normalized(name), {}).setdefault(target, []).append(name)
            for alias in (_without_brand(name), products.architecture):
                short.setdefault(_normalized(alias), {}).setdefault(target, []).append(name)
    return short | full


def _words(name: str) -> list[str]:
    return [word for word in split(r"[\s_-]+", name.lower()) if word]


def _normalized(name: str) -> str:
    """Return a name in lower case without spaces, hyphens and underscores: "RTX-4090 " -> "rtx4090"."""
    return "".join(_words(name))


def _without_brand(name: str) -> str:
    return " ".join(word for word in _words(name) if word not in _BRANDS)


def _resolve_gpu_name(name: str) -> str:
    """Return the target of a GPU's or an architecture's name, or of a target in another spelling."""
    if other_target := find_other_target(name):
        return other_target
    text = " ".join(_words(name[:200]))
    bare_name = " ".join(word for word in text.split() if not fullmatch(_IGNORED_WORDS, word))
    if target := _capability_name(bare_name):
        return target
    for key in (_normalized(bare_name), _normalized(_without_brand(bare_name))):
        meanings = _gpu_names().get(key, {})
        if len(meanings) == 1:
            return next(iter(meanings))
        if meanings:
            choices = [f"{target} ({', '.join(names[:3])}{', ...' if names[3:] else ''})" for target, names in meanings.items()]
            raise Unsupported(f"target {shorten_text(name)!r}: this may be {' or '.join(choices)}; say which")
    other = next((what for pattern, what in _OTHER_ACCELERATORS if any(fullmatch(pattern, given) for given in (text, bare_name))), None)
    if name in RENAMED_TARGETS:
        hint = f"; {name} is {RENAMED_TARGETS[name]} since PTX ISA 9.0"
    elif other is not None:
        hint = f": {shorten_text(name)} {other}. tcemu has the tensor cores of NVIDIA GPUs from Volta (V100) on, and {_other_names()}"
    else:
        hint = _suggestion(bare_name)
    raise Unsupported(
        f"unknown target {shorten_text(name)!r}{hint}; tcemu knows GPUs by name, such as H100 (tcemu list --gpus), compute capabilities, "
        f"such as 9.0, and the targets {', '.join(TARGETS)}"
    )


def _other_names() -> str:
    """Lists the first name of every machine of another maker."""
    return ", ".join(machine.names[0] for machine in OTHER_TARGETS.values())


def _capability_name(name: str) -> str | None:
    """Return the target of a compute capability, such as "9.0" or "cc 8.9", or of an architecture of nvcc, such as "compute_90"."""
    if match := fullmatch(r"(?:cc|sm|compute(?: capability)?)? ?(\d{1,2})\.(\d)", name):
        major, minor = int(match[1]), int(match[2])
        return capability_target(major, minor) if f"sm_{major}{minor}" in TARGETS else None
    if match := fullmatch(r"compute ?(\d+[af]?)", name):
        return f"sm_{match[1]}" if f"sm_{match[1]}" in TARGETS else None
    return None


def _suggestion(unknown: str) -> str:
    """Return the names nearest to an unknown one, as part of the error message.

    The result is "" if no name is near, and for an unknown "sm_...", since the message lists all targets.
    """
    if fullmatch(r"sm ?\d.*", unknown):
        return ""
    simplify = lambda name: _normalized(name).replace("o", "0")
    names = {simplify(_without_brand(name)): name for name in gpus()}
    names |= {simplify(name): name for name in (*gpus(), *(products.architecture for products in GPU_NAMES.values()))}
    near = dict.fromkeys(names[key] for key in get_close_matches(simplify(unknown), names, n=3, cutoff=0.6))
    return f", did you mean {' or '.join(near)}?" if near else ""
