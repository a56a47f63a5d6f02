"""A step as lines for a terminal: columns of numbers, and the bits that alignment kept and cut.

In a line of bits "|" stands where alignment cuts and "/" where rounding does; what is right of a mark is gone. A what-if model that rounds
at alignment may add instead: "|-" and the bits that it added.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import takewhile

from tcemu.arithmetic.model import Model, Signature
from tcemu.explanation.exact import decimal, exact_decimal, fixed, leading, power, shortest, spacing, word
from tcemu.explanation.steps import Step, Term
from tcemu.formats import Format
from tcemu.text import WIDTH, columns, wrapped

LEAST_CUT = 4  # columns for the bits that are cut, at least
FILLING = "filling"  # the name of products that fill K up to whole instructions
LEGEND = "In the bits, what stands right of | was cut by alignment, and right of / dropped by rounding."
DIM, PLAIN = "\033[2m", "\033[0m"


def describe(model: Model, signature: Signature) -> str:
    """One sentence on the arithmetic of a model."""
    if model.result.is_integer:
        how = "clamps what is beyond s32" if signature.clamp else "wraps modulo 2^32"
        return f"Integers: every sum is exact, and {how}."
    common, parts = model.common, []
    if common not in (None, signature.a) or common not in (None, signature.b):
        parts.append(f"A and B are converted to {common} first, exactly.")
    if model.groups > 1:
        parts.append(f"Pairs of products go to {model.groups} groups in turn, which are walked one after the other.")
    if model.fraction_bits is None:
        parts.append(f"A step is a fused multiply-add in {model.result}, rounded {model.rounding}.")
    else:
        added = f"{model.terms} products" if model.summed is None else f"{model.terms // model.summed} groups of {model.summed} products"
        kept = "" if model.result_bits is None else f" with {model.result_bits} fraction bits"
        rest = "" if model.alignment == "RZ" else f", each term rounded {model.alignment} to them"
        parts.append(
            f"A step adds up to {added} and the running value: aligned to the largest exponent, at least {model.floor}, "
            f"{model.fraction_bits} fraction bits kept{rest}, added exactly, rounded {model.rounding} to {model.result}{kept}."
        )
    if model.chain is not None:
        size = "of an instruction" if isinstance(model.chain, str) else f"of {model.chain} products"
        together = ", those of one instruction first to each other" if model.together else ""
        start = "+0" if model.from_zero else "nothing"
        parts.append(f"The steps {size} start from {start}; their outcome is added to C, RN{together}.")
    return " ".join(parts)


def listed(names: Sequence[str]) -> str:
    """Names of products, "k 0" and so on, with runs drawn together: "k 0-3, 6, C"."""
    runs: list[list[int]] = []
    others = list(dict.fromkeys(name for name in names if not name.removeprefix("k ").isdecimal()))
    for place in (int(name.removeprefix("k ")) for name in names if name not in others):
        if runs and runs[-1][1] == place - 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    text = [("k " if i == 0 else "") + (f"{low}" if low == high else f"{low}-{high}") for i, (low, high) in enumerate(runs)]
    added = [name for name in others if name == FILLING]
    return ", ".join([*(name for name in others if name not in added), *text, *added])


def lines(steps: Sequence[Step], signature: Signature, colour: bool = False) -> list[str]:
    """All steps; the multiply-adds that follow each other make one table."""
    views, shown, at = {"fused": _fused, "integer": _integer}, [], 0
    while at < len(steps):
        shown.append("")
        title = f"step {at + 1} of {len(steps)}"
        if steps[at].kind == "fma":
            some = list(takewhile(lambda step: step.kind == "fma", steps[at:]))
            shown += _fmas(some, signature, at + 1, len(steps))
            at += len(some)
        else:
            shown += views.get(steps[at].kind, _equation)(steps[at], signature, title, colour)
            at += 1
    return shown


def outcome(step: Step) -> str:
    """The result of a step, word and number."""
    return f"{word(step.fmt, step.result)} = {shortest(step.fmt, step.result)}"


def loss(step: Step) -> str:
    """What rounding took."""
    if step.total is None:
        return step.rule or ""
    if step.lost is None:
        return f"{step.rounding}: beyond the largest {step.fmt}"
    if step.lost == 0:
        return f"{step.rounding} drops nothing"
    ulps = step.lost / spacing(step.fmt, step.total)
    how = "drops" if (step.lost > 0) == (step.total > 0) else "adds"
    return f"{step.rounding} {how} {decimal(abs(step.lost), 5)} ({decimal(abs(ulps), 3)} ulp)"


MOST_STEPS = 5  # of a summary


def greatest_losses(steps: Sequence[Step]) -> list[str]:
    """A table of the few steps that lose the most by alignment and rounding, in their order. A step with NaN or infinity comes first."""

    def size(step: Step) -> tuple[bool, Fraction]:
        return step.total is None, sum((abs(t.cut) for t in step.terms if t.cut), abs(step.lost or Fraction(0)))

    losing = sorted((at for at, step in enumerate(steps) if any(size(step))), key=lambda at: size(steps[at]), reverse=True)
    if not losing:
        return [f"{len(steps)} step{'s' if len(steps) > 1 else ''}, in which nothing is lost"]
    rows = []
    for at in sorted(losing[:MOST_STEPS]):
        step = steps[at]
        cut = sum((t.cut for t in step.terms if t.cut), Fraction(0))
        point = "" if step.point is None else f"2^{step.point}"
        rows.append([str(at + 1), listed([t.name for t in step.terms]), point, decimal(cut, 5) if cut else "", loss(step), outcome(step)])
    some = len(losing) - len(rows)
    lead = f"{len(steps)} steps; {len(losing)} of them lose something" + (f", most of all these {len(rows)}:" if some else ":")
    return [lead, *columns(["step", "adds", "aligned to", "cut", "rounding", "result"], rows, left=(1, 4, 5))]


def _is_zero(term: Term) -> bool:
    return term.value == 0 and term.exponent is None and term.code is None


def _folded(terms: Sequence[Term]) -> list[str]:
    zeros = [t.name for t in terms if _is_zero(t)]
    if not zeros:
        return []
    many = "zero, takes no part" if len(zeros) == 1 else f"{len(zeros)} terms are zero and take no part"
    return wrapped(f"{listed(zeros)}: {many}", indent="  ")


def factors(term: Term, signature: Signature) -> tuple[str, ...]:
    """The columns before the value: of a product its factors, of a group the sum of its products, and the scales."""
    if not term.products:
        return ("", "")
    one = term.products[0]
    scales = tuple(shortest(signature.scale, code) for code in one.scale_codes or ()) if signature.scale is not None else ()
    if len(term.products) > 1 or (scales and one.scale_codes is not None and signature.scale is not None and signature.scale.mantissa_bits):
        return (decimal(sum((p.value for p in term.products if isinstance(p.value, Fraction)), Fraction(0))), *scales)
    return (shortest(signature.a, one.a), shortest(signature.b, one.b), *scales)


def _rows(terms: Sequence[Term], heads: Sequence[str], signature: Signature, last: Sequence[tuple[str, ...]]) -> list[str]:
    """The columns of numbers, right-aligned under their heads, first that of the names. last: further cells of each row."""
    rows = []
    for term, more in zip(terms, last, strict=True):
        cells = factors(term, signature)
        cells += ("",) * (len(heads) - 2 - len(more) - len(cells))
        rows.append((term.name, *cells, decimal(term.value), *more))
    return columns(heads, rows, left=(0,))


def _heads(terms: Sequence[Term], signature: Signature) -> list[str]:
    if signature.scale is None:
        return ["", "a", "b", "a x b"]
    grouped = any(len(t.products) > 1 for t in terms)
    return ["", "sum a x b", "scale a", "scale b", "term"] if grouped else ["", "a", "b", "scale a", "scale b", "term"]


def _fused(step: Step, signature: Signature, title: str, colour: bool) -> list[str]:
    assert step.point is not None and step.last is not None
    shown = [t for t in step.terms if not _is_zero(t)]
    heads = _heads(step.terms, signature)
    said = listed([t.name for t in step.terms])
    if step.total is None:
        table = _rows(shown, heads, signature, [()] * len(shown))
        return [*wrapped(f"{title}: {said}", indent="  "), *table, *_folded(step.terms), f"{step.rule}", f"result {outcome(step)}"]
    leaders = [t.name for t in shown if t.shift == 0]
    by = f"that of {listed(leaders)}" if leaders else "the floor"
    more = [("" if t.exponent is None else str(t.exponent), "" if t.shift is None else str(t.shift)) for t in shown]
    table = _rows(shown, [*heads, "exp", "shift"], signature, more)
    sizes = [abs(v) for v in (step.total, *(t.kept for t in shown), step.value) if isinstance(v, Fraction) and v]
    before = max([1, *(leading(v) - step.point + 1 for v in sizes)])
    place = max(map(len, table)) + 2
    bits_width = 1 + before + 1 + step.point - step.last
    room = max(LEAST_CUT, WIDTH - place - bits_width - 1)
    lines = wrapped(f"{title}: {said}; aligned to 2^{step.point}, {by}; the last bit kept is 2^{step.last}", indent="  ")
    lines.append(f"{table[0]:{place}}{'x 2^' + str(step.point)}")
    for row, term in zip(table[1:], shown, strict=True):
        assert term.kept is not None and term.cut is not None
        negative = isinstance(term.value, Fraction) and term.value < 0
        bits = fixed(term.kept, step.last, step.point, before, negative)
        added = "-" if term.cut and (term.cut < 0) != (term.kept + term.cut < 0) else ""
        lines.append(f"{row:{place}}{bits}|{_dim(added + cut_bits(term.cut, step.last, room - len(added)), colour)}")
    lines += _folded(step.terms)
    total = fixed(step.total, step.last, step.point, before, step.total < 0)
    lines.append(f"{'sum':{place}}{total}|")
    lines.append(f"{step.rounding + ' to ' + str(step.fmt):{place}}{rounded_bits(step, before, colour)}")
    return [*lines, *wrapped(f"result {outcome(step)}; the sum is {exact_decimal(step.total)}, {loss(step)}", indent="  ")]


def _dim(text: str, colour: bool) -> str:
    return f"{DIM}{text}{PLAIN}" if colour and text else text


def cut_bits(cut: Fraction, last: int, room: int) -> str:
    """The bits below 2^last, to the last that is set."""
    if cut == 0:
        return ""
    lowest = -(cut.denominator.bit_length() - 1) if cut.denominator > 1 else (cut.numerator & -cut.numerator).bit_length() - 1
    width = last - lowest
    digits = f"{int(abs(cut) / power(lowest)):0{width}b}"
    return digits if width <= room else digits[: room - 3] + "..."


def rounded_bits(step: Step, before: int, colour: bool) -> str:
    """The result's bits under those of the sum, and right of "/" what rounding dropped of them."""
    assert step.point is not None and step.last is not None and step.total is not None
    if not isinstance(step.value, Fraction):
        return str(step.value)
    bits = fixed(step.value, step.last, step.point, before, step.value < 0)
    dropped = fixed(step.total, step.last, step.point, before, step.total < 0)
    kept = step.end
    if kept <= step.last:
        return bits + "|"
    at = max(1, len(bits) - (kept - step.last) - (kept > step.point))  # a result of 0 may have room for none of them
    return f"{bits[:at]}/{_dim(dropped[at:], colour)}|"


