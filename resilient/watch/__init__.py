"""`resilient watch`: whether campaigns get on, for a login node or cron, and whom to tell when that changes."""
