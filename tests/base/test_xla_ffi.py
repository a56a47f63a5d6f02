"""A canary: the structures of `base.xla_ffi` are those of the header that jaxlib installs."""

import re
from pathlib import Path

import jax

from tcemu.base import xla_ffi

HEADER = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()


def header_fields(name):
    """The fields of a structure in jaxlib's header, in order."""
    body = re.search(rf"^(?:typedef )?struct XLA_FFI_{name} {{(.*?)^}}", HEADER, re.DOTALL | re.MULTILINE)
    lines = re.sub(r"//.*", "", body[1]).replace("_XLA_FFI_API_STRUCT_FIELD(XLA_FFI_", "* ").replace(")", "").split(";")
    return [re.search(r"(\w+)\s*$", line)[1] for line in lines if line.strip()]


def test_the_structures_are_those_of_the_installed_header():
    assert xla_ffi.installed_version()[0] == xla_ffi.API_MAJOR
    structs = [struct for struct in xla_ffi.Struct.__subclasses__() if struct.__module__ == xla_ffi.__name__]
    assert len(structs) == 12
    for struct in structs:
        names = {"Extension_Base": "InternalExtension"} if "XLA_FFI_InternalExtension {" in HEADER else {}
        found = [xla_ffi.API_NAMES.get(name, name) for name in header_fields(names.get(struct.__name__, struct.__name__))]
        declared = [name for name, _ in struct._fields_]
        assert found[: len(declared)] == declared, struct
    assert f"XLA_FFI_Extension_Metadata = {xla_ffi.METADATA}," in HEADER
