"""Recipes: how a library multiplies matrices with one instruction. Quantisation, accumulation and output as one value, with gradients."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache, lru_cache
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from tcemu.architectures.evidence import Evidence
from tcemu.architectures.lookup import applied, must_compute, row_for, targets_of
from tcemu.arithmetic.model import Model
from tcemu.errors import NotModelled, Unsupported
from tcemu.formats import BF16, F16, F32, Format
from tcemu.isa.catalog import check, is_supported, section
from tcemu.isa.diagnosis import shown
from tcemu.isa.grammar import parse
from tcemu.isa.instructions import Instruction
from tcemu.isa.targets import TARGETS, named_target
from tcemu.linalg.accumulation import REDUCTIONS
from tcemu.linalg.recipe_rows import RECIPES, ROWS, UNSCALED, split_accumulator
from tcemu.operations.operands import signature_of
from tcemu.quantize.hadamard import Transform
from tcemu.quantize.operands import Quantizer, Scheme, is_count

BACKWARD = ("exact", "straight_through")
OUT = {str(fmt): fmt for fmt in (F32, F16, BF16)}
HADAMARD_BY = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Recipe:
    """How a matrix product is computed with one instruction: a frozen value that prints itself and hashes.

    op, target: the instruction, with results f32 or f16, as a spelling or an Instruction; and the GPU.
    unit: "tcgen05" for the fifth generation's tensor core. It has no instruction here; it takes operands of the types and blocks of `op`.
    model: another arithmetic; None: the target's own.
    a, b: how each operand is quantised.
    promote: None: sums stay in the instruction's accumulator; n: after every n instructions they are added to an f32 sum (see
        `tcemu.linalg.accumulation.sums_of_parts`). Blocks whose scales multiply outside the instruction need it; n * op.k must divide
        their depth.
    split_k: K in so many parts, each summed by itself; reduction: the order in which their f32 sums are added, "ascending" or "tree".
    out: the format that results are rounded to, f32, f16 or bf16, of `tcemu.formats` or by its name.
    backward: how the gradients' products are computed. "exact": from the quantised operands, in plain f32, rounding counted as identity.
        "straight_through": the same from the operands as they came. A Recipe, or a pair of them: dA = g·Bᵀ and dB = Aᵀ·g by these.
        The name of a recipe in use, as "bf16", is that recipe on this target.
    name, source: what it is called and where it comes from; they take no part in equality.

    Outside the instruction all is f32, each operation rounded to nearest even, in this order: D = scale_a·scale_b · sum (NVFP4: the two
    tensor scales' product), D + bias, then out.
    A recipe is a pytree. The model's fields and promote may be arrays, which are its leaves, traced and swept by `jax.vmap`; it then has
    no hash. A traced promote below 1, or with an n * op.k that does not divide the depth of the blocks, makes every result NaN; in
    `tcemu.checked` functions it raises UndefinedBehaviour.
    Raises Unsupported, NotModelled, TypeError and ValueError for what cannot be.
    """

    op: Instruction
    target: str
    a: Quantizer = UNSCALED
    b: Quantizer = UNSCALED
    unit: str | None = None
    model: Model | None = None
    promote: int | Array | None = None
    split_k: int = 1
    reduction: str = "ascending"
    out: Format = F32
    backward: str | Recipe | tuple[Recipe, Recipe] = "exact"
    name: str = field(default="", compare=False)
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        self._check_types()
        object.__setattr__(self, "target", named_target(self.target))
        op = parse(self.op) if self.unit is not None else check(self.op, self.target)
        object.__setattr__(self, "op", op)
        must_compute(op)
        if op.sparse or op.d not in (F32, F16):
            raise Unsupported(f"{op}: a recipe takes a dense instruction with results f32 or f16. PTX ISA {section(op)}")
        applied(op, self.target, self.model, unit=self.unit)
        for name, quantizer, other in (("a", self.a, "column"), ("b", self.b, "row")):
            self._check_operand(name, quantizer, other)
        if self.a.hadamard != self.b.hadamard:
            raise ValueError(
                f"a.hadamard={self.a.hadamard}, b.hadamard={self.b.hadamard}: a transform cancels in the product only where both operands "
                "have the same; give both the same signs, or neither any"
            )
        if self.a.hadamard is not None:
            applied(HADAMARD_BY, self.target, unit=self.unit)  # raises where the target has no bf16 instruction
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction={self.reduction!r}: wanted one of {', '.join(REDUCTIONS)}")
        object.__setattr__(self, "out", OUT.get(self.out, self.out) if isinstance(self.out, str) else self.out)
        if self.out not in OUT.values():
            raise ValueError(f"out={self.out!r}: wanted f32, f16 or bf16, of tcemu.formats or by its name")
        several = self.backward if isinstance(self.backward, tuple) else (self.backward,)
        try:
            given = tuple(as_recipe(one, self.target) if isinstance(one, str) and one not in BACKWARD else one for one in several)
        except ValueError as error:
            raise type(error)(f"backward={self.backward!r}: wanted one of {', '.join(BACKWARD)}, or recipes; {error}") from None
        object.__setattr__(self, "backward", given if isinstance(self.backward, tuple) else given[0])
        pair = isinstance(self.backward, tuple) and len(self.backward) == 2 and all(isinstance(r, Recipe) for r in self.backward)
        if not (pair or isinstance(self.backward, Recipe) or self.backward in BACKWARD):
            raise ValueError(f"backward={self.backward!r}: wanted one of {', '.join(BACKWARD)}, a Recipe, its name, or a pair of them")

    def _check_types(self) -> None:
        """Each field by itself: numbers are ints or arrays of integers, in range; NumPy's integers become ints."""
        for name in ("a", "b"):
            if not isinstance(getattr(self, name), Quantizer):
                raise TypeError(f"{name}={getattr(self, name)!r}: wanted a tcemu.Quantizer")
        if not (self.model is None or isinstance(self.model, Model)):
            raise TypeError(f"model={self.model!r}: wanted a tcemu.Model, or None for the target's own arithmetic")
        for name in ("name", "source"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name}={getattr(self, name)!r}: wanted a string")
        for name in ("split_k", "promote"):
            if isinstance(value := getattr(self, name), np.integer):
                object.__setattr__(self, name, int(value))
        if not is_count(self.split_k):
            raise ValueError(f"split_k={self.split_k!r}: wanted a number of parts, 1 or more")
        if isinstance(self.promote, np.ndarray | jax.Array):
            whole = jnp.issubdtype(self.promote.dtype, jnp.integer)
            fits = whole and (isinstance(self.promote, Tracer) or bool((np.asarray(self.promote) >= 1).all()))
        else:
            fits = self.promote is None or is_count(self.promote)
        if not fits:
            raise ValueError(f"promote={self.promote!r}: wanted a number of instructions, 1 or more, or None")

    def _check_operand(self, name: str, quantizer: Quantizer, other: str) -> None:
        argument = f"{name}={quantizer!r}"
        if quantizer.scaling == other:
            raise ValueError(
                f"{argument}: a scale for each {other} of {name.upper()} would stand inside the sum over K; "
                f'give {name} "{"row" if name == "a" else "column"}", "tensor" or "block"'
            )
        if quantizer.in_unit != self.op.block_scale:
            wanted = 'scaling="block" with block=None' if self.op.block_scale else "another scaling, or an instruction with .block_scale"
            raise ValueError(f"{argument}: {self.op} {'wants' if self.op.block_scale else 'has no'} block scales; give {wanted}")
        if quantizer.block is not None:
            if self.promote is None:
                raise ValueError(f"{argument}: scales of blocks multiply promoted sums; give promote=, a number of instructions")
            depth, least = quantizer.block[1], isinstance(self.promote, Tracer)  # of a traced promote, 1 at least must fit
            for promote in {1} if least else set(np.ravel(self.promote).tolist()):
                if depth % (taken := promote * self.op.k):
                    raise ValueError(f"{argument}: promote={promote} takes {taken} elements along K, which does not divide {depth}")

    def __repr__(self) -> str:
        op = self.op
        lines = [f"{self.name or 'recipe'}: {op} on {self.target}{f' by {self.unit}' if self.unit else ''}"]
        lines.append(f"  A {op.a} {self.a}; B {op.b} {self.b}")
        sums = "chained" if self.promote is None else f"promoted to f32 every {self.promote} instructions"
        if self.split_k > 1:
            sums += f", K in {self.split_k} parts added {self.reduction}"
        lines.append(f"  sums {sums}; result {self.out}" + ("" if self.model is None else f"; {self.model}"))
        if self.gradients is None:
            lines.append(f"  backward {self.backward}")
        for gradient, recipe in zip(("dA", "dB"), self.gradients or (), strict=False):
            lines.append(f"  backward {gradient} " + repr(recipe).replace("\n", "\n  "))
        return "\n".join(lines)

    @property
    def gradients(self) -> tuple[Recipe, Recipe] | None:
        """The recipes of dA and dB, if they are emulated."""
        if isinstance(self.backward, str):
            return None
        return self.backward if isinstance(self.backward, tuple) else (self.backward, self.backward)

    @property
    def arithmetic(self) -> Model:
        """The model in use."""
        return applied(self.op, self.target, self.model, unit=self.unit).model

    @property
    def evidence(self) -> dict[str, Evidence | None]:
        """How the arithmetic of each product is known: of "D", and of "dA" and "dB" where these are emulated, a `tcemu.evidence`.

        None where it is not the target's own, and so nobody's to know: a what-if.
        """
        products = {"D": self} | dict(zip(("dA", "dB"), self.gradients or (), strict=False))
        return {name: recipe._known() for name, recipe in products.items()}

    def _known(self) -> Evidence | None:
        try:
            row = row_for(self.op, self.target, unit=self.unit)
        except NotModelled:
            return None
        return row.evidence if self.model is None or self.model == row.model else None

    @property
    def block_instructions(self) -> int | None:
        """Instructions along K in a block whose scale multiplies outside, of A's and B's the greatest common divisor; None: no blocks."""
        depths = [quantizer.block[1] for quantizer in (self.a, self.b) if quantizer.block is not None]
        return gcd(*depths) // self.op.k if depths else None

    @property
    def unit_block(self) -> int:
        """Elements along K that share a scale inside the instruction; 0 if it has none."""
        return self.op.k // self.op.scale_vec if self.op.scale_vec else 0

    @property
    def schemes(self) -> tuple[Scheme, Scheme]:
        """How A and B are quantised, with what the instruction fixes."""
        op = self.op
        assert op.a is not None and op.b is not None
        unit = {"scale_format": op.stype, "unit_block": self.unit_block, "transform": self._transform()}
        return Scheme(op.a, self.a, **unit), Scheme(op.b, self.b, **unit)

    def _transform(self) -> Transform | None:
        """The Hadamard transform of the operands, by the bf16 instruction of the target, or of its unit."""
        if self.a.hadamard is None:
            return None
        used = applied(HADAMARD_BY, self.target, unit=self.unit)
        return Transform(self.a.hadamard, used.model, signature_of(used.op))

    @property
    def stochastic(self) -> bool:
        """It, or a recipe of its gradients, rounds stochastically and needs a key."""
        return "SR" in (self.a.rounding, self.b.rounding) or any(r.stochastic for r in self.gradients or ())

    def replace(self, **changes: Any) -> Recipe:
        """The recipe with some fields changed. Raises as the constructor."""
        return replace(self, **changes)

    def what_if(self, *, backward: bool = True, **changes: Any) -> Recipe:
        """The recipe with another arithmetic: some fields of `tcemu.Model`, and promote.

        The recipes of its gradients change too, each from what it has: in the fields that are named and no others. backward=False leaves
        them as they are. `replace` changes the other fields of a recipe, and promote without the gradients'.
        Raises TypeError for another field, and as the constructors.
        """
        known = {f.name for f in fields(Model)}
        if unknown := [name for name in changes if name not in known and name != "promote"]:
            raise TypeError(
                f"what_if({', '.join(f'{name}=...' for name in unknown)}): wanted backward=, promote= or fields of tcemu.Model, "
                f"{', '.join(sorted(known))}; .replace() changes the other fields of a recipe"
            )
        given = {name: value for name, value in changes.items() if name != "promote"}
        own: dict[str, Any] = {name: value for name, value in changes.items() if name == "promote"}
        own |= {"model": self.arithmetic.replace(**given)} if given else {}
        if backward and isinstance(self.backward, Recipe):
            own["backward"] = self.backward._gradients_what_if("gradient", changes)
        elif backward and isinstance(self.backward, tuple):
            own["backward"] = tuple(r._gradients_what_if(name, changes) for r, name in zip(self.backward, ("dA", "dB"), strict=True))
        return replace(self, **own)

    def _gradients_what_if(self, gradient: str, changes: dict[str, Any]) -> Recipe:
        try:
            return self.what_if(**changes)
        except ValueError as error:
            raise ValueError(
                f"backward {gradient}, {self.name or self.op}: {error}. backward=False leaves the gradients' recipes"
            ) from error

    def tree_flatten(self) -> tuple[tuple, tuple]:
        promote = None if isinstance(self.promote, int) else self.promote
        backward = None if isinstance(self.backward, str) else self.backward
        static = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("model", "name", "source")}
        static |= {"promote": self.promote if promote is None else None, "backward": self.backward if backward is None else None}
        return (self.model, promote, backward), tuple(static.items())

    @classmethod
    def tree_unflatten(cls, aux: tuple, children: tuple) -> Recipe:
        recipe, (model, promote, backward) = object.__new__(cls), children
        values = dict(aux) | {"model": model, "name": "", "source": ""}
        values["promote"] = values["promote"] if promote is None else promote
        values["backward"] = values["backward"] if backward is None else backward
        for name, value in values.items():
            object.__setattr__(recipe, name, value)
        return recipe


