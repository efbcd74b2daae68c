"""The callback's configuration, from every form it may have, and which steps it makes due."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scout_core.config import ConfigError, ReplayHarnessConfig, ScoutConfig, TrustConfig

_NOT_HERE = {
    "gemini": "does not keep the position of Lightning's loops; use its checkpoints, certified",
    "certification": "is not what the callback does: a clean check certifies at once; leave it at 'dense'",
    "on_fault": "is for jobs without Lightning; give ScoutCallback(on_fault=...)",
    "restart_budget": "has no effect under Lightning; limit them where they are made, as torchrun --max-restarts does",
}
"""Fields of `[trust]` whose defaults alone are what the callback does, and what to do instead."""
_CLASSES = ("embedding", "hidden", "output", "optimizer")


def scout_config(
    config: ScoutConfig | Mapping[str, Any] | str | Path | None, every_n_train_steps: int | None
) -> ScoutConfig:
    """A `ScoutConfig`; `every_n_train_steps` overrides its `check_interval`. Raises `ConfigError`.

    Policies of checkpoint trust that the callback does not follow are refused, not ignored.
    """
    if isinstance(config, (str, Path)) and Path(config).suffix in (".yaml", ".yml"):
        config = _read_yaml(Path(config))
    overrides = {} if every_n_train_steps is None else {"check_interval": every_n_train_steps}
    built = ScoutConfig.build(config, **overrides)
    for name, instead in _NOT_HERE.items():
        given = getattr(built.trust, name)
        if given != TrustConfig.model_fields[name].default:
            raise ConfigError(f"trust.{name}={given!r} {instead}")
    return built


def due_between(before: int, now: int, config: ReplayHarnessConfig) -> int | None:
    """The newest of steps `before + 1 .. now` after which a check is due; None: there is none. Pure."""
    intervals = [interval for name in _CLASSES if (interval := config.interval(name))]
    return max((now // i * i for i in intervals if now // i * i > before), default=None)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError(f"{path}: reading YAML needs PyYAML; install it, or give a .toml or .json file") from None
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold one table of keys, not a {type(values).__name__}")
    return values
