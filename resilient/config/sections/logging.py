"""What a person sees of a campaign."""

from typing import Literal

from pydantic import Field

from resilient.config.fields import Count, Flag, NonNegative, Section
from resilient.config.sinks import Sinks


class Logging(Section):
    """What a person sees."""

    tensorboard: Flag = True
    tensorboard_queue_size: Count = Field(10, description="scalars kept before they are written")
    log_interval: Count = Field(1, description="steps between lines of the log, and between points in TensorBoard")
    timers: Flag = Field(True, description="seconds of each phase of a step, in the metrics")
    memory: Flag = Field(True, description="peak memory of rank 0, in the metrics")
    batch_size: Flag = Field(True, description="the global batch size, in the metrics")
    world_size: Flag = Field(False, description="ranks, in the metrics")
    validation_ppl: Flag = Field(True, description="perplexity beside the validation loss")
    profile_steps: tuple[Count, Count] | None = Field(
        None,
        description="first and last step recorded by torch.profiler; traces go to profile/ in the run directory, one for each "
        "restart that computes any of these steps",
    )
    profile_ranks: list[NonNegative] = Field([0], description="ranks that record a trace")
    inspect_step: Count | None = Field(
        None,
        description="a step of which rank 0 measures, by torch.profiler, the tensors that it holds and how long it communicates; "
        "`resilient bench` takes the last one of the warm-up",
    )
    nvtx: Flag = Field(False, description="NVTX ranges of the phases, for Nsight Systems; on GPUs")
    progress: Literal["auto", "live", "plain", "none"] = Field(
        "auto",
        description="display on the terminal; live: events and a status line; plain: events, and the step now and then; none: no "
        "events; auto: live on a terminal, else plain",
    )
    level: Literal["debug", "info", "warning", "error"] = "info"
    sinks: Sinks = Sinks()
