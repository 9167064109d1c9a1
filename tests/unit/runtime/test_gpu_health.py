"""The health of GPUs: what nvidia-smi and NVML say, and how it is judged."""

import os
import sys
import types
from pathlib import Path

import pytest

from resilient.health import gpus
from resilient.health.gpus import BASIC, HEALTH, Gpu

GIB = 1 << 30
FIELDS = (*BASIC, *HEALTH)
WELL = "0, GPU-6fa3, NVIDIA A100-SXM4-80GB, 0, No, Not Active, Not Active, 34, 5\n"
CONSUMER = "0, GPU-11, NVIDIA GeForce RTX 4090, [N/A], [N/A], Not Active, Not Active, 41, 700\n"


def test_what_nvidia_smi_prints_is_understood():
    (gpu,) = gpus.parse(WELL, FIELDS)
    assert gpu == Gpu(0, "GPU-6fa3", "NVIDIA A100-SXM4-80GB", 0, False, None, False, 34, 5 << 20)
    (gpu,) = gpus.parse(CONSUMER, FIELDS)
    assert (gpu.uncorrected, gpu.pending, gpu.slowed) == (None, None, False)
    (gpu,) = gpus.parse("1, GPU-7, NVIDIA H100\n", BASIC)
    assert (gpu.index, gpu.slowed) == (1, None)


@pytest.mark.parametrize(
    ("line", "verdict", "words"),
    [
        pytest.param(WELL, None, "", id="well"),
        pytest.param(CONSUMER, None, "", id="without ECC"),
        pytest.param("0, GPU-6, A100, 3, No, Not Active, Not Active, 34, 5", "fail", "3 uncorrected memory errors", id="ecc"),
        pytest.param("0, GPU-6, A100, 0, No, Not Active, Not Active, 34, 5, 8, 16", "warn", "8 lanes of 16", id="PCIe width"),
        pytest.param("0, GPU-6, A100, 0, No, Not Active, Not Active, 34, 5, 16, 16", None, "", id="PCIe as it should be"),
        pytest.param("0, GPU-6, A100, 0, Yes, Not Active, Not Active, 34, 5", "warn", "next reset", id="retired pages pending"),
        pytest.param("0, GPU-6, A100, 0, No, Not Active, Active, 91, 5", "warn", "slows it down at 91 °C", id="hot"),
        pytest.param("0, GPU-6, A100, 0, No, Not Active, Not Active, 34, 71000", "warn", "69.3 GiB", id="in use"),
    ],
)
def test_a_gpu_is_judged_by_its_health(line: str, verdict: str | None, words: str):
    *sick, count = gpus.judge(gpus.parse(line, FIELDS), needed=1)
    assert count.verdict == "ok"
    assert [finding.verdict for finding in sick] == ([verdict] if verdict else [])
    assert all(finding.check == "GPU 0" and words in finding.text for finding in sick)


def test_a_gpu_with_fewer_nvlinks_than_its_peers_fails():
    peers = [Gpu(number, f"GPU-{number}", "H100", nvlinks=18) for number in range(3)]
    lame = Gpu(3, "GPU-3", "H100", nvlinks=17)
    *sick, count = gpus.judge([*peers, lame], needed=4)
    assert [(each.check, each.verdict) for each in sick] == [("GPU 3", "fail")] and count.verdict == "ok"
    assert len(list(gpus.judge([*peers, Gpu(3, "GPU-3", "GT 710")], needed=4))) == 1, "another kind has none"


def test_the_next_ranks_wait_for_the_memory_of_a_killed_process(monkeypatch: pytest.MonkeyPatch):
    mine, answers = os.getpid(), [{os.getpid(): 70 * GIB}, {os.getpid(): 70 * GIB}, {4711: GIB}]
    monkeypatch.setattr(gpus, "_holders", lambda: answers.pop(0))
    (freed,) = gpus.freed([mine], 30.0)
    assert freed.verdict == "ok" and not answers, "the driver has said so"
    monkeypatch.setattr(gpus, "_holders", lambda: {mine: 70 * GIB})
    (held,) = gpus.freed([mine], 0.1)
    assert held.verdict == "fail" and f"process {mine} does not end, and holds 70.0 GiB" in held.text
    monkeypatch.setattr(gpus, "_holders", lambda: None)
    assert [each.verdict for each in gpus.freed([mine], 0.1)] == ["fail"], "nobody can tell, and it is still there"
    assert [each.verdict for each in gpus.freed([1 << 30], 0.1)] == ["ok"], "a process that is gone holds nothing"


