"""The fake has the real module's names, signatures, numbers, structures and error classes."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

import scout_core.health
from scout_core.health.fake_nvml import FakeNvml
from scout_core.health.fake_nvml_names import CONSTANTS, ERRORS, error_class_name

pynvml = pytest.importorskip("pynvml")
FUNCTIONS = [name for name in dir(FakeNvml) if name.startswith("nvml")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_the_real_parameters(name: str) -> None:
    real = list(inspect.signature(getattr(pynvml, name)).parameters)
    fake = list(inspect.signature(getattr(FakeNvml, name)).parameters)[1:]
    assert fake == real


def test_constants_and_errors_have_the_real_numbers() -> None:
    for name, value in {**CONSTANTS, **ERRORS}.items():
        assert getattr(pynvml, name) == value, name
    real_errors = {name for name in dir(pynvml) if name.startswith("NVML_ERROR_")}
    assert set(ERRORS) == real_errors


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_error_classes_are_the_real_ones(name: str) -> None:
    fake, real = FakeNvml({}).NVMLError(ERRORS[name]), pynvml.NVMLError(ERRORS[name])
    assert type(fake).__name__ == type(real).__name__ == error_class_name(name)
    assert fake.value == real.value
    assert isinstance(fake, FakeNvml.NVMLError)
    assert isinstance(real, pynvml.NVMLError)


@pytest.mark.parametrize("name", ["c_nvmlEccSramErrorStatus_v1_t", "c_nvmlGpuFabricInfo_t"])
def test_structures_have_the_real_fields(name: str) -> None:
    fake = [field for field, *_ in getattr(FakeNvml, name)._fields_]
    real = [field for field, *_ in getattr(pynvml, name)._fields_]
    assert fake == real


def test_the_real_module_answers_with_the_attributes_that_the_fake_has() -> None:
    fields = {name for name, *_ in pynvml.c_nvmlFieldValue_t._fields_}
    assert {"fieldId", "scopeId", "nvmlReturn", "valueType", "value"} <= fields
    assert {"device", "eventType", "eventData"} <= {name for name, *_ in pynvml.c_nvmlEventData_t._fields_}
    assert "busId" in {name for name, *_ in pynvml.nvmlPciInfo_t._fields_}
    assert {"gpu", "memory"} <= {name for name, *_ in pynvml.c_nvmlUtilization_t._fields_}
    assert {"dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal"} <= {
        name for name, *_ in pynvml.c_nvmlValue_t._fields_
    }


def test_every_nvml_name_in_the_package_exists_in_the_real_module() -> None:
    """A misspelt function or constant would read as 'not supported' for ever. Names of older modules may be gone."""
    folder = Path(inspect.getfile(scout_core.health)).parent
    source = "".join(path.read_text(encoding="utf-8") for path in folder.glob("nvml*.py"))
    source += "".join((folder / name).read_text(encoding="utf-8") for name in ("identity.py", "xid_source.py"))
    names = set(re.findall(r'"(nvml[A-Z]\w+|NVML_[A-Z0-9_]+|c_nvml\w+)"', source))
    assert len(names) > 50
    missing = {name for name in names if not hasattr(pynvml, name)}
    assert missing <= {"nvmlDeviceGetCurrentClocksThrottleReasons"}


def test_a_description_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fake.json"
    path.write_text(json.dumps({"devices": [{"temprature": 90}]}))
    with pytest.raises(ValueError, match="temprature"):
        FakeNvml.from_file(path)
