"""Steps as lines for a terminal: columns of numbers, and the bits that alignment retained and truncated.

In a line of bits "|" marks where alignment truncates and "/" where rounding does; the bits right of a mark are lost. A what-if model that
rounds at alignment may also add bits: "|-" and the bits that it added.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import takewhile

from tcemu.base.text import WIDTH, table_lines, wrap_lines
from tcemu.engine.arithmetic.model import TO_ODD, Model
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.arithmetic.reference.exact_values import (
    decimal_text,
    exact_decimal_text,
    fixed_point_text,
    hex_code,
    leading_exponent,
    power_of_two,
    shortest_text,
    ulp,
)
from tcemu.engine.arithmetic.reference.reference_steps import Step, Term
from tcemu.engine.formats.number_formats import Format

MIN_TRUNCATED_WIDTH = 4  # least number of columns for truncated bits
MAX_SUMMARY_STEPS = 5  # steps in a summary
PADDING_NAME = "padding"  # name of the products that pad K to whole instructions
BITS_LEGEND = "Of the bits, those right of | were truncated by alignment, and those right of / dropped by rounding."
ANSI_DIM, ANSI_RESET = "\033[2m", "\033[0m"


def describe_arithmetic(model: Model, spec: ProductSpec) -> str:
    """Describe the arithmetic of a model in a few sentences."""
    if model.result.is_integer:
        each = f" after every {model.clamp_step} products" if spec.clamp and (model.clamp_step or spec.k) < spec.k else ""
        return f"Integers: every sum is exact, then {'clamped to s32' if spec.clamp else 'reduced modulo 2^32'}{each}."
    common, parts = model.common_format, []
    if common not in (None, spec.a) or common not in (None, spec.b):
        parts.append(f"A and B are converted to {common} first, exactly.")
    if model.flush is not None:
        zeros = "+0, as does -0 in A, B and C" if model.flush == "positive" else "zeros of their sign"
        parts.append(f"Subnormals in A, B and C become {zeros}; subnormal results become zeros of their sign.")
    if model.groups > 1 and model.step_kind != "joined":
        what = {"pairs": "Pairs of products", "fours": "Fours of products"}.get(model.dealing, "Products")
        order = ", the last group first" if model.dealing == "reversed" else ""
        parts.append(f"{what} are distributed over {model.groups} groups, which are added one after the other{order}.")
    if model.step_kind is not None:
        parts.append(_describe_other_step(model))
    elif model.is_exact_sum:
        parts.append(f"A step adds {model.terms} products and the running value exactly, rounded {model.rounding} to {model.result}.")
    elif model.fraction_bits is None:
        parts.append(f"A step is a fused multiply-add in {model.result}, rounded {model.rounding}.")
    else:
        added = f"{model.terms} products" if model.summed is None else f"{model.terms // model.summed} groups of {model.summed} products"
        result_bits = "" if model.result_bits is None else f" with {model.result_bits} fraction bits"
        alignment = "" if model.alignment == "RZ" else f", each term rounded {model.alignment} to them"
        parts.append(
            f"A step adds up to {added} and the running value: aligned to the max exponent, at least {model.floor}, "
            f"{model.fraction_bits} fraction bits retained{alignment}, added exactly, "
            f"rounded {model.rounding} to {model.result}{result_bits}."
        )
    if model.chain is not None:
        size = "of an instruction" if isinstance(model.chain, str) else f"of {model.chain} products"
        together = ", those of one instruction first to each other" if model.together else ""
        start = "+0" if model.from_zero else "nothing"
        parts.append(f"The steps {size} start from {start}; their result is added to C, RN{together}.")
    return " ".join(parts)


def _describe_other_step(model: Model) -> str:
    """Describe a step of another maker's unit."""
    bits = model.fraction_bits
    if model.step_kind == "joined":
        groups = f" in {model.groups} groups" if model.groups > 1 else ""
        return (
            f"A step adds up to {model.terms} products{groups}, aligned to their own max exponent with {bits} fraction bits. Their sum "
            f"joins the running value: both are rounded down, to 32 and {bits} bits, then the total to 31 bits, and {model.rounding} to "
            f"{model.result}."
        )
    if model.step_kind == "complement":
        return (
            f"A step adds {model.terms} products and the running value, aligned to the max exponent with {bits} fraction bits, the running "
            "value by an exponent two below its own. Terms of the other sign than the running value's are negated by flipping their bits, "
            f"one unit too far. The total is rounded {model.rounding} to {model.result}; subnormals are zeros."
        )
    if model.step_kind == "floored":
        return (
            f"A step adds up to {model.terms} products in pairs, each pair aligned to its own max exponent with {bits} fraction bits. The "
            f"pairs' sums and the running value, which keeps {bits} + 2 bits, are aligned to their max exponent. Alignment rounds down, "
            f"and a running value below it is dropped. The total is rounded {model.rounding} to {model.result}."
        )
    rounding = "to odd" if model.rounding == TO_ODD else str(model.rounding)
    return (
        f"A step rounds {model.terms} products {rounding} to {model.result}, adds them in pairs, and their sum to the running value, each "
        "sum rounded alike."
    )


