"""checkpoint: sharded, verified checkpoints in Zarr v3 (placeholder docstring; see the package's modules)."""