# ---- by name


def recipe(name: str, /, target: str | None = None, **changes: Any) -> Recipe:
    """One of the recipes in use, `tcemu.recipes.RECIPES`: "bf16", "fp8", "deepseek", "mxfp8", "nvfp4", ...

    name: also with its target, as "deepseek on H100". Upper and lower case and hyphens make no difference. Wherever a recipe is taken, so
    is its name.
    target: the GPU, as "H100" or "sm_90a"; None: sm_90a, or sm_100a for block scales. The arithmetic is that of the target's main
    instruction: wgmma on sm_90a, the unit of tcgen05 on those of sm_100 to sm_110 that end in f or a, mma elsewhere. PTX gives tcgen05 to
    no other target: 9.7.16, Target ISA Notes; ptxas 13.0 refuses it on sm_100.
    changes: other fields of the Recipe. Gradients are emulated by recipes that belong to the name; `backward="exact"` and the like take
    their place.
    Raises ValueError for another name and for two targets, Unsupported, with the targets that work, if this one has no such instruction,
    and as `Recipe`.
    """
    name, target = _named(name, target)
    row = ROWS[name]
    assert row.backward is not None
    target = ("sm_100a" if row.scaled else "sm_90a") if target is None else named_target(target)
    if target not in (working := _targets_of(name)):
        try:
            for one in (name, *row.backward):
                _of_row(one, target, {})
        except (Unsupported, NotModelled) as error:
            raise Unsupported(f"recipe({name!r}, {target!r}): {error} The recipe works on {', '.join(working)}.") from None
    if "backward" not in changes:
        changes["backward"] = tuple(_of_row(gradient, target, {}) for gradient in row.backward)
    return _of_row(name, target, changes)


