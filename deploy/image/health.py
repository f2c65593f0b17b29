"""HEALTHCHECK of the image: exit code 0 while GET /health says 200. The port is MULTILORA_PORT's."""

import os
import urllib.error
import urllib.request

try:
    urllib.request.urlopen(f"http://127.0.0.1:{os.environ.get('MULTILORA_PORT', '8000')}/health", timeout=4)
except (urllib.error.URLError, OSError) as error:
    raise SystemExit(f"unhealthy: {error}") from error
