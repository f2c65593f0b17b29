"""What a client that means harm sends; `python -m bench.hostile` runs all of it against a server on this machine."""
