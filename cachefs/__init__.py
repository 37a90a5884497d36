"""gpufeed.cachefs: the cache library. Import from its modules; this file stays empty on purpose.

An eager import here would load lmdb and the event loop into every training process.
"""
