"""The sections of a config, by theme: their keys, types, defaults and ranges. `resilient.config.schema` puts them together."""
