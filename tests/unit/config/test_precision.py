"""`train.precision: auto`: what it comes to by the hardware, and that a run directory keeps it."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from resilient import precision, worker
from resilient.config import Config, load, write
from resilient.precision import choose, cpu_flags, from_ampere_on, settled

ROOT = Path(__file__).parents[3]

AMX = "amx_tile amx_int8 amx_bf16"


def x86(flags: str, processors: int = 2) -> str:
    """`/proc/cpuinfo` of a machine whose processors have these features."""
    each = "processor\t: {}\nvendor_id\t: GenuineIntel\nmodel name\t: a CPU\nflags\t\t: fpu sse2 avx2 {}\nbugs\t\t: amx_bf16\n\n"
    return "".join(each.format(number, flags) for number in range(processors))


def amd(family: int, flags: str) -> str:
    each = f"vendor_id\t: AuthenticAMD\ncpu family\t: {family}\nmodel\t\t: 2\nflags\t\t: fpu {flags}\n\n"
    return each * 2


def arm(features: str) -> str:
    return f"processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd {features}\nCPU implementer\t: 0x41\n\n"


@dataclass
class Machine:
    """Hardware, and what `auto` must come to on it."""

    name: str
    comes_to: str
    cpuinfo: str = ""
    gpus: int = 0
    device_ids: tuple[int, ...] = ()


MACHINES = [
    Machine("AVX2 alone (Zen 3)", "fp32", x86("")),
    Machine("AVX-512 without BF16 (Skylake)", "fp32", x86("avx512f avx512vl")),
    Machine("AVX512-BF16 without AMX (Zen 4)", "fp32", x86("avx512f avx512_bf16")),
    Machine("AMX (Sapphire Rapids)", "bf16", x86(f"avx512f avx512_bf16 {AMX}")),
    Machine("AVX512-BF16 in full width (Zen 5)", "bf16", amd(26, "avx512f avx512_bf16")),
    Machine("Zen 4, which is AMD's as well", "fp32", amd(25, "avx512f avx512_bf16")),
    Machine("Zen 5 whose AVX-512 the hypervisor hides", "fp32", amd(26, "avx2")),
    Machine("a family of that number of another vendor", "fp32", amd(26, "avx512_bf16").replace("AuthenticAMD", "GenuineIntel")),
    Machine("AMX for integers alone", "fp32", x86("avx512_bf16 amx_tile amx_int8")),
    Machine("AMX whose tiles the hypervisor hides", "fp32", x86("avx512_bf16 amx_bf16")),
    Machine("AMX on one of two processors", "fp32", x86(AMX, 1) + x86("", 1)),
    Machine("Arm without BF16 (Neoverse N1)", "fp32", arm("asimdhp")),
    Machine("Arm with BF16 (Neoverse V2)", "fp32", arm("i8mm bf16 svebf16")),
    Machine("no /proc/cpuinfo", "fp32"),
    Machine("four A100", "bf16", x86(""), 4, (0x20B0,) * 4),
    Machine("RTX 3090", "bf16", x86(""), 1, (0x2204,)),
    Machine("H200", "bf16", x86(AMX), 1, (0x2335,)),
    Machine("B200", "bf16", x86(""), 8, (0x2901,) * 8),
    Machine("four V100", "fp32", x86(""), 4, (0x1DB5,) * 4),
    Machine("V100 beside a CPU with AMX, which does not compute", "fp32", x86(AMX), 1, (0x1DB1,)),
    Machine("T4", "fp32", x86(""), 1, (0x1EB8,)),
    Machine("GTX 1660", "fp32", x86(""), 1, (0x2184,)),
    Machine("one A100 in use, beside a card for the display", "bf16", x86(""), 1, (0x128B, 0x20B0)),
    Machine("both in use", "fp32", x86(""), 2, (0x128B, 0x20B0)),
    Machine("one of four H100 in a container that has all on its bus", "bf16", x86(""), 1, (0x2330,) * 4),
    Machine("slices of one A100", "bf16", x86(""), 7, (0x20B0,)),
    Machine("a GPU that the bus does not show", "bf16", x86(""), 1),
]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_bf16_is_chosen_where_the_hardware_multiplies_it_faster(machine: Machine):
    found = choose(gpus=machine.gpus, device_ids=machine.device_ids, cpuinfo=machine.cpuinfo)
    assert found.precision == machine.comes_to, found.why


def test_the_features_of_a_cpu_are_those_that_all_its_processors_have():
    assert cpu_flags(x86("a b", 1) + x86("b c", 1)) == {"fpu", "sse2", "avx2", "b"}
    assert cpu_flags("") == cpu_flags("flags\n") == frozenset()


@pytest.mark.parametrize(("first", "last", "fast"), [(0x1DB1, 0x1FFF, False), (0x2080, 0x217F, True), (0x2180, 0x21FF, False)])
def test_generations_of_gpus_end_where_their_device_ids_do(first: int, last: int, fast: bool):
    assert from_ampere_on(first) is from_ampere_on(last) is fast
    assert from_ampere_on(0x2200)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes this machine another one: its CPU, and its GPUs by class and device id."""

    def become(cpuinfo: str, gpus: int = 0, bus: tuple[tuple[str, str], ...] = ()) -> None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
        for number, (kind, device_id) in enumerate(bus):
            device = tmp_path / f"bus/{number}"
            device.mkdir(parents=True)
            for name, text in (("vendor", "0x10de"), ("class", kind), ("device", device_id)):
                (device / name).write_text(f"{text}\n")
        monkeypatch.setattr(precision, "CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(precision, "PCI_DEVICES", tmp_path / "bus")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))

    return become


def config(run_dir: Path, **sections: object) -> Config:
    return Config.model_validate({"run_dir": str(run_dir), **sections})


def test_the_machine_decides_what_is_left_to_it(tmp_path: Path, here):
    here(x86(AMX))
    assert settled(config(tmp_path))[0].train.precision == "bf16"
    here(x86("avx512_bf16"))
    found, choice = settled(config(tmp_path))
    assert (found.train.precision, choice.why if choice else "") == ("fp32", "the CPU has no AMX, so that bf16 would be no faster")


def test_gpus_decide_unless_ranks_compute_on_the_cpu(tmp_path: Path, here):
    here(x86(""), 1, (("0x030200", "0x2330"), ("0x040300", "0x10fa"), ("0x068000", "0x22a3")))  # a GPU, its sound, a switch
    assert settled(config(tmp_path))[0].train.precision == "bf16"
    assert settled(config(tmp_path, cluster={"device": "cpu"}))[0].train.precision == "fp32"


def test_a_gpu_without_bf16_is_seen_on_the_bus(tmp_path: Path, here):
    here(x86(AMX), 1, (("0x030200", "0x1db1"), ("0x068000", "0x22a3")))
    assert settled(config(tmp_path))[0].train.precision == "fp32"


@pytest.mark.parametrize("named", ["bf16", "fp32"])
def test_a_precision_that_is_named_is_left_alone(tmp_path: Path, here, named: str):
    write(config(tmp_path, train={"precision": "bf16" if named == "fp32" else "fp32"}), tmp_path / "config.yaml")
    for cpuinfo in (x86(AMX), x86("")):
        here(cpuinfo)
        wanted = config(tmp_path, train={"precision": named})
        assert settled(wanted) == (wanted, None)


def test_a_run_keeps_its_precision_on_another_machine(tmp_path: Path, here):
    here(x86(AMX))
    first, _ = settled(config(tmp_path))
    write(first, tmp_path / "config.yaml")
    here(x86(""))
    again, choice = settled(config(tmp_path))
    assert again == first
    assert choice is not None
    assert choice.why == "kept from the run directory"
    assert load(tmp_path / "config.yaml").train.precision == "bf16"


@pytest.mark.parametrize("text", ["", "train", "train: {}", "train: {precision: auto}", "train: {precision: [bf16]}", "{", "\xff"])
def test_a_run_directory_that_names_no_precision_leaves_it_to_the_machine(tmp_path: Path, here, text: str):
    here(x86(AMX))
    (tmp_path / "config.yaml").write_bytes(text.encode("latin-1"))
    assert settled(config(tmp_path))[0].train.precision == "bf16"


def test_without_a_supervisor_it_is_decided_and_recorded_too(tmp_path: Path, here):
    path = tmp_path / "mine.yaml"
    path.write_text(f"run_dir: {tmp_path}/run\n")
    here(x86(AMX))
    found = worker.load_config(path)
    assert found.train.precision == "bf16"
    worker.record_config(found)
    here(x86(""))
    assert worker.load_config(path).train.precision == "bf16"
    assert worker.decided_here(load(path)).train.precision == "bf16"
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["train"]["precision"] == "bf16"


def test_the_quickstart_names_no_precision_and_leaves_it_to_the_machine():
    assert load(ROOT / "examples/quickstart.yaml").train.precision == "auto"


def test_the_precision_is_decided_without_torch():
    code = "import sys, resilient.precision as p, resilient.config as c; p.settled(c.Config()); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