def list_names(names: Sequence[str]) -> str:
    """List names of terms, with the ranges of products "k 0" and so on abbreviated: "C, k 0-3, 6"."""
    ranges: list[list[int]] = []
    others = list(dict.fromkeys(name for name in names if not name.removeprefix("k ").isdecimal()))
    for index in (int(name.removeprefix("k ")) for name in names if name not in others):
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    text = [("k " if i == 0 else "") + (f"{low}" if low == high else f"{low}-{high}") for i, (low, high) in enumerate(ranges)]
    padding = [name for name in others if name == PADDING_NAME]
    return ", ".join([*(name for name in others if name not in padding), *text, *padding])


def step_lines(steps: Sequence[Step], spec: ProductSpec, colour: bool = False) -> list[str]:
    """Format all steps. Consecutive multiply-adds form one table."""
    lines, index = [], 0
    while index < len(steps):
        lines.append("")
        step, title = steps[index], f"step {index + 1} of {len(steps)}"
        if step.kind == "fma":
            multiply_adds = list(takewhile(lambda step: step.kind == "fma", steps[index:]))
            lines += _fma_lines(multiply_adds, index + 1, len(steps))
            index += len(multiply_adds)
            continue
        if step.kind == "fused":
            lines += _fused_lines(step, spec, title, colour)
        elif step.kind == "integer":
            lines += _integer_lines(step, spec, title)
        else:
            lines += _equation_lines(step, title)
        index += 1
    return lines


def result_text(step: Step) -> str:
    """Format the result of a step as code and number."""
    return f"{hex_code(step.fmt, step.result)} = {shortest_text(step.fmt, step.result)}"


def rounding_text(step: Step) -> str:
    """Describe the effect of the rounding of a step."""
    if step.exact_sum is None:
        return step.rule or ""
    if step.rounding_loss is None:
        return f"{step.rounding}: beyond the largest {step.fmt}"
    if step.rounding_loss == 0:
        return f"{step.rounding} drops nothing"
    ulps = step.rounding_loss / ulp(step.fmt, step.exact_sum)
    how = "drops" if (step.rounding_loss > 0) == (step.exact_sum > 0) else "adds"
    return f"{step.rounding} {how} {decimal_text(abs(step.rounding_loss), 5)} ({decimal_text(abs(ulps), 3)} ulp)"


def step_loss(step: Step) -> Fraction:
    """Return the magnitudes that alignment and rounding remove.

    Args:
        step: The step.
    """
    return sum((abs(loss) for loss in (*(term.truncated for term in step.terms), step.rounding_loss) if loss is not None), Fraction())


def largest_losses(steps: Sequence[Step]) -> list[str]:
    """Tabulate the steps that lose the most by alignment and rounding, in order. Steps with a NaN or an infinity have precedence."""

    loss = lambda step: (step.exact_sum is None, step_loss(step))
    losing = sorted((i for i, step in enumerate(steps) if any(loss(step))), key=lambda i: loss(steps[i]), reverse=True)
    if not losing:
        return [f"{len(steps)} step{'s' if len(steps) > 1 else ''}, in which nothing is lost"]
    rows = []
    for index in sorted(losing[:MAX_SUMMARY_STEPS]):
        step = steps[index]
        truncated = sum((t.truncated for t in step.terms if t.truncated), Fraction(0))
        exponent = "" if step.alignment_exponent is None else f"2^{step.alignment_exponent}"
        rows.append(
            [
                str(index + 1),
                list_names([t.name for t in step.terms]),
                exponent,
                decimal_text(truncated, 5) if truncated else "",
                rounding_text(step),
                result_text(step),
            ]
        )
    selection = f", most of all these {len(rows)}:" if len(losing) > len(rows) else ":"
    headings = ["step", "adds", "aligned to", "truncated", "rounding", "result"]
    return [f"{len(steps)} steps; {len(losing)} of them lose something{selection}", *table_lines(headings, rows, left=(1, 4, 5))]


def code_lines(name: str, fmt: Format, codes: Sequence[int]) -> list[str]:
    """Format the codes of an operand."""
    head = f"{name + ' ' + str(fmt):7} "
    return wrap_lines(head + " ".join(hex_code(fmt, code) for code in codes), indent=" " * len(head))


# ---- terms


