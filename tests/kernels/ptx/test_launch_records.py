"""Launches in files, and their repetition on a device. No GPU is needed but for the last test: emulations stand in for it."""

import ctypes
import json
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from ptx_kernels.manifest import KERNELS
from ptx_kernels.replay import replay_kernel
from support.emulated_gpu import without_gpu
from support.emulated_launches import EmulatedDevice

from tcemu import cli, ptx
from tcemu.base.errors import Unsupported
from tcemu.base.files import FolderInUse
from tcemu.base.saved_files import DamagedFile, pack_archive, read_array, unpack_archive
from tcemu.kernels.ptx.runtime import launch_records
from tcemu.kernels.ptx.runtime.launch_records import MAX_ARRAY_BYTES, MEMBER_NAMES
from tcemu.kernels.ptx.runtime.launch_replay import compare_launch

TESTS = Path(__file__).parents[2]
HEAD = ".version 8.0\n.target sm_90a\n.address_size 64\n"
ADD = """.visible .entry {name}(.param .u64 p, .param .u32 n) {{
    .reg .b64 %p; .reg .b32 %n, %t, %x;
    ld.param.u64 %p, [p]; ld.param.u32 %n, [n]; mov.u32 %t, %tid.x; mad.wide.u32 %p, %t, 4, %p;
    ld.global.u32 %x, [%p]; add.u32 %x, %x, %n; st.global.u32 [%p], %x; ret;
}}
"""
# y[i] = table[0][i] + table[1][i] + s.n, where s has the table, n, and y; then the second pointer of the table is overwritten
STRUCT = (
    HEAD
    + """.visible .entry sums(.param .align 8 .b8 s[24], .param .u64 q) {
    .reg .b64 %t, %y, %a, %b, %q; .reg .b32 %n, %x, %z, %i;
    ld.param.u64 %t, [s]; ld.param.u32 %n, [s+8]; ld.param.u64 %y, [s+16]; ld.param.u64 %q, [q];
    ld.global.u64 %a, [%t]; ld.global.u64 %b, [%t+8]; mov.u32 %i, %tid.x;
    mad.wide.u32 %a, %i, 4, %a; mad.wide.u32 %b, %i, 4, %b; mad.wide.u32 %y, %i, 4, %y;
    ld.global.u32 %x, [%a]; ld.global.u32 %z, [%b]; add.u32 %x, %x, %z; add.u32 %x, %x, %n; st.global.u32 [%y], %x;
    ld.global.u32 %z, [%q]; st.global.u32 [%t+8], %z; st.global.u32 [%t+12], 7; ret;
}
"""
)


class Sums(ctypes.Structure):
    _fields_ = (("table", ctypes.c_void_p), ("n", ctypes.c_int32), ("y", ctypes.c_void_p))


def run_add(name="add", n=5, **options):
    words = np.arange(32, dtype=np.uint32)
    return ptx.run(HEAD + ADD.format(name=name), grid=1, block=32, args=[words, np.uint32(n)], target="H100", **options)


def run_struct():
    a, b = np.arange(16, dtype=np.uint32), 100 * np.arange(20, dtype=np.uint32)
    table = ptx.PointerTable(np.zeros(2, np.uint64), {0: ptx.BufferPointer(a), 8: ptx.BufferPointer(b, 16)})
    struct = ptx.Struct(Sums, {"table": table, "n": 3, "y": np.zeros(16, np.uint32)})
    tail = ptx.BufferPointer(np.array([1, 2, 9], np.uint32), 8)
    return ptx.run(STRUCT, grid=1, block=16, args=[struct, tail], target="H100")


def repeat(launch):
    """The counts of a launch that the emulation repeats."""
    return compare_launch(launch, [EmulatedDevice()(launch, case) for case in range(launch.cases)])


def test_a_launch_is_read_back_as_it_was(tmp_path):
    with ptx.record_launches(tmp_path) as recorder:
        (made,) = run_add()
    (path,) = recorder.files
    launch = ptx.read_launch(path)
    assert (path.name, launch.entry, launch.target, launch.grid, launch.block) == ("000001_add.npz", "add", "sm_90a", (1, 1, 1), (32, 1, 1))
    assert launch.before[0].view(np.uint32)[0].tolist() == list(range(32))
    assert np.array_equal(launch.after[0].view(np.uint32)[0], made) and made[3] == 8
    assert launch.parameters[0, 8:12].view(np.uint32) == 5 and not launch.parameters[0, :8].any()
    assert [(each.holder, each.byte, each.output, each.offset) for each in launch.references] == [(None, 0, 0, 0)]
    assert repeat(launch) == {"entry": "add", "status": "equal", "words": 32, "differing": 0, "message": ""}


