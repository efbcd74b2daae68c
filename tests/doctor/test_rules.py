"""Findings from facts: every rule by table, and what must hold for any set of facts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.doctor import RankFacts, diagnose
from scout_core.doctor.agreement import differences
from scout_core.doctor.findings import exit_code, rank_text
from scout_core.doctor.rules import peer_finding

VERSIONS = {
    "scout": "0.1.0", "torch": "2.13.0", "cuda": "13.0", "cudnn": "91200", "nccl": "2.28.3", "triton": "3.5.0",
    "python": "3.11.7", "driver": "580.95", "kernel": "6.8", "cpu_model": "Xeon", "cpu_isa": "AVX512", "pynvml": "13.0",
}  # fmt: skip
SETTINGS = {
    "deterministic_algorithms": "on", "matmul_precision": "highest", "cudnn_tf32": "off", "cudnn_benchmark": "off",
    "reduced_precision": "no", "sdp_kernels": "flash", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def job(count: int = 4, *, gpu: bool = False) -> list[RankFacts]:
    """A job with nothing to repair, on one host with a core and, if wanted, a device for each rank."""
    return [
        RankFacts(
            rank=rank,
            world_size=count,
            in_job=True,
            in_script=True,
            host="host0",
            device=f"cuda:{rank}" if gpu else "cpu",
            device_name="H200" if gpu else "",
            device_uuid=f"GPU-{rank}" if gpu else None,
            devices_visible=count if gpu else 0,
            backend="nccl" if gpu else "gloo",
            backends=("gloo", "nccl") if gpu else ("gloo",),
            cores=tuple(range(count)),
            threads=1,
            versions=VERSIONS,
            settings=SETTINGS,
        )
        for rank in range(count)
    ]


def change(facts: list[RankFacts], rank: int, **fields: object) -> list[RankFacts]:
    """The job with one rank's fields changed; a dict is merged into the mapping of that name."""
    own = facts[rank]
    merged = {k: {**getattr(own, k), **v} if isinstance(v, dict) else v for k, v in fields.items()}
    return [replace(f, **merged) if f.rank == rank else f for f in facts]


