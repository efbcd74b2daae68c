"""Which device is meant: CUDA ordinals, UUIDs and MIG ids resolved to NVML devices, without a CUDA context."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from scout_core.health.kmsg import normalize_pci
from scout_core.health.nvml_api import NvmlApi, NvmlUnavailable
from scout_core.health.types import DeviceIdentity


class IdentityError(LookupError):
    """A device that cannot be told from what was given; the message says the fix. `lost`: it is known to be lost."""

    def __init__(self, message: str, *, lost: bool = False, failed: bool = False) -> None:
        super().__init__(message)
        self.lost = lost
        self.failed = failed


@dataclass(frozen=True, kw_only=True, slots=True)
class Selector:
    """One device, named in exactly one way: physical NVML index, CUDA ordinal of this process, or (MIG-)UUID."""

    nvml_index: int | None = None
    cuda_ordinal: int | None = None
    uuid: str | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.nvml_index, self.cuda_ordinal, self.uuid) if value is not None]
        if len(given) != 1:
            raise ValueError("name the device in exactly one way: device_index, CUDA ordinal or uuid")
        if isinstance(given[0], int) and given[0] < 0:
            raise ValueError(f"device numbers start at 0, not {given[0]}")

    def __str__(self) -> str:
        if self.uuid is not None:
            return self.uuid
        return f"nvml:{self.nvml_index}" if self.nvml_index is not None else f"cuda:{self.cuda_ordinal}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """`handle`: the physical GPU's, or the MIG instance's where the parent is not accessible."""

    handle: Any
    identity: DeviceIdentity


def parse_visible_devices(text: str | None) -> tuple[str, ...] | None:
    """`CUDA_VISIBLE_DEVICES` as tokens; None when it is not set (all devices). Pure.

    As CUDA reads it: the list ends at the first entry that cannot be a device (-1, empty), and a device named
    twice hides all of them. Source: CUDA C++ Programming Guide, 'CUDA Environment Variables'.
    """
    if text is None:
        return None
    tokens: list[str] = []
    for piece in text.split(","):
        token = piece.strip()
        if re.match(r"\d+", token):
            tokens.append(str(int(re.match(r"\d+", token)[0])))  # type: ignore[index]
        elif token.startswith(("GPU-", "MIG-")):
            tokens.append(token)
        else:
            break
    return () if len(set(tokens)) != len(tokens) else tuple(tokens)


def match_uuid(wanted: str, uuids: Mapping[int, str]) -> int | None:
    """The index whose UUID starts with `wanted`, if exactly one does. Pure."""
    found = [index for index, uuid in uuids.items() if uuid.lower().startswith(wanted.lower())]
    return found[0] if len(found) == 1 else None


def resolve(selector: Selector, nvml: NvmlApi, environ: Mapping[str, str] | None = None) -> Resolved:
    """Find the device. `nvml` must be open. Raises `IdentityError`; creates no CUDA context.

    A CUDA ordinal goes through `CUDA_VISIBLE_DEVICES` of `environ` (this process's by default).
    """
    environ = os.environ if environ is None else environ
    if selector.nvml_index is not None:
        return _by_index(nvml, selector.nvml_index, None)
    if selector.uuid is not None:
        return _by_uuid(nvml, selector.uuid, _ordinal_of(selector.uuid, environ))
    ordinal = selector.cuda_ordinal or 0
    visible = parse_visible_devices(environ.get("CUDA_VISIBLE_DEVICES"))
    if visible is None:
        _refuse_unordered(nvml, environ)
        return _by_index(nvml, ordinal, ordinal)
    if ordinal >= len(visible):
        raise IdentityError(
            f"CUDA device {ordinal} does not exist: CUDA_VISIBLE_DEVICES names {len(visible)} device(s)"
        )
    token = visible[ordinal]
    if token.isdigit():
        _refuse_unordered(nvml, environ)
        return _by_index(nvml, int(token), ordinal)
    return _by_uuid(nvml, token, ordinal)


def _ordinal_of(uuid: str, environ: Mapping[str, str]) -> int | None:
    visible = parse_visible_devices(environ.get("CUDA_VISIBLE_DEVICES")) or ()
    found = [i for i, token in enumerate(visible) if not token.isdigit() and uuid.lower().startswith(token.lower())]
    return found[0] if len(found) == 1 else None


def _refuse_unordered(nvml: NvmlApi, environ: Mapping[str, str]) -> None:
    """CUDA's default order is fastest first, NVML's is by PCI address: equal only when all GPUs are alike."""
    if environ.get("CUDA_DEVICE_ORDER", "").upper() == "PCI_BUS_ID":
        return
    count = nvml.ask("nvmlDeviceGetCount")
    names: set[Any] = set()
    for index in range(count.value if count.ok else 0):
        handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
        name = nvml.ask("nvmlDeviceGetName", handle.value) if handle.ok else handle
        if name.ok:
            names.add(name.value)
    if len(names) > 1:
        raise IdentityError(
            f"this host has different GPUs ({', '.join(sorted(names))}), so CUDA numbers cannot be mapped safely: "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID or name the device by uuid"
        )


def _by_index(nvml: NvmlApi, index: int, ordinal: int | None) -> Resolved:
    handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
    if not handle.ok:
        raise IdentityError(
            f"NVML device {index}: {handle.reason}", lost=handle.lost, failed=handle.status.value == "failed"
        )
    return Resolved(handle=handle.value, identity=describe(nvml, handle.value, index=index, ordinal=ordinal))


def _by_uuid(nvml: NvmlApi, uuid: str, ordinal: int | None) -> Resolved:
    if uuid.startswith("MIG-"):
        return _by_mig(nvml, uuid, ordinal)
    uuids = all_uuids(nvml)
    index = match_uuid(uuid, uuids)
    if index is None:
        raise IdentityError(f"{uuid} names no GPU, or more than one, of the {len(uuids)} that NVML shows")
    return _by_index(nvml, index, ordinal)


def _by_mig(nvml: NvmlApi, uuid: str, ordinal: int | None) -> Resolved:
    """The parent GPU where this process may see it (its memory and links are what fails), else the instance."""
    instance = nvml.ask("nvmlDeviceGetHandleByUUID", uuid)
    if not instance.ok:
        raise IdentityError(f"{uuid}: {instance.reason}", lost=instance.lost, failed=instance.status.value == "failed")
    parent = nvml.ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", instance.value)
    handle = parent.value if parent.ok else instance.value
    return Resolved(handle=handle, identity=describe(nvml, handle, ordinal=ordinal, mig_uuid=uuid))


def describe(
    nvml: NvmlApi,
    handle: Any,
    *,
    index: int | None = None,
    ordinal: int | None = None,
    mig_uuid: str | None = None,
    rank: int | None = None,
) -> DeviceIdentity:
    """Everything NVML says about who a device is; what it does not say stays None."""
    uuid = nvml.ask("nvmlDeviceGetUUID", handle)
    name = nvml.ask("nvmlDeviceGetName", handle)
    pci = nvml.ask("nvmlDeviceGetPciInfo", handle)
    if index is None:
        asked = nvml.ask("nvmlDeviceGetIndex", handle)
        index = asked.value if asked.ok else None
    physical = uuid.value if uuid.ok and not str(uuid.value).startswith("MIG-") else None
    return DeviceIdentity(
        host=socket.gethostname(),
        uuid=physical,
        pci_bus_id=_pci_text(pci.value.busId) if pci.ok else None,
        name=name.value if name.ok else None,
        nvml_index=index,
        cuda_ordinal=ordinal,
        mig_uuid=mig_uuid,
        rank=rank,
    )


def _pci_text(bus_id: str | bytes) -> str:
    return normalize_pci(bus_id.decode() if isinstance(bus_id, bytes) else bus_id)


def rank_identity(
    rank: int, ordinal: int | None, *, module: Any = None, environ: Mapping[str, str] | None = None
) -> DeviceIdentity:
    """Who this rank's CUDA device is, for the job's `IdentityMap`. Never raises for NVML: the host is always known.

    `ordinal` is the rank's CUDA device number in this process; None on a rank without a GPU.
    """
    bare = DeviceIdentity(host=socket.gethostname(), cuda_ordinal=ordinal, rank=rank)
    if ordinal is None:
        return bare
    nvml = NvmlApi(module)
    try:
        nvml.open()
        return replace(resolve(Selector(cuda_ordinal=ordinal), nvml, environ).identity, rank=rank)
    except (NvmlUnavailable, IdentityError):
        return bare
    finally:
        nvml.close()


def host_identities(*, module: Any = None, environ: Mapping[str, str] | None = None) -> tuple[DeviceIdentity, ...]:
    """All GPUs that NVML shows here, each with the CUDA ordinal it has in a process with this `environ`, if any.

    Raises `NvmlUnavailable`. A device that does not answer is left out; it shows up in `scout health`.
    """
    nvml = NvmlApi(module)
    nvml.open()
    try:
        ordinals: dict[int | None, int] = {}
        uuids = all_uuids(nvml)
        for ordinal in range(len(uuids)):
            try:
                ordinals.setdefault(resolve(Selector(cuda_ordinal=ordinal), nvml, environ).identity.nvml_index, ordinal)
            except IdentityError:
                break
        return tuple(
            describe(nvml, handle.value, index=index, ordinal=ordinals.get(index))
            for index in uuids
            if (handle := nvml.ask("nvmlDeviceGetHandleByIndex", index)).ok
        )
    finally:
        nvml.close()


def all_uuids(nvml: NvmlApi) -> dict[int, str]:
    """UUID of every physical NVML device that answers, by index."""
    count = nvml.ask("nvmlDeviceGetCount")
    found: dict[int, str] = {}
    for index in range(count.value if count.ok else 0):
        handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
        uuid = nvml.ask("nvmlDeviceGetUUID", handle.value) if handle.ok else handle
        if uuid.ok:
            found[index] = uuid.value
    return found