def _is_zero_term(term: Term) -> bool:
    return term.value == 0 and term.exponent is None and term.code is None


def _zero_terms_lines(terms: Sequence[Term]) -> list[str]:
    zeros = [t.name for t in terms if _is_zero_term(t)]
    if not zeros:
        return []
    text = "zero, not aligned" if len(zeros) == 1 else f"{len(zeros)} terms are zero and not aligned"
    return wrap_lines(f"{list_names(zeros)}: {text}", indent="  ")


def factor_cells(term: Term, spec: ProductSpec) -> tuple[str, ...]:
    """Return the cells before the value: the factors of a product, or the sum of the products of a group, and the scales."""
    if not term.products:
        return ("", "")
    product = term.products[0]
    if spec.scale is None or product.scale_codes is None:
        return (shortest_text(spec.a, product.a), shortest_text(spec.b, product.b))
    scales = tuple(shortest_text(spec.scale, code) for code in product.scale_codes)
    if len(term.products) > 1 or spec.scale.mantissa_bits:
        return (decimal_text(sum((p.value for p in term.products if isinstance(p.value, Fraction)), Fraction(0))), *scales)
    return (shortest_text(spec.a, product.a), shortest_text(spec.b, product.b), *scales)


def _term_table(terms: Sequence[Term], headings: Sequence[str], spec: ProductSpec, further: Sequence[tuple[str, ...]]) -> list[str]:
    """Tabulate terms: names, factors, values, and further cells of each row."""
    rows = []
    for term, more in zip(terms, further, strict=True):
        cells = factor_cells(term, spec)
        cells += ("",) * (len(headings) - 2 - len(more) - len(cells))
        rows.append((term.name, *cells, decimal_text(term.value), *more))
    return table_lines(headings, rows, left=(0,))


def _term_headings(terms: Sequence[Term], spec: ProductSpec) -> list[str]:
    if spec.scale is None:
        return ["", "a", "b", "a x b"]
    grouped = any(len(t.products) > 1 for t in terms)
    return ["", "sum a x b", "scale a", "scale b", "term"] if grouped else ["", "a", "b", "scale a", "scale b", "term"]


# ---- steps by kind


def _fused_lines(step: Step, spec: ProductSpec, title: str, colour: bool) -> list[str]:
    (point, last_bit), exact_sum = step.require_alignment(), step.exact_sum
    terms = [t for t in step.terms if not _is_zero_term(t)]
    headings = _term_headings(step.terms, spec)
    title = f"{title}: {list_names([t.name for t in step.terms])}"
    if exact_sum is None:
        table = _term_table(terms, headings, spec, [()] * len(terms))
        return [*wrap_lines(title, indent="  "), *table, *_zero_terms_lines(step.terms), f"{step.rule}", f"result {result_text(step)}"]
    leaders = [t.name for t in terms if t.shift == 0]
    origin = f"the exponent of {list_names(leaders)}" if leaders else "the floor"
    cells = [("" if t.exponent is None else str(t.exponent), "" if t.shift is None else str(t.shift)) for t in terms]
    table = _term_table(terms, [*headings, "exp", "shift"], spec, cells)
    sizes = [abs(v) for v in (exact_sum, *(t.retained for t in terms), step.value) if isinstance(v, Fraction) and v]
    digits = max([1, *(leading_exponent(v) - point + 1 for v in sizes)])  # before the binary point
    left = max(map(len, table)) + 2
    room = max(MIN_TRUNCATED_WIDTH, WIDTH - left - (1 + digits + 1 + point - last_bit) - 1)

    def bits(value: Fraction, negative: bool) -> str:
        return fixed_point_text(value, last_bit, point, digits, negative)

    lines = wrap_lines(f"{title}; aligned to 2^{point}, {origin}; the last retained bit is 2^{last_bit}", indent="  ")
    lines.append(f"{table[0]:{left}}{'x 2^' + str(point)}")
    for row, term in zip(table[1:], terms, strict=True):
        assert term.retained is not None and term.truncated is not None
        negative = isinstance(term.value, Fraction) and term.value < 0
        sign = "-" if term.truncated and (term.truncated < 0) != (term.retained + term.truncated < 0) else ""
        truncated = sign + truncated_bits(term.truncated, last_bit, room - len(sign))
        lines.append(f"{row:{left}}{bits(term.retained, negative)}|{_dim(truncated, colour)}")
    lines += _zero_terms_lines(step.terms)
    sum_bits = bits(exact_sum, exact_sum < 0)
    lines.append(f"{'sum':{left}}{sum_bits}|")
    value = step.value
    rounded = rounded_bits(step, bits(value, value < 0), sum_bits, colour) if isinstance(value, Fraction) else str(value)
    lines.append(f"{f'{step.rounding} to {step.fmt}':{left}}{rounded}")
    result = f"result {result_text(step)}; the sum is {exact_decimal_text(exact_sum)}, {rounding_text(step)}"
    return [*lines, *wrap_lines(result, indent="  ")]