def repairs(facts: list[RankFacts]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {f.id: (f.severity, f.ranks) for f in diagnose(facts) if f.severity != "info"}


@pytest.mark.parametrize("gpu", [False, True])
def test_a_uniform_job_has_nothing_to_repair(gpu):
    findings = diagnose(job(gpu=gpu))
    assert repairs(job(gpu=gpu)) == {}
    assert exit_code(findings) == 0
    assert [f.id for f in findings] == ["peers"]


@pytest.mark.parametrize(
    ("key", "on_cpu", "on_gpu"),
    [
        ("scout", "fatal", "fatal"),
        ("torch", "fatal", "fatal"),
        ("cuda", "warning", "fatal"),
        ("cudnn", "info", "fatal"),
        ("nccl", "info", "warning"),
        ("triton", "info", "warning"),
        ("python", "warning", "warning"),
        ("driver", "info", "warning"),
        ("kernel", "info", "info"),
        ("cpu_model", "warning", "info"),
        ("cpu_isa", "fatal", "info"),
    ],
)
@pytest.mark.parametrize("gpu", [False, True])
def test_another_version_on_rank_2_names_rank_2(key, on_cpu, on_gpu, gpu):
    found = differences(change(job(gpu=gpu), 2, versions={key: "9.9"}))
    assert [(f.id, f.severity, f.ranks) for f in found] == [
        (f"version-{key.replace('_', '-')}", on_gpu if gpu else on_cpu, (2,))
    ]
    assert f"{VERSIONS[key]} on ranks 0-1, 3; 9.9 on rank 2" in found[0].message
    assert found[0].fix


@pytest.mark.parametrize(
    ("key", "on_cpu", "on_gpu"),
    [
        ("matmul_precision", "fatal", "fatal"),
        ("cudnn_tf32", "info", "fatal"),
        ("reduced_precision", "info", "fatal"),
        ("sdp_kernels", "info", "fatal"),
        ("deterministic_algorithms", "warning", "warning"),
        ("cudnn_benchmark", "info", "warning"),
        ("CUBLAS_WORKSPACE_CONFIG", "info", "fatal"),
        ("NVIDIA_TF32_OVERRIDE", "info", "fatal"),
        ("ATEN_CPU_CAPABILITY", "fatal", "info"),
        ("MKL_CBWR", "fatal", "info"),
        ("NCCL_ALGO", "info", "warning"),
        ("NCCL_PROTO", "info", "warning"),
        ("OMP_NUM_THREADS", "warning", "info"),
    ],
)
@pytest.mark.parametrize("gpu", [False, True])
def test_another_setting_on_rank_1_names_rank_1(key, on_cpu, on_gpu, gpu):
    found = differences(change(job(gpu=gpu), 1, settings={key: "other"}))
    assert [(f.severity, f.ranks) for f in found] == [(on_gpu if gpu else on_cpu, (1,))]
    assert found[0].fix


def test_a_value_that_one_rank_lacks_is_shown_as_absent():
    (found,) = differences(change(job(), 3, versions={"triton": None}))
    assert "absent on rank 3" in found.message


def test_without_a_majority_all_ranks_are_named():
    facts = change(change(job(), 0, versions={"torch": "2.12.0"}), 1, versions={"torch": "2.12.0"})
    assert repairs(facts)["version-torch"] == ("fatal", (0, 1, 2, 3))


def test_threads_differ_without_the_variable_differing():
    facts = change([replace(f, cores=tuple(range(16))) for f in job()], 3, threads=4)
    assert repairs(facts) == {"setting-threads": ("warning", (3,))}


def test_threads_that_the_variable_explains_are_told_once():
    facts = change([replace(f, cores=tuple(range(16))) for f in job()], 3, threads=4, settings={"OMP_NUM_THREADS": "4"})
    assert repairs(facts) == {"setting-omp-num-threads": ("warning", (3,))}


def test_mixed_devices():
    assert repairs(change(job(gpu=True), 2, device_name="H100")) == {"kind-device": ("fatal", (2,))}


def test_ranks_that_did_not_answer_are_named():
    assert repairs([f for f in job() if f.rank not in (1, 2)])["rank-missing"] == ("fatal", (1, 2))


def test_old_torch():
    facts = [replace(f, versions={**VERSIONS, "torch": "2.9.1+cu128"}) for f in job()]
    assert repairs(facts) == {"torch-old": ("fatal", (0, 1, 2, 3))}


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "3.0.0", "2.11.0a0+git"])
def test_torch_that_is_new_enough(version):
    assert repairs([replace(f, versions={**VERSIONS, "torch": version}) for f in job()]) == {}


def test_missing_backends():
    assert repairs(change(job(), 1, backends=())) == {"backend-gloo": ("fatal", (1,))}
    assert repairs(change(job(gpu=True), 1, backends=("gloo",))) == {"backend-nccl": ("warning", (1,))}


@pytest.mark.parametrize(("backend", "severity"), [("nccl", "fatal"), ("gloo", "warning")])
def test_two_ranks_on_one_device(backend, severity):
    facts = [replace(f, backend=backend) for f in change(job(gpu=True), 3, device_uuid="GPU-1")]
    assert repairs(facts) == {"device-shared": (severity, (1, 3))}


def test_equal_ordinals_on_two_hosts_are_two_devices():
    facts = [replace(f, device_uuid=None) for f in job(gpu=True)]
    facts = change(facts, 3, device="cuda:0", host="host1")
    assert "device-shared" not in repairs(facts)


def test_two_mig_instances_of_one_gpu_are_two_devices():
    facts = [replace(f, device_uuid="GPU-0", mig_uuid=f"MIG-{f.rank}") for f in job(gpu=True)]
    assert "device-shared" not in repairs(facts)


def test_a_driver_without_a_usable_gpu():
    assert repairs(change(job(), 0, gpu_driver_loaded=True)) == {"device-unusable": ("warning", (0,))}


def test_strict_determinism_needs_the_cublas_variable():
    facts = [replace(f, strict_determinism=False) for f in job(gpu=True)]
    facts = [replace(f, settings={**SETTINGS, "CUBLAS_WORKSPACE_CONFIG": None}) for f in facts]
    (found,) = [f for f in diagnose(facts) if f.id == "cublas-workspace"]
    assert found.severity == "warning" and found.ranks == (0, 1, 2, 3)
    assert "not set" in found.message and "CUBLAS_WORKSPACE_CONFIG=:4096:8" in found.fix


