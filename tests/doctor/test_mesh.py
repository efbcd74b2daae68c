"""What a mesh can compare is said per recipe, from its sizes alone."""

import pytest
from typer.testing import CliRunner

from scout_core.cli import app
from scout_core.doctor.mesh import mesh_findings, parse_mesh


def told(text: str) -> dict[str, tuple[str, str, str]]:
    return {f.id.removeprefix("mesh-"): (f.severity, f.message, f.fix) for f in mesh_findings(parse_mesh(text))}


def test_replicas_give_a_majority_in_every_recipe() -> None:
    found, even = told("dp_replicate=5"), told("dp_replicate=4")
    assert {severity for severity, *_ in found.values()} == {"info"}
    assert all("5 peers along dp_replicate" in m and "up to 2 ranks" in m for _, m, _ in found.values())
    assert all("up to 1 rank " in m for _, m, _ in even.values())


def test_shards_without_replicas_compare_layers_and_own_their_state_alone() -> None:
    found = told("pp=2,dp_shard=4,tp=2")
    assert found["hidden"][0] == "info" and "4 peers along dp_shard" in found["hidden"][1]
    assert "lockstep with 1 partner (tp)" in found["hidden"][1]
    assert "first stage only" in found["embedding"][1] and "last stage only" in found["output"][1]
    assert found["state"][0] == "warning" and "at_rest" in found["state"][1] and "HSDP" in found["state"][2]
    assert found["optimizer"][0] == "warning" and "recomputed by its 3 peers" in found["optimizer"][1]


@pytest.mark.parametrize("text", ["tp=8", "pp=4,tp=2", "cp=2,dp_replicate=1"])
def test_a_mesh_without_peers_says_so_for_each_recipe(text: str) -> None:
    for severity, message, fix in told(text).values():
        assert severity == "warning" and "no rank has a peer" in message and "dp_replicate=3" in fix


def test_two_replicas_are_offered_the_reference_only_where_it_works() -> None:
    alone, together = told("dp_replicate=2"), told("dp_replicate=2,tp=2")
    assert all("THAT they differ" in message for _, message, _ in alone.values())
    assert "tie_break" in alone["hidden"][2] and "tie_break" not in alone["state"][2]
    assert "tie_break" not in together["hidden"][2]


@pytest.mark.parametrize("text", ["", "tp", "tp=x", "dp=4", "tp=2,tp=2", "tp=0"])
def test_what_is_no_mesh_is_refused_with_the_fix(text: str) -> None:
    with pytest.raises(ValueError, match=r"name=size|use |once|at least 1"):
        parse_mesh(text)
    answer = CliRunner().invoke(app, ["doctor", "--mesh", text])
    assert answer.exit_code == 2


def test_the_command_prints_it_and_its_exit_code_says_whether_something_is_missing() -> None:
    good = CliRunner().invoke(app, ["doctor", "--mesh", "dp_replicate=4"])
    assert good.exit_code == 0 and "4 peers along dp_replicate" in " ".join(good.output.split())
    assert CliRunner().invoke(app, ["doctor", "--mesh", "tp=8"]).exit_code == 1