def test_gpus_that_a_cgroup_keeps_away_do_not_count_and_instances_do():
    module = nvml(nvmlDeviceGetCount=3)
    given = module.nvmlDeviceGetHandleByIndex

    def handle(index: int) -> object:
        if index == 0:
            raise NoSuchThing("Insufficient Permissions", 4)
        return given()

    module.nvmlDeviceGetHandleByIndex = handle
    assert [gpu.index for gpu in gpus.by_nvml(module)] == [0, 1], "as CUDA counts those that are left"
    (whole,) = gpus.by_nvml(nvml())
    found = gpus.visible([whole], "MIG-11aa,MIG-22bb")
    assert [gpu.uuid for gpu in found] == ["MIG-11aa", "MIG-22bb"]
    assert [each.verdict for each in gpus.judge(found, needed=2)] == ["ok"]


def one_lost(question: str) -> types.SimpleNamespace:
    """Four GPUs, the second of which is off the bus, and answers this question, and those behind it, with that."""
    module = nvml(nvmlDeviceGetCount=4)
    module.nvmlDeviceGetHandleByIndex = str
    given = getattr(module, question)

    def answer(gpu: object, *more: object) -> object:
        if gpu in (1, "1"):
            raise NoSuchThing("GPU is lost", 15)
        return given(gpu, *more)

    setattr(module, question, answer)
    return module