def _dim(text: str, colour: bool) -> str:
    return f"{ANSI_DIM}{text}{ANSI_RESET}" if colour and text else text


def truncated_bits(value: Fraction, last_bit: int, room: int) -> str:
    """Format the bits of a truncated value below 2^last_bit, down to the lowest bit that is set, in at most `room` characters."""
    if value == 0:
        return ""
    lowest = -(value.denominator.bit_length() - 1) if value.denominator > 1 else (value.numerator & -value.numerator).bit_length() - 1
    width = last_bit - lowest
    digits = f"{int(abs(value) / power_of_two(lowest)):0{width}b}"
    return digits if width <= room else digits[: room - 3] + "..."


def rounded_bits(step: Step, result_bits: str, sum_bits: str, colour: bool) -> str:
    """Format the bits of the result, and right of "/" the bits of the sum that rounding dropped."""
    alignment_exponent, last_bit = step.require_alignment()
    last = step.result_last_bit
    if last <= last_bit:
        return result_bits + "|"
    # a result of 0 may have room for none of the bits
    retained = max(1, len(result_bits) - (last - last_bit) - (last > alignment_exponent))
    return f"{result_bits[:retained]}/{_dim(sum_bits[retained:], colour)}|"


def _fma_lines(steps: Sequence[Step], first: int, count: int) -> list[str]:
    """Tabulate consecutive multiply-adds, of which the first has the number `first` of `count` steps."""
    headings, rows, rules = ("step", "", "a", "b", "a x b", "result", "", "dropped, ulp"), [], []
    for number, step in enumerate(steps, first):
        term = step.terms[-1]
        product = term.products[0]
        if step.rule is not None:
            rules += wrap_lines(f"step {number}: {step.rule}", indent="  ")
        loss, exact_sum = step.rounding_loss, step.exact_sum
        dropped = "" if loss is None or exact_sum is None else decimal_text(loss / ulp(step.fmt, exact_sum), 4)
        cells = (decimal_text(product.decoded_a.value), decimal_text(product.decoded_b.value), decimal_text(term.value))
        rows.append((str(number), term.name, *cells, hex_code(step.fmt, step.result), shortest_text(step.fmt, step.result), dropped))
    last = first + len(steps) - 1
    title = f"step {first} of {count}" if last == first else f"steps {first} to {last} of {count}"
    start = steps[0].terms[0].name if len(steps[0].terms) > 1 else "nothing"
    description = f"fused multiply-adds in {steps[0].fmt}, from {start} on, each rounded {steps[0].rounding}"
    return [f"{title}: {description}", *table_lines(headings, rows, left=(1,)), *rules]


def _equation_lines(step: Step, title: str) -> list[str]:
    terms = " + ".join(f"{t.name} {decimal_text(t.value, 12)}" for t in step.terms)
    return wrap_lines(f"{title}: {terms}, {step.rounding} to {step.fmt} -> {result_text(step)}, {rounding_text(step)}", indent="  ")


def _integer_lines(step: Step, spec: ProductSpec, title: str) -> list[str]:
    assert step.exact_sum is not None
    lines = wrap_lines(f"{title}: {list_names([t.name for t in step.terms])}", indent="  ")
    if spec.bit_op is not None:
        lines += _bit_rows(step, spec.bit_op)
    else:
        terms = [t for t in step.terms if not _is_zero_term(t)]
        lines += [*_term_table(terms, ["", "a", "b", "a x b"], spec, [()] * len(terms)), *_zero_terms_lines(step.terms)]
    return [*lines, f"sum {exact_decimal_text(step.exact_sum)}", f"result {result_text(step)}" + (f", {step.rule}" if step.rule else "")]


def _bit_rows(step: Step, bit_op: str) -> list[str]:
    """Format the operands of single-bit products as rows of 64 bits."""
    lines = [f"C {exact_decimal_text(step.terms[0].value)}"]
    terms = step.terms[1:]
    for start in range(0, len(terms), 64):
        row_terms = terms[start : start + 64]
        lines.append(f"k {start} to {start + len(row_terms) - 1}")
        results = [int(t.value) for t in row_terms if isinstance(t.value, Fraction)]
        rows = (("a", [t.products[0].a for t in row_terms]), ("b", [t.products[0].b for t in row_terms]), (bit_op, results))
        lines += [f"  {name:4}" + "".join(map(str, bits)) for name, bits in rows]
        lines[-1] += f"  {sum(results)} set"
    return lines
