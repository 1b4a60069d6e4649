"""cuBLASLt driven directly: a product of exact extents is prepared once, a call patches pointers.

What torch's own calls lack: every candidate of the library's heuristic, another matrix that is added
(beta = 1), and half the host time. Matrices here are row-major. The library's are column-major, so it
computes the transposed product: its A is our b, its B our a, its D is [n, m].

Importing this touches no CUDA and no vendor library; `missing()` says what the bindings lack.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_ops.errors import PlanError
from te_ops.runtime.bundle import Bundles
from te_ops.runtime.tape import unwatched

WORKSPACE = 32 << 20
"""Bytes that an algorithm may use: enough for every candidate seen on Hopper."""
ALIGNMENT = 16
"""Bytes: every address that a prepared product is given divides by it."""
CANDIDATES = 16
WORDS = ("a", "b", "d", "scale_a", "scale_b", "bias", "scale_d", "amax_d", "c")
"""Addresses of a call, in this order; 0 for what the product does not have."""
_C = WORDS.index("c")

_TYPES = {
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
"""cudaDataType_t of library_types.h."""
_COMPUTE_32F = 68  # cublasComputeType_t: FP32 sums, FP32 alpha and beta
_MODES = {
    "tensor": "SCALAR_32F",
    "row": "OUTER_VEC_32F",
    "1x128": "VEC128_32F",
    "128x128": "BLK128x128_32F",
}
_REDUCTION = 2  # partial sums of a split contraction in FP32, added up in a fixed order
_NOT_SUPPORTED = (7, 15)  # CUBLAS_STATUS_INVALID_VALUE, _NOT_SUPPORTED
_ALGO = 64  # bytes of cublasLtMatmulAlgo_t
_VARIED, _SWIZZLINGS, _OPTIONS = 3, 2, 9  # of a configuration: what `variations` goes through
_PATCHED = (
    ("A_SCALE_POINTER", "scale_b"),
    ("B_SCALE_POINTER", "scale_a"),
    ("BIAS_POINTER", "bias"),
    ("D_SCALE_POINTER", "scale_d"),
    ("AMAX_D_POINTER", "amax_d"),
)


class Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", ctypes.c_uint8 * _ALGO),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class Product:
    """d [m, n] = a b (+ d) (+ c) (+ bias), row-major, with exact extents.

    Attributes:
        a, b, d: dtypes.
        a_k: a is stored [m, k], else [k, m]; b_k: b is stored [n, k], else [k, n].
        scales: of a and b: "", "tensor", "row" (one a row of a, a column of b), "1x128" (FP32, rows contiguous) or
            "128x128" (FP32, [row blocks, k blocks filled up to a multiple of 4]).
        bias: dtype of a bias [n].
        accumulate: d is added to. plus: c, a matrix like d, is added; not both.
        fast: FP8 sums stay in the tensor core's accumulator.
        scaled_d: an FP8 d is multiplied by a scale, and its amax taken.
    """

    m: int
    n: int
    k: int
    a: torch.dtype
    b: torch.dtype
    d: torch.dtype
    a_k: bool = True
    b_k: bool = True
    scales: tuple[str, str] = ("", "")
    bias: torch.dtype | None = None
    accumulate: bool = False
    plus: bool = False
    fast: bool = False
    scaled_d: bool = False

    @property
    def key(self) -> str:
        """What a table of choices calls it."""
        form = "".join("t" if k else "n" for k in (self.a_k, self.b_k))
        dtypes = "*".join(map(_short, (self.a, self.b))) + f"->{_short(self.d)}"
        scales = "*".join(self.scales) if any(self.scales) else ""
        flags = {
            "bias": self.bias is not None,
            "fast": self.fast,
            "add": self.accumulate,
            "plus": self.plus,
            "amax": self.scaled_d,
        }
        named = (form, dtypes, scales, *(f for f, on in flags.items() if on))
        return " ".join([f"{self.m}x{self.n}x{self.k}", *filter(None, named)])

    @property
    def has(self) -> frozenset[str]:
        """Which words a call of it must have."""
        words = {"a", "b", "d"}
        words |= {name for name, s in zip(("scale_a", "scale_b"), self.scales, strict=True) if s}
        words |= {"bias"} if self.bias is not None else set()
        words |= {"c"} if self.plus else set()
        return frozenset(words | ({"scale_d", "amax_d"} if self.scaled_d else set()))


_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "e4m3"}


def _short(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name, name.removeprefix("float8_"))


# -- the library


@functools.cache
def _import() -> Any:
    """The bindings, or why there are none."""
    try:
        return importlib.import_module("nvmath.bindings.cublasLt")
    except Exception as error:  # noqa: BLE001  (a broken installation raises anything; torch's calls remain)
        return f"nvmath.bindings.cublasLt cannot be imported: {type(error).__name__}: {error}"


@functools.cache
def missing() -> str | None:
    """None if cuBLASLt can be driven directly, else what is missing."""
    found = _import()
    if isinstance(found, str):
        return found
    try:
        version()
    except Exception as error:  # noqa: BLE001  (no library behind the bindings)
        return f"cuBLASLt cannot be loaded: {type(error).__name__}: {error}"
    return None


def library() -> Any:
    """nvmath.bindings.cublasLt.

    Raises:
        PlanError: it cannot be imported.
    """
    found = _import()
    if isinstance(found, str):
        raise PlanError(f"{found}; install nvmath-python, or let torch's GEMMs run")
    return found


@functools.cache
def version() -> int:
    """Of cuBLASLt: 130100 and the like. Algorithms belong to one version."""
    return int(library().get_version())


def device(index: int) -> torch.device:
    """The device of this number."""
    return torch.device("cuda", index)


def device_name(index: int) -> str:
    """ "NVIDIA H200" and the like."""
    return torch.cuda.get_device_name(index)


def capturing() -> bool:
    """Whether the current stream is being captured."""
    return torch.cuda.is_current_stream_capturing()


def entered(index: int) -> Any:
    """A context in which this device is the current one."""
    return torch.cuda.device(index)


def current_device() -> int:
    """Number of the current device."""
    return torch._C._cuda_getDevice()


def stream_of(index: int) -> int:
    """Handle of torch's current stream on a device."""
    return _raw_stream()(index)


