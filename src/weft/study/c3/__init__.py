"""Concurrent compute and communication (C3): independent GEMMs and collectives side by side, under
every strategy, simulated on a machine or measured here."""
