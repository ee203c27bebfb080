"""Loops are found in machine code, and a turn is counted by what it multiplies and not by what it waits for."""

import pytest

from benchmarks.nvidia import kernels
from benchmarks.nvidia.kernels import read_kernels
from benchmarks.nvidia.sass import Sass, Turn, UnknownSass

CODE = """
        .text.kernel:
   -:-:-:Y:02        /*0000*/                   S2R R0, SR_TID.X 
   -:-:-:Y:05        /*0010*/               @P0 BRA `(.L_x_9) 
.L_x_1:
   -:-:-:Y:01        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2 
   -:-:-:Y:05        /*0030*/              @!P1 BRA `(.L_x_8) 
.L_x_2:
   -:-:-:Y:06        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ 
   -:-:-:Y:05        /*0050*/              @!P2 BRA `(.L_x_3) 
   -:-:-:Y:04        /*0060*/                   ISETP.GE.AND P3, PT, R1, R2, PT 
   -:-:-:Y:04        /*0070*/                   FSEL R24, R24, -INF, P3 
.L_x_3:
   -:-:-:Y:01        /*0080*/                   MUFU.EX2 R24, R24 
   -:-:-:Y:05        /*0090*/               @P0 BRA `(.L_x_1) 
   -:-:-:Y:05        /*00a0*/                   EXIT 
.L_x_9:
   -:-:-:Y:01        /*00b0*/                   UTMALDG.4D [UR8], [UR4] 
   -:-:-:Y:05        /*00c0*/                   BRA.U UP0, `(.L_x_9) 
   -:-:-:Y:05        /*00d0*/                   EXIT 
.L_x_8:
   -:-:-:Y:01        /*00e0*/                   NANOSLEEP R4 
   -:-:-:Y:01        /*00f0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2 
   -:-:-:Y:05        /*0100*/              @!P1 BRA `(.L_x_8) 
   -:-:-:Y:05        /*0110*/                   BRA `(.L_x_2) 
.L_x_10:
   -:-:-:-:00        /*0120*/                   BRA `(.L_x_10)
"""  # noqa: W291


def test_a_turn_leaves_out_the_wait_and_may_skip_the_mask():
    multiply, copy = Sass(CODE).loops
    assert multiply.shortest == Turn(products=1, copies=0, instructions=6, stalls=1 + 5 + 6 + 5 + 1 + 5)
    assert multiply.longest == Turn(products=1, copies=0, instructions=8, stalls=23 + 8)
    assert copy.shortest == copy.longest == Turn(copies=1, instructions=2, stalls=6)


def test_a_loop_around_another_is_no_loop_of_its_own():
    again = CODE.replace("        .text.kernel:", ".L_x_7:").replace(
        "                   EXIT", "               @P4 BRA `(.L_x_7)", 1
    )
    assert Sass(again).loops == Sass(CODE).loops


def test_other_text_is_refused():
    with pytest.raises(UnknownSass, match="no instructions"):
        Sass("ptxas fatal")
    with pytest.raises(UnknownSass, match="L_x_77"):
        _ = Sass(CODE.replace("@P0 BRA `(.L_x_9)", "@P0 BRA `(.L_x_77)")).loops


PTXAS = """    0 bytes stack frame, {0} bytes spill stores, {0} bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
"""
RESOURCES = (
    "Resources(smem_scratch_bytes=1024, barrier_counts=Counter({Barrier(arrival_count=1, num_barriers=2): 3,"
    " Barrier(arrival_count=2, num_barriers=1): 1}))"
)


def dump(folder, spilled=0):
    (folder / "entry_0.sass_ctrl").write_text(CODE)
    (folder / "entry_0.ptxas").write_text(PTXAS.format(spilled))
    (folder / "entry_0.resources.txt").write_text(RESOURCES)


def test_a_kernel_is_read_once(tmp_path):
    dump(tmp_path)
    (kernel,) = read_kernels(tmp_path)
    assert (kernel.name, kernel.registers, kernel.spill_bytes, kernel.products) == ("entry", 168, 0, 1)
    assert kernel.shared_bytes == 1024 + 7 * 8
    facts = kernel.facts(64)
    assert (facts["clear"], facts["masked"], facts["producer"]) == (12, 16, 4)
    assert (facts["masked_stalls"], facts["products"]) == (62, [1])
    assert read_kernels(tmp_path) == []


def test_spills_are_told(tmp_path):
    dump(tmp_path, spilled=16)
    assert read_kernels(tmp_path)[0].spill_bytes == 32


def test_a_dump_of_another_form_is_named(tmp_path):
    dump(tmp_path)
    (tmp_path / "entry_0.ptxas").write_text("ptxas info    : Compile time = 151.563 ms\n")
    with pytest.raises(kernels.UnknownDump, match="entry_0 names no registers"):
        read_kernels(tmp_path)
