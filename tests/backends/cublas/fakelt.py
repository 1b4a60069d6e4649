"""cuBLASLt on the CPU: the bindings' functions over host memory, as the library documents them.

Matrices are column-major; every address is one of host memory. Refused as the library refuses on Hopper: FP8 that is
not transposed x plain, addresses and extents of FP8 that do not divide by 16, scales off 16 bytes.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
from typing import Any

import torch

from te_ops.backends.cublas import lt
from te_ops.runtime.tape import unwatched

_DTYPES = {number: dtype for dtype, number in lt._TYPES.items()}
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class LtError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(str(status))
        self.status = status


class MatmulDescAttribute(enum.IntEnum):
    TRANSA = 3
    TRANSB = 4
    EPILOGUE = 7
    BIAS_POINTER = 8
    A_SCALE_POINTER = 17
    B_SCALE_POINTER = 18
    D_SCALE_POINTER = 20
    AMAX_D_POINTER = 21
    FAST_ACCUM = 25
    BIAS_DATA_TYPE = 26
    A_SCALE_MODE = 31
    B_SCALE_MODE = 32


_WIDTHS = {
    MatmulDescAttribute.FAST_ACCUM: 1,
    **dict.fromkeys((x for x in MatmulDescAttribute if x.name.endswith("POINTER")), 8),
}


class MatmulMatrixScale(enum.IntEnum):
    SCALAR_32F = 0
    OUTER_VEC_32F = 3
    VEC128_32F = 4
    BLK128x128_32F = 5


class MatmulPreferenceAttribute(enum.IntEnum):
    MAX_WORKSPACE_BYTES = 1
    REDUCTION_SCHEME_MASK = 3
    MIN_ALIGNMENT_A_BYTES = 5
    MIN_ALIGNMENT_B_BYTES = 6
    MIN_ALIGNMENT_C_BYTES = 7
    MIN_ALIGNMENT_D_BYTES = 8


class MatmulAlgoConfigAttribute(enum.IntEnum):
    ID = 0
    TILE_ID = 1
    SPLITK_NUM = 2
    REDUCTION_SCHEME = 3
    CTA_SWIZZLING = 4
    CUSTOM_OPTION = 5
    STAGES_ID = 6
    INNER_SHAPE_ID = 7
    CLUSTER_SHAPE_ID = 8


class Epilogue(enum.IntEnum):
    DEFAULT = 1
    BIAS = 4


class FakeLt:
    """Stands for nvmath.bindings.cublasLt; `offered` algorithms a product, each a number in its first byte."""

    cuBLASLtError = LtError  # noqa: N815
    MatmulDescAttribute = MatmulDescAttribute
    MatmulMatrixScale = MatmulMatrixScale
    MatmulPreferenceAttribute = MatmulPreferenceAttribute
    MatmulAlgoConfigAttribute = MatmulAlgoConfigAttribute
    Epilogue = Epilogue

    def __init__(self, offered: int = 3) -> None:
        self.offered = offered
        self.objects: dict[int, Any] = {}
        self.numbers = itertools.count(1000)
        self.calls: list[dict[str, Any]] = []
        self.queries = 0
        self.patches = 0

    def _new(self, thing: Any) -> int:
        number = next(self.numbers)
        self.objects[number] = thing
        return number

    def get_version(self) -> int:
        return 130100

    def create(self) -> int:
        return self._new("handle")

    # -- descriptors

    def matmul_desc_create(self, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)
        return self._new({})

    def matmul_desc_set_attribute(self, desc: int, attribute: int, buffer: int, size: int) -> None:
        name = MatmulDescAttribute(attribute)
        assert size == _WIDTHS.get(name, 4), name
        self.patches += 1
        self.objects[desc][name] = int.from_bytes(ctypes.string_at(buffer, size), "little")

    def matmul_desc_destroy(self, desc: int) -> None:
        del self.objects[desc]

    def matrix_layout_create(self, dtype: int, rows: int, columns: int, ld: int) -> int:
        assert ld >= rows
        return self._new((_DTYPES[dtype], rows, columns, ld))

    def matrix_layout_destroy(self, layout: int) -> None:
        del self.objects[layout]

    def matmul_preference_create(self) -> int:
        return self._new({})

    def matmul_preference_set_attribute(
        self, preference: int, attribute: int, buffer: int, size: int
    ) -> None:
        name = MatmulPreferenceAttribute(attribute)
        assert size == (8 if name is MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES else 4)
        self.objects[preference][name] = int.from_bytes(ctypes.string_at(buffer, size), "little")

    def matmul_preference_destroy(self, preference: int) -> None:
        del self.objects[preference]

    # -- algorithms

    def matmul_algo_get_heuristic(  # noqa: PLR0917
        self,
        handle: int,
        desc: int,
        a: int,
        b: int,
        c: int,
        d: int,
        preference: int,
        count: int,
        results: int,
        found: int,
    ) -> None:
        assert self.objects[handle] == "handle"
        assert len(self.objects[preference]) == 6
        self.queries += 1
        self._refuse(desc, a, b, c, d)
        made = (lt.Result * count).from_address(results)
        for i in range(min(count, self.offered)):
            made[i].algo[0] = i + 1
            made[i].workspace = 0
        ctypes.c_int32.from_address(found).value = min(count, self.offered)

    def matmul_algo_check(  # noqa: PLR0917
        self, handle: int, desc: int, a: int, b: int, c: int, d: int, algo: int, result: int
    ) -> None:
        assert self.objects[handle] == "handle"
        self._refuse(desc, a, b, c, d)
        if not 1 <= ctypes.string_at(algo, 1)[0] <= self.offered:
            raise LtError(15)
        lt.Result.from_address(result).workspace = 0

    def matmul_algo_config_get_attribute(
        self, algo: int, attribute: int, buffer: int, size: int, written: int
    ) -> None:
        value = ctypes.string_at(algo, 64)[attribute]
        ctypes.memmove(buffer, value.to_bytes(size, "little"), size)
        ctypes.c_size_t.from_address(written).value = size

    def matmul_algo_config_set_attribute(
        self, algo: int, attribute: int, buffer: int, size: int
    ) -> None:
        ctypes.memmove(algo + attribute, buffer, 1)

    def _refuse(self, desc: int, a: int, b: int, c: int, d: int) -> None:
        attributes = self.objects[desc]
        left, right, out = (self.objects[x] for x in (a, b, d))
        if left[0] in _FP8 or right[0] in _FP8:
            if left[0] is right[0] is torch.float8_e5m2:
                raise LtError(15)
            if not attributes.get(MatmulDescAttribute.TRANSA, 0) or attributes.get(
                MatmulDescAttribute.TRANSB, 0
            ):
                raise LtError(15)
            if left[1] % 16 or left[2] % 16:
                raise LtError(15)
        assert self.objects[c][1:] == out[1:]

    # -- the product

    def matmul(  # noqa: PLR0917
        self,
        handle: int,
        desc: int,
        alpha: int,
        a: int,
        adesc: int,
        b: int,
        bdesc: int,
        beta: int,
        c: int,
        cdesc: int,
        d: int,
        ddesc: int,
        algo: int,
        workspace: int,
        size: int,
        stream: int,
    ) -> None:
        assert self.objects[handle] == "handle"
        self._refuse(desc, adesc, bdesc, cdesc, ddesc)
        with unwatched():  # what a device does is no torch call
            self._multiply(locals())

    def _multiply(self, given: dict[str, Any]) -> None:
        a, b, c, d, beta, algo, stream = (
            given[x] for x in ("a", "b", "c", "d", "beta", "algo", "stream")
        )
        attributes = self.objects[given["desc"]]
        adesc, bdesc, ddesc = given["adesc"], given["bdesc"], given["ddesc"]
        assert ctypes.c_float.from_address(given["alpha"]).value == 1.0
        added = ctypes.c_float.from_address(beta).value
        for address in (a, b, c, d):
            assert address % 16 == 0
        x = self._operand(attributes, "A", a, adesc)
        y = self._operand(attributes, "B", b, bdesc)
        z = x @ y
        out = _matrix(d, *self.objects[ddesc])
        if added:
            assert added == 1.0
            z = z + _matrix(c, *self.objects[given["cdesc"]]).double()
        if attributes.get(MatmulDescAttribute.EPILOGUE) == Epilogue.BIAS:
            dtype = _DTYPES[attributes[MatmulDescAttribute.BIAS_DATA_TYPE]]
            bias = _matrix(attributes[MatmulDescAttribute.BIAS_POINTER], dtype, len(z), 1, len(z))
            z = z + bias.double()
        out.copy_(z)
        self.calls.append(
            {
                "d": d,
                "algo": ctypes.string_at(algo, 1)[0],
                "fast": bool(attributes.get(MatmulDescAttribute.FAST_ACCUM, 0)),
                "beta": added,
                "shape": tuple(z.t().shape),
                "dtype": out.dtype,
                "stream": stream,
                "biased": MatmulDescAttribute.EPILOGUE in attributes,
            }
        )

    def _operand(self, attributes: Any, name: str, address: int, layout: int) -> torch.Tensor:
        x = _matrix(address, *self.objects[layout]).double()
        if attributes.get(MatmulDescAttribute[f"TRANS{name}"], 0):
            x = x.t()
        pointer = attributes.get(MatmulDescAttribute[f"{name}_SCALE_POINTER"])
        if pointer is None:
            return x
        assert pointer % 16 == 0
        mode = attributes.get(MatmulDescAttribute[f"{name}_SCALE_MODE"], 0)
        outer = x if name == "A" else x.t()  # [columns of d, or rows; k]
        scaled = outer * _scales(pointer, MatmulMatrixScale(mode), *outer.shape)
        return scaled if name == "A" else scaled.t()


def _scales(pointer: int, mode: MatmulMatrixScale, rows: int, k: int) -> torch.Tensor:
    if mode is MatmulMatrixScale.SCALAR_32F:
        return _matrix(pointer, torch.float32, 1, 1, 1).double()
    if mode is MatmulMatrixScale.OUTER_VEC_32F:
        return _matrix(pointer, torch.float32, rows, 1, rows).double()
    blocks = -(-k // 128)
    if mode is MatmulMatrixScale.VEC128_32F:
        each = _matrix(pointer, torch.float32, rows, blocks, rows)
        return each.repeat_interleave(128, 1)[:, :k].double()
    tall = -(-blocks // 4) * 4
    each = _matrix(pointer, torch.float32, tall, -(-rows // 128), tall)[:blocks].t()
    return each.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :k].double()


def _matrix(address: int, dtype: torch.dtype, rows: int, columns: int, ld: int) -> torch.Tensor:
    """A view of host memory, column-major."""
    size = ((columns - 1) * ld + rows) * dtype.itemsize
    flat = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype)
    return flat.as_strided((rows, columns), (1, ld))
