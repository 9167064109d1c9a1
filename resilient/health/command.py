"""`resilient doctor`: of a machine, of a batch script, or of a campaign's security; its exit code."""

from collections.abc import Sequence
from pathlib import Path

from typer import BadParameter

from resilient.exits import Exit


def doctor(
    config: Path | None, overrides: Sequence[str], security: Path | None, *, limit_s: float, as_json: bool
) -> tuple[Exit, bool]:
    """Examine what is asked for, and print what was found.

    Args:
        config: or a batch script; security: a run directory. As of the command, as are the others.

    Returns:
        The exit code, and whether processes are left that do not end.

    Raises:
        BadParameter: a config is of no use with `security`.
    """
    if security is not None:
        if config is not None:
            raise BadParameter("a config is not looked at with --security RUN_DIR", param_hint="CONFIG")
        return _security(security, as_json=as_json), False
    if config is not None:
        from resilient.batch import command

        if (data := command.script_in(config)) is not None:
            findings = command.examine(config, data)
            command.show(config, findings, as_json=as_json)
            return Exit.CONFIG if findings else Exit.OK, False

    from resilient.health.doctor import examine, show, subject

    report = examine(subject(config, list(overrides)), limit_s, quiet=as_json)
    show(report, as_json=as_json)
    return Exit.OK if report.ok else Exit.UNUSABLE, bool(report.left_behind)


def _security(run_dir: Path, *, as_json: bool) -> Exit:
    from resilient.health.doctor import show
    from resilient.health.security import inspect

    found = inspect(run_dir)
    show(found, as_json=as_json)
    return Exit.OK if found.ok else Exit.UNUSABLE
