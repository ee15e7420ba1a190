"""Whole models, layer by layer: what a step takes on a machine, and what overlap saves of it."""
