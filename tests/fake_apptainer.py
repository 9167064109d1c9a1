"""apptainer and singularity, without a container: `exec` takes the options that are documented, and runs the command here.

What is to be bound must be there, as for the real ones. `$CONTAINER_CALLS/<host>-<process>.json` says how it was called.
"""

import json
import os
import sys
from pathlib import Path


def main(arguments: list[str]) -> None:
    kind, *rest = arguments
    if kind != "exec":
        sys.exit(f"FATAL: {kind} is not known here")
    called: dict[str, list[str]] = {"--nv": [], "--bind": [], "--pwd": [], "--env": []}
    while rest and rest[0].startswith("-"):
        name = rest.pop(0)
        called[name].append("" if name == "--nv" else rest.pop(0))
    image, *command = rest
    if not Path(image).exists():
        sys.exit(f"FATAL: could not open image {image}")
    for bind in called["--bind"]:
        if not Path(bind.partition(":")[0]).exists():
            sys.exit(f"FATAL: container creation failed: mount {bind}: no such file or directory")
    record = {"program": Path(sys.argv[0]).name, "image": image, "command": command, **called}
    # Hosts of the lab count their processes each for itself.
    Path(os.environ["CONTAINER_CALLS"], f"{os.uname().nodename}-{os.getpid()}.json").write_text(json.dumps(record))
    environ = {**os.environ, "APPTAINER_CONTAINER": image, "APPTAINER_BIND": ",".join(called["--bind"])}
    environ |= dict(each.split("=", 1) for each in called["--env"])
    os.chdir(called["--pwd"][-1])
    os.execvpe(command[0], command, environ)


if __name__ == "__main__":
    main(sys.argv[1:])
