"""Profiles: kernel recipes that a survey of a GPU found shape by shape, shipped as files, and a policy that applies them.

A file of the folder `measured` is JSON in xz, made from surveys by `benchmarks/replay_distil.py`. It has the library, its version, the
GPU, the date, and for each shape the recipe with the number of outputs on which the GPU's bits were the recipe's. Shapes that were not
measured are refused, unless a prediction by `tcemu.uses.replay.predicted_orders` is requested.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np

from tcemu.base.errors import NotModelled
from tcemu.base.saved_files import DamagedFile, check_members, check_saved, decompress_json
from tcemu.engine.architectures.lookup import resolve_arithmetic
from tcemu.engine.formats.number_formats import ARRAY_FORMATS, F32
from tcemu.operations.functional.torch_cuda.product_kernels import nvjet_slices
from tcemu.operations.products.dot_general import DotGeneral
from tcemu.operations.products.library.kernel_json import from_dict
from tcemu.operations.products.library.kernel_recipe import KernelRecipe, Merge, Steps
from tcemu.operations.products.recipe_json import recipe_from_dict, recipe_to_dict
from tcemu.operations.products.recipes import Recipe, as_recipe
from tcemu.uses.emulation.decisions import Choice
from tcemu.uses.emulation.survey import Product
from tcemu.uses.replay.kernel_choices import TILE, ChoiceOrder, choice_order, list_proposals, proposed_orders
from tcemu.uses.replay.predicted_orders import PROPOSED, OrderRules, RuleCount, predict_order, shipped_rules

MEASURED = Path(__file__).parent / "measured"
PROFILE_KIND, PROFILE_VERSION = "tcemu replay profile", 1
PROFILE_FIELDS = ("library", "library_version", "gpu", "sm_count", "date", "recipes", "shapes")
MIN_PROBABILITY = 0.98
DEFAULT_GPU = "NVIDIA H200"
Shape = tuple[int, int, int]  # m, n, k


class Profile(NamedTuple):
    """The measurements of one library on one GPU."""

    library: str  # name in the survey: "torch-f16", "jax-bf16", ...
    version: str
    gpu: str
    sm_count: int
    date: str
    recipes: tuple[dict[str, Any], ...]  # without conditions on M and N
    shapes: dict[Shape, tuple[int, int]]  # index of the recipe, and number of compared outputs, all equal

    def __repr__(self) -> str:
        where = f"{self.version}, on {self.gpu}, {self.date}"
        return f"<Profile of {self.library}, {where}: {len(self.recipes)} recipes, {len(self.shapes)} shapes>"

    def kernel_recipe(self, shape: Shape) -> KernelRecipe:
        """Return the recipe of a measured shape.

        Args:
            shape: M, N and K.

        Returns:
            The recipe, with its conditions and evidence.

        Raises:
            KeyError: The shape was not measured.
        """
        number, outputs = self.shapes[shape]
        m, n, _ = shape
        stored = self.recipes[number]
        conditions = stored["conditions"] | {"m": m, "n": n, "evidence": f"{outputs:,} outputs on {self.date}, 0 different"}
        return from_dict(stored | {"conditions": conditions})


def read_profile(content: bytes) -> Profile:
    """Read the contents of a profile's file. Raises DamagedFile, a ValueError, if it is not a profile."""
    try:
        return _profile_from_dict(decompress_json(content))
    except DamagedFile as error:
        raise DamagedFile(f"this is not a profile: {error}") from None