@pytest.mark.parametrize(
    ("setting", "value", "finding"),
    [
        ("deterministic_algorithms", "off", "live-determinism"),
        ("matmul_precision", "high", "tf32"),
        ("cudnn_benchmark", "on", "cudnn-benchmark"),
    ],
)
def test_flags_that_are_worth_knowing(setting, value, finding):
    facts = [replace(f, settings={**SETTINGS, setting: value}) for f in job(gpu=True)]
    assert finding in {f.id for f in diagnose(facts) if f.severity == "info"}
    assert finding not in {f.id for f in diagnose([replace(f, in_script=False) for f in facts])}


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "severity"),
    [(4, 1, 4, None), (4, 2, 4, "warning"), (4, 1, 2, "info"), (1, 8, 4, None), (2, 8, 16, None)],
)
def test_crowded_cores(ranks, threads, cores, severity):
    facts = [replace(f, threads=threads, cores=tuple(range(cores))) for f in job(ranks)]
    found = {f.id: f.severity for f in diagnose(facts)}
    assert found.get("cores-crowded") == severity


def test_ranks_pinned_to_cores_of_their_own_are_not_crowded():
    facts = [replace(f, threads=2, cores=(2 * f.rank, 2 * f.rank + 1)) for f in job()]
    assert repairs(facts) == {}


def test_optional_parts_on_cuda():
    facts = [replace(f, versions={**VERSIONS, "triton": None, "pynvml": None}) for f in job(gpu=True)]
    assert set(repairs(facts)) == {"triton-missing", "nvml-missing"}
    cpu = [replace(f, versions={**VERSIONS, "triton": None, "pynvml": None}) for f in job()]
    assert repairs(cpu) == {}


@pytest.mark.parametrize(
    ("peers", "severity", "words"),
    [
        (1, "warning", "nothing can be checked"),
        (2, "warning", "nothing tells which of them is wrong"),
        (3, "info", "up to 1 rank at fault"),
        (4, "info", "up to 1 rank at fault"),
        (5, "info", "up to 2 ranks at fault"),
    ],
)
def test_what_peers_can_tell(peers, severity, words):
    finding = peer_finding(peers)
    assert finding.severity == severity and words in finding.message
    assert exit_code(diagnose(job(peers))) == (severity != "info")


@pytest.mark.parametrize("devices", [0, 1, 2, 8])
def test_a_machine_without_a_job_is_never_wrong_for_having_few_devices(devices):
    machine = replace(job(1, gpu=devices > 0)[0], in_job=False, in_script=False, devices_visible=devices)
    assert exit_code(diagnose([machine])) == 0


def test_rank_text():
    assert rank_text((2,)) == "rank 2"
    assert rank_text((5, 0, 1, 2)) == "ranks 0-2, 5"


FACTS = st.lists(
    st.tuples(st.sampled_from(["2.12", "2.13", None]), st.sampled_from(["1", "2", None]), st.booleans()),
    min_size=1,
    max_size=7,
)


@given(FACTS, st.randoms(use_true_random=False))
def test_order_of_arrival_does_not_matter_and_the_gravest_comes_first(rows, random):
    facts = [
        replace(
            job(len(rows))[i], versions={**VERSIONS, "torch": torch}, settings={"OMP_NUM_THREADS": omp}, backends=back
        )
        for i, (torch, omp, gloo) in enumerate(rows)
        for back in [("gloo",) if gloo else ()]
    ]
    findings = diagnose(facts)
    shuffled = list(facts)
    random.shuffle(shuffled)
    assert diagnose(shuffled) == findings
    order = [["fatal", "warning", "info"].index(f.severity) for f in findings]
    assert order == sorted(order)
    assert len({f.id for f in findings}) == len(findings)
    assert all(set(f.ranks) <= set(range(len(rows))) for f in findings)
    assert all(f.fix for f in findings if f.severity != "info")


@given(st.lists(st.sampled_from("ab"), min_size=2, max_size=9))
def test_a_difference_names_the_minority_or_everyone(values):
    facts = [replace(f, versions={**VERSIONS, "torch": values[f.rank]}) for f in job(len(values))]
    found = [f for f in differences(facts) if f.id == "version-torch"]
    if len(set(values)) == 1:
        assert found == []
        return
    rare = min("ab", key=values.count)
    tied = values.count("a") == values.count("b")
    expected = tuple(i for i, value in enumerate(values) if tied or value == rare)
    assert found[0].ranks == expected


def test_facts_survive_json():
    for facts in job(gpu=True):
        assert RankFacts.from_json(facts.to_json()) == facts
