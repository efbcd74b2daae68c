"""`scout simulate`: files of faults, what is printed, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scout_core.cli import app
from scout_core.config import ConfigError
from scout_core.simulate import SimFault, load_faults

TOML = '[[fault]]\nkind = "corruption"\nrank = 5\n\n[[fault]]\nkind = "common_mode"\nrank = 1\n'
LAYOUT = ["simulate", "--ranks", "24", "--tp", "4", "--cp", "2"]


def test_faults_come_from_toml_and_json_alike(tmp_path: Path) -> None:
    wanted = [SimFault(kind="corruption", rank=5), SimFault(kind="common_mode", rank=1)]
    listed = [{"kind": "corruption", "rank": 5}, {"kind": "common_mode", "rank": 1}]
    for name, text in {"a.toml": TOML, "a.json": json.dumps(listed), "b.json": json.dumps({"fault": listed})}.items():
        (tmp_path / name).write_text(text)
        assert load_faults(tmp_path / name) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read"),
        ('{"faults": []}', "has no list of faults"),
        ('[{"kind": "gremlin"}]', "kind: Input should be"),
        ('[{"kind": "corruption", "rnak": 3}]', "rnak: Extra inputs"),
        ('[{"kind": "corruption", "surface": "gradient"}]', "hidden has no fault in gradient; use output"),
        ('[{"kind": "slow_link", "rank": 3}]', "needs an other_rank"),
        ('[{"kind": "straggler", "step": 3, "until": 2}]', "must lie after"),
        ('[{"kind": "nondeterministic", "recipe": "state", "surface": "parameter_state"}]', "only read"),
    ],
)
def test_a_file_that_makes_no_sense_says_where(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_faults(path)


def test_the_report_in_words_and_in_json(tmp_path: Path) -> None:
    path = tmp_path / "faults.toml"
    path.write_text(TOML)
    words = CliRunner().invoke(app, [*LAYOUT, "--faults", str(path)])
    assert words.exit_code == 0, words.output
    for text in ("24 ranks: dp_replicate 3 x cp 2 x tp 4", "1 hits", "0 false alarms", "rank 5", "common mode"):
        assert text in words.output
    told = json.loads(CliRunner().invoke(app, [*LAYOUT, "--faults", str(path), "--json"]).output)
    assert (told["answers"], told["false_alarms"], told["sound"]) == ({"hit": 1, "miss": 1}, [], True)
    assert told["outcomes"][1]["boundary"].startswith("common mode")


def test_what_cannot_be_simulated_ends_with_2(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["simulate", "--ranks", "10", "--tp", "4"]).exit_code == 2
    assert CliRunner().invoke(app, [*LAYOUT, "--faults", str(tmp_path / "none.json")]).exit_code == 2
    path = tmp_path / "faults.json"
    path.write_text('[{"kind": "straggler", "rank": 24}]')
    assert CliRunner().invoke(app, [*LAYOUT, "--faults", str(path)]).exit_code == 2
