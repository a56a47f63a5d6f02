"""The asynchronous protocol of wgmma: a warpgroup with its registers, its shared memory and the products that are under way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.base.checking import forbid
from tcemu.base.errors import UndefinedBehaviour
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.instructions.operand_checks import resolve_model
from tcemu.engine.instructions.wgmma import operand_addresses, uniform_descriptor, wgmma
from tcemu.engine.isa.families import LANES, Instruction
from tcemu.engine.layouts.shared_memory import UNIT, UNIT_WORDS, descriptor_words
from tcemu.engine.layouts.strided_memory import as_memory

PROXIES = ("generic", "async")
FENCE, WAIT = "PTX ISA 9.7.15.7.1", "PTX ISA 9.7.15.7.3"
STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class PendingProduct:
    """A product under way: what it will leave in the accumulator, and, in checked mode, which 16-byte units of shared memory it reads."""

    result: Array
    reads: Any  # bool[..., units] or None
    d: str = field(default="", metadata=STATIC)
    a: str | None = field(default=None, metadata=STATIC)  # the registers that hold A
    op: Instruction | None = field(default=None, metadata=STATIC)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Warpgroup:
    """A warpgroup that issues asynchronous products, as a value: each method returns the next state.

    Registers have names: threads `write` and `read` them, and the tensor cores use them in `wgmma`. The result of a product is in its
    accumulator after the `wait_group` that covers it. Until then the accumulator shows its old value, and only further products go on from
    the new one. Make one by Warpgroup(shared), shared: uint32[..., words], or Warpgroup(shared, checked=True).

    In checked mode the uses that PTX calls undefined raise UndefinedBehaviour. Uses of registers follow from the order of the calls, so
    they raise while the program is built, under jit too. Uses of shared memory and descriptors raise there if the addresses are known;
    otherwise, as for metadata, they need `tcemu.checked` under jit. Without checked mode nothing is watched, and only the products are
    computed.

    Checked mode cannot see: registers and memory that are used without these methods (`shared` may be read freely), two names for one
    register, other warpgroups and their ordering, and warps that do not all issue the same instruction.

    A Warpgroup is a pytree: jit, vmap and scan may carry it. The names and the pending products' kinds are static.

    Source: PTX ISA 9.7.15.4, 9.7.15.5.2, 9.7.15.7.
    """

    shared: Array
    registers: dict[str, Array] = field(default_factory=dict)
    uncommitted: tuple[PendingProduct, ...] = ()
    groups: tuple[tuple[PendingProduct, ...], ...] = ()  # committed, the oldest first
    unfenced_writes: Any = None  # bool[..., units]: written through the generic proxy since its last fence
    checked: bool = field(default=False, metadata=STATIC)
    fenced: bool = field(default=False, metadata=STATIC)  # there has been a wgmma.fence
    used_registers: frozenset[str] = field(default=frozenset(), metadata=STATIC)  # registers that a thread has used since the last one
    shapes: tuple[tuple[str, str], ...] = field(default=(), metadata=STATIC)  # accumulators that products used since then, and their shape

    def write(self, **registers: ArrayLike) -> Warpgroup:
        """Write registers from the threads.

        Args:
            registers: uint32[..., 4, 32, n], warp, lane, register, by name.

        Returns:
            The warpgroup with the new registers.

        Raises:
            TypeError: A value has another dtype.
            ValueError: A value has other axes.
            UndefinedBehaviour: In checked mode, a pending product uses one of the registers.
        """
        for name, value in registers.items():
            self._untouched_by_products(name, "written")
            dtype, shape = getattr(value, "dtype", type(value).__name__), np.shape(value)
            if dtype != jnp.uint32:
                raise TypeError(f"{name}: got {dtype}{list(shape)}; expected uint32[..., 4, 32, n]: warp, lane, register")
            if len(shape) < 3 or shape[-3:-1] != (4, LANES):
                raise ValueError(f"{name}: got uint32{list(shape)}; expected uint32[..., 4, 32, n]: warp, lane, register")
        values = {name: jnp.asarray(value) for name, value in registers.items()}
        return replace(self, registers=self.registers | values, used_registers=self.used_registers | set(values))

    def read(self, name: str) -> tuple[Array, Warpgroup]:
        """Read a register from the threads.

        Args:
            name: Name of the register.

        Returns:
            The value, uint32[..., 4, 32, n], and the warpgroup afterwards.

        Raises:
            ValueError: No register has that name.
            UndefinedBehaviour: In checked mode, a pending product uses the register.
        """
        value = self._register(name)
        self._untouched_by_products(name, "read")
        return value, replace(self, used_registers=self.used_registers | {name})

    def fence(self) -> Warpgroup:
        """Issue `wgmma.fence`, which orders the threads' uses of registers before the products that are issued next."""
        return replace(self, fenced=True, used_registers=frozenset(), shapes=())

    def store(self, offset: int | ArrayLike, words: ArrayLike, *, proxy: str = "generic") -> Warpgroup:
        """Write words into shared memory.

        Args:
            offset: Byte address of the first word, an int or int32[...].
            words: uint32[..., n].
            proxy: "generic" for stores of threads, which need `fence_proxy_async` before a product reads them; "async" for a bulk copy
                whose completion was waited for.

        Returns:
            The warpgroup with the new memory. A traced offset that does not fit writes only the words that fit.

        Raises:
            TypeError: `words` or `offset` has another dtype.
            ValueError: The proxy is unknown, or a known offset is no multiple of 4 or does not fit.
            UndefinedBehaviour: In checked mode, a traced offset does not fit, or a pending product reads there.
        """
        if proxy not in PROXIES:
            raise ValueError(f"proxy: got {proxy!r}; expected 'generic' or 'async'. PTX ISA 9.7.15.4")
        words, shared = as_memory("words", words), as_memory("shared", self.shared)
        at = offset if isinstance(offset, Tracer) else np.asarray(offset)
        if not jnp.issubdtype(at.dtype, jnp.integer):
            raise TypeError(f"offset: got {at.dtype}{list(at.shape)}; expected an int or int32[...], in bytes")
        size, count = shared.shape[-1], words.shape[-1]
        bad = (at % 4 != 0) | (at < 0) | (at > 4 * (size - count))
        message = f"offset: {{offset}} must be a multiple of 4, and {count} words from there must fit the {size} of shared memory"
        if isinstance(at, Tracer):
            if self.checked:
                forbid(bad, message, offset=at)
        elif bad.any():
            raise ValueError(message.format(offset=at[bad].ravel()[0]))
        place = np.arange(size) - at[..., None] // 4
        written = (place >= 0) & (place < count)
        rank = max(place.ndim, words.ndim)
        place, words = (v.reshape(*(1,) * (rank - v.ndim), *v.shape) for v in (place, words))
        new = jnp.where(written, jnp.take_along_axis(words, jnp.clip(place, 0, count - 1), axis=-1), shared)
        changed = replace(self, shared=new)
        if not self.checked:
            return changed
        units = _units(written)
        for product in self._pending():
            forbid(
                _overlap(product.reads, units),
                f"shared memory is overwritten while {product.op} still reads it; wait for its group first. PTX ISA 9.7.15.4",
            )
        if proxy == "async":
            return changed
        return replace(changed, unfenced_writes=units if self.unfenced_writes is None else self.unfenced_writes | units)

    def fence_proxy_async(self) -> Warpgroup:
        """Issue `fence.proxy.async`, which makes the threads' stores in shared memory visible to the products that are issued next."""
        return replace(self, unfenced_writes=None)

    def wgmma(
        self,
        op: str | Instruction,
        d: str,
        b_desc: int | str | ArrayLike,
        *,
        a: str | None = None,
        a_desc: int | str | ArrayLike | None = None,
        sp_meta: str | ArrayLike | None = None,
        scale_d: bool | ArrayLike = True,
        target: str,
        model: Model | str | None = None,
        **immediates: int,
    ) -> Warpgroup:
        """Issue `wgmma.mma_async`: D = A·B + D on named registers.

        Args:
            op: As in `tcemu.wgmma`.
            d: Name of the accumulator. It need not have been written if `scale_d` is False.
            b_desc: As in `tcemu.wgmma`, or the name of a register uint32[..., 4, 32, 2], low word first, equal in all lanes.
            a: Name of the registers of A.
            a_desc: As `b_desc`.
            sp_meta: As in `tcemu.wgmma`, or the name of a register [..., 4, 32, 1].
            scale_d: As in `tcemu.wgmma`.
            target: As in `tcemu.wgmma`.
            model: As in `tcemu.wgmma`.
            immediates: The immediates of `tcemu.wgmma`.

        Returns:
            The warpgroup with one more pending product.

        Raises:
            As `tcemu.wgmma`.
            UndefinedBehaviour: In checked mode: before the first `fence`; if a thread used d or a, or a product of another shape used d,
                since the last fence; if a pending product writes a, or holds its A in d; if threads stored the memory that it reads since
                the last `fence_proxy_async`; if the lanes' descriptors differ.
        """
        applied = resolve_model(op, target, model, "Warpgroup.wgmma", "wgmma", "wgmma.sp")
        op, model = applied.op, applied.model
        self._check_order(op, d, a)
        descriptors = {"b": self._descriptor(b_desc)} | ({} if a_desc is None else {"a": self._descriptor(a_desc)})
        if isinstance(sp_meta, str):
            sp_meta = self._register(sp_meta)[..., 0]
        latest = next((product.result for product in reversed(tuple(self._pending())) if product.d == d), None)
        if latest is None and d not in self.registers and isinstance(scale_d, bool | np.bool_) and not scale_d:
            latest = jnp.zeros((op.warps, LANES, op.register_count("d")), jnp.uint32)
        result = wgmma(
            op, self._register(d) if latest is None else latest, descriptors["b"], self.shared, a=None if a is None else self._register(a),
            a_desc=descriptors.get("a"), sp_meta=sp_meta, scale_d=scale_d, target=target, model=model, checked=self.checked, **immediates,
        )  # fmt: skip
        reads = None
        if self.checked:
            reads = reduce(or_, (self._reads(op, name, value, immediates) for name, value in descriptors.items()))
            if self.unfenced_writes is not None:
                forbid(
                    _overlap(reads, self.unfenced_writes),
                    f"{op} reads shared memory that threads stored since the last fence.proxy.async. {FENCE}",
                )
        shapes = (*(pair for pair in self.shapes if pair[0] != d), (d, op.shape))
        return replace(self, uncommitted=(*self.uncommitted, PendingProduct(result=result, reads=reads, d=d, a=a, op=op)), shapes=shapes)

    def commit_group(self) -> Warpgroup:
        """Issue `wgmma.commit_group`: the products issued since the last one become a group, which may be empty."""
        return replace(self, uncommitted=(), groups=(*self.groups, self.uncommitted))

    def wait_group(self, n: int) -> Warpgroup:
        """Issue `wgmma.wait_group n`: all groups but the n most recent are complete, and their accumulators hold the results.

        Args:
            n: Groups that may remain pending, an int constant of 0 or more.

        Returns:
            The warpgroup with the results in its registers.

        Raises:
            ValueError: `n` is no int of 0 or more.
        """
        if not isinstance(n, int | np.integer) or isinstance(n, bool) or n < 0:
            raise ValueError(f"n: got {n!r}; expected an integer constant, 0 or more: how many groups may remain pending. {WAIT}")
        done = max(0, len(self.groups) - n)
        results = {product.d: product.result for group in self.groups[:done] for product in group}
        return replace(self, groups=self.groups[done:], registers=self.registers | results)

    def _pending(self) -> Iterator[PendingProduct]:
        """The products under way, the oldest first."""
        for group in (*self.groups, self.uncommitted):
            yield from group

    def _register(self, name: str) -> Array:
        if name in self.registers:
            return self.registers[name]
        raise ValueError(f"no register is named {name!r}; there are {', '.join(self.registers) or 'none'}. Warpgroup.write makes one")

    def _descriptor(self, value: Any) -> Any:
        return uniform_descriptor(self._register(value), checked=self.checked) if isinstance(value, str) else value

    def _reads(self, op: Instruction, name: str, descriptor: Any, immediates: dict[str, int]) -> Any:
        """bool[..., units]: what of shared memory an operand's descriptor leads to."""
        major = "mn" if immediates.get(f"imm_trans_{name}") else "k"
        words = descriptor_words(name, descriptor)
        at = operand_addresses(op, name, major, words)
        at = at.reshape(*at.shape[:-2], -1) // UNIT
        batch, count = at.shape[:-1], self.shared.shape[-1] // UNIT_WORDS
        rows = np.arange(int(np.prod(batch)))[:, None]
        if isinstance(at, np.ndarray):
            touched = np.zeros((len(rows), count), bool)
            touched[rows, at.reshape(len(rows), -1)] = True
        else:
            touched = jnp.zeros((len(rows), count), bool).at[rows, at.reshape(len(rows), -1)].set(True, mode="drop")
        return touched.reshape(*batch, count)

    def _untouched_by_products(self, name: str, verb: str) -> None:
        if not self.checked:
            return
        for product in self._pending():
            if name in (product.d, product.a):
                role = "accumulator" if name == product.d else "A"
                open_ = any(product is other for other in self.uncommitted)
                missing = "no group holds it: commit_group, then wait_group" if open_ else "wait_group must cover its group"
                _undefined(f"register {name!r} is {verb} while it is the {role} of a pending {product.op}; {missing}. {WAIT}")

    def _check_order(self, op: Instruction, d: str, a: str | None) -> None:
        """Raises UndefinedBehaviour for registers that a product to be issued may not use."""
        if not self.checked:
            return
        if not self.fenced:
            _undefined(f"{op} is issued before any wgmma.fence; the first product of a warpgroup needs one. {FENCE}")
        for name, role in ((d, "accumulator"), (a, "A")):
            if name in self.used_registers:
                _undefined(f"register {name!r}, the {role} of {op}, was used by a thread since the last wgmma.fence. {FENCE}")
        last = dict(self.shapes).get(d, op.shape)
        if last != op.shape:
            _undefined(f"accumulator {d!r} of {op} was last that of a product of shape {last}; only equal shapes need no fence. {FENCE}")
        for product in self._pending():
            if a is not None and a == product.d:
                _undefined(f"register {a!r}, the A of {op}, is the accumulator of a pending {product.op}; wait for its group. {WAIT}")
            if product.a is not None and d == product.a:
                _undefined(f"register {d!r}, the accumulator of {op}, is the A of a pending {product.op}; wait for its group. {WAIT}")


def _units(words: Any) -> Any:
    """bool[..., words] -> bool[..., units]: the whole 16-byte units with one of them."""
    count = words.shape[-1] // UNIT_WORDS
    return words[..., : count * UNIT_WORDS].reshape(*words.shape[:-1], count, UNIT_WORDS).any(-1)


def _overlap(x: Any, y: Any) -> Any:
    return (x & y).any(-1)


def _undefined(message: str) -> NoReturn:
    raise UndefinedBehaviour(message)