def as_recipe(what: Recipe | str, target: str | None = None) -> Recipe:
    """A recipe, given as itself or by its name; target: where one that is named without a target works. Raises as `recipe`, and
    TypeError.
    """
    if isinstance(what, str):
        return _by_name(what, None if " on " in what else target)
    if not isinstance(what, Recipe):
        raise TypeError(f"recipe: got {type(what).__name__}; wanted a tcemu.Recipe, or a name of tcemu.recipes.RECIPES, as 'bf16'")
    return what


@lru_cache(maxsize=256)
def _by_name(name: str, target: str | None) -> Recipe:
    return recipe(name, target)


def _named(name: str, target: str | None) -> tuple[str, str | None]:
    """The name of a row, and the target that stands in the name or beside it."""
    if not isinstance(name, str):
        raise TypeError(f"recipe: want a name such as 'bf16', got {type(name).__name__}")
    named, _, on = name.partition(" on ")
    if on and target is not None:
        raise ValueError(f"recipe {name!r}: the name says a target, and target={target!r} another; give one")
    row = "_".join(named.lower().replace("-", "_").split())
    if row not in RECIPES:
        near = get_close_matches(row, RECIPES, n=2, cutoff=0.6)
        hint = f", did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"recipe {shown(name)!r}{hint}; wanted one of {', '.join(RECIPES)}, also with a target, as 'fp8 on H100'")
    return row, on or target


