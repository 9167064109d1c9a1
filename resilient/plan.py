"""`resilient plan`: what a config comes to, before a second of compute time is spent on it.

The runtime knows layout, timeouts and exit budget; what a rank holds is asked of the entry point's module: its function
`plan(config)`, where it has one, returns a mapping of titles to mappings of names to values.
"""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from resilient.config import Config, ConfigError, Layout, Problem
from resilient.driver.driver import DRAIN_S, FENCE_S
from resilient.policy import ordinal


def show(config: Config, layout: Layout) -> None:
    """Print the plan. Raises ConfigError if the entry point's module refuses the config."""
    sections: dict[str, Mapping[str, object]] = {"layout": runtime_layout(config, layout)}
    sections.update(_entry_plan(config))
    sections["time"] = timeouts(config)
    console = Console(highlight=False)
    for title, rows in sections.items():
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
        for name, value in rows.items():
            table.add_row(f"  {name}", str(value))
        console.print(table)


def runtime_layout(config: Config, layout: Layout) -> dict[str, object]:
    """Ranks and batches."""
    context = f"cp {layout.cp} × " if layout.cp > 1 else ""
    return {
        "world size": f"{layout.world_size} = tp {layout.tp} × {context}pp {layout.pp} × dp {layout.dp}",
        "nodes": f"{layout.nodes} with {layout.procs_per_node} ranks each, {layout.threads_per_proc} threads a rank",
        "global batch": (
            f"{config.train.global_batch_size} = micro batch {layout.micro_batch_size} × dp {layout.dp}"
            f" × {layout.accumulation} accumulated"
        ),
        "run directory": config.run_dir,
        "checkpoints": ", ".join(f"{tier.name}: {tier.path}" for tier in config.checkpoint.tiers),
    }


def timeouts(config: Config) -> dict[str, object]:
    """How long things may take before something is done about them."""
    resilience = config.resilience
    fence = FENCE_S if resilience.fence_s == "auto" else resilience.fence_s
    drain = DRAIN_S if resilience.drain_s == "auto" else resilience.drain_s
    return {
        "drain on SIGTERM, Ctrl-C": f"{drain:.0f} s, then workers are killed",
        "agent without its driver": f"kills its workers after {fence:.0f} s",
        "restarts": f"at most {resilience.max_restarts_per_hour} an hour",
        "same failure at the same step": f"gives up the {ordinal(resilience.give_up_after_same_step)} time",
    }


def _entry_plan(config: Config) -> Mapping[str, Mapping[str, object]]:
    name = config.entrypoint.partition(":")[0]
    sys.path.insert(0, str(Path.cwd()))  # where the ranks will look for it, too
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ConfigError([Problem(key="entrypoint", value=config.entrypoint, message=f"cannot be imported: {error}")]) from None
    hook = getattr(module, "plan", None)
    return hook(config) if hook is not None else {}
