"""Compiled code in files: what nobody else may have written is read, whole; everything else is compiled anew, with one warning."""

import os
import pickle
import stat
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from support.compiling import without_kept_programs

from tcemu.base import errors, files, stored_code
from tcemu.base.compilation import cache_compilations
from tcemu.base.stored_code import Entry, program_entry, read_entry, write_entry

ROOT = Path(__file__).parents[2]
CONTENT = bytes(np.random.default_rng(0).integers(0, 256, 3001, np.uint8))
A, B = Entry("a", ("kernel", "text", "A100")), Entry("a", ("kernel", "text", "H100"))
OTHER_USER = 12345
posix = pytest.mark.skipif(not stored_code.HAS_OWNERS, reason="files have no owners here")
root = pytest.mark.skipif(not stored_code.HAS_OWNERS or os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture(autouse=True)
def every_warning_comes_once_a_test():
    errors.warn_once.cache_clear()
    stored_code._unswept.clear()
    yield
    errors.warn_once.cache_clear()


@pytest.fixture
def folder(tmp_path):
    write_entry(tmp_path / "code", A, CONTENT)
    return tmp_path / "code"


def path_of(folder, entry=A):
    return folder / entry.name


def assert_refused(folder, match, entry=A):
    """Not read, with one warning however often it is asked for."""
    with pytest.warns(UserWarning, match=match) as caught:
        assert [read_entry(folder, entry) for _ in range(3)] == [None] * 3
    assert len(caught) == 1


# ---- what is read


def test_what_was_written_is_read(folder):
    assert read_entry(folder, A) == CONTENT and read_entry(folder, B) is None
    assert [path.name for path in folder.iterdir()] == [A.name]
    write_entry(folder, A, b"")
    assert read_entry(folder, A) == b""


def test_every_damage_is_seen(folder):
    """Each byte of the header, every 53rd byte behind it, and lengths: files cut short and longer ones."""
    path = path_of(folder)
    whole = path.read_bytes()
    offsets = [*range(stored_code.HEADER.size), *range(stored_code.HEADER.size, len(whole), 53), len(whole) - 1]
    for offset in offsets:
        for flipped in (1, 128):
            path.write_bytes(whole[:offset] + bytes([whole[offset] ^ flipped]) + whole[offset + 1 :])
            assert read_entry(folder, A) is None, (offset, flipped)
    for size in offsets:
        path.write_bytes(whole[:size])
        assert read_entry(folder, A) is None, size
    for more in (b"\0", b"!" * 100, whole):
        path.write_bytes(whole + more)
        assert read_entry(folder, A) is None
    path.write_bytes(bytes(len(whole)))
    assert read_entry(folder, A) is None
    path.write_bytes(whole)
    assert read_entry(folder, A) == CONTENT


def test_an_entry_under_the_name_of_another_is_not_read(folder):
    """Its checksum is over the key too: the kernel of an A100 is no kernel of an H100."""
    path_of(folder, B).write_bytes(path_of(folder).read_bytes())
    assert read_entry(folder, B) is None and read_entry(folder, A) == CONTENT
    write_entry(folder, B, b"of the H100")
    assert read_entry(folder, B) == b"of the H100"


def test_programs_of_other_keys_and_environments_are_not_read(folder, monkeypatch):
    key = ("add", 3)
    with without_kept_programs():
        compiled = jax.jit(lambda x: x + 3).lower(np.arange(4)).compile()
    stored_code.store_program(folder, program_entry(key), compiled, "facts")
    device = jax.devices("cpu")[0]
    compiled, facts = stored_code.load_program(folder, program_entry(key), device)
    assert facts == "facts" and compiled(np.arange(4)).tolist() == [3, 4, 5, 6]
    path_of(folder, program_entry(("add", 4))).write_bytes(path_of(folder, program_entry(key)).read_bytes())
    assert stored_code.load_program(folder, program_entry(("add", 4)), device) is None
    monkeypatch.setattr(stored_code, "_environment", lambda: "another release")
    assert stored_code.load_program(folder, program_entry(key), device) is None


class Attack:
    """A pickle that leaves a trace."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_process_whose_files_changed_since_it_loaded_them_shares_no_program(monkeypatch):
    """It may run the older code, whose programs must not be stored as those of the newer."""
    digest = stored_code._environment.__wrapped__
    monkeypatch.setattr(stored_code, "LOADED", time.time())
    shared = digest()
    assert digest() == shared
    monkeypatch.setattr(stored_code, "LOADED", 0.0)
    assert digest() != digest() != shared


@posix
def test_no_pickle_of_somebody_else_is_opened(folder, tmp_path):
    trace, entry = tmp_path / "trace", program_entry("x")
    write_entry(folder, entry, pickle.dumps(Attack(trace)))
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="others may write it"):
        assert stored_code.load_program(folder, entry, jax.devices("cpu")[0]) is None
    assert not trace.exists()
    folder.chmod(0o700)
    stored_code.load_program(folder, entry, jax.devices("cpu")[0])
    assert trace.exists()  # the attack is a real one


# ---- whom it belongs to


@posix
def test_folders_and_files_are_for_the_user_alone(folder):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(path_of(folder).stat().st_mode) == 0o600
    deep = folder / "a" / "b"
    write_entry(deep, A, CONTENT)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (deep, deep.parent)] == [0o700, 0o700]


@posix
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702, 0o1777])
def test_a_folder_that_others_may_write_is_not_used(folder, mode):
    before = path_of(folder).read_bytes()
    folder.chmod(mode)
    assert_refused(folder, f"others may write it .mode {mode:03o}")
    write_entry(folder, B, CONTENT)  # the same warning, which came
    assert [path.read_bytes() for path in folder.iterdir()] == [before]
    folder.chmod(0o755)
    assert read_entry(folder, A) == CONTENT


@posix
@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_a_file_that_others_may_write_is_not_read_and_is_replaced(folder, mode):
    path_of(folder).chmod(mode)
    assert_refused(folder, "of an entry, others may write it")
    write_entry(folder, A, CONTENT)
    assert read_entry(folder, A) == CONTENT and stat.S_IMODE(path_of(folder).stat().st_mode) == 0o600


@root
def test_what_belongs_to_another_user_is_not_read(folder):
    os.chown(path_of(folder), OTHER_USER, -1)
    assert_refused(folder, f"of an entry, it belongs to user {OTHER_USER}, and this process runs as user 0")
    write_entry(folder, A, CONTENT)
    assert read_entry(folder, A) == CONTENT
    os.chown(folder, OTHER_USER, -1)
    assert_refused(folder, f"it belongs to user {OTHER_USER}")
    write_entry(folder, B, CONTENT)
    assert not path_of(folder, B).exists()


@root
def test_a_user_does_not_read_what_root_wrote_for_all(tmp_path):
    """The other way round: the effective user counts, and a folder of root is not his."""
    write_entry(tmp_path / "code", A, CONTENT)
    for path in (tmp_path, *tmp_path.parents[:3]):  # with pytest-xdist there is a folder more
        path.chmod(0o755)
    (tmp_path / "code").chmod(0o755), path_of(tmp_path / "code").chmod(0o644)
    os.seteuid(OTHER_USER)
    try:
        assert_refused(tmp_path / "code", f"it belongs to user 0, and this process runs as user {OTHER_USER}")
    finally:
        os.seteuid(0)


# ---- files that are none


@posix
def test_a_fifo_does_not_hang(folder):
    path_of(folder).unlink()
    os.mkfifo(path_of(folder), 0o600)
    assert_refused(folder, "no regular file")
    write_entry(folder, A, CONTENT)
    assert read_entry(folder, A) == CONTENT


@posix
def test_links_are_not_followed(folder, tmp_path):
    target = tmp_path / "elsewhere"
    path_of(folder).rename(target)
    path_of(folder).symlink_to(target)
    assert_refused(folder, "a link or no regular file")
    write_entry(folder, A, b"new")
    assert read_entry(folder, A) == b"new" and target.read_bytes() != path_of(folder).read_bytes()
    path_of(folder).unlink()
    path_of(folder).symlink_to(tmp_path / "nowhere")
    assert read_entry(folder, A) is None  # with the same warning, which came


@posix
def test_a_link_to_a_folder_is_judged_by_the_folder(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    assert read_entry(tmp_path / "link", A) == CONTENT
    folder.chmod(0o777)
    assert_refused(tmp_path / "link", "others may write it")


def test_a_folder_in_the_place_of_an_entry_is_not_read(folder):
    path_of(folder).unlink()
    path_of(folder).mkdir()
    assert_refused(folder, "no regular file")
    write_entry(folder, A, CONTENT)
    assert read_entry(folder, A) is None and [path.name for path in folder.iterdir()] == [A.name]


@pytest.mark.parametrize("size", [40 << 30, stored_code.MAX_ENTRY_BYTES, 1 << 20])
def test_a_sparse_file_is_not_read_whole(folder, monkeypatch, size):
    """Neither a file beyond the limit, nor one whose header does not say its size."""
    os.truncate(path_of(folder), size)
    count, read = [], os.read
    monkeypatch.setattr(os, "read", lambda descriptor, length: count.append(length) or read(descriptor, length))
    assert read_entry(folder, A) is None and sum(count) <= stored_code.HEADER.size


def test_a_content_beyond_the_limit_is_not_written(folder, monkeypatch):
    monkeypatch.setattr(stored_code, "MAX_ENTRY_BYTES", 1000)
    write_entry(folder, B, CONTENT)
    assert not path_of(folder, B).exists()


@posix
@pytest.mark.parametrize("kind", ["an entry", "a file of replace_file"])
def test_a_temporary_file_has_no_name_that_can_be_guessed_and_opens_no_file(folder, monkeypatch, tmp_path, kind):
    """An attacker who does guess it finds that neither his link nor his file is opened."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    write = {"an entry": lambda: write_entry(folder, B, CONTENT), "a file of replace_file": lambda: files.replace_file(folder / "f", b"x")}
    names = []
    for module in (stored_code, files):
        monkeypatch.setattr(module.secrets, "token_hex", lambda size: names.append(size) or "0" * 2 * size)
    write[kind]()
    assert names == [16]
    place = folder / {"an entry": f".{'0' * 32}.tcemu", "a file of replace_file": f".f.{'0' * 32}"}[kind]
    for plant in (lambda: place.symlink_to(victim), lambda: os.link(victim, place), lambda: os.mkfifo(place)):
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        plant()
        if kind == "an entry":
            write_entry(folder, B, b"other")
        else:
            with pytest.raises(FileExistsError):
                files.replace_file(folder / "f", b"y")
        assert victim.read_text() == "untouched"
        place.unlink(missing_ok=True)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# ---- its size


def test_a_folder_keeps_to_its_bound_and_loses_what_was_not_used(folder, monkeypatch):
    size = path_of(folder).stat().st_size
    entries = [Entry("b", (str(number),)) for number in range(40)]
    for name, value in (("MAX_FOLDER_BYTES", 20 * size), ("SWEEP_BYTES", 2 * size), ("LEFT_BYTES", 15 * size)):
        monkeypatch.setattr(stored_code, name, value)
    (folder / "notes.txt").write_bytes(bytes(30 * size))  # not ours
    (folder / f".{'1' * 32}.tcemu").write_bytes(b"of a process that runs"), (folder / f".{'2' * 32}.tcemu").write_bytes(b"of a killed one")
    os.utime(folder / f".{'2' * 32}.tcemu", (0, time.time() - 2 * stored_code.ABANDONED_SECONDS))
    for number, entry in enumerate(entries):
        write_entry(folder, entry, CONTENT)
        os.utime(path_of(folder, entry), (0, time.time() - 10 * stored_code.USED_SECONDS + number))
        assert read_entry(folder, entries[0]) == CONTENT  # which renews its time
        assert sum(path.stat().st_size for path in folder.glob("?-*.tcemu")) <= 23 * size
    found = {path.name for path in folder.iterdir()}
    assert {"notes.txt", f".{'1' * 32}.tcemu", entries[0].name, entries[-1].name} <= found
    assert f".{'2' * 32}.tcemu" not in found and entries[1].name not in found
    assert 10 <= len(found) - 2 <= 23


WRITER = """
import sys
from pathlib import Path
from tcemu.base import stored_code
from tcemu.base.stored_code import Entry, read_entry, write_entry
stored_code.MAX_FOLDER_BYTES, stored_code.SWEEP_BYTES, stored_code.LEFT_BYTES = 60_000, 10_000, 40_000
for number in range(60):
    entry = Entry("w", (str(number),))
    content = str(number).encode() * 1000
    write_entry(Path(sys.argv[1]), entry, content)
    assert read_entry(Path(sys.argv[1]), entry) in (content, None)
print("done")
"""


def test_processes_that_write_and_sweep_at_once_read_nothing_wrong(folder):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}

    def run(_):
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", WRITER, str(folder)], env=environment, capture_output=True, text=True, check=False
        )

    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(run, range(2)))
    assert [process.stdout for process in ended] == ["done\n"] * 2, ended
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 80_000


