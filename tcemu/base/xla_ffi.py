"""The structures of XLA's C API for foreign functions, as far as a handler in LLVM IR reads and writes them.

jaxlib installs the header, and promises no layout between minor versions: `tests/base/test_xla_ffi.py` compares each structure with the
installed header. XLA's names are kept, without `XLA_FFI_`.

Source: `xla/ffi/api/c_api.h` (`jax.ffi.include_dir`).
"""

import ctypes
import re
from ctypes import c_int32, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import jax

API_MAJOR = 0  # of the structures below
API_NAMES = {"InvokeContext_Get": "ExecutionContext_Get", "Error_GetDetails": "Error_GetMessage"}  # those of minor 5: those of minor 3
METADATA = 1  # XLA_FFI_Extension_Metadata


class Struct(ctypes.Structure):
    """A structure of the C API. ctypes lays it out as a C compiler does."""


SIZE, START = ("struct_size", c_size_t), ("extension_start", c_void_p)  # the first fields of most structures


def _struct(name: str, *fields: tuple[str, Any]) -> type[Struct]:
    class Structure(Struct):
        _fields_ = fields

    Structure.__name__ = name
    return Structure


Extension_Base = _struct("Extension_Base", SIZE, ("type", c_int32), ("next", c_void_p))
Api_Version = _struct("Api_Version", SIZE, START, ("major_version", c_int32), ("minor_version", c_int32))
Metadata = _struct("Metadata", SIZE, ("api_version", Api_Version), ("traits", c_uint32), ("state_type_id", c_int64))
Metadata_Extension = _struct("Metadata_Extension", ("extension_base", Extension_Base), ("metadata", c_void_p))
Buffer = _struct("Buffer", SIZE, START, ("dtype", c_int32), ("data", c_void_p), ("rank", c_int64), ("dims", c_void_p))
Args = _struct("Args", SIZE, START, ("size", c_int64), ("types", c_void_p), ("args", c_void_p))
Rets = _struct("Rets", SIZE, START, ("size", c_int64), ("types", c_void_p), ("rets", c_void_p))
Error_Destroy_Args = _struct("Error_Destroy_Args", SIZE, START, ("error", c_void_p))
ThreadPool_Schedule_Args = _struct("ThreadPool_Schedule_Args", SIZE, START, *((name, c_void_p) for name in ("ctx", "task", "data")))
ThreadPool_NumThreads_Args = _struct("ThreadPool_NumThreads_Args", SIZE, START, ("ctx", c_void_p), ("num_threads", c_void_p))
# without the fields behind the last one that is used
CallFrame = _struct("CallFrame", SIZE, START, ("api", c_void_p), ("ctx", c_void_p), ("stage", c_int32), ("args", Args), ("rets", Rets))
Api = _struct("Api", SIZE, START, ("api_version", Api_Version), ("internal_api", c_void_p), *((name, c_void_p) for name in (
    "Error_Create", "Error_GetMessage", "Error_Destroy", "Handler_Register", "Stream_Get", "Type_Register", "ExecutionContext_Get",
    "State_Set", "State_Get", "DeviceMemory_Allocate", "DeviceMemory_Free", "ThreadPool_Schedule", "ThreadPool_NumThreads",
)))  # fmt: skip


@cache
def installed_version() -> tuple[int, int]:
    """Returns major and minor of the C API of the installed jaxlib. Raises OSError or LookupError if the header does not say them."""
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text(encoding="utf-8")
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    return int(found["MAJOR"]), int(found["MINOR"])


def field_offset(struct: type[Struct], path: str) -> int:
    """Returns the offset in bytes of a field, as "args.size"."""
    field, _, rest = path.partition(".")
    inner: dict[str, Any] = {name: kind for name, kind, *_ in struct._fields_}
    return getattr(struct, field).offset + (field_offset(inner[field], rest) if rest else 0)
