"""Which device is meant: CUDA_VISIBLE_DEVICES, UUIDs, MIG, and the map of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from scout_core.health import (
    DeviceIdentity,
    IdentityError,
    IdentityMap,
    NvmlSource,
    Selector,
    host_identities,
    parse_visible_devices,
    rank_identity,
    resolve,
)
from scout_core.health.fake_nvml import FakeNvml
from scout_core.health.kmsg import normalize_pci
from scout_core.health.nvml_api import NvmlApi


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("", ()),
        ("0", ("0",)),
        ("3,1", ("3", "1")),
        (" 3 , 1", ("3", "1")),
        ("0,-1,2", ("0",)),
        ("1,1", ()),
        ("NoDevFiles", ()),
        ("GPU-ab,MIG-cd", ("GPU-ab", "MIG-cd")),
        ("01,2x", ("1", "2")),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(text: str | None, expected: tuple[str, ...] | None) -> None:
    assert parse_visible_devices(text) == expected


def opened(*devices: dict[str, Any]) -> NvmlApi:
    nvml = NvmlApi(FakeNvml({"devices": list(devices)}))
    nvml.open()
    return nvml


@pytest.mark.parametrize(
    ("visible", "ordinal", "index"),
    [(None, 2, 2), ("3,1", 0, 3), ("3,1", 1, 1), ("GPU-00000002", 0, 2), ("GPU-00000000-0000,3", 1, 3)],
)
def test_an_ordinal_becomes_a_physical_index(visible: str | None, ordinal: int, index: int) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    identity = resolve(Selector(cuda_ordinal=ordinal), opened(*[{}] * 4), environ).identity
    assert (identity.nvml_index, identity.cuda_ordinal) == (index, ordinal)
    assert identity.pci_bus_id == f"0000:{0x10 + index:02x}:00.0"


@pytest.mark.parametrize(
    ("visible", "message"),
    [("3,1", "names 2 device"), ("GPU-0", "more than one"), ("GPU-zz", "names no GPU"), ("", "names 0 device")],
)
def test_an_ordinal_that_names_no_single_device_is_refused(visible: str, message: str) -> None:
    ordinal = 0 if visible.startswith("GPU") or not visible else 2
    with pytest.raises(IdentityError, match=message):
        resolve(Selector(cuda_ordinal=ordinal), opened(*[{}] * 4), {"CUDA_VISIBLE_DEVICES": visible})


def test_numbers_are_refused_where_cudas_order_is_unknown_and_accepted_where_it_is_fixed() -> None:
    mixed = opened({"name": "NVIDIA L4"}, {"name": "NVIDIA H200"})
    with pytest.raises(IdentityError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        resolve(Selector(cuda_ordinal=0), mixed, {})
    fixed = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert resolve(Selector(cuda_ordinal=1), mixed, fixed).identity.nvml_index == 1
    assert resolve(Selector(uuid="GPU-00000001"), mixed, {}).identity.nvml_index == 1


def test_a_mig_instance_is_watched_through_its_parent_where_it_is_visible() -> None:
    nvml = opened({}, {"mig_uuids": ["MIG-77"]})
    identity = resolve(Selector(cuda_ordinal=0), nvml, {"CUDA_VISIBLE_DEVICES": "MIG-77"}).identity
    assert (identity.mig_uuid, identity.nvml_index) == ("MIG-77", 1)
    assert identity.uuid == "GPU-00000001-0000-4000-8000-000000000001"


@pytest.mark.parametrize("choice", [{}, {"ordinal": 0, "uuid": "GPU-1"}, {"ordinal": -1}])
def test_a_device_must_be_named_in_exactly_one_way(choice: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"exactly one way|start at 0"):
        NvmlSource.for_cuda_device(**choice)


@pytest.mark.parametrize("pci", ["0000:C3:00.0", "00000000:c3:00.0", "0000:c3:00", "C3:00.0"])
def test_pci_addresses_have_one_spelling(pci: str) -> None:
    assert normalize_pci(pci) == "0000:c3:00.0"


def test_the_map_names_ranks_by_device_and_fills_in_what_a_report_lacks() -> None:
    devices = [
        DeviceIdentity(host="a", uuid="GPU-1", rank=0, pci_bus_id="0000:01:00.0", cuda_ordinal=0),
        DeviceIdentity(host="b", uuid="GPU-2", rank=1, pci_bus_id="0000:01:00.0", cuda_ordinal=0),
        DeviceIdentity(host="b", uuid="GPU-2", rank=2, mig_uuid="MIG-9"),
    ]
    known = IdentityMap.from_json(device.to_json() for device in devices)
    assert known.devices == tuple(devices)
    assert known.ranks_of("GPU-2") == (1, 2)
    assert known.ranks_of("MIG-9") == (2,)
    assert known.ranks_on("a") == (0,)
    completed = known.completed(DeviceIdentity(host="b", pci_bus_id="0000:01:00.0"))
    assert (completed.rank, completed.uuid) == (1, "GPU-2")
    assert known.completed(DeviceIdentity(host="c", uuid="GPU-1")).rank is None
    lines = known.lines()
    assert lines[0].split() == ["rank", "host", "cuda", "nvml", "pci", "uuid", "mig", "name"]
    assert lines[2].split()[:3] == ["1", "b", "0"]


def test_a_ranks_identity_is_its_device_or_at_least_its_host() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "1,0"}
    nvml = FakeNvml({"devices": [{}, {}]})
    found = rank_identity(7, 0, module=nvml, environ=environ)
    assert (found.rank, found.cuda_ordinal, found.nvml_index, found.uuid) == (7, 0, 1, nvml.devices[1].uuid)
    for bare in (
        rank_identity(7, 5, module=nvml, environ=environ),
        rank_identity(7, None, module=nvml),
        rank_identity(7, 0, module=FakeNvml({"init_error": "UNKNOWN"})),
    ):
        assert (bare.host, bare.rank, bare.uuid) == (found.host, 7, None)
    assert nvml.opened == 0


def test_a_hosts_devices_carry_the_ordinals_they_have_under_cuda_visible_devices() -> None:
    nvml = FakeNvml({"devices": [{}, {}, {}]})
    found = host_identities(module=nvml, environ={"CUDA_VISIBLE_DEVICES": "2,0"})
    assert [(device.nvml_index, device.cuda_ordinal) for device in found] == [(0, 1), (1, None), (2, 0)]
    assert nvml.opened == 0
