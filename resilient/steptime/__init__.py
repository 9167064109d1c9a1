"""How long a step of a layout takes, before it is tried: work that the entry point's module counts, at measured rates."""
