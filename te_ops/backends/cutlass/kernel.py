"""The kernel class of a spec: quack's main loop, our epilogue, one argument schema.

Everything that the compiler sees is traced from here; `gemm.py` drives it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float8E8M0FNU, Float32, Int32
from cutlass.cute.runtime import make_ptr
from quack.compile_utils import make_fake_tensor
from quack.cute_dsl_utils import mlir_namedtuple
from quack.epilogue.ops import Scalar, TileLoad, TileStore
from quack.gemm_sm90 import GemmSm90
from quack.gemm_sm100 import GemmSm100
from quack.gemm_tvm_ffi_utils import make_fake_scheduler_args, make_fake_sf_tensor

from te_ops.backends.cutlass.apart import ApartEpilogue, StashedQuantStore
from te_ops.backends.cutlass.epilogue import (
    TYPES,
    FusedEpilogue,
    HopperEpilogue,
    Slot,
    field_name,
    function_of,
)
from te_ops.backends.cutlass.spec import Epilogue, Format, GemmSpec, Load, arguments, main_output
from te_ops.backends.cutlass.stores import (
    Argument,
    ColumnLoad,
    ColumnSum,
    QuantStore,
    RowLoad,
    RowQuantStore,
    Stash,
)

TENSOR: Any = cute.Tensor | None
WORDS = ("scale", "scale_inv", "amax", "rebuilt_scale", "rebuilt_inv")
WORD: Any = Int32 | cute.Tensor | None
REBUILT = {"col": "rebuilt", "scale": "rebuilt_scale", "scale_inv": "rebuilt_inv"}
SPLIT_K = ("split_k_semaphore", "split_k_workspace")  # parameters that quack's loop looks for


def slots(spec: GemmSpec, arch: str) -> list[Slot]:
    """The arguments of the epilogue, in the order of the compiled function's tuple."""
    names = [name for name, _ in arguments(spec)]
    often, met = Counter(names), Counter[str]()
    found = []
    for name in names:
        half = met[name] if often[name] == 2 else None
        met[name] += 1
        field = field_name(name, half)
        found.append(Slot(field, name, _op(spec, arch, name, field), half))
    return found


def _op(spec: GemmSpec, arch: str, name: str, field: str) -> Any:
    """What handles an argument."""
    e = spec.epilogue
    if name.startswith("load"):
        return _load_op(e, e.loads[int(name[4:])], field)
    if name in ("scale_a", "scale_b"):
        return Scalar(field)
    if name in ("acc", "y"):
        return TileStore(field, gated=e.acc_pair)
    if name == "sums":
        return ColumnSum(field)
    if name == "rebuilt":
        assert e.rebuilt is not None
        written = frozenset(("col", "scale_inv"))
        return QuantStore(field, e.rebuilt.format, written, parts=1, paired=False, names=REBUILT)
    wanted = [n for n, _ in arguments(spec) if n in ("row", "col", "amax", "scale_inv")]
    if name != wanted[0]:
        return Argument(field)
    assert e.quantized is not None
    kind = QuantStore if arch == "sm_90a" else RowQuantStore
    if spec.tiling.apart:
        kind = StashedQuantStore
    return kind(field, e.quantized.format, frozenset(wanted), parts=e.outs, paired=e.acc_pair)


def _load_op(e: Epilogue, load: Load, field: str) -> Any:
    if load.shape == "scalar":
        return Scalar(field, dtype=TYPES[load.format])
    if load.shape == "column":
        return ColumnLoad(field)
    if load.shape == "tile":
        return TileLoad(field)
    return RowLoad(field, "plain" if not e.acc_pair else "halves" if load.pair else "shared")


def fake_arguments(spec: GemmSpec) -> dict[str, Any]:
    """Stand-ins for the caller's tensors: what the compiled function accepts. Sizes are free but shared."""
    e = spec.epilogue
    m, n = cute.sym_int(), cute.sym_int(divisibility=16)
    k = cute.sym_int(divisibility=32) if spec.a == "e2m1" else cute.sym_int()  # 16 bytes
    wide = n if e.outs == 1 else cute.sym_int(divisibility=16)  # of y and what lies beside it
    if e.acc_pair:
        wide = cute.sym_int(divisibility=8)

    def matrix(kind: Format | None, rows: Any, columns: Any, leading: int = 1) -> Any:
        dtype = TYPES[kind or "fp32"]
        return make_fake_tensor(
            dtype, (rows, columns), leading_dim=leading, divisibility=128 // dtype.width
        )

    def word(dtype: Any = Float32) -> Any:
        return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)

    made = {
        "a": matrix(spec.a, m, k, 1 if spec.a_major == "k" else 0),
        "b": matrix(spec.b, n, k, 1 if spec.b_major == "k" else 0),
        "scale_a": word(),
        "scale_b": word(),
        "acc": matrix(e.acc_store, m, n),
        "y": matrix(e.store, m, wide),
        "scale": word(),
        "scale_inv": word(),
        "amax": word(Int32),
        "sums": make_fake_tensor(Float32, (cute.sym_int(), wide), leading_dim=1, divisibility=4),
    }
    if e.quantized is not None:
        made["row"] = matrix(e.quantized.format, m, wide)
        made["col"] = matrix(e.quantized.format, wide, m)
    if e.rebuilt is not None:
        made["rebuilt"] = matrix(e.rebuilt.format, n, m)
        made |= {name: word() for name in ("rebuilt_scale", "rebuilt_inv")}
    for index, load in enumerate(e.loads):
        made[f"load{index}"] = _fake_load(load, m, n if not load.pair else None, word, matrix)
    return made


