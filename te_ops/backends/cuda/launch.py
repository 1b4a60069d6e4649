"""Kernels on a device: loading, packing arguments, launching on torch's current stream.

Nothing here waits for the device.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from te_ops.backends.cuda.compile import cubin, refuse_capture
from te_ops.errors import PlanError
from te_ops.runtime.tape import Issue, Prepared, recorder

KERNEL = "te_ops_kernel"
"""What every text names its kernel (with what it does behind): one kernel a text."""


class Function(Protocol):
    """A kernel that is ready to launch."""

    def __call__(self, device: torch.device, grid: int, *slots: int) -> None:
        """Launch `grid` blocks; a slot is 8 bytes of the parameter, a pointer or an integer."""

    def blocks(self, grid: int) -> Issue:
        """A launch of so many blocks, whose slots come later."""


def text_of(
    *, name: str, body: str, threads: int, head: str = "", blocks: int = 1, cluster: int = 1
) -> str:
    """The text of a kernel: its head, which declares `Parameters`, and its body over `p`.

    `blocks`: how many a processor is to hold, which bounds the registers; `cluster`: blocks of a cluster (sm_90+; the
    grid is a multiple).
    """
    dims = f"__cluster_dims__({cluster}, 1, 1) " if cluster > 1 else ""
    return (
        f'{head}\nextern "C" __global__ void {dims}__launch_bounds__({threads}, {blocks}) '
        f"{KERNEL}_{name}(const __grid_constant__ Parameters p) {{\n  {body}\n}}\n"
    )


def build(
    name: str,
    text: str,
    arch: str,
    threads: int,
    slots: int,
    *,
    shared: int = 0,
    early: bool = False,
) -> Function:
    """Compile, and load where there is a device: the first launch finds everything ready.

    `shared`: bytes of dynamic shared memory of a block, up to what the architecture has (227 KiB on sm_90).
    `early`: from sm_90 on it may begin while the kernel before it on the stream runs, for whose end its text waits.
    """
    code = cubin(text, arch)
    early = early and int(arch.removeprefix("sm_").rstrip("af")) >= 90
    made = Loaded(f"{KERNEL}_{name}", code, threads, struct.Struct(f"={slots}q"), shared, early)
    if torch.cuda.is_available():
        made.load()
    return made


class _Config(ctypes.Structure):
    """CUlaunchConfig of the driver."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of the driver whose value is a number."""

    _fields_ = [
        ("id", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_byte * 60),
    ]


