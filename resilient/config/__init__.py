"""The campaign's config: `schema` and `sections` (what it may say), `source` (reading it), `checks` and `parallelism` (what
must fit together)."""

from resilient.config.checks import spans
from resilient.config.dealing import Dealing
from resilient.config.errors import ConfigError, Problem
from resilient.config.parallelism import (
    Layout,
    against_compiling,
    dealing,
    layout,
    layouts,
    layouts_by_ranks,
    reduces_every,
    settle,
    with_fewer_replicas,
    with_shards,
)
from resilient.config.schema import Config
from resilient.config.source import attribute, dump, from_site, load, notes, place, write

__all__ = [
    "Config",
    "ConfigError",
    "Dealing",
    "Layout",
    "Problem",
    "against_compiling",
    "attribute",
    "dealing",
    "dump",
    "from_site",
    "layout",
    "layouts",
    "layouts_by_ranks",
    "load",
    "notes",
    "place",
    "reduces_every",
    "settle",
    "spans",
    "with_fewer_replicas",
    "with_shards",
    "write",
]
