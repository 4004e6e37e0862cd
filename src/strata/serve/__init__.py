"""The server: an HTTP process that imports no torch, and an engine process, joined by a pipe."""