@functools.cache
def _raw_stream() -> Callable[[int], int]:
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda index: int(torch.cuda.current_stream(index).cuda_stream))


class _Device:
    """What a device needs once: the library's handle, and scratch memory for each stream."""

    def __init__(self, index: int) -> None:
        with entered(index):
            self.handle = int(library().create())
        self.spaces: dict[int, torch.Tensor] = {}


_DEVICES: dict[int, _Device] = {}
_LOCK = threading.Lock()


def _device(index: int) -> _Device:
    found = _DEVICES.get(index)
    if found is None:
        with _LOCK:
            found = _DEVICES.get(index)
            if found is None:
                found = _DEVICES[index] = _Device(index)
    return found


def scratch(index: int, stream: int) -> torch.Tensor:
    """Scratch memory for calls on this stream, which run one after the other.

    While a graph is captured it is a temporary of the call: it belongs to the graph's own memory, and work outside
    of the graph never shares it.
    """
    if capturing():
        return _space(index)
    spaces = _device(index).spaces
    found = spaces.get(stream)
    if found is None:
        found = spaces[stream] = _space(index)
    return found


def _space(index: int) -> torch.Tensor:
    with unwatched():  # no memory of the plan that is being recorded
        return torch.empty(WORKSPACE, dtype=torch.uint8, device=device(index))


class Scratch:
    """Where the scratch memory of some calls on a device lies: there, outside of a capture, until it is given back."""

    def __init__(self, index: int) -> None:
        self.index, self._address = index, 0
        self._found: tuple[int, int] | None = None  # of which stream and period

    def address(self, stream: int) -> int:
        """For a call on this stream."""
        found = None if capturing() else (stream, Bundles.scratch)
        if found is None or found != self._found:
            self._found, self._address = found, scratch(self.index, stream).data_ptr()
        return self._address


def release() -> int:
    """Give the scratch memory of all streams back to torch; returns its bytes. The next call makes it again."""
    with _LOCK:
        freed = sum(WORKSPACE * len(d.spaces) for d in _DEVICES.values())
        for known in _DEVICES.values():
            known.spaces = {}
        Bundles.scratch += 1
    return freed


