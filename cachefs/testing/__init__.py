"""Shipped test tools: the OSS stand-in, faulty origins, a manual clock, the contract suites."""
