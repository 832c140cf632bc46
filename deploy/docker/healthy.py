"""HEALTHCHECK of the image: exit 0 if the worker says that its loop comes round, else 1 with what it said."""

import os
import sys
import urllib.error
import urllib.request

url = f"http://127.0.0.1:{os.environ.get('RFTSTREAM_METRICS_PORT', '9100')}/health"
try:
    with urllib.request.urlopen(url, timeout=8) as answer:
        print(answer.read().decode())
except (OSError, urllib.error.URLError) as error:
    said = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
    sys.exit(f"{url}: {error} {said}")