# -- descriptors


def _put(setter: Any, target: int, attribute: Any, value: Any) -> None:
    """Set an attribute; `value` is a ctypes object of the attribute's width."""
    setter(target, int(attribute), ctypes.addressof(value), ctypes.sizeof(value))


class _Descriptors:
    """The library's description of a product; freed with this object."""

    def __init__(self, product: Product) -> None:
        self._layouts: list[int] = []
        self.desc = 0
        lib = self._lib = library()
        self.desc = int(lib.matmul_desc_create(_COMPUTE_32F, _TYPES[torch.float32]))
        self._describe(product)
        p = product
        inner = (p.k, p.n) if p.b_k else (p.n, p.k)
        self.a = self._layout(p.b, *inner)
        inner = (p.k, p.m) if p.a_k else (p.m, p.k)
        self.b = self._layout(p.a, *inner)
        self.d = self._layout(p.d, p.n, p.m)
        self.c = self.d if not p.scaled_d else self._layout(torch.bfloat16, p.n, p.m)

    def _layout(self, dtype: torch.dtype, rows: int, columns: int) -> int:
        made = int(self._lib.matrix_layout_create(_TYPES[dtype], rows, columns, max(rows, 1)))
        self._layouts.append(made)
        return made

    def _describe(self, p: Product) -> None:
        lib = self._lib
        names = lib.MatmulDescAttribute
        put = functools.partial(_put, lib.matmul_desc_set_attribute, self.desc)
        put(names.TRANSA, ctypes.c_int32(int(p.b_k)))
        put(names.TRANSB, ctypes.c_int32(int(not p.a_k)))
        if p.fast:
            put(names.FAST_ACCUM, ctypes.c_int8(1))
        for name, mode in (("A_SCALE_MODE", p.scales[1]), ("B_SCALE_MODE", p.scales[0])):
            if mode and mode != "tensor":  # the default
                value = int(lib.MatmulMatrixScale[_MODES[mode]])
                put(names[name], ctypes.c_int32(value))
        if p.bias is not None:
            put(names.EPILOGUE, ctypes.c_uint32(int(lib.Epilogue.BIAS)))
            put(names.BIAS_DATA_TYPE, ctypes.c_int32(_TYPES[p.bias]))
        for name, word in _PATCHED:  # an address says that there will be one
            if word in p.has:
                put(names[name], ctypes.c_int64(ALIGNMENT))

    def __del__(self) -> None:
        if sys is None or sys.is_finalizing():  # the library may be gone, and so may this module
            return
        for layout in self._layouts:
            self._lib.matrix_layout_destroy(layout)
        if self.desc:
            self._lib.matmul_desc_destroy(self.desc)


@dataclass(frozen=True)
class Candidate:
    """An algorithm of the library for one product."""

    algo: bytes
    workspace: int
    waves: float = 0.0

    def describe(self) -> str:
        """Its configuration in numbers: what `CONFIG` names, in that order."""
        return "/".join(str(v) for v in configuration(self.algo).values())


CONFIG = (
    ("ID", ctypes.c_int32),
    ("TILE_ID", ctypes.c_uint32),
    ("STAGES_ID", ctypes.c_uint32),
    ("CLUSTER_SHAPE_ID", ctypes.c_uint16),
    ("INNER_SHAPE_ID", ctypes.c_uint16),
    ("SPLITK_NUM", ctypes.c_int32),
    ("REDUCTION_SCHEME", ctypes.c_uint32),
    ("CTA_SWIZZLING", ctypes.c_uint32),
    ("CUSTOM_OPTION", ctypes.c_uint32),
)


def configuration(algo: bytes) -> dict[str, int]:
    """The fields of an algorithm."""
    lib = library()
    buffer = ctypes.create_string_buffer(algo, _ALGO)
    found: dict[str, int] = {}
    for name, width in CONFIG:
        value, written = width(), ctypes.c_size_t()
        lib.matmul_algo_config_get_attribute(
            ctypes.addressof(buffer),
            int(lib.MatmulAlgoConfigAttribute[name]),
            ctypes.addressof(value),
            ctypes.sizeof(value),
            ctypes.addressof(written),
        )
        found[name.removesuffix("_ID").lower()] = int(value.value)
    return found


