"""The one typed configuration, from keywords, a dict, a JSON or TOML file, or command-line flags.

Unknown keys and values out of range are errors at construction, before training starts, and say the fix.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from scout_core.health.config import HealthConfig


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key and the fix."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ReplayHarnessConfig(_Strict):
    """What is replayed, how often, and when a slow rank is called slow.

    Intervals count optimizer steps. A recipe's own interval overrides `check_interval`; 0 switches the recipe off.
    `check_interval=0` leaves only `check_now()`.
    """

    check_interval: int = Field(default=50, ge=0, description="optimizer steps between checks; 0: manual only")
    embedding_interval: int | None = Field(default=None, ge=0, description="own interval of the embedding recipe")
    hidden_interval: int | None = Field(default=None, ge=0, description="own interval of the hidden-layer recipe")
    output_interval: int | None = Field(default=None, ge=0, description="own interval of the output-head recipe")
    optimizer_interval: int | None = Field(default=None, ge=0, description="own interval of the optimizer recipe")
    embedding_module: str | None = Field(
        default=None, description="dotted name of the embedding; None: found by structure"
    )
    hidden_modules: str | None = Field(
        default=None, description="dotted name of the container of repeated layers; None: the longest one"
    )
    output_module: str | None = Field(
        default=None, description="dotted name of the output head; None: found by structure"
    )
    deterministic: bool = Field(default=True, description="deterministic kernels during the replay only")
    compare_parameters: bool = Field(
        default=True, description="compare live parameters and optimizer state at every check"
    )
    state_budget_mib: int | None = Field(
        default=None,
        ge=1,
        description="live state compared per check, rotating, MiB; None: 256 on a GPU, 16 on the CPU",
    )
    at_rest_interval: int | None = Field(
        default=None,
        ge=0,
        description="steps between watches over state that only one rank owns; None: check_interval, 0: never",
    )
    optimizer_slice_elements: int = Field(
        default=1 << 20, ge=1, description="elements whose optimizer update is recomputed per check"
    )
    tie_break: Literal["off", "reference"] = Field(
        default="off", description="reference: what peers dispute is also recomputed in float64 on the CPU"
    )
    tie_break_budget_mib: int = Field(
        default=256, ge=1, description="inputs and parameters, in float64, up to which a reference is computed, MiB"
    )
    readiness_timeout_s: float = Field(
        default=120.0, gt=0, description="how long one rank waits for its peers at a check"
    )
    straggler_relative: float = Field(
        default=1.3, gt=1.0, description="slow means above this multiple of the peers' median"
    )
    straggler_absolute_ms: float = Field(default=2.0, ge=0, description="and above the peers' median by this, ms")
    straggler_confirmations: int = Field(default=2, ge=0, description="further replays in which it must be slow again")
    straggler_window: int = Field(default=32, ge=2, description="checks a rank's own history and persistence look back")
    straggler_persistence: int = Field(default=2, ge=1, description="checks in the window that must confirm it")
    live_timing: bool = Field(
        default=True, description="time training steps too, and judge ranks that become slower; needs oob_enabled"
    )
    live_relative: float = Field(
        default=0.03, gt=0, description="least change of a rank's own time per step that counts, as a share"
    )
    live_absolute_ms: float = Field(default=2.0, ge=0, description="and the least in ms")
    live_observation_ms: float = Field(
        default=250.0, ge=0, description="shorter steps are judged together, as many as take this long"
    )
    resources: dict[int, dict[str, str]] = Field(
        default_factory=dict,
        description="what each rank hangs on, by kind (nic, hca, link, switch), to name what slow groups share",
    )

    @field_validator("straggler_persistence")
    @classmethod
    def _fits_window(cls, value: int, info: Any) -> int:
        window = info.data.get("straggler_window")
        if window is not None and value > window:
            raise ValueError(
                f"straggler_persistence={value} can never be met within straggler_window={window}; lower it"
            )
        return value

    def interval(self, recipe_class: str) -> int:
        """Optimizer steps between checks of a recipe class (`embedding`, `hidden`, `output`, `optimizer`); 0: never."""
        own: int | None = getattr(self, f"{recipe_class}_interval")
        return self.check_interval if own is None else own

    @property
    def shortest_interval(self) -> int:
        """Steps between scheduled checks; 0: there are none."""
        given = [self.interval(name) for name in ("embedding", "hidden", "output", "optimizer")]
        return min((interval for interval in given if interval), default=0)


class OobConfig(_Strict):
    """The process beside training that names ranks which hang, stall or end, and what it takes for a stall.

    Thresholds are seconds without any published progress, by phase. A loader or a checkpoint file has its own: the
    larger of the absolute one and a multiple of what that loader or file took as a rule.
    """

    oob_enabled: bool = Field(default=True, description="watch each rank from a process of its own")
    oob_failure: Literal["raise", "warn"] = Field(
        default="raise", description="when that process is lost: fail at the next step, or go on unprotected"
    )
    oob_max_ranks: int = Field(
        default=256,
        ge=2,
        description="most ranks of a mesh whose observers confer; beyond it those of each rank's peers, however many",
    )
    oob_ready_timeout_s: float = Field(default=120.0, gt=0, description="how long attach() waits for all observers")
    hang_master_addr: str | None = Field(default=None, description="host where the first rank's observer listens")
    hang_master_port: int | None = Field(default=None, ge=0, le=65535, description="its port; 0: any free one")
    hang_state_dir: Path | None = Field(
        default=None, description="folder for status files, and for rendezvous when no address or port is given"
    )
    stall_startup_s: float = Field(default=1800.0, gt=0, description="no progress before the first step ends, s")
    stall_compile_s: float = Field(default=3600.0, gt=0, description="no progress while torch compiles, s")
    stall_train_s: float = Field(default=120.0, gt=0, description="no progress in training, s")
    stall_eval_s: float = Field(default=600.0, gt=0, description="no progress in evaluation, s")
    stall_checkpoint_s: float = Field(default=1800.0, gt=0, description="no progress while checkpointing, s")
    stall_teardown_s: float = Field(default=600.0, gt=0, description="no progress at the end of the job, s")
    dataloader_stall_s: float = Field(default=120.0, gt=0, description="one next() of an instrumented loader, s")
    dataloader_stall_relative: float = Field(default=10.0, ge=1, description="and this multiple of its usual time")
    checkpoint_stall_s: float = Field(default=600.0, gt=0, description="one instrumented checkpoint read or write, s")
    checkpoint_stall_relative: float = Field(default=5.0, ge=1, description="and this multiple of its usual time")
    stall_persistence: int = Field(default=2, ge=1, description="looks of the observer in a row that must confirm it")


class TrustConfig(_Strict):
    """What is kept of training state, when it is trusted, and what happens after a fault."""

    gemini: bool = Field(default=False, description="keep the newest accepted training state in host memory")
    gemini_dir: Path | None = Field(default=None, description="node-local folder for flushes; None: run_dir/gemini")
    replicate: bool = Field(
        default=True, description="copy each rank's state to a peer, on another host if there is one"
    )
    flush_interval: int = Field(default=0, ge=0, description="captures between flushes to disk; 0: only when ended")
    certification: Literal["dense", "dynamic"] = Field(
        default="dense",
        description="dense: an accepted check certifies at once; dynamic: the following clean cycle does",
    )
    on_fault: Literal["report", "restart"] = Field(
        default="report", description="after corruption: report it, or also write the decision and leave for a restart"
    )
    resume: bool = Field(default=True, description="load the run's newest verified state when run_dir has one")
    restart_budget: int = Field(default=3, ge=1, description="restarts without passing the failed step, then STOP")
    grace_s: float = Field(default=20.0, gt=0, description="how long a flush may take once the process is told to end")
    agreement_timeout_s: float = Field(default=300.0, gt=0, description="how long ranks wait for each other's word")


_TABLES: dict[str, type[BaseModel]] = {"replay": ReplayHarnessConfig, "oob": OobConfig, "trust": TrustConfig}
"""Tables whose fields may also be keywords of `attach()` and command-line flags: their names are unique."""


class ScoutConfig(_Strict):
    """Everything `attach()` takes. Fields of its tables may also be keywords of `attach()` itself."""

    run_dir: Path | None = Field(
        default=None, description="folder for events.jsonl and all else a run leaves; None: nothing"
    )
    replay: ReplayHarnessConfig = Field(default_factory=ReplayHarnessConfig)
    oob: OobConfig = Field(default_factory=OobConfig)
    trust: TrustConfig = Field(default_factory=TrustConfig)
    health: HealthConfig | None = Field(
        default=None, description="watch each rank's own GPU for hardware faults; None: do not"
    )

    @classmethod
    def build(cls, config: ScoutConfig | Mapping[str, Any] | str | Path | None = None, **overrides: Any) -> ScoutConfig:
        """A configuration from a `ScoutConfig`, a mapping, or a `.json`/`.toml` path, with single fields overridden.

        Raises `ConfigError` for an unknown key, a value out of range, or a file that cannot be read.
        """
        if config is None:
            values: dict[str, Any] = {}
        elif isinstance(config, ScoutConfig):
            values = config.model_dump(exclude_unset=True)
        elif isinstance(config, Mapping):
            values = dict(config)
        elif isinstance(config, (str, Path)):
            values = _read_file(Path(config))
        else:
            raise ConfigError(f"config is a {type(config).__name__}; give a ScoutConfig, a dict, or a .json/.toml path")
        single: dict[str, dict[str, Any]] = {table: {} for table in _TABLES}
        for key, value in overrides.items():
            if key in cls.model_fields:
                values[key] = value
            elif (table := table_of(key)) is not None:
                single[table][key] = value
            else:
                raise ConfigError(_unknown(key))
        values |= {table: _merged(values.get(table), fields) for table, fields in single.items()}
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None


def table_of(key: str) -> str | None:
    """The table that has a field of this name, if any."""
    return next((table for table, model in _TABLES.items() if key in model.model_fields), None)


def _table_fields() -> dict[str, FieldInfo]:
    return {name: field for model in _TABLES.values() for name, field in model.model_fields.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one `--scout-...` flag per configuration field, all optional, in a group of their own."""
    group = parser.add_argument_group("SCOUT")
    group.add_argument("--scout-config", default=None, metavar="FILE", help="a .json or .toml file; flags override it")
    group.add_argument(
        "--scout-run-dir", default=None, metavar="DIR", help=ScoutConfig.model_fields["run_dir"].description
    )
    for name, field in _table_fields().items():
        group.add_argument(f"--scout-{name.replace('_', '-')}", default=None, metavar="V", help=field.description)


