"""Runs a plan on a fabric: the agreement of the ranks, the executor, recording and explanations."""
