"""Origins: where shards come from (OSS, local files, any fsspec filesystem)."""
