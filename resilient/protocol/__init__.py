"""The control plane's protocol: every message between driver and agents (`messages`), and the ends of their connection."""
