"""The campaign's config: `schema` (what it may say), `source` (reading it), `checks` (what must fit together)."""

from resilient.config.checks import Layout, layout
from resilient.config.errors import ConfigError, Problem
from resilient.config.schema import Config
from resilient.config.source import attribute, dump, load

__all__ = ["Config", "ConfigError", "Layout", "Problem", "attribute", "dump", "layout", "load"]
