"""`fingerprint`: the order in which a black box adds, found by probes and confirmed on operands that took no part in the search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from tcemu.base.text import wrap_lines
from tcemu.engine.formats.number_formats import BF16, E4M3, E5M2, F16, F32, FORMATS, Format
from tcemu.engine.formats.rounding import ROUNDINGS
from tcemu.operations.products.library.kernel_order import slice_indices, step_order
from tcemu.operations.products.library.kernel_recipe import Conditions, KernelRecipe, Slices, Steps
from tcemu.uses.replay.black_box import (
    FP8_FORMATS,
    FRAMEWORKS,
    PLAIN_FORM,
    BlackBox,
    CallsExhausted,
    ProductForm,
    codes_to_float64,
    detect_framework,
    repeat,
    round_to_codes,
)
from tcemu.uses.replay.drawn_matrices import epilogue_kinds
from tcemu.uses.replay.order_candidates import MAX_SLICES, OTHER_TARGETS, TARGETS, find_orders, find_slicings, rounding_variants
from tcemu.uses.replay.order_probes import (
    PairAnswers,
    ask_pairs,
    count_dropped,
    draw_pairs,
    draw_windows,
    explains_answers,
    find_distinguishing_pairs,
    max_window_terms,
)
from tcemu.uses.replay.recipe_results import Sample, answer_sample, ask_sample, find_distinguishing_sample, repeat_operands, select_matching
from tcemu.uses.replay.summation_levels import equivalence_key, recipe_levels

MAX_STEP_TERMS = {F16: 16, BF16: 16, F32: 8, E4M3: 32, E5M2: 32}  # terms of the longest step of each format
MAX_SLICE_CALLS = 16
PROBE_EXPONENTS = {
    F16: (7, 0, -24),
    BF16: (7, 0, -40),
    F32: (7, 0, -40),
    E5M2: (7, 0, -16),
    E4M3: (6, 4, -9),
}  # exponents: large, small, smallest
OPERAND_FORMATS = (F16, BF16, F32, E4M3, E5M2)
INTEGERS = ("s8", "u8", "int8", "uint8")
MAX_CALLS = 64
# kinds of operands that eliminate candidates, and kinds that confirm the remaining one
ELIMINATION_KINDS = ("cancelling", "flat", "spread", "late", "near", "steep", "ties", "positive", "zeros", "tiny", "huge")
HELD_OUT_KINDS = ("cancelling", "steep", "late", "ties", "near", "positive", "zeros", "spread", "flat", "tiny")
EPILOGUE_SAMPLES = (  # kinds of operands, and of scales and biases
    ("flat", "mild"), ("flat", "low a"), ("flat", "low b"), ("tiny", "beyond"), ("huge", "beyond"), ("flat", "aimed"), ("zeros", "mild"),
    ("spread", "mild"), ("positive", "aimed"),
)  # fmt: skip
MIN_HELD_OUT_OUTPUTS = 64  # minimum of outputs on held-out operands, if the calls allow it
REPEATS = 3
ROUNDS = 3  # rounds of pairs for which the candidates differ


@dataclass(frozen=True)
class OrderFinding:
    """One finding of the probes, and the number of calls that it needed."""

    label: str
    value: str
    calls: int

    def __str__(self) -> str:
        return f"{self.label}: {self.value} [{self.calls} call{'s' if self.calls != 1 else ''}]"


@dataclass(frozen=True)
class Fingerprint:
    """The order in which a black box adds, as far as its answers show it. `str()` is a report for people.

    Attributes:
        name: Name of the function.
        shape: M, N and K.
        recipe: The one order that agrees with every answer, or None.
        findings: The findings of the probes.
        calls: Number of calls of the black box.
        compared: Number of outputs on held-out operands. `recipe` gives the black box's bits for all of them.
        survivors: The orders that agree with every answer, if they are several that are not equivalent.
        reason: The reason why there is no recipe, and what would tell more.
    """

    name: str
    shape: tuple[int, int, int]
    recipe: KernelRecipe | None
    findings: tuple[OrderFinding, ...]
    calls: int
    compared: int
    survivors: tuple[KernelRecipe, ...] = ()
    reason: str = ""

    @property
    def determined(self) -> bool:
        """True if exactly one order agrees with every answer."""
        return self.recipe is not None

    def __str__(self) -> str:
        m, n, k = self.shape
        lines = [f"{self.name}, M = {m}, N = {n}, K = {k}, by {self.calls} calls:"]
        lines += [line for f in self.findings for line in wrap_lines(f"  {f}", indent="    ")]
        if self.recipe is not None:
            return "\n".join([*lines, str(self.recipe), f"0 differences in {self.compared:,} outputs of held-out operands."])
        lines += wrap_lines(f"undetermined: {self.reason}", indent="  ")
        for survivor in self.survivors[:4]:
            lines += ["  " + line for line in str(survivor).splitlines()]
        return "\n".join([*lines, *(["  ..."] if len(self.survivors) > 4 else [])])


def fingerprint(
    fn: Callable,
    m: int,
    n: int,
    k: int,
    *,
    operand_dtype: str | Format | tuple[str | Format, str | Format] = "f16",
    form: ProductForm = PLAIN_FORM,
    framework: str | None = None,
    device: str | None = None,
    targets: Sequence[str] = TARGETS,
    max_calls: int = MAX_CALLS,
    seed: int = 1,
    conditions: Conditions | None = None,
) -> Fingerprint:
    """Find the order and the arithmetic by which a function computes A·B.

    The result has exactly one recipe, with which every answer agrees, or none and the reason. Nothing is guessed. A function is refused
    if its order is not among the candidates (see `tcemu.uses.replay.order_candidates`), if it differs between outputs, or if it differs
    between calls. The claim covers what was compared: operands of many magnitudes, subnormal and infinite results, on all outputs. The
    code of a NaN is not compared. A recipe names one of several instructions with the same arithmetic, and does not claim which of them
    runs.

    With a form, the order is found with scales of one and a bias of zero. Drawn scales and biases then show which product is rounded
    first, and whether the bias is added before or after a rounding. A bias with which a kernel begins its sums is not among the
    candidates.

    Args:
        fn: Function of A [m, k] and B [k, n] that returns A·B [m, n] in f32, f16 or bf16. Both operands are new arrays in row-major order
            in each call.
        m: Rows of A.
        n: Columns of B.
        k: Columns of A.
        operand_dtype: Format of both operands, f16, bf16, f32, e4m3 or e5m2; or a pair of e4m3 and e5m2 for A and B.
        form: The keyword arguments that `fn` takes besides A and B: scales, a bias.
        framework: Array type that `fn` takes, "numpy", "jax" or "torch". None: the framework of its module, otherwise NumPy.
        device: Device of the arrays, "cuda" or "cpu".
        targets: Targets whose matrix units are candidates. The default is every arithmetic of NVIDIA's, and if none explains the
            answers, units of CPUs.
        max_calls: Upper bound of the calls of `fn`.
        seed: Seed of the operands.
        conditions: Known facts about the library, which the recipe keeps.

    Returns:
        The fingerprint.

    Raises:
        ValueError, TypeError: An argument is invalid. Exceptions of `fn` pass through.
    """
    formats = _parse_formats(operand_dtype)
    for name, value, smallest in (("m", m, 1), ("n", n, 1), ("k", k, 1), ("max_calls", max_calls, 8)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < smallest:
            raise ValueError(f"{name}={value!r}: expected an integer from {smallest}")
    if not isinstance(form, ProductForm):
        raise TypeError(f"form={form!r}: expected a tcemu.replay.ProductForm")
    framework = detect_framework(fn) if framework is None else framework
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework={framework!r}: expected one of {', '.join(FRAMEWORKS)}")
    name = getattr(fn, "__qualname__", None) or type(fn).__name__
    black_box = BlackBox(fn, (int(m), int(n), int(k)), formats, framework, device, min(int(max_calls), MAX_CALLS), form)
    known_conditions = form.extend_conditions(replace(conditions or Conditions(layout="rr"), m=int(m), n=int(n)))
    search = OrderSearch(black_box, name, tuple(targets), seed, known_conditions)
    try:
        return search.find_recipe()
    except CallsExhausted:
        return search.undetermined(f"all {black_box.max_calls} calls were used up before one order remained", search.remaining)


def _parse_formats(dtype: str | Format | tuple[str | Format, str | Format]) -> tuple[Format, Format]:
    """Return the formats of A and B. Raises ValueError."""
    pair = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    if any(str(fmt) in INTEGERS for fmt in pair):
        raise ValueError(
            f"operand_dtype={str(dtype)!r}: sums of integers are exact, also where they wrap, so that every order gives the same bits and "
            "none can be found. tcemu.gemm(a, b, op='s8', target=...) computes them"
        )
    formats = [FORMATS.get(one) if isinstance(one, str) else one for one in pair]
    known = [one for one in formats if one is not None and one in OPERAND_FORMATS]
    if len(formats) != 2 or len(known) != 2:
        raise ValueError(f"operand_dtype={dtype!r}: expected one of {', '.join(map(str, OPERAND_FORMATS))}, or two of e4m3 and e5m2")
    a, b = known
    if a != b and not {a, b} <= set(FP8_FORMATS):
        raise ValueError(f"operand_dtype={dtype!r}: two different formats must both be FP8")
    return a, b


class OrderSearch:
    """The search for the order of one black box, and its findings so far."""

    def __init__(self, black_box: BlackBox, name: str, targets: tuple[str, ...], seed: int, conditions: Conditions):
        self.black_box, self.name, self.targets, self.seed, self.conditions = black_box, name, targets, seed, conditions
        self.rng = np.random.default_rng([seed, *black_box.shape])
        self.other_targets = OTHER_TARGETS if targets == TARGETS else ()
        self.findings: list[OrderFinding] = []
        self.samples: dict[str, Sample] = {}
        self.remaining: list[KernelRecipe] = []
        self.compared = 0
        self.noted_calls = 0

    def note(self, label: str, value: str) -> None:
        self.findings.append(OrderFinding(label, value, self.black_box.calls - self.noted_calls))
        self.noted_calls = self.black_box.calls

    def undetermined(self, reason: str, survivors: Sequence[KernelRecipe] = ()) -> Fingerprint:
        return Fingerprint(self.name, self.black_box.shape, None, tuple(self.findings), self.black_box.calls, 0, tuple(survivors), reason)

    def find_recipe(self) -> Fingerprint:
        """Run the probes in turn. Raises CallsExhausted."""
        if not self.check_repeatable():
            return self.undetermined(
                f"the same operands gave other bits among {REPEATS} calls: sums in an order that changes, as by "
                "atomic additions, have no recipe"
            )
        if not self.check_positions():
            return self.undetermined(
                "the same rows and columns give other bits at other outputs: outputs are added in different orders, as by a kernel that "
                "divides K where a thread block's share of the work ends (stream-K, segment-K)"
            )
        dropped = count_dropped(self.black_box)
        if dropped is None:
            return self.undetermined("ones at the end of K do not sum to their number: the outputs differ, or are not sums")
        self.note(
            "all ones", "every product is added" if not dropped else f"the last {dropped} products are LEFT OUT: a fault of the library"
        )
        answers = self.probe_pairs(dropped)
        neutral = next(
            self.black_box.form.possible_epilogues(self.black_box.result_format)
        )  # with scales of 1 and a bias of 0 all epilogues agree, except for signs of zeros
        orders = [recipe.replace(epilogue=neutral) for recipe in self.explaining_orders(dropped, answers)]
        if not orders:
            return self.undetermined(
                "no order among the candidates gives these answers: the order is another one, or differs between outputs. "
                "The kernel's name and its configuration would tell more"
            )
        classes = self.variants(orders)
        self.remaining = self.eliminate(classes)
        if not self.remaining:
            known = set(map(equivalence_key, classes))
            rare = {
                equivalence_key(recipe): recipe for tree in reversed(orders) for recipe in reversed([*rounding_variants(tree, rare=True)])
            }
            self.remaining = self.eliminate([recipe for key, recipe in reversed(rare.items()) if key not in known])
        if not self.remaining:
            self.remaining = self.eliminate(self.orders_with_other_steps(orders))
        if not self.remaining:
            others = [recipe.replace(epilogue=neutral) for recipe in self.orders_of_other_makers(dropped, answers)]
            self.remaining = self.eliminate(self.variants(others)) if others else []
        if not self.remaining:
            return self.undetermined(
                "a candidate has this order of terms, but no arithmetic among the candidates gives the bits: possible reasons are steps "
                "with other fraction bits, other roundings on the way, flushed subnormal numbers, or outputs added in different orders",
                orders,
            )
        if not self.black_box.form.is_plain:
            orders = self.remaining
            self.remaining = self.find_epilogues(orders)
            if not self.remaining:
                return self.undetermined(
                    f"the order is known for scales of 1 and a bias of 0, but no candidate explains {self.black_box.form}: they may be "
                    "multiplied or added elsewhere, as in each slice or at the start of the sums, rounded otherwise, or with "
                    "flushed subnormal numbers",
                    orders,
                )
        return self.confirm()

    @staticmethod
    def variants(orders: list[KernelRecipe]) -> list[KernelRecipe]:
        """Return the orders with every rounding, one recipe of each class of equivalent ones."""
        classes: dict = {}
        for recipe in (v for tree in orders for v in rounding_variants(tree)):
            classes.setdefault(equivalence_key(recipe), recipe)
        return list(classes.values())

    # ---- probes

    def check_repeatable(self) -> bool:
        """Return whether the same operands give the same bits several times."""
        first = ask_sample(self.black_box, "cancelling", self.seed)
        a, b = repeat_operands(first, *self.black_box.shape[:2])
        again = [self.black_box(a, b) for _ in range(REPEATS - 1)]
        same = all((x == first.answer).all() for x in again)
        self.note(
            "repeated", f"the same bits {REPEATS} times, results in {self.black_box.result_format}" if same else "other bits the next time"
        )
        self.samples[first.kind] = first
        return same

    def check_positions(self) -> bool:
        """Return whether repeated rows and columns give the same bits at every output."""
        (sample,) = self.samples.values()
        m, n, _ = self.black_box.shape
        first = sample.answer[: len(sample.a), : sample.b.shape[1]]
        same = bool((repeat(repeat(first, 0, m), 1, n) == sample.answer).all())
        if not same:
            self.note("outputs", "equal operands, other bits")
        return same

    def probe_pairs(self, dropped: int) -> list[PairAnswers]:
        """Ask about drawn pairs and windows."""
        m, n, k = self.black_box.shape
        if k - dropped < 3:
            return []
        count = 4 if m * n >= 256 else 6 if m * n >= 32 else 12
        max_terms = max_window_terms(self.black_box)
        answers = []
        for _ in range(count):
            pairs, windows, by_rows = draw_pairs(self.rng, self.black_box, k - dropped, max_terms)
            if windows.any():
                answers.append(ask_pairs(self.black_box, pairs, windows, by_rows=by_rows))
        count_total = sum(len(a.pairs) * len(a.windows) for a in answers)
        self.note("pairs of large terms", f"{count_total:,} counts of the small terms that survive beside them")
        return answers

    def explaining_orders(self, dropped: int, answers: list[PairAnswers]) -> list[KernelRecipe]:
        """Return the orders that explain the answers."""
        formats, k = self.black_box.operand_formats, self.black_box.shape[2]
        slicings = find_slicings(k, dropped, (), answers)
        orders = find_orders(formats, self.black_box.result_format, self.targets, slicings, answers)
        orders = orders or self.orders_of_other_makers(dropped, answers)
        if not orders and not dropped:
            read = probe_slices(self.black_box, self.rng)
            self.note("slices of any length", "the terms lost beside pairs (0, j) show none" if read is None else str(read))
            if read is not None:
                slicings = find_slicings(k, dropped, (read,), answers)
                targets = (*self.targets, *self.other_targets)
                orders = find_orders(formats, self.black_box.result_format, targets, [f for f in slicings if f[0] == read], answers)
        orders = self.distinguish_orders(orders, k - dropped)
        several = {len(slice_indices(o.slices)) for o in orders}
        self.note("orders", f"{len(orders)} candidates explain them all" + (f", with {sorted(several)} slices" if orders else ""))
        return orders

    def orders_of_other_makers(self, dropped: int, answers: list[PairAnswers]) -> list[KernelRecipe]:
        """Return the orders by units of other makers that explain the answers, also as software computes them, with subnormals kept."""
        if not self.other_targets:
            return []
        slicings = find_slicings(self.black_box.shape[2], dropped, (), answers)
        found = find_orders(self.black_box.operand_formats, self.black_box.result_format, self.other_targets, slicings, answers)
        units = [(recipe, recipe.unit) for recipe in found if isinstance(recipe.unit, Steps)]
        found = [recipe for recipe, _ in units]
        for recipe, unit in units:
            if unit.arithmetic.flush is not None:
                found.append(recipe.replace(unit=replace(unit, model=unit.arithmetic.replace(flush=None))))
        self.note("units of other makers", f"{len(found)} candidates explain the answers")
        return found

    def distinguish_orders(self, orders: list[KernelRecipe], usable: int) -> list[KernelRecipe]:
        """Select the orders that also explain answers about pairs for which they differ."""
        max_terms = max_window_terms(self.black_box)
        for _ in range(ROUNDS):
            trees = {equivalence_key(recipe): recipe_levels(recipe) for recipe in reversed(orders)}
            pairs = find_distinguishing_pairs(self.rng, list(trees.values()), usable, max(self.black_box.shape[:2]))
            if not pairs:
                break
            by_rows = self.black_box.shape[0] >= self.black_box.shape[1]
            free = np.setdiff1d(np.arange(usable), [place for pair in pairs for place in pair])
            windows = draw_windows(self.rng, free, self.black_box.shape[2], min(256, self.black_box.shape[1 if by_rows else 0]), max_terms)
            answers = ask_pairs(self.black_box, pairs, windows, by_rows=by_rows)
            orders = [recipe for recipe in orders if explains_answers(recipe_levels(recipe), answers)]
        return orders

    def orders_with_other_steps(self, orders: list[KernelRecipe]) -> list[KernelRecipe]:
        """Return the orders with the fraction bits that a probe shows and every rounding, for cores that nobody has measured."""
        found = []
        for recipe in orders:
            if not isinstance(recipe.unit, Steps):
                continue
            bits = probe_fraction_bits(self.black_box, step_order(recipe.unit, recipe.slices).indices[0])
            self.note("fraction bits of a step", "not found" if bits is None else f"{bits} bits below the max exponent")
            if bits is None:
                break
            arithmetic = recipe.unit.arithmetic
            for rounding, result_bits in product(ROUNDINGS[:4], dict.fromkeys([None, min(bits, 22), arithmetic.result_bits])):
                model = arithmetic.replace(fraction_bits=bits, rounding=rounding, result_bits=result_bits)
                found += rounding_variants(recipe.replace(unit=replace(recipe.unit, model=model)))
            break
        return list({equivalence_key(recipe): recipe for recipe in reversed(found)}.values())[::-1]

    # ---- elimination

    def eliminate(self, candidates: list[KernelRecipe]) -> list[KernelRecipe]:
        """Select the candidates that give the black box's bits on operands of every kind."""
        every = len(candidates)
        kinds = (
            (*ELIMINATION_KINDS, "halves") if self.black_box.operand_formats[0] == F32 else (*ELIMINATION_KINDS, *self.subnormal_kinds())
        )
        for kind in kinds:
            if not candidates:
                return []
            if kind not in self.samples:
                self.samples[kind] = ask_sample(self.black_box, kind, self.seed)
            candidates = select_matching(candidates, self.samples[kind], signs=self.black_box.form.is_plain)
            if not candidates:
                self.note("elimination", f"none of {every} orders with their roundings gives the bits on operands of kind {kind!r}")
                return []
        self.note(
            "elimination", f"{len(candidates)} of {every} orders with their roundings give the bits on operands of {len(kinds)} kinds"
        )
        return candidates

    def find_epilogues(self, orders: list[KernelRecipe]) -> list[KernelRecipe]:
        """Combine the orders with every possible epilogue, and select those that give the black box's bits."""
        every: dict = {}
        for order, epilogue in product(orders, self.black_box.form.possible_epilogues(self.black_box.result_format)):
            recipe = order.replace(epilogue=epilogue)
            every.setdefault(equivalence_key(recipe), recipe)
        candidates = list(every.values())
        for sample in self.samples.values():
            candidates = select_matching(candidates, sample)
        hows = epilogue_kinds(self.black_box.form)
        kinds = [(kind, epilogue_kind) for kind, epilogue_kind in EPILOGUE_SAMPLES if epilogue_kind in hows]
        for number, (kind, how) in enumerate(kinds):
            if not candidates:
                break
            candidates = select_matching(candidates, ask_sample(self.black_box, kind, self.seed + 500 + number, how, orders[0]))
        self.note("scales and bias", f"{len(candidates)} of {len(every)} ways give the bits with {len(kinds)} draws of them")
        return candidates

    def epilogue_kind(self, number: int) -> str | None:
        """Return one of the kinds of scales and biases, each in turn."""
        hows = (*epilogue_kinds(self.black_box.form), "mild")
        return None if self.black_box.form.is_plain else hows[number % len(hows)]

    def distinguish_recipes(self) -> None:
        """Eliminate remaining recipes by operands on which they differ, until no such operands occur."""
        m, n, _ = self.black_box.shape
        several = len(self.remaining)
        for number in range(several):
            if len(self.remaining) < 2:
                break
            hows = [None] if self.black_box.form.is_plain else [*epilogue_kinds(self.black_box.form), None]
            request = find_distinguishing_sample(self.black_box, self.remaining, self.seed + 2000 + 100 * number, hows)
            if request is None:
                break
            self.remaining = select_matching(self.remaining, answer_sample(self.black_box, request))
            self.compared += m * n
        self.note("operands on which they differ", f"{len(self.remaining)} of {several} orders give the bits")

    def subnormal_kinds(self) -> tuple[str, ...]:
        """Return the kinds of operands whose results are subnormal in the result's format, if "tiny" results are below that range."""
        return ("subnormal",) if self.black_box.result_format == BF16 and self.black_box.operand_formats[0] == BF16 else ()

    def confirm(self) -> Fingerprint:
        """Compare the remaining recipes with the black box on new operands until one class is left and confirmed."""
        m, n, _ = self.black_box.shape
        self.compared = 0
        kinds = (*HELD_OUT_KINDS, *self.subnormal_kinds())
        for number in range(self.black_box.max_calls):
            enough = number >= len(kinds) and (self.compared >= MIN_HELD_OUT_OUTPUTS or number >= 24)
            if enough:
                break
            sample = ask_sample(
                self.black_box, kinds[number % len(kinds)], self.seed + 1000 + number, self.epilogue_kind(number), self.remaining[0]
            )
            survivors = select_matching(self.remaining, sample)
            if not survivors:
                return self.undetermined(
                    f"held-out operands of kind {sample.kind!r} refute the last {len(self.remaining)} candidates",
                    self.remaining,
                )
            self.remaining, self.compared = survivors, self.compared + m * n
        self.note("held-out operands", f"{self.compared:,} outputs, 0 differences")
        if len(self.remaining) > 1:
            self.distinguish_recipes()
        if not self.remaining:
            return self.undetermined("operands on which the last candidates differ refute them all")
        if len(self.remaining) > 1:
            return self.undetermined(
                f"{len(self.remaining)} orders that are not equivalent agree with every answer: a longer K, or results in a wider "
                "format, would distinguish them",
                self.remaining,
            )
        evidence = f"{self.compared} held-out outputs, seed {self.seed}, {self.black_box.calls} calls"
        recipe = self.remaining[0].replace(conditions=replace(self.conditions, evidence=evidence))
        return Fingerprint(self.name, self.black_box.shape, recipe, tuple(self.findings), self.black_box.calls, self.compared)


