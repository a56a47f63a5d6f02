"""The targets, and the names by which people know the GPUs that have them.

`named_target` is the one place where a name becomes a target: "H100", "h200" and "sm_90a" are all "sm_90a".

To add a GPU of a known target: its name in `PRODUCTS`. To add a target: a line in `TARGETS`, and its GPUs in `PRODUCTS`.
"""

from difflib import get_close_matches
from functools import cache
from re import fullmatch, split
from typing import NamedTuple

from tcemu.errors import Unsupported
from tcemu.isa.diagnosis import shown
from tcemu.isa.syntax import Version

# The targets, and the PTX ISA version that came with each: the notes of .target, to which the assembler holds. "a": features of this
# architecture alone; "f": features of its family, from PTX ISA 8.8 on
TARGETS: dict[str, Version] = {
    "sm_70": (6, 0), "sm_72": (6, 1), "sm_75": (6, 3), "sm_80": (7, 0), "sm_86": (7, 1), "sm_87": (7, 4), "sm_88": (9, 0), "sm_89": (7, 8),
    "sm_90": (7, 8), "sm_90a": (8, 0),
    "sm_100": (8, 6), "sm_100f": (8, 8), "sm_100a": (8, 6), "sm_103": (8, 8), "sm_103f": (8, 8), "sm_103a": (8, 8),
    "sm_110": (9, 0), "sm_110f": (9, 0), "sm_110a": (9, 0),
    "sm_120": (8, 7), "sm_120f": (8, 8), "sm_120a": (8, 7), "sm_121": (8, 8), "sm_121f": (8, 8), "sm_121a": (8, 8),
}  # fmt: skip
RENAMED = {"sm_101": "sm_110", "sm_101f": "sm_110f", "sm_101a": "sm_110a"}  # 9.7.14.5.15, Target ISA Notes


class Products(NamedTuple):
    """The GPUs of one compute capability."""

    architecture: str
    names: tuple[str, ...]


# By compute capability, as NVIDIA lists it: https://developer.nvidia.com/cuda-gpus; 7.0, 7.2: https://developer.nvidia.com/cuda-legacy-gpus.
# GPUs of 7.5 without tensor cores (GTX 16, T1000 and smaller) are left out. Not in the list: H20, which
# has 9.0 by NVIDIA's MIG User Guide, Supported GPUs; and the names of a family, as "Jetson Orin", or of the machine, as "Jetson Thor".
# The architectures are those of the CUDA Programming Guide, and of the MIG User Guide for Thor.
PRODUCTS: dict[tuple[int, int], Products] = {
    (7, 0): Products("Volta", ("V100", "Quadro GV100", "TITAN V")),
    (7, 2): Products("Volta", ("Jetson AGX Xavier", "Jetson Xavier NX", "Jetson Xavier")),
    (7, 5): Products("Turing", (
        "T4", "Quadro RTX 8000", "Quadro RTX 6000", "Quadro RTX 5000", "Quadro RTX 4000", "Quadro RTX 3000", "TITAN RTX",
        "GeForce RTX 2080 Ti", "GeForce RTX 2080", "GeForce RTX 2070", "GeForce RTX 2060",
    )),
    (8, 0): Products("Ampere", ("A100", "A30")),
    (8, 6): Products("Ampere", (
        "A40", "A10", "A16", "A2", "RTX A6000", "RTX A5000", "RTX A4000", "RTX A3000", "RTX A2000",
        "GeForce RTX 3090 Ti", "GeForce RTX 3090", "GeForce RTX 3080 Ti", "GeForce RTX 3080", "GeForce RTX 3070 Ti", "GeForce RTX 3070",
        "GeForce RTX 3060 Ti", "GeForce RTX 3060", "GeForce RTX 3050 Ti", "GeForce RTX 3050",
    )),
    (8, 7): Products("Ampere", ("Jetson AGX Orin", "Jetson Orin NX", "Jetson Orin Nano", "Jetson Orin")),
    (8, 9): Products("Ada", (
        "L4", "L40", "L40S", "RTX 6000 Ada", "RTX 5000 Ada", "RTX 4500 Ada", "RTX 4000 Ada", "RTX 4000 SFF Ada", "RTX 2000 Ada",
        "GeForce RTX 4090", "GeForce RTX 4080", "GeForce RTX 4070 Ti", "GeForce RTX 4070", "GeForce RTX 4060 Ti", "GeForce RTX 4060",
        "GeForce RTX 4050",
    )),
    (9, 0): Products("Hopper", ("H100", "H200", "GH200", "H20")),
    (10, 0): Products("Blackwell", ("B200", "GB200")),
    (10, 3): Products("Blackwell", ("B300", "GB300")),
    (11, 0): Products("Blackwell", ("Jetson T5000", "Jetson T4000", "Jetson Thor", "Jetson AGX Thor")),
    (12, 0): Products("Blackwell", (
        "RTX PRO 6000 Blackwell", "RTX PRO 5000 Blackwell", "RTX PRO 4500 Blackwell", "RTX PRO 4000 Blackwell", "RTX PRO 2000 Blackwell",
        "GeForce RTX 5090", "GeForce RTX 5080", "GeForce RTX 5070 Ti", "GeForce RTX 5070", "GeForce RTX 5060 Ti", "GeForce RTX 5060",
        "GeForce RTX 5050",
    )),
    (12, 1): Products("Blackwell", ("GB10", "DGX Spark")),
}  # fmt: skip
# words around a product's name in what drivers and shops write, as "NVIDIA H100 80GB HBM3" or "Tesla V100-SXM2-16GB"
_AROUND = (
    r"nvidia|tesla|gpu|architecture|generation|edition|server|workstation|max|q|sff|laptop|lovelace|grace|super|"
    r"\d+gb|sxm\d?|pcie|nvl\d*|hbm\w*"
)
_BRANDS = ("geforce", "quadro", "jetson", "ada", "blackwell")  # words of a product's name that people leave out


