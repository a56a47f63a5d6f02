"""Where a value comes from, the parameters or the data, and the roles that the operands of a product have by that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BESIDE = {"activation": "weight", "weight": "activation", "gradient": "activation"}  # what a constant is taken for, by the other's role


@dataclass(frozen=True)
class Origin:
    """What a value depends on.

    parameters: the paths of the parameters; empty where data or a gradient is among its origins too, since then it is no weight.
    data: on the data. gradient: on a cotangent of reverse mode. None of these: it is a constant.
    """

    parameters: tuple[str, ...] = ()
    data: bool = False
    gradient: bool = False

    @property
    def role(self) -> str:
        """ "gradient", "activation", "weight" or "constant"."""
        if self.gradient:
            return "gradient"
        return "activation" if self.data else "weight" if self.parameters else "constant"


CONSTANT, DATA, GRADIENT = Origin(), Origin(data=True), Origin(gradient=True)


def together(origins: Iterable[Origin]) -> Origin:
    """The origin of what is computed from values of these."""
    origins = tuple(origins)
    data, gradient = any(o.data for o in origins), any(o.gradient for o in origins)
    parameters = () if data or gradient else tuple(dict.fromkeys(path for o in origins for path in o.parameters))
    return Origin(parameters, data, gradient)


def roles(lhs: Origin, rhs: Origin) -> tuple[str, str]:
    """The roles of a product's operands. A constant is a weight beside an activation, and data beside a weight or a gradient: a batch that
    the function closes over."""
    left, right = lhs.role, rhs.role
    return BESIDE.get(right, left) if left == "constant" else left, BESIDE.get(left, right) if right == "constant" else right
