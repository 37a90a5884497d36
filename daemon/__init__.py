"""gpufeed.daemon: the per-node daemon and the `gpufeed` command."""
