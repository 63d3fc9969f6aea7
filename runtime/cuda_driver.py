"""The copy engine of one CUDA device, through the driver's own interface.

Memory comes straight from the driver: PyTorch's allocator may hand out expandable segments, which
have no handle of this kind, and frees blocks whose handles peers still hold. A peer's handle is
opened with this process's own device current. (Opened in the owner's device, as PyTorch does it,
writes cross by another path, about ten times slower.) Words are ordered by stream memory
operations, which occupy no multiprocessor while they wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import ChannelError

from .copy_engine import HANDLE_BYTES, Lane

_LAZY_PEER_ACCESS = 1
_PORTABLE_AND_MAPPED = 3
_WAIT_AT_LEAST = 0
_WRONG_CONTEXT = (201, 400)
"""CUDA_ERROR_INVALID_CONTEXT and CUDA_ERROR_INVALID_HANDLE."""
_CAN_ORDER_64_BIT_WORDS = 122
"""CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuGetErrorString": (c_int, c_void_p),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuIpcGetMemHandle": (c_void_p, c_uint64),
    "cuIpcOpenMemHandle_v2": (c_void_p, _Handle, c_uint),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostGetDevicePointer_v2": (c_void_p, c_void_p, c_uint),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuStreamWaitValue64_v2": (c_void_p, c_uint64, c_uint64, c_uint),
    "cuStreamWriteValue64_v2": (c_void_p, c_uint64, c_uint64, c_uint),
}


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
    except (OSError, AttributeError) as error:
        raise ChannelError(
            f"CUDA IPC needs the NVIDIA driver's libcuda.so.1 of CUDA 12 or newer, found: {error}"
        ) from error
    return library


def _call(name: str, *arguments: Any) -> None:
    _check(name, getattr(_library(), name)(*arguments))


def _check(name: str, code: int) -> None:
    if code:
        text = c_char_p()
        _library().cuGetErrorString(code, byref(text))
        said = (text.value or b"unknown error").decode()
        raise ChannelError(f"the CUDA driver refused {name.removesuffix('_v2')}: {said} ({code})")


class CudaLane:
    """A `Lane` over a CUDA stream."""

    def __init__(self, engine: CudaEngine, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._engine = engine
        self._raw = stream.cuda_stream
        self._mark = torch.cuda.Event()

    def after(self, other: Lane) -> None:
        """Let later work here wait for everything queued on ``other`` up to now."""
        assert isinstance(other, CudaLane)
        if not other.idle():  # an event wakes the device, and processes may take turns on it
            self._mark.record(other.stream)
            self.stream.wait_event(self._mark)

    def copy(self, dst: int, src: int, num_bytes: int) -> None:
        """Copy between addresses, own or mapped."""
        self._queue("cuMemcpyDtoDAsync_v2", dst, src, num_bytes, self._raw)

    def write(self, address: int, value: int) -> None:
        """Store a word once all earlier work here is complete and visible to every device."""
        self._queue("cuStreamWriteValue64_v2", self._raw, address, value, 0)

    def wait(self, address: int, value: int) -> None:
        """Hold later work back until the word is at least ``value``."""
        self._queue("cuStreamWaitValue64_v2", self._raw, address, value, _WAIT_AT_LEAST)

    def idle(self) -> bool:
        """Whether everything queued here up to now is done."""
        return bool(self.stream.query())

    def keep(self, x: Tensor) -> None:
        """Keep PyTorch's allocator from using the memory of ``x`` before this stream is done."""
        x.record_stream(self.stream)

    def _queue(self, name: str, *arguments: int) -> None:
        """Call the driver; where the thread's context is none or another device's, in the right one."""
        function = getattr(self._engine.library, name)
        code = function(*arguments)
        if code in _WRONG_CONTEXT:
            with self._engine.current():
                code = function(*arguments)
        if code:
            _check(name, code)


class _Span:
    """Device memory for `torch.as_tensor`, which keeps this object alive."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class CudaEngine:
    """An `Engine` over one CUDA device.

    Args:
        device: with its index.

    Raises:
        ChannelError: the driver or the device lacks what this needs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.library = _library()
        self._lanes: dict[int, CudaLane] = {}
        self._context = c_void_p()
        with torch.cuda.device(device):
            self._index = torch.cuda.current_device()
            torch.cuda.current_stream().synchronize()  # makes sure that there is a context
            _call("cuCtxGetCurrent", byref(self._context))
        able = c_int()
        _call("cuDeviceGetAttribute", byref(able), _CAN_ORDER_64_BIT_WORDS, device.index or 0)
        if not able.value:
            raise ChannelError(f"{device} cannot order work by 64-bit words (stream memory ops)")

    @property
    def identity(self) -> str:
        """The GPU's UUID: processes may number the GPUs that they see differently."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's context current; a thread of ours may have none."""
        _call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def allocate(self, num_bytes: int) -> int:
        """Allocate memory that peers can map; returns its address."""
        address = c_uint64()
        with self.current():
            try:
                _call("cuMemAlloc_v2", byref(address), num_bytes)
            except ChannelError:
                torch.cuda.empty_cache()  # PyTorch may hold what is missing, unused
                _call("cuMemAlloc_v2", byref(address), num_bytes)
        return address.value

    def free(self, address: int) -> None:
        """Give back what `allocate` returned; waits for queued work."""
        with self.current():
            _call("cuMemFree_v2", address)

    def export(self, address: int) -> bytes:
        """Return the handle by which a peer maps an allocation."""
        handle = _Handle()
        with self.current():
            _call("cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle)

    def map(self, handle: bytes) -> int:
        """Map a peer's allocation; returns its address here."""
        address = c_uint64()
        with self.current():
            own = _Handle.from_buffer_copy(handle)
            _call("cuIpcOpenMemHandle_v2", byref(address), own, _LAZY_PEER_ACCESS)
        return address.value

    def unmap(self, address: int) -> None:
        """Undo `map`; waits for queued work."""
        with self.current():
            _call("cuIpcCloseMemHandle", address)

    def register(self, address: int, num_bytes: int) -> int:
        """Let the device reach host memory; returns the address that lanes take."""
        reached = c_uint64()
        with self.current():
            _call("cuMemHostRegister_v2", address, num_bytes, _PORTABLE_AND_MAPPED)
            _call("cuMemHostGetDevicePointer_v2", byref(reached), address, 0)
        return reached.value

    def unregister(self, address: int) -> None:
        """Undo `register`, given the host address."""
        with self.current():
            _call("cuMemHostUnregister", address)

    def tensor(self, address: int, num_bytes: int, owner: object) -> Tensor:
        """View own memory as uint8 [num_bytes]; the view keeps ``owner`` alive."""
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        return torch.as_tensor(_Span(address, num_bytes, owner), device=self.device)

    def new_lane(self) -> CudaLane:
        """Make a stream of its own."""
        return CudaLane(self, torch.cuda.Stream(self.device))

    def current_lane(self) -> CudaLane:
        """PyTorch's current stream."""
        # several times faster than torch.cuda.current_stream, which makes an object
        raw = torch._C._cuda_getCurrentRawStream(self._index)
        lane = self._lanes.get(raw)
        if lane is None:
            lane = self._lanes[raw] = CudaLane(self, torch.cuda.current_stream(self.device))
        return lane

    def synchronize(self) -> None:
        """Wait for all queued work of the device."""
        torch.cuda.synchronize(self.device)
