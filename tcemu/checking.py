"""Checked mode: what PTX leaves undefined raises `UndefinedBehaviour`, also where the values are traced."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import checkify
from jax.typing import ArrayLike

from tcemu.errors import UndefinedBehaviour


def forbid(undefined: ArrayLike, message: str, **values: Any) -> None:
    """Report the first place where `undefined` holds.

    undefined: bool of any shape. message: a format string that names some of the values; values: arrays that broadcast to `undefined`.
    Raises UndefinedBehaviour. Under a trace it leaves a `checkify.check`, which `checked` (or `checkify.checkify`) turns into an error; JAX
    refuses to compile it otherwise. What is concrete raises at once also while something else is traced.
    """
    if not any(isinstance(value, Tracer) for value in (undefined, *values.values())):
        if np.any(undefined):
            first = np.argmax(np.ravel(undefined))
            at_first = {name: np.broadcast_to(value, np.shape(undefined)).ravel()[first] for name, value in values.items()}
            raise UndefinedBehaviour(message.format(**at_first))
        return
    undefined = jnp.asarray(undefined)
    first = jnp.argmax(undefined.ravel())
    at_first = {name: jnp.broadcast_to(jnp.asarray(value), undefined.shape).ravel()[first] for name, value in values.items()}
    checkify.check(cast(bool, ~jnp.any(undefined)), message, **cast(dict[str, Any], at_first))


def refuse(undefined: ArrayLike, message: str, checked: bool, **values: Any) -> None:
    """`forbid` where all values are concrete, and with `checked` also where they are traced."""
    if checked or not any(isinstance(value, Tracer) for value in (undefined, *values.values())):
        forbid(undefined, message, **values)


def checked(fn: Callable) -> Callable:
    """`fn`, whose operations run with `checked=True` under jit, vmap or grad, as a function that raises UndefinedBehaviour itself.

    All arguments of the new function must be arrays or pytrees of them: close over spellings and targets.
    """

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        error, result = checkify.checkify(fn, errors=checkify.user_checks)(*args, **kwargs)
        message = error.get()
        if message is not None:
            raise UndefinedBehaviour(message.removesuffix(" (`check` failed)"))
        return result

    return call
