"""`resilient doctor`: all checks of this machine, for a person.

Owns their order and the table. Tiers are measured one after the other, so that none slows another down; what computes comes after
them.
"""

import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from resilient import network, storage
from resilient.campaign import binding_here, gpu_count, machine_layout
from resilient.config import Config, Layout, load
from resilient.config.sections.machines import Network
from resilient.decided import decided
from resilient.health import disk, gpus, interfaces, machine
from resilient.health.bounded import Examination, Task
from resilient.health.node import compute_tasks
from resilient.health.quota import site_places
from resilient.health.report import Finding, Report, size
from resilient.json_output import print_json
from resilient.placement.applied import of_this_node
from resilient.placement.binding import NOWHERE, Binding, Share
from resilient.plan import checkpoint_size
from resilient.slurm.allocation import JOB

LOCAL = "127.0.0.1"
TIER_S = 20.0
GPU_S = 30.0
NUMBERS = 4 << 20  # in an all-reduce: enough for its speed to show


@dataclass(frozen=True)
class Subject:
    """What the machine is to be fit for.

    Attributes:
        ranks: on this machine.
        device: "cpu" or "cuda".
        binding: of its ranks.
        in_ram: the tier of snapshots in RAM, where there is one.
    """

    ranks: int
    device: str
    tiers: tuple[disk.TierSpec, ...]
    binding: Binding = NOWHERE
    in_ram: disk.TierSpec | None = None


def subject(path: Path | None, overrides: Sequence[str]) -> Subject:
    """What a config asks of this machine, which gets the variables for communication that it asks for; a guess without one.

    Raises:
        ConfigError: it is wrong.
    """
    if path is None:
        os.environ.update(network.environment(Network(), os.environ, one_machine=True))
        places = {"shm": machine.SHARED_MEMORY, "tmp": Path(tempfile.gettempdir()), "here": Path.cwd()}
        tiers = (*_of_the_site(), *(disk.TierSpec(name, place, quotas=True) for name, place in places.items()))
        ranks, device = gpu_count() or min(2, os.cpu_count() or 1), "cuda" if gpu_count() else "cpu"
        return Subject(ranks, device, tiers, of_this_node("auto", device, Share(0, ranks, ranks)))
    config, _ = decided(load(path, overrides))
    layout = machine_layout(config)
    os.environ.update(network.environment(config.network, os.environ, one_machine=True))
    on_gpu = gpu_count() > 0 and config.cluster.device != "cpu"
    binding = binding_here(config, layout, in_job=JOB in os.environ)
    tiers, in_ram = _tiers(config, layout, checkpoint_size(config))
    return Subject(layout.world_size, "cuda" if on_gpu else "cpu", (*_of_the_site(), *tiers), binding, in_ram)


def _of_the_site() -> list[disk.TierSpec]:
    return [disk.TierSpec(name, path, measured=False, quotas=True) for name, path in site_places(os.environ).items()]


def _tiers(config: Config, layout: Layout, one: tuple[int, int] | None) -> tuple[tuple[disk.TierSpec, ...], disk.TierSpec | None]:
    """The tiers as this machine, which stands for all nodes, must bear them; and the one of them that is in RAM.

    Args:
        one: bytes and files of one checkpoint, where they are known.
    """
    lie_in_ram = {tier.path: storage.lies_in_ram(tier.path) for tier in config.checkpoint.tiers}
    found = storage.arrange(config, layout.nodes, "", lie_in_ram)
    specs, in_ram = [], None
    for place in found.tiers:
        if place.kind == "durable":
            spec = disk.TierSpec(place.name, Path(place.roots[0]), held="step-*", held_newest=place.keep_last + 1, quotas=True)
        else:
            spec = disk.TierSpec(place.name, Path(place.roots[0]).parents[1], held=f"{config.name}-*", quotas=True)
        if one is not None:
            needed_bytes, needed_files = storage.needed(found, place, layout.nodes, one, layout.copies)
            times = len(place.roots)
            spec = replace(spec, needed_bytes=times * needed_bytes, needed_files=times * needed_files)
        if place.kind == "memory":
            in_ram = spec
        specs.append(spec)
    return tuple(specs), in_ram