def _fmas(steps: Sequence[Step], signature: Signature, first: int, of: int) -> list[str]:
    heads, rows, rules = ("step", "", "a", "b", "a x b", "result", "", "dropped, ulp"), [], []
    for number, step in enumerate(steps, first):
        term = step.terms[-1]
        one = term.products[0]
        if step.rule is not None:
            rules += wrapped(f"step {number}: {step.rule}", indent="  ")
        dropped = "" if step.lost is None or step.total is None else decimal(step.lost / spacing(step.fmt, step.total), 4)
        cells = (decimal(one.x.value), decimal(one.y.value), decimal(term.value))
        rows.append((str(number), term.name, *cells, word(step.fmt, step.result), shortest(step.fmt, step.result), dropped))
    last = first + len(steps) - 1
    title = f"step {first} of {of}" if last == first else f"steps {first} to {last} of {of}"
    start = steps[0].terms[0].name if len(steps[0].terms) > 1 else "nothing"
    how = f"fused multiply-adds in {steps[0].fmt}, from {start} on, each rounded {steps[0].rounding}"
    return [f"{title}: {how}", *columns(heads, rows, left=(1,)), *rules]


def _equation(step: Step, signature: Signature, title: str, colour: bool) -> list[str]:
    said = " + ".join(f"{t.name} {decimal(t.value, 12)}" for t in step.terms)
    return wrapped(f"{title}: {said}, {step.rounding} to {step.fmt} -> {outcome(step)}, {loss(step)}", indent="  ")


