"""One fault as a line of text, for drills: `rank=2,kind=corrupt_output,module=blocks.1,step=30`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from scout_core.config import ConfigError

FaultName = Literal[
    "corrupt_output",
    "corrupt_input_gradient",
    "corrupt_parameter_gradient",
    "corrupt_weight",
    "corrupt_rows",
    "corrupt_optimizer_state",
    "corrupt_optimizer_update",
    "slow_module",
    "nondeterministic_kernel",
]

_NEEDS: dict[str, tuple[str, ...]] = {
    "corrupt_output": ("module",),
    "corrupt_input_gradient": ("module",),
    "corrupt_parameter_gradient": ("parameter",),
    "corrupt_weight": ("parameter",),
    "corrupt_rows": ("module", "row"),
    "corrupt_optimizer_state": ("parameter", "key"),
    "corrupt_optimizer_update": (),
    "slow_module": ("module", "seconds"),
    "nondeterministic_kernel": ("module",),
}


class FaultSpec(BaseModel):
    """One fault: what, on which rank, where, from when on, and how often.

    `module` and `parameter` are dotted names in the model as it was before DDP or `torch.compile` wrapped it. `step` is
    the number of optimizer steps taken before the fault begins. `element` counts in row-major order and `bit` from the
    least significant one. `every` and `times` limit the calls in which a computation is wrong; faults of memory
    (weight, rows, optimizer state) happen once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: FaultName
    rank: Annotated[int, Field(ge=0)] | Literal["all"]
    step: int = Field(default=0, ge=0)
    module: str | None = None
    parameter: str | None = None
    key: str | None = None
    row: int | None = Field(default=None, ge=0)
    seconds: float | None = Field(default=None, gt=0)
    element: int = Field(default=0, ge=0)
    bit: int = Field(default=14, ge=0)
    every: int = Field(default=1, ge=1)
    times: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> FaultSpec:
        missing = [name for name in _NEEDS[self.kind] if getattr(self, name) is None]
        if missing:
            raise ValueError(f"kind={self.kind} also needs {', '.join(f'{name}=...' for name in missing)}")
        return self

    @classmethod
    def parse(cls, text: str) -> FaultSpec:
        """The fault that `key=value,key=value,...` describes. Raises `ConfigError` that says the fix."""
        values: dict[str, Any] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = item.partition("=")
            if not equals:
                raise ConfigError(f"{item!r} in the fault {text!r} is not of the form key=value")
            values[key.strip()] = value.strip()
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"the fault {text!r} cannot be used: {_explain(error)}") from None


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"][:1])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {where!r}; known keys: {', '.join(FaultSpec.model_fields)}")
        elif item["type"] == "missing":
            lines.append(f"{where}=... is missing")
        else:
            lines.append(f"{where}={item['input']!r}: {item['msg']}" if where else item["msg"])
    return "; ".join(lines)
