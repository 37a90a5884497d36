"""``cachebench startup``: how long a daemon over a full cache takes to serve."""
