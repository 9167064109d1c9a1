"""The warm-up of a run that the command line made shorter than its file says. Pure.

Numbers that contradict each other in one place are an error, which `checks` tells. Here the command line wins over the file: a
warm-up of the file for which it leaves no room shrinks, and keeps its share of the run.
"""

from resilient.config.checks import spans
from resilient.config.schema import Config


def fitted(config: Config, written: Config) -> Config:
    """The config with a warm-up that fits, if the command line left no room for that of the file.

    Args:
        config: with the command line, which does not name a warm-up.
        written: the file alone; where its own warm-up does not fit either, nothing changes.
    """
    warmup, decay = spans(config)
    warmup_written, decay_written = spans(written)
    if config.optimizer.schedule == "constant" or warmup < decay or warmup_written >= decay_written:
        return config
    samples = warmup_written * decay // decay_written
    if config.optimizer.warmup_tokens is None:
        update = {"warmup_samples": samples}
    else:
        update = {"warmup_tokens": samples * config.model.seq_len}
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update=update)})


def described(config: Config, written: Config) -> str | None:
    """One line on a warm-up that is shorter than the file's because the run is; None where there is nothing to tell."""
    (warmup, decay), (warmup_written, decay_written) = spans(config), spans(written)
    if warmup >= warmup_written or decay >= decay_written:
        return None
    return f"the warm-up is {warmup} samples in place of {warmup_written}: the run is {decay} samples in place of {decay_written}"
