"""`fingerprint`: how a black box multiplies, found by probes and held against the box on operands that took no part in finding it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from tcemu.formats import BF16, E4M3, E5M2, F16, F32, FORMATS, ROUNDINGS, Format
from tcemu.linalg.kernel_order import places_of_slices, step_order
from tcemu.linalg.kernel_recipes import Conditions, KernelRecipe, Steps
from tcemu.replay.boxes import FRAMEWORKS, Box, Spent, framework_of
from tcemu.replay.candidates import TARGETS, cuts, trees, variants
from tcemu.replay.comparison import Sample, answered, repeated, sample, surviving, telling_sample
from tcemu.replay.extras import hows_of
from tcemu.replay.findings import Finding, Fingerprint
from tcemu.replay.forms import PLAIN, Form
from tcemu.replay.probes import Asked, ask, drawn, fits, left_out, most_of, telling, windows_of
from tcemu.replay.reading import read_fraction_bits, read_slices
from tcemu.replay.trees import class_of, levels

HELD = (F16, BF16, F32, E4M3, E5M2)
NARROW = (E4M3, E5M2)
INTEGERS = ("s8", "u8", "int8", "uint8")
MOST_CALLS = 64
# kinds of operands by which candidates are eliminated, and those by which the one that is left is confirmed
FIRST = ("cancelling", "flat", "spread", "late", "near", "steep", "ties", "positive", "zeros", "tiny", "huge")
HELD_OUT = ("cancelling", "steep", "late", "ties", "near", "positive", "zeros", "spread", "flat", "tiny")
EPILOGUES = (  # kinds of operands, and of scales and biases
    ("flat", "mild"), ("flat", "low a"), ("flat", "low b"), ("tiny", "beyond"), ("huge", "beyond"), ("flat", "aimed"), ("zeros", "mild"),
    ("spread", "mild"), ("positive", "aimed"),
)  # fmt: skip
ENOUGH = 64  # outputs of held-out operands, at least, or so many as the calls allow
REPEATS = 3
ROUNDS = 3  # of pairs about which the candidates differ


def fingerprint(
    fn: Callable,
    m: int,
    n: int,
    k: int,
    *,
    dtype: str | Format | tuple[str | Format, str | Format] = "f16",
    form: Form = PLAIN,
    framework: str | None = None,
    device: str | None = None,
    targets: Sequence[str] = TARGETS,
    calls: int = MOST_CALLS,
    seed: int = 1,
    conditions: Conditions | None = None,
) -> Fingerprint:
    """Finds out in which order, and with which arithmetic, a function computes A·B.

    fn: takes A [m, k] and B [k, n] and returns A·B [m, n], in f32, f16 or bf16. dtype: of both operands: f16, bf16, f32, e4m3 or e5m2; or
    of A and of B, each e4m3 or e5m2. form: what fn takes besides, as keyword arguments: scales, a bias.
    framework: whose arrays it takes, "numpy", "jax" or "torch"; None: by the module it comes from, else NumPy. device: "cuda", "cpu".
    targets: whose tensor cores are candidates. calls: of fn, at most. conditions: what is known of the library, for the recipe.
    The result has exactly one recipe, with which every answer agrees, or none, and says why. Nothing is guessed: an order that is not
    among the candidates (see `tcemu.replay.candidates`), one that differs from output to output, and one that differs from call to call
    are refused. What was compared is what is claimed: operands of many magnitudes, subnormal and infinite results, on all outputs. The word
    of a NaN is not compared. A recipe names one instruction of several that have the same arithmetic; which of them runs is no claim.
    A and B come in row-major order, anew in each call.
    With a form, the order is found with scales of one and a bias of zero, and then by drawn ones how they enter: which product is rounded
    first, and whether a bias is added before or after a rounding. A bias that a kernel begins its sums with is none of the candidates.
    Raises ValueError or TypeError for arguments that cannot be, and what fn raises.
    """
    held = _held(dtype)
    for name, value, least in (("m", m, 1), ("n", n, 1), ("k", k, 1), ("calls", calls, 8)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise ValueError(f"{name}={value!r}: wanted a whole number from {least}")
    if not isinstance(form, Form):
        raise TypeError(f"form={form!r}: wanted a tcemu.replay.Form")
    framework = framework_of(fn) if framework is None else framework
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework={framework!r}: wanted one of {', '.join(FRAMEWORKS)}")
    name = getattr(fn, "__qualname__", None) or type(fn).__name__
    box = Box(fn, (int(m), int(n), int(k)), held, framework, device, min(int(calls), MOST_CALLS), form)
    known = form.conditions(replace(conditions or Conditions(layout="rr"), m=int(m), n=int(n)))
    search = Search(box, name, tuple(targets), seed, known)
    try:
        return search.run()
    except Spent:
        return search.undetermined(f"all {box.most} calls are spent before one order was left", search.left)


def _held(dtype: str | Format | tuple[str | Format, str | Format]) -> tuple[Format, Format]:
    """The formats of A and B. Raises ValueError."""
    pair = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    if any(str(one) in INTEGERS for one in pair):
        raise ValueError(
            f"dtype={str(dtype)!r}: sums of integers are exact, also where they wrap, so that every order gives the same bits and none can "
            "be found. tcemu.gemm(a, b, op='s8', target=...) gives the words"
        )
    held = [FORMATS.get(one) if isinstance(one, str) else one for one in pair]
    if len(held) != 2 or any(one not in HELD for one in held):
        raise ValueError(f"dtype={dtype!r}: wanted one of {', '.join(map(str, HELD))}, or two of e4m3 and e5m2")
    a, b = held
    if a != b and not {a, b} <= set(NARROW):
        raise ValueError(f"dtype={dtype!r}: two formats are of FP8, or one")
    assert a is not None and b is not None
    return a, b


class Search:
    """One box, and what is known of it so far."""

    def __init__(self, box: Box, name: str, targets: tuple[str, ...], seed: int, conditions: Conditions):
        self.box, self.name, self.targets, self.seed, self.conditions = box, name, targets, seed, conditions
        self.rng = np.random.default_rng([seed, *box.shape])
        self.findings: list[Finding] = []
        self.samples: dict[str, Sample] = {}
        self.left: list[KernelRecipe] = []
        self.compared = 0
        self.noted = 0

    def note(self, what: str, value: str) -> None:
        self.findings.append(Finding(what, value, self.box.calls - self.noted))
        self.noted = self.box.calls

    def undetermined(self, why: str, survivors: Sequence[KernelRecipe] = ()) -> Fingerprint:
        return Fingerprint(self.name, self.box.shape, None, tuple(self.findings), self.box.calls, 0, tuple(survivors), why)

    def run(self) -> Fingerprint:
        """The probes in turn. Raises Spent."""
        if not self.repeats():
            return self.undetermined(
                f"the same operands gave other bits among {REPEATS} calls: sums in an order that changes, as by atomic additions, "
                "have no recipe"
            )
        if not self.alike():
            return self.undetermined(
                "the same rows and columns give other bits in other places: outputs are added in different orders, as by a kernel that "
                "cuts K where a thread block's share of the work ends (stream-K, segment-K)"
            )
        dropped = left_out(self.box)
        if dropped is None:
            return self.undetermined("ones at the end of K are not added up as ones: the outputs differ from each other, or are no sums")
        self.note(
            "all ones", "every product is added" if not dropped else f"the last {dropped} products are LEFT OUT: a fault of the library"
        )
        answers = self.structure(dropped)
        assert self.box.out is not None
        neutral = next(self.box.form.epilogues(self.box.out))  # with scales of 1 and a bias of 0 all are one, but for signs of zeros
        orders = [recipe.replace(epilogue=neutral) for recipe in self.orders(dropped, answers)]
        if not orders:
            return self.undetermined(
                "no order among the candidates gives these answers: it is another one, or differs from output to output. "
                "The kernel's name and its configuration would tell more"
            )
        classes: dict = {}
        for recipe in (v for tree in orders for v in variants(tree)):
            classes.setdefault(class_of(recipe), recipe)
        self.left = self.eliminated(list(classes.values()))
        if not self.left:
            rare = {class_of(recipe): recipe for tree in reversed(orders) for recipe in reversed([*variants(tree, rare=True)])}
            self.left = self.eliminated([recipe for key, recipe in reversed(rare.items()) if key not in classes])
        if not self.left:
            self.left = self.eliminated(self.by_other_steps(orders))
        if not self.left:
            return self.undetermined(
                "the order of the terms is that of a candidate, but no arithmetic among the candidates gives the bits: steps of another "
                "width of fraction, other roundings on the way, subnormal numbers that are flushed, or outputs added in different orders",
                orders,
            )
        if not self.box.form.plain:
            orders = self.left
            self.left = self.with_epilogues(orders)
            if not self.left:
                return self.undetermined(
                    f"the order is known where scales are 1 and a bias is 0, but {self.box.form} enter in none of the ways that are "
                    "tried: multiplied or added elsewhere, as in each slice or at the start of the sums, rounded otherwise, or with "
                    "subnormal numbers that are flushed",
                    orders,
                )
        return self.confirmed()

    # ---- probes

    def repeats(self) -> bool:
        """The same operands, several times."""
        first = sample(self.box, "cancelling", self.seed)
        assert self.box.out is not None
        a, b = repeated(first, *self.box.shape[:2])
        again = [self.box(a, b) for _ in range(REPEATS - 1)]
        same = all((x == first.answer).all() for x in again)
        self.note("repeated", f"the same bits {REPEATS} times, results in {self.box.out}" if same else "other bits the next time")
        self.samples[first.kind] = first
        return same

    def alike(self) -> bool:
        """Rows and columns that are repeated give what the first ones give, wherever they are."""
        (asked,) = self.samples.values()
        m, n, _ = self.box.shape
        first = asked.answer[: len(asked.a), : asked.b.shape[1]]
        same = bool((first[np.arange(m) % len(first)][:, np.arange(n) % first.shape[1]] == asked.answer).all())
        if not same:
            self.note("places", "equal operands, other bits")
        return same

    def structure(self, dropped: int) -> list[Asked]:
        """Pairs and windows, drawn."""
        m, n, k = self.box.shape
        assert self.box.out is not None
        if k - dropped < 3:
            return []
        count = 4 if m * n >= 256 else 6 if m * n >= 32 else 12
        most = most_of(self.box)
        answers = []
        for _ in range(count):
            pairs, windows, by_rows = drawn(self.rng, self.box, k - dropped, most)
            if windows.any():
                answers.append(ask(self.box, pairs, windows, by_rows=by_rows))
        asked = sum(len(a.pairs) * len(a.windows) for a in answers)
        self.note("pairs of large terms", f"{asked:,} counts of the small terms that survive beside them")
        return answers

    def orders(self, dropped: int, answers: list[Asked]) -> list[KernelRecipe]:
        """The orders that explain them."""
        assert self.box.out is not None
        held, k = self.box.held, self.box.shape[2]
        found = cuts(k, dropped, (), answers)
        orders = trees(held, self.box.out, self.targets, found, answers)
        if not orders and not dropped:
            read = read_slices(self.box, self.rng)
            self.note("slices of any length", "none are read from the terms lost beside pairs (0, j)" if read is None else str(read))
            if read is not None:
                found = cuts(k, dropped, (read,), answers)
                orders = trees(held, self.box.out, self.targets, [f for f in found if f[0] == read], answers)
        orders = self.told_apart(orders, k - dropped)
        several = {len(places_of_slices(o.slices)) for o in orders}
        self.note("orders", f"{len(orders)} candidates explain them all" + (f", with {sorted(several)} slices" if orders else ""))
        return orders

    def told_apart(self, orders: list[KernelRecipe], usable: int) -> list[KernelRecipe]:
        """Those that explain answers about pairs for which they differ, too."""
        assert self.box.out is not None
        most = most_of(self.box)
        for _ in range(ROUNDS):
            kept = {class_of(recipe): levels(recipe) for recipe in reversed(orders)}
            pairs = telling(self.rng, list(kept.values()), usable, max(self.box.shape[:2]))
            if not pairs:
                break
            by_rows = self.box.shape[0] >= self.box.shape[1]
            free = np.setdiff1d(np.arange(usable), [place for pair in pairs for place in pair])
            windows = windows_of(self.rng, free, self.box.shape[2], min(256, self.box.shape[1 if by_rows else 0]), most)
            asked = ask(self.box, pairs, windows, by_rows=by_rows)
            orders = [recipe for recipe in orders if fits(levels(recipe), asked)]
        return orders

    def by_other_steps(self, orders: list[KernelRecipe]) -> list[KernelRecipe]:
        """The orders by steps that keep so many bits as a probe shows, with every rounding: of cores that nobody has measured."""
        found = []
        for recipe in orders:
            if not isinstance(recipe.unit, Steps):
                continue
            bits = read_fraction_bits(self.box, step_order(recipe.unit, recipe.slices).places[0])
            self.note("a step's fraction", "is not read" if bits is None else f"{bits} bits are kept below the largest exponent")
            if bits is None:
                break
            own = recipe.unit.arithmetic
            for rounding, kept in product(ROUNDINGS[:4], dict.fromkeys([None, min(bits, 22), own.result_bits])):
                model = own.replace(fraction_bits=bits, rounding=rounding, result_bits=kept)
                found += variants(recipe.replace(unit=replace(recipe.unit, model=model)))
            break
        return list({class_of(recipe): recipe for recipe in reversed(found)}.values())[::-1]

    # ---- elimination

    def eliminated(self, candidates: list[KernelRecipe]) -> list[KernelRecipe]:
        """Those that give the box's bits on operands of every kind."""
        every = len(candidates)
        kinds = (*FIRST, "halves") if self.box.held[0] == F32 else (*FIRST, *self.small())
        for kind in kinds:
            if not candidates:
                return []
            if kind not in self.samples:
                self.samples[kind] = sample(self.box, kind, self.seed)
            candidates = surviving(candidates, self.samples[kind], signs=self.box.form.plain)
            if not candidates:
                self.note(
                    "elimination", f"{every} orders with their roundings, of which none gives the bits of the operands of kind {kind!r}"
                )
                return []
        self.note(
            "elimination", f"{len(candidates)} of {every} orders with their roundings give the bits on operands of {len(kinds)} kinds"
        )
        return candidates

    def with_epilogues(self, orders: list[KernelRecipe]) -> list[KernelRecipe]:
        """The orders with every way in which scales and a bias may enter, as far as they give the box's bits."""
        assert self.box.out is not None
        every: dict = {}
        for order, epilogue in product(orders, self.box.form.epilogues(self.box.out)):
            recipe = order.replace(epilogue=epilogue)
            every.setdefault(class_of(recipe), recipe)
        candidates = list(every.values())
        for asked in self.samples.values():
            candidates = surviving(candidates, asked)
        hows = hows_of(self.box.form)
        kinds = [(kind, how) for kind, how in EPILOGUES if how in hows]
        for number, (kind, how) in enumerate(kinds):
            if not candidates:
                break
            candidates = surviving(candidates, sample(self.box, kind, self.seed + 500 + number, how, orders[0]))
        self.note("scales and bias", f"{len(candidates)} of {len(every)} ways give the bits with {len(kinds)} draws of them")
        return candidates

    def how(self, number: int) -> str | None:
        """A kind of scales and biases, each in turn."""
        hows = (*hows_of(self.box.form), "mild")
        return None if self.box.form.plain else hows[number % len(hows)]

    def by_telling_operands(self) -> None:
        """Fewer of those that are left, by operands on which they differ, until none are met."""
        m, n, _ = self.box.shape
        several = len(self.left)
        for number in range(several):
            if len(self.left) < 2:
                break
            hows = [None] if self.box.form.plain else [*hows_of(self.box.form), None]
            found = telling_sample(self.box, self.left, self.seed + 2000 + 100 * number, hows)
            if found is None:
                break
            self.left = surviving(self.left, answered(self.box, found))
            self.compared += m * n
        self.note("operands on which they differ", f"{len(self.left)} of {several} orders give the bits")

    def small(self) -> tuple[str, ...]:
        """The kinds of operands whose results are subnormal numbers of the result's format, where "tiny" ones are below it."""
        return ("subnormal",) if self.box.out == BF16 and self.box.held[0] == BF16 else ()

    def confirmed(self) -> Fingerprint:
        """Until one class is left and has been held against the box on new operands."""
        m, n, _ = self.box.shape
        self.compared = 0
        kinds = (*HELD_OUT, *self.small())
        for number in range(self.box.most):
            enough = number >= len(kinds) and (self.compared >= ENOUGH or number >= 24)
            if enough:
                break
            asked = sample(self.box, kinds[number % len(kinds)], self.seed + 1000 + number, self.how(number), self.left[0])
            survivors = surviving(self.left, asked)
            if not survivors:
                return self.undetermined(
                    f"held-out operands of kind {asked.kind!r} refute the last {len(self.left)} candidates: the order is a near one",
                    self.left,
                )
            self.left, self.compared = survivors, self.compared + m * n
        self.note("held-out operands", f"{self.compared:,} outputs, 0 differences")
        if len(self.left) > 1:
            self.by_telling_operands()
        if not self.left:
            return self.undetermined("operands on which the last candidates differ refute them all: the order is a near one")
        if len(self.left) > 1:
            return self.undetermined(
                f"{len(self.left)} orders that are not one give the same bits on everything that was asked: a longer K, or results "
                "in a wider format, would tell them apart",
                self.left,
            )
        evidence = f"{self.compared} held-out outputs, seed {self.seed}, {self.box.calls} calls"
        recipe = self.left[0].replace(conditions=replace(self.conditions, evidence=evidence))
        return Fingerprint(self.name, self.box.shape, recipe, tuple(self.findings), self.box.calls, self.compared)
