"""Makes a bucket if there is none of the name: python bucket.py NAME. Where and with which keys: AWS_*."""

import sys

import s3fs

store = s3fs.S3FileSystem(use_listings_cache=False)
if store.exists(sys.argv[1]):
    print(f"{sys.argv[1]}: is there")
else:
    store.mkdir(sys.argv[1])
    print(f"{sys.argv[1]}: made")
