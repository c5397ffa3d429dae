"""The engine: one loop over rounds, and the federations that run it."""