def _profile_from_dict(data: Any) -> Profile:
    """Convert the plain values of a profile's file. A recipe's own fields are checked when it is asked for. Raises DamagedFile."""
    members = check_saved("a profile", data, PROFILE_KIND, PROFILE_VERSION, PROFILE_FIELDS)
    texts = [members[name] for name in ("library", "library_version", "gpu", "date")]
    if not all(isinstance(text, str) for text in texts):
        raise DamagedFile(f"library, library_version, gpu and date: got {str(texts)[:80]}; expected text")
    recipes, shapes = members["recipes"], members["shapes"]
    if not isinstance(recipes, list) or not all(isinstance(each, dict) and isinstance(each.get("conditions"), dict) for each in recipes):
        raise DamagedFile(f"recipes: got {str(recipes)[:80]}; expected a list of kernel recipes")
    rows = [members["sm_count"]], *(shapes if isinstance(shapes, list) else [None])
    for row in rows:
        if not isinstance(row, list) or not all(type(number) is int and number >= 0 for number in row):
            raise DamagedFile(f"sm_count and shapes: got {str(row)[:80]}; expected integers from 0, for a shape m, n, k, recipe, outputs")
    if odd := [row for row in shapes if len(row) != 5 or row[3] >= len(recipes)]:
        raise DamagedFile(f"shapes: got {str(odd[0])[:80]}; expected m, n, k, the number of one of {len(recipes)} recipes, outputs")
    library, version, gpu, date = texts
    found = {(m, n, k): (number, outputs) for m, n, k, number, outputs in shapes}
    return Profile(library, version, gpu, members["sm_count"], date, tuple(recipes), found)


@lru_cache(maxsize=1)
def list_profiles() -> tuple[Profile, ...]:
    """List all shipped profiles.

    Returns:
        The profiles.
    """
    return tuple(read_profile(path.read_bytes()) for path in sorted(MEASURED.glob("*.json.xz")))


def get_kernel_recipe(
    library: str,
    m: int,
    n: int,
    k: int,
    *,
    version: str | None = None,
    gpu: str | None = None,
    predicted: bool = False,
    min_probability: float = MIN_PROBABILITY,
) -> KernelRecipe:
    """Return the kernel recipe of a library's product of one shape, as measured on a GPU.

    A library takes another kernel for another shape, so nothing is interpolated. With `predicted`, a shape that was not measured gets the
    order that a rule predicts, marked as such.

    Args:
        library: Name in `list_profiles()`, such as "torch-f16".
        m: Rows of A.
        n: Columns of B.
        k: Columns of A.
        version: Part of the library's version. None: the only one.
        gpu: Part of the GPU's name, "H100" or "H200". None: the H200, where it was measured.
        predicted: Predict the order of a shape that was not measured. The conditions of the recipe then have a `probability`.
        min_probability: Predictions with a lower probability are refused.

    Returns:
        The recipe.

    Raises:
        NotModelled: The library or the shape was not measured, and is not predicted. The message names what was measured.
        ValueError: Several profiles match.
    """
    if not predicted:
        return find_kernel_recipe(list_profiles(), library, (m, n, k), version, gpu)
    profile = find_profile(list_profiles(), library, version, gpu)
    return likely_recipe(profile, (m, n, k), min_probability)


def find_kernel_recipe(known: tuple[Profile, ...], library: str, shape: Shape, version: str | None, gpu: str | None) -> KernelRecipe:
    """Find a recipe among these profiles; see `get_kernel_recipe`."""
    return measured_recipe(find_profile(known, library, version, gpu), shape)


def find_profile(known: tuple[Profile, ...], library: str, version: str | None, gpu: str | None) -> Profile:
    """Find the one matching profile, that of `DEFAULT_GPU` where no GPU is given. Raises as `get_kernel_recipe`."""
    matching = [p for p in known if p.library == library and (version or "") in p.version and (gpu or "") in p.gpu]
    request = " ".join(filter(None, (library, version, gpu)))
    if not matching:
        available = ", ".join(sorted({f"{p.library} ({p.version}, {p.gpu})" for p in known})) or "none"
        raise NotModelled(f"no profile of {request}; there are {available}. tcemu.replay.fingerprint measures a library that is here")
    if gpu is None:
        matching = [p for p in matching if p.gpu == DEFAULT_GPU] or matching
    if len(matching) > 1:
        raise ValueError(f"{request} means {' and '.join(f'{p.version} on {p.gpu}' for p in matching)}; give version= or gpu=")
    return matching[0]