def _fake_load(
    load: Load, m: Any, n: Any, word: Callable[..., Any], matrix: Callable[..., Any]
) -> Any:
    dtype = TYPES[load.format]
    if load.shape == "scalar":
        return word(dtype)
    if load.shape == "column":
        return make_fake_tensor(dtype, (m,), leading_dim=0, divisibility=1)
    if load.shape == "row":
        return make_fake_tensor(dtype, (cute.sym_int(),), leading_dim=0, divisibility=1)
    return matrix(load.format, m, n if n is not None else cute.sym_int(divisibility=16))


def build(spec: GemmSpec, arch: str) -> Any:
    """The compiled function of a spec for the arch that this process was started for."""
    kernel = _kernel(spec, arch)
    fake = fake_arguments(spec)
    main = main_output(spec.epilogue)
    return cute.compile(
        kernel,
        fake["a"],
        fake["b"],
        fake[main] if main else None,
        None,
        kernel.EpilogueArguments(*(fake[slot.source] for slot in kernel.slots)),
        make_fake_scheduler_args(False, False, None),
        None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        *(_fake_blocks(spec) for _ in "ab"),
        options="--enable-tvm-ffi",
    )


def _fake_blocks(spec: GemmSpec) -> Any:
    """Stands for the scales of an operand's blocks, in the order of `blocks.swizzled`."""
    if not spec.blocks:
        return None
    return make_fake_sf_tensor(Float8E8M0FNU if spec.blocks == 32 else Float8E4M3FN, None)


def _kernel(spec: GemmSpec, arch: str) -> Any:
    """quack's GEMM of the arch with our epilogue, for the spec's tiles."""
    e, tiling = spec.epilogue, spec.tiling
    hopper = arch == "sm_90a"
    found = tuple(slots(spec, arch))
    bases: tuple[Any, ...] = (FusedEpilogue, GemmSm100)
    if hopper:
        bases = (ApartEpilogue if tiling.apart else HopperEpilogue, GemmSm90)
    stash = (Stash("stash"),) if tiling.apart else ()
    made: Any = type(
        f"Gemm_{spec.key}",
        bases,
        {
            "_epi_ops": (*(slot.op for slot in found), *stash),
            "_extra_param_fields": tuple((name, TENSOR, None) for name in SPLIT_K),
            "EpilogueArguments": _arguments_type(found, e.accumulate),
            "spec": spec,
            "slots": found,
            "function": staticmethod(function_of(e)) if e.function else None,
            "second": staticmethod(function_of(e.rebuilt)) if e.rebuilt else None,
        },
    )
    named: dict[str, Any] = {}
    if hopper:
        named = {"pingpong": tiling.pingpong, "fp8_fast_accum": spec.fast}
    elif spec.blocks:
        named = {"sf_vec_size": spec.blocks}
    kernel = made(
        Float32,
        TYPES[spec.a],
        (tiling.m, tiling.n),
        (tiling.cluster_m, tiling.cluster_n, 1),
        concat_layout=("B",) if e.acc_pair else None,
        **named,
    )
    if tiling.apart:
        kernel.divide()
    elif hopper:
        # Of 512 registers that a lane has on a processor: as many as can be for the accumulators.
        kernel.num_regs_load, kernel.num_regs_mma = 24, 240
    return kernel


def _arguments_type(found: tuple[Slot, ...], accumulate: bool) -> Any:
    made = mlir_namedtuple(
        NamedTuple("EpilogueArguments", [(slot.field, _annotation(slot)) for slot in found])
    )
    made.add_to_output = accumulate
    made.stash = True  # quack leaves out ops that have no argument
    return made


def _annotation(slot: Slot) -> Any:
    if isinstance(slot.op, Scalar):
        return slot.op.arg_spec_type()
    return WORD if slot.source in WORDS else TENSOR
