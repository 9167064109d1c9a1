"""The check of the node, as the agent makes it once before it takes part: what is checked, and the message of what was found."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resilient.agent.settings import AgentSettings
from resilient.health.node import NodeSpec, tiers_of
from resilient.health.report import Report
from resilient.protocol.messages import Health, HealthFinding

log = logging.getLogger(__name__)

MEETING = "health-check"  # beside the heartbeat regions; whatever is no region goes when the next agent starts


def spec_of(settings: AgentSettings, described: Mapping[str, Any], regions: Path) -> NodeSpec:
    """What is checked. Args: described: see `resilient.storage.read`; regions: the node's directory of heartbeat regions."""
    return NodeSpec(
        procs=settings.procs,
        world=settings.world,
        device=settings.device,
        addr=settings.addr,
        tiers=tiers_of(described, settings.node),
        meeting=regions / MEETING,
        limit_s=settings.health_s,
    )


def message_of(report: Report) -> Health:
    """What is not good, for the driver and for the log."""
    unwell = [finding for finding in report.findings if not finding.good]
    log.info("health check: %d findings in %.2f s", len(report.findings), report.took_s)
    for each in unwell:
        log.warning("health check: %s: %s: %s", each.verdict, each.check, each.text)
    findings = (HealthFinding(check=each.check, verdict=each.verdict, text=each.text, measured=each.measured) for each in unwell)
    return Health(generation=0, took_s=report.took_s, findings=tuple(findings))
