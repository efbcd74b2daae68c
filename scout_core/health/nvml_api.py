"""Thin access to NVML through the `pynvml` module: every call answers with a value, 'not supported', or a failure.

Nothing here creates a CUDA context; NVML talks to the driver's management interface only.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from scout_core.health.types import ReadingStatus

# Returned by real drivers when a device, driver version, permission or scope does not offer the query.
_UNSUPPORTED_NAMES = (
    "NVML_ERROR_NOT_SUPPORTED",
    "NVML_ERROR_NO_PERMISSION",
    "NVML_ERROR_FUNCTION_NOT_FOUND",
    "NVML_ERROR_INVALID_ARGUMENT",
    "NVML_ERROR_NOT_FOUND",
    "NVML_ERROR_NO_DATA",
    "NVML_ERROR_VGPU_ECC_NOT_SUPPORTED",
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
    "NVML_ERROR_DEPRECATED",
)
# nvmlValueType_t -> member of nvmlValue_t, from nvml.h.
_VALUE_MEMBERS = {
    "NVML_VALUE_TYPE_DOUBLE": "dVal",
    "NVML_VALUE_TYPE_UNSIGNED_INT": "uiVal",
    "NVML_VALUE_TYPE_UNSIGNED_LONG": "ulVal",
    "NVML_VALUE_TYPE_UNSIGNED_LONG_LONG": "ullVal",
    "NVML_VALUE_TYPE_SIGNED_LONG_LONG": "sllVal",
    "NVML_VALUE_TYPE_SIGNED_INT": "siVal",
    "NVML_VALUE_TYPE_UNSIGNED_SHORT": "usVal",
}
_LOST_NAMES = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What one NVML query gave. `value` is meaningful only when `status` is `ok`; `code` is NVML's return code;
    `lost`: the driver says that the device is gone or needs a reset."""

    status: ReadingStatus
    value: Any = None
    reason: str = ""
    code: int = 0
    lost: bool = False

    @property
    def ok(self) -> bool:
        return self.status is ReadingStatus.OK


class NvmlUnavailable(RuntimeError):
    """NVML cannot be used at all: no module, no library, no driver, or initialization failed.

    `lost`: the reason given was that a GPU is lost, which is news about a device and not about the library.
    """

    def __init__(self, message: str, *, lost: bool = False) -> None:
        super().__init__(message)
        self.lost = lost


class NvmlApi:
    """One initialized use of NVML. `module` is `pynvml` or a stand-in with its names; None imports `pynvml`.

    `open()` and `close()` pair up with NVML's own reference count, so other users in the process are not disturbed.
    """

    def __init__(self, module: Any = None) -> None:
        self._module = module
        self._opened = False
        self._unsupported: frozenset[int] = frozenset()
        self._lost: frozenset[int] = frozenset()
        self._members: dict[int, str] = {}

    @property
    def module(self) -> Any:
        if self._module is None:
            try:
                self._module = importlib.import_module("pynvml")
            except ImportError as error:
                raise NvmlUnavailable(f"the pynvml module is missing ({error}); install scout-suite[nvml]") from error
        return self._module

    def open(self) -> None:
        """Initialize NVML once. Raises `NvmlUnavailable` with the reason."""
        if self._opened:
            return
        module = self.module
        self._unsupported = self._codes(_UNSUPPORTED_NAMES)
        self._lost = self._codes(_LOST_NAMES)
        types = {name: getattr(module, name, None) for name in _VALUE_MEMBERS}
        self._members = {value: _VALUE_MEMBERS[name] for name, value in types.items() if value is not None}
        try:
            module.nvmlInit()
        except module.NVMLError as error:
            raise NvmlUnavailable(f"NVML did not start: {error}", lost=error.value in self._lost) from error
        self._opened = True

    def close(self) -> None:
        if not self._opened:
            return
        self._opened = False
        self.ask("nvmlShutdown")

    def _codes(self, names: Sequence[str]) -> frozenset[int]:
        return frozenset(getattr(self.module, name) for name in names if hasattr(self.module, name))

    def constant(self, name: str) -> int | None:
        """A constant of the module, or None where this version of the module lacks it."""
        value: int | None = getattr(self.module, name, None)
        return value

    def ask(self, function: str, *arguments: Any) -> Answer:
        """Call one NVML function. Only NVML's own errors are answers; anything else is a bug and propagates."""
        call = getattr(self.module, function, None)
        if call is None:
            return Answer(status=ReadingStatus.UNSUPPORTED, reason=f"this pynvml has no {function}")
        try:
            return Answer(status=ReadingStatus.OK, value=_text(call(*arguments)))
        except self.module.NVMLError as error:
            return self._refusal(error.value, str(error))

    def _refusal(self, code: int, text: str) -> Answer:
        status = ReadingStatus.UNSUPPORTED if code in self._unsupported else ReadingStatus.FAILED
        return Answer(status=status, reason=text, code=code, lost=code in self._lost)

    def ask_struct(self, function: str, struct: str, handle: Any) -> Answer:
        """Call a function that fills a caller's ctypes structure; the answer's value is the structure."""
        make = getattr(self.module, struct, None)
        if make is None:
            return Answer(status=ReadingStatus.UNSUPPORTED, reason=f"this pynvml has no {struct}")
        record = make()
        answer = self.ask(function, handle, ctypes.byref(record))
        return replace(answer, value=record)

    def ask_fields(self, handle: Any, fields: Sequence[tuple[int, int]]) -> list[Answer]:
        """Read many (field id, scope) pairs in one driver call; each has its own answer."""
        if not fields:
            return []
        whole = self.ask("nvmlDeviceGetFieldValues", handle, list(fields))
        if not whole.ok:
            return [whole] * len(fields)
        return [self._field(item) for item in whole.value]

    def _field(self, item: Any) -> Answer:
        if item.nvmlReturn != 0:
            return self._refusal(item.nvmlReturn, str(self.module.NVMLError(item.nvmlReturn)))
        member = self._members.get(item.valueType)
        if member is None:
            return Answer(status=ReadingStatus.UNSUPPORTED, reason=f"unknown value type {item.valueType}")
        return Answer(status=ReadingStatus.OK, value=getattr(item.value, member))


def _text(value: Any) -> Any:
    """Older modules answer bytes where newer ones answer str."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