@cache
def _targets_of(name: str) -> tuple[str, ...]:
    """Where a recipe in use works, its gradients too."""

    def works(row: str, target: str) -> bool:
        if _unit_of(target) is None and not is_supported(_spelling(row, target), target):
            return False  # an error would say what the target has instead, and takes longer to word than all else here
        try:
            return bool(_of_row(row, target, {}))
        except (Unsupported, NotModelled):
            return False

    return tuple(target for target in TARGETS if all(works(row, target) for row in (name, *(ROWS[name].backward or ()))))


def _spelling(name: str, target: str) -> str:
    """The instruction of one row on a target, which need not have it."""
    row = ROWS[name]
    if row.scaled:
        kind, vectors, stype, k = row.scaled.kind, row.scaled.scale_vec, row.scaled.stype, row.scaled.k
        return f"mma.sync.aligned.m16n8k{k}.row.col.kind::{kind}.block_scale.scale_vec::{vectors}X.f32.{row.a}.{row.b}.f32.{stype}"
    k = 256 // max(row.a.bits, 8)
    wgmma = f"wgmma.mma_async.sync.aligned.m64n64k{k}.f32.{row.a}.{row.b}"
    return wgmma if target == "sm_90a" else f"mma.sync.aligned.m16n8k{k}.row.col.f32.{row.a}.{row.b}.f32"


def _unit_of(target: str) -> str | None:
    return "tcgen05" if target in targets_of("tcgen05") else None


def _of_row(name: str, target: str, changes: dict[str, Any]) -> Recipe:
    """The recipe of one row on a target, without its gradients unless they are among the changes."""
    row = ROWS[name]
    values: dict[str, Any] = {
        "op": _spelling(name, target), "target": target, "unit": _unit_of(target),
        "a": row.quantizer_a, "b": row.quantizer_b, "promote": split_accumulator(target) if row.split else row.promote,
        "name": name, "source": row.source,
    }  # fmt: skip
    return Recipe(**values | changes)
