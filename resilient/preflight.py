"""What keeps a campaign from starting, as far as its config and its run directory tell.

`resilient run` and `resilient submit` ask the same: no job waits in a queue for what refuses it at once. Nothing is changed.
"""

from collections.abc import Sequence
from pathlib import Path

from resilient.access import must_be_ours
from resilient.config import Config, ConfigError, Problem, attribute
from resilient.entry import must_hide_nothing, parse
from resilient.identity import record
from resilient.run_dir_config import must_not_be_foreign
from resilient.sinks.packages import missing


def must_be_startable(file: Path, overrides: Sequence[str], config: Config, *, sinks: bool = True) -> None:
    """Refuse what cannot be started.

    Args:
        file, overrides: that the config was loaded from.
        sinks: whether their packages are looked for: those of this Python are the ones that count.

    Raises:
        ConfigError: a module of the program hides the runtime, the run directory has a config of something else, this config is of
            a run directory that was moved, or a sink lacks its package.
        EnvironmentUnusable: somebody else could have written the config or a control file of the run directory.
    """
    must_be_ours(file, config.run_dir, config.run_dir_mode)
    try:
        must_hide_nothing(parse(config.entrypoint).directory)
        must_not_be_foreign(config.run_dir)
        _must_not_be_moved(file, config.run_dir, overrides)
        if sinks and (problems := missing(config)):
            raise ConfigError(problems)
    except ConfigError as error:
        raise attribute(error, file, overrides) from None


def _must_not_be_moved(file: Path, run_dir: Path, overrides: Sequence[str]) -> None:
    """A run directory's own config names it: elsewhere it would begin the campaign anew, in the old place. Raises ConfigError."""
    here = file.absolute().parent
    named = any(each.startswith("run_dir=") for each in overrides)
    if named or not (here / record.FILE).exists() or (run_dir.exists() and here.samefile(run_dir)):
        return
    why = (
        f"this config is of a run directory that was moved or copied to {here}: move it back, or name run_dir and all tiers' paths"
    )
    raise ConfigError([Problem("run_dir", run_dir, why)])