def probe_slices(black_box: BlackBox, rng: np.random.Generator) -> Slices | None:
    """Find contiguous slices of any lengths, whose sums are added in ascending order, by the terms lost beside pairs (0, j).

    Within the first slice the lost prefix ends with the step of j, and beyond it with the slice of j. The result is a proposal, which the
    caller compares with all other answers. It is None if the lost terms are no prefixes of K, or show one slice.
    """
    k = black_box.shape[2]
    grid, step = (8 if k <= 4096 else 16), MAX_STEP_TERMS[black_box.operand_formats[0]]
    indices = list(range(3, k, grid))  # odd indices, which exclude the usual edges
    if -(-len(indices) // max(black_box.shape[:2])) > MAX_SLICE_CALLS:
        return None
    ends = probe_lost_prefixes(black_box, rng, indices)
    if ends is None:
        return None
    beyond = next((at for at, (j, end) in enumerate(zip(indices, ends, strict=True)) if end > j + step), None)
    if not beyond:
        return None
    low, first, high = indices[beyond - 1], ends[beyond - 1], indices[beyond]  # the first slice ends between them
    while high - low > 1:
        middle = (low + high) // 2
        middle_ends = probe_lost_prefixes(black_box, rng, [middle])
        if middle_ends is None:
            return None
        if middle_ends[0] > middle + step:
            high = middle
        else:
            low, first = middle, middle_ends[0]
    edges = sorted({first, *(x for x, y in pairwise(ends[beyond:]) if x == y), k})
    return Slices.from_edges((0, *edges)) if len(edges) <= MAX_SLICES else None


def probe_lost_prefixes(black_box: BlackBox, rng: np.random.Generator, indices: Sequence[int]) -> list[int] | None:
    """Find where the terms lost beside pairs (0, j) end, for each index j. Returns None if the lost terms cannot be a prefix of K."""
    m, n, k = black_box.shape
    by_rows, max_terms = m >= n, max_window_terms(black_box)
    per, across = (m, n) if by_rows else (n, m)
    if k > max_terms * across:
        return None
    ends: list[int] = []
    for start in range(0, len(indices), per):
        pairs = [(0, j) for j in indices[start : start + per]]
        free = np.setdiff1d(np.arange(k), [0, *(j for _, j in pairs)])
        answers = ask_pairs(black_box, pairs, draw_windows(rng, free, k, across, max_terms), by_rows=by_rows)
        for (_, j), counts in zip(pairs, answers.counts, strict=True):
            end = None if (counts < 0).any() else _prefix_end(free, k, j, len(free) - int(counts.sum()))
            if end is None:
                return None
            ends.append(end)
    return ends


def _prefix_end(free: np.ndarray, k: int, j: int, lost: int) -> int | None:
    """Return the end of the prefix that has index j and `lost` free indices, or None if occupied indices leave it open."""
    if lost >= len(free):
        return k
    end = max(int(free[lost - 1]) if lost else 0, j) + 1
    return end if free[lost] == end else None


def probe_fraction_bits(black_box: BlackBox, indices: np.ndarray) -> int | None:
    """Count the bits that a step retains below its max exponent: 2^e - 2^e + 2^(e - d) is 2^(e - d) up to this d, then 0. Makes one call.

    Args:
        black_box: The black box.
        indices: Indices along K of one instruction, whose first three are in one step.

    Returns:
        The fraction bits, or None if there are fewer indices, or no truncation explains the survivors.
    """
    m, n, k = black_box.shape
    own = [int(p) for p in indices if p >= 0][:3]
    if len(own) < 3 or max(m, n) < 32:
        return None
    of_one, of_other = black_box.operand_formats if m <= n else black_box.operand_formats[::-1]
    (top, small, _), (other_top, other_small, least) = PROBE_EXPONENTS[of_one], PROBE_EXPONENTS[of_other]
    small, tops = max(small, other_small), top + other_top
    distances = np.arange(1, min(max(m, n), tops - least - small + 1))
    one, other = np.zeros((1, k)), np.zeros((max(m, n), k))
    one[0, own] = 2.0**top, 2.0**top, 2.0**small
    other[:, own[0]], other[:, own[1]] = 2.0**other_top, -(2.0**other_top)
    other[: len(distances), own[2]] = np.exp2(tops - small - distances)
    one, other = round_to_codes(of_one, np.repeat(one, min(m, n), 0)), round_to_codes(of_other, other)
    answer = codes_to_float64(black_box.result_format, black_box(*((one, other.T) if m <= n else (other, one.T))))
    answer = (answer if m <= n else answer.T)[:, : len(distances)]
    expected = codes_to_float64(
        black_box.result_format,
        round_to_codes(black_box.result_format, float(np.float32(black_box.form.alpha)) * np.exp2(float(tops) - distances)),
    )
    survived = answer == expected
    bits = int(survived[0].sum())
    consistent = (survived[:, :bits]).all() and (answer[:, bits:] == 0).all()
    return bits if consistent and 0 < bits < len(distances) else None