@contextlib.contextmanager
def _preference() -> Iterator[int]:
    lib = library()
    made = int(lib.matmul_preference_create())
    names = lib.MatmulPreferenceAttribute
    put = functools.partial(_put, lib.matmul_preference_set_attribute, made)
    try:
        put(names.MAX_WORKSPACE_BYTES, ctypes.c_uint64(WORKSPACE))
        put(names.REDUCTION_SCHEME_MASK, ctypes.c_uint32(_REDUCTION))
        for operand in "ABCD":
            put(names[f"MIN_ALIGNMENT_{operand}_BYTES"], ctypes.c_uint32(ALIGNMENT))
        yield made
    finally:
        lib.matmul_preference_destroy(made)


def candidates(index: int, product: Product, count: int = CANDIDATES) -> list[Candidate]:
    """What the library's heuristic offers for a product on device `index`, its favourite first; [] for nothing."""
    made = _Descriptors(product)
    lib, results, found = library(), (Result * count)(), ctypes.c_int32()
    with entered(index), _preference() as preference:
        try:
            lib.matmul_algo_get_heuristic(
                _device(index).handle,
                made.desc,
                made.a,
                made.b,
                made.c,
                made.d,
                preference,
                count,
                ctypes.addressof(results),
                ctypes.addressof(found),
            )
        except lib.cuBLASLtError as error:
            if getattr(error, "status", None) in (None, *_NOT_SUPPORTED):
                return []
            raise
    return [
        Candidate(bytes(r.algo), int(r.workspace), float(r.waves))
        for r in results[: found.value]
        if r.state == 0
    ]


def variations(index: int, product: Product, base: Sequence[Candidate]) -> list[Candidate]:
    """What the library takes besides the algorithms of its heuristic: the same tiles in another order or pipeline.

    For 1x128 x 1x128 on an H200 some are 8 % faster than all that the heuristic offers; see docs/performance.
    """
    known = {c.algo for c in base}
    found: list[Candidate] = []
    for algo in [c.algo for c in base[:_VARIED]]:
        for swizzling in range(_SWIZZLINGS):
            for option in range(_OPTIONS):
                fields = {"CTA_SWIZZLING": swizzling, "CUSTOM_OPTION": option}
                made = _changed(algo, fields)
                if made in known:
                    continue
                known.add(made)
                candidate = checked(index, product, made)
                if candidate is not None:
                    found.append(candidate)
    return found


def _changed(algo: bytes, fields: dict[str, int]) -> bytes:
    """An algorithm with other values in some fields of its configuration."""
    lib, widths = library(), dict(CONFIG)
    buffer = ctypes.create_string_buffer(algo, _ALGO)
    setter = functools.partial(_put, lib.matmul_algo_config_set_attribute)
    for name, value in fields.items():
        attribute = lib.MatmulAlgoConfigAttribute[name]
        setter(ctypes.addressof(buffer), attribute, widths[name](value))
    return bytes(buffer.raw[:_ALGO])


def checked(index: int, product: Product, algo: bytes) -> Candidate | None:
    """An algorithm as a candidate, None where this library does not run the product with it."""
    made, lib, result = _Descriptors(product), library(), Result()
    buffer = ctypes.create_string_buffer(algo, _ALGO)
    with entered(index):
        try:
            lib.matmul_algo_check(
                _device(index).handle,
                made.desc,
                made.a,
                made.b,
                made.c,
                made.d,
                ctypes.addressof(buffer),
                ctypes.addressof(result),
            )
        except lib.cuBLASLtError:
            return None
    if result.state or result.workspace > WORKSPACE:
        return None
    return Candidate(algo, int(result.workspace), float(result.waves))


# -- calls


class _Choice:
    """A product, its algorithm, and the host memory that each call of it reads."""

    def __init__(self, index: int, product: Product, chosen: Candidate) -> None:
        self.index, self.product, self.chosen = index, product, chosen
        self._numbers = ctypes.c_float(1.0), ctypes.c_float(product.accumulate or product.plus)
        self.alpha, self.beta = map(ctypes.addressof, self._numbers)
        self._algo = ctypes.create_string_buffer(chosen.algo, _ALGO)
        self.algo = ctypes.addressof(self._algo)


