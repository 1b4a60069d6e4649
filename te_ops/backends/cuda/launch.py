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

KERNEL = "te_ops_kernel"
"""What every text names its kernel (with what it does behind): one kernel a text."""


class Function(Protocol):
    """A kernel that is ready to launch."""

    def __call__(self, device: torch.device, grid: int, *slots: int) -> None:
        """Launch `grid` blocks; a slot is 8 bytes of the parameter, a pointer or an integer."""


def text_of(*, name: str, body: str, threads: int, head: str = "", blocks: int = 1) -> str:
    """The text of a kernel: its head, which declares `Parameters`, and its body over `p`."""
    return (
        f'{head}\nextern "C" __global__ void __launch_bounds__({threads}, {blocks}) {KERNEL}_{name}'
        f"(const __grid_constant__ Parameters p) {{\n  {body}\n}}\n"
    )


def build(
    name: str, text: str, arch: str, threads: int, slots: int, *, shared: int = 0
) -> Function:
    """Compile, and load where there is a device: the first launch finds everything ready.

    `shared`: bytes of dynamic shared memory of a block, up to what the architecture has (227 KiB on sm_90).
    """
    code = cubin(text, arch)
    made = Loaded(f"{KERNEL}_{name}", code, threads, struct.Struct(f"={slots}q"), shared)
    if torch.cuda.is_available():
        made.load()
    return made


@dataclass(eq=False)
class Loaded:
    """A kernel's code and, once loaded, its handle, which serves all devices of an architecture."""

    name: str
    code: bytes
    threads: int
    packer: struct.Struct
    shared: int = 0
    handle: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer = ctypes.create_string_buffer(self.packer.size)
        address = ctypes.c_void_p(ctypes.addressof(self._buffer))
        self._arguments = (ctypes.c_void_p * 1)(address)

    def load(self) -> None:
        """Hand the code to the driver."""
        refuse_capture()
        from cuda.bindings import driver

        torch.cuda.init()  # type: ignore[no-untyped-call]
        library = _checked(driver, driver.cuLibraryLoadData(self.code, [], [], 0, [], [], 0))
        handle = _checked(driver, driver.cuLibraryGetKernel(library, self.name.encode()))
        if self.shared > _PLAIN_SHARED:
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
        if index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._launch(index, grid, slots)
        else:
            self._launch(index, grid, slots)

    def _launch(self, index: int, grid: int, slots: tuple[int, ...]) -> None:
        stream = _stream()(index)
        with self._lock:  # the parameters are copied during the call
            self.packer.pack_into(self._buffer, 0, *slots)
            code = _driver().cuLaunchKernel(
                self.handle,
                grid,
                1,
                1,
                self.threads,
                1,
                1,
                self.shared,
                stream,
                self._arguments,
                None,
            )
            if code == _INVALID_CONTEXT:
                _enter(index)
                code = _driver().cuLaunchKernel(
                    self.handle,
                    grid,
                    1,
                    1,
                    self.threads,
                    1,
                    1,
                    self.shared,
                    stream,
                    self._arguments,
                    None,
                )
        if code:
            raise PlanError(f"{self.name}: the launch fails with {error_text(code)}")


_INVALID_CONTEXT = 201
_PLAIN_SHARED = 48 * 1024  # bytes that a block may have without asking


def _checked(driver: Any, result: tuple[Any, ...]) -> Any:
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise PlanError(f"loading a kernel fails with {error_text(int(result[0]))}")
    return result[1] if len(result) > 1 else None


@functools.cache
def _driver() -> Any:
    """The driver's library through ctypes, whose calls cost less host time than the bindings."""
    library = ctypes.CDLL("libcuda.so.1")
    unsigned, pointer = ctypes.c_uint, ctypes.c_void_p
    library.cuLaunchKernel.argtypes = [pointer, *[unsigned] * 7, pointer, pointer, pointer]
    library.cuMemsetD32Async.argtypes = [ctypes.c_uint64, unsigned, ctypes.c_size_t, pointer]
    return library


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


def _enter(index: int) -> None:
    """Make the device's primary context current: a thread that never called CUDA has none."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    driver = _driver()
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    driver.cuCtxSetCurrent(context)


def zero_word(x: torch.Tensor) -> None:
    """Clear the first four bytes of x on the current stream."""
    index = x.device.index
    if index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            zero_word(x)
        return
    stream = _stream()(index)
    code = _driver().cuMemsetD32Async(x.data_ptr(), 0, 1, stream)
    if code == _INVALID_CONTEXT:
        _enter(index)
        code = _driver().cuMemsetD32Async(x.data_ptr(), 0, 1, stream)
    if code:
        raise PlanError(f"clearing a word fails with {error_text(code)}")


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that a kernel writes: every launch takes it from here."""
    return torch.empty(shape, dtype=dtype, device=device)


def ready(x: torch.Tensor) -> torch.Tensor:
    """x as kernels read it: contiguous, its first element at a multiple of 16 bytes."""
    if not x.is_contiguous():
        x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
