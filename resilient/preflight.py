"""What keeps a campaign from starting, as far as its config and its run directory tell.

`resilient run` and `resilient submit` ask the same: no job waits in a queue for what refuses it at once. Nothing is changed.
"""

from collections.abc import Sequence
from pathlib import Path

from resilient.access import must_be_ours
from resilient.answering import must_answer
from resilient.config import Config, ConfigError, Problem, attribute
from resilient.config.timeouts import timeouts
from resilient.entry import must_hide_nothing, parse
from resilient.identity import record
from resilient.run_dir_config import must_not_be_foreign
from resilient.sinks.packages import missing


def must_be_startable(file: Path, overrides: Sequence[str], config: Config, *, in_a_job: bool = False) -> None:
    """Refuse what cannot be started.

    Args:
        file, overrides: that the config was loaded from.
        in_a_job: a job of Slurm will start it, which may have packages and files that are not here.

    Raises:
        ConfigError: there is no such script, a module of the program hides the runtime, the run directory has a config of something
            else, this config is of a run directory that was moved, or a sink lacks its package.
        EnvironmentUnusable: somebody else could have written the config or a control file of the run directory.
        DoesNotAnswer: this directory's file system, or the one of the durable tier, hangs.
    """
    needed = {"run_dir": config.run_dir, "checkpoint.tiers": config.checkpoint.tiers[-1].path}
    must_answer(needed, timeouts(config).run_dir_patience_s)
    must_be_ours(file, config.run_dir, config.run_dir_mode)
    try:
        _must_have_script(config, in_a_job)
        must_hide_nothing(parse(config.entrypoint).directory)
        must_not_be_foreign(config.run_dir)
        _must_not_be_moved(file, config.run_dir, overrides)
        if not (in_a_job and config.slurm.other_packages) and (problems := missing(config)):
            raise ConfigError(problems)
    except ConfigError as error:
        raise attribute(error, file, overrides) from None


def _must_have_script(config: Config, in_a_job: bool) -> None:
    """The script is there, unless it may be in an image, or where a job finds it. Raises ConfigError."""
    script = parse(config.entrypoint).script
    if script is None or config.slurm.container is not None:
        return
    if in_a_job and (config.slurm.setup or not script.absolute().parent.is_dir()):
        return
    try:
        script.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError([Problem("entrypoint", script, "there is no such file")]) from None
    except OSError:
        return  # a rank is told what is wrong with it


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