def examine(checked: Subject, limit_s: float, *, quiet: bool) -> Report:
    """Check everything; takes `limit_s` at the most, and as long as the kernel takes to kill what hangs."""
    began = time.monotonic()
    console = Console(stderr=True)
    left_behind: list[int] = []
    with console.status("") as status:
        if quiet:
            status.stop()
        found = at_once(checked)

        def run(tasks: Sequence[Task]) -> None:
            left_s = max(0.0, limit_s - (time.monotonic() - began))
            examination = Examination(tasks, multiprocessing.get_context("spawn"), left_s)
            try:
                waiting = lambda: status.update(f"checking {', '.join(examination.pending)}")  # noqa: E731
                found.extend(examination.finish(waiting))
            finally:
                examination.close()
                left_behind.extend(examination.left_behind)

        for number, tier in enumerate(checked.tiers):
            durable = number == len(checked.tiers) - 1
            run([Task((tier.check, *(("clock",) if durable else ())), disk.check, (tier, durable), TIER_S)])
        run([Task((gpus.CHECK,), gpus.check, (checked.ranks,), GPU_S)] if checked.device == "cuda" else [])
        if checked.device == "cpu":
            found.append(Finding(gpus.CHECK, "skip", "none is used"))
        memory = machine.SHARED_MEMORY
        with tempfile.TemporaryDirectory(prefix="resilient-doctor-", dir=memory if os.access(memory, os.W_OK) else None) as meeting:
            run(compute_tasks(checked.ranks, checked.device, Path(meeting) / "store", limit_s, NUMBERS))
    return Report(tuple(found), time.monotonic() - began, tuple(left_behind))


def at_once(checked: Subject) -> list[Finding]:
    """What can be told without touching anything that may hang."""
    wires = interfaces.check(LOCAL)
    rdma = any(":" in finding.check for finding in wires)
    needed_bytes, held_bytes = (None, 0) if (tier := checked.in_ram) is None else (tier.needed_bytes, disk.held(tier)[0])
    host = socket.gethostname()
    by_name = replace(machine.reach(host), check="host name")
    return [
        *machine.judge_memory(machine.memory_of(), needed_bytes, held_bytes),
        judge_binding(checked.binding),
        *machine.judge_limits(machine.limits_of(), ranks=checked.ranks, world=checked.ranks, rdma=rdma),
        machine.reach(LOCAL),
        replace(by_name, verdict="warn") if not by_name.good else by_name,
        *wires,
    ]


def judge_binding(binding: Binding) -> Finding:
    """Ranks far from their GPU's memory are slower, and nothing else is wrong with them."""
    if not binding.bound:
        return Finding("binding", "skip", f"ranks run {binding}")
    return Finding("binding", "warn" if binding.why else "ok", str(binding))


# -- for people ----------------------------------------------------------------------------------------------------------

_WORDS = {"ok": ("ok", "green"), "warn": ("warning", "yellow"), "fail": ("FAILED", "bold red"), "skip": ("not looked at", "dim")}


def show(report: Report, *, as_json: bool) -> None:
    """Print it."""
    if as_json:
        print_json(report.as_json())
        return
    console = Console(highlight=False)
    table = Table("check", "verdict", "found", "measured", box=None, pad_edge=False, header_style="bold")
    for finding in merged(report.findings):
        word, style = _WORDS[finding.verdict]
        measured = ", ".join(_measured(name, value) for name, value in finding.measured.items())
        table.add_row(Text(finding.check), Text(word, style), Text(finding.text), Text(measured, "dim"))
    console.print(table)
    failed = [finding for finding in report.findings if finding.verdict == "fail"]
    about = (
        f"{len(failed)} of {len(report.findings)} checks failed" if failed else f"nothing failed in {len(report.findings)} checks"
    )
    console.print(f"{about}, {report.took_s:.1f} s")


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """With one row in place of those of ranks whose check is good."""
    rows: list[Finding] = []
    for finding in findings:
        kind, _, rank = finding.check.rpartition(" ")
        same = [each for each in findings if each.good and each.check.rpartition(" ")[0] == kind]
        if not (finding.good and rank.isdigit() and len(same) > 1):
            rows.append(finding)
        elif same[0] is finding:
            numbers = [each.check.rpartition(" ")[2] for each in same]
            rows.append(replace(finding, check=f"{kind} {numbers[0]}-{numbers[-1]}"))
    return rows


def _measured(name: str, value: float | int | str) -> str:
    """A number with its unit as a person reads it."""
    units: tuple[tuple[str, Callable[[float], str]], ...] = (
        ("_bytes_per_s", lambda v: f"{v / 2**20:,.0f} MiB/s"),
        ("_bytes", size),
        ("_gbit_s", lambda v: f"{v:g} Gbit/s"),
        ("_s", lambda v: f"{v * 1e3:,.1f} ms" if abs(v) < 1 else f"{v:,.1f} s"),
    )
    for suffix, form in units:
        if f"_{name}".endswith(suffix) and not isinstance(value, str):
            return f"{name.removesuffix(suffix).replace('_', ' ')} {form(value)}".strip().removeprefix("gbit s ")
    return f"{name.replace('_', ' ')} {value:,}" if isinstance(value, int) else f"{name.replace('_', ' ')} {value}"