def from_arguments(namespace: argparse.Namespace) -> ScoutConfig:
    """The configuration a parsed command line asks for; raises `ConfigError` as `ScoutConfig.build` does."""
    names = ["run_dir", *_table_fields()]
    given = {name: getattr(namespace, f"scout_{name}", None) for name in names}
    overrides = {name: value for name, value in given.items() if value is not None}
    return ScoutConfig.build(getattr(namespace, "scout_config", None), **overrides)


def _merged(table: Any, single: Mapping[str, Any]) -> Any:
    """A table as plain values with single fields overridden; what is no table of fields is left to validation."""
    if isinstance(table, BaseModel):
        table = table.model_dump(exclude_unset=True)
    if table is None:
        return dict(single)
    return {**table, **single} if isinstance(table, Mapping) else table


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; save it as that") from None
    try:
        values = _parse_toml(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {path.suffix or 'JSON'}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold one table of keys, not a {type(values).__name__}")
    return values


def _parse_toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib.loads(text)
    import tomli

    parsed: dict[str, Any] = tomli.loads(text)
    return parsed


def _unknown(key: str) -> str:
    known = [*ScoutConfig.model_fields, *_table_fields()]
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
    return f"unknown configuration key '{key}'; {hint}"


def _misplaced(place: tuple[int | str, ...]) -> str | None:
    """What to say of a known key that stands in the wrong table."""
    key = str(place[-1])
    table = table_of(key)
    if table is not None and place[0] != table:
        return f"'{key}' belongs into the table '{table}'"
    if len(place) > 1 and key in ScoutConfig.model_fields:
        return f"'{key}' belongs outside the table '{place[0]}'"
    return None


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(_misplaced(item["loc"]) or _unknown(str(item["loc"][-1])))
        else:
            lines.append(f"{where}={item['input']!r}: {item['msg']}")
    return "; ".join(lines)