def test_pointers_in_structs_and_tables_lead_to_the_same_arrays(tmp_path):
    with ptx.record_launches(tmp_path) as recorder:
        tail, table, a, b, y = run_struct()
    assert tail[2] == 9 and table[1] == 9 | 7 << 32 and y[2] == a[2] + b[6] + 3
    launch = ptx.read_launch(recorder.files[0])
    assert [(each.holder, each.byte, each.output, each.offset) for each in launch.references] == [
        (1, 0, 2, 0), (1, 8, 3, 16), (None, 0, 1, 0), (None, 16, 4, 0), (None, 24, 0, 8),
    ]  # fmt: skip
    assert launch.after[1].view(np.uint64)[0].tolist() == [0, 9 | 7 << 32]  # the first pointer was left alone
    found = EmulatedDevice()
    made = found(launch, 0)
    assert np.array_equal(made[4], launch.after[4][0]) and np.array_equal(made[0], launch.after[0][0])


def test_tensor_maps_and_single_kernels_are_repeated(tmp_path):
    with ptx.record_launches(tmp_path) as recorder:
        for kernel in KERNELS:
            if kernel.name in ("tma_boxes", "bulk_round_trip"):
                replay_kernel(kernel, "sm_90a")
    launches = [ptx.read_launch(path) for path in recorder.files]
    assert {launch.entry for launch in launches} == {"tma_boxes", "bulk_round_trip"}
    assert any(each.tensor_map is not None for launch in launches for each in launch.references)
    assert all(repeat(launch)["status"] == "equal" for launch in launches)


def test_cases_are_launches_of_one_file(tmp_path):
    words = np.arange(96, dtype=np.uint32).reshape(3, 32)
    with ptx.record_launches(tmp_path) as recorder:
        ptx.run(HEAD + ADD.format(name="add"), grid=1, block=32, args=[words, np.array([1, 2, 3], np.uint32)], target="H100", cases=3)
    launch = ptx.read_launch(recorder.files[0])
    assert launch.cases == 3 and launch.after[0].view(np.uint32)[2, 0] == 64 + 3
    assert repeat(launch) == {"entry": "add", "status": "equal", "words": 96, "differing": 0, "message": ""}


def test_numbers_go_on_and_no_file_is_overwritten(tmp_path):
    for n in (1, 2):
        with ptx.record_launches(tmp_path):
            run_add(n=n)
            with pytest.raises(FolderInUse), ptx.record_launches(tmp_path):
                raise AssertionError
    run_add(n=3)  # outside
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == ["000001_add.npz", "000002_add.npz"]
    assert [int(ptx.read_launch(path).parameters[0, 8]) for path in paths] == [1, 2]


def test_damage_is_named(tmp_path):
    with ptx.record_launches(tmp_path) as recorder:
        run_struct()
    path = recorder.files[0]
    content, pick = path.read_bytes(), np.random.default_rng(0)
    whole = ptx.read_launch(path)
    for length in (0, 1, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(DamagedFile, match=path.name):
            ptx.read_launch(path)
    for place in pick.integers(0, len(content), 300):
        changed = bytearray(content)
        changed[place] ^= 1 << int(pick.integers(8))
        path.write_bytes(changed)
        try:  # bytes that mean nothing, such as the time of a member, may change
            launch = ptx.read_launch(path)
        except DamagedFile:
            continue
        assert launch.text == whole.text and all(np.array_equal(x, y) for x, y in zip(launch.after, whole.after, strict=True))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "tcemu fuzz"}, "this is 'tcemu fuzz'"),
        ({"version": 2}, "version 2"),
        ({"grid": [0, 1, 1]}, "grid"),
        ({"cases": 7}, "reshape"),
        ({"shared_bytes": -1}, "shared_bytes"),
        ({"parameters": [[0, 99], [24, 8]]}, "parameters"),
        ({"references": [{"holder": None, "byte": 0, "output": 9, "offset": 0, "tensor_map": None}]}, "leads to array 9"),
        ({"references": [{"holder": 0, "byte": 8, "output": 0, "offset": 0, "tensor_map": None}]}, "byte 8 of array 0"),
        ({"references": [{"holder": None}]}, "missing"),
        ({"changed": [9]}, "array 9 of 5"),
        ({"changed": [-1]}, "changed"),
        ({"changed": [0]}, "after_0"),
        ({"arrays": [], "changed": [], "references": []}, "does not name"),
        ({"fmad": 1}, "true or false"),
        ({"entry": "\x1b[2J"}, "control character"),
        ({"target": "sm_90a\nequal"}, "control character"),
        ({"extra": 1}, "unknown ..extra"),
    ],
)
def test_a_header_that_no_launch_has_is_rejected(tmp_path, changes, said):
    with ptx.record_launches(tmp_path) as recorder:
        run_struct()
    path = recorder.files[0]
    header, members = unpack_archive(path.read_bytes(), MEMBER_NAMES, largest=MAX_ARRAY_BYTES)
    arrays = {name: np.frombuffer(data, np.uint8)[128:] for name, data in members.items()}  # behind the header of .npy
    path.write_bytes(pack_archive(header, arrays))
    assert ptx.read_launch(path).entry == "sums"
    path.write_bytes(pack_archive(header | changes, arrays))
    with pytest.raises(DamagedFile, match=said):
        ptx.read_launch(path)


