"""Questions asked of many runs or simulations at once: explore, characterize, judge, C3, scale."""
