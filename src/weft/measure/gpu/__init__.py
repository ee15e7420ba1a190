"""What `weft doctor --gpu` examines: devices, peers, who copies, and whether results are exact.

Each file is one of the points of the report; `examine.py` runs them on the ranks.
"""
