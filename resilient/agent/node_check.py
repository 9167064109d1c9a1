"""The check of the node, as the agent makes it once before it takes part: what is checked, and the message of what was found."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from resilient.agent.links import ports_of
from resilient.agent.settings import AgentSettings
from resilient.health.node import NodeSpec, tiers_of
from resilient.health.report import Report
from resilient.protocol.messages import Health, HealthFinding
from resilient.xids import Xid

log = logging.getLogger(__name__)

MEETING = "health-check"  # beside the heartbeat regions; whatever is no region goes when the next agent starts


def spec_of(
    settings: AgentSettings,
    described: Mapping[str, Any],
    regions: Path,
    gpu_faults: Sequence[Xid] = (),
    stuck: Sequence[int] = (),
    *,
    sys: Path = Path("/sys"),
) -> NodeSpec:
    """What is checked.

    Args:
        described: see `resilient.storage.read`.
        regions: the node's directory of heartbeat regions.
        gpu_faults: since the last check.
        stuck: workers that were killed and have not ended.
        sys: where sysfs is.
    """
    return NodeSpec(
        procs=settings.procs,
        world=settings.world,
        device=settings.device,
        addr=settings.addr,
        tiers=tiers_of(described, settings.node),
        meeting=regions / MEETING,
        limit_s=settings.health_s,
        gpu_faults=tuple(gpu_faults),
        stuck=tuple(stuck),
        rdma_ports=tuple(str(port) for port in ports_of(os.environ, sys=sys)),
    )


def message_of(report: Report) -> Health:
    """What is not good, for the driver and for the log."""
    unwell = [finding for finding in report.findings if not finding.good]
    log.info("health check: %d findings in %.2f s", len(report.findings), report.took_s)
    for each in unwell:
        log.warning("health check: %s: %s: %s", each.verdict, each.check, each.text)
    findings = (HealthFinding(check=each.check, verdict=each.verdict, text=each.text, measured=each.measured) for each in unwell)
    return Health(generation=0, took_s=report.took_s, findings=tuple(findings))