def own_target(major: int, minor: int) -> str:
    """The target of a GPU of this compute capability that has most: "sm_90a" for 9.0. Raises Unsupported."""
    names = [name for name in (f"sm_{major}{minor}a", f"sm_{major}{minor}") if name in TARGETS]
    if not names:
        raise Unsupported(f"gpu: this one is sm_{major}{minor}, of which tcemu knows nothing; it knows {', '.join(TARGETS)}")
    return names[0]


def gpus() -> dict[str, str]:
    """The GPUs that tcemu knows by name, and the target of each: {"V100": "sm_70", ..., "H100": "sm_90a", ...}.

    Wherever a target is taken, these names are too. Upper and lower case, spaces, hyphens and underscores make no difference, and words
    such as "NVIDIA", "GeForce" or "80GB" may stand there or not. The name of an architecture, such as "Hopper", is taken where all its
    GPUs have one target.
    **Source:** NVIDIA's list of compute capabilities, developer.nvidia.com/cuda-gpus.
    """
    return {name: own_target(*capability) for capability, products in PRODUCTS.items() for name in products.names}


def named_target(name: str) -> str:
    """The target that a name means: "sm_90a" for itself and for "H100", "h200", "NVIDIA GH200 480GB" or "Hopper".

    Raises `Unsupported` for a name that tcemu does not know, with the nearest ones, and for one that means several targets, with these;
    `TypeError` for what is no string.
    """
    if not isinstance(name, str):
        raise TypeError(f"target: want a string such as 'sm_90a' or 'H100', got {type(name).__name__}")
    return name if name in TARGETS else _named(name)


Meant = dict[str, list[str]]  # the targets that a name may mean, and the GPUs of this name that have each


@cache
def _gpu_names() -> dict[str, Meant]:
    """Every name, squeezed, and what it may mean. What is a GPU's full name means nothing else."""
    full: dict[str, Meant] = {_squeezed(target): {target: []} for target in TARGETS}
    short: dict[str, Meant] = {}
    for capability, products in PRODUCTS.items():
        target = own_target(*capability)
        for name in products.names:
            full.setdefault(_squeezed(name), {}).setdefault(target, []).append(name)
            for less in (_without_brand(name), products.architecture):
                short.setdefault(_squeezed(less), {}).setdefault(target, []).append(name)
    return short | full


def _words(name: str) -> list[str]:
    return [word for word in split(r"[\s_-]+", name.lower()) if word]


def _squeezed(name: str) -> str:
    """Without what makes no difference: "RTX-4090 " -> "rtx4090"."""
    return "".join(_words(name))


def _without_brand(name: str) -> str:
    return " ".join(word for word in _words(name) if word not in _BRANDS)


def _named(name: str) -> str:
    """A name that is no target's own."""
    asked = " ".join(word for word in _words(name[:200]) if not fullmatch(_AROUND, word))
    for key in (_squeezed(asked), _squeezed(_without_brand(asked))):
        meant = _gpu_names().get(key, {})
        if len(meant) == 1:
            return next(iter(meant))
        if meant:
            choices = [f"{target} ({', '.join(names[:3])}{', ...' if names[3:] else ''})" for target, names in meant.items()]
            raise Unsupported(f"target {shown(name)!r}: this may be {' or '.join(choices)}; say which")
    renamed = f"; {name} is {RENAMED[name]} since PTX ISA 9.0" if name in RENAMED else _near(asked)
    raise Unsupported(
        f"unknown target {shown(name)!r}{renamed}; tcemu knows {', '.join(TARGETS)}, and GPUs by name, as H100 (tcemu list --gpus)"
    )


def _near(asked: str) -> str:
    """The names nearest to one that is none, as words of the error; "" if none is near, and for other targets, which are all listed."""
    if fullmatch(r"sm ?\d.*", asked):
        return ""
    alike = lambda name: _squeezed(name).replace("o", "0")  # noqa: E731
    spelled = {alike(_without_brand(name)): name for name in gpus()}
    spelled |= {alike(name): name for name in (*gpus(), *(products.architecture for products in PRODUCTS.values()))}
    near = dict.fromkeys(spelled[key] for key in get_close_matches(alike(asked), spelled, n=3, cutoff=0.6))
    return f", did you mean {' or '.join(near)}?" if near else ""
