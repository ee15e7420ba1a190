"""Measurements on this machine: starting ranks, links and hosts to measure on, the arms that take
turns, and the probes from which calibration describes the machine."""
