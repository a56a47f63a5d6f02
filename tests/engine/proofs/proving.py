"""Proofs by a solver: `prove` shows that no values of the variables contradict a claim."""

from __future__ import annotations

from smt_values import Kind, SmtValue, Trace, bitwuzla


class Refuted(AssertionError):
    """There are values for which a claim is false."""


def prove(trace: Trace, claim: SmtValue, *assumed: SmtValue, demands: bool = True) -> None:
    """Shows a claim for all values of the variables for which the assumptions hold, and what the operations demand.

    Args:
        trace: That of the claim.
        claim: A condition.
        *assumed: Conditions.
        demands: Also show the demands of operations.

    Raises:
        Refuted: The message has the values.
    """
    options = bitwuzla.Options()
    options.set(bitwuzla.Option.PRODUCE_MODELS, True)
    assert is_satisfiable(trace, *assumed), "the assumptions contradict each other, so that they imply everything"
    solver = bitwuzla.Bitwuzla(trace.terms, options)
    claims = [claim.term, *(trace.demands if demands else [])]
    for term in (*trace.facts, *(condition.term for condition in assumed)):
        solver.assert_formula(term)
    solver.assert_formula(trace.make(Kind.OR, trace.terms.mk_false(), *(trace.make(Kind.NOT, term) for term in claims)))
    result = solver.check_sat()
    if result == bitwuzla.Result.SAT:
        raise Refuted(", ".join(f"{v.term.symbol()} = {solver.get_value(v.term)}" for v in trace.named))
    assert result == bitwuzla.Result.UNSAT, result


def is_satisfiable(trace: Trace, *assumed: SmtValue) -> bool:
    """Returns whether some values fulfil all conditions."""
    solver = bitwuzla.Bitwuzla(trace.terms, bitwuzla.Options())
    for condition in assumed:
        solver.assert_formula(condition.term)
    return solver.check_sat() == bitwuzla.Result.SAT