@pytest.fixture
def device(monkeypatch, tmp_path):
    """The file of the calls that the device gets, which runs in another process."""
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}:{TESTS.parent}")
    monkeypatch.setenv("LAUNCH_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return tmp_path / "calls"


def test_a_replay_counts_words_and_continues(tmp_path, device):
    folder, out = tmp_path / "launches", tmp_path / "replayed"
    with ptx.record_launches(folder):
        run_add()
        run_struct()
    found = ptx.replay_launches(folder, out=out, device="support.emulated_launches:honest")
    assert found.all_equal is False and [each.status for each in found.launches] == ["equal", "different"]
    assert [(each.words, each.differing) for each in found.launches] == [(32, 0), (3 + 4 + 16 + 20 + 16, 2)]  # it sets both words to zero
    assert "word 2: 0x00000000; the emulation has 0x00000009" in found.launches[1].message
    assert "2 of 91 words differ" in str(found) and found.records()[0]["words"] == 32
    calls = ["opened", "add", "sums", "sums"]  # what differs runs twice
    assert device.read_text().split() == calls
    again = ptx.replay_launches(folder, out=out, device="support.emulated_launches:honest")
    assert again == found and device.read_text().split() == [*calls, "opened"]
    (out / "000001_add.json").write_text(json.dumps({"kind": "x"}))
    with ptx.record_launches(folder):
        run_add("more")
    assert len(ptx.replay_launches(folder, out=out, device="support.emulated_launches:honest").launches) == 3
    assert device.read_text().split() == [*calls, "opened", "opened", "add", "more"]


def test_faults_of_a_launch_do_not_end_a_replay(tmp_path, device):
    with ptx.record_launches(tmp_path / "launches") as recorder:
        for name in ("flips", "wavers", "dies", "faults", "hangs", "add", "add"):
            run_add(name)
        ptx.run(
            HEAD.replace("sm_90a", "sm_80") + ADD.format(name="older"), grid=1, block=32, args=[np.zeros(32, np.uint32), 1], target="A100"
        )
    recorder.files[6].write_bytes(b"")
    seen = []
    found = ptx.replay_launches(tmp_path / "launches", seconds=8, report=seen.append, device="support.emulated_launches:faulty")
    statuses = [each.status for each in found.launches]
    assert statuses == ["different", "depends on the run", "failed", "failed", "failed", "equal", "failed", "not launched"]
    messages = [each.message for each in found.launches]
    assert messages[0] == "p, word 1: 0x00000007; the emulation has 0x00000006"
    assert "status 9" in messages[2] and "illegal memory access" in messages[3] and "8 s" in messages[4]
    assert "empty" in messages[6] and "sm_80" in messages[7]
    assert not found.all_equal and seen == list(found.launches)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has neither FIFOs nor line breaks in names")
def test_a_replay_runs_nothing_of_the_folder_but_ptx_and_reads_no_other_file(tmp_path, device, monkeypatch):
    folder, out = tmp_path / "launches\nhere", tmp_path / "out"
    with ptx.record_launches(folder) as recorder:
        run_add()
    raw = recorder.files[0].read_bytes()
    header, members = unpack_archive(raw, MEMBER_NAMES, largest=MAX_ARRAY_BYTES)
    arrays = {name: read_array(data, np.uint8, None) for name, data in members.items()}
    (folder / "000002_short.npz").write_bytes(pack_archive(header | {"parameters": header["parameters"][:1]}, arrays))
    (folder / "000003_other.npz").write_bytes(pack_archive(header | {"entry": "other"}, arrays))
    (folder / "000004_link.npz").symlink_to("nowhere")
    (folder / "000005_folder.npz").mkdir()
    os.mkfifo(folder / "000006_pipe.npz")
    (folder / "numpy.py").write_text("open('executed', 'w')")
    monkeypatch.chdir(folder)
    replay = partial(ptx.replay_launches, Path(), out=out, device="support.emulated_launches:honest")
    found = replay()
    assert [each.status for each in found.launches] == ["equal", *["failed"] * 5] and not Path("executed").exists()
    messages = [each.message for each in found.launches]
    assert "the launch has [8] bytes, and add in its PTX [8, 4]" in messages[1] and "'other'" in messages[2]
    assert "No such file" in messages[3] and all("not a regular file" in each for each in messages[4:])
    result = out / "000001_add.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"words": "many"}))
    assert replay() == found
    for path in folder.glob("00000[2-6]*"):
        path.rmdir() if path.is_dir() else path.unlink()
    assert ptx.replay_launches(folder, device="support.emulated_launches:honest").all_equal  # a line break in a path
    for seconds in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="seconds: got"):
            ptx.replay_launches(folder, seconds=seconds)


