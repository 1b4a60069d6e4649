"""Compiles and loads the kernel of a `GemmSpec`.

Importing this module costs nothing: quack and the CuTe DSL are imported by the functions that compile or load. A
process that compiles has to be started for its arch (`CUTE_DSL_ARCH`, `QUACK_ARCH`), since both read it at import; it
needs no GPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from te_ops.backends.cutlass.limits import refuse
from te_ops.backends.cutlass.spec import GemmSpec, arguments, main_output
from te_ops.errors import PlanError

__all__ = ["compile_to", "cubin", "load"]

ENTRY = "te_ops_gemm"
CUBIN = 190  # ELF machine number of CUDA code
SWIZZLE = 8  # rows of tiles that a wave of blocks goes through side by side


def compile_to(spec: GemmSpec, arch: str, path: Path) -> None:
    """Writes the kernel as an object file that `load` takes.

    Args:
        spec: which `limits.refuse` accepts.
        arch: "sm_90a" or "sm_100a", the one that this process was started for.
        path: of the file, in a folder that exists. It is written in place: give a temporary name and rename it.

    Raises:
        PlanError: the spec is refused.
    """
    reason = refuse(spec, arch)
    if reason is not None:
        raise PlanError(f"fused GEMM: {reason}")
    from te_ops.backends.cutlass import kernel

    kernel.build(spec, arch).export_to_c(object_file_path=str(path), function_name=ENTRY)


def cubin(spec: GemmSpec, arch: str) -> bytes:
    """The kernel's machine code, for inspection. Arguments and errors as those of `compile_to`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.o")
        compile_to(spec, arch, path)
        return device_code(path.read_bytes())


def device_code(data: bytes) -> bytes:
    """The machine code inside an object that `compile_to` wrote.

    Raises:
        PlanError: there is none.
    """
    start = data.find(b"\x7fELF", 1)
    while start >= 0:
        if int.from_bytes(data[start + 18 : start + 20], "little") == CUBIN:
            return data[start:]
        start = data.find(b"\x7fELF", start + 1)
    raise PlanError("fused GEMM: the object holds no CUDA code")


def load(path: Path, spec: GemmSpec) -> Callable[..., None]:
    """The kernel in an object file, as a function for the current device.

    It is `run(a, b, *, scale_a, scale_b, loads, acc, y, row, col, scale, scale_inv, amax, sums, blocks_a, blocks_b,
    rebuilt, rebuilt_scale, rebuilt_inv)`,
    of which a spec wants the arguments that it names; all results are the caller's tensors. It launches on torch's
    current stream.

        a: [M, K], M >= 1; of E2M1 pairs of codes, [M, K / 2] of `torch.float4_e2m1fn_x2`.
        b: [N, K], likewise; of a paired accumulator the gate rows, then the linear rows. N is a multiple of 16.
        scale_a, scale_b: FP32, one value: what a code of a and b has to be multiplied by.
        loads: a tensor a load: [M, N] (a pair [M, 2 N]), [N] (a pair [2 N]), [M], or one value.
        acc: [M, N]: the accumulator; gate half and linear half of a pair.
        y: [M, N]; [M, 2 N] of a pair of outputs; [M, N / 2] of a paired accumulator. Added to, or overwritten.
        row, col: FP8, like y, and its transpose; `col` wants M to be a multiple of 16.
        scale, scale_inv: FP32, one value: read, and where its reciprocal is written.
        amax: one FP32 value, raised to max |y|: the caller has set it to 0.
        sums: FP32 [ceil(M / tile rows), N]: to be summed over rows.
        blocks_a, blocks_b: scales of blocks along K, as `blocks.swizzled` orders them; of a paired accumulator those of
            b in the order of the pairs.
        rebuilt, rebuilt_scale, rebuilt_inv: a second transposed copy [N, M], as `col`, `scale` and `scale_inv`.
    """
    import cutlass.cute as cute

    entry = cute.runtime.load_module(str(path), enable_tvm_ffi=True)[ENTRY]
    cluster = spec.tiling.cluster_m * spec.tiling.cluster_n
    processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    schedule = (processors // cluster, None, SWIZZLE, None, None, None)
    return caller(spec, entry, schedule)


def caller(spec: GemmSpec, entry: Any, schedule: tuple[Any, ...]) -> Callable[..., None]:
    """`run` of `load`, around a compiled function: written out for the spec, since it is called at every step."""
    passed = []
    for name, address in arguments(spec):
        value = f"loads[{name[4:]}]" if name.startswith("load") else name
        passed.append(f"{value}.data_ptr()" if address else value)
    epilogue = f"({', '.join(passed)}{',' if passed else ''})"
    text = (
        "def run(a, b, *, scale_a=None, scale_b=None, loads=(), acc=None, y=None, row=None, col=None,"
        " scale=None, scale_inv=None, amax=None, sums=None, blocks_a=None, blocks_b=None,"
        " rebuilt=None, rebuilt_scale=None, rebuilt_inv=None):\n"
        f"    entry(a, b, {main_output(spec.epilogue)}, None, {epilogue}, schedule, None, blocks_a, blocks_b)\n"
    )
    names: dict[str, Any] = {"entry": entry, "schedule": schedule}
    exec(compile(text, f"<fused GEMM {spec.key}>", "exec"), names)
    return names["run"]  # type: ignore[no-any-return]
