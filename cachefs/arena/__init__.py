"""The arena: sealed shared memory cut into slots, passed to readers over the session socket."""
