"""Thresholds and rhythm of the health monitor."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self


class HealthConfig(BaseModel):
    """What counts as how bad. Every threshold that is `above` is crossed by a value greater than it.

    Growth is counted from a baseline taken at the first poll and, for rates, within `window_s`. Defaults follow
    NVIDIA's public guidance where there is one: any uncorrectable error and any failed remap is fatal; correctable
    errors only warn; link CRC errors are normal at a low rate (DCGM's policy limit is 100 a second).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    poll_interval_s: float = Field(default=10.0, gt=0)
    read_deadline_s: float = Field(default=2.0, gt=0)
    """How long one poll waits for a source. A source that is still busy from an earlier poll is not waited for."""
    window_s: float = Field(default=60.0, gt=0)
    """Span over which growth of correctable and link errors is counted."""
    confirmations: int = Field(default=2, ge=1)
    """Consecutive polls before an unexplained silence, an inactive link or a slow PCIe link is believed."""
    fatal_temperature_margin_c: float = Field(default=2.0, ge=0)
    """Fatal at this many degrees C, or fewer, below the hardware's shutdown temperature."""
    warning_temperature_margin_c: float = Field(default=8.0, ge=0)
    uncorrectable_ecc_fatal_above: int = Field(default=0, ge=0)
    correctable_ecc_warning_above: int = Field(default=0, ge=0)
    """Correctable errors within `window_s` that are still not worth a warning."""
    nvlink_recovery_fatal_above: int = Field(default=8, ge=0)
    nvlink_crc_fatal_above: int = Field(default=6000, ge=0)
    """Per GPU within `window_s`: 100 a second with the default window."""
    nvlink_warning_above: int = Field(default=0, ge=0)
    expected_nvlinks: int | None = Field(default=None, ge=0)
    """Links each GPU must have up. None: by product (see `nvlink_expectation`); 0: do not judge links."""
    power_limit_warning_ratio: float = Field(default=0.9, gt=0, le=1)
    """Warn when the power cap is what slows the clock and lies below this share of the board's default limit."""
    fatal_xids: frozenset[int] | None = None
    """Exactly these XID codes are fatal. None: as the catalogue in `xid_table.json` says."""
    xid_burst_s: float = Field(default=5.0, ge=0)
    """XIDs of one device this close together are one burst: its cause is reported, not its consequences."""
    max_events: int = Field(default=1024, ge=1)
    """Events remembered by the monitor; the oldest are forgotten first."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.warning_temperature_margin_c < self.fatal_temperature_margin_c:
            raise ValueError(
                "warning_temperature_margin_c must be at least fatal_temperature_margin_c, "
                "so that the warning comes before the alarm"
            )
        return self
