"""Questions asked of many runs or simulations at once: explore, characterize, c3."""