@pytest.mark.parametrize("question", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"])
@pytest.mark.parametrize("chosen", [None, "0,1,2,3"])
def test_a_gpu_that_is_off_the_bus_keeps_its_place_and_costs_its_rank_alone(question: str, chosen: str | None):
    found = gpus.visible(gpus.by_nvml(one_lost(question)), chosen)
    assert [each.verdict for each in gpus.judge(found, 4, (0, 2, 3))] == ["ok"]
    sick, _ = gpus.judge(found, 4)
    assert (sick.verdict, sick.check, sick.device) == ("fail", "GPU 1", 1) and "GPU is lost" in sick.text


def test_a_gpu_that_is_off_the_bus_keeps_its_place_among_uuids():
    module = one_lost("nvmlDeviceGetHandleByIndex")
    module.nvmlDeviceGetUUID = lambda gpu: f"GPU-{gpu}a"
    found = gpus.visible(gpus.by_nvml(module), "GPU-0a,GPU-1a,GPU-2a,GPU-3a")
    assert [gpu.index for gpu in found] == [0, 1, 2, 3]
    assert len(gpus.visible(gpus.by_nvml(nvml()), "GPU-1,GPU-2")) == 1, "CUDA ends the list where nothing is lost"


SMI = """#!/bin/sh
lost() { echo "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost"; exit 15; }
case "$*" in
  *"-i 1 "*) lost;;
  *"-i 3 "*) exit 4;;
  *"-i "[0-9]*) echo "$2, GPU-$2, NVIDIA H100";;
  *) lost;;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command nvidia-smi of a machine with four GPUs, to be written; there is no pynvml."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpus, "installed", lambda: 4)
    command = tmp_path / "nvidia-smi"
    command.touch(0o755)
    return command


def test_where_nvidia_smi_fails_each_gpu_is_asked_by_itself(smi: Path):
    smi.write_text(SMI)
    found = gpus.read()
    assert found is not None
    assert [(gpu.index, gpu.uuid, bool(gpu.lost)) for gpu in found] == [(0, "GPU-0", False), (1, "", True), (2, "GPU-2", False)]
    smi.write_text("#!/bin/sh\necho no driver; exit 9\n")
    with pytest.raises(RuntimeError, match="nvidia-smi ended with status 9: no driver"):
        gpus.read()


def test_an_nvidia_smi_that_hangs_with_a_gpu_is_given_up(smi: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpus, "ALL_S", 0.5)
    monkeypatch.setattr(gpus, "ONE_S", 0.5)
    smi.write_text(SMI.replace("lost;;", "exec sleep 600;;"))
    found = gpus.read()
    assert found is not None
    assert [(gpu.index, gpu.lost) for gpu in found] == [(0, ""), (1, "no answer within 0.5 s"), (2, "")]
    (held,) = gpus.freed([os.getpid()], 0.1)
    assert held.verdict == "fail" and "may hold memory" in held.text


def test_who_holds_memory_of_gpus_is_understood():
    assert gpus.parse_holders("4242, 70123\n4242, 5\n77, [N/A]\n") == {4242: 70128 << 20, 77: 0}
    process = types.SimpleNamespace(pid=4242, usedGpuMemory=GIB)
    assert gpus.holders_by_nvml(nvml(nvmlDeviceGetComputeRunningProcesses=[process])) == {4242: GIB}
    assert gpus.holders_by_nvml(nvml(nvmlInit=None)) is None


def test_gpus_that_no_rank_uses_may_be_sick_and_too_few_fail():
    found = gpus.parse(WELL + WELL.replace("0, GPU-6fa3", "1, GPU-7b").replace(", 0, No", ", 9, No"), FIELDS)
    assert [each.verdict for each in gpus.judge(found, needed=1)] == ["ok"]
    assert [each.verdict for each in gpus.judge(found, needed=2)] == ["fail", "ok"]
    (finding,) = gpus.judge(found, needed=4)
    assert finding.verdict == "fail" and "2 can be seen, and 4 are needed" in finding.text


@pytest.mark.parametrize(
    ("chosen", "indices"), [(None, [0, 1]), ("1,0", [1, 0]), ("GPU-7", [1]), ("", []), ("-1", []), ("0,5,1", [0]), ("1, 0", [1, 0])]
)
def test_cuda_visible_devices_chooses_as_cuda_reads_it(chosen: str | None, indices: list[int]):
    found = [Gpu(0, "GPU-6fa3", "A100"), Gpu(1, "GPU-7b", "A100")]
    assert [gpu.index for gpu in gpus.visible(found, chosen)] == indices


class NoSuchThing(Exception):
    """What NVML raises."""

    def __init__(self, text: str, value: int = 3) -> None:
        super().__init__(text)
        self.value = value


def nvml(**answers: object) -> types.SimpleNamespace:
    """What stands for the module pynvml where there is no NVIDIA driver: one GPU; a question without an answer raises."""

    def refuse(*_: object) -> None:
        raise NoSuchThing("Not Supported")

    def answer(value: object):
        return refuse if value is None else lambda *_: value

    questions = {
        "nvmlInit": 0,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetUUID": "GPU-1",
        "nvmlDeviceGetName": b"A100",
        "nvmlDeviceGetTotalEccErrors": None,
        "nvmlDeviceGetRemappedRows": None,
        "nvmlDeviceGetRetiredPagesPendingStatus": None,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 1,
        "nvmlDeviceGetTemperature": 40,
        "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(used=1 << 20),
        "nvmlDeviceGetCurrPcieLinkWidth": None,
        "nvmlDeviceGetMaxPcieLinkWidth": None,
        "nvmlDeviceGetNvLinkState": None,
    }
    constants = {
        "NVMLError": NoSuchThing,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
        "NVML_VOLATILE_ECC": 0,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlClocksThrottleReasonHwSlowdown": 8,
    }
    return types.SimpleNamespace(**{name: answer(value) for name, value in {**questions, **answers}.items()}, **constants)


def test_nvml_tells_what_it_knows_and_the_rest_is_unknown():
    (gpu,) = gpus.by_nvml(nvml())
    assert gpu == Gpu(0, "GPU-1", "A100", None, None, None, False, 40, 1 << 20)
    answers = {
        "nvmlDeviceGetTotalEccErrors": 2,
        "nvmlDeviceGetRemappedRows": (0, 1, True, True),
        "nvmlDeviceGetCurrentClocksThrottleReasons": 9,
        "nvmlDeviceGetCurrPcieLinkWidth": 8,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetNvLinkState": 1,
    }
    (gpu,) = gpus.by_nvml(nvml(**answers))
    assert (gpu.pcie_width, gpu.pcie_width_max, gpu.nvlinks) == (8, 16, 18)
    assert (gpu.uncorrected, gpu.pending, gpu.unmappable, gpu.slowed) == (2, True, True, True)
    assert [each.verdict for each in gpus.judge([gpu], 1)] == ["fail", "ok"]
    with pytest.raises(RuntimeError, match="NVML does not start"):
        gpus.by_nvml(nvml(nvmlInit=None))
