"""`ckpt export`: a checkpoint in a form that others read.

Owns the forms `zarr` and `torch`, and finding further ones: packages that know what the arrays mean add theirs through the
entry-point group `resilient.exporters`. Changes no checkpoint.

Such an entry point is a function `(checkpoint: Path, output: Path, *, float32: bool) -> str`. It writes the file or directory
`output`, which is not there before, and returns what it has written, in a few words. It raises CheckpointError where it cannot.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from checkpoint.tools import aside
from checkpoint.tools.refusal import UNUSABLE, WRONG, Refusal

EXPORTERS = "resilient.exporters"

Progress = Callable[[int], None]
Exporter = Callable[..., str]


def size_bytes(path: Path, only: Sequence[str]) -> int:
    """What `zarr` and `torch` read. Raises DamagedCheckpoint; Refusal where `only` fits nothing."""
    from checkpoint.loading import Opened
    from checkpoint.tools import stream

    arrays = Opened(path).contents.arrays
    return sum(stream.size_bytes(arrays[name]) for name in stream.chosen([*arrays], only))


def export(
    path: Path,
    form: str,
    output: Path,
    *,
    only: Sequence[str] = (),
    float32: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> str:
    """Write a checkpoint in another form; say what was written. `output` appears whole or not at all.

    Args:
        path: a committed checkpoint.
        form: `zarr`, `torch`, or the name of an entry point.
        output: file or directory to make.
        only: patterns of array names; none for all.
        float32: widen smaller floats to 32 bits, and round float64 to them.
        force: replace an earlier export.
        progress: called with the bytes read since its last call; not by exporters of other packages.

    Raises Refusal, CheckpointError, OSError.
    """
    write = {"zarr": _zarr, "torch": _torch}.get(form)
    if write is not None:
        with aside.appearing(output, force=force) as beside:
            return write(path, beside, only, float32, progress or (lambda count: None))
    exporter = _exporter(form)
    if only:
        raise Refusal(f"--only has no meaning for {form}: it takes the arrays that it needs", WRONG)
    with aside.appearing(output, force=force) as beside:
        return exporter(path, beside, float32=float32)


def _exporter(form: str) -> Exporter:
    points = {point.name: point for point in entry_points(group=EXPORTERS)}
    if form in points:
        found: Exporter = points[form].load()
        return found
    if form == "hf":
        raise Refusal(f"no installed package exports to hf (entry-point group {EXPORTERS}); install the one that trained", UNUSABLE)
    raise Refusal(f"there is no format {form}; there are {', '.join(sorted({'torch', 'zarr', *points}))}", WRONG)


def _torch(path: Path, output: Path, only: Sequence[str], float32: bool, progress: Progress) -> str:
    import torch

    from checkpoint.loading import Opened
    from checkpoint.local_shard import LocalShard
    from checkpoint.tools import stream

    with closing(Opened(path)) as source:
        arrays = source.contents.arrays
        found: dict[str, Any] = {}
        for name in stream.chosen([*arrays], only):
            if name == "state":
                raise Refusal("an array is called state, which is where the small state goes; leave it out with --only", WRONG)
            info = arrays[name]
            data = torch.empty(info.shape, dtype=getattr(torch, info.dtype))
            source.fill([LocalShard(name, info.shape, (0,) * data.dim(), data, (1,) * data.dim())])
            found[name] = data.float() if float32 and data.is_floating_point() else data
            progress(data.nbytes)
    try:
        with output.open("wb") as file:
            torch.save({**found, "state": source.contents.state}, file)
    except RuntimeError as error:  # torch's own writer says it instead of what the file has said
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    return f"{len(found)} arrays and the state for torch.load"


def _zarr(path: Path, output: Path, only: Sequence[str], float32: bool, progress: Progress) -> str:
    import torch
    import zarr
    from zarr.codecs import BytesCodec

    from checkpoint import layout, manifest
    from checkpoint.elements import BITS_OF, element
    from checkpoint.loading import Opened
    from checkpoint.metadata import ATTRIBUTE, NAME, consolidated
    from checkpoint.tools import stream

    with closing(Opened(path)) as source:
        contents = source.contents
        names = stream.chosen([*contents.arrays], only)
        chunk_bytes = 4 * layout.CHUNK_TARGET_BYTES
        about = {"version": manifest.VERSION, "step": contents.step, "generation": contents.generation, "state": contents.state}
        root = zarr.create_group(store=str(output), attributes={ATTRIBUTE: about})
        for name in names:
            info = contents.arrays[name]
            widened = float32 and getattr(torch, info.dtype).is_floating_point
            kind = element("float32") if widened else info.element
            chunk = layout.chunk_shape(info.shape, kind.size_bytes, tuple(max(1, length) for length in info.shape), chunk_bytes)
            array = root.create_array(
                name,
                shape=info.shape,
                dtype=kind.stored,
                chunks=chunk,
                serializer=BytesCodec(),
                compressors=None,
                filters=None,
                fill_value=0,
                attributes={} if kind.stored == kind.name else {BITS_OF: kind.name},
            )
            for box in stream.boxes(info.shape, max(kind.size_bytes, info.element.size_bytes), [chunk, info.chunk]):
                data = stream.read(source, info, box)
                progress(data.nbytes)
                numbers = data.float() if widened else data
                if not widened and kind.stored != kind.name:
                    numbers = data.view(getattr(torch, kind.stored))
                offset, extent = box
                array[tuple(slice(start, start + length) for start, length in zip(offset, extent, strict=True))] = numbers.numpy()
    files = {f"{each.relative_to(output)}": each.read_bytes() for each in output.rglob(NAME)}
    (output / NAME).write_bytes(consolidated(files, zarr.config.get("json_indent")))
    return f"{len(names)} arrays in chunks of about {chunk_bytes / 2**20:g} MiB"
