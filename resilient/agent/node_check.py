"""The check of the node, as the agent makes it once before it takes part: what is checked, and the message of what was found."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from resilient import visible_gpus
from resilient.agent.links import ports_of
from resilient.agent.settings import AgentSettings
from resilient.health.node import NodeSpec, tiers_of
from resilient.health.report import Report
from resilient.protocol.messages import Health, HealthFinding
from resilient.recovery.xids import Xid, numbered

log = logging.getLogger(__name__)

MEETING = "health-check"  # beside the heartbeat regions; whatever is no region goes when the next agent starts


def spec_of(
    settings: AgentSettings,
    described: Mapping[str, Any],
    regions: Path,
    gpu_faults: Sequence[Xid] = (),
    stuck: Sequence[int] = (),
    devices: Sequence[int] | None = None,
    *,
    sys: Path = Path("/sys"),
) -> NodeSpec:
    """What is checked.

    Args:
        described: see `resilient.storage.read`.
        regions: the node's directory of heartbeat regions.
        gpu_faults: since the last check.
        stuck: workers that were killed and have not ended.
        devices: that ranks computed on last; None: there were no ranks yet.
        sys: where sysfs is.
    """
    broken = {numbered(each, settings.gpus) for each in gpu_faults if each.unfit}
    used = range(settings.procs) if devices is None else devices
    working = tuple(device for device in used if device not in broken)
    return NodeSpec(
        devices=working,
        visible=visible_gpus.without(working, settings.procs) if settings.device == "cuda" else None,
        world=settings.world,
        device=settings.device,
        addr=settings.addr,
        tiers=tiers_of(described, settings.node),
        meeting=regions / MEETING,
        limit_s=settings.health_s,
        gpu_faults=tuple(gpu_faults),
        stuck=tuple(stuck),
        gpus=settings.gpus,
        rdma_ports=tuple(str(port) for port in ports_of(os.environ, sys=sys)),
    )


def message_of(report: Report) -> Health:
    """What is not good, for the driver and for the log."""
    unwell = [finding for finding in report.findings if not finding.good]
    log.info("health check: %d findings in %.2f s", len(report.findings), report.took_s)
    for each in unwell:
        log.warning("health check: %s: %s: %s", each.verdict, each.check, each.text)
    findings = (
        HealthFinding(check=each.check, verdict=each.verdict, text=each.text, measured=each.measured, device=each.device)
        for each in unwell
    )
    return Health(generation=0, took_s=report.took_s, findings=tuple(findings))
