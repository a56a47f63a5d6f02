"""The evidence for the special functions of each target, one row for each kind of evidence. All targets have the same arithmetic.

`tcemu.engine.arithmetic.special_functions` computes them. `benchmarks/special_function_sweep.py` compares all operands with a GPU's own
words.
"""

from functools import cache
from typing import NamedTuple

from tcemu.base.errors import NotModelled
from tcemu.engine.architectures.evidence import Evidence, assumed
from tcemu.engine.isa.targets import TARGETS, resolve_target

UNIT = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos")  # functions of the unit, with f32 operands and f64 seeds
SEQUENCES = ("div.approx", "div.full", "rsqrt.f64")  # programs of the assembler around the unit
NARROW = ("ex2.f16", "ex2.bf16")  # the unit's own narrow results
TANH = ("tanh", "tanh.f16", "tanh.bf16")  # from sm_75 on; the narrow results are the unit's own
FUNCTIONS = (*UNIT, *SEQUENCES, *NARROW, *TANH)

PTX_MATH = "B. Carleton, ptx-math (2020), measured on sm_5x to sm_75; fork sass-math (pyxis-roc, 2021)"
SAME_CODE = "ptxas 13.0 makes the same instructions for sm_75 to sm_121"
RECORDED = Evidence(
    level="silicon", gpus=("NVIDIA H200",), driver="580.159", assembler=("13.0",), family="ptx_scalars.json.xz", recorded=2922,
    note="all operands on an NVIDIA H100 80GB HBM3, 2026-11-24: 0 of 81,738,596,352 words differ",
)  # fmt: skip
RECORDED_TANH = Evidence(
    level="silicon", gpus=("NVIDIA H100 80GB HBM3",), driver="580.159", assembler=("13.0",), family="tanh", recorded=136_704,
    note="all operands on that GPU, 2026-11-24: 0 of 13,019,119,616 words differ",
)  # fmt: skip
BY_PTX_MATH = Evidence(level="literature", papers=(PTX_MATH,))
BETWEEN = assumed("as sm_75 (ptx-math) and sm_90 (recorded), which have one table; " + SAME_CODE)
AS_SM_90 = assumed("as sm_90, whose words were recorded; " + SAME_CODE)
BY_CODE = assumed("the sequence that ptxas 13.0 makes for sm_90, around the unit of this target; " + SAME_CODE)


class SpecialFunctionRow(NamedTuple):
    """The evidence of some functions on some targets."""

    targets: tuple[str, ...]
    functions: tuple[str, ...]
    evidence: Evidence


def _targets(*numbers: int) -> tuple[str, ...]:
    return tuple(name for name, row in TARGETS.items() if row.number in numbers)


OLD, AMPERE, NEW = (70, 72, 75), (80, 86, 87, 88, 89), (100, 103, 110, 120, 121)


ROWS = (
    SpecialFunctionRow(_targets(*OLD), UNIT, BY_PTX_MATH),
    SpecialFunctionRow(_targets(*OLD), SEQUENCES, BY_CODE),
    SpecialFunctionRow(_targets(75), NARROW, AS_SM_90),
    SpecialFunctionRow(_targets(*AMPERE), UNIT, BETWEEN),
    SpecialFunctionRow(_targets(*AMPERE), (*SEQUENCES, *NARROW), AS_SM_90),
    SpecialFunctionRow(_targets(75, *AMPERE), TANH, AS_SM_90),
    SpecialFunctionRow(_targets(90), (*UNIT, *SEQUENCES, *NARROW), RECORDED),
    SpecialFunctionRow(_targets(90), TANH, RECORDED_TANH),
    SpecialFunctionRow(_targets(*NEW), FUNCTIONS, AS_SM_90),
)


def function_name(opcode: str) -> str:
    """Return the function of an opcode: "ex2" for "ex2.approx.ftz.f32", "ex2.f16" for "ex2.approx.f16x2".

    Raises:
        ValueError: The opcode is no approximate instruction.
    """
    name, *parts = opcode.split(".")
    element = parts[-1].removesuffix("x2") if parts else ""
    if name == "div" and parts and parts[0] in ("approx", "full"):
        return f"div.{parts[0]}"
    if name in ("ex2", "tanh") and element in ("f16", "bf16"):
        return f"{name}.{element}"
    if name == "rsqrt" and element == "f64" and "ftz" not in parts:
        return "rsqrt.f64"
    if name in (*UNIT, *TANH):
        return name
    raise ValueError(
        f"opcode={opcode!r}: expected an approximate instruction, such as 'ex2.approx.ftz.f32', or one of {', '.join(FUNCTIONS)}"
    )


@cache
def special_function_evidence(opcode: str, target: str) -> Evidence:
    """Return how it is known what a target computes for an approximate instruction.

    Args:
        opcode: Opcode such as "ex2.approx.ftz.f32", or its name alone.
        target: GPU name or target.

    Returns:
        An `Evidence`, as `tcemu.evidence` returns it for tensor-core instructions.

    Raises:
        NotModelled: There is no evidence: the target does not have the function.
        ValueError: The opcode is no approximate instruction.
        Unsupported: The target is unknown.
    """
    name, target = function_name(opcode), resolve_target(target)
    for row in ROWS:
        if target in row.targets and name in row.functions:
            return row.evidence
    raise NotModelled(
        f"{opcode} on {target}: there is no evidence of its bits; modelled are {', '.join(FUNCTIONS)}, "
        "the narrow forms and tanh from sm_75 on. See tcemu.engine.architectures.special_function_rows"
    )
