"""The models that probes leave, compared with the black box: which of them agree with it on every case."""

from collections.abc import Sequence
from typing import NamedTuple

from tcemu.arithmetic.model import Model
from tcemu.formats import F16
from tcemu.fuzz.inference.findings import Finding, Inferred
from tcemu.fuzz.runs import Run, run
from tcemu.fuzz.sides import Side, emulated
from tcemu.interrupts import Interrupted
from tcemu.isa.catalog import targets
from tcemu.isa.instructions import Instruction


class Account(NamedTuple):
    """What probes showed, and how many there were."""

    findings: list[Finding]
    asked: int


def confirmed(op: Instruction, box: Side, models: Sequence[Model], account: Account, *, cases: int, seed: int) -> Inferred:
    """What was inferred, of the models that agree with the box on all cases, the first of them in front; of the first if none does.

    Where none does, subnormal operands may be aligned as normal numbers: then the models with operands converted to f16 are tried.
    """
    findings = account.findings
    target = next(iter(targets(op)))

    def compared(model: Model) -> Run:
        now = run(op, box, emulated(op, target, model, "the model found"), cases=cases, seed=seed, shrinking=False, covering=False)
        if now.stopped:
            raise Interrupted(now.signal)
        return now

    in_f16 = [m.replace(multiplicand=F16) for m in models if m.fraction_bits is not None and m.summed is None]
    wide = not all(F16.holds(fmt) for fmt in (op.a, op.b) if fmt is not None)
    first = None
    for some in (list(models), [] if wide else in_f16):
        runs = [(model, compared(model)) for model in some]
        first = first or (runs[0] if runs else None)
        agreeing = [(model, now) for model, now in runs if now.wrong_cases == 0]
        if agreeing:
            if agreeing[0][0].multiplicand is not None:
                said = "only so do all cases agree: subnormal operands are aligned as normal numbers"
                findings.append(Finding("multiplicand", F16, said))
            if len(models) > 1 and len(agreeing) == 1:
                findings.append(
                    Finding("rounding", agreeing[0][0].rounding, f"of {len(models)} ways the only one with which all cases agree")
                )
            survivors = tuple(model for model, _ in agreeing)
            return Inferred(op, box.name, survivors[0], tuple(findings), account.asked, agreeing[0][1], survivors)
    model, comparison = first or (None, None)
    return Inferred(op, box.name, model, tuple(findings), account.asked, comparison)
