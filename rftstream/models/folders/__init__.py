"""Model folders: found, fetched, made, converted, uploaded, and identified by digests."""
