"""The directive `package-table`: rows that the package itself holds, so that no page repeats them."""

import re
from collections.abc import Iterable
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import tcemu
from tcemu.engine.instructions.tcgen05_faults import Tcgen05Fault
from tcemu.engine.isa.short_names import short_names as all_short_names
from tcemu.kernels.ptx.hazards.hazard_faults import Hazard
from tcemu.kernels.ptx.hazards.promises import PROMISES

F16 = ("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32")  # from Turing on; Volta
Rows = tuple[tuple[str, ...], list[tuple[Any, ...]]]


def setup(app: Any) -> dict[str, bool]:
    """What Sphinx calls."""
    app.add_directive("package-table", PackageTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def formats() -> Rows:
    """Every number format; its least and greatest exponent as powers of two."""
    head = ("format", "bits", "sign", "exponent", "fraction", "normal exponents", "Inf and NaN")
    specials = {"ieee": "both", "nan": "NaN alone", "fnuz": "NaN alone, the code of -0", "none": "none"}
    rows = []
    for name, fmt in tcemu.formats.FORMATS.items():
        if fmt.is_integer:
            rows.append((name, fmt.bits, "yes" if fmt.signed else "no", "", "", "", "an integer"))
            continue
        exponents = f"{fmt.min_exponent} to {fmt.max_exponent}"
        rows.append(
            (name, fmt.bits, "yes" if fmt.signed else "no", fmt.exponent_bits, fmt.mantissa_bits, exponents, specials[fmt.specials])
        )
    return head, rows


def recipes() -> Rows:
    """Every named recipe, as it is without a target."""
    rows = []
    for name in tcemu.recipes.RECIPES:
        recipe = tcemu.get_recipe(name)
        rows.append((name, recipe.op.a, recipe.target, "none" if recipe.promote is None else f"every {recipe.promote}", recipe.source))
    return ("recipe", "operands", "target", "promoted", "source"), rows


def block_formats() -> Rows:
    """Every block format."""
    rows = [(name, kind.element, kind.block, kind.scale, kind.rule) for name, kind in tcemu.quantize.BLOCK_FORMATS.items()]
    return ("kind", "elements", "in a block", "scale", "rule"), rows


def _level(op: str, target: str) -> str:
    try:
        return tcemu.evidence(op, target).level
    except tcemu.NotModelled:
        return "not modelled"


def gpus() -> Rows:
    """Every target, the GPUs that have it by name, and how the arithmetic of its f16 mma is known."""
    by_target: dict[str, list[str]] = {}
    for name, target in tcemu.isa.gpus().items():
        by_target.setdefault(target, []).append(name)
    op = {target: next(op for op in F16 if target in tcemu.targets(op)) for target in by_target}
    rows = [(target, ", ".join(names), _level(op[target], target)) for target, names in by_target.items()]
    return ("target", "GPUs", "f16 mma known by"), rows


def short_names() -> Rows:
    """Every short name of an instruction, and its spelling."""
    return ("short name", "instruction"), [(name, op) for name, op in all_short_names().items()]


def tcgen05_faults() -> Rows:
    """Every fault of tcgen05's protocol; its sections of the PTX ISA, and whether it raises."""
    rows = []
    for fault in Tcgen05Fault:
        row = fault.value
        rows.append((fault.name, row.text.replace("{}", "…"), row.section, "is a note" if row.is_note else "raises"))
    return ("fault", "message", "PTX ISA", "in checked mode"), rows


def promises() -> Rows:
    """Every promise of checked mode: the fault, and when it is found."""
    return ("fault", "found"), [(promise.fault, promise.scope.value) for promise in PROMISES]


def hazards() -> Rows:
    """Every message about hazards, its section of the PTX ISA, and whether it raises."""
    rows = []
    for hazard in Hazard:
        row = hazard.value
        rows.append((hazard.name, re.sub(r"{[^}]*}", "…", row.text), row.section, "is a note" if row.is_note else "raises"))
    return ("hazard", "message", "PTX ISA", "in checked mode"), rows


TABLES = {
    "promises": promises,
    "hazards": hazards,
    "tcgen05_faults": tcgen05_faults,
    "short_names": short_names,
    "formats": formats,
    "recipes": recipes,
    "block_formats": block_formats,
    "gpus": gpus,
}


class PackageTable(SphinxDirective):
    """A table by its name in TABLES."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        head, rows = TABLES[self.arguments[0]]()
        group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in head), cols=len(head))
        group += nodes.thead("", row(head))
        group += nodes.tbody("", *(row(cells, code=True) for cells in rows))
        return [nodes.container("", nodes.table("", group), classes=["table-wrapper"])]


def row(cells: Iterable[Any], code: bool = False) -> nodes.row:
    """One row; the first cell in code, if asked for."""
    made = nodes.row()
    for at, cell in enumerate(cells):
        made += nodes.entry("", nodes.paragraph("", "", nodes.literal("", str(cell)) if code and at == 0 else nodes.Text(str(cell))))
    return made
