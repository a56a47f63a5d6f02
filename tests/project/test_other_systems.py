"""What Windows lacks is missed here too: modules, functions of `os`, UTF-8 as the encoding of text, kernels. No test ran on Windows."""

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.systems import sends_signals

import tcemu
from tcemu.engine.backends.llvm import machine_code, xla_call

ROOT = Path(__file__).parents[2]
READ_ANYWHERE = [path for folder in ("tcemu", "docs") for path in sorted((ROOT / folder).rglob("*.py"))]
EVERY_FILE = [*READ_ANYWHERE, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").glob("*.py"))]
UNIX_MODULES = {"crypt", "curses", "fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
TEXT_METHODS = {"read_text": 0, "write_text": 1}  # the position of `encoding`
# a file without these is not parsed
MAY_READ_TEXT = re.compile(r"\b(read_text|write_text|open|fdopen)\s*\(|\b(text|universal_newlines)\s*=\s*True")
MAY_IMPORT_UNIX = re.compile(rf"\b({'|'.join(sorted(UNIX_MODULES))})\b")
ARRAYS_AND_CONTAINERS = {"os", "np", "numpy", "zipfile", "tarfile", "Image"}  # their `open` reads no text


def texts_without_encoding(source: str) -> list[int]:
    """Return the lines at which text is read or written in the encoding of the user's locale."""
    found = []
    for node in ast.walk(ast.parse(source)) if MAY_READ_TEXT.search(source) else ():
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        words = {word.arg: word.value for word in node.keywords}
        if "encoding" in words or None in words:
            continue
        if name in TEXT_METHODS:
            found += [node.lineno] * (len(node.args) <= TEXT_METHODS[name])
        elif name in ("open", "fdopen"):
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            is_builtin = owner is None or (isinstance(owner, ast.Name) and owner.id in ("io", "os") and name == "fdopen")
            is_other = owner is not None and not is_builtin and (not isinstance(owner, ast.Name) or owner.id in ARRAYS_AND_CONTAINERS)
            at = 1 if is_builtin else 0
            mode = words.get("mode", node.args[at] if len(node.args) > at else None)
            binary = isinstance(mode, ast.Constant) and "b" in str(mode.value)
            computed = mode is not None and not isinstance(mode, ast.Constant)
            found += [node.lineno] * (not binary and not computed and not is_other)
        elif any(
            isinstance(value, ast.Constant) and value.value is True for key in ("text", "universal_newlines") if (value := words.get(key))
        ):
            found.append(node.lineno)
    return found


def test_text_is_utf_8_everywhere():
    """Windows' own encoding has no letter for most of ours. The tests themselves run in Python's UTF-8 mode there."""
    assert len(READ_ANYWHERE) > 400
    found = {
        str(path.relative_to(ROOT)): lines for path in READ_ANYWHERE if (lines := texts_without_encoding(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("path.read_text()", True), ("path.read_text('utf-8')", False), ("path.write_text(x, encoding='utf-8')", False),
        ("path.write_text(x)", True), ("open(p)", True), ("open(p, 'rb')", False), ("open(p, 'w', encoding='utf-8')", False),
        ("path.open()", True), ("path.open('xb')", False), ("os.open(p, flags)", False), ("os.fdopen(d, 'w')", True),
        ("subprocess.run(words, text=True)", True), ("subprocess.run(words, encoding='utf-8')", False),
    ],
)  # fmt: skip
def test_text_in_the_locale_s_encoding_is_seen(line, is_found):
    assert texts_without_encoding(line) == [1] * is_found


def unix_imports(source: str) -> set[str]:
    """Return the modules of Unix that are imported at the top of a file, outside `try`."""
    statements = ast.parse(source).body if MAY_IMPORT_UNIX.search(source) else []
    names = {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in statements if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names} & UNIX_MODULES


def test_no_file_needs_a_module_of_unix():
    assert {str(path.relative_to(ROOT)): names for path in EVERY_FILE if (names := unix_imports(path.read_text(encoding="utf-8")))} == {}
    assert unix_imports("import os, resource\nfrom fcntl import flock\ntry:\n    import pwd\nexcept ImportError: ...") == {
        "resource",
        "fcntl",
    }


AS_ON_WINDOWS = """
import os, sys, signal
import jax, ml_dtypes, numpy
set_blocking, set_wakeup_fd = os.set_blocking, signal.set_wakeup_fd
signal.set_wakeup_fd = lambda pipe, **words: (set_blocking(pipe, False), set_wakeup_fd(pipe, **words))  # Windows takes a blocking pipe
for name in ("fork", "forkpty", "geteuid", "getuid", "set_blocking", "get_blocking", "register_at_fork", "sched_getaffinity", "uname",
             "sysconf", "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "fchmod", "killpg"):
    if hasattr(os, name):
        delattr(os, name)
for name in {modules!r}:
    sys.modules[name] = None
from tcemu import cli
sys.argv = ["tcemu", *sys.argv[1:]]
sys.exit(cli.main())
"""


def run_as_on_windows(*words: str, **options):
    """A command in a process that lacks what Windows lacks."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    code = AS_ON_WINDOWS.format(modules=sorted(UNIX_MODULES - {"posix"}))  # this Python's own `os` needs posix
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", **options
    )


def test_a_command_runs_without_the_functions_of_unix(tmp_path):
    np.save(tmp_path / "A.npy", np.ones((16, 16), np.float32))
    out, error = run_as_on_windows("gemm", "A.npy", "A.npy", "--op", "f16", "--target", "H100", "-o", "D.npy", cwd=tmp_path).communicate()
    assert "D is in D.npy" in out, error
    assert (np.load(tmp_path / "D.npy") == 16).all()


@sends_signals
@pytest.mark.full
def test_a_signal_ends_a_command_without_set_blocking(tmp_path):
    kernel = ".version 8.0 .target sm_80 .address_size 64 .entry k() { .reg .b32 r; L: add.u32 r, r, 1; bra L; }"
    (tmp_path / "kernel.ptx").write_text(kernel, encoding="utf-8")
    with run_as_on_windows("run", "kernel.ptx", "--grid", "1", "--block", "1", cwd=tmp_path) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(5)
        process.send_signal(signal.SIGTERM)
        assert (process.wait(60), process.stderr.read()) == (143, "tcemu: stopped\n")


def test_windows_computes_without_kernels_and_says_so(monkeypatch):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 32, 32), np.float32)
    expected = tcemu.gemm(a, b, op="f16", target="H100")
    for function in (machine_code.missing_compiler, xla_call.missing):
        function.cache_clear()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(machine_code, "sys", SimpleNamespace(platform="win32"))
            patched.setattr(machine_code, "_llvm", lambda: pytest.fail("llvmlite is not asked"))
            assert "no kernels on Windows" in tcemu.backends.describe("f16", target="H100")["llvm"]
            found = tcemu.gemm(a, b, op="f16", target="H100", c=np.zeros((32, 32), np.float32))
    finally:
        for function in (machine_code.missing_compiler, xla_call.missing):
            function.cache_clear()
    assert np.array_equal(np.asarray(found).view(np.uint32), np.asarray(expected).view(np.uint32))
