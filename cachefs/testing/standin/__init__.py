"""The OSS stand-in server: a faithful, shapeable, faulty object store for tests and benches."""
