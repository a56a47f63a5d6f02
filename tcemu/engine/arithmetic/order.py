"""Order in which products are added: groups, steps and chains along K.

One instruction has `k` products. They are assigned in pairs to `groups`: pair number p goes to group p mod `groups`. A model may also
deal them out one by one (`dealing`). The groups are reduced one after the other, each in steps of `terms` products; the last step of a
group may be short. Without chains the steps follow each other from C on. With chains, the steps of each chain start from nothing, and
their outcome is added to C.

The engine, the coverage of fuzzing and the inference of black boxes read the order here. The reference in `arithmetic.reference` states it
a second time on purpose: it shares no code with the engine.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from tcemu.engine.arithmetic.model import DEALING_WIDTHS, Model


@dataclass(frozen=True)
class Order:
    """The fields of `Model` that say which term meets which."""

    terms: int  # products in one step; where the model's is traced, the most that a step may have
    groups: int = 1
    chain: int | str | None = None  # products in a chain; "k": those of one instruction; None: there are no chains
    together: bool = False  # the chains of one instruction are added to each other, and their sum to C
    dealing: str = "pairs"  # "pairs", "fours", "single" or "reversed": see `Model.dealing`

    @classmethod
    def from_model(cls, model: Model, k: int) -> "Order":
        """The order of a model whose instruction has k products. The groups of a joined step lie within the step."""
        groups = 1 if model.step_kind == "joined" else model.groups
        return cls(model.terms if isinstance(model.terms, int) else k, groups, model.chain, model.together, model.dealing)

    def step_size(self, k: int) -> int:
        """Products that one step has room for: a step reaches neither into the next group nor into the next instruction."""
        return min(self.terms, k // self.groups)

    def steps_per_instruction(self, k: int) -> int:
        return self.groups * -(-k // (self.groups * self.step_size(k)))

    def steps_per_chain(self, k: int) -> int | None:
        """Steps in a chain, at least one; None where there are no chains."""
        if self.chain is None:
            return None
        steps = self.steps_per_instruction(k)
        return steps if isinstance(self.chain, str) else max(1, self.chain * steps // k)

    def deal(self, products: Any, k: int) -> Any:
        """[K, ...] of whole instructions, NumPy or JAX: the products of each instruction, group after group."""
        if self.groups == 1:
            return products
        width = DEALING_WIDTHS[self.dealing]
        dealt = products.reshape(-1, k // (width * self.groups), self.groups, width, *products.shape[1:]).swapaxes(1, 2)
        return (dealt[:, ::-1] if self.dealing == "reversed" else dealt).reshape(products.shape)

    def is_arranged(self, k: int) -> bool:
        """True if the products of each step follow each other along K."""
        return self.groups == 1 and k % self.step_size(k) == 0

    def arrange(self, products: Any, k: int, axis: int) -> Any:
        """Bring K into the order of the steps. The last step of a group is filled with zeros, which take no part.

        Args:
            products: NumPy or JAX array with K, whole instructions, at `axis`.
            k: Products of an instruction.
            axis: A negative number.
        """
        if self.is_arranged(k):
            return products
        group, at = k // self.groups, products.ndim + axis
        dealt = jnp.moveaxis(self.deal(jnp.moveaxis(products, at, 0), k), 0, at)
        parts = dealt.reshape(*dealt.shape[:at], -1, group, *dealt.shape[at + 1 :])
        parts = jnp.pad(parts, [(0, -group % self.step_size(k) if axis == at + 1 else 0) for axis in range(parts.ndim)])
        return parts.reshape(*dealt.shape[:at], -1, *dealt.shape[at + 1 :])

    def steps(self, k: int) -> list[list[int]]:
        """The products of each step of one instruction, by their numbers along K."""
        groups, size = self.deal(np.arange(k), k).reshape(self.groups, -1), self.step_size(k)
        return [group[at : at + size].tolist() for group in groups for at in range(0, len(group), size)]

    def chains(self, k: int) -> list[list[list[int]]]:
        """The steps of one instruction, chain by chain; one chain of all where there are none."""
        steps, length = self.steps(k), self.steps_per_chain(k) or self.steps_per_instruction(k)
        return [steps[at : at + length] for at in range(0, len(steps), length)]


def products_per_clamp(model: Model, k: int) -> int:
    """Products after each of which `.satfinite` clamps an integer sum, for an instruction of k products."""
    return min(model.clamp_step or k, k)
