"""Imported last by the fork server of tests: garbage collection never looks at what is there by then, in none of its processes.

The runtime's own fork server does the same. Otherwise each process walks over all that is imported, and so copies its pages.
"""

import gc

gc.freeze()
