"""Effects that take their time on a file system that may hang: the fence, quarantine, nodes to avoid, the chain, old logs, the
diagnosis.

Carried out by the disk process. Whoever waits for one of these is a task of its own, never the event loop; each wait has an end.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resilient import clock, storage
from resilient.config import Config
from resilient.config.timeouts import QUARANTINE_S
from resilient.driver.writer import Writer
from resilient.exits import Exit
from resilient.outbox import Finish, Quarantine, RaiseFence
from resilient.protocol.disk import (
    Answer,
    Diagnose,
    PackLogs,
    QuarantineCheckpoints,
    RaiseDurableFence,
    RememberBadNodes,
    SeeToSuccessor,
)
from resilient.slurm.allocation import Allocation
from resilient.slurm.blame import nodes_at_fault
from resilient.slurm.chain import GOES_ON
from resilient.slurm.succession import LAST_S

log = logging.getLogger(__name__)

MARGIN_S = 0.5
NOTE_S = 30.0
SUCCESSOR_S = 30.0  # at the end of a job
ENSURE_AGAIN_S = (1.0, 300.0)  # until the next job is asked for again, where that failed: at first, and at most
FOR_EVER_S = 7 * 86400.0
DIAGNOSIS_S = 5.0


@dataclass
class Durable:
    """Args:
    identity: of the campaign, as its durable tier has it.
    chain: name of the jobs of the chain that this job belongs to, if it does.
    """

    config: Config
    identity: str
    allocation: Allocation | None
    chain: str | None
    writer: Writer
    note: Callable[[str], None]
    _faults: list[Mapping[str, Any]] = field(default_factory=list)  # as the ledger has them
    _judged: bool = True  # the last one: whether a node is at fault
    _packing: bool = False
    _followed: bool = False  # the next job is there, or none is wanted

    async def raise_fence(self, effect: RaiseFence) -> str | None:
        """Close the durable tier to older generations; why that was not done."""
        root = self.config.checkpoint.tiers[-1].path
        answer = await self.writer.call(
            lambda number: RaiseDurableFence(
                call=number,
                root=str(root),
                mark=(storage.IDENTITY, self.identity),
                generation=effect.generation,
                patience_s=effect.patience_s,
            ),
            effect.patience_s + MARGIN_S,
            again=True,
        )
        return None if answer.error is None else f"{root}: {answer.error}"

    async def quarantine(self, effect: Quarantine) -> tuple[Sequence[tuple[int, str]], str | None]:
        """Rename what is invalidated on the durable tier: steps and their new names; why that was not done."""
        root = self.config.checkpoint.tiers[-1].path
        answer = await self.writer.call(
            lambda number: QuarantineCheckpoints(
                call=number,
                root=str(root),
                generation=effect.generation,
                invalidated=tuple((each.generation, each.step) for each in effect.invalidated),
            ),
            QUARANTINE_S,
            again=True,
        )
        return answer.renamed, answer.error

    def blamed(self, entry: Mapping[str, Any]) -> dict[str, str]:
        """Take in a line of the ledger; hosts that the next jobs are to do without from now on, each with the reason."""
        if entry["event"] == "fault":
            self._faults.append(entry)
            self._judged = False
        elif entry["event"] == "action" and not self._judged and entry["fault_id"] == self._faults[-1]["fault_id"]:
            self._judged = True
            if self.allocation is not None and self.config.slurm.bad_node_hours:
                found = nodes_at_fault(self._faults[-1], str(entry["name"]), self._faults[:-1])
                return {self.allocation.hosts[node]: reason for node, reason in found.items()}
        return {}

    async def avoid(self, reasons: Mapping[str, str]) -> None:
        """Have the next jobs do without these hosts."""
        hours = self.config.slurm.bad_node_hours
        answer = await self.writer.call(
            lambda number: RememberBadNodes(call=number, reasons=reasons, now=clock.now(), for_s=3600 * hours),
            NOTE_S,
            again=True,
        )
        if answer.error is not None:
            log.warning("nodes to be avoided could not be written down: %s", answer.error)
            return
        self.note(f"the next jobs do without {', '.join(reasons)} for {hours:g} hours")
        if self.chain is not None:
            await self._successor("avoid_bad_nodes", FOR_EVER_S)

    async def pack_logs(self) -> None:
        """Pack the logs and incidents of old generations, unless that is being done; however long it takes."""
        if self._packing:
            return
        self._packing = True
        try:
            answer = await self.writer.call(lambda number: PackLogs(call=number), FOR_EVER_S)
        finally:
            self._packing = False
        if answer.error is not None:
            log.warning("old logs could not be packed: %s", answer.error)

    async def ensure_successor(self) -> None:
        """Until it is there or none is wanted, however long it takes, and then no more: whoever cancels it by hand wants it gone.

        It is asked for again where that fails, as where the disk process dies meanwhile: what waits already is found in the queue.
        """
        pause_s, longest_s = ENSURE_AGAIN_S
        while (answer := await self._successor("ensure", FOR_EVER_S)).error is not None:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        self._followed = True
        if answer.text:
            self.note(f"no job will follow this one: {answer.text}")

    async def ended(self, code: Exit) -> None:
        """The job ends; what is not needed behind it goes. A next job that is not there is asked for a while longer."""
        if code in GOES_ON and not self._followed:
            await self._last_chance()
        await self._successor("ended", SUCCESSOR_S, code)

    async def _last_chance(self) -> None:
        answer = await self._successor("ensure", SUCCESSOR_S + MARGIN_S, patience_s=0.0)
        if answer.error is not None:
            self.note(f"the next job is not in the queue yet: it is asked for up to {LAST_S:.0f} s more ({answer.error})")
            answer = await self._successor("ensure", LAST_S + 2 * SUCCESSOR_S, patience_s=LAST_S)
        if answer.error is not None:
            self.note(f"no job follows this one, for Slurm has not taken any: {answer.error}; `resilient submit` goes on from here")

    async def _successor(self, duty: Any, timeout_s: float, code: Exit = Exit.OK, *, patience_s: float | None = None) -> Answer:
        if self.chain is None or self.allocation is None:
            return Answer(call=0)
        chain, allocation = self.chain, self.allocation
        answer = await self.writer.call(
            lambda number: SeeToSuccessor(
                call=number,
                duty=duty,
                name=chain,
                job_id=allocation.job_id,
                max_jobs=self.config.slurm.max_jobs,
                patience_s=patience_s,
                exit_code=int(code),
            ),
            timeout_s,
            again=True,
        )
        if answer.error is not None:
            log.warning("the chain of jobs: %s", answer.error)
        return answer

    async def explain(self, finish: Finish, traceback: str) -> str:
        """What a person should know of the end; where it is a failure, the whole of it on a page of the run directory."""
        if finish.code not in (Exit.GAVE_UP, Exit.UNUSABLE) or self.writer.trouble_s is not None:
            return finish.message
        answer = await self.writer.call(
            lambda number: Diagnose(call=number, exit_code=int(finish.code), message=finish.message, traceback=traceback),
            DIAGNOSIS_S,
        )
        if answer.error is not None:
            log.warning("the diagnosis: %s", answer.error)
            return finish.message
        return answer.text