def test_a_launch_of_hundreds_of_arrays_is_read_back(tmp_path, monkeypatch):
    count = 600
    text = """.visible .entry each(.param .u64 table) {
        .reg .b64 %p, %q; .reg .b32 %t;
        ld.param.u64 %p, [table]; mov.u32 %t, %tid.x; mad.wide.u32 %p, %t, 8, %p; ld.global.u64 %q, [%p]; st.global.u32 [%q], %t; ret; }"""
    pointers = {8 * i: ptx.BufferPointer(np.full(1, 7, np.uint32)) for i in range(count)}
    with ptx.record_launches(tmp_path) as recorder:
        args = [ptx.PointerTable(np.zeros(count, np.uint64), pointers)]
        ptx.run(HEAD + text, grid=1, block=count, args=args, target="H100")
        launch = ptx.read_launch(recorder.files[0])
        assert len(launch.names) == count + 1
        assert [int(array.view(np.uint32)[0, 0]) for array in launch.after[1:]] == list(range(count))
        monkeypatch.setattr(launch_records, "MAX_ARRAYS", count)
        with pytest.raises(Unsupported, match="each has 601 arrays; a file holds 600 at most"):
            ptx.run(HEAD + text, grid=1, block=count, args=args, target="H100")
        monkeypatch.setattr(launch_records, "MAX_FILE_BYTES", 100)
        with pytest.raises(Unsupported, match="packed bytes; 100 can be read back"):
            run_add()
    assert len(recorder.files) == 1


def test_an_error_of_a_recorded_script_is_shown_as_python_shows_it(tmp_path, capsys):
    script, folder = tmp_path / "own.py", str(tmp_path / "launches")
    for text, said in (("def f():\n    raise ValueError('mine')\nf()", "in f"), ("raise SystemExit('why')", "why")):
        script.write_text(text)
        assert cli.main(["launches", "record", folder, str(script)]) == 1
        captured = capsys.readouterr()
        assert said in captured.err and "0 launches recorded" in captured.out


def test_without_a_gpu_a_replay_says_so(tmp_path, device):
    with ptx.record_launches(tmp_path):
        run_add()
    with pytest.raises(Unsupported, match="none answers here"):
        ptx.replay_launches(tmp_path, device="support.emulated_launches:absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no launches"):
        ptx.replay_launches(tmp_path / "empty")


@without_gpu
def test_the_command_records_lists_and_needs_a_gpu_to_replay(tmp_path, capsys):
    script = tmp_path / "own.py"
    script.write_text(
        "import sys, numpy as np\nfrom tcemu import ptx\n"
        f"ptx.run({HEAD + ADD.format(name='add')!r}, grid=1, block=32, args=[np.zeros(32, np.uint32), int(sys.argv[1])], target='H100')\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    folder = str(tmp_path / "launches")
    assert cli.main(["launches", "record", folder, str(script), "7", "3"]) == 3
    assert "1 launches recorded" in capsys.readouterr().out
    assert cli.main(["launches", "list", folder]) == 0
    assert "000001_add  add     sm_90a  1 x 1 x 1  32 x 1 x 1  1 arrays, 32 words" in capsys.readouterr().out
    assert cli.main(["launches", "replay", folder]) == 2
    assert "GPU" in capsys.readouterr().err
    (tmp_path / "launches/000001_add.npz").write_bytes(b"PK")
    assert cli.main(["launches", "list", folder]) == 1
    assert "damaged: it does not end as a zip does" in capsys.readouterr().out
    assert cli.main(["launches", "record", folder, str(tmp_path / "none.py")]) == 2


@pytest.mark.gpu
def test_a_gpu_repeats_launches_recorded_without_it(tmp_path):
    from tcemu.engine.backends.native.gpu_runner import gpu

    try:
        target = gpu().target
    except Unsupported as error:
        pytest.skip(str(error))
    with ptx.record_launches(tmp_path):
        for kernel in KERNELS:
            if kernel.sm_80 and kernel.file in ("softmax", "epilogues", "mma_gemm") and target == "sm_90a":
                replay_kernel(kernel, "sm_90a")
        if target == "sm_90a":
            run_add()
    if target != "sm_90a":
        pytest.skip(f"the kernels are recorded for sm_90a, and this GPU is {target}")
    found = ptx.replay_launches(tmp_path)
    assert found.all_equal, str(found)
