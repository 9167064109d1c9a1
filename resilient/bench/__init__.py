"""`resilient bench`: which layout is the fastest on this machine. Each cell of a grid is run as a short campaign of its own."""