_EARLY = _Attribute(6, 0, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Prepared:
    """A launch whose parameters lie at one place in host memory: four words for the driver to take."""

    def __init__(self, kernel: Loaded, grid: int, address: int) -> None:
        self.kernel = kernel
        self.config = _Config((grid, 1, 1), (kernel.threads, 1, 1), kernel.shared)
        if kernel.early:
            self.config.attributes, self.config.count = ctypes.addressof(_EARLY), 1
        self.arguments = (ctypes.c_void_p * 1)(address)
        self.launch = functools.partial(
            _driver().cuLaunchKernelEx,
            ctypes.addressof(self.config),
            kernel.handle,
            ctypes.addressof(self.arguments),
            None,
        )
        self.stream = 0

    def __call__(self, stream: int) -> None:
        """Launch on a stream."""
        if stream != self.stream:
            self.config.stream = self.stream = stream
        if code := self.launch():
            self.fail(code)

    def fail(self, code: int) -> None:
        """Try again with a context if the thread had none; raise for anything else."""
        again(self.launch, code, f"{self.kernel.name}: the launch")


@dataclass(frozen=True)
class _Grid:
    """A kernel and how many blocks of it, as an `Issue`."""

    kernel: Loaded
    blocks: int
    clears: bool = False

    def prepare(self, words: memoryview, address: int) -> Prepared:
        """See `Issue`."""
        return _Prepared(self.kernel, self.blocks, address)


@dataclass(eq=False)
class Loaded:
    """A kernel's code and, once loaded, its handle, which serves all devices of an architecture."""

    name: str
    code: bytes
    threads: int
    packer: struct.Struct
    shared: int = 0
    early: bool = False
    handle: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer = ctypes.create_string_buffer(self.packer.size)
        self._prepared: _Prepared | None = None

    def load(self) -> None:
        """Hand the code to the driver."""
        refuse_capture()
        from cuda.bindings import driver

        torch.cuda.init()  # type: ignore[no-untyped-call]
        library = _checked(driver, driver.cuLibraryLoadData(self.code, [], [], 0, [], [], 0))
        handle = _checked(driver, driver.cuLibraryGetKernel(library, self.name.encode()))
        if self.shared:  # 48 KiB, with what the kernel declares, are there without asking
            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            for index in range(torch.cuda.device_count()):
                device = _checked(driver, driver.cuDeviceGet(index))
                _checked(driver, driver.cuKernelSetAttribute(most, self.shared, handle, device))
        self.handle = int(handle)

    def __call__(self, device: torch.device, grid: int, *slots: int) -> None:
        """See `Function`."""
        if not self.handle:
            self.load()
        if grid > 0x7FFFFFFF:
            raise PlanError(
                f"{self.name}: {grid} blocks are more than a device takes; split the tensor"
            )
        index = device.index
        if index != _current_device()():
            with torch.cuda.device(device):
                self._launch(index, grid, slots)
        else:
            self._launch(index, grid, slots)
        tape = recorder()
        if tape is not None:
            tape.launched(_Grid(self, grid), slots)

    def blocks(self, grid: int) -> Issue:
        """See `Function`."""
        if not self.handle:
            self.load()
        return _Grid(self, grid)

    def _launch(self, index: int, grid: int, slots: tuple[int, ...]) -> None:
        stream = _stream()(index)
        with self._lock:  # the parameters are copied during the call
            made = self._prepared
            if made is None:
                made = self._prepared = _Prepared(self, 1, ctypes.addressof(self._buffer))
            self.packer.pack_into(self._buffer, 0, *slots)
            made.config.grid[0] = grid
            made(stream)


_INVALID_CONTEXT = 201


def _checked(driver: Any, result: tuple[Any, ...]) -> Any:
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise PlanError(f"loading a kernel fails with {error_text(int(result[0]))}")
    return result[1] if len(result) > 1 else None


@functools.cache
def _driver() -> Any:
    """The driver's library through ctypes, whose calls cost less host time than the bindings."""
    library = ctypes.CDLL("libcuda.so.1")
    unsigned, pointer = ctypes.c_uint, ctypes.c_void_p
    library.cuLaunchKernelEx.argtypes = [pointer, pointer, pointer, pointer]
    library.cuMemcpyDtoDAsync_v2.argtypes = [
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_size_t,
        pointer,
    ]
    library.cuMemsetD32Async.argtypes = [ctypes.c_uint64, unsigned, ctypes.c_size_t, pointer]
    return library


@functools.cache
def _current_device() -> Callable[[], int]:
    """Index of the current device; torch's own wrapper initialises CUDA at every call."""
    return getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device


def error_text(code: int) -> str:
    """Name of a driver error."""
    text = ctypes.c_char_p()
    _driver().cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
    return text.value.decode() if text.value else f"error {code}"


@functools.cache
def _stream() -> Callable[[int], int]:
    """Handle of torch's current stream on a device."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is not None:
        return raw  # type: ignore[no-any-return]
    return lambda index: torch.cuda.current_stream(index).cuda_stream


def stream_of(index: int) -> int:
    """Handle of torch's current stream on a device."""
    return _stream()(index)


def _enter(index: int) -> None:
    """Make the device's primary context current: a thread that never called CUDA has none."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    driver = _driver()
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    driver.cuCtxSetCurrent(context)


def again(call: Callable[[], int], code: int, what: str) -> None:
    """A call of the driver that failed: once more with a context if the thread had none; raise for anything else."""
    if code == _INVALID_CONTEXT:
        _enter(torch.cuda.current_device())
        code = call()
    if code:
        raise PlanError(f"{what} fails with {error_text(code)}")


def zero_word(x: torch.Tensor, count: int = 1) -> None:
    """Clear the first four bytes of x, or `count` times four, on the current stream."""
    device = x.device
    if device.index != _current_device()():
        with torch.cuda.device(device):
            clear(x.data_ptr(), count, _stream()(device.index))
    else:
        clear(x.data_ptr(), count, _stream()(device.index))
    tape = recorder()
    if tape is not None:
        tape.launched(CLEAR, (x.data_ptr(), count))


def clear(address: int, count: int, stream: int) -> None:
    """Clear `count` times four bytes at an address, on a stream of the current device."""
    call = functools.partial(_driver().cuMemsetD32Async, address, 0, count, stream)
    if code := call():
        again(call, code, "clearing memory")


@dataclass(frozen=True)
class _Clear:
    """Zeros for words[1] 4-byte words at words[0]."""

    clears: bool = True

    def prepare(self, words: memoryview, address: int) -> Prepared:
        """See `Issue`."""
        return lambda stream: clear(words[0], words[1], stream)


CLEAR = _Clear()


def clone(x: torch.Tensor) -> torch.Tensor:
    """A copy of a contiguous tensor, made on the current stream."""
    made = empty(x.shape, x.dtype, x.device)
    words = (made.data_ptr(), x.data_ptr(), x.numel() * x.element_size())
    device = x.device
    if device.index != _current_device()():
        with torch.cuda.device(device):
            _copy(*words, _stream()(device.index))
    else:
        _copy(*words, _stream()(device.index))
    tape = recorder()
    if tape is not None:
        tape.launched(COPY, words)
    return made


def _copy(into: int, source: int, count: int, stream: int) -> None:
    call = functools.partial(_driver().cuMemcpyDtoDAsync_v2, into, source, count, stream)
    if code := call():
        again(call, code, "copying memory")


@dataclass(frozen=True)
class _Copy:
    """words[2] bytes at words[1] go to words[0]."""

    clears: bool = False

    def prepare(self, words: memoryview, address: int) -> Prepared:
        """See `Issue`."""
        return lambda stream: _copy(words[0], words[1], words[2], stream)


COPY = _Copy()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that a kernel writes: every launch takes it from here."""
    return torch.empty(shape, dtype=dtype, device=device)


def ready(x: torch.Tensor) -> torch.Tensor:
    """x as kernels read it: contiguous, its first element at a multiple of 16 bytes."""
    if not x.is_contiguous():
        x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
