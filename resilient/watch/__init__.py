"""`resilient watch`: whether campaigns make progress, for a login node or cron, and whom to tell when that changes."""