def measured_recipe(profile: Profile, shape: Shape) -> KernelRecipe:
    """Return the recipe of a shape of this profile. Raises NotModelled if the shape was not measured."""
    if shape in profile.shapes:
        return profile.kernel_recipe(shape)
    near = sorted(profile.shapes, key=lambda other: _shape_distance(other, shape))[:3]
    raise NotModelled(
        f"{profile.library}: {' x '.join(map(str, shape))} was not measured on {profile.gpu} ({len(profile.shapes)} shapes were; near it "
        f"{', '.join(' x '.join(map(str, s)) for s in near)}), and a library may take another kernel for each shape. "
        "tcemu.replay.fingerprint measures it where that GPU is"
    )


def likely_recipe(profile: Profile, shape: Shape, min_probability: float) -> KernelRecipe:
    """Return the measured recipe of a shape, else the predicted one. Raises NotModelled if there is neither."""
    if shape in profile.shapes:
        return profile.kernel_recipe(shape)
    try:
        recipe = proposed_recipe(profile, shape) or predict_recipe(profile, shape)
    except NotModelled as error:
        raise NotModelled(f"{profile.library}: {' x '.join(map(str, shape))} was not measured on {profile.gpu}; {error}") from None
    probability = recipe.conditions.probability
    if probability is None or probability < min_probability:
        raise NotModelled(
            f"{profile.library}: {' x '.join(map(str, shape))} was not measured on {profile.gpu}, and its order is predicted with a "
            f"probability of {probability:.3f} only; min_probability={min_probability}"
        )
    return recipe


def predict_recipe(profile: Profile, shape: Shape, rules: OrderRules | None = None) -> KernelRecipe:
    """Predict the recipe of a shape by a rule, whether or not the shape was measured. Raises NotModelled if no rule covers it."""
    prediction, probability = predict_order(profile.library, shape, profile.sm_count, rules)
    evidence = f"predicted with a probability of {probability:.5f} by the rule {prediction.rule!r}: {prediction.why}"
    return _recipe_of_order(profile, shape, prediction.order, evidence, probability)


def proposed_recipe(profile: Profile, shape: Shape, rules: OrderRules | None = None) -> KernelRecipe | None:
    """Return the recipe of the kernel that cuBLASLt proposed for a shape on the profile's GPU; None where none is known."""
    m, n, k = shape
    curves = proposed_orders()
    form = f"{profile.library.removeprefix('torch-')}-rr"
    kind, *count = (curves.find(form, m, n, k) if curves.gpu == profile.gpu else None) or [""]
    if kind in ("nvjet", "nvjet cut"):
        probability = RuleCount(*curves.launched).probability
        evidence = f"predicted with a probability of {probability:.5f}: {curves.library} proposed it on {curves.date}"
        order = ChoiceOrder(nvjet_slices(k, *(count or [1]), TILE), Merge(), "nvjet")
        return _recipe_of_order(profile, shape, order, evidence, probability)
    proposals = list_proposals()
    choice = proposals.libraries.get(profile.library, {}).get(shape) if proposals.gpu == profile.gpu else None
    order = choice_order(profile.library, shape[2], choice) if choice is not None else None
    if choice is None or order is None:
        return None
    rules = shipped_rules() if rules is None else rules
    probability = rules.counts[PROPOSED.format(order.kernels)].probability
    words = f"algorithm {choice.algorithm}, stages {choice.stages}, {choice.split_k} slices"
    evidence = f"predicted with a probability of {probability:.5f}: cuBLASLt proposed {words} on {proposals.date}, and nothing was launched"
    return _recipe_of_order(profile, shape, order, evidence, probability)


def _recipe_of_order(profile: Profile, shape: Shape, order: ChoiceOrder, evidence: str, probability: float) -> KernelRecipe:
    template = _template(profile.library, profile.gpu, profile.version)
    m, n, _ = shape
    conditions = replace(template.conditions, m=m, n=n, evidence=evidence, probability=probability)
    recipe = template.replace(slices=order.slices, merge=order.merge, conditions=conditions)
    if order.lanes is not None:
        return recipe.replace(a=F32, b=F32, unit=order.lanes)
    assert isinstance(template.unit, Steps)
    target = template.unit.target
    unit = template.unit if order.op is None else Steps(resolve_arithmetic(order.op, target).op, target)
    return recipe.replace(unit=replace(unit, residue=order.residue))


