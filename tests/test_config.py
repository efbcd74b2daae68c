"""The configuration: every way to give it means the same, and what cannot be used is refused with the fix."""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scout_core import ConfigError, ReplayHarnessConfig, ScoutConfig
from scout_core.config import add_arguments, from_arguments
from scout_core.timing.stragglers import StragglerThresholds

CLASSES = ("embedding", "hidden", "output", "optimizer")


def parse(*flags: str) -> ScoutConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(flags))


def refused(*args: Any, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as error:
        ScoutConfig.build(*args, **overrides)
    return str(error.value)


def test_without_anything_the_defaults_hold() -> None:
    config = ScoutConfig.build()
    assert config == ScoutConfig() and config.run_dir is None
    assert config.replay.check_interval == 50 and config.replay.deterministic and config.replay.compare_parameters


def test_every_way_to_give_it_means_the_same(tmp_path: Path) -> None:
    values = {"run_dir": "runs/1", "replay": {"check_interval": 7, "straggler_relative": 1.5}}
    as_json, as_toml = tmp_path / "scout.json", tmp_path / "scout.toml"
    as_json.write_text(json.dumps(values))
    as_toml.write_text('run_dir = "runs/1"\n[replay]\ncheck_interval = 7\nstraggler_relative = 1.5\n')
    wanted = ScoutConfig(run_dir=Path("runs/1"), replay=ReplayHarnessConfig(check_interval=7, straggler_relative=1.5))
    ways = (
        ScoutConfig.build(values),
        ScoutConfig.build(wanted),
        ScoutConfig.build(str(as_json)),
        ScoutConfig.build(as_toml),
        ScoutConfig.build(run_dir="runs/1", check_interval=7, straggler_relative=1.5),
        ScoutConfig.build(
            {"run_dir": "runs/1", "replay": ReplayHarnessConfig(check_interval=7, straggler_relative=1.5)}
        ),
        ScoutConfig.build(run_dir="runs/1", replay=wanted.replay),
        parse("--scout-run-dir", "runs/1", "--scout-check-interval", "7", "--scout-straggler-relative=1.5"),
        parse("--scout-config", str(as_toml)),
    )
    assert all(way == wanted for way in ways)


def test_keywords_override_a_file_and_flags_do_too(tmp_path: Path) -> None:
    path = tmp_path / "scout.toml"
    path.write_text("[replay]\ncheck_interval = 7\nhidden_interval = 14\n")
    for config in (
        ScoutConfig.build(path, check_interval=9),
        parse("--scout-config", str(path), "--scout-check-interval", "9"),
    ):
        assert (config.replay.check_interval, config.replay.hidden_interval) == (9, 14)


def test_single_keywords_go_into_a_whole_table_in_any_order() -> None:
    whole = {"hidden_interval": 3}
    one = ScoutConfig.build(check_interval=9, replay=whole)
    other = ScoutConfig.build(replay=ReplayHarnessConfig(hidden_interval=3), check_interval=9)
    assert one == other and (one.replay.check_interval, one.replay.hidden_interval) == (9, 3)


def test_building_changes_neither_what_it_is_given_nor_what_it_gave() -> None:
    given_values: dict[str, Any] = {"replay": {"check_interval": 7}}
    config = ScoutConfig.build(given_values, hidden_interval=3)
    assert given_values == {"replay": {"check_interval": 7}}
    with pytest.raises(ValueError, match="frozen"):
        config.replay.check_interval = 1  # type: ignore[misc]


def test_there_is_a_flag_for_every_field_and_it_is_explained() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    text = parser.format_help()
    for name, field in ReplayHarnessConfig.model_fields.items():
        assert f"--scout-{name.replace('_', '-')}" in text
        assert field.description


@pytest.mark.parametrize(("flag", "value"), [("--scout-deterministic", "false"), ("--scout-compare-parameters", "0")])
def test_switches_are_turned_off_by_words_for_no(flag: str, value: str) -> None:
    config = parse(flag, value).replay
    assert not (config.deterministic and config.compare_parameters)


@settings(deadline=None)
@given(st.fixed_dictionaries({}, optional={name: st.none() | st.integers(0, 99) for name in CLASSES}))
def test_a_recipes_own_interval_overrides_the_common_one(own: Mapping[str, int | None]) -> None:
    config = ReplayHarnessConfig(check_interval=5, **{f"{name}_interval": value for name, value in own.items()})
    for name in CLASSES:
        assert config.interval(name) == (own[name] if own.get(name) is not None else 5)


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("check_intervall", "did you mean 'check_interval'?"),
        ("straggler_relativ", "did you mean 'straggler_relative'?"),
        ("rundir", "did you mean 'run_dir'?"),
        ("zzz", "known keys: run_dir, replay, "),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(key: str, fix: str, tmp_path: Path) -> None:
    path = tmp_path / "scout.json"
    path.write_text(json.dumps({"replay": {key: 1}}))
    for text in (refused(**{key: 1}), refused({key: 1}), refused({"replay": {key: 1}}), refused(path)):
        assert f"unknown configuration key '{key}'" in text and fix in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("check_interval", -1),
        ("hidden_interval", -5),
        ("optimizer_slice_elements", 0),
        ("state_budget_mib", 0),
        ("readiness_timeout_s", 0.0),
        ("readiness_timeout_s", float("inf")),
        ("straggler_relative", 1.0),
        ("straggler_relative", float("nan")),
        ("straggler_absolute_ms", -0.1),
        ("straggler_confirmations", -1),
        ("straggler_window", 1),
        ("straggler_persistence", 0),
        ("check_interval", "often"),
        ("check_interval", 2.5),
        ("check_interval", None),
        ("deterministic", "perhaps"),
        ("hidden_modules", 3),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_its_key_and_limit(key: str, value: Any) -> None:
    text = refused(**{key: value})
    assert f"replay.{key}={value!r}: Input should be" in text


def test_every_wrong_value_is_named_at_once() -> None:
    text = refused(check_interval=-1, straggler_relative=0.5)
    assert "check_interval=-1" in text and "straggler_relative=0.5" in text


def test_more_persistence_than_the_window_holds_is_refused_with_the_fix() -> None:
    text = refused(straggler_window=4, straggler_persistence=5)
    assert "straggler_persistence=5 can never be met within straggler_window=4; lower it" in text
    assert ScoutConfig.build(straggler_window=4, straggler_persistence=4).replay.straggler_persistence == 4


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.json", "{", "is not valid .json"),
        ("a.toml", "check_interval = = 3", "is not valid .toml"),
        ("a.json", "[1, 2]", "must hold one table of keys, not a list"),
        ("a.toml", "check_interval = 3\n[replay]\n", "'check_interval' belongs into the table 'replay'"),
        ("a.toml", '[replay]\nrun_dir = "x"\n', "'run_dir' belongs outside the table 'replay'"),
        ("a.json", '{"replay": 3}', "replay=3: Input should be"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert complaint in refused(path)


def test_a_table_that_is_none_is_refused_whatever_overrides_it() -> None:
    assert "replay=3: Input should be" in refused({"replay": 3}, check_interval=1)
    assert ScoutConfig.build({"replay": None}, check_interval=1).replay.check_interval == 1


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "scout.toml"
    path.write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in refused(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    text = refused(tmp_path / "none.toml")
    assert f"cannot read the configuration file {tmp_path / 'none.toml'}: No such file" in text
    assert "cannot read" in refused(tmp_path)


@pytest.mark.parametrize("wrong", [3, ["check_interval"], object()])
def test_another_type_is_refused_with_what_to_give(wrong: Any) -> None:
    assert "give a ScoutConfig, a dict, or a .json/.toml path" in refused(wrong)


def test_a_flag_with_a_wrong_value_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"check_interval='never': Input should be a valid integer"):
        parse("--scout-check-interval", "never")


@settings(deadline=None)
@given(
    relative=st.floats(0.5, 2),
    absolute_ms=st.floats(-1, 5),
    confirmations=st.integers(-1, 3),
    window=st.integers(0, 8),
    persistence=st.integers(0, 9),
)
def test_what_the_configuration_accepts_the_straggler_judge_does_too(**values: Any) -> None:
    try:
        config = ScoutConfig.build(**{f"straggler_{name}": value for name, value in values.items()}).replay
    except ConfigError:
        return
    thresholds = StragglerThresholds(**{name: getattr(config, f"straggler_{name}") for name in values})
    assert dataclasses.asdict(thresholds) == values
