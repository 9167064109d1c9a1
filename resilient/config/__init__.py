"""The campaign's config: `schema` (what it may say), `source` (reading it), `checks` (what must fit together)."""

from resilient.config.schema import Config

__all__ = ["Config"]
