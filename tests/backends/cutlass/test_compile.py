"""The compiler itself, without a GPU: a kernel of each kind becomes machine code with tensor cores and without spills.

Every kernel of the manifest, for both architectures: `python -m scripts.cutlass_report`, which takes some minutes. What
lies in the user's cache in this version is looked at and not compiled again.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from scripts import cutlass_report as report
from te_ops.backends.cutlass import aot, cache, manifest, versions
from te_ops.backends.cutlass.pool import Pool
from te_ops.backends.cutlass.spec import GemmSpec
from te_ops.errors import PlanError

pytestmark = [
    pytest.mark.skipif(versions.missing() is not None, reason=str(versions.missing())),
    pytest.mark.timeout(600),
]

KINDS = (
    "bf16*bf16 plain y:bf16",
    "bf16*bf16 pair->1 acc:bf16 y:bf16",
    "e4m3*e4m3 split plain y:bf16",
    "e4m3*e4m3 fast pair->1 acc:bf16 e4m3:row+col+amax",
    "e4m3*e4m3 fast 1->1 row:bf16 acc:bf16 e4m3:row+col+amax",
    "e5m2*e4m3 split 1->2 tiles:bf16 e5m2:row+col+amax",
    "e5m2*e4m3 split 1->2 tiles:bf16 e5m2:row+col+amax rebuilt:e4m3",
    "e5m2*e4m3 fast 1->2 tiles:bf16 e5m2:row+col+amax rebuilt:e4m3",
    "e5m2*e4m3 split 1->1 tile:bf16 row:bf16 e5m2:row+col+amax sums",
    "e5m2*e4m3 split plain y+=fp32",
)
"""Of the manifest: products of every format, each kind of epilogue operation, both ways of summing."""
BLOCK_KINDS = (
    "e4m3*e4m3 1x32 pair->1 acc:bf16 y:bf16",
    "e2m1*e2m1 1x16 plain y:bf16",
)
"""Of that for sm_100a: operands whose blocks have scales."""
Started = dict[str, tuple[GemmSpec, Future[Path]]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Started]]:
    """Kernels by architecture and kind; a process an architecture compiles."""
    folder = cache.cache_folder() or tmp_path_factory.mktemp("compiled")
    pools = {arch: Pool(arch, 1) for arch in manifest.ARCHES}
    started = {}
    for arch, pool in pools.items():
        rows = manifest.rows(("llama-8b", "gelu-mlp"), arch=arch)
        first = {name.split(" [")[0]: spec for name, spec in reversed(rows.items())}
        specs = {kind: first[kind] for kind in (*KINDS, *BLOCK_KINDS) if kind in first}
        started[arch] = aot.compile_all(specs, arch, folder, pool)
    yield started
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", manifest.ARCHES)
def test_machine_code(compiled: dict[str, Started], arch: str, kind: str) -> None:
    if kind not in compiled[arch]:  # E5M2 by E4M3 on sm_100a, see te_ops.backends.cutlass.limits
        assert (arch, kind.split()[0]) == ("sm_100a", "e5m2*e4m3")
        return
    spec, made = compiled[arch][kind]
    found = report.report(kind, spec, arch, made)
    assert found.wrong == ""
    assert found.registers <= 255


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_scales_of_blocks_reach_the_tensor_cores(compiled: dict[str, Started], kind: str) -> None:
    assert kind not in compiled["sm_90a"]
    spec, made = compiled["sm_100a"][kind]
    found = report.report(kind, spec, "sm_100a", made)
    assert found.wrong == ""
    assert found.registers <= 255


def test_products_with_scales_of_blocks_are_told_apart() -> None:
    text = """
        /*2b00*/        UTCQMMA gdesc[UR44], gdesc[UR46], tmem[UR20], tmem[UR42], idesc[UR43], tmem[UR14], UP2 ;
        /*2be0*/        UTCOMMA.2CTA gdesc[UR42], gdesc[UR44], tmem[UR27], tmem[UR46], idesc[UR47], tmem[UR8], UPT ;
        /*2b90*/        UTCQMMA.2CTA gdesc[UR48], gdesc[UR50], tmem[UR27], tmem[UR46], idesc[UR47], UR8, UP4 ;
    """
    assert report._SCALED.findall(text) == ["UTCQMMA", "UTCOMMA"]


# -- the script that looks at all of them


def test_names_of_instructions() -> None:
    text = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0110*/              @!P0 STL.64 [R1+0x8], R4 ;
        /*0120*/              @UP1 UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8] ;
        /*0130*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24 ;
    .L_x_0:
    """
    assert report._INSTRUCTION.findall(text) == ["LDC", "STL", "UTCHMMA", "QGMMA"]


@pytest.mark.parametrize(
    ("figures", "wrong"),
    [
        ({"tensor": 8}, ""),
        ({}, "no tensor-core instruction"),
        ({"tensor": 8, "local": 3}, "3 accesses to local memory"),
        ({"tensor": 8, "stack": 16}, "16 bytes of stack frame"),
        ({"failed": "ptxas"}, "ptxas"),
    ],
)
def test_what_is_wrong(figures: dict[str, int], wrong: str) -> None:
    found = report.Report("name", "sm_90a", **figures)  # type: ignore[arg-type]
    assert wrong in found.wrong
    assert bool(found.wrong) == bool(wrong)
    assert "| name | sm_90a |" in report.markdown([found])


def test_failure_is_reported() -> None:
    made: Future[Path] = Future()
    made.set_exception(PlanError("it does not compile"))
    spec = next(iter(manifest.rows(["projection"]).values()))
    assert report.report("name", spec, "sm_90", made).wrong == "it does not compile"


def test_disassembler_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Path(report.disassembler()).name == "nvdisasm"
    monkeypatch.setattr(report.shutil, "which", lambda _: None)
    monkeypatch.setattr(report.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    with pytest.raises(PlanError, match="pip install nvidia-cuda-nvdisasm"):
        report.disassembler()