# ---- the folders


def test_a_relative_cache_folder_is_ignored(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv(stored_code.KERNEL_VARIABLE, raising=False)
    for named, expected in (("cache", "home/.cache"), ("./x", "home/.cache"), ("", "home/.cache"), (str(tmp_path / "c"), "c")):
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert stored_code.user_cache_folder() == tmp_path / expected / "tcemu"
        assert stored_code.kernel_folder() == tmp_path / expected / "tcemu" / "kernels"


def test_the_variable_of_kernels_names_a_folder_or_is_off(monkeypatch, tmp_path):
    for named, expected in (("", None), ("0", None), ("off", None), (str(tmp_path), tmp_path), ("here", Path.cwd() / "here")):
        monkeypatch.setenv(stored_code.KERNEL_VARIABLE, named)
        assert stored_code.kernel_folder() == expected
    compiler = stored_code.KernelCompiler(lambda: (), lambda text, target: text.encode())
    monkeypatch.setenv(stored_code.KERNEL_VARIABLE, "off")
    monkeypatch.chdir(tmp_path)
    assert stored_code.load_or_compile.__wrapped__(compiler, "text", "sm_90") == b"text" and not list(tmp_path.iterdir())


@pytest.fixture
def no_cache_is_configured(monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@posix
@pytest.mark.parametrize("above", [False, True])
def test_the_cache_of_programs_is_no_folder_that_others_may_write_or_move(no_cache_is_configured, monkeypatch, tmp_path, above):
    """JAX opens files in it by their path, so folders above it count too."""
    folder = tmp_path / "above" / "cache"
    folder.mkdir(parents=True)
    (folder.parent if above else folder).chmod(0o777)
    monkeypatch.setenv("TCEMU_COMPILATION_CACHE", str(folder))
    with pytest.warns(UserWarning, match="others may write it"):
        assert cache_compilations() is None
    with pytest.raises(PermissionError, match=r"machine code: .*others may write it"):
        cache_compilations(folder)
    assert jax.config.jax_compilation_cache_dir is None


@root
@pytest.mark.parametrize("above", [False, True])
def test_the_cache_of_programs_is_no_folder_of_another_user(no_cache_is_configured, monkeypatch, tmp_path, above):
    folder = tmp_path / "above" / "cache"
    folder.mkdir(parents=True)
    os.chown(folder.parent if above else folder, OTHER_USER, -1)
    monkeypatch.setenv("TCEMU_COMPILATION_CACHE", str(folder))
    with pytest.warns(UserWarning, match=f"belongs to user {OTHER_USER}"):
        assert cache_compilations() is None


@posix
def test_a_sticky_folder_above_is_no_danger(tmp_path):
    (tmp_path / "sticky" / "mine").mkdir(parents=True)
    (tmp_path / "sticky").chmod(0o1777)
    assert stored_code.path_refusal(tmp_path / "sticky" / "mine") == ""
    assert "others may write it" in stored_code.path_refusal(tmp_path / "sticky")
    assert "No such file" in stored_code.path_refusal(tmp_path / "none")


def test_where_nothing_can_be_written_nothing_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_entry(tmp_path / "file" / "code", A, CONTENT)
        assert read_entry(tmp_path / "file" / "code", A) is None and read_entry(None, A) is None
        write_entry(None, A, CONTENT)
