"""HEALTHCHECK of the image: exit code 0 while GET /ready says 200. The port is MULTILORA_PORT's.

Not /health, which says 200 while the model loads. http.client obeys no http_proxy, which is not for this container.
"""

import http.client
import os

connection = http.client.HTTPConnection("127.0.0.1", int(os.environ.get("MULTILORA_PORT", "8000")), timeout=4)
try:
    connection.request("GET", "/ready")
    answer = connection.getresponse()
    text = answer.read().decode(errors="replace")
except (OSError, http.client.HTTPException) as error:
    raise SystemExit(f"unhealthy: {error}") from error
if answer.status != 200:
    raise SystemExit(f"unhealthy: /ready says {answer.status}: {text}")
