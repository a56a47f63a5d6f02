"""`Provenance`: how a result was made. Versions, the evidence of the arithmetics, and the distribution or a digest of the inputs."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PACKAGES = ("jax", "jaxlib", "numpy", "ml_dtypes")  # packages whose versions are recorded besides tcemu's and Python's
DIGEST_DIGITS = 16  # hexadecimal digits of a digest


@dataclass(frozen=True)
class Provenance:
    """The versions, evidence and inputs behind a result.

    Attributes:
        versions: Versions of tcemu, Python and the packages that compute, and the device that computed, by name.
        evidence: For each arithmetic in the result, as "wgmma... on sm_90a", its level of evidence with the source in words.
        inputs: The distribution from which inputs were drawn, or a digest of the given arrays.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    evidence: Mapping[str, str] = field(default_factory=dict)
    inputs: str = ""


def installed_versions() -> dict[str, str]:
    """Return the versions of tcemu, Python and the packages that compute, and the device of JAX's default backend."""
    tcemu = sys.modules.get("tcemu")
    versions = {"tcemu": getattr(tcemu, "__version__", "unknown"), "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "unknown"
    device = jax.local_devices()[0]
    return versions | {"device": f"{device.platform}, {device.device_kind}"}


def describe_arrays(arrays: Iterable[Any]) -> str:
    """Return the number of arrays and elements, and a digest of their dtypes, shapes and bytes.

    Args:
        arrays: Arrays of NumPy or JAX; random keys count with their data.
    """
    digest, count, elements = sha256(), 0, 0
    for array in arrays:
        if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        values = np.ascontiguousarray(array)
        digest.update(f"{values.dtype} {values.shape};".encode())
        digest.update(values.view(np.uint8).data if values.size and values.ndim else values.tobytes())
        count, elements = count + 1, elements + values.size
    return f"{count} arrays of {elements} elements, sha256 {digest.hexdigest()[:DIGEST_DIGITS]}"


def function_name(function: Any) -> str:
    """Return the name of a function with its module, or the repr of another callable."""
    name = getattr(function, "__qualname__", None)
    return repr(function) if name is None else f"{getattr(function, '__module__', '?')}.{name}"
