"""The object store: on a disk or behind any URL that fsspec knows, with a cache on this machine."""
