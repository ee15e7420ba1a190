"""Simulates a plan on a machine: how long it would take, and where the time would go."""

from weft.simulate.losses import Losses, losses
from weft.simulate.result import Piece, Simulation
from weft.simulate.simulation import check_fits, run, simulate

__all__ = ["Losses", "Piece", "Simulation", "check_fits", "losses", "run", "simulate"]
