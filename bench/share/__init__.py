"""``cachebench share``: what it costs to share one arena among the readers of a node."""
