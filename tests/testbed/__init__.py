"""Real parts for the demo and the end-to-end tests: checkpoint, trainer, relay and server."""
