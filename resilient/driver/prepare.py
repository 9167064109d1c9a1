"""What the entry point wants done once per job, before any rank starts: the function `prepare(config, progress)` of its module,
where it has one.

`run_prepare` runs it as a process of its own, so that the driver stays small and a Ctrl-C stays quick; the rest of this module is
that process. It speaks JSON lines: progress, and at the end an error if there was one.
"""

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilient import entry
from resilient.config import ConfigError, Problem, load
from resilient.lifeline import STOP_SIGNALS, die_with_parent, leave_stops_to_the_driver

Progress = Callable[[str, int, int], None]


class PrepareFailed(Exception):
    """The hook raised something that is not about the config; the text is its traceback."""


async def run_prepare(config_path: Path, entrypoint: str, log: Path, progress: Progress) -> None:
    """Run the hook of the entry point's module.

    Raises:
        ConfigError: the hook, or the import of the module, found the config wrong.
        PrepareFailed: anything else went wrong.
    """
    # A scheduler's stop is for the driver, but until the process is up far enough to ignore it, it ends the process.
    while (code := await _attempt(config_path, entrypoint, log, progress)) < 0 and -code in STOP_SIGNALS:
        pass
    if code != 0:
        raise PrepareFailed(f"the preparation of {entrypoint} ended with exit code {code}; its output is in {log}")


async def _attempt(config_path: Path, entrypoint: str, log: Path, progress: Progress) -> int:
    """Run the hook once; the exit code of its process."""
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "resilient.driver.prepare", str(config_path), entrypoint, str(os.getpid())],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                continue  # something that the module printed
            _understand(message, progress)
        return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _understand(message: Any, progress: Progress) -> None:
    match message:
        case {"progress": [str(what), int(done), int(total)]}:
            progress(what, done, total)
        case {"problems": [*problems]}:
            raise ConfigError([Problem(key=key, value=value, message=text) for key, value, text in problems])
        case {"failed": str(text)}:
            raise PrepareFailed(text)


def _hook(config_path: Path, entrypoint: str) -> dict[str, object] | None:
    """Run the hook in this process; the message to send about it, None if all went well."""
    module, problem = entry.find(entry.parse(entrypoint), trace=sys.stderr)
    if problem is not None:
        return {"problems": [["entrypoint", entrypoint, problem]]}
    prepare = getattr(module, "prepare", None)
    if prepare is None:
        return None
    try:
        prepare(load(config_path), lambda what, done, total: _say({"progress": [what, int(done), int(total)]}))
    except ConfigError as error:
        return {"problems": [[p.key, p.value, p.message] for p in error.problems]}
    except Exception:  # noqa: BLE001 - whatever it is, it is told to the driver, which ends the run
        return {"failed": traceback.format_exc()}
    return None


def _say(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message, default=str) + "\n")
    sys.stdout.flush()


def main() -> int:
    config_path, entrypoint, parent = sys.argv[1:]
    leave_stops_to_the_driver()
    die_with_parent(int(parent))
    message = _hook(Path(config_path), entrypoint)
    if message is not None:
        _say(message)
    return 0


if __name__ == "__main__":
    sys.exit(main())
