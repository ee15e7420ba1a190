"""Studies over many runs or simulations: explore, characterize, judge, C3, scaling."""
