"""Profiles: the kernel recipes that a survey of a GPU found, shape by shape, shipped as files. What was not measured is refused.

A file of the folder `measured` is JSON in xz, made from surveys by `benchmarks/replay_distil.py`: which library, version and GPU,
the date, and for each shape its recipe, with the outputs on which the GPU's words were the recipe's.
"""

from __future__ import annotations

import json
import lzma
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tcemu.errors import NotModelled
from tcemu.linalg.kernel_json import from_dict
from tcemu.linalg.kernel_recipes import KernelRecipe

MEASURED = Path(__file__).parent / "measured"
KIND, VERSION = "tcemu replay profile", 1
FIELDS = ("kind", "version", "library", "library_version", "gpu", "sm_count", "date", "recipes", "shapes")
Shape = tuple[int, int, int]  # m, n, k


class Profile(NamedTuple):
    """What was measured of one library on one GPU."""

    library: str  # as the survey calls it: "torch-f16", "jax-bf16", ...
    version: str
    gpu: str
    sm_count: int
    date: str
    recipes: tuple[dict[str, Any], ...]  # without their conditions on M and N
    shapes: dict[Shape, tuple[int, int]]  # -> the number of its recipe, and outputs that were compared, all equal

    def recipe(self, shape: Shape) -> KernelRecipe:
        """The recipe of a shape that was measured. Raises KeyError for another."""
        number, outputs = self.shapes[shape]
        m, n, _ = shape
        held = self.recipes[number]
        conditions = held["conditions"] | {"m": m, "n": n, "evidence": f"{outputs:,} outputs on {self.date}, 0 different"}
        return from_dict(held | {"conditions": conditions})


def read_profile(content: bytes) -> Profile:
    """A profile from its file. Raises ValueError for what is none."""
    try:
        held = json.loads(lzma.decompress(content))
    except (lzma.LZMAError, ValueError, RecursionError) as error:
        raise ValueError(f"this is no profile: {error}") from None
    if not isinstance(held, dict) or set(held) != set(FIELDS) or (held["kind"], held["version"]) != (KIND, VERSION):
        raise ValueError(f"this is no profile: wanted {KIND!r}, version {VERSION}, with {', '.join(FIELDS)}")
    recipes = tuple(held["recipes"])
    shapes = {(m, n, k): (number, outputs) for m, n, k, number, outputs in held["shapes"]}
    if any(not 0 <= number < len(recipes) for number, _ in shapes.values()):
        raise ValueError("this is no profile: a shape names a recipe that is not there")
    return Profile(held["library"], held["library_version"], held["gpu"], held["sm_count"], held["date"], recipes, shapes)


@lru_cache(maxsize=1)
def profiles() -> tuple[Profile, ...]:
    """All profiles that are shipped."""
    return tuple(read_profile(path.read_bytes()) for path in sorted(MEASURED.glob("*.json.xz")))


def recipe(library: str, m: int, n: int, k: int, *, version: str | None = None, gpu: str | None = None) -> KernelRecipe:
    """The kernel recipe of a library's product of one shape, as it was measured on a GPU.

    library: as `profiles()` names them, "torch-f16" and others. version, gpu: parts of their names; None: the only one.
    A library takes another kernel for another shape, so nothing is interpolated.
    Raises NotModelled for what was not measured, with what was; ValueError where several profiles are meant.
    """
    return recipe_of(profiles(), library, (m, n, k), version, gpu)


def recipe_of(known: tuple[Profile, ...], library: str, shape: Shape, version: str | None, gpu: str | None) -> KernelRecipe:
    """`recipe`, from these profiles."""
    return measured(profile_of(known, library, version, gpu), shape)


def profile_of(known: tuple[Profile, ...], library: str, version: str | None, gpu: str | None) -> Profile:
    """The one of these profiles that is meant. Raises as `recipe`."""
    own = [p for p in known if p.library == library and (version or "") in p.version and (gpu or "") in p.gpu]
    asked = " ".join(filter(None, (library, version, gpu)))
    if not own:
        there = ", ".join(sorted({f"{p.library} ({p.version}, {p.gpu})" for p in known})) or "none"
        raise NotModelled(f"no profile of {asked}; there are {there}. tcemu.replay.fingerprint measures a library that is here")
    if len(own) > 1:
        raise ValueError(f"{asked} means {' and '.join(f'{p.version} on {p.gpu}' for p in own)}; give version= or gpu=")
    return own[0]


def measured(profile: Profile, shape: Shape) -> KernelRecipe:
    """The recipe of a shape, from this profile. Raises NotModelled for one that was not measured."""
    if shape in profile.shapes:
        return profile.recipe(shape)
    near = sorted(profile.shapes, key=lambda other: _apart(other, shape))[:3]
    raise NotModelled(
        f"{profile.library}: {' x '.join(map(str, shape))} was not measured on {profile.gpu} ({len(profile.shapes)} shapes were; near it "
        f"{', '.join(' x '.join(map(str, s)) for s in near)}), and a library may take another kernel for each shape. "
        "tcemu.replay.fingerprint measures it where that GPU is"
    )


def _apart(one: Shape, other: Shape) -> int:
    return sum(abs(x.bit_length() - y.bit_length()) + (x != y) for x, y in zip(one, other, strict=True))