def _integer(step: Step, signature: Signature, title: str, colour: bool) -> list[str]:
    shown = [t for t in step.terms if not _is_zero(t)]
    lines = wrapped(f"{title}: {listed([t.name for t in step.terms])}", indent="  ")
    if signature.bit_op is not None:
        lines += _bit_rows(step, signature.bit_op)
    else:
        lines += [*_rows(shown, ["", "a", "b", "a x b"], signature, [()] * len(shown)), *_folded(step.terms)]
    assert step.total is not None
    return [*lines, f"sum {exact_decimal(step.total)}", f"result {outcome(step)}" + (f", {step.rule}" if step.rule else "")]


def _bit_rows(step: Step, bit_op: str) -> list[str]:
    lines = [f"C {exact_decimal(step.terms[0].value)}"]
    bits = step.terms[1:]
    for at in range(0, len(bits), 64):
        some = bits[at : at + 64]
        lines.append(f"k {at} to {at + len(some) - 1}")
        counted = [int(t.value) for t in some if isinstance(t.value, Fraction)]
        for name, row in (("a", [t.products[0].a for t in some]), ("b", [t.products[0].b for t in some]), (bit_op, counted)):
            lines.append(f"  {name:4}" + "".join(map(str, row)))
        lines[-1] += f"  {sum(counted)} set"
    return lines


def vector(name: str, fmt: Format, codes: Sequence[int]) -> list[str]:
    """The codes of an operand."""
    head = f"{name + ' ' + str(fmt):7} "
    return wrapped(head + " ".join(word(fmt, c) for c in codes), indent=" " * len(head))