class _Place:
    """A product over the words at one place in host memory. `place(stream)` reads them, and issues it."""

    def __init__(self, choice: _Choice, words: memoryview, address: int) -> None:
        lib, product, made = library(), choice.product, _Descriptors(choice.product)
        self.choice, self.words, self._made = choice, words, made
        self._patches = tuple(
            (i, int(lib.MatmulDescAttribute[name]), address + 8 * i)
            for name, word in _PATCHED
            if word in product.has
            for i in (WORDS.index(word),)
        )
        self._last = [0] * len(WORDS)
        self._set, self._desc = lib.matmul_desc_set_attribute, made.desc
        self._stream, self._space = ctypes.c_void_p(), ctypes.c_void_p()
        self._scratch = Scratch(choice.index)
        a, b, d, c = (ctypes.c_void_p.from_address(address + 8 * i) for i in (0, 1, 2, _C))
        # Nothing is read where beta is 0, nor of c where it is not like d.
        added = c if product.plus else d if made.c == made.d else ctypes.c_void_p()
        self._matmul = functools.partial(
            _matmul(lib) or functools.partial(_through, lib.matmul),
            *map(ctypes.c_void_p, (_device(choice.index).handle, made.desc, choice.alpha)),
            b,
            ctypes.c_void_p(made.a),
            a,
            ctypes.c_void_p(made.b),
            ctypes.c_void_p(choice.beta),
            added,
            ctypes.c_void_p(made.c),
            d,
            *map(ctypes.c_void_p, (made.d, choice.algo)),
            self._space,
            ctypes.c_size_t(WORKSPACE if choice.chosen.workspace else 0),
            self._stream,
        )

    def __call__(self, stream: int) -> None:
        words, last = self.words, self._last
        for i, attribute, address in self._patches:
            if words[i] != last[i]:
                last[i] = words[i]
                self._set(self._desc, attribute, address, 8)
        if self.choice.chosen.workspace:
            self._space.value = self._scratch.address(stream)
        self._stream.value = stream
        if status := self._matmul():
            raise PlanError(f"{self.choice.product.key}: cublasLtMatmul fails with status {status}")


@functools.cache
def _matmul(lib: Any) -> Any:
    """cublasLtMatmul itself, of the library that the bindings have loaded; None if they do not say where it is.

    A call with arguments that lie ready costs a third of one through the bindings.
    """
    if lib is not sys.modules.get("nvmath.bindings.cublasLt"):
        return None
    try:
        inside = importlib.import_module("nvmath.bindings._internal.cublasLt")
        address = int(inside._inspect_function_pointer("__cublasLtMatmul"))
    except Exception:  # noqa: BLE001  (nothing that is promised; their own call remains)
        return None
    return ctypes.CFUNCTYPE(ctypes.c_int)(address) if address else None


def _through(matmul: Any, *arguments: Any) -> int:
    """The same call through the bindings, which raise."""
    matmul(*(a.value or 0 for a in arguments))
    return 0


class Prepared:
    """A product with its algorithm chosen. Threads may share one."""

    clears = False  # as `te_ops.runtime.tape.Issue` asks

    def __init__(self, index: int, product: Product, chosen: Candidate) -> None:
        self.product, self.chosen = product, chosen
        self._choice = _Choice(index, product, chosen)
        self._own = (ctypes.c_int64 * len(WORDS))()
        self._words = memoryview(self._own).cast("B").cast("q")
        self._place = _Place(self._choice, self._words, ctypes.addressof(self._own))
        self._used = tuple(i for i, word in enumerate(WORDS) if word in product.has)
        self._lock = threading.Lock()

    def run(self, words: Sequence[int], stream: int) -> None:
        """Issue the product over the addresses `WORDS` on a stream of this device, which is the current one."""
        own = self._words
        with self._lock:  # the words are read, and the descriptor holds them, during the call
            for i in self._used:
                own[i] = words[i]
            self._place(stream)

    def prepare(self, words: memoryview, address: int) -> Callable[[int], None]:
        """A call over the words at another place, with descriptors of its own: for a tape of launches."""
        return _Place(self._choice, words, address)
