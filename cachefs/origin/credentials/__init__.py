"""Credentials of OSS: where they come from, and how they are kept fresh. See `chain`."""
