"""The object store: on a disk or behind any URL that fsspec supports, with a cache on this machine."""