@lru_cache(maxsize=64)
def _template(library: str, gpu: str, version: str) -> KernelRecipe:
    """Return a measured recipe of one slice by a tensor core without a residue."""
    profile = find_profile(list_profiles(), library, version, gpu)
    is_chain = lambda recipe: (
        len(recipe["slices"]["edges"]) == 2
        and recipe["slices"]["dropped"] == 0
        and recipe["unit"].get("steps", {"residue": 0})["residue"] is None
        and recipe["unit"]["steps"]["op"].startswith("wgmma")
    )
    chains = {number for number, recipe in enumerate(profile.recipes) if is_chain(recipe)}
    return profile.kernel_recipe(max((s for s in profile.shapes if profile.shapes[s][0] in chains), key=lambda s: s[2]))


def _shape_distance(shape: Shape, other: Shape) -> int:
    return sum(abs(x.bit_length() - y.bit_length()) + (x != y) for x, y in zip(shape, other, strict=True))


# ---- policies


@dataclass(frozen=True, eq=False)
class ShapePolicy:
    """A policy that chooses the measured kernel recipe by shape; see `library_policy`."""

    profile: Profile
    missing: Recipe | None
    refuse_missing: bool  # products that were not measured, and are not predicted, raise
    min_probability: float | None = None  # predictions that are used; None: none is

    def __call__(self, product: Product) -> Choice:
        if not (product.is_float and product.is_contraction):
            return None
        try:
            (m, n, k), recipe = self._find(product)
        except NotModelled as error:
            if self.refuse_missing:
                raise NotModelled(
                    f"{product}: {error}. replay.library_policy(..., missing=None) leaves such a product, "
                    "missing=RECIPE computes it by that recipe, missing='predicted' by a predicted order"
                ) from None
            return self.missing
        mark = "" if recipe.conditions.probability is None else " PREDICTED"
        return DotGeneral(recipe, name=f"{self.profile.library} {m} x {n} x {k}{mark}")

    def note(self, product: Product) -> str:
        """Return "" for a product that was measured or predicted, and why it has no order otherwise, for reports."""
        if not (product.is_float and product.is_contraction):
            return "not of real floats, or nothing is summed"
        try:
            self._find(product)
        except NotModelled:
            return f"not measured for {self.profile.library}" + ("" if self.min_probability is None else ", and not predicted")
        return ""

    def _find(self, product: Product) -> tuple[Shape, KernelRecipe]:
        """Return M, N and K, and the recipe. The leading axes of A are rows of one product.

        Raises:
            NotModelled: The product is of another kind than the profile's, or its shape has no recipe.
        """
        library, numbers = self.profile.library, product.dimension_numbers
        *rows, k = product.lhs_shape or (0,)
        rows_by_columns = (((len(rows),), (0,)), ((), ()))  # A [..., K] times B [K, N]
        if product.primitive != "dot_general" or numbers != rows_by_columns or len(product.rhs_shape) != 2:
            raise NotModelled(f"{library} was measured for A [..., K] times B [K, N], and this product has other axes")
        recipe = self.profile.kernel_recipe(next(iter(self.profile.shapes)))
        formats = tuple(ARRAY_FORMATS.get(np.dtype(dtype)) for dtype in (product.lhs_dtype, product.rhs_dtype, product.dtype))
        if formats != (recipe.a, recipe.b, recipe.dtype):
            raise NotModelled(f"{library} was measured for {recipe.a} x {recipe.b} -> {recipe.dtype}")
        shape = prod(rows), product.rhs_shape[1], k
        least = self.min_probability
        return shape, measured_recipe(self.profile, shape) if least is None else likely_recipe(self.profile, shape, least)

    def __repr__(self) -> str:
        predicted = "" if self.min_probability is None else ", predicted=True"
        return f"library_policy({self.profile.library!r}, gpu={self.profile.gpu!r}{predicted})"

    saved_kind = "library_policy"

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of `library_policy` as plain values, for `tcemu.policies.to_json`."""
        missing = "refuse" if self.refuse_missing else None if self.missing is None else recipe_to_dict(self.missing)
        saved = {"library": self.profile.library, "library_version": self.profile.version, "gpu": self.profile.gpu, "missing": missing}
        return saved if self.min_probability is None else saved | {"min_probability": self.min_probability}


def library_policy(
    library: str,
    *,
    version: str | None = None,
    gpu: str | None = None,
    missing: Recipe | str | EllipsisType | None = ...,
    predicted: bool = False,
    min_probability: float = MIN_PROBABILITY,
) -> ShapePolicy:
    """Return a policy for `tcemu.emulate` that computes each product as a library's kernel for that shape, as measured on a GPU.

    The policy knows products A [..., K] times B [K, N] in the measured formats. The leading axes of A are rows of one product, as
    libraries compute a linear layer of [batch, time, features]. Products of other than real floats, and
    products that sum nothing, stay unchanged. The library was measured call by call with both matrices in row-major order. A compiler
    that fuses a product with its surroundings, or tries several kernels, may take another kernel. Gradients are those of the product in
    plain f32, as in `tcemu.matmul` with a kernel recipe.

    Args:
        library: As in `tcemu.replay.get_kernel_recipe`.
        version: As in `tcemu.replay.get_kernel_recipe`.
        gpu: As in `tcemu.replay.get_kernel_recipe`.
        missing: Recipe, or its name, for products that were not measured. None leaves these unchanged. Reports say of either that the
            product was not measured. Without it, such a product raises. "predicted" is short for predicted=True without `missing`.
        predicted: Products that were not measured get the order that a rule predicts, as in `tcemu.replay.get_kernel_recipe`. Reports
            name them PREDICTED, with the probability. `missing` is then for products that are not predicted either.
        min_probability: As in `tcemu.replay.get_kernel_recipe`.

    Returns:
        The policy. It raises NotModelled for a product that was not measured, and is not predicted, unless `missing` is given.

    Raises:
        NotModelled: The library was not measured, or was measured with scales or a bias.
        ValueError: Several profiles match, or `missing` names no recipe.
    """
    profile = find_profile(list_profiles(), library, version, gpu)
    conditions = profile.kernel_recipe(next(iter(profile.shapes))).conditions
    if conditions.scales is not None or conditions.bias is not None:
        epilogue = " and ".join(
            filter(None, (conditions.scales and f"scales ({conditions.scales})", conditions.bias and f"a bias ({conditions.bias})"))
        )
        raise NotModelled(
            f"{library} was measured with {epilogue}, and the products of a program have none. replay.get_kernel_recipe({library!r}, m, n, "
            "k) is for tcemu.matmul, which takes them"
        )
    if missing == "predicted":
        missing, predicted = ..., True
    least = min_probability if predicted else None
    if missing is ...:
        return ShapePolicy(profile, None, refuse_missing=True, min_probability=least)
    return ShapePolicy(profile, as_recipe(missing) if isinstance(missing, str) else missing, refuse_missing=False, min_probability=least)


def policy_from_dict(data: Any) -> ShapePolicy:
    """Convert the plain values of `ShapePolicy.to_dict` to their policy. Raises as `library_policy`, and DamagedFile."""
    later = ("min_probability",) if isinstance(data, dict) and "min_probability" in data else ()
    members = check_members("library_policy", data, ("library", "library_version", "gpu", "missing", *later))
    names = [members[name] for name in ("library", "library_version", "gpu")]
    if not all(isinstance(name, str) for name in names):
        raise DamagedFile(f"library_policy: got {str(names)[:80]}; expected text")
    library, version, gpu = names
    saved = members["missing"]
    missing = ... if saved == "refuse" else None if saved is None else recipe_from_dict(Recipe, saved)
    least = members.get("min_probability")
    if least is None:
        return library_policy(library, version=version, gpu=gpu, missing=missing)
    if not isinstance(least, float):
        raise DamagedFile(f"library_policy: min_probability is {str(least)[:80]}; expected a number")
    return library_policy(library, version=version, gpu=gpu, missing=missing, predicted=True, min_probability=least)
