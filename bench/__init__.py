"""cachebench: workloads, measuring and reports."""
