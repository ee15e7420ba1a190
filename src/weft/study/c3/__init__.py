"""Concurrent compute and communication (C3): independent GEMMs and collectives at the same time,
under every strategy, simulated on a machine or measured here."""
